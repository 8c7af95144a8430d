"""Figures: what a benchmark or the demo measured, what was to be reached, and whether it was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured value. `to_reach` is a lower bound, or an upper one with `is_cost`; None only reports."""

    name: str
    value: float | bool | str
    unit: str
    to_reach: float | bool | None = None
    is_cost: bool = False

    @property
    def ok(self) -> bool:
        """Whether the value reaches what was to be reached."""
        if self.to_reach is None:
            return True
        if isinstance(self.to_reach, bool) or isinstance(self.value, str):
            return self.value == self.to_reach
        return self.value <= self.to_reach if self.is_cost else self.value >= self.to_reach

    def as_json(self) -> dict[str, Any]:
        """The entry in a figures file."""
        value = round(self.value, 4) if isinstance(self.value, float) else self.value
        return {"name": self.name, "value": value, "unit": self.unit, "to_reach": self.to_reach, "ok": self.ok}


def write_figures(path: Path, figures: list[Figure], details: dict[str, Any]) -> None:
    """Write a figures file: `figures`, and whatever else explains them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"figures": [figure.as_json() for figure in figures], **details}
    path.write_text(json.dumps(document, indent=2) + "\n")
