"""Errors of the draft model package.

DraftModelError
  CheckpointError     a folder, file, key or tensor that cannot be loaded exactly
"""

from __future__ import annotations


class DraftModelError(Exception):
    """Base of everything this package raises on purpose."""


class CheckpointError(DraftModelError):
    """A checkpoint is missing, incomplete, inconsistent or meant for another model."""
