from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_model.drafter import SamplingParams
from service.batching import CallQueue, StepPlan, fair_order, plan_step, rows_left, share_chunk, take_in
from service.calls import ProposeCall, SessionWork
from service.errors import CapacityError, UnavailableError
from service.sessions import SessionChange, SessionKey

CHUNK = 32


def make_call(
    client_id: str = "c",
    *sessions: tuple[str, int, bool],
    arrived_at: float = 0.0,
    deadline_ms: float | None = None,
) -> ProposeCall:
    """A call with one work item for each (session id, rows, wants drafts)."""
    items = [
        SessionWork(
            change=SessionChange(SessionKey(client_id, name), 0, 0, 0, rows, scratch_rows=4 if drafts else 0),
            token_ids=[0] * rows,
            features=None,
            is_projected=False,
            anchor_token_id=0,
            num_draft_tokens=4 if drafts else 0,
            sampling=SamplingParams(),
        )
        for name, rows, drafts in sessions
    ]
    return ProposeCall(client_id, items, [], arrived_at, deadline_ms)


def plan(calls: list[ProposeCall], *, max_sessions: int = 16) -> StepPlan:
    return plan_step(calls, rows_per_chunk=CHUNK, max_sessions=max_sessions)


def test_a_lone_call_is_served_at_once() -> None:
    call = make_call("c", ("a", 2, True))
    assert take_in([call], now=0.0).ready == [call]
    assert plan([call]).interactive == [call]


def test_a_nearer_deadline_goes_first_between_clients() -> None:
    slow, fast = make_call("one", ("a", 1, True), deadline_ms=50), make_call("two", ("a", 1, True), deadline_ms=5)
    assert fair_order([slow, fast]) == [fast, slow]


def test_every_clients_first_call_goes_before_anyones_second() -> None:
    greedy = [make_call("greedy", (str(i), 1, True), deadline_ms=1 + i) for i in range(5)]
    modest = make_call("modest", ("a", 1, True), deadline_ms=900)
    assert fair_order([*greedy, modest])[:2] == [greedy[0], modest]


def test_a_call_without_deadline_overtakes_younger_ones_in_the_end() -> None:
    patient = make_call("one", ("a", 1, True), arrived_at=0.0)
    hasty = make_call("two", ("a", 1, True), arrived_at=0.9, deadline_ms=200)
    assert fair_order([hasty, patient]) == [patient, hasty]


def test_calls_on_one_session_keep_their_order_even_against_deadlines() -> None:
    first = make_call("c", ("a", 1, True), deadline_ms=900)
    second = make_call("c", ("a", 1, True), ("b", 1, True), deadline_ms=1)
    third = make_call("c", ("b", 1, True), deadline_ms=1)
    assert take_in([first, second, third], now=0.0).ready == [first]
    assert take_in([second, third], now=0.0).ready == [second]


def test_late_and_cancelled_calls_leave_unserved() -> None:
    late, gone, good = (make_call("c", (name, 1, True), deadline_ms=10) for name in "abc")
    late.arrived_at, gone.is_cancelled = -1.0, True
    intake = take_in([late, gone, good], now=0.0)
    assert (intake.expired, intake.cancelled, intake.ready) == ([late], [gone], [good])


def test_drafts_go_before_bulk_rows_and_bulk_is_one_chunk() -> None:
    bulk = make_call("one", ("a", 100_000, False))
    draft = make_call("two", ("a", 2, True))
    step = plan([bulk, draft])
    assert step.interactive == [draft]
    assert [(share.call, share.num_rows) for share in step.bulk] == [(bulk, CHUNK)]


def test_a_long_append_with_drafts_becomes_interactive_with_its_last_chunk() -> None:
    call = make_call("c", ("a", CHUNK + 5, True))
    assert plan([call]).interactive == []
    call.items[0].rows_done = CHUNK
    assert plan([call]).interactive == [call]


def test_one_chunk_is_shared_evenly_and_what_one_leaves_the_others_get() -> None:
    calls = [make_call("one", ("a", 1_000, False)), make_call("two", ("a", 4, False)), make_call("three", ("a", 999, False))]
    shares = {share.call.client_id: share.num_rows for share in share_chunk(calls, 30)}
    assert shares == {"one": 13, "two": 4, "three": 13}


def test_a_step_holds_no_more_sessions_than_allowed_but_always_one_call() -> None:
    wide = make_call("one", *[(str(i), 1, True) for i in range(6)])
    other = make_call("two", ("a", 1, True))
    assert plan([wide, other], max_sessions=6).interactive == [wide]
    assert plan([wide, other], max_sessions=3).interactive == [wide]
    assert plan([wide, other], max_sessions=7).interactive == [wide, other]


def test_a_call_with_nothing_left_to_do_is_finished() -> None:
    call = make_call("c", ("a", 0, False))
    assert plan([call]).finished == [call]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["one", "two", "three"]), st.integers(0, 90), st.booleans(), st.integers(1, 50)),
        max_size=12,
    )
)
def test_every_call_is_served_within_bounded_steps(specs: list[tuple[str, int, bool, int]]) -> None:
    waiting = [
        make_call(client, (f"s{i}", rows, drafts), arrived_at=i / 100, deadline_ms=1_000.0 * due)
        for i, (client, rows, drafts, due) in enumerate(specs)
    ]
    bound = sum(rows for _, rows, _, _ in specs) // CHUNK + 2 * len(specs) + 1
    for _ in range(bound):
        step = plan(take_in(waiting, now=0.5).ready, max_sessions=2)
        assert sum(share.num_rows for share in step.bulk) <= CHUNK
        if len(step.interactive) > 1:
            assert sum(rows_left(call) for call in step.interactive) <= CHUNK
        for share in step.bulk:
            share.item.rows_done += share.num_rows
            assert share.item.rows_left >= 0
        answered = {*map(id, step.interactive), *map(id, step.finished)}
        assert answered or step.bulk or not waiting
        waiting = [call for call in waiting if id(call) not in answered]
    assert not waiting


def test_the_queue_is_bounded_and_says_its_limit() -> None:
    queue = CallQueue(2)
    queue.put(make_call())
    queue.put(make_call())
    with pytest.raises(CapacityError) as caught:
        queue.put(make_call())
    assert (caught.value.status, caught.value.numbers["max_queue"]) == (429, 2)
    assert len(queue.collect(0)[0]) == 2
    with pytest.raises(CapacityError):
        queue.put(make_call())
    queue.done()
    queue.put(make_call())


def test_a_draining_queue_refuses_calls_and_runs_commands() -> None:
    queue = CallQueue(2)
    queue.drain()
    with pytest.raises(UnavailableError) as caught:
        queue.put(make_call())
    assert (caught.value.code, caught.value.status) == ("draining", 503)
    queue.post(lambda: None)
    assert len(queue.collect(None)[1]) == 1
    queue.close()
    with pytest.raises(UnavailableError):
        queue.post(lambda: None)
    assert queue.collect(None) == ([], [], True)
