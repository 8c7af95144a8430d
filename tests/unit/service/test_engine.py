"""The engine over a drafter whose output is a function of exactly the rows it holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

import pytest

from draft_model.drafter import DraftProposal, DraftRequest
from service.batching import CallQueue
from service.calls import ProposeCall, SessionOutcome, SessionWork
from service.engine import DraftEngine, cut_by_survival, proposal_problem
from service.errors import ApiError
from service.sessions import SessionKey
from service.testing import FakeDrafter
from service.watch import REFUSED_DRAFTS
from tests.support.service import GatedDrafter, fresh_drafts, make_call, make_harness, make_work, running


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def until_waiting(engine: DraftEngine, count: int) -> None:
    while engine.num_waiting < count:  # noqa: ASYNC110 - the engine tells nobody, and a test may poll
        await asyncio.sleep(0)


def outcome_of(work: SessionWork) -> SessionOutcome:
    assert work.outcome is not None
    return work.outcome


def error_of(work: SessionWork) -> ApiError:
    error = outcome_of(work).error
    assert error is not None
    return error


def proposal_of(work: SessionWork) -> DraftProposal:
    proposal = outcome_of(work).proposal
    assert proposal is not None
    return proposal


def drafts_of(work: SessionWork) -> list[int]:
    assert outcome_of(work).error is None, outcome_of(work).error
    return list(proposal_of(work).token_ids)


def test_drafts_are_those_of_a_session_fed_the_accepted_rows() -> None:
    async def test() -> None:
        async with running(make_harness()) as engine:
            first = make_work("a", 0, [1, 2, 3])
            await engine.propose(make_call(first))
            assert drafts_of(first) == fresh_drafts([1, 2, 3])
            second = make_work("a", 3, [7, 9], seq=1, anchor_token_id=4)
            await engine.propose(make_call(second))
            assert drafts_of(second) == fresh_drafts([1, 2, 3, 7, 9], anchor_token_id=4)
            assert (outcome_of(second).committed_end, outcome_of(second).rows_held) == (5, 5)
            rewind = make_work("a", 1, [8], seq=2)
            await engine.propose(make_call(rewind))
            assert drafts_of(rewind) == fresh_drafts([1, 8])

    run(test())


def test_random_schedules_of_many_clients_equal_the_replay_of_accepted_rows() -> None:
    """Chunks, accepts, rewinds, repeats, K=0, closes and reopenings of twelve sessions, four calls at a time."""

    async def drive(engine: DraftEngine, client_id: str, seed: int) -> None:
        rng = random.Random(seed)
        committed: dict[str, list[int]] = {}
        seqs: dict[str, int] = {}
        incarnations: dict[str, int] = {}
        for _ in range(60):
            works = []
            for name in rng.sample("abc", rng.randint(1, 3)):
                tokens = committed.setdefault(name, [])
                start = rng.randint(0, len(tokens)) if rng.random() < 0.2 else len(tokens)
                start = 0 if len(tokens) > 60 else start
                new = [rng.randrange(1_000) for _ in range(rng.choice([0, 1, 2, 4, 40]))]
                del tokens[start:]
                tokens.extend(new)
                seqs[name] = seqs.get(name, -1) + 1
                works.append(
                    make_work(
                        name,
                        start,
                        new,
                        seq=seqs[name],
                        client_id=client_id,
                        num_draft_tokens=rng.choice([0, 1, 4]),
                        incarnation=incarnations.setdefault(name, 0),
                    )
                )
            await engine.propose(make_call(*works))
            for work in works:
                expected = fresh_drafts(committed[work.key.session_id], count=work.num_draft_tokens)
                assert outcome_of(work).committed_end == len(committed[work.key.session_id])
                assert (drafts_of(work) if work.num_draft_tokens else []) == expected
            if rng.random() < 0.3:
                again = works[0]
                repeat = make_work(
                    again.key.session_id,
                    again.change.start,
                    again.token_ids,
                    seq=again.change.seq,
                    client_id=client_id,
                    incarnation=again.change.incarnation,
                )
                await engine.propose(make_call(repeat))
                assert repeat.outcome is again.outcome
            if rng.random() < 0.15:
                name = works[0].key.session_id
                await engine.close_session(works[0].key)
                committed[name], seqs[name] = [], -1
                incarnations[name] += 1

    async def test() -> None:
        harness = make_harness(FakeDrafter(num_pages=512))
        async with running(harness) as engine:
            await asyncio.gather(*(drive(engine, f"client-{i}", i) for i in range(4)))
        assert max(harness.model.batches) > 3, "the schedule never batched across clients"

    run(test())


def test_a_repeat_writes_nothing_again() -> None:
    async def test() -> None:
        harness = make_harness()
        async with running(harness) as engine:
            for _ in range(3):
                work = make_work("a", 0, [1, 2, 3])
                await engine.propose(make_call(work))
                assert drafts_of(work) == fresh_drafts([1, 2, 3])
            assert harness.model.rows_written == 3
            assert harness.model.batches == [1]

    run(test())


def test_one_refused_session_leaves_the_rest_of_its_batch_served() -> None:
    async def test() -> None:
        async with running(make_harness()) as engine:
            await engine.propose(make_call(make_work("gap", 0, [1])))
            works = [make_work("a", 0, [1, 2]), make_work("gap", 5, [9], seq=1), make_work("b", 0, [3])]
            await engine.propose(make_call(*works))
            assert drafts_of(works[0]) == fresh_drafts([1, 2])
            assert drafts_of(works[2]) == fresh_drafts([3])
            assert error_of(works[1]).code == "context_gap"
            assert outcome_of(works[1]).committed_end == 1

    run(test())


def test_a_failed_forward_fails_its_batch_only_and_the_update_may_be_sent_again() -> None:
    async def test() -> None:
        harness = make_harness(FakeDrafter(fail_on_anchor=666))
        async with running(harness) as engine:
            bad = make_work("a", 0, [1, 2], anchor_token_id=666)
            await engine.propose(make_call(bad))
            assert (error_of(bad).code, error_of(bad).status) == ("internal", 500)
            assert "666" not in error_of(bad).message
            other = make_work("b", 0, [5])
            await engine.propose(make_call(other))
            assert drafts_of(other) == fresh_drafts([5])
            again = make_work("a", 0, [1, 2])
            await engine.propose(make_call(again))
            assert drafts_of(again) == fresh_drafts([1, 2])
            assert harness.metrics.forward_failures.labels("draft")._value.get() == 1

    run(test())


def test_a_long_append_does_not_hold_up_another_clients_drafts() -> None:
    async def test() -> None:
        harness = make_harness(FakeDrafter(num_pages=1_024), max_context=4_096, rows_per_chunk=16)
        async with running(harness) as engine:
            bulk = make_work("bulk", 0, [1] * 3_000, client_id="one", num_draft_tokens=0)
            waiting = asyncio.create_task(engine.propose(make_call(bulk)))
            draft = make_work("a", 0, [1, 2], client_id="two")
            await engine.propose(make_call(draft))
            assert drafts_of(draft) == fresh_drafts([1, 2])
            assert not waiting.done()
            assert harness.model.rows_written < 3_000
            await waiting
            assert outcome_of(bulk).committed_end == 3_000

    run(test())


def test_a_hundred_thousand_rows_of_one_client_push_no_draft_of_another_past_its_deadline() -> None:
    """While they are written, a draft waits for the chunk that is under way and for no more, whenever it comes."""
    chunk = 512

    @dataclass
    class Marking(FakeDrafter):
        at_draft: list[int] = field(default_factory=list)

        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
            self.at_draft.append(self.rows_written)
            return super().draft(requests)

    async def test() -> None:
        model = Marking(num_pages=2_048, page_size=64)
        harness = make_harness(model, max_context=200_000, rows_per_chunk=chunk, max_queue=64)
        at_arrival: list[int] = []
        async with running(harness) as engine:
            queue = engine._queue

            def arrive(call: ProposeCall) -> None:
                with queue._condition:  # the worker takes no call meanwhile, and ends the chunk it is at
                    at_arrival.append(model.rows_written)
                    CallQueue.put(queue, call)

            queue.put = arrive  # type: ignore[method-assign]
            bulk = make_work("bulk", 0, [1] * 100_000, client_id="one", num_draft_tokens=0)
            waiting = asyncio.create_task(engine.propose(make_call(bulk)))
            drafted = 0
            await asyncio.sleep(0)
            while not waiting.done():
                draft = make_work("a", drafted, [1], seq=drafted, client_id="two")
                await engine.propose(make_call(draft, deadline_ms=60_000))
                assert outcome_of(draft).error is None
                drafted += 1
            await waiting
            assert outcome_of(bulk).committed_end == 100_000
        waited = [drafted - arrived for arrived, drafted in zip(at_arrival[1:], model.at_draft, strict=True)]
        assert len(waited) > 10, "hardly any draft was asked for while the rows were written"
        assert max(waited) <= chunk + 1

    run(test())


def test_a_session_that_skips_steps_is_not_rebuilt() -> None:
    async def test() -> None:
        harness = make_harness()
        async with running(harness) as engine:
            await engine.propose(make_call(make_work("a", 0, [1, 2, 3])))
            for seq in range(10):
                await engine.propose(make_call(make_work("b", seq, [seq], seq=seq)))
            written = harness.model.rows_written
            work = make_work("a", 3, [4], seq=1)
            await engine.propose(make_call(work))
            assert harness.model.rows_written == written + 1
            assert drafts_of(work) == fresh_drafts([1, 2, 3, 4])

    run(test())


def test_calls_that_wait_together_share_one_forward() -> None:
    async def test() -> None:
        model = GatedDrafter(num_pages=256)
        async with running(make_harness(model)) as engine:
            first = asyncio.create_task(engine.propose(make_call(make_work("x", 0, [1], client_id="zero"))))
            await asyncio.to_thread(model.entered.wait, 10)
            works = [make_work("a", 0, [i, i], client_id=f"client-{i}") for i in range(5)]
            calls = [asyncio.create_task(engine.propose(make_call(work))) for work in works]
            await until_waiting(engine, 6)
            model.gate.set()
            await asyncio.gather(first, *calls)
            assert model.batches == [1, 5]
            assert [drafts_of(work) for work in works] == [fresh_drafts([i, i]) for i in range(5)]

    run(test())


def test_a_call_whose_caller_has_gone_costs_nothing_further() -> None:
    async def test() -> None:
        model = GatedDrafter()
        harness = make_harness(model)
        async with running(harness) as engine:
            first = asyncio.create_task(engine.propose(make_call(make_work("x", 0, [1]))))
            await asyncio.to_thread(model.entered.wait, 10)
            gone = asyncio.create_task(engine.propose(make_call(make_work("a", 0, [1, 2]))))
            await until_waiting(engine, 2)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            model.gate.set()
            await first
            await engine.run(len)
            assert (model.rows_written, model.batches) == (1, [1])
            assert await engine.run(len) == 1
            assert engine.num_waiting == 0

    run(test())


def test_a_call_past_its_deadline_is_told_so_and_has_changed_nothing() -> None:
    async def test() -> None:
        model = GatedDrafter()
        async with running(make_harness(model)) as engine:
            first = asyncio.create_task(engine.propose(make_call(make_work("x", 0, [1]))))
            await asyncio.to_thread(model.entered.wait, 10)
            call = make_call(make_work("a", 0, [1, 2]), deadline_ms=0.001)
            late = asyncio.create_task(engine.propose(call))
            await until_waiting(engine, 2)
            model.gate.set()
            await first
            with pytest.raises(ApiError) as caught:
                await late
            assert (caught.value.code, caught.value.status) == ("deadline_exceeded", 504)
            assert await engine.run(len) == 1

    run(test())


def test_draining_finishes_what_is_inside_and_refuses_the_rest() -> None:
    async def test() -> None:
        model = GatedDrafter()
        async with running(make_harness(model)) as engine:
            work = make_work("x", 0, [1])
            inside = asyncio.create_task(engine.propose(make_call(work)))
            await asyncio.to_thread(model.entered.wait, 10)
            engine.drain()
            with pytest.raises(ApiError) as caught:
                await engine.propose(make_call(make_work("a", 0, [1])))
            assert (caught.value.code, caught.value.status) == ("draining", 503)
            model.gate.set()
            await inside
            assert drafts_of(work) == fresh_drafts([1])

    run(test())


def test_no_draft_is_made_past_the_context_limit_and_neighbours_are_intact() -> None:
    async def test() -> None:
        async with running(make_harness(max_context=20)) as engine:
            for length in range(14, 21):
                tokens = list(range(length))
                work, neighbour = make_work(f"s{length}", 0, tokens), make_work("n", 0, [5], seq=length)
                await engine.propose(make_call(work, neighbour))
                assert drafts_of(neighbour) == fresh_drafts([5])
                assert outcome_of(work).committed_end == length
                assert (drafts_of(work) if outcome_of(work).proposal else []) == (
                    fresh_drafts(tokens) if length + 4 <= 20 else []
                )

    run(test())


def test_acceptance_is_learnt_from_the_next_commit() -> None:
    async def test() -> None:
        harness = make_harness()
        async with running(harness) as engine:
            work = make_work("a", 0, [1, 2])
            await engine.propose(make_call(work))
            drafts = drafts_of(work)
            await engine.propose(make_call(make_work("a", 2, [7, drafts[0], drafts[1], 1_000], seq=1)))
        kept = harness.metrics.accepted_tokens_per_position
        assert [kept.labels(str(place))._value.get() for place in range(3)] == [1, 1, 0]

    run(test())


def test_a_target_that_keeps_hardly_anything_is_a_warning_that_names_the_likely_fields() -> None:
    async def test() -> None:
        async with running(make_harness(FakeDrafter(num_pages=512))) as engine:
            for seq in range(REFUSED_DRAFTS + 1):
                await engine.propose(make_call(make_work("a", seq, [seq], seq=seq)))
            (warning,) = engine.warnings
            assert warning.startswith("low_acceptance")
            assert "target_layer_ids" in warning
            engine.drop_client("client", "lease")
            await engine.run(len)
            assert engine.warnings == []

    run(test())


def test_closing_frees_the_pages_and_a_late_update_stays_out() -> None:
    async def test() -> None:
        harness = make_harness()
        async with running(harness) as engine:
            await engine.propose(make_call(make_work("a", 0, [1, 2])))
            closer = make_work("b", 0, [1])
            await engine.propose(make_call(closer, closes=[SessionKey("client", "a"), SessionKey("client", "unknown")]))
            late = make_work("a", 2, [3], seq=1)
            await engine.propose(make_call(late))
            assert error_of(late).code == "stale_incarnation"

    run(test())


def test_a_cut_by_survival_changes_length_only() -> None:
    async def test() -> None:
        async with running(make_harness()) as engine:
            whole, cut = make_work("a", 0, [1]), make_work("b", 0, [1], confidence_threshold=0.8)
            await engine.propose(make_call(whole, cut))
            assert drafts_of(cut) == drafts_of(whole)[:2]
            assert proposal_of(cut).survival == proposal_of(whole).survival[:2]
            assert cut_by_survival(proposal_of(whole), 0.0) is proposal_of(whole)

    run(test())


@pytest.mark.parametrize(
    ("proposal", "problem"),
    [
        (DraftProposal([1, 2], [0.5, 0.5], [0.5, 0.25]), None),
        (DraftProposal([1, 2], [], []), None),
        (DraftProposal([], [], []), None),
        (DraftProposal([1, 2, 3], [], []), "3 drafts where 2"),
        (DraftProposal([1, 2], [0.5], [0.5]), "1 values of confidence"),
        (DraftProposal([1, 2], [0.5, float("nan")], [0.5, 0.5]), "confidence is not finite"),
    ],
)
def test_proposals_that_cannot_be_sent_are_named(proposal: DraftProposal, problem: str | None) -> None:
    found = proposal_problem(proposal, 2)
    assert found is None if problem is None else found is not None and problem in found


def test_an_unfit_proposal_fails_its_session_only() -> None:
    class Unfit(FakeDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
            first, *rest = super().draft(requests)
            return [DraftProposal(first.token_ids, [float("nan")] * 4, first.survival), *rest]

    async def test() -> None:
        async with running(make_harness(Unfit())) as engine:
            works = [make_work("a", 0, [1]), make_work("b", 0, [2])]
            await engine.propose(make_call(*works))
            assert error_of(works[0]).code == "internal"
            assert drafts_of(works[1]) == fresh_drafts([2])
            assert [warning.partition(":")[0] for warning in engine.warnings] == ["non_finite"]

    run(test())


def test_a_client_that_leaves_takes_its_waiting_calls_and_sessions_along() -> None:
    async def test() -> None:
        model = GatedDrafter()
        async with running(make_harness(model)) as engine:
            first = asyncio.create_task(engine.propose(make_call(make_work("a", 0, [1], client_id="gone"))))
            await asyncio.to_thread(model.entered.wait, 10)
            second = asyncio.create_task(engine.propose(make_call(make_work("a", 1, [2], seq=1, client_id="gone"))))
            other = make_work("a", 0, [5], client_id="here")
            third = asyncio.create_task(engine.propose(make_call(other)))
            await until_waiting(engine, 3)
            engine.drop_client("gone", "disconnect")
            model.gate.set()
            await asyncio.gather(first, third)
            with pytest.raises(ApiError) as caught:
                await second
            assert caught.value.code == "epoch_mismatch"
            assert drafts_of(other) == fresh_drafts([5])
            assert await engine.run(lambda sessions: [session.key.client_id for session in sessions]) == ["here"]

    run(test())


def test_closing_a_session_in_the_middle_of_its_rows_is_told_to_its_call() -> None:
    async def test() -> None:
        harness = make_harness(FakeDrafter(num_pages=1_024), max_context=4_096, rows_per_chunk=4)
        async with running(harness) as engine:
            works = [make_work("long", 0, [1] * 2_000), make_work("short", 0, [2])]
            waiting = asyncio.create_task(engine.propose(make_call(*works)))
            while harness.model.rows_written == 0:  # noqa: ASYNC110 - see until_waiting
                await asyncio.sleep(0)
            await engine.close_session(works[0].key)
            await waiting
            assert error_of(works[0]).code == "session_not_found"
            assert drafts_of(works[1]) == fresh_drafts([2])
            assert harness.metrics.forward_failures.labels("context")._value.get() == 0

    run(test())


def test_rows_from_the_prefix_cache_and_rows_missing_are_counted() -> None:
    async def test() -> None:
        harness = make_harness()
        tokens = list(range(1, 11))
        async with running(harness) as engine:
            await engine.propose(make_call(make_work("a", 0, tokens)))
            work = make_work("b", 10, [11])
            work.change = work.change._replace(prefix_token_ids=tuple(tokens))
            await engine.propose(make_call(work))
            assert outcome_of(work).rows_held == 9
            metrics = harness.metrics
            counted = [c._value.get() for c in (metrics.prefix_queried_rows, metrics.rows_restored, metrics.rows_missing)]
            assert counted == [10, 8, 2]

    run(test())


def test_acceptance_is_learnt_from_the_next_rows() -> None:
    async def test() -> None:
        harness = make_harness()
        async with running(harness) as engine:
            first = make_work("a", 0, [1, 2])
            await engine.propose(make_call(first))
            kept = drafts_of(first)[:3]
            await engine.propose(make_call(make_work("a", 2, [7, *kept], seq=1)))
            verified = harness.metrics.verified_drafts.labels("<1k", "full")._value.get()
            accepted = harness.metrics.accepted_tokens.labels("<1k", "full")._value.get()
            places = [harness.metrics.accepted_tokens_per_position.labels(str(i))._value.get() for i in range(4)]
            assert (verified, accepted, places) == (1, 3, [1, 1, 1, 0])

    run(test())


def test_a_worker_that_cannot_start_says_why_and_takes_no_call() -> None:
    def fail() -> None:
        raise RuntimeError("no device")

    engine = make_harness(on_worker_start=fail).engine
    with pytest.raises(RuntimeError, match="no device"):
        engine.start()

    async def test() -> None:
        with pytest.raises(ApiError) as caught:
            await engine.propose(make_call(make_work("a", 0, [1])))
        assert caught.value.code == "not_ready"

    run(test())


def test_the_drafter_is_told_the_tokens_of_the_context_as_far_as_they_are_known() -> None:
    @dataclass
    class Recorder(FakeDrafter):
        contexts: list[list[int]] = field(default_factory=list)

        def draft(self, requests):
            self.contexts.extend(list(request.context_token_ids) for request in requests)
            return super().draft(requests)

    async def test() -> None:
        model = Recorder()
        async with running(make_harness(model)) as engine:
            await engine.propose(make_call(make_work("a", 0, [1, 2, 3])))
            await engine.propose(make_call(make_work("a", 3, [7, 9], seq=1)))
            await engine.propose(make_call(make_work("a", 1, [8], seq=2)))
            await engine.propose(make_call(make_work("b", 5, [4, 6])))
            await engine.propose(make_call(make_work("b", 3, [5], seq=1)))
        assert model.contexts == [[1, 2, 3], [1, 2, 3, 7, 9], [1, 8], [4, 6], [5]]

    run(test())
