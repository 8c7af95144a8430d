"""The losses against the recorded training forward of the public reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from draft_model.training.losses import LossWeights, block_losses

GOLDEN = Path(__file__).parents[2] / "golden"
WEIGHTS = LossWeights(cross_entropy=0.1, total_variation=0.9, confidence=1.0, decay=4.0)


@pytest.mark.parametrize("case", ["vanilla", "vanilla_confnomarkov", "rnn"])
def test_terms_equal_the_reference(case: str) -> None:
    recorded = load_file(GOLDEN / f"train_{case}.safetensors")
    facts = json.loads((GOLDEN / f"train_{case}.json").read_text())
    target_head = load_file(GOLDEN / "target" / "model.safetensors")["lm_head.weight"]
    # Slot k at anchor a predicts token a + 1 + k, whose distribution the target's final state at a + k gives.
    rows = recorded["anchors"][:, :, None] + torch.arange(recorded["draft_logits"].shape[2])
    rows = rows.clamp_max(recorded["input_ids"].shape[1] - 1)
    batch = torch.arange(2)[:, None, None]
    target_probs = F.linear(recorded["target_last_hidden_states"][batch, rows], target_head).softmax(-1)
    every_id = torch.arange(target_probs.shape[-1]).expand(target_probs.shape)

    losses = block_losses(
        recorded["draft_logits"],
        recorded["confidence_logits"],
        recorded["target_ids"],
        every_id,
        target_probs,
        recorded["eval_mask"],
        WEIGHTS,
    )

    terms = facts["terms"]
    assert losses.cross_entropy == pytest.approx(terms["ce_loss_num"] / terms["ce_loss_den"], abs=1e-4)
    assert losses.total_variation == pytest.approx(terms["l1_loss_num"] / terms["l1_loss_den"], abs=1e-4)
    assert losses.confidence == pytest.approx(terms["confidence_loss_num"] / terms["confidence_loss_den"], abs=1e-4)
    assert losses.total == pytest.approx(facts["loss"], abs=1e-4)


def make_case(vocab: int = 12, topk: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    probs = torch.randn(1, 2, 3, vocab, generator=generator).softmax(-1)
    top = probs.topk(topk)
    return {
        "logits": torch.randn(1, 2, 3, vocab, generator=generator),
        "confidence_logits": torch.zeros(1, 2, 3),
        "labels": torch.randint(0, vocab, (1, 2, 3), generator=generator),
        "target_ids": top.indices,
        "target_probs": top.values,
        "valid": torch.ones(1, 2, 3, dtype=torch.bool),
    }


def test_mass_outside_the_cached_support_counts_as_unmet() -> None:
    case = make_case()
    # All of the draft's mass sits on a token that the target's cached support lacks.
    missing = next(token for token in range(12) if token not in case["target_ids"][0, 0, 0])
    case["logits"][0, 0] = torch.full((3, 12), -50.0)
    case["logits"][0, 0, :, missing] = 50.0
    case["target_ids"][0, 0] = case["target_ids"][0, 0, :1]
    case["target_probs"][0, 0] = case["target_probs"][0, 0, :1]
    case["valid"][0, 1] = False
    losses = block_losses(**case, weights=WEIGHTS)
    assert losses.total_variation == pytest.approx(2.0, abs=1e-5)


def test_ids_that_the_draft_lacks_have_no_gradient_and_full_distance() -> None:
    case = make_case()
    case["labels"][:] = -1
    case["target_ids"][:] = -1
    logits = case["logits"].requires_grad_()
    losses = block_losses(**case, weights=WEIGHTS)
    losses.total.backward()
    assert losses.cross_entropy == 0
    assert losses.total_variation == pytest.approx(2.0, abs=1e-5)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_a_slot_after_an_invalid_one_does_not_count() -> None:
    case = make_case()
    case["valid"][0, 0] = torch.tensor([True, False, True])
    before = block_losses(**case, weights=WEIGHTS).total
    case["logits"][0, 0, 2] += torch.randn(12)
    assert block_losses(**case, weights=WEIGHTS).total == before
