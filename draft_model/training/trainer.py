"""The training loop: batches in, resumable checkpoints and held-out acceptance out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from draft_model.backbone.mla_dense import DenseMlaDraft
from draft_model.training.dataset import Batch, BatchStream, CachedSequence
from draft_model.training.evaluation import Acceptance, measure_acceptance
from draft_model.training.losses import LossWeights, block_losses


@dataclass(frozen=True)
class TrainerSettings:
    """Steps, learning rate and intervals of one run."""

    total_steps: int
    learning_rate: float
    warmup_share: float = 0.03
    cooldown_share: float = 0.6
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    evaluate_every: int = 500
    checkpoint_every: int = 250


class Trainer:
    """AdamW with linear warm-up and a linear cool-down over the model's own parameters (embedding and head are frozen)."""

    def __init__(
        self,
        model: DenseMlaDraft,
        stream: BatchStream,
        held_out: list[CachedSequence],
        *,
        target_to_draft: Tensor,
        draft_to_target: Tensor,
        block_size: int,
        loss_weights: LossWeights,
        settings: TrainerSettings,
        checkpoint: Path,
    ) -> None:
        """Args:
        model: on its device
        stream: gives the batch of any step
        held_out: greedy answers that the stream never shows
        target_to_draft: [V] draft id of each target id, -1 where there is none
        draft_to_target: [D]
        block_size: slots per block
        loss_weights: see LossWeights
        settings: see TrainerSettings
        checkpoint: file that is written while training and read when a run is continued
        """
        self.model = model
        self.settings = settings
        self._stream = stream
        self._held_out = held_out
        self._device = model.lm_head.device
        self._target_to_draft = target_to_draft.to(self._device)
        self._draft_to_target = draft_to_target.to(self._device)
        self._block_size = block_size
        self._loss_weights = loss_weights
        self._checkpoint = checkpoint
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._learning_rate_factor)
        self.step = 0
        self.history: list[dict[str, float]] = []

    def _learning_rate_factor(self, step: int) -> float:
        """Warm up, stay, and fall to zero; a run may be given another end while it stays."""
        total = self.settings.total_steps
        warmup = max(1, round(self.settings.warmup_share * total))
        cooldown = max(1, round(self.settings.cooldown_share * total))
        return min((step + 1) / warmup, 1.0, max(0.0, (total - step) / cooldown))

    def resume(self) -> bool:
        """Continue from the checkpoint file if there is one."""
        if not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.step, self.history = state["step"], state["history"]
        return True

    def save(self) -> None:
        """Write the checkpoint file, whole or not at all."""
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self._checkpoint.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "step": self.step,
            "history": self.history,
        }
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def run(self, report: Callable[[str], None], stop_at: int | None = None) -> Acceptance:
        """Train to the last step (or to `stop_at`), reporting a line at each evaluation; returns the last acceptance."""
        last = min(self.settings.total_steps, stop_at or self.settings.total_steps)
        batches = self._stream.from_step(self.step)
        started, first = time.monotonic(), self.step
        with tqdm(total=last, initial=self.step, unit="step", desc="train") as progress:
            while self.step < last:
                metrics = self._train_step(next(batches))
                self.step += 1
                progress.update()
                if self.step % 20 == 0:
                    progress.set_postfix({name: f"{value:.3f}" for name, value in metrics.items()})
                if self.step % self.settings.checkpoint_every == 0:
                    self.save()
                if self.step % self.settings.evaluate_every == 0:
                    rate = (self.step - first) / (time.monotonic() - started)
                    self._evaluate(metrics, rate, report)
        self.save()
        return self._evaluate({}, 0.0, report)

    def _train_step(self, batch: Batch) -> dict[str, float]:
        self.model.train()
        ids, device = batch.token_ids.to(self._device), self._device
        output = self.model(batch.features.to(device), ids[:, :, 0], batch.anchors.to(device), ids[:, :, :-1])
        losses = block_losses(
            output.logits,
            output.confidence,
            self._target_to_draft[ids[:, :, 1:]],
            self._target_to_draft[batch.topk_ids.to(device)],
            batch.topk_probs.to(device),
            batch.valid.to(device),
            self._loss_weights,
        )
        self._optimizer.zero_grad(set_to_none=True)
        losses.total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        self._optimizer.step()
        self._schedule.step()
        return {
            "ce": float(losses.cross_entropy),
            "tv": float(losses.total_variation),
            "conf": float(losses.confidence),
            "agree": float(losses.agreement),
        }

    def _evaluate(self, metrics: dict[str, float], rate: float, report: Callable[[str], None]) -> Acceptance:
        self.model.eval()
        acceptance = measure_acceptance(self.model, self._held_out, self._draft_to_target, self._block_size)
        positions = " ".join(f"{share:.3f}" for share in acceptance.by_position)
        losses = " ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        length = f"{acceptance.acceptance_length:.3f} ({positions})"
        report(f"step {self.step}: held-out acceptance length {length} {losses} {rate:.2f} steps/s")
        self.history.append({"step": self.step, "acceptance_length": acceptance.acceptance_length, **metrics})
        return acceptance
