"""The command line: help that names everything, and mistakes that are told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.cli import COMMANDS, build_parser, main
from service.settings import env_of, flag_of
from tests.support.draft_model import make_tiny_drafter


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Run a command to its end; returns the exit code and what it wrote to stderr."""
    try:
        code = main(argv)
    except SystemExit as error:
        code = int(error.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_names_every_flag_and_its_variable(command: str) -> None:
    (chosen,) = [one for one in COMMANDS if one.name == command]
    parser = build_parser([command])
    text = next(action for action in parser._actions if action.dest == "command").choices[command].format_help()  # type: ignore[index]
    joined = "".join(text.split())
    for name in chosen.settings().model_fields:
        assert flag_of(name) in text
        assert env_of(name) in joined


def test_the_first_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(command.name in shown and command.summary in " ".join(shown.split()) for command in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["serve", "--model", "/nowhere"], 1, "no draft model at /nowhere"),
        (["serve", "--port", "99999"], 1, "--port"),
        (["serve", "--host", "0.0.0.0"], 1, "api_key"),
        (["serve", "--device", "cuda:9"], 1, "--device cuda:9"),
        (["serve", "--kv-cache-memory", "lots"], 1, "--kv-cache-memory"),
        (["serve", "--colour", "red"], 2, "--colour"),
        (["target", "--model", "/nowhere"], 1, "no target model at /nowhere"),
        (["target", "--draft-url", "ftp://x", "--max-batch", "0"], 1, "--max-batch"),
        (["train", "--steps", "0"], 1, "--steps"),
        (["inspect", "--model", "/nowhere"], 1, "no draft model at /nowhere"),
        (["dance"], 2, "dance"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, named: str
) -> None:
    ended, shown = run(capsys, *argv)
    assert ended == code
    assert named in shown
    assert "Traceback" not in shown


def test_an_unknown_backend_lists_the_known_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "tiny")
    code, shown = run(capsys, "serve", "--model", str(folder), "--attention-backend", "magic")
    assert code == 1
    assert "magic" in shown
    assert "torch_cpu" in shown


def test_inspect_describes_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "tiny")
    assert main(["inspect", "--model", str(folder)]) == 0
    shown = capsys.readouterr().out
    for fact in ("k3_dspark", "MLA, 3 heads", "4 slots", "torch_cpu", "chosen, fused"):
        assert fact in shown
