"""Calibration: the recorded quality of a confidence head, the fit, and the file beside the checkpoint."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from draft_model.calibration import (
    FILE_NAME,
    Calibration,
    OnlineCalibration,
    block_quality,
    fit_temperatures,
    load_calibration,
    position_quality,
    prefix_labels,
    prefix_survival,
    save_calibration,
    scale,
)
from draft_model.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden"
RECORDED = json.loads((GOLDEN / "calib_vanilla.json").read_text())["per_position"]
ROUNDS = load_file(GOLDEN / "calib_vanilla.safetensors")


def make_rounds(temperatures: list[float], rounds: int = 20_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A head whose logits are off by these temperatures, and what came of its drafts."""
    rng = np.random.default_rng(seed)
    true = 1.0 / (1.0 + np.exp(-rng.normal(1.0, 1.5, (rounds, len(temperatures)))))
    accepted = np.cumprod(rng.random(true.shape) < true, axis=1)
    return scale(true, 1.0 / np.array(temperatures)), accepted.astype(np.float64)


@pytest.mark.parametrize("position", range(len(RECORDED)))
def test_recorded_quality(position: int) -> None:
    quality = block_quality(ROUNDS["step_probs"], ROUNDS["prefix_label"])[position]
    recorded = RECORDED[position]
    measured = (quality.ece, quality.auc, quality.brier, quality.predicted, quality.observed)
    names = ("ece", "auc", "brier", "pred_mean", "target_mean")
    assert measured == pytest.approx(tuple(recorded[name] for name in names), abs=1e-9)
    assert len(quality.bins) == len(recorded["reliability"])
    for row, other in zip(quality.bins, recorded["reliability"], strict=True):
        assert (row.lower, row.upper) == pytest.approx(other["range"])
        assert (row.count, row.predicted, row.observed) == pytest.approx(
            (other["weight"], other["avg_pred"], other["avg_target"])
        )


def test_scaling_lowers_the_error_of_the_recorded_rounds_and_keeps_the_order() -> None:
    confidence, labels = ROUNDS["step_probs"], ROUNDS["prefix_label"]
    scaled = scale(confidence, np.array(fit_temperatures(confidence, labels)))
    for before, after in zip(block_quality(confidence, labels), block_quality(scaled, labels), strict=True):
        assert after.ece < before.ece
        assert after.auc > before.auc - 0.01
    for position in range(confidence.shape[1]):
        order = np.argsort(confidence[:, position], kind="stable")
        assert (np.diff(scaled[order, position]) >= 0.0).all()


def test_the_fit_finds_the_temperatures_that_were_put_in() -> None:
    wrong = [0.6, 1.0, 1.8]
    confidence, labels = make_rounds(wrong)
    assert fit_temperatures(confidence, labels) == pytest.approx(wrong, rel=0.1)
    before, after = (block_quality(values, labels) for values in (confidence, scale(confidence, np.array(wrong))))
    assert max(one.ece for one in after) < 0.02 < max(one.ece for one in before)


def test_a_calibrated_head_is_left_nearly_alone_and_one_that_cannot_matter_entirely() -> None:
    confidence, labels = make_rounds([1.0, 1.0])
    assert fit_temperatures(confidence, labels) == pytest.approx([1.0, 1.0], rel=0.1)
    assert fit_temperatures(np.full((10, 2), 0.5), np.tile([1.0, 0.0], (10, 1))) == (1.0, 1.0)


def test_the_reference_by_brute_force() -> None:
    """Error and area of a position, straight from their definitions."""
    rng = np.random.default_rng(3)
    predicted = rng.integers(0, 1000, 200) / 1000 + 0.0005
    observed = (rng.random(200) < predicted).astype(np.float64)
    quality = position_quality(predicted, observed)
    pairs = [
        (0.5 if high == low else float(high > low)) for high in predicted[observed == 1] for low in predicted[observed == 0]
    ]
    assert quality.auc == pytest.approx(sum(pairs) / len(pairs))
    error = 0.0
    for index in range(20):
        inside = (predicted >= index / 20) & (predicted < (index + 1) / 20)
        if inside.any():
            error += inside.mean() * abs(predicted[inside].mean() - observed[inside].mean())
    assert quality.ece == pytest.approx(error)
    assert sum(row.count for row in quality.bins) == 200


def test_edges() -> None:
    assert math.isnan(position_quality(np.array([0.2, 0.4]), np.ones(2)).auc)
    assert position_quality(np.array([1.0, 0.0]), np.array([1.0, 0.0])).ece == 0.0
    assert scale(np.array([0.0, 0.5, 1.0]), 0.2).tolist() == [0.0, 0.5, 1.0]
    assert prefix_survival(np.array([[0.0, 1.0]])).tolist() == [[1e-8, 1e-8]]
    assert prefix_labels([0, 2, 3], 3).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="as many"):
        position_quality(np.array([]), np.array([]))
    for confidence, labels in (
        (np.ones((2, 3)), np.ones((2, 2))),
        (np.ones(2), np.ones(2)),
        (np.ones((0, 2)), np.ones((0, 2))),
    ):
        with pytest.raises(ValueError, match="one shape"):
            fit_temperatures(confidence, labels)


# Online --------------------------------------------------------------------------------------------------------------


def test_online_calibration_follows_a_drift() -> None:
    rng = np.random.default_rng(5)
    calibration = OnlineCalibration(2)
    true = [0.4, 0.9]
    told = [0.8, 0.5]
    for _ in range(6000):
        accepted = 0
        while accepted < 2 and rng.random() < true[accepted]:
            accepted += 1
        calibration.learn(told, accepted)
    assert calibration.apply(told) == pytest.approx(true, abs=0.1)


def test_online_calibration_learns_nothing_of_drafts_that_were_not_reached() -> None:
    calibration = OnlineCalibration(3)
    for _ in range(100):
        calibration.learn([0.9, 0.9, 0.9], 0)
    assert calibration.offsets[0] < 0.0
    assert calibration.offsets[1:] == (0.0, 0.0)
    assert calibration.apply([0.9, 0.9])[1] == 0.9


@given(st.lists(st.tuples(st.lists(st.floats(0.0, 1.0), max_size=5), st.integers(0, 5)), max_size=50))
def test_online_calibration_stays_in_bounds_and_in_order(rounds: list[tuple[list[float], int]]) -> None:
    calibration = OnlineCalibration(4, rate=0.5, max_offset=1.0)
    for confidence, accepted in rounds:
        calibration.learn(confidence, accepted)
    assert all(-1.0 <= offset <= 1.0 for offset in calibration.offsets)
    ladder = [calibration.apply([chance] * 4) for chance in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert all(low < high for one, other in itertools.pairwise(ladder) for low, high in zip(one, other, strict=True))
    assert ladder[0] == [0.0] * 4
    assert ladder[-1] == [1.0] * 4


# The file ------------------------------------------------------------------------------------------------------------

CALIBRATION = Calibration((1.2, 0.8), (1.0, 1.0), "abc", 10, "print")


def test_the_file_keeps_everything(tmp_path: Path) -> None:
    assert load_calibration(tmp_path, 2) is None
    assert save_calibration(tmp_path, CALIBRATION) == tmp_path / FILE_NAME
    assert load_calibration(tmp_path, 2) == CALIBRATION
    save_calibration(tmp_path, replace(CALIBRATION, temperatures=(2.0, 2.0)))
    changed = load_calibration(tmp_path, 2)
    assert changed is not None
    assert changed.temperatures == (2.0, 2.0)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_file_for_other_blocks_is_refused(tmp_path: Path) -> None:
    save_calibration(tmp_path, CALIBRATION)
    with pytest.raises(CheckpointError, match="has 2 temperatures, but a block of this model yields 7 drafts"):
        load_calibration(tmp_path, 7)


@pytest.mark.parametrize(
    "change",
    [
        {"temperatures": [1.0, 0.0]},
        {"temperatures": [1.0, float("nan")]},
        {"temperatures": "ab"},
        {"temperatures": [1.0]},
        {"temperatures": None},
        {"num_rounds": "many"},
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    path = save_calibration(tmp_path, CALIBRATION)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"calibration\.json is not a calibration"):
        load_calibration(tmp_path, 2)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not a calibration"):
        load_calibration(tmp_path, 2)
