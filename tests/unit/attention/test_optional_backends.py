"""Backends of other people's kernels: the exact call, what it is given, and that an unusable one is a list of reasons.

A stand-in takes the place of each kernel. It has the kernel's own signature, insists on what the kernel silently relies on,
and computes what the kernel is documented to compute, so that the probe runs through the whole call on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.backends import BACKENDS, default_backends
from attention.backends.base import import_reasons
from attention.backends.flash_mla import FlashMlaBackend
from attention.backends.flashinfer import FlashInferBackend
from attention.backends.tokenspeed_mla import TokenSpeedMlaBackend
from attention.block_attention import BlockAttention, BlockMetadata
from attention.capabilities import AttentionProblem
from attention.probe import prove
from attention.selector import AttentionSelectionError, DecodePath, Selection, select_backend
from tests.support.attention import make_attention, make_case, make_problem
from tests.support.published import published_signature

_OPTIONAL = ["tokenspeed_mla", "flash_mla", "flashinfer", "triton"]


def _k3_problem(**changes: object) -> AttentionProblem:
    values: dict[str, object] = {
        "draft_block_size": 7,
        "num_heads": 8,
        "key_dim": 576,
        "value_dim": 512,
        "page_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": torch.bfloat16,
    }
    return make_problem(**{**values, **changes})  # type: ignore[arg-type]


def _dense(
    query: Tensor, pool: Tensor, block_tables: Tensor, lengths: list[int], scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, Q, H, 512] and natural log-sum-exp [B, Q, H], bottom-right causal if asked."""
    outputs, lses = [], []
    slots = query.shape[1]
    for index, length in enumerate(lengths):
        rows = pool[block_tables[index].long()].flatten(0, 1)[:length].float()
        scores = torch.einsum("qhd,nd->qhn", query[index].float(), rows) * scale
        if is_causal:
            seen = torch.arange(length) < length - slots + 1 + torch.arange(slots)[:, None]
            scores = scores.masked_fill(~seen[:, None], -math.inf)
        outputs.append(scores.softmax(-1) @ rows[:, :512])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(lses)


class _TokenSpeed:
    """tokenspeed-mla 2.0.4, of what we call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def tokenspeed_mla_decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        workspace_buffer: Tensor,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        softmax_scale: float,
        output_scale: float = 1.0,
        out: Tensor | None = None,
        is_var_seq: bool = True,
        causal_mask: bool = True,
        window_left: int = -1,
        enable_pdl: bool = False,
        return_lse: bool = False,
        causal_seqs: Tensor | None = None,
        cp_world: int = 1,
        cp_rank: int = 0,
        cp_interleave_size: int = 1,
        *,
        min_split_kv: int = 1,
        local_visible_lens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.calls.append(dict(locals()))
        slots = query.shape[1]
        assert kv_cache.dtype == query.dtype
        assert kv_cache.dim() == 3
        assert (kv_lora_rank, qk_rope_head_dim) == (512, 64)
        assert workspace_buffer.dtype == torch.int8
        assert workspace_buffer.dim() == 1
        assert block_tables.dtype == seq_lens.dtype == torch.int32
        assert block_tables.is_contiguous()
        assert len(block_tables) == len(seq_lens) == len(query)
        assert query.is_contiguous()
        assert block_tables.shape[1] * kv_cache.shape[1] % 128 == 0
        assert seq_lens.min() >= slots
        assert type(max_seq_len) is int
        assert max_seq_len >= seq_lens.max()
        output, lse = _dense(query, kv_cache, block_tables, seq_lens.tolist(), softmax_scale, is_causal=causal_mask)
        output = (output * output_scale).to(torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype)
        return (output, lse / math.log(2)) if return_lse else output


@pytest.fixture
def tokenspeed(monkeypatch: pytest.MonkeyPatch) -> _TokenSpeed:
    """The stand-in, in place of the package."""
    kernel = _TokenSpeed()
    module = ModuleType("tokenspeed_mla.mla_decode")
    module.tokenspeed_mla_decode = kernel.tokenspeed_mla_decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", ModuleType("tokenspeed_mla"))
    monkeypatch.setitem(sys.modules, "tokenspeed_mla.mla_decode", module)
    return kernel


class _OnCpu(TokenSpeedMlaBackend):
    """As on a device of 8 multiprocessors."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem, num_sms=8)


@pytest.mark.parametrize("path", list(DecodePath))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("page_size", [32, 64])
def test_tokenspeed_passes_the_probe(
    tokenspeed: _TokenSpeed, path: DecodePath, dtype: torch.dtype, is_float8: bool, page_size: int
) -> None:
    problem = _k3_problem(dtype=dtype, kv_cache_dtype=torch.float8_e4m3fn if is_float8 else dtype, page_size=page_size)
    assert prove(Selection("tokenspeed_mla", path), problem, {"tokenspeed_mla": _OnCpu}) is None
    assert {call["query"].shape[1] for call in tokenspeed.calls} == ({1} if path is DecodePath.FLATTENED else {2, 7})


@pytest.mark.parametrize("path", list(DecodePath))
def test_tokenspeed_is_called_with_exactly_this(tokenspeed: _TokenSpeed, path: DecodePath) -> None:
    is_fused = path is DecodePath.FUSED
    problem = _k3_problem(kv_cache_dtype=torch.float8_e4m3fn)
    query, cache, metadata = make_case(problem, [80, 300, 7], scale=0.25)
    attention = BlockAttention(Selection("tokenspeed_mla", path), problem, backend=_OnCpu(problem))
    attention.forward(query, cache, 1, metadata, softmax_scale=0.5)
    (call,) = tokenspeed.calls
    assert call["query"].shape == ((3, 7, 8, 576) if is_fused else (21, 1, 8, 576))
    assert call["query"].dtype == torch.float8_e4m3fn
    assert call["kv_cache"].data_ptr() == cache.pages(1).data_ptr()
    assert call["kv_cache"].shape == cache.pages(1).shape
    assert call["block_tables"].shape == ((3, 6) if is_fused else (21, 6))
    assert call["seq_lens"].tolist() == ([80, 300, 7] if is_fused else [80] * 7 + [300] * 7 + [7] * 7)
    assert call["workspace_buffer"].numel() == 8 * 64 * 513 * 4
    scalars = {name: value for name, value in call.items() if not isinstance(value, Tensor) and name != "self"}
    assert scalars == {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_seq_len": 300,
        "softmax_scale": 0.125,
        "output_scale": 0.25,
        "out": None,
        "is_var_seq": True,
        "causal_mask": not is_fused,
        "window_left": -1,
        "enable_pdl": False,
        "return_lse": False,
        "causal_seqs": None,
        "cp_world": 1,
        "cp_rank": 0,
        "cp_interleave_size": 1,
        "min_split_kv": 1,
        "local_visible_lens": None,
    }


@pytest.mark.parametrize("num_heads", [1, 8, 24, 64, 96, 128])
@pytest.mark.parametrize("slots", [1, 2, 7, 8])
def test_tokenspeed_workspace_holds_every_split(tokenspeed: _TokenSpeed, num_heads: int, slots: int) -> None:
    """The kernel's own arithmetic for 2.0.4: the larger of its two query layouts, at most tiles * splits <= SMs."""
    problem = _k3_problem(num_heads=num_heads, draft_block_size=slots)
    num_bytes = TokenSpeedMlaBackend(problem, num_sms=148)._workspace.numel()
    for batch in (1, 2, 4, 8, 32, 74, 128, 1024):
        for query_len, requests in ((slots, batch), (1, batch * slots)):
            fold = max(f for f in range(1, query_len + 1) if query_len % f == 0 and f * num_heads <= 128)
            layouts = [(num_heads * fold, query_len // fold), (128, -(-num_heads * query_len // 128))]
            for index, (rows, tiles) in enumerate(layouts):
                if index == 1 and tiles >= layouts[0][1]:
                    continue
                splits = [min(32, max(1, 148 // requests // (2 * tiles)))]
                if num_heads * query_len <= 64:
                    splits.append(min(64, max(1, 148 // requests // tiles)))
                for split in splits:
                    needed = 0 if split == 1 else requests * rows * tiles * split * 513 * 4
                    assert needed <= num_bytes, (batch, query_len, rows, tiles, split)


def test_padding_requests_are_inert(tokenspeed: _TokenSpeed) -> None:
    problem = _k3_problem()
    query, cache, metadata = make_case(problem, [70, 0, 0])
    attention = BlockAttention(Selection("tokenspeed_mla", DecodePath.FUSED), problem, backend=_OnCpu(problem))
    output, lse = attention.forward_with_lse(query, cache, 1, metadata, softmax_scale=0.1)
    assert output[1:].eq(0).all()
    assert lse[1:].eq(-math.inf).all()
    expected, expected_lse = make_attention(problem).forward_with_lse(query, cache, 1, metadata, softmax_scale=0.1)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    nobody = BlockMetadata.build([[], [], []], [0, 0, 0], 64, "cpu")
    assert attention.forward(query, cache, 1, nobody, softmax_scale=0.1).eq(0).all()
    assert len(tokenspeed.calls) == 1


def test_a_release_that_keeps_the_causal_mask_is_caught(tokenspeed: _TokenSpeed, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tokenspeed.tokenspeed_mla_decode

    def ignores_the_flag(**arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
        return real(**{**arguments, "causal_mask": True})

    monkeypatch.setattr(sys.modules["tokenspeed_mla.mla_decode"], "tokenspeed_mla_decode", ignores_the_flag)
    reasons = {path: prove(Selection("tokenspeed_mla", path), _k3_problem(), {"tokenspeed_mla": _OnCpu}) for path in DecodePath}
    assert reasons[DecodePath.FLATTENED] is None
    assert "probe with 2 slots: output is off by" in (reasons[DecodePath.FUSED] or "")


class _FlashMla:
    """FlashMLA, of what we call."""

    def __init__(self) -> None:
        self.schedules: list[object] = []
        self.calls: list[dict[str, Any]] = []

    def get_mla_metadata(self) -> tuple[object, None]:
        self.schedules.append(object())
        return self.schedules[-1], None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: Tensor | None = None,
        use_legacy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append(dict(locals()))
        assert use_legacy, "Sparse attention is required"
        assert block_table is not None
        assert cache_seqlens is not None
        assert softmax_scale is not None
        assert k_cache.shape[1:] == (64, 1, 576)
        assert q.dtype == k_cache.dtype
        assert cache_seqlens.min() >= q.shape[1]
        assert len(block_table) == len(cache_seqlens) == len(q)
        output, lse = _dense(
            q, k_cache.squeeze(2), block_table, cache_seqlens.tolist(), softmax_scale, is_causal=causal and q.shape[1] > 1
        )
        return output.to(q.dtype), lse.transpose(1, 2)


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> _FlashMla:
    """The stand-in, in place of the package."""
    kernel = _FlashMla()
    module = ModuleType("flash_mla.flash_mla_interface")
    module.get_mla_metadata = kernel.get_mla_metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = kernel.flash_mla_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    monkeypatch.setitem(sys.modules, "flash_mla.flash_mla_interface", module)
    return kernel


@pytest.mark.parametrize("path", list(DecodePath))
def test_flash_mla_passes_the_probe(flash_mla: _FlashMla, path: DecodePath) -> None:
    assert prove(Selection("flash_mla", path), _k3_problem()) is None
    assert all(call["causal"] is False for call in flash_mla.calls)


def test_flash_mla_serves_a_build_with_one_side(flash_mla: _FlashMla, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_side(
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        return flash_mla.flash_mla_with_kvcache(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v,
            tile_scheduler_metadata,
            softmax_scale=softmax_scale,
            causal=causal,
            use_legacy=True,
        )

    monkeypatch.setattr(sys.modules["flash_mla.flash_mla_interface"], "flash_mla_with_kvcache", with_one_side)
    assert prove(Selection("flash_mla", DecodePath.FUSED), _k3_problem()) is None
    assert flash_mla.calls


def test_flash_mla_layers_share_a_schedule_and_batches_do_not(flash_mla: _FlashMla) -> None:
    problem = _k3_problem()
    query, cache, metadata = make_case(problem, [70, 8])
    attention = BlockAttention(Selection("flash_mla", DecodePath.FUSED), problem, backend=FlashMlaBackend(problem))
    for layer in (0, 1):
        attention.forward(query, cache, layer, metadata, softmax_scale=0.1)
    again = BlockMetadata.build(metadata.page_ids, metadata.lengths, 64, "cpu")
    attention.forward(query, cache, 1, again, softmax_scale=0.1)
    used = [call["tile_scheduler_metadata"] for call in flash_mla.calls]
    assert used[0] is used[1]
    assert used[2] is not used[0]


class _FlashInfer:
    """flashinfer 0.7.4, of what we call: a wrapper that is planned from host tensors and then run."""

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []
        self.num_runs = 0

    def wrapper(
        self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False, *, backend: str = "auto"
    ) -> _FlashInferPlan:
        assert float_workspace_buffer.nbytes >= 128 * 2**20
        assert not use_cuda_graph
        assert backend == "auto"
        return _FlashInferPlan(self)


class _FlashInferPlan:
    def __init__(self, owner: _FlashInfer) -> None:
        self.owner = owner

    def plan(
        self,
        *,
        metadata: dict[str, Tensor],
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
        query_layout: str = "packed",
        kv_cache_layout: str = "packed",
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        self.arguments = {name: value for name, value in locals().items() if name != "self"}
        self.owner.plans.append(self.arguments)
        if kv_data_type == torch.float8_e4m3fn and q_data_type != torch.bfloat16:
            raise ValueError("FP8 kv_data_type for MLA currently only supports q_data_type=torch.bfloat16")
        assert (scale_mode == "kv-per-tensor") == (kv_data_type == torch.float8_e4m3fn)
        assert all(tensor.dtype == torch.int32 for tensor in metadata.values())

    def run(
        self,
        *,
        query: Tensor,
        kv_cache: Tensor,
        return_lse: bool = False,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.owner.num_runs += 1
        plan, metadata = self.arguments, self.arguments["metadata"]
        assert query.dtype == plan["q_data_type"]
        assert kv_cache.dtype == plan["kv_data_type"]
        assert kv_cache.dim() == query.dim() == 3
        assert (plan["lse_mode"] == "base2") == return_lse
        assert (ckv_scale is not None) == (kpe_scale is not None) == (plan["scale_mode"] == "kv-per-tensor")
        assert metadata["qo_indptr"][-1] == len(query)
        outputs, lses = [], []
        for index, length in enumerate(metadata["kv_len_arr"].tolist()):
            first, last = metadata["qo_indptr"][index : index + 2].tolist()
            pages = metadata["kv_indices"][slice(*metadata["kv_indptr"][index : index + 2].tolist())]
            assert len(pages) == -(-length // plan["page_size"])
            pool = kv_cache.float() * (ckv_scale or 1.0)
            output, lse = _dense(
                query[None, first:last], pool, pages[None], [length], plan["sm_scale"], is_causal=plan["causal"]
            )
            outputs.append(output[0])
            lses.append(lse[0])
        output = torch.cat(outputs).to(query.dtype)
        return (output, torch.cat(lses) / math.log(2)) if return_lse else output


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> _FlashInfer:
    """The stand-in, in place of the package."""

    class Metadata:
        @staticmethod
        def csr(qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> dict[str, Tensor]:
            return dict(locals())

    kernel = _FlashInfer()
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = kernel.wrapper  # type: ignore[attr-defined]
    module.MLAPlanMetadata = Metadata  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    return kernel


@pytest.mark.parametrize("path", list(DecodePath))
@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [16, 64])
def test_flashinfer_passes_the_probe(
    flashinfer: _FlashInfer, path: DecodePath, kv_cache_dtype: torch.dtype, page_size: int
) -> None:
    problem = _k3_problem(kv_cache_dtype=kv_cache_dtype, page_size=page_size)
    assert prove(Selection("flashinfer", path), problem) is None
    assert all(plan["causal"] is False for plan in flashinfer.plans)


def test_flashinfer_refuses_what_it_plans_not(flashinfer: _FlashInfer) -> None:
    problem = _k3_problem(dtype=torch.float16, kv_cache_dtype=torch.float8_e4m3fn)
    assert "FP8 kv_data_type" in (prove(Selection("flashinfer", DecodePath.FUSED), problem) or "")


def test_flashinfer_plans_a_batch_once_and_pads_it(flashinfer: _FlashInfer) -> None:
    problem = _k3_problem()
    query, cache, metadata = make_case(problem, [70, 0, 8])
    attention = BlockAttention(Selection("flashinfer", DecodePath.FUSED), problem, backend=FlashInferBackend(problem))
    attention.forward(query, cache, 0, metadata, softmax_scale=0.1)
    output = attention.forward(query, cache, 1, metadata, softmax_scale=0.1)
    assert (len(flashinfer.plans), flashinfer.num_runs) == (1, 2)
    expected = make_attention(problem).forward(query, cache, 1, metadata, softmax_scale=0.1)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    again = BlockMetadata.build(metadata.page_ids, metadata.lengths, 64, "cpu")
    attention.forward(query, cache, 1, again, softmax_scale=0.1)
    attention.forward(query, cache, 1, again, softmax_scale=0.2)
    assert len(flashinfer.plans) == 3
    assert flashinfer.plans[0]["metadata"]["kv_len_arr"].tolist() == [70, 7, 8]


_FLASHINFER = "flashinfer/mla/_batch_mla"
# What we call: where the stand-in keeps it, and wheel, file and name of the published function.
_FLASH_MLA_CALLS = (
    ("get_mla_metadata", ("sgl_flash_mla", "flash_mla/flash_mla_interface.py", "get_mla_metadata")),
    ("flash_mla_with_kvcache", ("sgl_flash_mla", "flash_mla/flash_mla_interface.py", "flash_mla_with_kvcache")),
)
_FLASHINFER_CALLS = (
    ("plan", ("flashinfer_python", f"{_FLASHINFER}/_wrapper.py", "BatchMLAPagedAttentionWrapper.plan")),
    ("run", ("flashinfer_python", f"{_FLASHINFER}/_wrapper.py", "BatchMLAPagedAttentionWrapper.run")),
)
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def _record(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Calls:
    """Keep the arguments of every call of `owner.name`, as they were given."""
    calls: Calls = []
    original = getattr(owner, name)

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, recorded)
    return calls


@pytest.mark.parametrize(("name", "published"), _FLASH_MLA_CALLS)
def test_flash_mla_takes_our_call(
    flash_mla: _FlashMla, monkeypatch: pytest.MonkeyPatch, name: str, published: tuple[str, str, str]
) -> None:
    calls = _record(monkeypatch, sys.modules["flash_mla.flash_mla_interface"], name)
    assert prove(Selection("flash_mla", DecodePath.FUSED), _k3_problem()) is None
    assert calls
    for args, kwargs in calls:
        published_signature(*published).bind(*args, **kwargs)


@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("name", "published"), _FLASHINFER_CALLS)
def test_flashinfer_takes_our_call(
    flashinfer: _FlashInfer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    published: tuple[str, str, str],
    kv_cache_dtype: torch.dtype,
) -> None:
    calls = _record(monkeypatch, _FlashInferPlan, name)
    assert prove(Selection("flashinfer", DecodePath.FUSED), _k3_problem(kv_cache_dtype=kv_cache_dtype)) is None
    assert calls
    for args, kwargs in calls:
        published_signature(*published).bind(*args, **kwargs)


def test_flashinfer_makes_our_wrapper_and_its_plan_metadata(flashinfer: _FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules["flashinfer.mla"]
    wrappers = _record(monkeypatch, module, "BatchMLAPagedAttentionWrapper")
    metadata = _record(monkeypatch, module.MLAPlanMetadata, "csr")
    assert prove(Selection("flashinfer", DecodePath.FUSED), _k3_problem()) is None
    made = (
        (wrappers, f"{_FLASHINFER}/_wrapper.py", "BatchMLAPagedAttentionWrapper.__init__"),
        (metadata, f"{_FLASHINFER}/_contracts.py", "MLAPlanMetadata.csr"),
    )
    for calls, source, function in made:
        assert calls
        for args, kwargs in calls:
            # The object or the class comes first.
            published_signature("flashinfer_python", source, function).bind(None, *args, **kwargs)


def test_a_call_that_a_release_would_not_take_is_told(flash_mla: _FlashMla) -> None:
    signature = published_signature(*_FLASH_MLA_CALLS[1][1])
    with pytest.raises(TypeError, match="missing a required argument"):
        signature.bind(q=None)
    with pytest.raises(TypeError, match="unexpected keyword"):
        signature.bind(**dict.fromkeys(signature.parameters), is_causal=False)


@pytest.mark.parametrize("name", _OPTIONAL)
def test_an_unusable_backend_is_reasons_and_no_exception(name: str) -> None:
    (candidate,) = [candidate for candidate in default_backends() if candidate.name == name]
    problem = _k3_problem()
    with pytest.raises(AttentionSelectionError) as raised:
        select_backend(problem, [candidate], name)
    (rejection,) = raised.value.rejected
    assert "device cpu is not supported" in rejection.reasons
    if importlib.util.find_spec(name) is None:
        assert f"package {name} is not installed" in rejection.reasons


def test_tokenspeed_is_refused_on_hopper_with_the_reason() -> None:
    assert TokenSpeedMlaBackend.capabilities.device_reasons((9, 0)) == ["compute capability 9.0; supported: 10.0, 10.3, 10.7"]
    assert FlashMlaBackend.capabilities.device_reasons((10, 0)) == ["compute capability 10.0; supported: 9.0"]


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (10, 3), (12, 0)])
def test_flashinfer_is_left_to_the_devices_whose_kernels_take_a_block_without_a_mask(capability: tuple[int, int]) -> None:
    (reason,) = FlashInferBackend.capabilities.device_reasons(capability)
    assert reason == f"compute capability {capability[0]}.{capability[1]}; supported: 8.0, 8.6, 8.7, 8.9, 9.0"
    assert FlashInferBackend.capabilities.device_reasons((9, 0)) == []


def test_a_package_that_imports_but_does_not_work_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("tokenspeed_mla")
    broken.__spec__ = importlib.util.spec_from_loader("tokenspeed_mla", loader=None)
    broken.__path__ = []
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", broken)
    assert TokenSpeedMlaBackend.machine_reasons() == ["there is no CUDA device"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    (reason,) = TokenSpeedMlaBackend.machine_reasons()
    assert reason.startswith("tokenspeed_mla.mla_decode cannot be imported: ModuleNotFoundError")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_heads": 129}, "129 heads; at most 128"),
        ({"page_size": 16}, "page_size 16"),
        ({"key_dim": 320, "value_dim": 256}, "(320, 256)"),
        ({"dtype": torch.float32}, "queries of torch.float32"),
        ({"kv_cache_dtype": torch.float16}, "must have the queries' dtype"),
        ({"sliding_window": 128}, "sliding window"),
    ],
)
def test_tokenspeed_names_what_does_not_fit(changes: dict[str, object], word: str) -> None:
    reasons = TokenSpeedMlaBackend.capabilities.unsupported_reasons(_k3_problem(device=torch.device("cuda"), **changes))
    assert any(word in reason for reason in reasons)
    assert TokenSpeedMlaBackend.capabilities.unsupported_reasons(_k3_problem(device=torch.device("cuda"))) == []


@pytest.fixture(scope="module")
def real_tokenspeed() -> ModuleType:
    """The package itself, where it is installed; it imports and compiles without a GPU."""
    reasons = import_reasons("tokenspeed_mla.mla_decode")
    if reasons:
        pytest.skip(reasons[0])
    return importlib.import_module("tokenspeed_mla.mla_decode")


def test_the_stand_in_has_the_signature_of_the_real_kernel(real_tokenspeed: ModuleType) -> None:
    real = inspect.signature(real_tokenspeed.tokenspeed_mla_decode).parameters.values()
    ours = inspect.signature(_TokenSpeed().tokenspeed_mla_decode).parameters.values()
    assert [(one.name, one.kind, one.default) for one in real] == [(one.name, one.kind, one.default) for one in ours]


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_workspace_is_what_the_real_kernel_needs(
    real_tokenspeed: ModuleType, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    kernel, num_sms = real_tokenspeed, 148
    for num_heads, slots in ((1, 1), (8, 7), (9, 4), (24, 7), (64, 7), (64, 8), (96, 8), (128, 7)):
        problem = _k3_problem(num_heads=num_heads, draft_block_size=slots, kv_cache_dtype=dtype)
        held = TokenSpeedMlaBackend(problem, num_sms=num_sms)._workspace.numel()
        for batch, query_len in itertools.product((1, 2, 3, 8, 32, 128), {slots, 1}):
            requests = batch if query_len == slots else batch * slots
            tiler, _ = kernel.select_mla_decode_tilers(
                num_heads, query_len, is_fp8=dtype == torch.float8_e4m3fn, compute_capability=capability
            )
            fold = kernel.get_mla_decode_fold_sq_factor(num_heads, query_len, tiler[0])
            layouts = {(query_len // fold, num_heads * fold), (-(-num_heads * query_len // tiler[0]), tiler[0])}
            for tiles, rows in layouts:
                for max_seq_len in (200, 65536):
                    _, needed = kernel._get_split_kv_and_workspace_size(
                        requests, tiles, rows, 512, num_sms, max_seq_len, dtype, tiler
                    )
                    assert needed <= held, (num_heads, query_len, requests, tiles, rows)


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": torch.float16, "dtype": torch.float16}])
def test_the_real_kernel_takes_our_arguments_up_to_the_device(
    real_tokenspeed: ModuleType, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """On a device that is too old, as patched in, it gets as far as refusing the device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    problem = _k3_problem(**changes)
    query, cache, metadata = make_case(problem, [80, 300])
    attention = BlockAttention(Selection("tokenspeed_mla", DecodePath.FUSED), problem, backend=_OnCpu(problem))
    with pytest.raises(ValueError, match=r"requires SM100, SM103 or SM107, got \(9, 0\)"):
        attention.forward(query, cache, 1, metadata, softmax_scale=0.1)


@pytest.mark.parametrize(("causal_mask", "query_len"), [(False, 7), (True, 1)])
def test_the_real_kernel_compiles_for_blackwell(
    real_tokenspeed: ModuleType, monkeypatch: pytest.MonkeyPatch, causal_mask: bool, query_len: int
) -> None:
    """Both masks, each with the query that we call it with."""
    monkeypatch.setattr(real_tokenspeed, "get_max_active_clusters", lambda size: 1)
    compiled = real_tokenspeed._get_compiled_mla_kernel(
        torch_dtype=torch.bfloat16,
        page_size=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        is_persistent=False,
        is_var_seq=True,
        is_var_split_kv=False,
        compute_capability=(10, 0),
        has_local_visible_lens=False,
        causal_mask=causal_mask,
        num_heads=64,
        seq_len_q=query_len,
        partial_fp16=False,
    )
    assert callable(compiled)


def test_every_backend_has_a_name_of_its_own_and_the_oracle_comes_last() -> None:
    assert list(BACKENDS)[-1] == "reference"
    assert all(name == backend.name for name, backend in BACKENDS.items())
