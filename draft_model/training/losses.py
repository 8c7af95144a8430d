"""The losses of DSpark (dspark.md 1.6): cross-entropy, total variation, confidence.

Shape symbols: B sequences, A anchors, S slots, D draft_vocab_size, K cached target probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class LossWeights:
    """Factors of the three terms and the decay over slots: slot k weighs exp(-k / decay), k from 0."""

    cross_entropy: float
    total_variation: float
    confidence: float
    decay: float


@dataclass(frozen=True)
class Losses:
    """Scalars: the sum to minimise, its terms (weighted means over slots), and the share of slots whose argmax is the label."""

    total: Tensor
    cross_entropy: Tensor
    total_variation: Tensor
    confidence: Tensor
    agreement: Tensor


def block_losses(
    logits: Tensor,
    confidence_logits: Tensor,
    labels: Tensor,
    target_ids: Tensor,
    target_probs: Tensor,
    valid: Tensor,
    weights: LossWeights,
) -> Losses:
    """Weigh one batch of blocks.

    Args:
        logits: [B, A, S, D] corrected draft logits
        confidence_logits: [B, A, S]
        labels: [B, A, S] draft ids of the tokens that follow, -1 where the draft vocabulary lacks them
        target_ids: [B, A, S, K] draft ids of the target's likeliest tokens, -1 where the draft vocabulary lacks them
        target_probs: [B, A, S, K] their probabilities; what is missing to 1 counts as mass that the draft cannot meet
        valid: [B, A, S] bool; a slot counts only if all slots before it do
        weights: see LossWeights
    """
    slots = labels.shape[-1]
    valid = valid.long().cumprod(-1).bool()
    decay = torch.exp(-torch.arange(slots, device=logits.device) / weights.decay)
    weight = valid * decay
    denominator = weight.sum() + 1e-6

    log_probs = logits.log_softmax(-1)
    known = labels >= 0
    picked = log_probs.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
    cross_entropy = -(picked * weight * known).sum() / denominator

    # |p_d - p_t|_1 over the cached support; the draft's mass elsewhere counts in full, and so does the target's.
    inside = target_ids >= 0
    draft_mass = log_probs.gather(-1, target_ids.clamp_min(0)).exp() * inside
    distance = (draft_mass - target_probs).abs().sum(-1) + (1 - draft_mass.sum(-1)) + (1 - target_probs.sum(-1)).clamp_min(0)
    total_variation = (distance * weight).sum() / denominator

    overlap = (1 - 0.5 * distance.detach()).clamp(0, 1)
    entropy = F.binary_cross_entropy_with_logits(confidence_logits, overlap, reduction="none")
    confidence = (entropy * weight).sum() / denominator

    total = weights.cross_entropy * cross_entropy + weights.total_variation * total_variation + weights.confidence * confidence
    agreement = ((logits.detach().argmax(-1) == labels) & valid).sum() / valid.sum().clamp_min(1)
    return Losses(total, cross_entropy.detach(), total_variation.detach(), confidence.detach(), agreement)
