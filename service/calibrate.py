"""`draft-engine calibrate`: fit a checkpoint's confidence to recorded rounds, and store the temperatures beside it.

    draft-engine target --record-rounds rounds.jsonl    serve for a while
    draft-engine calibrate --rounds rounds.jsonl        fit, measure, store
    draft-engine serve                                  drafts with it from its next start

Every second round is fitted to and the others are measured, so that the quality told is that of rounds the fit has not seen.
The temperatures multiply those that the rounds were recorded with; the same rounds given again give the same file.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from rich.console import Console
from rich.table import Table

from draft_model.calibration import (
    Calibration,
    PositionQuality,
    block_quality,
    fit_temperatures,
    load_calibration,
    prefix_labels,
    save_calibration,
    scale,
)
from draft_model.checkpoint import fingerprint
from draft_model.formats import load_config
from service.errors import StartupError
from service.figures import Figure, write_figures
from service.rounds import Round, read_rounds
from service.settings import EngineSettings
from service.shipped import shipped_drafter

MIN_ROUNDS = 100
_PANEL = 120
_GAP = 12
Pixels = NDArray[np.uint8]
_WHITE, _GREY, _RED, _BLUE = (255, 255, 255), (205, 205, 205), (214, 86, 72), (38, 104, 176)


class CalibrateSettings(EngineSettings):
    """Calibrating a drafter's confidence."""

    model: Path | None = Field(None, description="Folder of the draft checkpoint. Default: the drafter that ships.")
    rounds: Path = Field(description="Rounds that a target recorded with --record-rounds.")
    output: Path = Field(Path("build/calibration.json"), description="File for the figures; the diagram is a PNG beside it.")
    store: bool = Field(True, description="Write calibration.json beside the checkpoint.")


@dataclass(frozen=True)
class FitResult:
    """A calibration, and the quality of every position before and after it on rounds that it has not seen."""

    calibration: Calibration
    before: list[PositionQuality]
    after: list[PositionQuality]


def run_calibrate(settings: CalibrateSettings, console: Console) -> int:
    """Fit, print the table, write diagram and figures, and store the calibration; returns the exit code.

    Raises:
        StartupError: the rounds cannot be used, or a file cannot be written.
        CheckpointError: the checkpoint cannot be read.
    """
    path = settings.model or shipped_drafter()
    config = load_config(path)
    if not config.has_confidence:
        raise StartupError(f"{path} has no confidence head, so there is nothing to calibrate")
    result = calibrate(
        read_rounds(settings.rounds),
        num_positions=config.max_draft_tokens,
        current=load_calibration(path, config.max_draft_tokens),
        rounds_sha256=hashlib.sha256(settings.rounds.read_bytes()).hexdigest(),
        fingerprint=fingerprint(path),
    )
    _print_table(result, console)
    diagram = settings.output.with_suffix(".png")
    try:
        write_figures(settings.output, _figures(result), {"model": str(path), "rounds": result.calibration.num_rounds})
        diagram.write_bytes(encode_png(draw_reliability(result.before, result.after)))
        console.print(f"figures in {settings.output}, reliability diagram in {diagram} (red before, blue after)")
        if settings.store:
            console.print(f"stored in {save_calibration(path, result.calibration)}; a server uses it from its next start")
    except OSError as error:
        raise StartupError(f"{error.filename}: {error.strerror}") from error
    return 0


def calibrate(
    rounds: Sequence[Round], *, num_positions: int, current: Calibration | None, rounds_sha256: str, fingerprint: str
) -> FitResult:
    """Fit temperatures to the full blocks among `rounds`, on top of those they were recorded with.

    Args:
        rounds: recorded; the longest blocks among them count as full
        num_positions: drafts that a block of the model yields
        current: calibration of the checkpoint now, which the rounds were recorded with unless it was made of them
        rounds_sha256: of the file with the rounds
        fingerprint: of the checkpoint

    Raises:
        StartupError: too few rounds, or blocks longer than the model's.
    """
    size = max((len(one.confidence) for one in rounds), default=0)
    full = [one for one in rounds if len(one.confidence) == size]
    if len(full) < MIN_ROUNDS:
        raise StartupError(f"calibration needs at least {MIN_ROUNDS} full blocks; there are {len(full)}")
    if size > num_positions:
        raise StartupError(f"the rounds have blocks of {size} drafts; a block of this model yields {num_positions}")
    confidence = np.array([one.confidence for one in full])
    labels = prefix_labels([one.accepted for one in full], size)
    fitted = fit_temperatures(confidence[::2], labels[::2])
    if current is None or current.fingerprint != fingerprint:
        start = (1.0,) * num_positions
    else:
        start = current.started_from if current.rounds_sha256 == rounds_sha256 else current.temperatures
    factors = [*fitted, *[1.0] * (num_positions - size)]
    calibration = Calibration(
        temperatures=tuple(before * factor for before, factor in zip(start, factors, strict=True)),
        started_from=start,
        rounds_sha256=rounds_sha256,
        num_rounds=len(full),
        fingerprint=fingerprint,
    )
    before = block_quality(confidence[1::2], labels[1::2])
    after = block_quality(scale(confidence[1::2], np.array(fitted)), labels[1::2])
    return FitResult(calibration, before, after)


def _print_table(result: FitResult, console: Console) -> None:
    table = Table(title=f"survival predicted and seen, {result.calibration.num_rounds} rounds (before -> after)")
    for title in ("position", "temperature", "accepted", "ECE %", "AUC", "Brier"):
        table.add_column(title, justify="right")
    for position, (before, after) in enumerate(zip(result.before, result.after, strict=True)):
        table.add_row(
            str(position + 1),
            f"{result.calibration.temperatures[position]:.2f}",
            f"{before.observed:.3f}",
            f"{100 * before.ece:.1f} -> {100 * after.ece:.1f}",
            f"{before.auc:.3f} -> {after.auc:.3f}",
            f"{before.brier:.4f} -> {after.brier:.4f}",
        )
    console.print(table)


def _figures(result: FitResult) -> list[Figure]:
    figures = []
    for position, (before, after) in enumerate(zip(result.before, result.after, strict=True)):
        for name in ("ece", "auc", "brier"):
            for when, quality in (("before", before), ("after", after)):
                value = float(getattr(quality, name))
                figures.append(Figure(f"{name}_{position + 1}_{when}", "undefined" if value != value else value, ""))
    return figures


# The diagram ---------------------------------------------------------------------------------------------------------


def draw_reliability(before: Sequence[PositionQuality], after: Sequence[PositionQuality]) -> Pixels:
    """Draw one panel for each position, first on the left: survival predicted to the right, seen upwards.

    The diagonal is perfect; red dots are before and blue ones after calibration, larger where more rounds are.

    Returns:
        RGB pixels [height, width, 3]
    """
    height, width = _PANEL + 2 * _GAP, _GAP + len(before) * (_PANEL + _GAP)
    pixels: Pixels = np.full((height, width, 3), _WHITE, np.uint8)
    for index, (red, blue) in enumerate(zip(before, after, strict=True)):
        left = _GAP + index * (_PANEL + _GAP)
        panel = pixels[_GAP : _GAP + _PANEL, left : left + _PANEL]
        panel[[0, -1], :] = panel[:, [0, -1]] = _GREY
        diagonal = np.arange(_PANEL)
        panel[_PANEL - 1 - diagonal, diagonal] = _GREY
        for quality, color in ((red, _RED), (blue, _BLUE)):
            total = sum(one.count for one in quality.bins)
            for one in quality.bins:
                column, row = round(one.predicted * (_PANEL - 1)), round((1.0 - one.observed) * (_PANEL - 1))
                radius = 1 + round(4 * (one.count / total) ** 0.5)
                panel[max(row - radius, 0) : row + radius + 1, max(column - radius, 0) : column + radius + 1] = color
    return pixels


def encode_png(pixels: Pixels) -> bytes:
    """Encode RGB pixels [height, width, 3] as a PNG."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
