"""A target says in its handshake what its steps cost, and the server sends the drafts that are worth verifying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.testing import FakeDrafter
from tests.support.service import (
    HELLO,
    Server,
    Update,
    container_body,
    error_of,
    fresh_drafts,
    make_harness,
    post_container,
    reply_of,
    serving,
)

# The fake drafter says 0.9 of each draft. Three tokens for two requests pay at this price, a fourth does not.
DEAR = {"num_tokens": [1, 2, 3, 4, 64], "seconds": [1.0, 1.1, 1.2, 4.0, 64.0]}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(make_harness(FakeDrafter(num_pages=256))) as running:
        yield running


def shake(server: Server, schedule: dict[str, Any] | None) -> str:
    answer = server.http.post("/v1/clients", json=HELLO if schedule is None else {**HELLO, "schedule": schedule})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["client_id"])


def propose(server: Server, client_id: str, *updates: Update) -> list[dict[str, Any]]:
    reply = reply_of(post_container(server.http, container_body(client_id, *updates)))
    return list(reply["sessions"])


def test_a_client_without_a_schedule_gets_every_draft(server: Server) -> None:
    (session,) = propose(server, shake(server, None), Update("a", 0, [1, 2, 3]))
    assert session["draft_token_ids"] == fresh_drafts([1, 2, 3])


def test_the_lengths_are_those_of_the_batch(server: Server) -> None:
    client_id = shake(server, {"kind": "hardware", "step_times": DEAR})
    sessions = propose(server, client_id, Update("a", 0, [1, 2, 3]), Update("b", 0, [4, 5]))
    assert sorted(len(one["draft_token_ids"]) for one in sessions) == [0, 1]
    (alone,) = propose(server, client_id, Update("c", 0, [1, 2, 3]))
    assert alone["draft_token_ids"] == fresh_drafts([1, 2, 3])[:2]
    assert len(alone["confidence"]) == len(alone["survival"]) == 2


def test_clients_are_scheduled_apart(server: Server) -> None:
    strict, lax = (shake(server, {"kind": "threshold", "threshold": bound}) for bound in (0.85, 0.7))
    assert [len(propose(server, one, Update("a", 0, [1, 2]))[0]["draft_token_ids"]) for one in (strict, lax)] == [1, 3]


def test_a_repeat_is_answered_with_the_same_drafts(server: Server) -> None:
    client_id = shake(server, {"kind": "threshold", "threshold": 0.7})
    first = propose(server, client_id, Update("a", 0, [1, 2]))
    assert propose(server, client_id, Update("a", 0, [1, 2])) == first


def confidence_after(server: Server, *, rounds: int, **more: Any) -> float:
    """Confidence in a first draft after so many rounds in which no draft was kept."""
    client_id = shake(server, {"kind": "fixed"})
    propose(server, client_id, Update("a", 0, [1]))
    session: dict[str, Any] = {}
    for end in range(1, rounds + 1):
        # 7 is the anchor; whatever follows it is another token than the draft.
        (session,) = propose(server, client_id, Update("a", end, [7], seq=end, more=more))
    return float(session["confidence"][0])


def test_confidence_follows_what_is_accepted_and_not_what_came_too_late(server: Server) -> None:
    assert confidence_after(server, rounds=100) < 0.8
    assert confidence_after(server, rounds=100, num_verified=0) == 0.9


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"kind": "hardware"}, "needs step_times"),
        ({"kind": "hardware", "step_times": {"num_tokens": [2, 1], "seconds": [1.0, 1.0]}}, "must rise"),
        ({"kind": "hardware", "step_times": {"num_tokens": [1], "seconds": [0.0]}}, "greater than 0"),
        ({"kind": "hardware", "step_times": {"num_tokens": [1, 2], "seconds": [1.0]}}, "2 widths"),
        ({"kind": "someday"}, "'fixed', 'threshold' or 'hardware'"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(server: Server, schedule: dict[str, Any], message: str) -> None:
    answer = server.http.post("/v1/clients", json={**HELLO, "schedule": schedule})
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]
