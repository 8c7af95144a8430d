"""A bias towards what followed the same words before: the context's own n-grams, beside the Markov head's bigrams.

Text repeats itself: names, phrases, code, list items. When the newest tokens have stood in the context before, the tokens that
followed them there get a bonus on their logits, larger the longer the match. The bonus is part of the logits that tokens are
chosen from, so sampled drafts report the distribution they were really drawn from, and a confident model can overrule it.

(Prompt lookup and suffix decoding propose such tokens outright; here they only lean on the draft model.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# How many earlier places are compared, the latest first.
_MAX_PLACES = 64


@dataclass(frozen=True)
class Continuation:
    """What followed the longest earlier match: `match_length` tokens agreed, and `token_ids` came next."""

    match_length: int
    token_ids: Sequence[int]


def find_continuation(token_ids: Sequence[int], count: int, max_match: int) -> Continuation:
    """Look up how the context went on after its newest tokens, the last time they stood there.

    Args:
        token_ids: the context, its newest token last
        count: tokens to return at most
        max_match: longest match that is told apart; of equal matches the latest wins
    Returns:
        the continuation; of length 0 where the newest token never stood before
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) < 2 or max_match < 1:
        return Continuation(0, ())
    best_length, best_place = 0, -1
    for place in np.flatnonzero(ids[:-1] == ids[-1])[::-1][:_MAX_PLACES].tolist():
        length = 1
        while length < max_match and place >= length and ids[place - length] == ids[-1 - length]:
            length += 1
        if length > best_length:
            best_length, best_place = length, place
            if length == max_match:
                break
    if best_length == 0:
        return Continuation(0, ())
    return Continuation(best_length, ids[best_place + 1 : best_place + 1 + count].tolist())


class ContextBias:
    """The bonus of each match length.

    Args:
        bonuses: added to the logit of a continued token after a match of 1, 2, ... tokens; the last counts for longer ones.
            Empty for none.

    Raises:
        ValueError: a bonus is negative or not finite.
    """

    def __init__(self, bonuses: Sequence[float]) -> None:
        if not all(np.isfinite(bonus) and bonus >= 0 for bonus in bonuses):
            raise ValueError(f"context_bias must be finite numbers of at least 0, not {list(bonuses)}")
        self._bonuses = tuple(bonuses)

    @property
    def is_on(self) -> bool:
        """Whether any match earns a bonus."""
        return any(self._bonuses)

    def look_up(self, context_token_ids: Sequence[int], anchor_token_id: int, count: int) -> tuple[float, Sequence[int]]:
        """Return the bonus and the tokens that it is for, one for each slot, in order; (0.0, ()) without a match.

        Args:
            context_token_ids: the tokens before the anchor, as far as they are known
            anchor_token_id: the newest token
            count: slots
        """
        if not context_token_ids or not self.is_on:
            return 0.0, ()
        found = find_continuation([*context_token_ids, anchor_token_id], count, len(self._bonuses))
        if found.match_length == 0:
            return 0.0, ()
        return self._bonuses[found.match_length - 1], found.token_ids


class BlockBias:
    """The bonuses of one batch of blocks; a request keeps its own only while its drafts follow the continuation.

    Args:
        found: what `ContextBias.look_up` returned for each request
        draft_ids: the draft id of each target id, -1 where there is none; None where they are the same
    """

    def __init__(self, found: Sequence[tuple[float, Sequence[int]]], draft_ids: Sequence[int] | None) -> None:
        self._live = {row: pair for row, pair in enumerate(found) if pair[1]}
        self._draft_ids = draft_ids

    def add_to(self, logits: Tensor, slot: int) -> None:
        """Add the bonuses of one slot to logits [B, D], in place."""
        rows, ids, bonuses = [], [], []
        for row, (bonus, token_ids) in self._live.items():
            if slot < len(token_ids):
                draft_id = token_ids[slot] if self._draft_ids is None else self._draft_ids[token_ids[slot]]
                if draft_id >= 0:
                    rows.append(row)
                    ids.append(draft_id)
                    bonuses.append(bonus)
        if rows:
            place = (torch.tensor(rows, device=logits.device), torch.tensor(ids, device=logits.device))
            logits.index_put_(place, torch.tensor(bonuses, dtype=logits.dtype, device=logits.device), accumulate=True)

    def follow(self, chosen: Tensor, slot: int) -> None:
        """Learn the target ids [B] that were chosen for a slot."""
        if self._live:
            token_ids = chosen.tolist()
            self._live = {
                row: pair for row, pair in self._live.items() if slot < len(pair[1]) and pair[1][slot] == token_ids[row]
            }
