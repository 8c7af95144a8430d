"""The engine: an asyncio front and one worker thread that owns the model, the sessions and every tensor.

A step of the worker reads as

    admit  -> take waiting calls in order, check their updates, find their pages
    write  -> context rows of the interactive calls, then
    draft  -> one forward over the union of their sessions, then
    reply  -> wake their callers
    bulk   -> one bounded chunk of everybody else's rows

and starts as soon as one call waits: nothing is ever held back to fill a batch.

A model call that raises fails the sessions that were in it and nothing else. Their rows are as if the update had not
arrived past its start, so the caller repairs by sending it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from torch import Tensor

from draft_model.backbone.base import ProjectionWeights
from draft_model.drafter import ContextWrite, DraftProposal, DraftRequest
from service.batching import CallQueue, StepPlan, plan_step, take_in
from service.calls import ProposeCall, SessionOutcome, SessionWork
from service.errors import ApiError, DeadlineError, InternalError, NotFoundError, StateError, UnavailableError
from service.metrics import EngineMetrics
from service.schedule import VerifyScheduler
from service.sessions import Session, SessionChange, SessionKey, SessionTable
from service.settings import EngineLimits
from service.watch import DraftWatch

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

SWEEP_SECONDS = 1.0


class DraftModel(Protocol):
    """What the engine needs of a drafter: `draft_model.drafter.Drafter`, or `service.testing.FakeDrafter`."""

    @property
    def draft_block_size(self) -> int:
        """Slots of one draft forward; also the scratch rows a session needs past its last row."""

    @property
    def head_seconds(self) -> float:
        """Time of the last `draft` in the sequential head."""

    @property
    def projection(self) -> ProjectionWeights:
        """How raw features become projected rows."""

    def write_context(self, writes: Sequence[ContextWrite]) -> None:
        """Write context rows to the pages of several sessions."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """Draft for several sessions in one forward."""


class DraftEngine:
    """The engine. Construct, `start`, `propose` from one event loop, `stop`.

    Args:
        model: owned by the worker thread from `start` to `stop`.
        sessions: likewise.
        on_worker_start: run first in the worker thread, for settings that are kept per thread.
        problems: what a canary found; they stand as warnings for as long as the drafter is served.
    """

    def __init__(
        self,
        model: DraftModel,
        sessions: SessionTable,
        limits: EngineLimits,
        metrics: EngineMetrics,
        *,
        on_worker_start: Callable[[], None] = lambda: None,
        problems: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._limits = limits
        self._metrics = metrics
        self._on_worker_start = on_worker_start
        self._queue = CallQueue(limits.max_queue)
        self._waiting: list[ProposeCall] = []
        self._next_sweep = 0.0
        self._watch = DraftWatch(limits.acceptance_floor)
        self._problems = list(problems)
        self._draft_version: str | None = None
        self._is_ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="draft-engine-worker", daemon=True)

    # Event loop side -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker and wait until it is ready; raises what `on_worker_start` raises."""
        self._thread.start()
        self._is_ready.result()

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._queue.is_draining

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs."""
        return self._thread.is_alive()

    @property
    def num_sessions(self) -> int:
        """Sessions held."""
        return len(self._sessions)

    @property
    def num_free_pages(self) -> int:
        """Pages of the context pool that nobody holds."""
        return self._sessions.num_free_pages

    @property
    def num_prefix_pages(self) -> int:
        """Pages that the prefix cache holds, alone or with sessions."""
        return self._sessions.num_prefix_pages

    @property
    def warnings(self) -> list[str]:
        """What an operator should know although every call is answered."""
        return [*self._problems, *self._watch.warnings]

    @property
    def num_waiting(self) -> int:
        """Calls taken in and not yet answered."""
        return self._queue.num_waiting

    def submit(self, call: ProposeCall) -> asyncio.Future[None]:
        """Take a call in; its items hold their outcomes once the future is done.

        Cancel the future when the caller has gone away: the worker then drops what is left of the call. The future
        raises ApiError when the call as a whole was refused after it was taken in, by deadline_exceeded for example.

        Raises:
            ApiError: overloaded, draining or not_ready; the call was not taken in.
        """
        self._require_alive()
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()

        def settle(error: ApiError | None) -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(None)
            else:
                answered.set_exception(error)

        def note_cancelled(future: asyncio.Future[None]) -> None:
            call.is_cancelled = future.cancelled()

        answered.add_done_callback(note_cancelled)
        call.finish = lambda error: _call_soon(loop, lambda: settle(error))
        self._queue.put(call)
        return answered

    def _require_alive(self) -> None:
        if not self.is_alive:
            raise UnavailableError("not_ready", "the engine's worker does not run")

    async def propose(self, call: ProposeCall) -> None:
        """Serve a call. Cancelling this coroutine drops what is left of it.

        Raises:
            ApiError: see `submit`.
        """
        await self.submit(call)

    async def run(self, command: Callable[[SessionTable], ResultT]) -> ResultT:
        """Run `command` on the worker, between two steps, and return what it returns or raise what it raises.

        Raises:
            UnavailableError: the worker does not run.
        """
        self._require_alive()
        done: Future[ResultT] = Future()

        def execute() -> None:
            try:
                done.set_result(command(self._sessions))
            except ApiError as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(error)
                raise

        self._queue.post(execute)
        return await asyncio.wrap_future(done)

    async def close_session(self, key: SessionKey) -> None:
        """Close one session. A call that is being served for it is told that the session is gone.

        Raises:
            NotFoundError: there is no such session.
        """
        await self.run(lambda sessions: self._close_session(sessions, key))

    async def replace(self, model: DraftModel, sessions: SessionTable, limits: EngineLimits, draft_version: str) -> None:
        """Draft with another model from the next step on.

        Every session is freed, and calls that are not answered yet or were checked against the old model are refused with
        epoch_mismatch.

        Raises:
            UnavailableError: the worker does not run.
        """
        await self.run(lambda _: self._replace(model, sessions, limits, draft_version))

    def drop_client(self, client_id: str, reason: str) -> None:
        """Free a client's sessions soon; returns at once."""
        self._queue.post(lambda: self._drop_client(client_id, reason))

    def drain(self) -> None:
        """Refuse new calls from now on; the ones inside are answered."""
        self._queue.drain()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finish what is inside, free every session and end the worker."""
        self._queue.close()
        self._thread.join(timeout_s)

    # Worker side -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._on_worker_start()
        except BaseException as error:  # noqa: BLE001 - raised again by `start`, in the thread that waits there
            self._is_ready.set_exception(error)
            return
        self._is_ready.set_result(None)
        is_closed = False
        while not (is_closed and not self._waiting):
            calls, commands, is_closed = self._queue.collect(0 if self._waiting else SWEEP_SECONDS)
            self._waiting.extend(calls)
            for command in commands:
                self._guarded(command, "command")
            if self._waiting:
                self._guarded(self._step, "step")
            self._guarded(self._sweep, "sweep")
        self._sessions.clear()

    def _guarded(self, work: Callable[[], None], what: str) -> None:
        """Keep the worker alive whatever `work` raises. A bug in a step fails the calls of that step, not the server."""
        try:
            work()
        except Exception:
            logger.exception("the engine's %s failed", what)
            self._metrics.forward_failures.labels(what).inc()
            if what == "step":
                for call in [call for call in self._waiting if call.is_started]:
                    self._leave(call, InternalError("the step that held this call failed"))

    def _step(self) -> None:
        plan = self._admit()
        self._metrics.publish_acceptance()
        self._write_interactive(plan)
        self._draft(plan)
        self._reply(plan.interactive)
        self._reply(plan.finished)
        self._write_bulk(plan)

    def _admit(self) -> StepPlan:
        now = time.monotonic()
        self._refuse_outdated()
        intake = take_in(self._waiting, now)
        for call in intake.cancelled:
            self._metrics.cancelled_calls.inc()
            self._leave(call, None)
        for call in intake.expired:
            self._leave(call, DeadlineError((now - call.arrived_at) * 1000.0, call.deadline_ms or 0.0))
        for call in intake.ready:
            if not call.is_started:
                self._start(call, now)
        return plan_step(
            intake.ready,
            rows_per_chunk=self._limits.rows_per_chunk,
            max_sessions=self._limits.max_sessions_per_call,
        )

    def _refuse_outdated(self) -> None:
        """Refuse the calls that were checked against a drafter that is gone: their rows may have another width."""
        if self._draft_version is not None:
            for call in [call for call in self._waiting if call.draft_version != self._draft_version]:
                self._leave(call, _replaced())

    def _start(self, call: ProposeCall, now: float) -> None:
        """Apply what needs no model: closes, repeats, refusals, pages and truncation."""
        call.is_started = True
        if any(work.change.num_rows for work in call.items):
            self._watch.saw_rows(is_constant=call.has_constant_rows)
        call.timings.queue_ms = (now - call.arrived_at) * 1000.0
        self._metrics.queue_seconds.observe(now - call.arrived_at)
        busy = frozenset().union(*(other.keys for other in self._waiting if other.is_started))
        for key in call.closes:
            if self._sessions.get(key) is not None:
                self._sessions.close(key)
        for work in call.items:
            try:
                if work.refused is not None:
                    raise work.refused
                stored: SessionOutcome | None = self._sessions.stored_reply(work.change, now)
                if stored is not None:
                    work.outcome = stored
                    continue
                self._learn_acceptance(work, call.scheduler)
                work.change = self._without_impossible_drafts(work.change)
                self._prepare(work, now, busy)
            except ApiError as error:
                work.outcome = self._refusal(work, error)

    def _prepare(self, work: SessionWork, now: float, busy: frozenset[SessionKey]) -> None:
        change, before = work.change, self._sessions.get(work.key)
        session = work.session = self._sessions.prepare(change, now, busy)
        if session is not before:
            self._metrics.prefix_queried_rows.inc(len(change.prefix_token_ids))
            self._metrics.rows_restored.inc(session.span.num_rows)
            self._metrics.rows_missing.inc(session.span.committed_end - session.span.num_rows)

    def _without_impossible_drafts(self, change: SessionChange) -> SessionChange:
        """Ask for no drafts where the block would pass the context limit: that is a legal answer, not an error."""
        if change.start + change.num_rows + change.scratch_rows > self._limits.max_context:
            return change._replace(scratch_rows=0)
        return change

    def _write_interactive(self, plan: StepPlan) -> None:
        works = [work for call in plan.interactive for work in call.items if work.rows_left]
        if works:
            took_ms = self._write([(work, work.rows_left) for work in works])
            for call in plan.interactive:
                call.timings.context_ms += took_ms

    def _write_bulk(self, plan: StepPlan) -> None:
        if not plan.bulk:
            return
        took_ms = self._write([(share.item, share.num_rows) for share in plan.bulk])
        calls = {id(share.call): share.call for share in plan.bulk}
        for call in calls.values():
            call.timings.context_ms += took_ms
        self._reply([c for c in calls.values() if not any(i.rows_left or i.wants_drafts for i in c.items)])

    def _write(self, parts: list[tuple[SessionWork, int]]) -> float:
        """Write some rows of each work item and count them as committed; returns milliseconds."""
        began = time.perf_counter()
        writes = []
        for work, num_rows in parts:
            session = _session_of(work)
            writes.append(
                ContextWrite(
                    page_ids=session.pages,
                    first_row=session.span.num_rows,
                    position=session.span.committed_end,
                    features=_next_rows(work, num_rows),
                    is_projected=work.is_projected,
                )
            )
        try:
            self._model.write_context(writes)
        except Exception as error:  # noqa: BLE001 - a failed forward is told to the sessions in it, whatever it raised
            self._fail([work for work, _ in parts], "context", error)
            return (time.perf_counter() - began) * 1000.0
        for work, num_rows in parts:
            first = work.rows_done
            self._sessions.advance(_session_of(work), work.token_ids[first : first + num_rows])
            work.rows_done += num_rows
        self._metrics.rows_received.inc(sum(num_rows for _, num_rows in parts))
        took = time.perf_counter() - began
        self._metrics.context_seconds.observe(took)
        return took * 1000.0

    def _draft(self, plan: StepPlan) -> None:
        works: list[SessionWork] = [work for call in plan.interactive for work in call.items if work.wants_drafts]
        if not works:
            return
        began = time.perf_counter()
        try:
            proposals = self._model.draft([_draft_request(work) for work in works])
        except Exception as error:  # noqa: BLE001 - see _write
            self._fail(works, "draft", error)
            return
        took = time.perf_counter() - began
        self._watch.saw_drafts([len(proposal.token_ids) for proposal in proposals])
        drafted: dict[SessionWork, DraftProposal] = {}
        for work, proposal in zip(works, proposals, strict=True):
            problem = proposal_problem(proposal, work.num_draft_tokens)
            if problem is not None:
                self._watch.saw_unfit()
                self._fail([work], "draft", RuntimeError(problem))
                continue
            drafted[work] = proposal
        for call in plan.interactive:
            self._finish_drafts(call, drafted)
        self._metrics.drafts.inc(len(works))
        self._metrics.batch_sessions.observe(len(works))
        head = min(self._model.head_seconds, took)
        self._metrics.forward_seconds.observe(took - head)
        self._metrics.head_seconds.observe(head)
        for call in plan.interactive:
            call.timings.forward_ms += (took - head) * 1000.0
            call.timings.head_ms += head * 1000.0

    def _finish_drafts(self, call: ProposeCall, drafted: Mapping[SessionWork, DraftProposal]) -> None:
        """Recalibrate and shorten the drafts of a call, which is one step of its target."""
        works = [work for work in call.items if work in drafted]
        whole = [drafted[work] for work in works]
        if call.scheduler is None:
            kept = [cut_by_survival(one, work.confidence_threshold) for work, one in zip(works, whole, strict=True)]
        else:
            calibrated = [call.scheduler.calibrate(one) for one in whole]
            cut = [cut_by_survival(one, work.confidence_threshold) for work, one in zip(works, calibrated, strict=True)]
            names = [(work.key.session_id, _session_of(work).span.committed_end) for work in works]
            lengths = call.scheduler.lengths(cut, names, num_others=len(call.items) - len(works))
            kept = [shortened(one, length) for one, length in zip(cut, lengths, strict=True)]
        for work, before, after in zip(works, whole, kept, strict=True):
            work.outcome = self._success(work, after, before.confidence[: len(after.token_ids)])
            self._metrics.draft_tokens.inc(len(after.token_ids))

    def _reply(self, calls: Sequence[ProposeCall]) -> None:
        for call in calls:
            for work in call.items:
                if work.outcome is None:
                    work.outcome = self._success(work, None)
            self._leave(call, None)
        if calls:
            self._metrics.steps.inc()

    def _success(self, work: SessionWork, proposal: DraftProposal | None, confidence: Sequence[float] = ()) -> SessionOutcome:
        session = _session_of(work)
        outcome = SessionOutcome(
            incarnation=work.change.incarnation,
            seq=work.change.seq,
            committed_end=session.span.committed_end,
            rows_held=session.span.num_rows,
            proposal=proposal,
            confidence=confidence,
        )
        self._sessions.commit(session, work.change.seq, outcome)
        return outcome

    def _refusal(self, work: SessionWork, error: ApiError) -> SessionOutcome:
        session = self._sessions.get(work.key)
        return SessionOutcome(
            incarnation=work.change.incarnation,
            seq=work.change.seq,
            committed_end=session.span.committed_end if session else 0,
            rows_held=session.span.num_rows if session else 0,
            error=error,
        )

    def _fail(self, works: Sequence[SessionWork], stage: str, error: Exception) -> None:
        logger.error("the model failed at %s for %d sessions", stage, len(works), exc_info=error)
        self._metrics.forward_failures.labels(stage).inc()
        for work in works:
            told = InternalError(
                f"the draft model failed ({stage}: {type(error).__name__}); send the update again",
                numbers={"committed_end": _session_of(work).span.committed_end},
            )
            work.outcome = self._refusal(work, told)

    def _leave(self, call: ProposeCall, error: ApiError | None) -> None:
        self._waiting.remove(call)
        self._queue.done()
        took = time.monotonic() - call.arrived_at
        call.timings.total_ms = took * 1000.0
        self._metrics.call_seconds.observe(took)
        call.finish(error)

    def _learn_acceptance(self, work: SessionWork, scheduler: VerifyScheduler | None) -> None:
        """See in the rows that follow a draft how many of its tokens the target kept."""
        session = self._sessions.get(work.key)
        if session is None or session.stored_reply is None or session.incarnation != work.change.incarnation:
            return
        last: SessionOutcome = session.stored_reply
        if last.proposal is None or not last.proposal.token_ids or not work.change.num_rows:
            return
        if work.change.start != last.committed_end:
            return
        verified = last.proposal.token_ids[: work.num_verified]
        if not verified:
            return
        accepted = 0
        for drafted, committed in zip(verified, work.token_ids[1:], strict=False):
            if drafted != committed:
                break
            accepted += 1
        self._metrics.saw_acceptance(accepted, last.committed_end, session.coverage)
        self._watch.saw_accepted(work.key.client_id, accepted)
        if scheduler is not None:
            scheduler.learn(last.confidence[: len(verified)], accepted)

    def _close_session(self, sessions: SessionTable, key: SessionKey) -> None:
        sessions.close(key)
        for call in self._waiting:
            for work in call.items:
                if call.is_started and work.key == key and work.outcome is None:
                    gone = NotFoundError("session_not_found", f"session {key.session_id!r} was closed", param="session_id")
                    work.outcome = self._refusal(work, gone)

    def _replace(self, model: DraftModel, sessions: SessionTable, limits: EngineLimits, draft_version: str) -> None:
        for call in list(self._waiting):
            self._leave(call, _replaced())
        self._sessions.clear("reload")
        self._model, self._sessions, self._limits = model, sessions, limits
        self._draft_version = draft_version
        self._watch, self._problems = DraftWatch(limits.acceptance_floor), []

    def _drop_client(self, client_id: str, reason: str) -> None:
        """Nobody waits for the calls of a client that has left, so they go first: a busy session could not be freed."""
        for call in [call for call in self._waiting if call.client_id == client_id]:
            self._metrics.cancelled_calls.inc()
            self._leave(call, StateError("epoch_mismatch", "the client has left; shake hands again", param="client_id"))
        self._watch.forget(client_id)
        self._sessions.drop_client(client_id, reason)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sessions.expire(now, frozenset().union(*(call.keys for call in self._waiting)))


def proposal_problem(proposal: DraftProposal, num_wanted: int) -> str | None:
    """What makes a proposal unfit to be sent, or None."""
    count = len(proposal.token_ids)
    if count > num_wanted:
        return f"{count} drafts where {num_wanted} were asked for"
    for name, values in (("confidence", proposal.confidence), ("survival", proposal.survival)):
        if len(values) not in (0, count):
            return f"{len(values)} values of {name} for {count} drafts"
        if not all(map(math.isfinite, values)):
            return f"{name} is not finite"
    return None


def cut_by_survival(proposal: DraftProposal, threshold: float | None) -> DraftProposal:
    """Keep the longest prefix whose survival is at least `threshold`; nothing kept is changed."""
    if threshold is None:
        return proposal
    keep = 0
    for survival in proposal.survival:
        if survival < threshold:
            break
        keep += 1
    return shortened(proposal, keep)


def shortened(proposal: DraftProposal, length: int) -> DraftProposal:
    """Keep the first drafts; nothing kept is changed."""
    if length == len(proposal.token_ids):
        return proposal
    return DraftProposal(
        token_ids=proposal.token_ids[:length],
        confidence=proposal.confidence[:length],
        survival=proposal.survival[:length],
        probs_ids=None if proposal.probs_ids is None else proposal.probs_ids[:length],
        probs=None if proposal.probs is None else proposal.probs[:length],
    )


def _draft_request(work: SessionWork) -> DraftRequest:
    session = _session_of(work)
    return DraftRequest(
        page_ids=session.pages,
        num_rows=session.span.num_rows,
        position=session.span.committed_end,
        anchor_token_id=work.anchor_token_id,
        num_draft_tokens=work.num_draft_tokens,
        sampling=work.sampling,
        draft_probs_topk=work.draft_probs_topk,
        rng_counter=session.span.committed_end,
        context_token_ids=session.tokens.token_ids,
    )


def _replaced() -> StateError:
    return StateError("epoch_mismatch", "the drafter was replaced by another one; shake hands again", param="client_id")


def _next_rows(work: SessionWork, num_rows: int) -> Tensor:
    if work.features is None:
        raise RuntimeError("a work item without rows was to be written")
    if num_rows == len(work.features):
        return work.features
    return work.features[work.rows_done : work.rows_done + num_rows]


def _session_of(work: SessionWork) -> Session:
    if work.session is None:
        raise RuntimeError("a work item was served before it was prepared")
    return work.session


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Hand a reply to the event loop, unless it has been closed under a worker that was finishing."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
