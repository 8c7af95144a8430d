"""The draft vocabulary: the tokens that hold most of the target's probability mass."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_model.training.dataset import CachedSequence


def token_mass(sequences: list[CachedSequence], vocab_size: int) -> Tensor:
    """Sum the target's cached probabilities of each token over all rows, [V] float64."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for sequence in sequences:
        mass.scatter_add_(0, sequence.topk_ids.long().flatten(), sequence.topk_probs.double().flatten())
    return mass


def choose_draft_vocabulary(mass: Tensor, size: int) -> tuple[Tensor, Tensor, float]:
    """Take the `size` heaviest tokens.

    Returns:
        draft_to_target [size] ascending, target_to_draft [V] with -1 for tokens that were left out, and the share of the mass.
    """
    draft_to_target = mass.topk(size).indices.sort().values
    target_to_draft = torch.full((len(mass),), -1, dtype=torch.long)
    target_to_draft[draft_to_target] = torch.arange(size)
    return draft_to_target, target_to_draft, float(mass[draft_to_target].sum() / mass.sum())
