"""The client of a draft server: one call for each target step, and a background thread that keeps the line up.

    propose    take the rows of all steps -> choose what goes into the call -> one request -> learn from the reply -> drafts

Drafting is an optimisation, so `propose` never raises, never opens a connection and never outlasts the step deadline.
Whatever goes wrong costs the drafts of that step: the connection is dropped, so that no late reply can be read by a later
step, and the next step repairs the sessions (`sessions.py`). A server that keeps failing is left alone for a while
(`breaker.py`). A restarted one is fed again from the rows kept here (`upkeep.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType

from pydantic import ValidationError

from draft_engine_client.calls import ProposeCall, keep_alive
from draft_engine_client.errors import ClientError, LateError, RefusedError
from draft_engine_client.projection import ContextProjection
from draft_engine_client.replies import CheckedReply, Drafts
from draft_engine_client.sessions import SessionMirror, SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.state import FEATURE_DTYPES, ClientState, ClientStats, Link
from draft_engine_client.upkeep import FEW_ROWS, Upkeep
from draft_engine_client.wire import ModelFacts, TargetFingerprint, VerifySchedule

logger = logging.getLogger(__name__)

_GOODBYE_S = 0.5


class DraftClient:
    """A draft server's client: `start`, then `propose` and `finish` from one stepping thread, `close`.

    Args:
        settings: where the server is, and how long a step may take.
        target: what this target is. A server whose drafter belongs to another one is never used.
        is_projecting: whether the features of steps are projected with `projection`, or as they were captured.
        schedule: how many drafts of a step are worth verifying, for the server to send no more; None for all.
    """

    def __init__(
        self,
        settings: ClientSettings,
        target: TargetFingerprint,
        *,
        is_projecting: bool = False,
        schedule: VerifySchedule | None = None,
    ) -> None:
        self._settings = settings
        self._state = ClientState(settings, target, is_projecting=is_projecting, schedule=schedule)
        self._upkeep = Upkeep(self._state)
        self._dtype = FEATURE_DTYPES[target.dtype]
        self._is_bfloat16 = target.dtype == "bfloat16"
        self._turn = 0

    def start(self) -> None:
        """Start connecting in the background; returns at once."""
        self._upkeep.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until hands are shaken; returns whether they are."""
        return self._state.connected.wait(timeout_s)

    def close(self) -> None:
        """Tell the server, where it answers soon, that all sessions are over, and disconnect."""
        state = self._state
        with state.lock:
            state.is_closing = True
        self._upkeep.stop()
        with state.lock:
            state.finish(list(state.mirrors))
            link, finished = state.link, list(state.finished)
        if link is None:
            return
        if finished and link.channel.is_ready:
            try:
                keep_alive(link.channel, link.welcome, finished, time.monotonic() + _GOODBYE_S)
            except ClientError as error:
                logger.info("the draft server was not told that the sessions are over: %s", error)
        with state.lock:
            state.unlink(link)

    def __enter__(self) -> DraftClient:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def settings(self) -> ClientSettings:
        """The settings it was made with."""
        return self._settings

    @property
    def facts(self) -> ModelFacts | None:
        """What the server said of its model at the last handshake; None before the first."""
        return self._state.facts

    @property
    def projection(self) -> ContextProjection | None:
        """What rows are to be projected with: another object after the server was given another drafter."""
        return self._state.projection

    @property
    def refusal(self) -> str | None:
        """Why the last attempt to connect or shake hands failed, for people; None after a success."""
        return self._state.refusal

    @property
    def stats(self) -> ClientStats:
        """A snapshot of the counters."""
        with self._state.lock:
            return self._state.snapshot()

    def finish(self, session_ids: Iterable[str]) -> None:
        """Forget sessions; the server is told with the next call, or soon after the last one."""
        with self._state.lock:
            self._state.finish(session_ids)

    def propose(self, steps: Sequence[SessionStep], projection: ContextProjection | None = None) -> list[Drafts]:
        """Hand over what a target step found out, and get drafts: one answer for each of `steps`, in order.

        Never raises, and returns within the step deadline and a few milliseconds. A session may be in `steps` once.

        Args:
            projection: what the features were projected with. Those of an earlier one are not taken.
        """
        deadline_at = time.monotonic() + self._settings.step_deadline_ms / 1000.0
        answers: dict[int, Drafts] = {}
        try:
            self._propose(steps, projection, answers, deadline_at)
        except Exception:
            # A bug in here must not take the target down; the sessions start over.
            logger.exception("drafting failed")
            self._start_over(steps)
        return [answers.get(index, _BUG) for index in range(len(steps))]

    def _start_over(self, steps: Sequence[SessionStep]) -> None:
        state = self._state
        with state.lock:
            state.stats.errors += 1
            state.is_calling = False
            for step in steps:
                mirror = state.mirrors.get(step.session_id)
                if mirror is not None:
                    mirror.forget_server()
            if state.link is not None:
                state.unlink(state.link)

    def _propose(
        self,
        steps: Sequence[SessionStep],
        projection: ContextProjection | None,
        answers: dict[int, Drafts],
        deadline_at: float,
    ) -> None:
        state = self._state
        began = time.monotonic()
        with state.lock:
            state.stats.steps += 1
            if projection is not state.projection:
                answers.update(dict.fromkeys(range(len(steps)), Drafts(reason="other_projection")))
                return
            taken = self._take(steps, answers)
            link = self._usable_link(began)
            if link is None:
                answers.update({index: Drafts(reason="unavailable") for index in taken})
                return
            call, places = self._plan(link, steps, taken, answers, began)
            if not len(call):
                return
            finished = [session_id for session_id in state.finished if session_id not in state.mirrors]
            state.is_calling = True
        error: ClientError | None = None
        try:
            reply = call.send(link.channel, deadline_at, finished)
        except ClientError as caught:
            error = caught
        now = time.monotonic()
        with state.lock:
            state.is_calling = False
            state.stats.calls += 1
            state.stats.http_seconds += now - began
            state.stats.bytes_sent += call.num_bytes_sent
            state.stats.bytes_received += call.num_bytes_received
            if error is not None:
                self._learn_failure(link, call, error, now)
                answers.update(
                    {
                        index: Drafts(reason=error.reason, committed_end=mirror.acked_end)
                        for index, mirror in zip(places, call.mirrors, strict=True)
                    }
                )
                return
            state.told(finished)
            self._learn(call, reply, places, answers, now)

    # Before the call, with the lock held -----------------------------------------------------------------------------

    def _take(self, steps: Sequence[SessionStep], answers: dict[int, Drafts]) -> list[int]:
        """Add the rows of all steps to their sessions; returns the steps that are sound."""
        taken: dict[str, int] = {}
        for index, step in enumerate(steps):
            problem = "the session is in the step twice" if step.session_id in taken else self._state.take(step)
            if problem is None:
                taken[step.session_id] = index
            else:
                logger.warning("session %r: the step is not sound: %s", step.session_id, problem)
                answers[index] = Drafts(reason="invalid_step")
        return list(taken.values())

    def _usable_link(self, now: float) -> Link | None:
        state = self._state
        link = state.link
        if link is not None and not link.channel.is_ready:
            state.unlink(link)
            link = None
        if link is None:
            state.wake.set()
            return None
        return link if state.breaker.allows(now) else None

    def _plan(
        self, link: Link, steps: Sequence[SessionStep], taken: list[int], answers: dict[int, Drafts], now: float
    ) -> tuple[ProposeCall, list[int]]:
        """Choose what goes into the call; returns it and, for each of its sessions, the step that it answers."""
        limits, facts = link.welcome.limits, link.welcome.model
        call = ProposeCall(link.welcome, self._dtype, is_bfloat16=self._is_bfloat16, is_projected=self._state.is_projecting)
        places: list[int] = []
        max_rows = min(self._settings.max_rows_per_step, limits.max_rows_per_call)
        if len(taken) > limits.max_sessions_per_call:
            self._turn = (self._turn + limits.max_sessions_per_call) % len(taken)
            taken = taken[self._turn :] + taken[: self._turn]
        for index in taken:
            step = steps[index]
            mirror = self._state.mirrors[step.session_id]
            reason = self._reason_to_wait(mirror, link, max_rows - call.num_rows, now)
            if reason is None and len(call) == limits.max_sessions_per_call:
                reason = "over_limit"
            if reason is None:
                try:
                    if step.num_draft_tokens > facts.max_draft_tokens:
                        step = replace(step, num_draft_tokens=facts.max_draft_tokens)
                    call.add(mirror, step, max_rows)
                    places.append(index)
                except (ValidationError, TypeError) as error:
                    logger.warning("session %r: the step cannot be sent: %s", mirror.session_id, error)
                    reason = "invalid_step"
            if reason is not None:
                answers[index] = Drafts(reason=reason, committed_end=mirror.acked_end)
        return call, places

    def _reason_to_wait(self, mirror: SessionMirror, link: Link, rows_left: int, now: float) -> str | None:
        """Why a session is left out of the call, or None. What is too much for a step is left to the background thread."""
        if mirror.is_refused:
            return "refused:context_limit"
        if mirror.is_uploading:
            return "catching_up"
        if now < mirror.retry_at:
            return "refused:overloaded"
        self._state.adopt(mirror, link.welcome)
        if mirror.is_behind or mirror.num_pending > rows_left:
            mirror.is_behind = True
            self._state.wake.set()
            return "catching_up"
        return None

    # After the call, with the lock held ------------------------------------------------------------------------------

    def _learn(
        self, call: ProposeCall, reply: CheckedReply, places: Sequence[int], answers: dict[int, Drafts], now: float
    ) -> None:
        state, stats = self._state, self._state.stats
        stats.rows_sent += call.num_rows
        stats.server_seconds += reply.server_seconds
        is_sound = True
        for place, (index, mirror, attempt) in enumerate(zip(places, call.mirrors, call.attempts, strict=True)):
            session, drafts, problem = reply.sessions[place], reply.drafts[place], reply.problems[place]
            reason = mirror.accept(attempt, session)
            if reason is None and problem is not None:
                logger.warning("session %r: the drafts are refused: %s", mirror.session_id, problem)
                reason = "invalid_reply"
            if reason is None:
                answers[index] = drafts
                stats.drafts += 1
                stats.draft_tokens += len(drafts.token_ids)
                continue
            answers[index] = Drafts(reason=reason, committed_end=mirror.acked_end)
            if reason == "invalid_reply":
                is_sound = False
            else:
                stats.refusals += 1
                mirror.pause(now, session, self._settings.breaker_min_s, self._settings.breaker_max_s)
        if is_sound:
            if state.breaker.is_open:
                logger.info("the draft server helps again")
            state.breaker.record_success()
        else:
            stats.invalid_replies += 1
            self._record_failure("invalid_reply", now)

    def _learn_failure(self, link: Link, call: ProposeCall, error: ClientError, now: float) -> None:
        state, stats = self._state, self._state.stats
        logger.info("a draft call failed: %s", error)
        if isinstance(error, LateError):
            stats.late += 1
            if call.num_rows > FEW_ROWS:
                for mirror in call.mirrors:
                    mirror.is_behind = mirror.num_pending > 0
        if error.reason == "invalid_reply":
            stats.invalid_replies += 1
            for mirror in call.mirrors:
                mirror.forget_server()
        self._record_failure(error.reason, now)
        if isinstance(error, RefusedError):
            if not error.is_passing:
                state.unlink(link, forget_welcome=True)
        else:
            state.unlink(link)

    def _record_failure(self, reason: str, now: float) -> None:
        state = self._state
        state.stats.failures += 1
        times_opened = state.breaker.times_opened
        state.breaker.record_failure(now)
        if state.breaker.times_opened > times_opened:
            logger.warning("drafting is paused: too many calls in a row failed, the last one was %s", reason)


_BUG = Drafts(reason="error")
