"""Watches for a drafter that answers every call and helps nobody.

Such a drafter raises no error: its target just runs at its own speed, or a little slower. Four signs tell. Calls ask for
drafts and none come. Drafts come with a confidence that is not finite. Drafts come and one target keeps hardly any of them:
so looks a drafter of another target, other layers or other weights. Or all rows hold one value: so looks a capture that was
never filled.

A warning makes the server `degraded` and no more: it goes on serving, since what one client sends must not take it from others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SILENT_DRAFTS = 64
REFUSED_DRAFTS = 256
CONSTANT_CALLS = 16
UNFIT_BLOCKS = 64
LIKELY_FIELDS = (
    "check target_layer_ids and their order, whether the target captures before or after a layer, the positions of its rows, "
    "its tokenizer, and that the drafter was trained for this target"
)


class DraftWatch:
    """Written by the worker thread, read by any.

    Args:
        acceptance_floor: accepted drafts of a block, in the mean over REFUSED_DRAFTS blocks of one client, below which to warn.
    """

    def __init__(self, acceptance_floor: float = 0.05) -> None:
        self._floor = acceptance_floor
        self._num_silent = 0
        self._accepted: dict[str, deque[int]] = {}
        self._low: dict[str, float] = {}
        self._num_constant = 0
        self._blocks_to_recover = 0
        self.warnings: list[str] = []

    def saw_drafts(self, counts: Sequence[int]) -> None:
        """Take note of how many drafts came out for each session that asked for some, before any cut by confidence."""
        for count in counts:
            self._num_silent = 0 if count else self._num_silent + 1
        self._blocks_to_recover = max(0, self._blocks_to_recover - len(counts))
        if self._num_silent or self.warnings:
            self._update()

    def saw_unfit(self) -> None:
        """Take note of a proposal that could not be sent, because something in it was not finite."""
        self._blocks_to_recover = UNFIT_BLOCKS
        self._update()

    def saw_accepted(self, client_id: str, count: int) -> None:
        """Take note of how many drafts of one block a client's target kept."""
        window = self._accepted.setdefault(client_id, deque())
        window.append(count)
        if len(window) == REFUSED_DRAFTS:
            mean = sum(window) / REFUSED_DRAFTS
            window.clear()
            if mean < self._floor:
                self._low[client_id] = mean
            else:
                self._low.pop(client_id, None)
            self._update()

    def forget(self, client_id: str) -> None:
        """The client has left."""
        self._accepted.pop(client_id, None)
        if self._low.pop(client_id, None) is not None:
            self._update()

    def saw_rows(self, *, is_constant: bool) -> None:
        """Take note of a call with rows: whether all their values are the same."""
        if is_constant or self._num_constant:
            self._num_constant = self._num_constant + 1 if is_constant else 0
            self._update()

    def _update(self) -> None:
        warnings = []
        if self._num_silent >= SILENT_DRAFTS:
            warnings.append(f"no_drafts: at least {SILENT_DRAFTS} draft blocks in a row came out empty")
        if self._blocks_to_recover:
            warnings.append(
                f"non_finite: a draft block of the last {UNFIT_BLOCKS} was not finite; check dtype and the drafter's weights"
            )
        if self._low:
            warnings.append(
                f"low_acceptance: the targets of {len(self._low)} clients kept fewer than {self._floor:g} drafts of a block, "
                f"{min(self._low.values()):.3f} at worst, over {REFUSED_DRAFTS} blocks; {LIKELY_FIELDS}"
            )
        if self._num_constant >= CONSTANT_CALLS:
            warnings.append(
                f"constant_rows: the rows of at least {CONSTANT_CALLS} calls in a row hold one value; "
                "check what the target captures"
            )
        for warning in warnings:
            if warning not in self.warnings:
                logger.warning("%s", warning)
        if warnings != self.warnings:
            self.warnings = warnings
