"""How many drafts of a step are sent back, and that no length depends on the drafts that it cuts off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from draft_engine_client.wire import ClientHello, StepTimeCurve, VerifySchedule
from draft_model.drafter import DraftProposal
from draft_model.scheduler import BUDGET_DELAY, survival_of
from service.engine import shortened
from service.schedule import VerifyScheduler

FREE = StepTimeCurve(num_tokens=(1, 64), seconds=(1.0, 1.0))
DEAR = StepTimeCurve(num_tokens=(1, 64), seconds=(1.0, 64.0))
APPENDIX_A = StepTimeCurve(num_tokens=(1, 2, 3), seconds=(1.0, 1 / 0.5, 1 / 0.45))


def proposal(*confidence: float) -> DraftProposal:
    return DraftProposal(list(range(len(confidence))), list(confidence), survival_of(confidence))


SURE, UNSURE, UNKNOWN = proposal(0.9, 0.9, 0.9), proposal(0.6, 0.3), DraftProposal([6, 7], [], [])


def scheduler(kind: Any, **more: Any) -> VerifyScheduler:
    return VerifyScheduler(VerifySchedule(kind=kind, **more), 3)


def lengths(one: VerifyScheduler, *proposals: DraftProposal, num_others: int = 0, step: int = 0) -> list[int]:
    names = [(index, step) for index in range(len(proposals))]
    return list(one.lengths(proposals, names, num_others=num_others))


def test_fixed_sends_all() -> None:
    assert lengths(scheduler("fixed"), SURE, UNSURE, UNKNOWN) == [3, 2, 2]


def test_threshold_cuts_each_block_by_its_own_survival() -> None:
    assert lengths(scheduler("threshold", threshold=0.5), SURE, UNSURE, UNKNOWN) == [3, 1, 2]
    assert lengths(scheduler("threshold", threshold=0.8), SURE, UNSURE) == [2, 0]


def test_hardware_weighs_survival_against_what_a_step_costs() -> None:
    between = StepTimeCurve(num_tokens=(2, 3, 4, 5, 6), seconds=(1.0, 1.2, 1.4, 1.6, 2.6))
    assert lengths(scheduler("hardware", step_times=FREE), SURE, UNSURE) == [3, 2]
    assert lengths(scheduler("hardware", step_times=DEAR), SURE, UNSURE) == [0, 0]
    assert lengths(scheduler("hardware", step_times=between), SURE, UNSURE) == [3, 0]


def test_a_padded_target_gets_one_width() -> None:
    times = StepTimeCurve(num_tokens=(2, 4, 6, 8), seconds=(1.0, 1.2, 1.6, 3.0))
    # 2 -> 3.5 / 1.2 = 2.9 -> 4.49 / 1.6 = 2.8
    assert lengths(scheduler("hardware", step_times=times, is_padded=True), SURE, UNSURE) == [1, 1]


def test_requests_without_drafts_widen_the_step_too() -> None:
    times = StepTimeCurve(num_tokens=(1, 2, 3, 4, 6, 8, 12, 16), seconds=(1.0, 1.05, 1.1, 1.2, 2.0, 2.1, 9.0, 9.1))
    one = scheduler("hardware", step_times=times, is_padded=True)
    assert lengths(one, SURE) == [3]
    assert lengths(one, SURE, num_others=3) == [0]


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_length_depends_on_nothing_that_it_cuts_off(is_padded: bool) -> None:
    """The paper's counterexample: a search in retrospect keeps both drafts or none, as the second one's chance is."""
    for second in (0.0, 0.5, 0.9, 1.0):
        assert lengths(scheduler("hardware", step_times=APPENDIX_A, is_padded=is_padded), proposal(0.8, second)) == [0]


def test_an_asynchronous_target_gets_the_budget_of_two_steps_earlier() -> None:
    one = scheduler("hardware", step_times=APPENDIX_A, is_asynchronous=True)
    good, bad = proposal(0.8, 0.9), proposal(0.8, 0.1)
    steps = [bad, good, bad, good, bad, bad]
    got = [lengths(one, block, step=step)[0] for step, block in enumerate(steps)]
    # The first two have nothing before them; then 2 after a good block, 0 after a bad one, whatever the block itself is.
    assert BUDGET_DELAY == 2
    assert got == [0, 0, 0, 2, 0, 2]


def test_a_block_that_is_drafted_again_has_no_say_in_its_own_budget() -> None:
    one = scheduler("hardware", step_times=APPENDIX_A, is_asynchronous=True)
    good = proposal(0.8, 0.9)
    assert [lengths(one, good, step=7)[0] for _ in range(5)] == [0] * 5
    other = scheduler("hardware", step_times=APPENDIX_A, is_asynchronous=True)
    assert [lengths(other, good, step=step)[0] for step in range(3)] == [0, 0, 2]


def test_confidence_follows_what_is_accepted() -> None:
    one = scheduler("fixed")
    assert one.calibrate(SURE) == SURE
    for _ in range(400):
        one.learn(SURE.confidence, 0)
    corrected = one.calibrate(SURE)
    assert corrected.confidence[0] < 0.5
    assert corrected.confidence[1:] == SURE.confidence[1:]
    assert corrected.survival == pytest.approx(survival_of(corrected.confidence))
    assert corrected.token_ids == SURE.token_ids
    still = scheduler("fixed", recalibrate=False)
    still.learn(SURE.confidence, 0)
    assert still.calibrate(SURE) is SURE


def test_shortening_changes_the_length_and_nothing_of_what_is_kept() -> None:
    ids, probs = torch.arange(6, dtype=torch.int32).view(3, 2), torch.full((3, 2), 0.5)
    kept = shortened(DraftProposal(SURE.token_ids, SURE.confidence, SURE.survival, ids, probs), 2)
    assert (kept.token_ids, kept.confidence, kept.survival) == ([0, 1], [0.9, 0.9], SURE.survival[:2])
    assert kept.probs_ids is not None
    assert kept.probs is not None
    assert kept.probs_ids.tolist() == ids[:2].tolist()
    assert kept.probs.shape == (2, 2)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 1.0)),
        ((1, 1), (1.0, 1.0)),
        ((0, 1), (1.0, 1.0)),
        ((1,), (0.0,)),
        ((1,), (-1.0,)),
        ((1,), (math.nan,)),
        ((1,), (math.inf,)),
    ],
)
def test_a_curve_that_makes_no_sense_is_refused(num_tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        StepTimeCurve(num_tokens=num_tokens, seconds=seconds)


def test_hardware_needs_a_curve_and_a_handshake_needs_no_schedule() -> None:
    with pytest.raises(ValidationError, match="needs step_times"):
        VerifySchedule(kind="hardware")
    target = {"vocab_size": 8, "hidden_size": 4, "num_layers": 2}
    assert ClientHello.model_validate({"client_name": "old", "target": target}).schedule is None
