"""Calibrated confidence: Sequential Temperature Scaling, and how well a confidence head predicts.

A confidence head ranks drafts well but is over- or underconfident, and a schedule needs chances that are right as numbers: the
survival of draft k is a product of k confidences, so errors add up along the block. The scaling fits one temperature per
position, first to last, each so that the survival up to there is as calibrated as it can be with the earlier ones fixed. It
never changes the order of two confidences at one position.

    calibrated confidence of position k = sigmoid(logit / temperature[k])

Temperatures are kept beside the checkpoint in `calibration.json`. `OnlineCalibration` follows a drift after that, from what
the target accepted.

Shape symbols: N rounds, S positions of a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draft_model.errors import CheckpointError

Floats = NDArray[np.float64]

FILE_NAME = "calibration.json"
NUM_BINS = 20
_AUC_BINS = 1000
_MIN_SURVIVAL = 1e-8
# Temperatures tried: 1, then evenly away from it on both sides up to 5 and 1/5 in the logarithm.
_LOG_GRID: Floats = np.linspace(0.0, math.log(5.0), 81).repeat(2)[1:] * np.array([1.0, *[1.0, -1.0] * 80])


@dataclass(frozen=True)
class ReliabilityBin:
    """Rounds whose predicted survival lies in [lower, upper): how many, what was predicted and what came, on average."""

    lower: float
    upper: float
    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class PositionQuality:
    """How well survival is predicted at one position.

    ece: expected calibration error; auc: chance that an accepted prefix was given more than a rejected one, NaN where all
    were accepted or none; brier: mean squared error; predicted, observed: means.
    """

    ece: float
    auc: float
    brier: float
    predicted: float
    observed: float
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True)
class Calibration:
    """What `calibration.json` holds.

    Args:
        temperatures: [S], positive
        started_from: [S] temperatures that the confidences of the rounds had been scaled by already
        rounds_sha256: of the file with the rounds
        num_rounds: in it
        fingerprint: of the checkpoint that drafted them

    Raises:
        ValueError: a temperature is not a positive number, or there are not as many of both kinds.
    """

    temperatures: tuple[float, ...]
    started_from: tuple[float, ...]
    rounds_sha256: str
    num_rounds: int
    fingerprint: str

    def __post_init__(self) -> None:
        values = [*self.temperatures, *self.started_from]
        if not all(math.isfinite(value) and value > 0.0 for value in values):
            raise ValueError(f"temperatures must be positive: {values}")
        if len(self.temperatures) != len(self.started_from):
            raise ValueError(f"{len(self.temperatures)} temperatures cannot start from {len(self.started_from)}")


# Quality -------------------------------------------------------------------------------------------------------------


def prefix_survival(confidence: Floats) -> Floats:
    """Turn confidences [N, S] into the survival of each prefix, [N, S]."""
    survival: Floats = np.maximum(np.cumprod(confidence, axis=1), _MIN_SURVIVAL)
    return survival


def prefix_labels(accepted: Sequence[int], num_positions: int) -> Floats:
    """Turn the number of drafts accepted in each round into labels [N, S]: 1 where the prefix up to there was accepted."""
    return (np.asarray(accepted)[:, None] > np.arange(num_positions)).astype(np.float64)


def position_quality(predicted: Floats, observed: Floats) -> PositionQuality:
    """Measure survival [N] predicted at one position against labels [N].

    Raises:
        ValueError: no rounds, or as many of one as not of the other.
    """
    if not len(predicted) or predicted.shape != observed.shape:
        raise ValueError(f"quality needs as many predictions as labels: {predicted.shape} and {observed.shape}")
    counts, predicted_sums, observed_sums = _bin_sums(predicted, observed, NUM_BINS)
    bins = tuple(
        ReliabilityBin(
            index / NUM_BINS,
            (index + 1) / NUM_BINS,
            int(counts[index]),
            float(predicted_sums[index] / counts[index]),
            float(observed_sums[index] / counts[index]),
        )
        for index in np.flatnonzero(counts)
    )
    return PositionQuality(
        ece=float(np.abs(predicted_sums - observed_sums).sum() / len(predicted)),
        auc=_auc(predicted, observed),
        brier=float(np.square(predicted - observed).mean()),
        predicted=float(predicted.mean()),
        observed=float(observed.mean()),
        bins=bins,
    )


def block_quality(confidence: Floats, labels: Floats) -> list[PositionQuality]:
    """Measure every position of confidences [N, S] against prefix labels [N, S]."""
    survival = prefix_survival(confidence)
    return [position_quality(survival[:, position], labels[:, position]) for position in range(labels.shape[1])]


def _bin_sums(predicted: Floats, observed: Floats, bins: int) -> tuple[Floats, Floats, Floats]:
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(index, minlength=bins).astype(np.float64)
    predicted_sums: Floats = np.bincount(index, predicted, bins).astype(np.float64)
    observed_sums: Floats = np.bincount(index, observed, bins).astype(np.float64)
    return counts, predicted_sums, observed_sums


def _auc(predicted: Floats, observed: Floats) -> float:
    """Area under the ROC curve of a histogram; two in one bin count half."""
    counts, _, positives = _bin_sums(predicted, observed, _AUC_BINS)
    negatives = counts - positives
    pairs = positives.sum() * negatives.sum()
    if pairs == 0.0:
        return math.nan
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + 0.5 * negatives)).sum() / pairs)


# Scaling -------------------------------------------------------------------------------------------------------------


def scale(confidence: Floats, temperatures: Floats | float) -> Floats:
    """Apply temperatures that broadcast against confidences in [0, 1]; 0 and 1 stay what they are."""
    with np.errstate(divide="ignore"):
        logits = np.log(confidence) - np.log1p(-confidence)
    with np.errstate(over="ignore"):
        scaled: Floats = 1.0 / (1.0 + np.exp(-logits / temperatures))
    return scaled


def fit_temperatures(confidence: Floats, labels: Floats) -> tuple[float, ...]:
    """Fit one temperature for each position in turn to the calibration error of the survival up to it.

    Args:
        confidence: [N, S] of full blocks, not scaled
        labels: [N, S], 1 where the prefix up to there was accepted

    Raises:
        ValueError: no rounds, or shapes that differ.
    """
    if confidence.ndim != 2 or confidence.shape != labels.shape or not len(confidence):
        raise ValueError(f"fitting needs confidences and labels of one shape [N, S]: {confidence.shape} and {labels.shape}")
    temperatures = []
    before: Floats = np.ones(len(confidence))
    # Of temperatures that do equally well the first is taken, which changes least.
    grid = np.exp(_LOG_GRID)
    for position in range(confidence.shape[1]):
        chances, observed = confidence[:, position], labels[:, position]
        errors = [_calibration_error(before * scale(chances, temperature), observed) for temperature in grid]
        temperatures.append(float(grid[int(np.argmin(errors))]))
        before = before * scale(chances, temperatures[-1])
    return tuple(temperatures)


def _calibration_error(predicted: Floats, observed: Floats) -> float:
    _, predicted_sums, observed_sums = _bin_sums(np.maximum(predicted, _MIN_SURVIVAL), observed, NUM_BINS)
    return float(np.abs(predicted_sums - observed_sums).sum())


class OnlineCalibration:
    """Follows a drift of acceptance while serving: one offset per position on the logit, moved by each outcome.

    Draft k teaches only when the drafts before it were accepted, since otherwise nobody knows what would have become of it. The
    offset changes with past rounds alone, so a schedule by it looks no further ahead than one without.

    Args:
        num_positions: S
        rate: how far one outcome moves an offset
        max_offset: bound on an offset in either direction
    """

    def __init__(self, num_positions: int, *, rate: float = 0.02, max_offset: float = 3.0) -> None:
        self._offsets = [0.0] * num_positions
        self._rate, self._max_offset = rate, max_offset

    @property
    def offsets(self) -> tuple[float, ...]:
        """Offset of each position."""
        return tuple(self._offsets)

    def apply(self, confidence: Sequence[float]) -> list[float]:
        """Correct the confidences of one block."""
        return [_shift(chance, offset) for chance, offset in zip(confidence, self._offsets, strict=False)]

    def learn(self, confidence: Sequence[float], num_accepted: int) -> None:
        """Take in a round: the confidences of the drafts that were verified, before `apply`, and how many were accepted."""
        reached = min(num_accepted + 1, len(confidence), len(self._offsets))
        for position in range(reached):
            is_accepted = float(position < num_accepted)
            error = is_accepted - _shift(confidence[position], self._offsets[position])
            offset = self._offsets[position] + self._rate * error
            self._offsets[position] = min(max(offset, -self._max_offset), self._max_offset)


def _shift(chance: float, offset: float) -> float:
    """Add `offset` to the logit of a chance; 0 and 1 stay what they are."""
    if offset == 0.0 or not 0.0 < chance < 1.0:
        return chance
    odds = chance / (1.0 - chance) * math.exp(offset)
    return odds / (1.0 + odds)


# The file ------------------------------------------------------------------------------------------------------------


def load_calibration(folder: Path, num_positions: int) -> Calibration | None:
    """Read `calibration.json` of a checkpoint whose blocks have so many positions; None where there is none.

    Raises:
        CheckpointError: it is not such a file, or for blocks of another size.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        calibration = Calibration(
            temperatures=tuple(float(value) for value in values["temperatures"]),
            started_from=tuple(float(value) for value in values["started_from"]),
            rounds_sha256=str(values["rounds_sha256"]),
            num_rounds=int(values["num_rounds"]),
            fingerprint=str(values["fingerprint"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a calibration: {type(error).__name__}: {error}") from error
    if len(calibration.temperatures) != num_positions:
        raise CheckpointError(
            f"{path} has {len(calibration.temperatures)} temperatures, but a block of this model yields {num_positions} drafts"
        )
    return calibration


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write `calibration.json` beside a checkpoint, replacing the one there at once; returns its path."""
    path = folder / FILE_NAME
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
    written.replace(path)
    return path
