"""`inspect`: what it says of attention, to people and to scripts, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

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


def _target(folder: Path, **changed: object) -> Path:
    """The target of the recorded drafts, with a few fields of its config changed."""
    config = json.loads((_GOLDEN / "target" / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


def test_a_checkpoint_is_named_with_or_without_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(_GOLDEN / "draft_vanilla")
    assert _document(capsys, path, "--device", "cpu") == _document(capsys, "--model", path, "--device", "cpu")


def test_every_derived_fact_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = _document(capsys, str(_GOLDEN / "draft_vanilla"), "--device", "cpu")
    facts = found["facts"]
    assert facts["layer ids"] == "stored [0, 2, 4]; id k is the output of decoder layer k; -1 is the embedding's output"
    assert facts["rotary"] == "default, theta 1e+06; 16 of 16 dimensions; halves"
    assert facts["windows"] == "all, all"
    # Two layers of two key and two value heads of 16 numbers make 128.
    assert facts["KV bytes per token"] == "float32 512, bfloat16 256, float16 256"


def test_a_target_that_fits_is_said_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = _document(capsys, str(_GOLDEN / "draft_vanilla"), "--target", str(_target(tmp_path / "target")))
    assert (code, found["target"]["problems"]) == (0, [])
    assert main(["inspect", str(_GOLDEN / "draft_vanilla"), "--target", str(tmp_path / "target")]) == 0
    assert "fits the draft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vocab_size": 7}, "vocab_size is 7"),
        ({"hidden_size": 40}, "hidden_size is 40"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_with_the_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    target = _target(tmp_path / "target", **changed)
    code, found = _document(capsys, str(_GOLDEN / "draft_vanilla"), "--target", str(target))
    assert code == 1
    assert any(words in problem for problem in found["target"]["problems"])


def test_a_target_without_the_embedding_that_the_draft_takes_from_it_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_drafter(tmp_path / "tiny", has_vocabulary=False)
    config = json.loads((folder / "config.json").read_text())
    target = tmp_path / "target"
    target.mkdir()
    shape = {"vocab_size": config["vocab_size"], "hidden_size": config["target_hidden_size"]}
    (target / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": config["target_num_hidden_layers"]}))
    save_file({"model.norm.weight": torch.ones(4)}, target / "model.safetensors")
    code, found = _document(capsys, str(folder), "--target", str(target))
    assert code == 1
    assert any("embed_tokens" in problem for problem in found["target"]["problems"])


def test_a_target_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", str(_GOLDEN / "draft_vanilla"), "--target", str(tmp_path / "nowhere")]) == 1
    assert "nowhere/config.json does not exist" in capsys.readouterr().err
