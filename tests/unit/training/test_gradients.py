"""The gradients of our losses, through a plain dense draft, against those recorded from the public reference.

The draft below is written out for autograd and shares no code with the packages; that it is the right one is checked by its
logits. Shape symbols: B sequences, A anchors, S slots, L tokens, E hidden_size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from draft_model.training.losses import LossWeights, block_losses

GOLDEN = Path(__file__).parents[2] / "golden"


class DenseDraft:
    """A Qwen3 DSpark draft as functions of its tensors, every block at once: [B, A * S] queries over context and own block."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        frozen = {"embed_tokens.weight", "lm_head.weight"}
        self.tensors = {
            name: tensor.requires_grad_(name not in frozen) for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, T, D] at positions [B, T]."""
        half = x.shape[-1] // 2
        frequency = self.config["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        angle = positions[:, None, :, None] * frequency
        first, second = x.split(half, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attend(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor, prefix: str) -> Tensor:
        """x [B, T, E] normed block states, context [B, L, E], mask [B, T, L + T]."""
        head_dim, batch = self.config["head_dim"], len(x)
        everything = torch.cat([context, x], dim=1)
        at = torch.cat([torch.arange(context.shape[1]).expand(batch, -1), positions], dim=1)

        def heads(states: Tensor, name: str) -> Tensor:
            return self.linear(states, f"{prefix}.{name}_proj").unflatten(-1, (-1, head_dim))

        query = self.rotate(self.norm(heads(x, "q"), f"{prefix}.q_norm").transpose(1, 2), positions)
        key = self.rotate(self.norm(heads(everything, "k"), f"{prefix}.k_norm").transpose(1, 2), at)
        value = heads(everything, "v").transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], enable_gqa=True)
        return self.linear(mixed.transpose(1, 2).flatten(2), f"{prefix}.o_proj")

    def hidden(self, tokens: Tensor, anchors: Tensor, features: Tensor) -> Tensor:
        """[B, A, S, E] final states of the blocks at anchors [B, A] of tokens [B, L]."""
        slots, (batch, num_anchors) = self.config["block_size"], anchors.shape
        block = torch.full((batch, num_anchors, slots), self.config["mask_token_id"])
        block[..., 0] = tokens.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(slots)).flatten(1)
        owner = torch.arange(num_anchors).repeat_interleave(slots)
        before = torch.arange(tokens.shape[1]) < anchors[:, owner, None]
        own = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat([before, own], dim=-1)

        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        x = F.embedding(block.flatten(1), self.tensors["embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}"
            x = x + self.attend(self.norm(x, f"{prefix}.input_layernorm"), context, positions, mask, f"{prefix}.self_attn")
            normed = self.norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (self.linear(normed, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{prefix}.mlp.down_proj")
        return self.norm(x, "norm").unflatten(1, (num_anchors, slots))

    def cell(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What W2 reads, [B, A, S, rank]: the previous tokens' embeddings, or the outputs of a recurrent cell over them."""
        if "markov_head.joint_proj.weight" not in self.tensors:
            return embedded
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(embedded.shape[-2]):
            joined = torch.cat([state, embedded[..., slot, :], hidden[..., slot, :]], dim=-1)
            gate, candidate, output = self.linear(joined, "markov_head.joint_proj").chunk(3, dim=-1)
            outputs.append(output.tanh())
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        return torch.stack(outputs, dim=-2)

    def heads(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and confidence logits after the previous tokens [B, A, S]; zeros for a head that is not there."""
        logits, inputs = self.linear(hidden, "lm_head"), hidden
        if "markov_head.markov_w1.weight" in self.tensors:
            embedded = F.embedding(previous, self.tensors["markov_head.markov_w1.weight"])
            logits = logits + self.linear(self.cell(embedded, hidden), "markov_head.markov_w2")
            if self.config["confidence_head_with_markov"]:
                inputs = torch.cat([hidden, embedded], dim=-1)
        if "confidence_head.proj.weight" not in self.tensors:
            return logits, logits.new_zeros(logits.shape[:-1])
        return logits, self.linear(inputs, "confidence_head.proj").squeeze(-1)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("vanilla", LossWeights(0.1, 0.9, 1.0, 4.0)),
        ("vanilla_confnomarkov", LossWeights(0.1, 0.9, 1.0, 4.0)),
        ("rnn", LossWeights(0.1, 0.9, 1.0, 4.0)),
        ("dflash", LossWeights(1.0, 0.0, 0.0, 4.0)),
    ],
)
def test_gradients_equal_the_reference(case: str, weights: LossWeights) -> None:
    recorded = load_file(GOLDEN / f"train_{case}.safetensors")
    facts = json.loads((GOLDEN / f"train_{case}.json").read_text())
    draft = DenseDraft(GOLDEN / f"draft_{case}")
    tokens, anchors = recorded["input_ids"].long(), recorded["anchors"].long()
    rows = (anchors[..., None] + torch.arange(draft.config["block_size"])).clamp_max(tokens.shape[1] - 1)
    batch = torch.arange(len(tokens))[:, None, None]
    hidden = draft.hidden(tokens, anchors, recorded["target_hidden_states"])
    logits, confidence = draft.heads(hidden, tokens[batch, rows])
    valid = recorded["eval_mask"].bool()
    torch.testing.assert_close(logits[valid], recorded["draft_logits"][valid], rtol=0, atol=1e-4)

    target_head = load_file(GOLDEN / "target" / "model.safetensors")["lm_head.weight"]
    target_probs = F.linear(recorded["target_last_hidden_states"][batch, rows], target_head).softmax(-1)
    every_id = torch.arange(target_probs.shape[-1]).expand(target_probs.shape)
    losses = block_losses(logits, confidence, recorded["target_ids"], every_id, target_probs, valid, weights)
    losses.total.backward()  # type: ignore[no-untyped-call]

    assert losses.total.item() == pytest.approx(facts["loss"], abs=1e-4)
    for name, norm in facts["grad_norms"].items():
        gradient = draft.tensors[name].grad
        assert gradient is not None, name
        assert gradient.norm().item() == pytest.approx(norm, abs=1e-4), name
    for name, expected in recorded.items():
        if name.startswith("grad."):
            torch.testing.assert_close(draft.tensors[name.removeprefix("grad.")].grad, expected, rtol=0, atol=1e-4)
