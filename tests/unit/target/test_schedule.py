"""What a step of the target costs is measured at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_model.target_model import TargetModel
from service.errors import StartupError
from service.settings import load_settings
from service.target.schedule import measure_step_times
from service.target.settings import TargetSettings
from tests.support.tiny_target import write_tiny_target


def test_step_times_cover_every_batch_and_never_fall(tmp_path: Path) -> None:
    model = TargetModel.load(write_tiny_target(tmp_path / "target"))
    times = measure_step_times(model, max_batch=5, max_width=3)
    assert times.num_tokens == (1, 2, 3, 4, 6, 8, 12)
    assert list(times.seconds) == sorted(times.seconds)
    assert times.seconds[0] > 0.0


def test_rounds_are_recorded_of_whole_blocks_only(tmp_path: Path) -> None:
    load_settings(TargetSettings, {"record_rounds": str(tmp_path / "rounds")})
    with pytest.raises(StartupError, match="schedule fixed only"):
        load_settings(TargetSettings, {"record_rounds": str(tmp_path / "rounds"), "schedule": "hardware"})
