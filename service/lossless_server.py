"""`draft-engine verify-lossless --target-url`: the same question put to a running server, of which nothing is known.

Answers with drafts and without are drawn many times for one prompt, with independent seeds, and the joint counts of their first
tokens are compared with each other by chi-square. Greedy answers must be the same token by token. The server must understand
`num_draft_tokens`, as the embedded target does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from service.errors import StartupError
from service.lossless import FALSE_ALARM_RATE, ChiSquare

NUM_COMPARED = 4
# A draft is not asked for where the answer ends anyway, so answers are longer than what is compared.
_NUM_GENERATED = NUM_COMPARED + 2
_NUM_GREEDY = 48
_PROMPT = "The best way to spend a rainy day is"
_MIN_SEEN = 16
_CONNECTIONS = 8

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ServerOutcome:
    """One sampling setting: samples of each kind, drafts that the server verified, and the comparison."""

    temperature: float
    top_k: int
    top_p: float
    samples: int
    proposed: int
    result: ChiSquare


@dataclass(frozen=True)
class ServerReport:
    """What came of a server."""

    outcomes: list[ServerOutcome]
    is_greedy_same: bool

    @property
    def ok(self) -> bool:
        """Whether nothing differs; a lossless server fails this with probability FALSE_ALARM_RATE at most."""
        limit = FALSE_ALARM_RATE / len(self.outcomes)
        return self.is_greedy_same and all(outcome.result.p_value >= limit for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """The report file."""
        cases = [
            {**vars(outcome), "result": None, "p_value": outcome.result.p_value, "degrees": outcome.result.degrees}
            for outcome in self.outcomes
        ]
        for case in cases:
            del case["result"]
        return {"ok": self.ok, "false_alarm_rate": FALSE_ALARM_RATE, "greedy_same": self.is_greedy_same, "cases": cases}


def compare_samples(first: Sequence[Tokens], second: Sequence[Tokens]) -> ChiSquare:
    """Compare two samples of one size. Outcomes that were seen too rarely for the statistic are pooled.

    Raises:
        ValueError: the sizes differ.
    """
    if len(first) != len(second):
        raise ValueError(f"the samples must have one size; they have {len(first)} and {len(second)}")
    counts, others = Counter(first), Counter(second)
    rare, pairs = np.zeros(2), []
    for outcome in counts.keys() | others.keys():
        pair = np.array([counts[outcome], others[outcome]], dtype=np.float64)
        if pair.sum() < _MIN_SEEN:
            rare += pair
        else:
            pairs.append(pair)
    if rare.sum() > 0:
        pairs.append(rare)
    return ChiSquare(sum(float((a - b) ** 2 / (a + b)) for a, b in pairs), len(pairs) - 1)


def verify_server(http: httpx.Client, *, samples: int, num_draft_tokens: int, seed: int) -> ServerReport:
    """Compare a server's answers with and without drafts.

    Args:
        http: with the server's base URL
        samples: answers of each kind for each sampling setting
        num_draft_tokens: drafts to verify in a step
        seed: of all answers

    Raises:
        StartupError: the server cannot be used, or verified no drafts, so that nothing was tested.
    """
    greedy = [_ask(http, 0.0, 0, 1.0, count, 0, _NUM_GREEDY)[0] for count in (0, num_draft_tokens)]
    outcomes = []
    seeds = itertools.count(seed * 10_000_019)
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for temperature, top_k, top_p in itertools.product((0.7, 1.0), (2, 4), (1.0, 0.8)):
            answers: list[list[Tokens]] = []
            proposed = 0
            for count in (0, num_draft_tokens):
                asked = [
                    pool.submit(_ask, http, temperature, top_k, top_p, count, next(seeds), _NUM_GENERATED)
                    for _ in range(samples)
                ]
                replies = [one.result() for one in asked]
                answers.append([tokens[:NUM_COMPARED] for tokens, _ in replies])
                proposed += sum(drafts for _, drafts in replies)
            if not proposed:
                raise StartupError("the server verified no drafts, so there is nothing to test; is its draft server up?")
            result = compare_samples(answers[0], answers[1])
            outcomes.append(ServerOutcome(temperature, top_k, top_p, samples, proposed, result))
    return ServerReport(outcomes, greedy[0] == greedy[1])


def _ask(
    http: httpx.Client, temperature: float, top_k: int, top_p: float, num_draft_tokens: int, seed: int, max_tokens: int
) -> tuple[Tokens, int]:
    """Return the tokens of one answer, and how many drafts were verified for it."""
    body = {
        "prompt": _PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "num_draft_tokens": num_draft_tokens,
    }
    try:
        reply = http.post("/v1/completions", json=body).raise_for_status().json()
        return tuple(reply["choices"][0]["token_ids"]), int(reply["draft"]["proposed"])
    except httpx.HTTPError as error:
        raise StartupError(f"--target-url: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StartupError(f"--target-url: not a reply with token_ids and draft: {type(error).__name__}: {error}") from error
