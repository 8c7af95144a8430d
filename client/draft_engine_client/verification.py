"""Lossless verification of drafts (Leviathan et al. 2023, rule of speculative sampling), for the target's side.

Row k of the target's forward over [anchor, d1, ..., dn] says what follows row k's token, so draft k + 1 is judged by row k, and
row n gives the bonus token when all drafts stay.

What the drafter must be trusted with:

- greedy, or sampled without `draft_probs`: nothing. A draft counts as a point mass, and the output has the target's
  distribution whatever was drafted.
- sampled with `draft_probs`: that each draft was drawn from the distribution that came with it.

The verifier's noise is the caller's generator; it must not be the drafter's.

Shape symbols: n drafts, V vocab_size, K reported probabilities per draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Verdict:
    """The first `num_accepted` drafts stay, and `next_token_id` (bonus or recovered token) follows them."""

    num_accepted: int
    next_token_id: int


def verify_greedy(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> Verdict:
    """Keep drafts while each is the target's own choice.

    Args:
        draft_token_ids: [n]
        target_token_ids: at least n + 1 argmax tokens, one for each row of the block

    Raises:
        ValueError: fewer rows than n + 1.
    """
    if len(target_token_ids) <= len(draft_token_ids):
        raise ValueError(
            f"{len(draft_token_ids)} drafts need {len(draft_token_ids) + 1} rows; there are {len(target_token_ids)}"
        )
    accepted = 0
    for drafted, chosen in zip(draft_token_ids, target_token_ids, strict=False):
        if drafted != chosen:
            break
        accepted += 1
    return Verdict(accepted, int(target_token_ids[accepted]))


def verify_sampled(
    draft_token_ids: Sequence[int],
    target_probs: NDArray[np.floating],
    rng: np.random.Generator,
    *,
    draft_probs_ids: NDArray[np.integer] | None = None,
    draft_probs: NDArray[np.floating] | None = None,
) -> Verdict:
    """Accept draft t with probability min(1, target(t) / draft(t)); after a rejection draw from the part of the target's
    distribution that exceeds the draft's.

    Args:
        draft_token_ids: [n]
        target_probs: [n + 1, V], each row the distribution that the target samples from, filters included
        rng: the verifier's own noise
        draft_probs_ids: [n, K] tokens of each draft's distribution, distinct in a row; every other token has probability 0
        draft_probs: [n, K]; None takes every draft as certain

    Raises:
        ValueError: shapes do not fit, or only one of the last two is given.
    """
    count = len(draft_token_ids)
    if target_probs.ndim != 2 or len(target_probs) != count + 1:
        raise ValueError(f"target_probs must be [{count + 1}, V]; it is {list(target_probs.shape)}")
    if (draft_probs is None) != (draft_probs_ids is None):
        raise ValueError("draft_probs_ids and draft_probs go together")
    if (
        draft_probs is not None
        and draft_probs_ids is not None
        and not (draft_probs.ndim == 2 and draft_probs.shape == draft_probs_ids.shape and len(draft_probs) == count)
    ):
        raise ValueError(
            f"draft_probs must be [{count}, K] beside ids of the same shape; they are {list(draft_probs.shape)} "
            f"and {list(draft_probs_ids.shape)}"
        )
    for place, token_id in enumerate(draft_token_ids):
        target_row = target_probs[place]
        drafted = _DraftRow.certain(token_id)
        if draft_probs is not None and draft_probs_ids is not None:
            drafted = _DraftRow.reported(token_id, draft_probs_ids[place], draft_probs[place])
        if rng.random() * drafted.chance < float(target_row[token_id]):
            continue
        return Verdict(place, _draw(_residual(target_row, drafted), rng))
    return Verdict(count, _draw(target_probs[count], rng))


@dataclass(frozen=True)
class _DraftRow:
    """One draft's distribution, and the chance it gave to the token that was drawn."""

    chance: float
    ids: NDArray[np.integer]
    probs: NDArray[np.floating]

    @classmethod
    def certain(cls, token_id: int) -> _DraftRow:
        return cls(1.0, np.array([token_id]), np.ones(1))

    @classmethod
    def reported(cls, token_id: int, ids: NDArray[np.integer], probs: NDArray[np.floating]) -> _DraftRow:
        support = probs > 0
        ids, probs = ids[support], probs[support].astype(np.float64)
        probs /= probs.sum()
        drawn = probs[ids == token_id]
        # A token that its own distribution rules out was not drawn from it; then it is judged as a point mass.
        if len(drawn) != 1:
            return cls.certain(token_id)
        return cls(float(drawn[0]), ids, probs)


def _residual(target_row: NDArray[np.floating], drafted: _DraftRow) -> NDArray[np.float64]:
    """Return max(target - draft, 0), not normalised."""
    left = target_row.astype(np.float64)
    left[drafted.ids] = np.maximum(left[drafted.ids] - drafted.probs, 0.0)
    return left if left.sum() > 0 else target_row.astype(np.float64)


def _draw(weights: NDArray[np.floating], rng: np.random.Generator) -> int:
    """Draw an index in proportion to weights [V], never one of weight 0."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    # A threshold that rounds up to the total belongs to the last index that has weight.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
