"""Decode in Triton, on any CUDA device: slots folded into heads, one walk over the paged rows, split over keys.

Shape symbols: B requests, Q query rows per request, H query heads, G KV heads, M = Q * H / G folded rows, D key_dim,
V value_dim, Z splits.
"""

from __future__ import annotations

import importlib
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.base import AttentionBackend, missing_package
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem, QueryLenSupport
from attention.metadata import BlockMetadata

_MIN_KEYS_PER_SPLIT = 256
# Programs in flight per multiprocessor that hide each other's loads.
_PROGRAMS_PER_SM = 2
_LOG2_E = 1.4426950408889634


class TritonBackend(AttentionBackend):
    """See the module docstring.

    Args:
        problem: what it serves.
        num_splits: spans that the keys of each request are cut into; None chooses by the device.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        kinds=frozenset({"mla", "gqa"}),
        query_len_support=QueryLenSupport.UNIFORM,
        supports_non_causal=True,
        supports_non_causal_multi_token=True,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_cache_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        device_types=frozenset({"cuda"}),
        supports_sliding_window=True,
        lse_base="2",
        min_compute_capability=(8, 0),
    )

    def __init__(self, problem: AttentionProblem, *, num_splits: int | None = None) -> None:
        super().__init__(problem)
        self._kernels = importlib.import_module("attention.backends.triton_kernels")
        self._num_splits = num_splits
        self._num_sms = 1
        if problem.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
        self._tail_dim = problem.key_dim - problem.value_dim if problem.kind == "mla" else 0
        self._value_block = max(_power_of_2(problem.value_dim), 16)
        # Shared memory holds a tile of queries and two of keys; a multiprocessor has 100 to 227 KB of it.
        is_wide, itemsize = self._value_block >= 256, problem.dtype.itemsize
        self._block_n = (64 if is_wide else 128) // itemsize
        self._max_block_m = (128 if is_wide else 256) // itemsize

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """See `AttentionBackend`."""
        return super().machine_reasons() + missing_package("triton")

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
        """See `AttentionBackend`."""
        problem, pool = self.problem, cache.pages(layer)
        batch, num_slots, heads, key_dim = query.shape
        groups, value_dim = problem.num_kv_heads, problem.value_dim
        num_rows = num_slots * heads // groups
        # [B, Q, G, H / G, D] -> [B, G, M, D]
        folded = query.reshape(batch, num_slots, groups, -1, key_dim).transpose(1, 2).reshape(batch, groups, num_rows, key_dim)
        block_m = min(max(_power_of_2(num_rows), 16), self._max_block_m)
        num_tiles = groups * -(-num_rows // block_m)
        num_splits = self._num_splits or self._choose_splits(batch * num_tiles, metadata.max_seq_len)

        output = query.new_empty(batch, groups, num_rows, value_dim)
        lse = torch.empty(batch, groups, num_rows, dtype=torch.float32, device=query.device)
        if batch:
            # Sized by query rows: the flattened path has B * Q requests of one row.
            partial = torch.empty(batch, groups, num_rows, num_splits, value_dim, dtype=torch.float32, device=query.device)
            partial_lse = torch.empty(batch, groups, num_rows, num_splits, dtype=torch.float32, device=query.device)
            window = problem.sliding_window
            self._kernels.attend_split[batch, num_tiles, num_splits](
                folded.contiguous(),
                pool,
                metadata.page_table,
                metadata.seq_lens,
                partial,
                partial_lse,
                softmax_scale * cache.key_scale * _LOG2_E,
                num_rows,
                num_splits,
                0 if window is None else problem.draft_block_size + window,
                metadata.page_table.stride(0),
                pool.stride(0),
                pool.stride(1),
                groups * key_dim,
                PAGE_SIZE=problem.page_size,
                NUM_GROUPS=groups,
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                VALUE_BLOCK=self._value_block,
                TAIL_DIM=self._tail_dim,
                TAIL_BLOCK=max(_power_of_2(self._tail_dim), 16),
                IS_LATENT=problem.kind == "mla",
                HAS_WINDOW=window is not None,
                BLOCK_M=block_m,
                BLOCK_N=self._block_n,
                num_warps=8 if self._value_block >= 256 else 4,
                num_stages=2,
            )
            self._kernels.reduce_splits[(batch * groups * num_rows,)](
                partial,
                partial_lse,
                output,
                lse,
                cache.value_scale,
                num_splits,
                VALUE_DIM=value_dim,
                VALUE_BLOCK=self._value_block,
                SPLIT_BLOCK=_power_of_2(num_splits),
            )
        shape = batch, groups, num_slots, heads // groups
        output = output.view(*shape, value_dim).transpose(1, 2).reshape(batch, num_slots, heads, value_dim)
        return output, lse.view(shape).transpose(1, 2).reshape(batch, num_slots, heads) if return_lse else None

    def _choose_splits(self, num_programs: int, max_seq_len: int) -> int:
        """Enough spans to fill the device, none so short that the sum of them costs more than it gains."""
        wanted = -(-self._num_sms * _PROGRAMS_PER_SM // max(num_programs, 1))
        return max(min(wanted, -(-max_seq_len // _MIN_KEYS_PER_SPLIT)), 1)


def _power_of_2(size: int) -> int:
    """The least power of two that is not below `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
