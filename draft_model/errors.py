"""Errors of the draft model package.

DraftModelError
  TrainingError       settings of a training run that cannot be used
  CheckpointError     a folder, file, key or tensor that cannot be loaded exactly
  DraftRequestError   a request that this draft model cannot serve; `code` and `numbers` say which limit it breaks
"""

from __future__ import annotations

from collections.abc import Mapping


class DraftModelError(Exception):
    """Base of everything this package raises on purpose."""


class TrainingError(DraftModelError):
    """A training run cannot be done as asked: a device is missing, or settings contradict the target."""


class CheckpointError(DraftModelError):
    """A checkpoint is missing, incomplete, inconsistent or meant for another model."""


class DraftRequestError(DraftModelError):
    """A draft request or context write outside the limits of the model.

    Args:
        code: stable name of the limit, such as `too_many_draft_tokens`.
        message: one sentence for a person.
        numbers: the values of the case.
    """

    def __init__(self, code: str, message: str, numbers: Mapping[str, int]) -> None:
        super().__init__(message)
        self.code = code
        self.numbers = dict(numbers)
