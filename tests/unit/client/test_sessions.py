"""Session mirrors against a server that keeps the rules: whatever is lost on the way, what the server holds is right.

No socket and no clock: an exchange is a function call whose request or reply may get lost.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from draft_engine_client.breaker import Backoff, CircuitBreaker
from draft_engine_client.sessions import RowStore, SessionMirror, SessionStep
from draft_engine_client.wire import ProposeRequest, SessionReply
from tests.support.adversary import LIMITS, VOCAB_SIZE, WIDTH, Adversary, Fault, expected_drafts, make_features, row_digest

FLOAT16 = np.dtype(np.float16)


def make_step(tokens: list[int], start: int, end: int, drafts: int = 3, prefix: tuple[int, ...] = ()) -> SessionStep:
    """Rows [start, end) of a sequence whose anchor is tokens[end]."""
    rows = tokens[start:end]
    return SessionStep("a", rows, make_features(rows, start), start, tokens[end], drafts, prefix_token_ids=prefix)


def make_mirror(step: SessionStep, max_rows: int = 1_000) -> SessionMirror:
    counter = itertools.count()
    return SessionMirror(
        step, width=WIDTH, dtype=FLOAT16, vocab_size=VOCAB_SIZE, max_rows=max_rows, next_incarnation=lambda: next(counter)
    )


FATES = ["good", "good", "request is lost", "reply is lost", "refused:internal", "refused:overloaded", "refused:stale_sequence"]


class MirrorMachine(RuleBasedStateMachine):
    """A target that commits, rewinds and skips; a wire that loses requests and replies; a server that forgets and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Adversary(LIMITS.model_copy(update={"max_context": 100_000, "max_rows_per_call": 100_000}))
        self.server.admit("me")
        self.random = np.random.default_rng(0)
        self.tokens = self.new_tokens(1)
        self.seen_from = 0
        self.mirror = make_mirror(make_step(self.tokens, 0, 0), max_rows=200)
        self.mirror.take(make_step(self.tokens, 0, 0))

    def new_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.random.integers(0, VOCAB_SIZE, count)]

    @property
    def end(self) -> int:
        return len(self.tokens) - 1

    @rule(change=st.sampled_from(["grow", "rewind", "skip"]), data=st.data(), fate=st.sampled_from(FATES))
    def step(self, change: str, data: st.DataObject, fate: str) -> None:
        """One step of the target, and what becomes of its exchange."""
        start = self.end
        if change == "rewind":
            start = data.draw(st.integers(max(0, self.end - 6), self.end))
            self.seen_from = min(self.seen_from, start)
        self.tokens[start + (change != "rewind") :] = self.new_tokens(data.draw(st.integers(change != "grow", 5)))
        if change == "skip":
            start = self.seen_from = data.draw(st.integers(start + 1, self.end))
        self.mirror.take(make_step(self.tokens, start, self.end))
        self.meet(fate, None)

    @rule(chunk=st.integers(1, 4), fate=st.sampled_from(FATES))
    def feed(self, chunk: int, fate: str) -> None:
        """One chunk without drafts, as the background thread sends."""
        self.meet(fate, chunk)

    @rule()
    def server_forgets(self) -> None:
        self.server.forget_sessions()

    @rule()
    def recover(self) -> None:
        """A few good exchanges bring the right drafts, whatever came before."""
        assert any(self.meet("good", None) for _ in range(3)), "no drafts after three exchanges"

    def meet(self, fate: str, chunk: int | None) -> bool:
        """Make an exchange; returns whether it brought drafts from all rows, which then must be right."""
        fault = Fault(is_applied=fate != "request is lost")
        if fate.startswith("refused:"):
            fault = Fault(refuse_sessions=(fate.removeprefix("refused:"), {}))
        attempt, reply = self.exchange(chunk, fault)
        if reply is None or fate == "reply is lost":
            return False
        reason = self.mirror.accept(attempt, reply)
        assert (reason is not None) == (reply.error is not None)
        if reason is not None or chunk is not None or reply.rows_held < self.end - self.seen_from:
            return False
        assert reply.committed_end == self.end
        assert reply.draft_token_ids == self.right(3)
        assert self.mirror.num_pending == 0
        return True

    def right(self, count: int) -> tuple[int, ...]:
        rows = self.tokens[: self.end]
        features = make_features(rows, 0)
        digests = [row_digest(position, rows[position], features[position]) for position in range(self.seen_from, self.end)]
        return expected_drafts(digests, self.end, self.tokens[-1], count)

    def exchange(self, chunk: int | None, fault: Fault) -> tuple[Any, SessionReply | None]:
        step = make_step(self.tokens, self.end, self.end) if chunk is None else None
        update, attempt = self.mirror.next_update(max_rows=chunk or 0, step=step)
        tokens, pieces = self.mirror.rows_of(attempt)
        features = np.concatenate(pieces) if pieces else np.zeros((0, WIDTH), FLOAT16)
        assert len(tokens) == len(features) == update.num_rows
        if not fault.is_applied:
            return attempt, None
        request = ProposeRequest(client_id="me", sessions=(update,))
        status, document, _ = self.server.propose(request, np.array(tokens, np.int32), features, fault)
        assert status == 200
        return attempt, SessionReply.model_validate(document["sessions"][0])

    @invariant()
    def the_mirror_never_claims_more_than_it_has(self) -> None:
        assert self.mirror.end == self.end
        assert self.mirror.acked_end <= self.mirror.end


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(deadline=None, max_examples=25, stateful_step_count=25)


@pytest.mark.parametrize("max_rows", [1, 7, 16, 300, 10_000])
def test_a_row_store_keeps_the_latest_rows(max_rows: int) -> None:
    random = np.random.default_rng(1)
    kept = np.zeros((0, 3), np.float32)
    store = RowStore(5, 3, np.dtype(np.float32), max_rows)
    for _ in range(60):
        if len(kept) and random.random() < 0.3 and store.end > store.first:
            end = int(random.integers(store.first, store.end))
            store.truncate(end)
            kept = kept[: end - 5]
        rows = random.random((int(random.integers(0, 40)), 3), dtype=np.float32)
        store.append(rows)
        kept = np.concatenate([kept, rows])
        assert store.end == 5 + len(kept)
        assert store.end - store.first <= max_rows
        assert store.end - store.first >= min(len(kept), 1) * (max_rows > 1) or store.first > 5
        pieces = store.pieces(store.first, store.end)
        np.testing.assert_array_equal(np.concatenate([*pieces, kept[:0]]), kept[store.first - 5 :])


def test_an_update_starts_at_what_was_acknowledged_and_never_reuses_a_number() -> None:
    tokens = list(range(20))
    mirror = make_mirror(make_step(tokens, 0, 4))
    mirror.take(make_step(tokens, 0, 4))
    first, attempt = mirror.next_update(max_rows=0, step=make_step(tokens, 4, 4))
    again, _ = mirror.next_update(max_rows=0, step=make_step(tokens, 4, 4))
    assert (first.start, first.num_rows, again.start, again.num_rows) == (0, 4, 0, 4)
    assert again.seq > first.seq
    assert again.incarnation == first.incarnation
    reply = SessionReply(
        session_id="a", incarnation=attempt.incarnation, seq=attempt.seq, committed_end=4, rows_held=4, coverage=1.0
    )
    assert mirror.accept(attempt, reply) is None
    mirror.take(make_step(tokens, 4, 6))
    third, _ = mirror.next_update(max_rows=0, step=make_step(tokens, 6, 6))
    assert (third.start, third.num_rows, third.anchor_token_id) == (4, 2, 6)


def test_a_chunk_names_the_token_that_follows_it() -> None:
    tokens = list(range(100, 120))
    mirror = make_mirror(make_step(tokens, 0, 10))
    mirror.take(make_step(tokens, 0, 10))
    update, attempt = mirror.next_update(max_rows=4, step=None)
    assert (update.num_rows, update.anchor_token_id, update.num_draft_tokens) == (4, 104, 0)
    assert (attempt.start, attempt.end) == (0, 4)


def test_a_refused_row_is_given_up_and_the_session_goes_on() -> None:
    tokens = list(range(20))
    mirror = make_mirror(make_step(tokens, 0, 4))
    mirror.take(make_step(tokens, 0, 4))
    _, attempt = mirror.next_update(max_rows=0, step=make_step(tokens, 4, 4))
    error = {"message": "m", "type": "t", "code": "non_finite_rows"}
    refused = SessionReply.model_validate(
        {
            "session_id": "a",
            "incarnation": attempt.incarnation,
            "seq": attempt.seq,
            "committed_end": 0,
            "rows_held": 0,
            "coverage": 1.0,
            "error": error,
        }
    )
    assert mirror.accept(attempt, refused) == "refused:non_finite_rows"
    mirror.take(make_step(tokens, 4, 6))
    update, _ = mirror.next_update(max_rows=0, step=make_step(tokens, 6, 6))
    assert (update.start, update.num_rows) == (4, 2)
    assert update.incarnation > attempt.incarnation


def test_a_breaker_opens_tries_and_closes() -> None:
    breaker = CircuitBreaker(2, 1.0, 3.0)
    breaker.record_failure(0.0)
    assert breaker.allows(0.0)
    breaker.record_success()
    breaker.record_failure(0.0)
    assert breaker.allows(0.0)
    breaker.record_failure(0.0)
    assert breaker.is_open
    assert not breaker.allows(0.99)
    assert breaker.allows(1.0)
    breaker.record_failure(1.0)
    assert not breaker.allows(2.99)
    assert breaker.allows(3.0)
    breaker.record_failure(3.0)
    assert not breaker.allows(5.99)
    assert breaker.times_opened == 1
    breaker.record_success()
    assert breaker.allows(6.0)
    for _ in range(2):
        breaker.record_failure(10.0)
    assert breaker.allows(11.0)
    assert breaker.times_opened == 2


def test_a_backoff_doubles_up_to_its_limit_and_starts_over() -> None:
    backoff = Backoff(1.0, 3.0)
    assert [backoff.next_pause() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_pause() == 1.0
