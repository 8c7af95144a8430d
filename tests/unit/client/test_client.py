"""The client over real sockets, against a server that misbehaves: it never raises, is never late, and recovers by itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from draft_engine_client.client import DraftClient
from draft_engine_client.codec import TensorView
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.wire import Sampling
from tests.support.adversary import (
    FACTS,
    LIMITS,
    TARGET,
    VOCAB_SIZE,
    Adversary,
    Fault,
    expected_drafts,
    make_features,
    row_digest,
)

# Nothing is late by chance, however busy the machine is; tests of lateness take the short one.
DEADLINE_MS = 5_000.0
SHORT_MS = 60.0
HANG_S = 4.0


class Request:
    """One request of a target: its tokens so far, the last of which is the anchor, and the drafts that are right for it."""

    def __init__(self, session_id: str, prompt: int = 5, seed: int = 0) -> None:
        self.session_id = session_id
        self._random = np.random.default_rng(seed)
        self.tokens = [int(token) for token in self._random.integers(0, VOCAB_SIZE, prompt + 1)]
        self.sent = 0

    @property
    def end(self) -> int:
        return len(self.tokens) - 1

    def grow(self, count: int = 2) -> None:
        self.tokens += [int(token) for token in self._random.integers(0, VOCAB_SIZE, count)]

    def step(self, drafts: int = 4, **more: Any) -> SessionStep:
        """A step with the rows that are new since the last one."""
        start, self.sent = self.sent, self.end
        rows = self.tokens[start : self.end]
        return SessionStep(self.session_id, rows, make_features(rows, start), start, self.tokens[-1], drafts, **more)

    def rewind(self, position: int) -> None:
        """Take back everything from `position` on, and go on differently."""
        del self.tokens[position:]
        self.sent = position
        self.grow(3)

    def right(self, first: int = 0, drafts: int = 4) -> tuple[int, ...]:
        """The drafts of a server that holds rows [first, end)."""
        rows = self.tokens[: self.end]
        features = make_features(rows, 0)
        digests = [row_digest(position, rows[position], features[position]) for position in range(first, self.end)]
        return expected_drafts(digests, self.end, self.tokens[-1], drafts)


def make_settings(url: str, **changes: Any) -> ClientSettings:
    defaults: dict[str, Any] = {"step_deadline_ms": DEADLINE_MS, "breaker_min_s": 0.05, "breaker_max_s": 0.1}
    return ClientSettings(url, **(defaults | changes))


@pytest.fixture
def server() -> Iterator[Adversary]:
    with Adversary() as adversary:
        yield adversary


@contextmanager
def connected(server: Adversary, **changes: Any) -> Iterator[DraftClient]:
    with DraftClient(make_settings(server.url, **changes), TARGET) as client:
        assert client.wait_connected(20.0)
        yield client
    assert client.stats.errors == 0


@pytest.fixture
def client(server: Adversary) -> Iterator[DraftClient]:
    with connected(server) as client:
        yield client


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.002)


def propose(client: DraftClient, *requests: Request, **more: Any) -> list[Drafts]:
    """One step of all requests, which must come back whatever happens."""
    steps = [request.step(**more) for request in requests]
    began = time.monotonic()
    answers = client.propose(steps)
    assert time.monotonic() - began < client.settings.step_deadline_ms / 1000.0 + HANG_S
    assert len(answers) == len(requests)
    return answers


def propose_until_right(client: DraftClient, request: Request, timeout_s: float = 20.0) -> int:
    """Step until drafts come, and insist that the first ones are right; returns how many steps it took."""
    give_up = time.monotonic() + timeout_s
    for count in range(1, 100_000):
        request.grow()
        (drafts,) = propose(client, request)
        if drafts.reason is None:
            assert drafts.token_ids == request.right()
            assert drafts.coverage == 1.0
            return count
        assert time.monotonic() < give_up, f"no drafts, the last reason is {drafts.reason}"
        time.sleep(0.005)
    raise AssertionError


# The plain case ------------------------------------------------------------------------------------------------------


def test_drafts_come_from_all_rows_of_each_session(server: Adversary, client: DraftClient) -> None:
    requests = [Request("a", 5, seed=1), Request("b", 3, seed=2), Request("c", 0, seed=3)]
    for _ in range(4):
        for request, drafts in zip(requests, propose(client, *requests), strict=True):
            assert drafts.token_ids == request.right()
            assert drafts.reason is None
            assert drafts.committed_end == request.end
            assert len(drafts.confidence) == len(drafts.survival) == 4
            assert drafts.probs is None
            request.grow()
    stats = client.stats
    assert (stats.calls, stats.failures, stats.drafts, stats.draft_tokens) == (4, 0, 12, 48)
    assert stats.rows_sent == sum(request.sent for request in requests)
    assert stats.server_seconds == pytest.approx(0.004)
    assert stats.http_seconds > 0
    assert client.facts == FACTS
    assert len({seen.connection for seen in server.seen if seen.num_rows}) == 1


def test_a_step_without_new_rows_is_a_legal_call(client: DraftClient) -> None:
    request = Request("a")
    propose(client, request)
    (drafts,) = propose(client, request)
    assert drafts.token_ids == request.right()


def test_rows_may_be_handed_over_without_drafts(client: DraftClient) -> None:
    request = Request("a")
    (drafts,) = propose(client, request, drafts=0)
    assert (drafts.token_ids, drafts.reason) == ((), None)
    request.grow()
    assert propose(client, request)[0].token_ids == request.right()


def test_more_drafts_than_the_drafter_makes_are_cut(client: DraftClient) -> None:
    request = Request("a")
    assert propose(client, request, drafts=99)[0].token_ids == request.right()


def test_rows_are_copied(client: DraftClient) -> None:
    request = Request("a")
    step = request.step()
    client.propose([step])
    step.features[:] = 0
    client.stats  # noqa: B018 - nothing but the mirror may have kept them
    request.grow()
    assert propose(client, request)[0].token_ids == request.right()


def test_a_rewind_takes_rows_back(client: DraftClient) -> None:
    request = Request("a", 9)
    propose(client, request)
    request.rewind(4)
    assert propose(client, request)[0].token_ids == request.right()
    request.rewind(0)
    assert propose(client, request)[0].token_ids == request.right()


def test_a_stretch_never_seen_begins_the_session_anew(server: Adversary, client: DraftClient) -> None:
    request = Request("a", 6)
    propose(client, request)
    request.grow(5)
    request.sent += 3
    (drafts,) = propose(client, request)
    assert drafts.token_ids == request.right(first=9)
    assert drafts.coverage == pytest.approx(2 / 11)
    request.grow()
    assert propose(client, request)[0].token_ids == request.right(first=9)


def test_a_session_that_begins_late_names_its_prefix(server: Adversary, client: DraftClient) -> None:
    request = Request("a", 8)
    request.sent = 6
    (drafts,) = propose(client, request, prefix_token_ids=request.tokens[:6])
    assert drafts.reason is None
    assert list(server.seen[-1].request.sessions[0].prefix_token_ids) == request.tokens[:6]


def test_sampling_and_probabilities_are_passed_on(server: Adversary, client: DraftClient) -> None:
    plain, sampled = Request("a", seed=1), Request("b", seed=2)
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5)
    answers = client.propose([plain.step(), sampled.step(sampling=sampling, draft_probs_topk=3)])
    assert server.seen[-1].request.sessions[1].sampling == sampling
    assert answers[0].probs is None
    assert answers[1].probs is not None
    assert answers[1].probs_ids is not None
    assert answers[1].probs.shape == answers[1].probs_ids.shape == (4, 3)
    assert tuple(answers[1].probs_ids[:, 0]) == answers[1].token_ids == sampled.right()


def test_finished_sessions_are_closed_with_the_next_call(server: Adversary, client: DraftClient) -> None:
    first, second = Request("a", seed=1), Request("b", seed=2)
    propose(client, first, second)
    client.finish(["a", "never seen"])
    second.grow()
    propose(client, second)
    assert server.seen[-1].request.finished == ("a",)
    assert [session_id for _, session_id in server.sessions] == ["b"]


def test_finished_sessions_are_closed_without_a_next_call(server: Adversary, client: DraftClient) -> None:
    propose(client, Request("a"))
    client.finish(["a"])
    wait_for(lambda: not server.sessions)


def test_a_name_may_be_used_again(client: DraftClient) -> None:
    for seed in range(3):
        request = Request("a", seed=seed)
        assert propose(client, request)[0].token_ids == request.right()
        client.finish(["a"])


def test_close_ends_the_sessions(server: Adversary) -> None:
    with connected(server) as client:
        propose(client, Request("a"))
        assert server.sessions
    assert not server.sessions


def test_the_api_key_and_name_are_sent(server: Adversary) -> None:
    with connected(server, api_key="secret", client_name="me") as client:
        propose(client, Request("a"))
    assert server.handshakes[0].client_name == "me"
    assert server.handshakes[0].target == TARGET
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert "secret" not in repr(make_settings(server.url, api_key="secret"))


def test_bfloat16_rows_travel_as_bits(server: Adversary) -> None:
    target = TARGET.model_copy(update={"dtype": "bfloat16"})
    with DraftClient(make_settings(server.url), target) as client:
        assert client.wait_connected(20.0)
        bits = np.arange(24, dtype=np.uint16).reshape(3, 8)
        assert client.propose([SessionStep("a", [1, 2, 3], bits, 0, 4, 4)])[0].reason is None
        (held,) = server.sessions.values()
        assert held.rows == [row_digest(position, position + 1, bits[position]) for position in range(3)]


# Faults: each costs the drafts of its step and nothing else ----------------------------------------------------------


def set_first(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["sessions"][0].update(fields)


FAULTS = {
    "late, applied": (Fault(manner="hold"), "late"),
    "late, lost": (Fault(manner="hold", is_applied=False), "late"),
    "trickle": (Fault(manner="trickle"), "late"),
    "hang up, applied": (Fault(manner="hang_up"), "failed"),
    "hang up, lost": (Fault(manner="hang_up", is_applied=False), "failed"),
    "truncated": (Fault(manner="truncate"), "failed"),
    "not HTTP": (Fault(manner="garbage"), "failed"),
    "noise": (Fault(manner="noise"), "invalid_reply"),
    "wrong media type": (Fault(manner="json"), "invalid_reply"),
    "no sessions": (Fault(mutate=lambda document: document.update(sessions=[])), "invalid_reply"),
    "one too many": (Fault(mutate=lambda document: document["sessions"].append(document["sessions"][0])), "invalid_reply"),
    "another session": (Fault(mutate=set_first(session_id="z")), "invalid_reply"),
    "another process": (Fault(mutate=lambda document: document.update(server_id="z")), "invalid_reply"),
    "an old answer": (Fault(mutate=set_first(seq=0)), "invalid_reply"),
    "another incarnation": (Fault(mutate=set_first(incarnation=77)), "invalid_reply"),
    "wrong end": (Fault(mutate=set_first(committed_end=3)), "invalid_reply"),
    "more rows than positions": (Fault(mutate=set_first(rows_held=10_000)), "invalid_reply"),
    "negative id": (Fault(mutate=set_first(draft_token_ids=[1, -1, 2, 3])), "invalid_reply"),
    "id out of range": (Fault(mutate=set_first(draft_token_ids=[1, 2, 3, VOCAB_SIZE])), "invalid_reply"),
    "id as text": (Fault(mutate=set_first(draft_token_ids=["x"] * 4)), "invalid_reply"),
    "too many drafts": (Fault(mutate=set_first(draft_token_ids=[1] * 5)), "invalid_reply"),
    "confidence of another length": (Fault(mutate=set_first(confidence=[0.5])), "invalid_reply"),
    "confidence beyond 1": (Fault(mutate=set_first(survival=[2.0] * 4)), "invalid_reply"),
    "not a number": (Fault(mutate=set_first(confidence=[float("nan")] * 4)), "invalid_reply"),
    "unknown field": (Fault(mutate=set_first(surprise=1)), "invalid_reply"),
    "drafts with an error": (
        Fault(mutate=set_first(error={"message": "m", "type": "t", "code": "internal"})),
        "refused:internal",
    ),
    "overloaded": (Fault(is_applied=False, refuse=(429, "overloaded")), "refused:overloaded"),
    "internal": (Fault(refuse=(500, "internal")), "refused:internal"),
    "draining": (Fault(refuse=(503, "draining")), "refused:draining"),
    "past its deadline": (Fault(refuse=(504, "deadline_exceeded")), "refused:deadline_exceeded"),
    "wrong target": (Fault(refuse=(412, "fingerprint_mismatch")), "refused:fingerprint_mismatch"),
    "wrong key": (Fault(refuse=(401, "invalid_api_key")), "refused:invalid_api_key"),
    "unknown client": (Fault(refuse=(409, "epoch_mismatch")), "refused:epoch_mismatch"),
    "session forward failed": (Fault(refuse_sessions=("internal", {})), "refused:internal"),
    "session overloaded": (Fault(refuse_sessions=("overloaded", {"retry_after_s": 0.01})), "refused:overloaded"),
    "session stale": (Fault(refuse_sessions=("stale_sequence", {})), "refused:stale_sequence"),
    "session gap": (Fault(refuse_sessions=("context_gap", {})), "refused:context_gap"),
}


@contextmanager
def connected_for(server: Adversary, reason: str) -> Iterator[DraftClient]:
    with connected(server, step_deadline_ms=SHORT_MS if reason == "late" else DEADLINE_MS) as client:
        yield client


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_the_drafts_of_its_step_and_repairs_itself(server: Adversary, name: str) -> None:
    fault, reason = FAULTS[name]
    request = Request("a")
    with connected_for(server, reason) as client:
        propose_until_right(client, request)
        server.fail_next(fault)
        request.grow()
        (drafts,) = propose(client, request)
        assert (drafts.token_ids, drafts.reason) == ((), reason)
        propose_until_right(client, request)


@pytest.mark.parametrize("name", ["late, applied", "hang up, applied", "hang up, lost", "truncated", "internal"])
def test_a_fault_right_at_the_opening_repairs_itself(server: Adversary, name: str) -> None:
    fault, reason = FAULTS[name]
    request = Request("a")
    with connected_for(server, reason) as client:
        server.fail_next(fault)
        assert propose(client, request)[0].reason == reason
        propose_until_right(client, request)


@pytest.mark.parametrize("name", ["late, applied", "hang up, lost", "session forward failed", "session gap"])
def test_a_fault_during_a_rewind_repairs_itself(server: Adversary, name: str) -> None:
    fault, reason = FAULTS[name]
    request = Request("a", 9)
    with connected_for(server, reason) as client:
        propose_until_right(client, request)
        server.fail_next(fault)
        request.rewind(3)
        assert propose(client, request)[0].reason == reason
        propose_until_right(client, request)


def test_a_bad_answer_for_one_session_leaves_the_others_alone(server: Adversary, client: DraftClient) -> None:
    first, second = Request("a", seed=1), Request("b", seed=2)
    server.fail_next(Fault(mutate=set_first(draft_token_ids=[VOCAB_SIZE] * 4)))
    answers = propose(client, first, second)
    assert answers[0].reason == "invalid_reply"
    assert answers[1].token_ids == second.right()


def test_a_late_reply_is_never_read_by_a_later_step(server: Adversary) -> None:
    request = Request("a")
    with connected(server, step_deadline_ms=SHORT_MS) as client:
        for _ in range(3):
            propose_until_right(client, request)
            server.fail_next(Fault(delay_s=SHORT_MS / 1000.0 + 0.03))
            request.grow()
            assert propose(client, request)[0].reason in ("late", "unavailable")
        propose_until_right(client, request)


PROBS = {
    "missing": lambda tensors: {},
    "only one": lambda tensors: {"draft_probs": tensors["draft_probs"]},
    "wrong dtype": lambda tensors: tensors | {"draft_probs": tensors["draft_probs_ids"]},
    "wrong shape": lambda tensors: tensors | {"draft_probs": array(np.ones((1, 1), np.float32))},
    "one dimension": lambda tensors: tensors | {"draft_probs": array(np.ones(8, np.float32))},
    "not finite": lambda tensors: tensors | {"draft_probs": array(np.full((4, 2), np.nan, np.float32))},
    "negative": lambda tensors: tensors | {"draft_probs": array(np.array([[2.0, -1.0]] * 4, np.float32))},
    "sum is not 1": lambda tensors: tensors | {"draft_probs": array(np.array([[0.5, 0.1]] * 4, np.float32))},
    "draft outside": lambda tensors: tensors | {"draft_probs": array(np.array([[0.0, 1.0]] * 4, np.float32))},
    "id twice": lambda tensors: {
        "draft_probs": array(np.full((4, 2), 0.5, np.float32)),
        "draft_probs_ids": array(np.repeat(tensors["draft_probs_ids"].to_array()[:, :1], 2, axis=1)),
    },
    "id out of range": lambda tensors: {
        "draft_probs": array(np.full((4, 2), 0.5, np.float32)),
        "draft_probs_ids": array(tensors["draft_probs_ids"].to_array() + np.array([[0, VOCAB_SIZE]], np.int32)),
    },
}


def array(values: Any) -> TensorView:
    return TensorView.from_array(values)


@pytest.mark.parametrize("name", PROBS)
def test_a_distribution_that_its_draft_cannot_come_from_is_refused(server: Adversary, client: DraftClient, name: str) -> None:
    request = Request("a")
    server.fail_next(Fault(tensors=PROBS[name]))
    (drafts,) = propose(client, request, draft_probs_topk=2)
    assert (drafts.token_ids, drafts.reason) == ((), "invalid_reply")
    assert client.stats.invalid_replies == 1
    wait_for(lambda: client.stats.is_connected)
    request.grow()
    (drafts,) = propose(client, request, draft_probs_topk=2)
    assert drafts.token_ids == request.right()


# Steps that are wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"features": np.zeros((2, 8), np.float16)},
        {"features": np.zeros((1, 9), np.float16)},
        {"features": np.zeros((1, 8), np.float32)},
        {"features": np.full((1, 8), np.nan, np.float16)},
        {"features": np.full((1, 8), np.inf, np.float16)},
        {"features": None},
        {"token_ids": [-1]},
        {"token_ids": [VOCAB_SIZE]},
        {"token_ids": [2**40]},
        {"token_ids": ["x"]},
        {"token_ids": None},
        {"anchor_token_id": VOCAB_SIZE},
        {"anchor_token_id": None},
        {"start": -1},
        {"start": None},
        {"num_draft_tokens": -1},
        {"num_draft_tokens": None},
        {"draft_probs_topk": 10**6},
        {"sampling": None},
        {"prefix_token_ids": [-5]},
        {"session_id": ""},
        {"session_id": "x" * 300},
        {"session_id": None},
    ],
)
def test_a_step_that_is_not_sound_is_told_so_and_its_neighbour_is_served(client: DraftClient, changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "session_id": "bad",
        "token_ids": [1],
        "features": make_features([1], 0),
        "start": 0,
        "anchor_token_id": 2,
        "num_draft_tokens": 4,
    }
    good = Request("good")
    answers = client.propose([SessionStep(**(fields | changes)), good.step()])
    assert answers[0].reason == "invalid_step"
    assert answers[1].token_ids == good.right()
    assert client.propose([SessionStep(**fields)])[0].reason is None


def test_a_session_twice_in_one_step_is_refused(client: DraftClient) -> None:
    request = Request("a")
    answers = client.propose([request.step(), request.step()])
    assert answers[0].token_ids == request.right()
    assert answers[1].reason == "invalid_step"


def test_no_steps_are_no_call(server: Adversary, client: DraftClient) -> None:
    assert client.propose([]) == []
    assert client.stats.calls == 0


# A server that is away, restarts or forgets --------------------------------------------------------------------------


def test_drafts_after_a_restart_equal_drafts_without_it(server: Adversary, client: DraftClient) -> None:
    requests = [Request("a", 20, seed=1), Request("b", 30, seed=2)]
    propose(client, *requests)
    server.restart()
    for request in requests:
        propose_until_right(client, request)
    assert client.stats.handshakes == 2


def test_rows_that_came_while_the_server_was_away_are_not_lost(server: Adversary, client: DraftClient) -> None:
    request = Request("a")
    propose(client, request)
    server.stop()
    for _ in range(5):
        request.grow()
        assert propose(client, request)[0].reason in ("failed", "unavailable")
    server.restart()
    propose_until_right(client, request)


def test_a_server_that_was_never_there_costs_no_time(server: Adversary) -> None:
    server.stop()
    with DraftClient(make_settings(server.url), TARGET) as client:
        assert not client.wait_connected(0.05)
        assert client.facts is None
        request = Request("a")
        times = []
        for _ in range(20):
            began = time.monotonic()
            assert propose(client, request)[0].reason == "unavailable"
            times.append(time.monotonic() - began)
            request.grow()
        assert min(times) < 0.5
        wait_for(lambda: client.refusal is not None)
        server.start()
        propose_until_right(client, request)
        assert client.refusal is None


def test_a_port_that_swallows_connections_costs_no_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with DraftClient(make_settings(url, request_timeout_s=0.2), TARGET) as client:
            times = []
            for _ in range(10):
                began = time.monotonic()
                assert propose(client, Request("a"))[0].reason == "unavailable"
                times.append(time.monotonic() - began)
            assert min(times) < 0.5


@pytest.mark.parametrize("fault", [Fault(manner="hold"), Fault(manner="trickle")], ids=["hold", "trickle"])
def test_a_step_never_outlasts_its_deadline(server: Adversary, fault: Fault) -> None:
    with connected(server, step_deadline_ms=30.0, breaker_failures=1_000) as client:
        server.fail_always(fault)
        times = []
        for _ in range(5):
            wait_for(lambda: client.stats.is_connected)
            began = time.monotonic()
            assert propose(client, Request("a"))[0].reason == "late"
            times.append(time.monotonic() - began)
        assert 0.02 < min(times) < 1.0


def test_sessions_that_the_server_lost_are_fed_again(server: Adversary, client: DraftClient) -> None:
    request = Request("a", 10)
    propose(client, request)
    server.forget_sessions()
    request.grow()
    (drafts,) = propose(client, request)
    assert drafts.coverage < 1.0
    assert propose_until_right(client, request) == 1


def test_a_client_that_the_server_forgot_shakes_hands_again(server: Adversary, client: DraftClient) -> None:
    request = Request("a", 10)
    propose(client, request)
    server.forget_clients()
    request.grow()
    assert propose(client, request)[0].reason == "refused:epoch_mismatch"
    propose_until_right(client, request)
    assert client.stats.handshakes == 2


def test_a_connection_closed_while_idle_is_replaced_before_the_next_step(server: Adversary, client: DraftClient) -> None:
    request = Request("a")
    propose(client, request)
    server.break_connections()
    wait_for(lambda: client.stats.reconnects == 2)
    request.grow()
    assert propose(client, request)[0].token_ids == request.right()
    assert client.stats.handshakes == 1


def test_the_lease_is_kept_while_nothing_happens(server: Adversary) -> None:
    server.limits = LIMITS.model_copy(update={"lease_seconds": 0.3})
    with connected(server):
        wait_for(lambda: sum(not seen.request.sessions for seen in server.seen) >= 2)


@pytest.mark.parametrize(
    "facts",
    [
        {"vocab_size": 7},
        {"target_hidden_size": 7},
        {"target_layer_ids": (3, 1)},
        {"feature_dtypes": ("float32",)},
    ],
)
def test_a_drafter_of_another_target_is_never_used(server: Adversary, facts: dict[str, Any]) -> None:
    server.facts = FACTS.model_copy(update=facts)
    with DraftClient(make_settings(server.url), TARGET) as client:
        wait_for(lambda: client.refusal is not None)
        assert propose(client, Request("a"))[0].reason == "unavailable"
        server.facts = FACTS
        propose_until_right(client, Request("a"))


@pytest.mark.parametrize("code", [(412, "fingerprint_mismatch"), (401, "invalid_api_key"), (429, "overloaded")])
def test_a_refused_handshake_is_tried_again(server: Adversary, code: tuple[int, str]) -> None:
    server.refuse_handshakes = code
    with DraftClient(make_settings(server.url), TARGET) as client:
        wait_for(lambda: client.refusal is not None)
        assert code[1] in str(client.refusal)
        server.refuse_handshakes = None
        propose_until_right(client, Request("a"))


def test_rows_for_other_layers_are_thrown_away(server: Adversary) -> None:
    target = TARGET.model_copy(update={"target_layer_ids": None})
    with DraftClient(make_settings(server.url), target) as client:
        assert client.wait_connected(20.0)
        request = Request("a")
        propose(client, request)
        server.facts = FACTS.model_copy(update={"target_layer_ids": (0, 2)})
        server.restart()
        wait_for(lambda: client.stats.handshakes == 2)
        first = request.sent
        request.grow()
        (drafts,) = propose(client, request)
        assert drafts.token_ids == request.right(first=first)


# The breaker ---------------------------------------------------------------------------------------------------------


def test_a_server_that_keeps_failing_is_left_alone_and_tried_again(server: Adversary) -> None:
    with connected(server, breaker_min_s=0.2, breaker_max_s=0.2, step_deadline_ms=SHORT_MS) as client:
        request = Request("a")
        server.fail_always(Fault(manner="hold"))
        reasons = []
        while not client.stats.breaker_open:
            request.grow()
            reasons += [drafts.reason for drafts in propose(client, request)]
            wait_for(lambda: client.stats.is_connected)
        assert reasons == ["late"] * 3
        calls = client.stats.calls
        for _ in range(10):
            request.grow()
            assert propose(client, request)[0].reason == "unavailable"
        assert client.stats.calls == calls
        assert client.stats.times_breaker_opened == 1
        server.fail_always(None)
        propose_until_right(client, request)
        assert not client.stats.breaker_open


# Sessions with too much to send --------------------------------------------------------------------------------------


def test_a_long_prompt_is_fed_in_the_background(server: Adversary) -> None:
    with connected(server, max_rows_per_step=32) as client:
        long, short = Request("long", 300, seed=1), Request("short", 4, seed=2)
        answers = propose(client, long, short)
        assert answers[0].reason == "catching_up"
        assert answers[1].token_ids == short.right()
        propose_until_right(client, long)
        assert client.stats.rows_uploaded >= 300
        hot = {seen.connection for seen in server.seen for update in seen.request.sessions if update.session_id == "short"}
        bulk = {seen.connection for seen in server.seen if seen.num_rows > 32}
        assert hot.isdisjoint(bulk)


def test_a_rewind_during_the_upload_is_respected(server: Adversary) -> None:
    with connected(server, max_rows_per_step=32) as client:
        request = Request("a", 200)
        server.fail_next(Fault(delay_s=0.05), count=2)
        propose(client, request)
        for position in (150, 60, 20, 90):
            time.sleep(0.02)
            request.grow(max(0, position - request.end))
            propose(client, request)
            request.rewind(position)
            propose(client, request)
        propose_until_right(client, request)


@pytest.mark.parametrize("name", ["hang up, applied", "noise", "internal", "unknown client", "session forward failed"])
def test_a_fault_during_the_upload_repairs_itself(server: Adversary, name: str) -> None:
    with connected(server, max_rows_per_step=32) as client:
        request = Request("a", 200)
        server.fail_next(Fault())
        server.fail_next(FAULTS[name][0])
        propose(client, request)
        propose_until_right(client, request)


def test_a_restart_during_the_upload_repairs_itself(server: Adversary) -> None:
    with connected(server, max_rows_per_step=32) as client:
        request = Request("a", 500)
        server.fail_next(Fault(delay_s=0.03), count=3)
        propose(client, request)
        time.sleep(0.05)
        server.restart()
        propose_until_right(client, request)


def test_a_step_that_was_late_with_many_rows_is_left_to_the_background(server: Adversary) -> None:
    request = Request("a", 40)
    with connected(server, step_deadline_ms=SHORT_MS) as client:
        server.fail_next(Fault(manner="hold", is_applied=False))
        assert propose(client, request)[0].reason == "late"
        wait_for(lambda: client.stats.rows_uploaded >= 40)
        propose_until_right(client, request)


def test_old_rows_are_forgotten_beyond_the_limit(server: Adversary) -> None:
    with connected(server, max_history_rows=16) as client:
        request = Request("a", 10)
        for _ in range(10):
            assert propose(client, request)[0].token_ids == request.right()
            request.grow(3)
        propose(client, request)
        server.restart()
        wait_for(lambda: client.stats.handshakes == 2)
        request.grow(1)
        (drafts,) = propose(client, request)
        update = server.seen[-1].request.sessions[0]
        assert 0 < request.end - update.start <= 16
        assert drafts.token_ids == request.right(first=update.start)
        assert list(update.prefix_token_ids) == request.tokens[: update.start]


def test_a_session_at_the_context_limit_is_left_alone(server: Adversary) -> None:
    server.limits = LIMITS.model_copy(update={"max_context": 10})
    with connected(server) as client:
        request = Request("a", 8)
        propose(client, request)
        request.grow(6)
        assert propose(client, request)[0].reason == "refused:context_limit"
        calls = client.stats.calls
        request.grow()
        assert propose(client, request)[0].reason == "refused:context_limit"
        assert client.stats.calls == calls
        request.rewind(4)
        assert propose(client, request)[0].token_ids == request.right()


def test_more_sessions_than_a_call_may_have_take_turns(server: Adversary, client: DraftClient) -> None:
    requests = [Request(str(index), seed=index) for index in range(11)]
    served: set[str] = set()
    for _ in range(4):
        for request, drafts in zip(requests, propose(client, *requests), strict=True):
            assert drafts.reason in (None, "over_limit")
            if drafts.reason is None:
                served.add(request.session_id)
                assert drafts.token_ids == request.right()
            request.grow()
    assert len(served) == 11


def test_every_request_of_a_client_carries_one_key_to_route_by(server: Adversary) -> None:
    keys = []
    for _ in range(2):
        server.headers.clear()
        with connected(server) as client:
            propose_until_right(client, Request("a"))
        (key,) = {headers["x-draft-client"] for headers in server.headers}
        keys.append(key)
    assert keys[0] != keys[1]
