"""Watches for a drafter that answers every call and helps nobody.

Such a drafter raises no error: its target just runs at its own speed, or a little slower. Three signs tell. Calls ask for
drafts and none come. Drafts come and the target keeps none of them, which is what a drafter of another target, other layers
or other weights looks like. Or all rows hold one value, which is what a capture that was never filled looks like.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SILENT_DRAFTS = 64
REFUSED_DRAFTS = 256
CONSTANT_CALLS = 16


class DraftWatch:
    """Written by the worker thread, read by any."""

    def __init__(self) -> None:
        self._num_silent = 0
        self._accepted: deque[int] = deque(maxlen=REFUSED_DRAFTS)
        self._num_accepted = 0
        self._num_constant = 0
        self.warnings: list[str] = []

    def saw_drafts(self, counts: Sequence[int]) -> None:
        """Take note of how many drafts came out for each session that asked for some, before any cut by confidence."""
        for count in counts:
            self._num_silent = 0 if count else self._num_silent + 1
        self._update()

    def saw_accepted(self, count: int) -> None:
        """Take note of how many drafts of one block the target kept."""
        if len(self._accepted) == REFUSED_DRAFTS:
            self._num_accepted -= self._accepted[0]
        self._accepted.append(count)
        self._num_accepted += count
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
        if len(self._accepted) == REFUSED_DRAFTS and not self._num_accepted:
            warnings.append(
                f"no_acceptance: the target kept no token of the last {REFUSED_DRAFTS} draft blocks; "
                "check that the drafter was trained for this target"
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
