"""How many drafts a step verifies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draft_engine_client.replies import Drafts
from draft_model.scheduler import StepTimes
from draft_model.target_model import TargetModel
from service.errors import StartupError
from service.settings import load_settings
from service.target.schedule import DraftSchedule, measure_step_times
from service.target.settings import TargetSettings
from tests.support.tiny_target import write_tiny_target

IDS = np.arange(6, dtype=np.int32).reshape(3, 2)
SURE = Drafts((1, 2, 3), (0.9, 0.9, 0.9), (0.9, 0.81, 0.729), IDS, np.full((3, 2), 0.5, np.float32), committed_end=7)
UNSURE = Drafts((4, 5), (0.6, 0.3), (0.6, 0.18))
UNKNOWN = Drafts((6, 7))
NONE = Drafts()


def lengths(schedule: DraftSchedule, *drafts: Drafts) -> list[int]:
    return [len(draft.token_ids) for draft in schedule.shorten(drafts)]


def test_fixed_verifies_all() -> None:
    assert lengths(DraftSchedule("fixed"), SURE, UNSURE, UNKNOWN, NONE) == [3, 2, 2, 0]


def test_threshold_cuts_each_by_its_own_survival() -> None:
    schedule = DraftSchedule("threshold", threshold=0.5)
    assert lengths(schedule, SURE, UNSURE, UNKNOWN, NONE) == [3, 1, 2, 0]
    assert lengths(DraftSchedule("threshold", threshold=0.8), SURE, UNSURE) == [2, 0]


def test_hardware_chooses_one_width_by_what_a_step_costs() -> None:
    free = DraftSchedule("hardware", step_times=StepTimes((1, 64), (1.0, 1.0)))
    dear = DraftSchedule("hardware", step_times=StepTimes((1, 64), (1.0, 64.0)))
    between = DraftSchedule("hardware", step_times=StepTimes((2, 4, 6, 8), (1.0, 1.2, 1.6, 3.0)))
    assert lengths(free, SURE, UNSURE, NONE) == [3, 2, 0]
    assert lengths(dear, SURE, UNSURE, NONE) == [0, 0, 0]
    # 2 -> 3.5 / 1.2 = 2.9 -> 4.49 / 1.6 = 2.8
    assert lengths(between, SURE, UNSURE) == [1, 1]
    with pytest.raises(ValueError, match="needs step times"):
        DraftSchedule("hardware")


def test_a_cut_changes_the_length_and_nothing_of_what_is_kept() -> None:
    (kept,) = DraftSchedule("threshold", threshold=0.8).shorten([SURE])
    assert (kept.token_ids, kept.confidence, kept.survival) == ((1, 2), (0.9, 0.9), (0.9, 0.81))
    assert kept.probs_ids is not None
    assert kept.probs is not None
    assert kept.probs_ids.tolist() == IDS[:2].tolist()
    assert kept.probs.shape == (2, 2)
    assert kept.committed_end == 7


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
