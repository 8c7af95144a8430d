"""`inspect`: what it says of attention, to people and to scripts, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attention.backends import BACKENDS
from service.cli import main
from tests.support.draft_model import make_tiny_drafter

_GOLDEN = Path(__file__).parents[2] / "golden"


def _document(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", "--json", *argv])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return code, found


def test_the_table_names_every_backend_with_its_verdict_and_reasons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "tiny")
    assert main(["inspect", "--attention", "--model", str(folder), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BACKENDS)
    for fact in (
        "chosen, fused",
        "fused: proven",
        "flattened: proven",
        "not usable",
        "device cpu is not supported",
        "layers 0",
    ):
        assert fact in shown
    assert "fingerprint" not in shown


def test_json_is_one_document_with_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _document(capsys, "--model", str(_GOLDEN / "draft_vanilla"), "--device", "cpu", "--dtype", "bfloat16")
    assert code == 0
    assert found["facts"]["block"] == "7 slots, 7 drafts"
    (layers,) = found["attention"]
    assert layers["layers"] == [0, 1]
    assert (layers["backend"], layers["path"], layers["error"]) == ("torch_cpu", "fused", None)
    assert layers["problem"]["dtype"] == layers["problem"]["kv_cache_dtype"] == "bfloat16"
    assert [backend["backend"] for backend in layers["backends"]] == list(BACKENDS)
    (chosen,) = [backend for backend in layers["backends"] if backend["backend"] == "torch_cpu"]
    assert chosen == {
        "backend": "torch_cpu",
        "verdict": "chosen, fused",
        "reasons": [],
        "probes": {"fused": "proven", "flattened": "proven"},
    }


def test_a_backend_that_cannot_serve_fails_with_all_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--attention",
        "--model",
        str(_GOLDEN / "draft_vanilla"),
        "--device",
        "cpu",
        "--attention-backend",
        "tokenspeed_mla",
    )
    code, found = _document(capsys, *argv)
    assert code == 1
    assert "facts" not in found
    (layers,) = found["attention"]
    for reason in ("there is no CUDA device", "gqa attention is not supported", "key and value dims (16, 16)"):
        assert reason in layers["error"]
    assert layers["backend"] is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--attention-backend", "magic"), ("--attention-backend magic", "torch_cpu")),
        (("--device", "magic"), ("--device magic", "cuda:N")),
    ],
)
def test_what_is_unknown_is_named(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert main(["inspect", "--model", str(_GOLDEN / "draft_vanilla"), *argv]) == 1
    shown = capsys.readouterr().err
    assert all(word in shown for word in words)
    assert "Traceback" not in shown
