"""The doctor: what it finds in models and servers, what it makes of the numbers, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from draft_model.formats import load_config
from draft_model.pairing import target_differences
from service.doctor import (
    EXIT_DOES_NOT_PAY,
    EXIT_FAILED,
    EXIT_OK,
    Benefit,
    DoctorSettings,
    acceptance_of,
    run_doctor,
)
from service.metrics import EngineMetrics
from tests.support.draft_model import make_tiny_drafter
from tests.support.service import make_harness, serving
from tests.support.tiny_target import CONFIG, write_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("draft") / "tiny")


def examine(**settings: object) -> tuple[int, str]:
    """Exit code and report."""
    text = io.StringIO()
    code = run_doctor(DoctorSettings(port=1, **settings), Console(file=text, width=300, color_system=None))  # type: ignore[arg-type]
    return code, text.getvalue()


def test_a_sound_pair_is_ok_and_attention_is_proven(draft: Path, target: Path) -> None:
    code, report = examine(model=draft, target_model=target)
    assert code == EXIT_OK, report
    assert "FAIL" not in report
    assert "proven against the reference" in report
    assert "fits the drafter" in report
    assert "none answers at http://127.0.0.1:1" in report
    assert "in this process, without HTTP" in report


def test_a_drafter_of_another_target_fails(draft: Path, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 9, "vocab_size": 300}))
    code, report = examine(model=draft, target_model=other, load_model=False)
    assert code == EXIT_FAILED
    assert "vocab_size is 300, the drafter's target has 260" in report
    assert "num_hidden_layers is 9, the drafter's target has 4" in report


def test_a_broken_checkpoint_fails_and_the_other_checks_are_made(tmp_path: Path) -> None:
    broken = make_tiny_drafter(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    code, report = examine(model=broken)
    assert code == EXIT_FAILED
    assert "model.safetensors" in report
    assert "none answers" in report


def test_an_unknown_attention_backend_fails_with_the_known_ones(draft: Path) -> None:
    code, report = examine(model=draft, attention_backend="nonsense")
    assert code == EXIT_FAILED
    assert "unknown attention backend 'nonsense'" in report
    assert "torch_cpu" in report


def test_a_server_is_called_and_timed_and_learns_nothing_from_it(draft: Path) -> None:
    with serving(make_harness()) as server:
        code, report = examine(model=draft, load_model=False, draft_url=server.url, upload_size=512)
        assert code == EXIT_OK, report
        for line in ("round trip", "draft call", "bandwidth", "over HTTP, one session"):
            assert line in report
        assert server.http.get("/v1/sessions").json()["data"] == []
        assert server.http.get("/health").json()["warnings"] == []
        assert server.harness.metrics.registry.get_sample_value("draft_engine_accepted_tokens_total") is None
        assert "draft_engine_verified_drafts_total{" not in server.http.get("/metrics").text


def test_a_full_server_is_no_failure(draft: Path) -> None:
    with serving(make_harness()) as server:
        code, report = examine(model=draft, load_model=False, draft_url=server.url, upload_size=4096)
        assert (code, "refused the rows: overloaded" in report) == (EXIT_OK, True), report
        assert server.http.get("/v1/sessions").json()["data"] == []


def test_a_named_server_that_does_not_answer_fails(draft: Path) -> None:
    code, report = examine(model=draft, load_model=False, draft_url="http://127.0.0.1:1")
    assert code == EXIT_FAILED
    assert "failed: server" in report


def test_a_wrong_key_fails_with_the_servers_own_words(draft: Path) -> None:
    with serving(make_harness(), api_key="the right key") as server:
        code, report = examine(model=draft, load_model=False, draft_url=server.url, api_key="another key")
    assert code == EXIT_FAILED
    assert "401 invalid_api_key" in report
    assert "another key" not in report


@pytest.mark.parametrize(
    ("step_ms", "acceptance", "code", "words"),
    [
        (10_000.0, 2.0, EXIT_OK, "drafting pays"),
        (0.001, 2.0, EXIT_DOES_NOT_PAY, "drafting does not pay"),
        (10_000.0, None, EXIT_OK, "--acceptance-length names yours"),
        (None, None, EXIT_OK, "--target-step-ms names yours"),
    ],
)
def test_the_exit_code_says_whether_drafting_pays(
    draft: Path, step_ms: float | None, acceptance: float | None, code: int, words: str
) -> None:
    found, report = examine(model=draft, target_step_ms=step_ms, acceptance_length=acceptance)
    assert (found, words in report) == (code, True), report


def test_the_benefit_follows_from_four_numbers() -> None:
    benefit = Benefit(plain_ms=30.0, verify_ms=36.0, draft_ms=9.0)
    assert benefit.break_even == pytest.approx(1.5)
    assert benefit.speedup(benefit.break_even) == pytest.approx(1.0)
    assert benefit.speedup(3.0) == pytest.approx(2.0)


def test_acceptance_is_read_from_metrics_once_there_is_enough_of_it() -> None:
    metrics = EngineMetrics()
    for _ in range(60):
        metrics.saw_acceptance(2, 100, 1.0)
    metrics.publish_acceptance()
    assert acceptance_of(metrics.exposition().decode()) is None
    for _ in range(60):
        metrics.saw_acceptance(0, 20_000, 0.2)
    metrics.publish_acceptance()
    assert acceptance_of(metrics.exposition().decode()) == pytest.approx(2.0)


def test_a_target_inside_a_multimodal_config_is_compared(draft: Path) -> None:
    config = load_config(draft)
    assert target_differences(config, {"text_config": CONFIG}) == []
    assert len(target_differences(config, {})) == 3
