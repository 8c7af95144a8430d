"""One draft server for all tests, and what plain vLLM answers, recorded once. Each vLLM start takes most of a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.target.weights import default_cache_dir, ensure_target
from service.vllm_process import VllmProcess, vllm_process
from tests.vllm.pair import BASE_FLAGS, CHATS, MIXED, SHARED, SPECIAL, VLLM_PYTHON, DraftServer, answer_all, stop_token_asks

LOGS = Path("build/logs")


@pytest.fixture(scope="session")
def target_folder() -> Path:
    return ensure_target(default_cache_dir(), print)


@pytest.fixture(scope="session")
def plain_answers(target_folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Of a vLLM server with the same flags and no drafts."""
    with vllm_process(VLLM_PYTHON, target_folder, BASE_FLAGS, LOGS / "vllm-plain.log") as vllm:
        answers = answer_all(vllm.url, [*CHATS, *MIXED, *SPECIAL])
        answers |= answer_all(vllm.url, SHARED, at_once=1)
        return answers | answer_all(vllm.url, stop_token_asks(answers["many tokens"]))


@pytest.fixture(scope="session")
def draft_server(target_folder: Path) -> Iterator[DraftServer]:
    server = DraftServer(target_folder, LOGS / "vllm-draft.log")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def drafted(
    target_folder: Path, plain_answers: dict[str, list[tuple[Any, ...]]], draft_server: DraftServer
) -> Iterator[VllmProcess]:
    """A vLLM server paired with the draft server. The plain one has ended by then, since both would use the same core."""
    flags = [*BASE_FLAGS, *draft_server.flags()]
    with vllm_process(VLLM_PYTHON, target_folder, flags, LOGS / "vllm-drafted.log") as process:
        yield process
