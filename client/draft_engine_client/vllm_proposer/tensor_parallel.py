"""Tensor parallel targets: every rank holds the same hidden states and must get the same drafts, so one rank calls for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")


class RankGroup(Protocol):
    """The part of vLLM's group coordinator that is used here."""

    rank_in_group: int
    world_size: int

    def broadcast_object(self, obj: object = None, src: int = 0) -> object:
        """Give every rank the object of rank `src`, which alone needs to have one."""


def on_first_rank(group: RankGroup, compute: Callable[[], ResultT]) -> ResultT:
    """Compute on rank 0 alone and return the result on every rank. `compute` must not raise: the others would wait for ever."""
    if group.world_size == 1:
        return compute()
    mine = compute() if group.rank_in_group == 0 else None
    return group.broadcast_object(mine, 0)  # type: ignore[return-value]
