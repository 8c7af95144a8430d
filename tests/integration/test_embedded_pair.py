"""The pair that ships: SmolLM2-135M-Instruct and its drafter, as two real servers. Slow: every answer is written twice."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.demo import Run, ask, wait_for_drafts
from service.prompts import DEMO_PROMPTS
from service.subprocesses import ServerProcess, server_process
from service.target.weights import default_cache_dir, ensure_target
from tests.support.prompts import PROMPTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    logs = tmp_path_factory.mktemp("logs")
    folder = ensure_target(default_cache_dir(), print)
    with (
        server_process(["serve", "--port", "0", "--target-model", str(folder)], logs / "draft.log") as draft,
        server_process(
            ["target", "--port", "0", "--draft-url", draft.url, "--draft-when", "always"], logs / "target.log"
        ) as target,
    ):
        yield draft, target


@pytest.fixture(scope="module")
def http(servers: tuple[ServerProcess, ServerProcess]) -> Iterator[httpx.Client]:
    with httpx.Client(timeout=600.0) as client:
        wait_for_drafts(client, servers[1].url)
        yield client


def difference(plain: Run, drafted: Run) -> str:
    """Where two answers part, for the message of a failure."""
    at = next((i for i, (a, b) in enumerate(zip(plain.token_ids, drafted.token_ids, strict=False)) if a != b), None)
    return f"first difference at token {at}: {plain.text!r} / {drafted.text!r}"


@pytest.mark.parametrize("text", [*(prompt.text for prompt in DEMO_PROMPTS), *PROMPTS])
def test_greedy_output_is_the_plain_output(servers: tuple[ServerProcess, ServerProcess], http: httpx.Client, text: str) -> None:
    url = servers[1].url
    plain = ask(http, url, text, max_tokens=96, num_draft_tokens=0)
    drafted = ask(http, url, text, max_tokens=96, num_draft_tokens=3)
    assert drafted.token_ids == plain.token_ids, difference(plain, drafted)
    assert drafted.draft["proposed"] > 0


def test_drafts_are_worth_having(servers: tuple[ServerProcess, ServerProcess], http: httpx.Client) -> None:
    reports = [ask(http, servers[1].url, p.text, max_tokens=64, num_draft_tokens=3).draft for p in DEMO_PROMPTS[:6]]
    accepted, rounds = (sum(report[name] for report in reports) for name in ("accepted", "rounds"))
    assert 1 + accepted / rounds > 1.2


def test_requests_at_once_are_all_answered_in_full(servers: tuple[ServerProcess, ServerProcess], http: httpx.Client) -> None:
    """In a batch of ragged lengths sums agree to rounding only, so what is promised is a whole answer and not its every bit."""
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda p: ask(http, servers[1].url, p, max_tokens=48, num_draft_tokens=3), PROMPTS[:16]))
    assert all(run.text for run in runs)
    assert sum(run.draft["accepted"] for run in runs) > 0


def test_the_weights_are_remade_when_a_file_is_damaged(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = ensure_target(tmp_path, lines.append)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(before[:1000])
    assert ensure_target(tmp_path, lines.append) == folder
    assert any("incomplete or damaged" in line for line in lines)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
