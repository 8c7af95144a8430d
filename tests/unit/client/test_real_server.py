"""The client and the real server agree on every rule that both have: drafts are those of a fresh session with the same rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from draft_engine_client.client import DraftClient
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.wire import TargetFingerprint
from tests.support.service import HELLO, Server, fresh_drafts, make_harness, make_rows, serving, wait_until

TARGET = TargetFingerprint.model_validate(HELLO["target"])
VOCAB_SIZE = 1_000


class Request:
    """One request of a target."""

    def __init__(self, session_id: str, prompt: int, seed: int) -> None:
        self.session_id = session_id
        self._random = np.random.default_rng(seed)
        self.tokens: list[int] = []
        self.sent = 0
        self.grow(prompt + 1)

    def grow(self, count: int = 2) -> None:
        self.tokens += [int(token) for token in self._random.integers(0, VOCAB_SIZE, count)]

    def rewind(self, position: int) -> None:
        del self.tokens[position:]
        self.sent = position
        self.grow(3)

    def step(self, **more: Any) -> SessionStep:
        rows, start = self.tokens[self.sent : -1], self.sent
        self.sent += len(rows)
        features = make_rows(rows, start).numpy() if rows else np.zeros((0, 8), np.float32)
        return SessionStep(self.session_id, rows, features, start, self.tokens[-1], 4, **more)

    def right(self) -> list[int]:
        return fresh_drafts(self.tokens[:-1], anchor_token_id=self.tokens[-1])


@contextmanager
def connected(server: Server, **changes: Any) -> Iterator[DraftClient]:
    settings = ClientSettings(server.url, **({"step_deadline_ms": 5_000.0, "breaker_min_s": 0.05} | changes))
    with DraftClient(settings, TARGET) as client:
        assert client.wait_connected(20.0)
        yield client
    assert client.stats.errors == 0


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(make_harness()) as server:
        yield server


def propose_until_right(client: DraftClient, request: Request) -> None:
    def drafts_came() -> bool:
        request.grow()
        (drafts,) = client.propose([request.step()])
        return drafts.reason is None and drafts.coverage == 1.0 and list(drafts.token_ids) == request.right()

    wait_until(drafts_came)


def held(server: Server) -> set[str]:
    return {session["session_id"] for session in server.http.get("/v1/sessions").json()["data"]}


def test_sessions_grow_rewind_and_end(server: Server) -> None:
    with connected(server) as client:
        requests = [Request("a", 5, 1), Request("b", 0, 2), Request("c", 11, 3)]
        for turn in range(8):
            if turn == 4:
                requests[2].rewind(6)
            answers: list[Drafts] = client.propose([request.step() for request in requests])
            for request, drafts in zip(requests, answers, strict=True):
                assert (drafts.reason, list(drafts.token_ids)) == (None, request.right())
                request.grow(turn % 3)
        client.finish(["a"])
        wait_until(lambda: held(server) == {"b", "c"})
        again = Request("a", 4, 9)
        (drafts,) = client.propose([again.step()])
        assert list(drafts.token_ids) == again.right()
        assert client.stats.failures == client.stats.refusals == 0
    wait_until(lambda: not held(server))


def test_probabilities_come_with_the_drafts_that_want_them(server: Server) -> None:
    with connected(server) as client:
        plain, wanting = Request("a", 5, 1), Request("b", 5, 2)
        first, second = client.propose([plain.step(), wanting.step(draft_probs_topk=3)])
        assert first.probs is None
        assert second.probs is not None
        assert second.probs_ids is not None
        assert second.probs.shape == (4, 3)
        assert list(second.probs_ids[:, 0]) == list(second.token_ids) == wanting.right()


def test_a_long_prompt_is_fed_beside_the_steps(server: Server) -> None:
    with connected(server, max_rows_per_step=16, max_upload_bytes=2_048) as client:
        long, short = Request("long", 200, 1), Request("short", 3, 2)
        first, second = client.propose([long.step(), short.step()])
        assert first.reason == "catching_up"
        assert list(second.token_ids) == short.right()
        propose_until_right(client, long)
        assert client.stats.rows_uploaded > 150


def test_a_lost_connection_loses_no_session(server: Server) -> None:
    with connected(server) as client:
        request = Request("a", 6, 1)
        client.propose([request.step()])
        link = client._state.link
        assert link is not None
        link.channel.abort()
        propose_until_right(client, request)
        assert (client.stats.handshakes, client.stats.reconnects) == (1, 2)


def test_a_client_that_was_away_too_long_starts_over_by_itself() -> None:
    with serving(make_harness(), lease_seconds=0.3) as server, connected(server) as client:
        request = Request("a", 6, 1)
        client.propose([request.step()])
        time.sleep(0.5)
        propose_until_right(client, request)


def test_sessions_that_were_deleted_are_fed_again(server: Server) -> None:
    with connected(server) as client:
        request = Request("a", 6, 1)
        client.propose([request.step()])
        (info,) = server.http.get("/v1/sessions").json()["data"]
        answer = server.http.delete("/v1/sessions/a", params={"client_id": info["client_id"]})
        assert answer.status_code in (200, 204), answer.text
        propose_until_right(client, request)


def test_another_target_is_told_why(server: Server) -> None:
    wrong = TARGET.model_copy(update={"num_layers": 9})
    with DraftClient(ClientSettings(server.url), wrong) as client:
        wait_until(lambda: client.refusal is not None)
        assert "fingerprint_mismatch" in str(client.refusal)
        assert client.propose([Request("a", 3, 1).step()])[0].reason == "unavailable"
