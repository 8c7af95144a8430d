"""Our Triton kernels say what the reference says, in Triton's interpreter, over a pool of NaN and shuffled pages.

bfloat16 is left to machines with a GPU: the interpreter multiplies its bit patterns as integers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention.backends.triton_decode import TritonBackend
from attention.selector import DecodePath
from tests.support.attention import make_problem
from tests.support.interpreted_triton import CASES

_ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="package triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    """What the child process found, by case."""
    child = subprocess.run(
        [sys.executable, "-P", "-m", "tests.support.interpreted_triton"],
        cwd=_ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert child.returncode == 0, child.stderr
    found: dict[str, object] = json.loads(child.stdout.splitlines()[-1])
    return found


@needs_triton
@pytest.mark.parametrize("name", list(CASES))
def test_kernels_agree_with_the_reference(results: dict[str, object], name: str) -> None:
    found = results[name]
    assert isinstance(found, dict), found
    is_float32 = CASES[name][0].get("dtype", torch.float32) == torch.float32
    for path, (output, lse) in found.items():
        assert output <= (2e-6 if is_float32 else 4e-3), path
        assert lse <= 2e-5, path


@needs_triton
@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("path", list(DecodePath))
def test_kernels_pass_the_probe(results: dict[str, object], kind: str, path: DecodePath) -> None:
    assert results[f"probe, {kind}, {path}"] == "proven"


@pytest.mark.parametrize(
    ("num_programs", "max_seq_len", "expected"),
    [(1, 0, 1), (1, 255, 1), (1, 257, 2), (1, 65536, 200), (64, 65536, 4), (500, 65536, 1), (0, 0, 1)],
)
@needs_triton
def test_splits_fill_the_device_and_no_more(num_programs: int, max_seq_len: int, expected: int) -> None:
    backend = TritonBackend(make_problem())
    backend._num_sms = 100
    assert backend._choose_splits(num_programs, max_seq_len) == expected


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="package triton is installed")
def test_without_the_package_it_is_a_reason() -> None:
    assert TritonBackend.machine_reasons()[-1] == "package triton is not installed"
