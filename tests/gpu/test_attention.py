"""Attention backends on a CUDA device against the reference: the cases of `check_attention`, one test each."""

from __future__ import annotations

import pytest
import torch

from attention.backends import BACKENDS, default_backends
from attention.block_attention import BlockAttention
from attention.selector import DecodePath, Selection
from attention.survey import PROVEN, survey_attention
from tests.gpu.check_attention import CASES, TYPES, problem_of, run_case, usable_paths
from tests.support.attention import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("path", list(DecodePath))
@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("reference", "torch_cpu")])
def test_a_backend_agrees_with_the_reference(name: str, path: DecodePath, types: str, case: str) -> None:
    changes, lengths = CASES[case]
    problem = problem_of(changes, types, torch.device("cuda"))
    (candidate,) = [candidate for candidate in default_backends() if candidate.name == name]
    if path not in usable_paths(problem, candidate):
        pytest.skip(
            "; ".join([*candidate.machine_reasons, *candidate.capabilities.unsupported_reasons(problem)]) or "flattened"
        )
    attention = BlockAttention(Selection(name, path), problem)
    assert run_case(problem, lengths, attention, types) == ""


@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_something_faster_than_the_reference_serves(kind: str, dtype: torch.dtype) -> None:
    problem = make_problem(kind, dtype=dtype, kv_cache_dtype=dtype, page_size=16, device=torch.device("cuda"))
    survey = survey_attention(problem)
    assert survey.selection is not None
    assert survey.selection.backend != "reference"
    assert survey.selection.path is DecodePath.FUSED
    (chosen,) = [backend for backend in survey.backends if backend.backend == survey.selection.backend]
    assert set(chosen.probes.values()) == {PROVEN}
