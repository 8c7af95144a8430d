"""The oracle: dense attention in plain torch, on any device, in any dtype, for anything a problem can ask.

It shares no code with what it judges: rows are gathered through the page table tensor and cut off by a mask.

Shape symbols: B requests, Q query rows per request, H query heads, G KV heads, D key_dim, V value_dim, N padded rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.base import AttentionBackend
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, QueryLenSupport
from attention.metadata import BlockMetadata

FLOAT_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class ReferenceBackend(AttentionBackend):
    """Slow and right."""

    name: ClassVar[str] = "reference"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        kinds=frozenset({"mla", "gqa"}),
        query_len_support=QueryLenSupport.UNIFORM,
        supports_non_causal=True,
        supports_non_causal_multi_token=True,
        dtypes=FLOAT_DTYPES,
        kv_cache_dtypes=FLOAT_DTYPES | {torch.float8_e4m3fn},
        device_types=frozenset({"cpu", "cuda"}),
        supports_sliding_window=True,
        lse_base="e",
    )

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
        heads = self.problem.num_heads
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        is_visible = self._visible(metadata)  # [B, N]
        keys, values = self._gather(cache, layer, metadata, dtype)  # [B, N, G, D], [B, N, G, V]
        # Rows that are not visible may hold anything, NaN too, and NaN * 0 is NaN.
        keys = keys.masked_fill(~is_visible[..., None, None], 0).repeat_interleave(heads // keys.shape[2], dim=2)
        values = values.masked_fill(~is_visible[..., None, None], 0).repeat_interleave(heads // values.shape[2], dim=2)

        scores = torch.einsum("bqhd,bnhd->bqhn", query.to(dtype), keys) * softmax_scale
        scores = scores.masked_fill(~is_visible[:, None, None, :], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        # A request of length 0 has no scores at all: its weights are 0 and not 0 / 0.
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        output = torch.einsum("bqhn,bnhv->bqhv", weights, values).to(query.dtype)
        return output, lse.float() if return_lse else None

    def _visible(self, metadata: BlockMetadata) -> Tensor:
        """[B, N] bool"""
        row = torch.arange(metadata.page_table.shape[1] * metadata.page_size, device=metadata.device)
        is_visible = row < metadata.seq_lens[:, None]
        if self.problem.sliding_window is not None:
            history = self.problem.draft_block_size + self.problem.sliding_window
            is_visible &= row >= metadata.seq_lens[:, None] - history
        return is_visible

    def _gather(self, cache: PagedKVCache, layer: int, metadata: BlockMetadata, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pool = cache.pages(layer)
        # Not every device gathers float8; bytes will do.
        stored = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
        pages = stored[metadata.page_table.long()].view(pool.dtype)  # [B, P, page_size, *row_shape]
        rows = pages.flatten(1, 2).to(dtype)
        if self.problem.kind == "mla":
            rows = rows[:, :, None] * cache.key_scale
            return rows, rows[..., : self.problem.value_dim]
        return rows[:, :, 0] * cache.key_scale, rows[:, :, 1] * cache.value_scale
