"""A client that projects its rows: it fetches the projection, sends projected rows, and follows a change of the drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from draft_engine_client.client import DraftClient
from draft_engine_client.errors import InvalidReplyError
from draft_engine_client.projection import fetch_projection
from draft_engine_client.sessions import SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.transport import Channel
from draft_engine_client.wire import ModelFacts, TargetFingerprint
from service.testing import FakeDrafter, expected_drafts, row_digest
from tests.support.service import HELLO, make_harness, make_rows, serving, wait_until

TARGET = TargetFingerprint.model_validate(HELLO["target"])
WIDTH = 4


@dataclass
class NamedDrafter(FakeDrafter):
    """A fake whose checkpoint has a name."""

    fingerprint: str = "one"

    @property
    def facts(self) -> ModelFacts:
        return super().facts.model_copy(update={"fingerprint": self.fingerprint})


def step_of(tokens: list[int], start: int) -> SessionStep:
    rows = tokens[start:-1]
    return SessionStep("a", rows, make_rows(rows, start, WIDTH).numpy(), start, tokens[-1], 4)


def right(tokens: list[int]) -> tuple[int, ...]:
    rows = make_rows(tokens[:-1], 0, WIDTH)
    digests = [row_digest(position, row) for position, row in enumerate(rows)]
    return tuple(expected_drafts(digests, len(digests), tokens[-1], 4, 1_000))


def test_projected_rows_are_drafted_after_and_a_new_drafter_brings_a_new_projection() -> None:
    second = make_harness(NamedDrafter(fingerprint="two"))
    with (
        serving(make_harness(NamedDrafter()), load=lambda _: second.loaded) as server,
        DraftClient(
            ClientSettings(server.url, step_deadline_ms=5_000.0, breaker_min_s=0.05), TARGET, is_projecting=True
        ) as client,
    ):
        assert client.wait_connected(20.0)
        first = client.projection
        assert first is not None
        np.testing.assert_array_equal(first.weight.to_array(), FakeDrafter().projection.weight.numpy())
        tokens = [3, 1, 4, 1, 5]
        (drafts,) = client.propose([step_of(tokens, 0)], first)
        assert (drafts.reason, tuple(drafts.token_ids)) == (None, right(tokens))

        assert server.http.post("/v1/reload", json={}).status_code == 200
        client.propose([step_of([*tokens, 9], 4)], first)
        wait_until(lambda: client.projection is not first)
        (drafts,) = client.propose([step_of([*tokens, 9, 2], 5)], first)
        assert drafts.reason == "other_projection", "rows of the drafter before are not mixed with those of the new one"
        assert client.wait_connected(20.0)
        (drafts,) = client.propose([step_of([*tokens, 9, 2], 0)], client.projection)
        assert (drafts.reason, tuple(drafts.token_ids)) == (None, right([*tokens, 9, 2]))
    assert client.stats.errors == 0


def test_a_projection_of_another_drafter_or_size_is_refused() -> None:
    with serving() as server:
        channel = Channel(ClientSettings(server.url))
        facts = FakeDrafter().facts
        for wrong in ({"fingerprint": "another"}, {"feature_width": 9}, {"projected_width": 5}):
            with pytest.raises(InvalidReplyError, match="projection"):
                fetch_projection(channel, facts.model_copy(update=wrong), 5.0)
        assert fetch_projection(channel, facts, 5.0).weight.shape == (4, 8)
        channel.close()


def test_raw_rows_need_no_projection() -> None:
    with serving() as server, DraftClient(replace(ClientSettings(server.url), step_deadline_ms=5_000.0), TARGET) as client:
        assert client.wait_connected(20.0)
        assert client.projection is None
