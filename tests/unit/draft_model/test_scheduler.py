"""The prefix scheduler: recorded cases, brute force, and what keeps it lossless."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_model.scheduler import (
    BUDGET_DELAY,
    DelayedScheduler,
    StepTimes,
    admit,
    best_prefixes,
    draft_budget,
    schedule_prefixes,
    schedule_width,
    survival_of,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "scheduler_vectors.json").read_text())["cases"]

chances = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))
batches = st.lists(st.lists(chances, min_size=0, max_size=3), min_size=1, max_size=3)
# Step rates that fall with the width in any way, in steps too.
tables = st.lists(st.floats(0.05, 2.0), min_size=13, max_size=13).map(lambda rates: sorted(rates, reverse=True))
falling = st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 2.0)).map(
    lambda pair: [1.0 / (pair[0] + pair[1] * width) for width in range(13)]
)


def survivals_of(batch: list[list[float]]) -> list[list[float]]:
    return [survival_of(row) for row in batch]


def throughput(survival: list[list[float]], lengths: tuple[int, ...], table: list[float]) -> float:
    expected = sum(1.0 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return expected * table[len(lengths) + sum(lengths)]


def all_lengths(survival: list[list[float]]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(row) + 1) for row in survival)))


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_recorded_cases(case: dict[str, Any]) -> None:
    table = {int(width): rate for width, rate in case["sps"].items()}
    survival = [survival_of(row) for row in case["c"]]
    for row, recorded in zip(survival, case["survival"], strict=True):
        assert row == pytest.approx(recorded)
    for search, name in ((schedule_prefixes, "early_stop"), (best_prefixes, "unconstrained")):
        schedule = search(survival, table.__getitem__)
        assert list(schedule.lengths) == case[name]["lengths"]
        assert schedule.tokens_per_second == pytest.approx(case[name]["theta"])
        assert schedule.num_tokens == len(survival) + sum(schedule.lengths)


@given(batches, tables)
def test_the_global_search_is_the_best_of_all_lengths(batch: list[list[float]], table: list[float]) -> None:
    survival = survivals_of(batch)
    schedule = best_prefixes(survival, table.__getitem__)
    best = max(throughput(survival, lengths, table) for lengths in all_lengths(survival))
    assert schedule.tokens_per_second == pytest.approx(best)
    assert throughput(survival, schedule.lengths, table) == pytest.approx(best)


@given(batches, falling)
def test_the_early_stop_loses_nothing_where_a_step_grows_evenly(batch: list[list[float]], table: list[float]) -> None:
    """With time linear in the width, throughput rises and then falls along the order of survival."""
    survival = survivals_of(batch)
    assert schedule_prefixes(survival, table.__getitem__).tokens_per_second == pytest.approx(
        best_prefixes(survival, table.__getitem__).tokens_per_second
    )


@given(batches, tables)
def test_no_schedule_is_worse_than_no_drafts(batch: list[list[float]], table: list[float]) -> None:
    survival = survivals_of(batch)
    plain = len(batch) * table[len(batch)]
    stopped, best = schedule_prefixes(survival, table.__getitem__), best_prefixes(survival, table.__getitem__)
    assert plain <= stopped.tokens_per_second <= best.tokens_per_second
    assert throughput(survival, stopped.lengths, table) == pytest.approx(stopped.tokens_per_second)


def tail_changed(batch: list[list[float]], request: int, place: int, tail: list[float]) -> list[list[float]]:
    """The batch as it would be had draft `place` of the request been another token: all later confidences may differ."""
    row = batch[request]
    changed = [*batch]
    changed[request] = [*row[: place + 1], *(tail * 3)[: len(row) - place - 1]]
    return changed


@settings(max_examples=300)
@given(batches, tables, st.data())
def test_whether_a_draft_is_verified_does_not_depend_on_what_it_is(
    batch: list[list[float]], table: list[float], data: st.DataObject
) -> None:
    """The confidence of draft k + 1 and later depends on draft k; that of draft k does not."""
    request = data.draw(st.integers(0, len(batch) - 1))
    if not batch[request]:
        return
    place = data.draw(st.integers(0, len(batch[request]) - 1))
    other = tail_changed(batch, request, place, data.draw(st.lists(chances, min_size=1, max_size=3)))
    budget = data.draw(st.integers(0, 10))
    for decide in (
        lambda rows: schedule_prefixes(rows, table.__getitem__).lengths,
        lambda rows: admit(rows, budget),
        lambda rows: schedule_width(rows, table.__getitem__).lengths,
    ):
        before, after = decide(survivals_of(batch)), decide(survivals_of(other))
        assert min(before[request], place + 1) == min(after[request], place + 1)


def test_the_global_search_does_look_ahead() -> None:
    """Appendix A of the paper: the first draft stays or falls by the confidence of the second."""
    table = [0.0, 1.0, 0.5, 0.45]
    assert best_prefixes([survival_of([0.8, 0.9])], table.__getitem__).lengths == (2,)
    assert best_prefixes([survival_of([0.8, 0.0])], table.__getitem__).lengths == (0,)
    for second in (0.9, 0.0):
        assert schedule_prefixes([survival_of([0.8, second])], table.__getitem__).lengths == (0,)


@given(batches, st.integers(-1, 12))
def test_a_budget_goes_to_the_likeliest_prefixes(batch: list[list[float]], budget: int) -> None:
    survival = survivals_of(batch)
    lengths = admit(survival, budget)
    usable = sum(chance > 0.0 for row in survival for chance in row)
    assert sum(lengths) == min(max(budget, 0), usable)
    kept = sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    rivals = [other for other in all_lengths(survival) if sum(other) == sum(lengths)]
    best = max(sum(sum(row[:length]) for row, length in zip(survival, other, strict=True)) for other in rivals)
    assert kept == pytest.approx(best)


@given(batches, tables)
def test_the_budget_for_the_same_requests_is_that_of_the_best_schedule(batch: list[list[float]], table: list[float]) -> None:
    survival = survivals_of(batch)
    budget = draft_budget(survival, table.__getitem__)
    assert throughput(survival, admit(survival, budget), table) == pytest.approx(
        best_prefixes(survival, table.__getitem__).tokens_per_second
    )


@given(batches, falling)
def test_one_width_for_all_is_the_best_where_a_step_grows_evenly(batch: list[list[float]], table: list[float]) -> None:
    survival = survivals_of(batch)
    requests, longest = len(batch), max(len(row) for row in batch)

    def padded(width: int) -> float:
        return (requests + sum(sum(row[:width]) for row in survival)) * table[requests * (1 + width)]

    schedule = schedule_width(survival, table.__getitem__)
    width = schedule.num_tokens // requests - 1
    assert schedule.lengths == tuple(min(len(row), width) for row in survival)
    assert schedule.tokens_per_second == pytest.approx(padded(width))
    assert schedule.tokens_per_second == pytest.approx(max(padded(width) for width in range(longest + 1)))


def test_the_budget_grows_with_the_requests() -> None:
    def flat(width: int) -> float:
        return 1.0

    rows = [[0.9, 0.5], [0.8, 0.1]]
    assert draft_budget(rows, flat) == 4
    assert draft_budget(rows, flat, 4) == 8
    assert draft_budget(rows, flat, 1) == 2
    assert draft_budget(rows, flat, 0) == 0
    assert draft_budget([[0.0], []], flat, 3) == 0
    assert draft_budget([], flat, 3) == 0


def test_the_delayed_schedule_reads_only_earlier_steps() -> None:
    times = StepTimes((1, 2, 3, 4), (1.0, 1.2, 3.0, 3.1))
    scheduler = DelayedScheduler(times.steps_per_second)
    sure, unsure = [[0.9, 0.9, 0.9]], [[0.1, 0.1, 0.1]]
    assert scheduler.budget(1) is None
    first = [scheduler.schedule(unsure), scheduler.schedule(sure)]
    assert first == [schedule_prefixes(rows, times.steps_per_second).lengths for rows in (unsure, sure)]
    assert BUDGET_DELAY == 2
    # Step 2 goes by step 0, step 3 by step 1, whatever their own drafts say.
    assert scheduler.budget(1) == 0
    assert scheduler.schedule(sure) == (0,)
    assert scheduler.budget(1) == draft_budget(sure, times.steps_per_second) == 1
    assert scheduler.schedule(unsure) == (1,)
    # The search is global: two requests jump over the step at width 3.
    assert scheduler.schedule([]) == ()
    assert scheduler.budget(2) == draft_budget(sure, times.steps_per_second, 2)


def test_no_requests_and_no_drafts() -> None:
    assert schedule_prefixes([], lambda width: 1.0).lengths == schedule_width([], lambda width: 1.0).lengths == ()
    assert schedule_width([[], []], lambda width: 3.0).num_tokens == 2
    schedule = schedule_prefixes([[], []], lambda width: 3.0)
    assert (schedule.lengths, schedule.num_tokens, schedule.tokens_per_second) == ((0, 0), 2, 6.0)


# Step times ----------------------------------------------------------------------------------------------------------


def test_step_times_are_interpolated_and_go_on() -> None:
    times = StepTimes((2, 4, 8), (1.0, 2.0, 4.0))
    assert [times.seconds_at(width) for width in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert times.steps_per_second(6) == pytest.approx(1 / 3)
    assert StepTimes((3,), (0.5,)).seconds_at(99) == 0.5
    assert StepTimes((2, 4), (1.0, 0.9)).seconds_at(40) == 0.9


@pytest.mark.parametrize(
    ("widths", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1,), (float("nan"),))],
)
def test_step_times_that_cannot_be_are_refused(widths: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="step times"):
        StepTimes(widths, seconds)
