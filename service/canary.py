"""A drafter's canary: rows that its target once produced and the tokens that followed, drafted again before anything is served.

    draft-engine canary     once, beside the target: record rows and tokens, and how many drafts agreed with them
    draft-engine serve      before it is ready, and at every reload: draft the same blocks; half as many must agree

A drafter that loads and answers may still be useless: with other weights, a wrong rotary base, a kernel that masks causally. No
error tells, and its target's output does not either. Here the drafts themselves do, without any traffic. A checkpoint without a
recorded canary is only held to drafts that are finite and inside the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import Field
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draft_model.drafter import ContextWrite, Drafter, DraftProposal, DraftRequest
from draft_model.errors import CheckpointError
from draft_model.target_model import TargetModel
from service.errors import StartupError
from service.settings import ServeSettings

FILE_NAME = "canary.safetensors"
LIKELY_FIELDS = (
    "target_layer_ids and their order, dtype, rope_theta and rope scaling, mask_token_id, weights, attention_backend"
)
_STRIDE = 2
_MIN_RECORDED = 0.1


class CanarySettings(ServeSettings):
    """Recording a canary."""

    prompt: str = Field(
        "Write one paragraph about how rivers shape the land they flow through.", description="What the target continues."
    )
    num_rows: int = Field(96, ge=24, le=4096, description="Rows to record.")


@dataclass(frozen=True)
class Canary:
    """What a target did once.

    Args:
        features: [n, F] rows of positions [0, n)
        token_ids: [n + 1] the tokens there and the one after
        first_anchor: position of the first token that the target chose itself
        agreed: drafts that were the target's own tokens when it was recorded; see `agreement`
    """

    features: Tensor
    token_ids: list[int]
    first_anchor: int
    agreed: int = 0


@dataclass(frozen=True)
class Agreement:
    """Of `drafted` drafts the first ones of each block that were the recorded tokens; `problem` names drafts that are unfit."""

    agreed: int
    drafted: int
    problem: str | None = None


def canary_problems(drafter: Drafter, folder: Path) -> tuple[str, ...]:
    """Draft the canary of a checkpoint; returns what is wrong, for people. The drafter must not serve yet.

    Raises:
        CheckpointError: the file of the canary is damaged, or is of another target.
    """
    canary = load_canary(folder)
    if canary is None:
        rows = torch.randn(4, drafter.config.feature_width, generator=torch.Generator().manual_seed(0))
        found = agreement(drafter, Canary(rows, [0] * 5, first_anchor=1))
        return () if found.problem is None else (f"canary_failed: {found.problem}",)
    if canary.features.shape[1] != drafter.config.feature_width:
        raise CheckpointError(
            f"{folder / FILE_NAME} has rows of {canary.features.shape[1]} values; "
            f"this drafter takes {drafter.config.feature_width}"
        )
    found = agreement(drafter, canary)
    if found.problem is not None:
        return (f"canary_failed: {found.problem}",)
    if 2 * found.agreed < canary.agreed:
        return (
            f"canary_failed: {found.agreed} of {found.drafted} drafts agree with what the target said; "
            f"{canary.agreed} did when the canary was recorded. Check {LIKELY_FIELDS}",
        )
    return ()


def agreement(drafter: Drafter, canary: Canary) -> Agreement:
    """Draft after every few rows and count the drafts that the target would have kept.

    Greedy and without the context's own n-grams, which would agree whatever the weights are.
    """
    features, token_ids = canary.features, canary.token_ids
    size, width = drafter.config.max_draft_tokens, drafter.draft_block_size
    num_rows = min(len(features), (drafter.cache.num_pages - 1) * drafter.page_size - width)
    pages = list(range(1, 1 + -(-(num_rows + width) // drafter.page_size)))
    if num_rows < canary.first_anchor:
        return Agreement(0, 0)
    drafter.write_context([ContextWrite(pages, 0, 0, features[:num_rows])])
    agreed = drafted = 0
    # Backwards, since a block writes its scratch rows over those after its anchor.
    for anchor in range(num_rows, canary.first_anchor - 1, -_STRIDE):
        (proposal,) = drafter.draft([DraftRequest(pages, anchor, anchor, token_ids[anchor], size)])
        problem = _unfit(proposal, drafter.config.vocab_size)
        if problem is not None:
            return Agreement(agreed, drafted, problem)
        expected = token_ids[anchor + 1 : anchor + 1 + size]
        drafted += len(expected)
        for draft, token in zip(proposal.token_ids, expected, strict=False):
            if draft != token:
                break
            agreed += 1
    return Agreement(agreed, drafted)


def _unfit(proposal: DraftProposal, vocab_size: int) -> str | None:
    if not all(0 <= token < vocab_size for token in proposal.token_ids):
        return "drafts are outside the vocabulary"
    if not all(map(math.isfinite, (*proposal.confidence, *proposal.survival))):
        return "confidence is not finite: the weights or the arithmetic of this device are broken"
    return None


def load_canary(folder: Path) -> Canary | None:
    """Read a checkpoint's canary; None where it has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as stored:
            features, token_ids = stored.get_tensor("features"), stored.get_tensor("token_ids").tolist()
            first_anchor, agreed = (int(stored.metadata()[name]) for name in ("first_anchor", "agreed"))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a canary: {error}") from error
    if features.ndim != 2 or len(token_ids) != len(features) + 1:
        raise CheckpointError(f"{file}: {list(features.shape)} rows do not go with {len(token_ids)} tokens")
    return Canary(features, token_ids, first_anchor, agreed)


def save_canary(folder: Path, canary: Canary) -> None:
    """Write a checkpoint's canary."""
    tensors = {"features": canary.features.to(torch.float16), "token_ids": torch.tensor(canary.token_ids, dtype=torch.int32)}
    save_file(tensors, folder / FILE_NAME, metadata={"first_anchor": str(canary.first_anchor), "agreed": str(canary.agreed)})


def record(drafter: Drafter, target: TargetModel, prompt: list[int], num_rows: int) -> Canary:
    """Let the target continue a prompt greedily, keep its rows and tokens, and count the drafts that agree.

    Raises:
        StartupError: hardly any do, so that the drafter is not fit to be measured against; or the prompt fills all rows.
    """
    if len(prompt) >= num_rows:
        raise StartupError(f"the prompt has {len(prompt)} tokens, which leaves nothing of {num_rows} rows: raise --num-rows")
    cache = target.new_cache(1, len(prompt) + num_rows + 1)
    token_ids, rows = list(prompt), []
    layers = tuple(sorted(drafter.config.target_layer_ids))
    fed = 0
    while len(token_ids) <= num_rows:
        step = torch.tensor([token_ids[fed:]])
        output = target.forward(step, torch.tensor([fed]), cache, layers)
        rows.append(output.features[0])
        fed = len(token_ids)
        token_ids.append(int(target.logits(output.hidden[0, -1:]).argmax()))
    canary = Canary(torch.cat(rows)[:num_rows].to(torch.float16), token_ids[: num_rows + 1], len(prompt))
    found = agreement(drafter, canary)
    if found.agreed < _MIN_RECORDED * found.drafted:
        raise StartupError(f"only {found.agreed} of {found.drafted} drafts agree with the target. Check {LIKELY_FIELDS}")
    return replace(canary, agreed=found.agreed)


def run_canary(settings: CanarySettings, console: Console) -> int:
    """Record the canary of a drafter of the embedded target's kind; returns the exit code.

    Raises:
        StartupError: the target is missing, or the drafter is not fit.
        CheckpointError: a checkpoint cannot be loaded.
    """
    from service.loading import load_drafter, model_folders
    from service.target.text import TargetTokenizer

    path, target_path = model_folders(settings)
    if target_path is None:
        raise StartupError("a canary needs the drafter's target: --target-model")
    drafter = load_drafter(settings, path, target_path)
    tokenizer = TargetTokenizer(target_path)
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": settings.prompt}]))
    canary = record(drafter, TargetModel.load(target_path), prompt, settings.num_rows)
    save_canary(path, canary)
    console.print(f"{path / FILE_NAME}: {settings.num_rows} rows; {canary.agreed} drafts agree with the target")
    return 0
