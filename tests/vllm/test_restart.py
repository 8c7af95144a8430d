"""The draft server is killed and started again, ten times under load: no answer changes, and drafts are accepted again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from service.vllm_process import VllmProcess
from tests.vllm.pair import CHATS, DraftServer, answer_all, counts

pytestmark = pytest.mark.vllm
RESTARTS = 10


def test_ten_restarts_under_load(
    drafted: VllmProcess, draft_server: DraftServer, plain_answers: dict[str, list[tuple[Any, ...]]]
) -> None:
    is_over = threading.Event()

    def ask_on(offset: int) -> int:
        place = offset
        while not is_over.is_set():
            ask = CHATS[place % len(CHATS)]
            assert answer_all(drafted.url, [ask]) == {ask.name: plain_answers[ask.name]}
            place += 1
        return place - offset

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(ask_on, 3 * worker) for worker in range(3)]
        try:
            for _ in range(RESTARTS):
                wait_for_accepted(drafted, loads)
                draft_server.kill()
                draft_server.start()
            wait_for_accepted(drafted, loads)
        finally:
            is_over.set()
        assert sum(load.result() for load in loads) >= RESTARTS


def wait_for_accepted(drafted: VllmProcess, loads: list[Any], timeout_s: float = 60.0) -> None:
    """Wait until more drafts are accepted than now; a load that failed ends the wait."""
    before, end = counts(drafted.url)[2], time.monotonic() + timeout_s
    while counts(drafted.url)[2] <= before + 3:
        assert time.monotonic() < end, "no draft was accepted any more"
        for load in loads:
            if load.done():
                load.result()
        time.sleep(0.1)
