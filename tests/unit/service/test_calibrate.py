"""`draft-engine calibrate`: recorded rounds in, temperatures beside the checkpoint and a diagram out."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from draft_model.calibration import FILE_NAME, load_calibration, scale
from service.calibrate import calibrate, draw_reliability, encode_png
from service.cli import main
from service.errors import StartupError
from service.rounds import Round, RoundLog, read_rounds
from tests.support.draft_model import make_tiny_drafter


def make_rounds(temperatures: list[float], rounds: int = 40_000, seed: int = 0) -> list[Round]:
    """Rounds of a head whose logits are off by these temperatures."""
    rng = np.random.default_rng(seed)
    true = 1.0 / (1.0 + np.exp(-rng.normal(1.0, 1.5, (rounds, len(temperatures)))))
    accepted = np.cumprod(rng.random(true.shape) < true, axis=1).sum(axis=1)
    told = scale(true, 1.0 / np.array(temperatures))
    return [Round(tuple(map(float, row)), int(count)) for row, count in zip(told, accepted, strict=True)]


def write_rounds(path: Path, rounds: list[Round]) -> Path:
    log = RoundLog(path)
    for one in rounds:
        log.add(one.confidence, one.accepted)
    log.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("tiny") / "tiny")


def test_calibrating_finds_the_temperatures_and_helps_on_unseen_rounds() -> None:
    result = calibrate(make_rounds([0.5, 1.7]), num_positions=4, current=None, rounds_sha256="a", fingerprint="f")
    assert result.calibration.temperatures[:2] == pytest.approx((0.5, 1.7), rel=0.15)
    assert result.calibration.temperatures[2:] == (1.0, 1.0)
    assert all(after.ece < before.ece / 2 for before, after in zip(result.before, result.after, strict=True))


def test_new_rounds_refine_and_the_same_rounds_repeat() -> None:
    first = calibrate(make_rounds([0.5]), num_positions=1, current=None, rounds_sha256="a", fingerprint="f").calibration
    again = calibrate(make_rounds([0.5]), num_positions=1, current=first, rounds_sha256="a", fingerprint="f").calibration
    assert again == first
    # Recorded with the first calibration, these are still off by 1.5.
    more = calibrate(make_rounds([1.5]), num_positions=1, current=first, rounds_sha256="b", fingerprint="f").calibration
    assert more.started_from == first.temperatures
    assert more.temperatures == pytest.approx((0.75,), rel=0.15)
    other = calibrate(make_rounds([1.5]), num_positions=1, current=first, rounds_sha256="b", fingerprint="g").calibration
    assert other.started_from == (1.0,)


def test_only_full_blocks_count() -> None:
    short = [Round((0.9,), 0)] * 500
    rounds = [one for pair in zip(make_rounds([1.0, 1.0], 500), short, strict=True) for one in pair]
    result = calibrate(rounds, num_positions=2, current=None, rounds_sha256="a", fingerprint="f")
    assert result.calibration.num_rounds == 500
    with pytest.raises(StartupError, match="at least 100 full blocks; there are 1"):
        calibrate([*short, Round((0.5, 0.5), 1)], num_positions=2, current=None, rounds_sha256="a", fingerprint="f")
    with pytest.raises(StartupError, match="blocks of 2 drafts; a block of this model yields 1"):
        calibrate(make_rounds([1.0, 1.0], 100), num_positions=1, current=None, rounds_sha256="a", fingerprint="f")
    with pytest.raises(StartupError, match="there are 0"):
        calibrate([], num_positions=1, current=None, rounds_sha256="a", fingerprint="f")


def test_the_command_stores_the_calibration_and_draws(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = write_rounds(tmp_path / "rounds.jsonl", make_rounds([0.5, 1.7, 1.0], 1000))
    output = tmp_path / "figures" / "calibration.json"
    arguments = ["calibrate", "--model", str(folder), "--rounds", str(rounds), "--output", str(output)]
    assert main([*arguments, "--no-store"]) == 0
    assert not (folder / FILE_NAME).exists()
    assert main(arguments) == 0
    assert "before -> after" in capsys.readouterr().out
    stored = load_calibration(folder, 4)
    assert stored is not None
    assert stored.temperatures[0] == pytest.approx(0.5, rel=0.3)
    names = {figure["name"] for figure in json.loads(output.read_text())["figures"]}
    assert {"ece_1_before", "ece_3_after", "auc_2_before", "brier_2_after"} <= names
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    (folder / FILE_NAME).unlink()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2"),
        ('{"confidence": [], "accepted": 0}', "line 2"),
        ('{"confidence": [1.5], "accepted": 0}', r"\[0, 1\]"),
        ('{"confidence": [NaN], "accepted": 0}', r"\[0, 1\]"),
        ('{"confidence": [0.5], "accepted": 2}', "accepted must be"),
        ('{"confidence": [0.5]}', "KeyError"),
        ("[]", "TypeError"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = write_rounds(tmp_path / "rounds.jsonl", [Round((0.5,), 1)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(StartupError, match=named):
        read_rounds(path)
    with pytest.raises(StartupError, match="No such file"):
        read_rounds(tmp_path / "nothing")
    with pytest.raises(StartupError, match="--record-rounds"):
        RoundLog(tmp_path)


def test_the_diagram_is_a_png_that_can_be_read_back() -> None:
    result = calibrate(make_rounds([0.5, 1.7], 500), num_positions=2, current=None, rounds_sha256="a", fingerprint="f")
    pixels = draw_reliability(result.before, result.after)
    data = encode_png(pixels)
    place, body, size = 8, b"", (0, 0)
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        chunk = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + chunk)
        if kind == b"IHDR":
            size = struct.unpack(">II", chunk[:8])
        body += chunk if kind == b"IDAT" else b""
        place += 12 + length
    assert size == (pixels.shape[1], pixels.shape[0])
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(pixels.shape[0], -1)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:].reshape(pixels.shape) == pixels).all()
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 4
