"""A network that loses, delays, repeats, reorders, cuts and changes messages: output stays plain, and drafting comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from draft_engine_client.client import DraftClient
from draft_model.target_model import TargetModel
from service.target.engine import TargetEngine
from tests.integration.test_whole_loop import (
    DraftServer,
    answer_all,
    draft_folder,
    engine,
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


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


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
    wait_until(lambda: not httpx.get(f"{server.url}/v1/sessions", timeout=20).json()["data"])
