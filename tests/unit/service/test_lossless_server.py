"""The same test put to a server: an honest one passes, one whose drafts change the answers does not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from service.errors import StartupError
from service.lossless_server import compare_samples, verify_server


class Server:
    """Answers from a fixed distribution over four tokens; `bias` is what drafting adds to the first of them."""

    def __init__(self, *, bias: float = 0.0, greedy_differs: bool = False, proposed: int = 3) -> None:
        self.bias, self.greedy_differs, self.proposed = bias, greedy_differs, proposed
        self.seeds: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content)
        is_drafted = body["num_draft_tokens"] > 0
        if body["temperature"] == 0.0:
            tokens = [1] * body["max_tokens"]
            tokens[20] += is_drafted and self.greedy_differs
        else:
            self.seeds.append(body["seed"])
            probs = np.array([0.4, 0.3, 0.2, 0.1])[: body["top_k"]]
            probs[0] += self.bias * is_drafted
            rng = np.random.default_rng(body["seed"])
            tokens = rng.choice(len(probs), size=body["max_tokens"], p=probs / probs.sum()).tolist()
        reply = {"choices": [{"token_ids": tokens}], "draft": {"proposed": self.proposed * is_drafted}}
        return httpx.Response(200, json=reply)


def verify(server: Any, samples: int = 80):
    with httpx.Client(transport=httpx.MockTransport(server), base_url="http://target") as http:
        return verify_server(http, samples=samples, num_draft_tokens=3, seed=1)


def test_an_honest_server_passes_and_no_seed_is_used_twice() -> None:
    server = Server()
    report = verify(server)
    assert report.ok
    assert len(set(server.seeds)) == len(server.seeds) == 2 * 80 * len(report.outcomes)
    document = json.loads(json.dumps(report.as_json()))
    assert document["ok"] is True
    assert {case["samples"] for case in document["cases"]} == {80}
    assert {(case["temperature"], case["top_k"], case["top_p"]) for case in document["cases"]} >= {(0.7, 2, 1.0), (1.0, 4, 0.8)}


def test_a_server_whose_drafts_change_the_answers_fails() -> None:
    assert not verify(Server(bias=0.5)).ok
    report = verify(Server(greedy_differs=True), samples=10)
    assert not report.is_greedy_same
    assert not report.ok


def test_a_server_that_cannot_be_tested_is_told_apart() -> None:
    with pytest.raises(StartupError, match="verified no drafts"):
        verify(Server(proposed=0), samples=5)
    with pytest.raises(StartupError, match="401"):
        verify(lambda request: httpx.Response(401), samples=5)
    with pytest.raises(StartupError, match="not a reply with token_ids"):
        verify(lambda request: httpx.Response(200, json={"choices": []}), samples=5)


def test_samples_from_one_distribution_give_even_p_values() -> None:
    rng = np.random.default_rng(2)

    def draw() -> list[tuple[int, ...]]:
        return [(int(token),) for token in rng.choice(12, 300, p=np.arange(1, 13) / 78)]

    p_values = np.array([compare_samples(draw(), draw()).p_value for _ in range(400)])
    assert (p_values < 0.05).mean() == pytest.approx(0.05, abs=0.045)
    assert p_values.mean() == pytest.approx(0.5, abs=0.08)
    with pytest.raises(ValueError, match="one size"):
        compare_samples(draw(), [])
