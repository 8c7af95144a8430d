"""A real draft server process, killed, stopped, late or wrong, beside a target that must not notice in its output."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_engine_client.client import DraftClient
from draft_engine_client.settings import ClientSettings
from draft_engine_client.wire import TargetFingerprint
from draft_model.target_model import TargetModel
from service.errors import StartupError
from service.subprocesses import ServerProcess
from service.target.engine import TargetEngine, TargetEngineLimits
from service.target.text import TargetTokenizer
from tests.integration.test_target_engine import LAYERS, PROMPTS, Collector, decode_plainly, submit
from tests.support.draft_model import make_tiny_drafter
from tests.support.tiny_target import CONFIG, VOCAB_SIZE, write_tiny_target

START_SECONDS = 120.0


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("draft") / "tiny")


@pytest.fixture(scope="module")
def model(target_folder: Path) -> TargetModel:
    return TargetModel.load(target_folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DraftServer:
    """The draft server on one port, started as often as a test likes."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port, self._model, self._log = free_port(), model, log
        self.process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> ServerProcess:
        arguments = ["serve", "--port", str(self.port), "--model", str(self._model), "--threads", "1", "--page-size", "16"]
        self.process = ServerProcess(arguments, self._log)
        self.process.wait_ready(START_SECONDS)
        return self.process

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


@pytest.fixture
def server(draft_folder: Path, tmp_path: Path) -> Iterator[DraftServer]:
    server = DraftServer(draft_folder, tmp_path / "draft.log")
    yield server
    server.kill()


@pytest.fixture
def client(server: DraftServer) -> Iterator[DraftClient]:
    client = make_client(server)
    yield client
    client.close()


def make_client(server: DraftServer, deadline_ms: float = 2_000.0, **changes: int) -> DraftClient:
    fingerprint = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": CONFIG["hidden_size"],
        "num_layers": CONFIG["num_hidden_layers"],
        "target_layer_ids": LAYERS,
    }
    settings = ClientSettings(server.url, step_deadline_ms=deadline_ms, breaker_min_s=0.05, breaker_max_s=0.2)
    client = DraftClient(settings, TargetFingerprint.model_validate(fingerprint | changes))
    client.start()
    return client


@pytest.fixture
def engine(model: TargetModel, target_folder: Path, client: DraftClient) -> Iterator[TargetEngine]:
    limits = TargetEngineLimits(max_batch=4, max_context=900, prefill_chunk=64)
    engine = TargetEngine(model, TargetTokenizer(target_folder), client, target_layer_ids=LAYERS, limits=limits)
    engine.start()
    yield engine
    engine.stop()


def finish_all(model: TargetModel, answers: list[Collector], count: int) -> int:
    """Wait for one answer to each prompt, check it, and return how many drafts were verified."""
    proposed = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        counts = answer.wait().counts
        assert counts is not None
        assert answer.token_ids == decode_plainly(model, prompt, count)
        proposed += counts.proposed
    return proposed


def answer_all(engine: TargetEngine, model: TargetModel, name: str, count: int = 40) -> int:
    answers = [submit(engine, f"{name}{i}", p, max_tokens=count, num_draft_tokens=3) for i, p in enumerate(PROMPTS)]
    return finish_all(model, answers, count)


def wait_for_drafts(engine: TargetEngine, model: TargetModel, name: str) -> None:
    deadline = time.monotonic() + 30
    while not answer_all(engine, model, f"{name}-{time.monotonic()}-", count=8):
        assert time.monotonic() < deadline, "no drafts came back"


def test_output_is_plain_and_drafts_are_verified(
    server: DraftServer, client: DraftClient, engine: TargetEngine, model: TargetModel
) -> None:
    server.start()
    assert client.wait_connected(10)
    assert answer_all(engine, model, "a") > 20
    assert client.stats.failures == 0


def test_a_killed_server_changes_nothing_and_a_new_one_is_found(
    server: DraftServer, client: DraftClient, engine: TargetEngine, model: TargetModel
) -> None:
    server.start()
    assert client.wait_connected(10)
    wait_for_drafts(engine, model, "before")
    answers = [submit(engine, f"k{i}", p, max_tokens=300, num_draft_tokens=3) for i, p in enumerate(PROMPTS)]
    while client.stats.drafts < 60:
        time.sleep(0.005)
    server.kill()
    finish_all(model, answers, 300)
    assert answer_all(engine, model, "without") == 0
    server.start()
    wait_for_drafts(engine, model, "after")
    assert client.stats.handshakes == 2


def test_a_server_that_is_absent_at_the_start_is_found_later(
    server: DraftServer, client: DraftClient, engine: TargetEngine, model: TargetModel
) -> None:
    assert answer_all(engine, model, "absent") == 0
    server.start()
    wait_for_drafts(engine, model, "present")


def test_a_server_that_hangs_costs_one_deadline_a_trial(server: DraftServer, model: TargetModel, target_folder: Path) -> None:
    process = server.start()
    client = make_client(server, deadline_ms=150.0)
    limits = TargetEngineLimits(max_batch=4, max_context=900)
    engine = TargetEngine(model, TargetTokenizer(target_folder), client, target_layer_ids=LAYERS, limits=limits)
    engine.start()
    try:
        assert client.wait_connected(10)
        wait_for_drafts(engine, model, "awake")
        os.kill(process.pid, signal.SIGSTOP)
        late_before = client.stats.late
        answer_all(engine, model, "asleep", count=60)
        # The connection is gone after the first late call, and the next is opened in the background: no step waits for it.
        assert 1 <= client.stats.late - late_before <= 2
        assert not client.stats.is_connected
        os.kill(process.pid, signal.SIGCONT)
        wait_for_drafts(engine, model, "awake again")
    finally:
        engine.stop()
        client.close()


def test_a_drafter_of_another_target_is_refused_by_name_and_never_used(
    server: DraftServer, model: TargetModel, target_folder: Path
) -> None:
    server.start()
    client = make_client(server, num_layers=7)
    engine = TargetEngine(
        model, TargetTokenizer(target_folder), client, target_layer_ids=LAYERS, limits=TargetEngineLimits(max_context=900)
    )
    engine.start()
    try:
        assert answer_all(engine, model, "refused") == 0
        assert not client.wait_connected(0.1)
        assert client.refusal is not None
        assert "num_layers" in client.refusal
    finally:
        engine.stop()
        client.close()


def test_a_taken_port_and_a_broken_checkpoint_are_one_line_each(draft_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        busy = ServerProcess(["serve", "--port", port, "--model", str(draft_folder)], tmp_path / "busy.log")
        with pytest.raises(StartupError, match="the port is in use"):
            busy.wait_ready(START_SECONDS)
    broken = make_tiny_drafter(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-100])
    process = ServerProcess(["serve", "--port", "0", "--model", str(broken)], tmp_path / "broken.log")
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read"):
        process.wait_ready(START_SECONDS)
    assert "Traceback" not in (tmp_path / "broken.log").read_text()
