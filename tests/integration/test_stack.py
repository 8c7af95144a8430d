"""The services of docker/compose.yaml as processes: they come up in order, draft and drain; a target needs no drafter."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.integration.test_target_engine import LAYERS
from tests.support.compose import Project, load_compose
from tests.support.draft_model import make_tiny_drafter
from tests.support.stack import find_prometheus, run_load, run_stack, wait_for_drafts
from tests.support.tiny_target import write_tiny_target

pytestmark = pytest.mark.slow

KEY = "a-key-for-this-test"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """A pair small enough to come up at once, in the place of the one that the compose file serves."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_target(folder / "target", seed=3)
    draft = make_tiny_drafter(folder / "draft")
    layers = ",".join(str(layer) for layer in LAYERS)
    small = {"OMP_NUM_THREADS": "1"}
    return {
        "draft": {"DRAFT_ENGINE_MODEL": str(draft), "DRAFT_ENGINE_TARGET_MODEL": str(target), **small},
        "target": {
            "DRAFT_ENGINE_MODEL": str(target),
            "DRAFT_ENGINE_TARGET_LAYER_IDS": f"[{layers}]",
            "DRAFT_ENGINE_MAX_CONTEXT": "900",
            "DRAFT_ENGINE_DRAFT_DEADLINE_MS": "2000",
            **small,
        },
    }


@pytest.fixture(scope="module")
def ports() -> Mapping[str, str]:
    draft, target, prometheus = free_ports(3)
    return {"DRAFT_PORT": str(draft), "TARGET_PORT": str(target), "PROMETHEUS_PORT": str(prometheus)}


@pytest.fixture
def project(models: Mapping[str, Mapping[str, str]], ports: Mapping[str, str], tmp_path: Path) -> Iterator[Project]:
    document = load_compose({**ports, "DRAFT_ENGINE_API_KEY": KEY})
    project = Project(document, "cpu", tmp_path, {"api_key": KEY}, models)
    try:
        yield project
    finally:
        project.stop_all()


def test_the_profile_cpu_comes_up_drafts_and_ends_cleanly(
    models: Mapping[str, Mapping[str, str]], ports: Mapping[str, str], tmp_path: Path
) -> None:
    lines: list[str] = []
    run_stack(tmp_path, lines.append, environment={**ports, "DRAFT_ENGINE_API_KEY": KEY}, more_environment=models)
    text = "\n".join(lines)
    assert "draft       healthy" in text
    assert "target      healthy" in text
    assert "exit codes {'target': 0, 'draft': 0}" in text
    assert ("dashboard queries answered" in text) == (find_prometheus() is not None)


def test_a_target_without_a_drafter_serves_and_finds_the_drafter_later(project: Project) -> None:
    project.start("target")
    project.wait_healthy("target", 120.0)
    load = run_load(project.url_of("target"), KEY, max_tokens=8)
    assert (load.proposed, load.is_same) == (0, True)
    project.start("draft")
    project.wait_healthy("draft", 120.0)
    wait_for_drafts(project.url_of("target"), KEY)


def test_health_and_version_need_no_key_and_every_other_route_does(project: Project) -> None:
    project.start("draft")
    project.wait_healthy("draft", 120.0)
    url = project.url_of("draft")
    for path in ("/health", "/version"):
        assert httpx.get(url + path).status_code == 200, path
    for path in ("/v1/models", "/metrics", "/v1/sessions", "/docs"):
        assert httpx.get(url + path).status_code == 401, path
        assert httpx.get(url + path, headers={"authorization": f"Bearer {KEY}"}).status_code == 200, path
    assert KEY not in project.log_of("draft").read_text()
    project.processes["draft"].terminate()
    project.wait_unhealthy("draft", 30.0)
    assert project.processes["draft"].wait(45.0) == 0
    assert "draining" in project.log_of("draft").read_text()
