"""Recorded rounds: what a drafter's confidence was and how many drafts the target accepted, one JSON line per block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.errors import StartupError


@dataclass(frozen=True)
class Round:
    """One verified block: confidence of each draft, and how many of them were accepted."""

    confidence: tuple[float, ...]
    accepted: int


class RoundLog:
    """Appends rounds to a file; owned by one thread.

    Args:
        path: made, with its folder, if it is not there

    Raises:
        StartupError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StartupError(f"--record-rounds {path}: {error.strerror or error}") from error

    def add(self, confidence: Sequence[float], accepted: int) -> None:
        """Write one round."""
        line = {"confidence": [round(chance, 7) for chance in confidence], "accepted": accepted}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._file.close()


def read_rounds(path: Path) -> list[Round]:
    """Read a file of rounds.

    Raises:
        StartupError: it cannot be read, or a line is not a round; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--rounds {path}: {error}") from error
    rounds = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            one = Round(tuple(float(chance) for chance in values["confidence"]), int(values["accepted"]))
            if not one.confidence or not all(0.0 <= chance <= 1.0 for chance in one.confidence):
                raise ValueError("confidence must be numbers in [0, 1]")
            if not 0 <= one.accepted <= len(one.confidence):
                raise ValueError(f"accepted must be in [0, {len(one.confidence)}]")
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(f"--rounds {path}: line {number} is not a round: {type(error).__name__}: {error}") from error
        rounds.append(one)
    return rounds
