"""A survey says of every backend what it would do, and ends in the selection that the start-up makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends import BACKENDS, default_backends
from attention.backends.base import AttentionBackend
from attention.backends.torch_cpu import TorchCpuBackend
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, QueryLenSupport
from attention.metadata import BlockMetadata
from attention.probe import open_attention
from attention.selector import DecodePath
from attention.survey import PROVEN, AttentionSurvey, BackendSurvey, survey_attention
from tests.support.attention import make_problem


class _WrongBlocks(TorchCpuBackend):
    """Right for one row, wrong for several."""

    name: ClassVar[str] = "wrong_blocks"

    def decode(
        self,
        query: Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: BlockMetadata,
        *,
        softmax_scale: float,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        output, lse = super().decode(query, cache, layer, metadata, softmax_scale=softmax_scale, return_lse=return_lse)
        return output * (1 if query.shape[1] == 1 else 2), lse


class _OneRow(TorchCpuBackend):
    name: ClassVar[str] = "one_row"
    capabilities: ClassVar[AttentionCapabilities] = replace(
        TorchCpuBackend.capabilities, query_len_support=QueryLenSupport.SINGLE_ONLY
    )


_PLANTED: Mapping[str, type[AttentionBackend]] = {"wrong_blocks": _WrongBlocks, "one_row": _OneRow, **BACKENDS}


def _by_name(survey: AttentionSurvey) -> dict[str, BackendSurvey]:
    return {backend.backend: backend for backend in survey.backends}


def test_every_backend_has_a_verdict_its_probes_and_its_reasons() -> None:
    problem = make_problem()
    survey = survey_attention(problem, backends=_PLANTED)
    found = _by_name(survey)
    assert list(found) == list(_PLANTED)
    assert found["wrong_blocks"].verdict == "chosen, flattened"
    assert "output is off" in found["wrong_blocks"].probes[DecodePath.FUSED]
    assert found["wrong_blocks"].probes[DecodePath.FLATTENED] == PROVEN
    assert "output is off" in found["wrong_blocks"].reasons[0]
    assert found["one_row"].verdict == "usable, flattened"
    assert found["one_row"].probes == {DecodePath.FUSED: "one query row per request only", DecodePath.FLATTENED: PROVEN}
    assert found["torch_cpu"] == BackendSurvey("torch_cpu", "usable, fused", (), dict.fromkeys(DecodePath, PROVEN))
    assert found["triton"].verdict == "not usable"
    assert {"there is no CUDA device", "device cpu is not supported"} <= set(found["triton"].reasons)
    assert not found["triton"].probes


def test_it_ends_in_the_selection_of_the_start_up() -> None:
    for override in (None, "one_row", "reference"):
        for problem in (make_problem(), make_problem("gqa", sliding_window=3, dtype=torch.bfloat16)):
            (opened,) = open_attention([problem], override, backends=_PLANTED)
            selection = survey_attention(problem, override, backends=_PLANTED).selection
            assert selection is not None
            assert (selection.backend, selection.path) == (opened.selection.backend, opened.selection.path)


def test_nothing_that_is_refused_raises() -> None:
    candidates = [candidate for candidate in default_backends() if candidate.name == "triton"]
    survey = survey_attention(make_problem(), candidates=candidates)
    assert survey.selection is None
    assert survey.error is not None
    assert "no attention backend can serve mla attention (4 slots, 6 heads over 1" in survey.error
    assert [backend.verdict for backend in survey.backends] == ["not usable"]
    forced = survey_attention(make_problem(), "flashinfer")
    assert "'flashinfer' cannot serve" in (forced.error or "")
    assert _by_name(forced)["torch_cpu"].verdict == "usable, fused"
