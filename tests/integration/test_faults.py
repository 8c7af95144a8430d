"""A network that loses, delays, repeats, reorders, cuts and changes messages: output stays plain, and drafting comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from draft_engine_client.client import DraftClient
from draft_model.target_model import TargetModel
from service.subprocesses import ServerProcess, server_process
from service.target.engine import TargetEngine
from tests.integration.test_target_engine import LAYERS, PROMPTS
from tests.integration.test_whole_loop import (
    START_SECONDS,
    DraftServer,
    answer_all,
    draft_folder,
    engine,
    free_port,
    make_client,
    model,
    server,
    target_folder,
    wait_for_drafts,
)
from tests.support.fault_proxy import FAULTS, FaultProxy
from tests.support.service import wait_until

__all__ = ["draft_folder", "engine", "model", "server", "target_folder"]


class Proxied:
    """Where a client finds the proxy instead of the server."""

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.fixture
def proxy(server: DraftServer) -> Iterator[FaultProxy]:
    server.start()
    proxy = FaultProxy(server.port, seed=5)
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[DraftClient]:
    client = make_client(Proxied(proxy.url), deadline_ms=300.0)  # type: ignore[arg-type]
    yield client
    client.close()


def sessions_of(url: str) -> list[Any]:
    return list(httpx.get(f"{url}/v1/sessions", timeout=20).json()["data"])


def test_a_bad_network_changes_no_output_and_leaves_nothing(
    server: DraftServer, proxy: FaultProxy, client: DraftClient, engine: TargetEngine, model: TargetModel
) -> None:
    assert client.wait_connected(20)
    wait_for_drafts(engine, model, "clean")
    proxy.share = 0.15
    end = time.monotonic() + 60
    turn = 0
    while any(proxy.counts[fault] < 2 for fault in FAULTS):
        assert time.monotonic() < end, f"faults so far: {proxy.counts}"
        answer_all(engine, model, f"bad{turn}-", count=40)
        turn += 1
    assert client.stats.failures > 0
    assert client.stats.errors == 0
    proxy.share = 0.0
    wait_for_drafts(engine, model, "clean again")
    client.close()
    wait_until(lambda: not sessions_of(server.url))


# Killed processes -----------------------------------------------------------------------------------------------------

NUM_KILLS = 50
MAX_TOKENS = 60


def target_arguments(folder: Path, port: int, draft_url: str) -> list[str]:
    layers = ",".join(map(str, LAYERS))
    arguments = [
        "target",
        "--model",
        str(folder),
        "--served-model-name",
        "target",
        "--port",
        str(port),
        "--draft-url",
        draft_url,
        "--threads",
        "1",
    ]
    return [
        *arguments,
        "--target-layer-ids",
        layers,
        "--draft-deadline-ms",
        "300",
        "--schedule",
        "fixed",
        "--draft-when",
        "always",
    ]


def complete(url: str, prompt: list[int]) -> tuple[str, int]:
    """The answer to a prompt, and how many drafts were verified for it."""
    body = {"model": "target", "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["draft"]["proposed"]


@pytest.mark.slow
def test_either_side_is_killed_fifty_times_and_the_output_stays_plain(
    server: DraftServer, target_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    with server_process(target_arguments(target_folder, port, "none"), tmp_path / "plain.log") as plain:
        right = [complete(plain.url, prompt)[0] for prompt in PROMPTS]
    dice = random.Random(11)

    def start_target() -> ServerProcess:
        process = ServerProcess(target_arguments(target_folder, port, server.url), tmp_path / "target.log")
        process.wait_ready(START_SECONDS)
        return process

    def drafts_are_verified() -> bool:
        answers = [complete(target.url, prompt) for prompt in PROMPTS]
        assert [text for text, _ in answers] == right
        return sum(proposed for _, proposed in answers) > 0

    server.start()
    target = start_target()
    try:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            for _ in range(NUM_KILLS):
                wait_until(drafts_are_verified, 60.0)
                running: list[Future[tuple[str, int]]] = [pool.submit(complete, target.url, prompt) for prompt in PROMPTS]
                time.sleep(dice.uniform(0.0, 0.1))
                if dice.random() < 0.5:
                    server.kill()
                    assert [answer.result()[0] for answer in running] == right
                    server.start()
                else:
                    target.kill()
                    for answer, text in zip(running, right, strict=True):
                        if answer.exception() is None:
                            assert answer.result()[0] == text
                        else:
                            assert isinstance(answer.exception(), httpx.TransportError)
                    target = start_target()
        wait_until(drafts_are_verified, 60.0)
        target.stop()
        wait_until(lambda: not sessions_of(server.url))
    finally:
        target.kill()
