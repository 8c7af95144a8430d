"""A real vLLM server with the drafter that ships, prefix caching and chunked prompts on: whatever is asked, the answer is the
one of vLLM without drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from service.vllm_process import SERVED_NAME, VllmProcess
from tests.vllm.pair import (
    CHATS,
    LONG_TEXT,
    MAX_MODEL_LEN,
    MIXED,
    SHARED,
    SPECIAL,
    DraftServer,
    answer_all,
    counts,
    read_metrics,
    stop_token_asks,
)

pytestmark = pytest.mark.vllm
Answers = dict[str, list[tuple[Any, ...]]]


def verified(draft_server: DraftServer) -> tuple[float, float]:
    """Verified blocks and accepted tokens, as the draft server counts them."""
    metrics = draft_server.metrics()
    return tuple(
        sum(value for name, value in metrics.items() if name.startswith(f"draft_engine_{counter}_total"))
        for counter in ("verified_drafts", "accepted_tokens")
    )  # type: ignore[return-value]


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.1)


def test_chats_are_the_plain_ones_and_drafts_are_accepted(
    drafted: VllmProcess, draft_server: DraftServer, plain_answers: Answers
) -> None:
    before, ours_before = counts(drafted.url), verified(draft_server)
    answers = answer_all(drafted.url, CHATS)
    assert answers == {name: plain_answers[name] for name in answers}
    blocks, _, accepted = (after - start for after, start in zip(counts(drafted.url), before, strict=True))
    assert 1.0 + accepted / blocks > 1.3
    ours = tuple(after - start for after, start in zip(verified(draft_server), ours_before, strict=True))
    assert ours == (blocks, accepted), "both sides count the same"


def test_chunked_prompts_mixed_with_decoding(drafted: VllmProcess, plain_answers: Answers) -> None:
    answers = answer_all(drafted.url, MIXED)
    assert answers == {name: plain_answers[name] for name in answers}


def test_the_prefix_cache_of_vllm_keeps_its_drafts(
    drafted: VllmProcess, draft_server: DraftServer, plain_answers: Answers
) -> None:
    hits = read_metrics(drafted.url, "vllm:prefix_cache_hits")["vllm:prefix_cache_hits_total"]
    before = draft_server.metrics()
    answers = answer_all(drafted.url, SHARED, at_once=1)
    after = draft_server.metrics()
    assert answers == {name: plain_answers[name] for name in answers}
    cached = read_metrics(drafted.url, "vllm:prefix_cache_hits")["vllm:prefix_cache_hits_total"] - hits
    restored = after["draft_engine_rows_restored_total"] - before["draft_engine_rows_restored_total"]
    missing = after["draft_engine_rows_missing_total"] - before["draft_engine_rows_missing_total"]
    assert cached > 0
    assert restored + missing == cached, "every row that vLLM did not compute is accounted for"
    assert restored >= 0.9 * cached, "and nearly all of them were attached"


@pytest.mark.parametrize("name", [ask.name for ask in SPECIAL if ask.name not in ("to the end", "beside it")])
def test_special_requests(drafted: VllmProcess, plain_answers: Answers, name: str) -> None:
    (ask,) = [ask for ask in SPECIAL if ask.name == name]
    assert answer_all(drafted.url, [ask]) == {name: plain_answers[name]}


def test_stop_tokens_inside_a_block(drafted: VllmProcess, plain_answers: Answers) -> None:
    asks = stop_token_asks(plain_answers["many tokens"])
    answers = answer_all(drafted.url, asks)
    assert answers == {ask.name: plain_answers[ask.name] for ask in asks}
    assert all(reason == "stop" for [(_, _, reason, _)] in answers.values())


def test_a_request_reaches_the_longest_length_beside_one_that_does_not(drafted: VllmProcess, plain_answers: Answers) -> None:
    asks = [ask for ask in SPECIAL if ask.name in ("to the end", "beside it")]
    before = counts(drafted.url)
    answers = answer_all(drafted.url, asks)
    assert answers == {ask.name: plain_answers[ask.name] for ask in asks}
    assert answers["to the end"][0][2] == "length"
    assert counts(drafted.url)[2] > before[2]
    prompt = httpx.post(
        f"{drafted.url}/tokenize", json={"model": SERVED_NAME, "prompt": asks[0].body["prompt"]}, timeout=30
    ).json()
    assert prompt["count"] + len(answers["to the end"][0][0]) == MAX_MODEL_LEN


def test_aborted_requests_leave_nothing_and_disturb_nobody(
    drafted: VllmProcess, draft_server: DraftServer, plain_answers: Answers
) -> None:
    def leave_early(place: int) -> None:
        body = {
            "model": SERVED_NAME,
            "prompt": f"{LONG_TEXT} Number {place}",
            "max_tokens": 100,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{drafted.url}/v1/completions", json=body, timeout=60) as reply:
            for count, _ in enumerate(reply.iter_lines()):
                if count == 2 * place:
                    return

    with ThreadPoolExecutor(8) as pool:
        leaving = [pool.submit(leave_early, place) for place in range(6)]
        answers = answer_all(drafted.url, CHATS[:4], at_once=2)
        for one in leaving:
            one.result()
    assert answers == {name: plain_answers[name] for name in answers}
    wait_for(lambda: not draft_server.sessions())


def test_nothing_went_wrong_on_the_way(drafted: VllmProcess, draft_server: DraftServer) -> None:
    log = drafted.log.read_text()
    assert "a step goes on without drafts" not in log
    assert "gets no drafts in this step" not in log
    assert "mean coverage" in log
    metrics = draft_server.metrics()
    assert not [name for name, value in metrics.items() if name.startswith("draft_engine_session_errors") and value]
