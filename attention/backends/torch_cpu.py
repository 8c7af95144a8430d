"""Decode on a CPU: two matrix products per request over its own rows, in place.

A request whose pages are neighbours is read where it lies; otherwise its rows are gathered once. No row past a length is
touched, so there is nothing to mask, and a request's numbers do not depend on its batch mates. Slots and heads are folded
into the rows of the product, so the fused path reads the pool once per request and the flattened one once per slot.

Products run in float32: CPUs without native bfloat16 lose more to slow products than converting the rows costs.

Shape symbols: B requests, Q query rows per request, H query heads, G KV heads, D key_dim, V value_dim, n rows of a request.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.base import AttentionBackend
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem, QueryLenSupport
from attention.metadata import BlockMetadata


class TorchCpuBackend(AttentionBackend):
    """See the module docstring."""

    name: ClassVar[str] = "torch_cpu"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        kinds=frozenset({"mla", "gqa"}),
        query_len_support=QueryLenSupport.UNIFORM,
        supports_non_causal=True,
        supports_non_causal_multi_token=True,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_cache_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        device_types=frozenset({"cpu"}),
        supports_sliding_window=True,
        lse_base="e",
    )

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        window = problem.sliding_window
        self._visible_rows = None if window is None else problem.draft_block_size + window

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
        rows = cache.rows(layer)
        ranges = metadata.row_ranges if self._visible_rows is None else metadata.windowed_ranges(self._visible_rows)
        scales = cache.key_scale * softmax_scale, cache.value_scale
        attend = self._attend_latent if self.problem.kind == "mla" else self._attend_grouped
        query_float = query.float()
        if len(ranges) == 1 and ranges[0]:
            output, lse = attend(query_float[0], _read(rows, ranges[0]), scales, return_lse)
            return output.unsqueeze(0).to(query.dtype), None if lse is None else lse.unsqueeze(0)

        batched = query_float.new_zeros(*query.shape[:3], self.problem.value_dim)
        batched_lse = query_float.new_full(query.shape[:3], -torch.inf) if return_lse else None
        for index, own_ranges in enumerate(ranges):
            if not own_ranges:
                continue
            output, lse = attend(query_float[index], _read(rows, own_ranges), scales, return_lse)
            batched[index] = output
            if batched_lse is not None and lse is not None:
                batched_lse[index] = lse
        return batched.to(query.dtype), batched_lse

    def _attend_latent(
        self, query: Tensor, rows: Tensor, scales: tuple[float, float], return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """query [Q, H, D], rows [n, D] -> output [Q, H, V], lse [Q, H]"""
        num_slots, heads, dim = query.shape
        folded = query.reshape(-1, dim)
        # beta = 0: the first argument is not read.
        scores = torch.addmm(folded[:1, :1], folded, rows.t(), beta=0, alpha=scales[0])
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.addmm(scores[:1, :1], weights, rows[:, : self.problem.value_dim], beta=0, alpha=scales[1])
        lse = torch.logsumexp(scores, dim=-1).view(num_slots, heads) if return_lse else None
        return mixed.view(num_slots, heads, -1), lse

    def _attend_grouped(
        self, query: Tensor, rows: Tensor, scales: tuple[float, float], return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """query [Q, H, D], rows [n, 2, G, D] -> output [Q, H, D], lse [Q, H]"""
        num_slots, heads, dim = query.shape
        groups = rows.shape[2]
        # [Q, G, H / G, D] -> [G, Q * H / G, D]
        folded = query.reshape(num_slots, groups, -1, dim).transpose(0, 1).reshape(groups, -1, dim)
        keys, values = rows.permute(1, 2, 0, 3).unbind(0)  # each [G, n, D]
        scores = torch.baddbmm(folded[:1, :1, :1], folded, keys.transpose(1, 2), beta=0, alpha=scales[0])
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.baddbmm(scores[:1, :1, :1], weights, values, beta=0, alpha=scales[1])
        output = mixed.view(groups, num_slots, -1, dim).transpose(0, 1).reshape(num_slots, heads, dim)
        if not return_lse:
            return output, None
        by_group = torch.logsumexp(scores, dim=-1).view(groups, num_slots, -1)
        return output, by_group.transpose(0, 1).reshape(num_slots, heads)


def _read(rows: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """The rows of some slot ranges as float32; a view where there is one range of float32."""
    parts = [rows[start:end] for start, end in ranges]
    if len(parts) == 1:
        return parts[0].float()
    if rows.dtype.itemsize == 1:
        parts = [part.float() for part in parts]
    return torch.cat(parts).float()
