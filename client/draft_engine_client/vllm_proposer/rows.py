"""Which rows of a target step belong to which request, and which of them stay.

One request in a step, with n scheduled tokens of which d are drafts, and m sampled tokens (0 while the prompt is not done):

    rows of the step    [first, first + n)      positions [start, start + n)
    rejected            d + 1 - m of them, the last ones, where drafts were judged
    rows that stay      positions [start, start + n - rejected)
    anchor              the token at position start + n - rejected; it has no row yet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestRows:
    """What a step knows of one request, as vLLM counts it.

    Args:
        request_id: vLLM's name of the request.
        first: index of its first row in the step's hidden states.
        start: position of that row.
        num_scheduled: rows of the request in the step.
        num_drafts: how many of them were drafts.
        num_sampled: tokens that the step committed; 0 while a prompt is not done.
        num_tokens: tokens of the request after the step: its prompt, and what was committed.
    """

    request_id: str
    first: int
    start: int
    num_scheduled: int
    num_drafts: int
    num_sampled: int
    num_tokens: int

    @property
    def num_rejected(self) -> int:
        """Drafts that did not stay."""
        return self.num_drafts + 1 - self.num_sampled if self.num_drafts and self.num_sampled else 0

    @property
    def num_rows(self) -> int:
        """Rows that stay."""
        return self.num_scheduled - self.num_rejected

    @property
    def end(self) -> int:
        """Position after the last row that stays: the anchor's."""
        return self.start + self.num_rows

    @property
    def problem(self) -> str | None:
        """What does not fit together, or None."""
        if self.num_rejected < 0 or self.num_rows < 0:
            return f"{self.num_sampled} tokens were sampled after {self.num_drafts} drafts in {self.num_scheduled} rows"
        if self.end >= self.num_tokens:
            return f"the anchor at position {self.end} is not one of {self.num_tokens} tokens"
        if self.num_sampled and self.end != self.num_tokens - 1:
            return f"the rows end at {self.end} and the anchor stands at {self.num_tokens - 1}"
        return None

    def num_drafts_wanted(self, limit: int, max_model_len: int) -> int:
        """Drafts to ask for: none while the prompt is not done, and none that would pass `max_model_len`."""
        return max(min(limit, max_model_len - self.num_tokens - 1), 0) if self.num_sampled else 0


def row_indices(requests: Sequence[RequestRows]) -> list[int]:
    """Indices, into the step's hidden states, of all rows that stay, request after request."""
    return [index for rows in requests for index in range(rows.first, rows.first + rows.num_rows)]
