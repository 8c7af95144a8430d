"""A flag is a claim; planted liars are caught, disabled with a reason, and the next path is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from attention.backends import BACKENDS, default_backends
from attention.backends.base import AttentionBackend
from attention.backends.torch_cpu import TorchCpuBackend
from attention.cache import PagedKVCache
from attention.metadata import BlockMetadata
from attention.probe import open_attention, prove
from attention.selector import AttentionSelectionError, DecodePath, Selection
from tests.support.attention import make_case, make_problem

_Decode = Callable[..., tuple[Tensor, Tensor | None]]


def _with_lengths(metadata: BlockMetadata, change: Callable[[int], int]) -> BlockMetadata:
    return replace(metadata, lengths=tuple(change(length) for length in metadata.lengths), _flattened={})


class _Planted(TorchCpuBackend):
    name: ClassVar[str] = "planted"


class _Causal(_Planted):
    """Takes the whole block and silently keeps the causal mask."""

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
        slots = query.shape[1]
        outputs, lses = [], []
        for slot in range(slots):
            seen = _with_lengths(metadata, lambda length, slot=slot: length - slots + 1 + slot)  # type: ignore[misc]
            output, lse = super().decode(
                query[:, slot : slot + 1], cache, layer, seen, softmax_scale=softmax_scale, return_lse=True
            )
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs, dim=1), torch.cat([lse for lse in lses if lse is not None], dim=1) if return_lse else None


def _lying(change: Callable[[_Decode, Tensor, PagedKVCache, int, BlockMetadata, float], tuple[Tensor, Tensor | None]]) -> type:
    class Liar(_Planted):
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
            return change(super().decode, query, cache, layer, metadata, softmax_scale)

    return Liar


def _sees_committed_rows_only(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    seen = _with_lengths(metadata, lambda length: max(length - 2, 1))
    return decode(query, cache, layer, seen, softmax_scale=scale, return_lse=True)


def _reads_one_row_too_many(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    seen = _with_lengths(metadata, lambda length: length + 1)
    return decode(query, cache, layer, seen, softmax_scale=scale, return_lse=True)


def _ignores_the_scale(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    return decode(query, cache, layer, metadata, softmax_scale=1.0, return_lse=True)


def _returns_base_2(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    output, lse = decode(query, cache, layer, metadata, softmax_scale=scale, return_lse=True)
    assert lse is not None
    return output, lse * 1.4427


def _takes_pages_for_neighbours(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    pages = tuple(tuple(range(own[0], own[0] + len(own))) for own in metadata.page_ids)
    lost = replace(metadata, page_ids=pages, _flattened={})
    return decode(query, cache, layer, lost, softmax_scale=scale, return_lse=True)


def _returns_nan(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    output, lse = decode(query, cache, layer, metadata, softmax_scale=scale, return_lse=True)
    return output * float("nan"), lse


def _returns_another_dtype(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    output, lse = decode(query, cache, layer, metadata, softmax_scale=scale, return_lse=True)
    return output.double(), lse


def _does_not_compile(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    raise NotImplementedError("no kernel image is available")


class _CompilerError(Exception):
    """Of a kernel compiler, whose error tree is its own."""


def _does_not_fit(decode: _Decode, query, cache, layer, metadata, scale):  # type: ignore[no-untyped-def]
    raise _CompilerError("out of shared memory")


@pytest.mark.parametrize("backend", ["torch_cpu", "reference"])
@pytest.mark.parametrize("path", list(DecodePath))
@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 3])
def test_honest_backends_pass(
    backend: str, path: DecodePath, kind: str, dtype: torch.dtype, sliding_window: int | None
) -> None:
    for kv_cache_dtype in (dtype, torch.float8_e4m3fn):
        for slots in (1, 2, 7):
            problem = make_problem(
                kind,
                draft_block_size=slots,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                sliding_window=sliding_window,
                page_size=16,
            )
            assert prove(Selection(backend, path), problem) is None


def test_a_causal_kernel_is_caught_and_the_flattened_path_taken(caplog: pytest.LogCaptureFixture) -> None:
    backends: dict[str, type[AttentionBackend]] = {"planted": _Causal, **BACKENDS}
    problem = make_problem()
    with caplog.at_level(logging.INFO, logger="attention.probe"):
        first, second = open_attention([problem, problem], backends=backends)
    assert first is second
    assert (first.selection.backend, first.selection.path) == ("planted", DecodePath.FLATTENED)
    assert "probe with 2 slots: output is off by" in first.selection.fused_reasons[0]
    assert "planted, fused path disabled" in caplog.text
    assert "rows are read 4 times for each block" in caplog.text

    query, cache, metadata = make_case(problem, [6, 9])
    expected = open_attention([problem])[0].forward(query, cache, 1, metadata, softmax_scale=0.3)
    torch.testing.assert_close(first.forward(query, cache, 1, metadata, softmax_scale=0.3), expected)


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        (_sees_committed_rows_only, "output is off"),
        (_reads_one_row_too_many, "output is off"),
        (_ignores_the_scale, "log-sum-exp is off"),
        (_returns_base_2, "log-sum-exp is off"),
        (_takes_pages_for_neighbours, "output is off"),
        (_returns_nan, "output is off by nan"),
        (_returns_another_dtype, "torch.float64, not"),
        (_does_not_fit, "_CompilerError: out of shared memory"),
        (_does_not_compile, "NotImplementedError: no kernel image is available"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_that_is_wrong_on_both_paths_is_left_with_its_reasons(
    lie: Callable[..., tuple[Tensor, Tensor | None]], word: str, dtype: torch.dtype
) -> None:
    backends: dict[str, type[AttentionBackend]] = {"planted": _lying(lie), **BACKENDS}
    problem = make_problem(page_size=16, dtype=dtype, kv_cache_dtype=dtype)
    (attention,) = open_attention([problem], backends=backends)
    assert (attention.selection.backend, attention.selection.path) == ("torch_cpu", DecodePath.FUSED)
    (rejection,) = [rejection for rejection in attention.selection.rejected if rejection.backend == "planted"]
    assert len(rejection.reasons) == 2
    assert all(word in reason for reason in rejection.reasons)


def test_a_forced_backend_that_fails_its_probe_is_a_start_up_error() -> None:
    backends: dict[str, type[AttentionBackend]] = {"planted": _lying(_returns_nan), **BACKENDS}
    with pytest.raises(AttentionSelectionError, match=r"'planted' cannot serve(?s:.*)off by nan"):
        open_attention([make_problem()], "planted", backends=backends)


def test_rows_of_a_dtype_that_no_backend_takes_are_a_start_up_error_that_lists_them_all() -> None:
    with pytest.raises(AttentionSelectionError, match="no attention backend can serve") as raised:
        open_attention([make_problem(kv_cache_dtype=torch.float8_e5m2)])
    assert [rejection.backend for rejection in raised.value.rejected] == list(BACKENDS)
    assert all("a KV cache of torch.float8_e5m2 is not supported" in rejection.reasons for rejection in raised.value.rejected)


def test_a_block_beyond_a_kernels_limit_is_flattened_and_never_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    (candidate,) = [candidate for candidate in default_backends() if candidate.name == "torch_cpu"]
    limited = replace(candidate, capabilities=replace(candidate.capabilities, max_query_len=3))
    (attention,) = open_attention([make_problem()], candidates=[limited])
    assert attention.selection.path is DecodePath.FLATTENED
    assert "4 query rows per request; at most 3 are supported" in caplog.text


def test_the_reference_never_serves_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    backends: dict[str, type[AttentionBackend]] = {"planted": _lying(_returns_nan), "reference": BACKENDS["reference"]}
    (attention,) = open_attention([make_problem()], backends=backends)
    assert attention.selection.backend == "reference"
    assert "the reference serves, which is slow" in caplog.text
    caplog.clear()
    open_attention([make_problem()], "reference")
    assert "slow" not in caplog.text


def test_layers_that_differ_are_selected_apart() -> None:
    full, windowed = make_problem(), make_problem(sliding_window=3)
    backends: dict[str, type[AttentionBackend]] = dict(BACKENDS)
    candidates = [
        replace(candidate, capabilities=replace(candidate.capabilities, supports_sliding_window=False))
        if candidate.name == "torch_cpu"
        else candidate
        for candidate in default_backends(backends)
    ]
    opened = open_attention([full, windowed, full], candidates=candidates, backends=backends)
    assert [attention.selection.backend for attention in opened] == ["torch_cpu", "reference", "torch_cpu"]
    assert opened[0] is opened[2]
