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
        batch, num_slots, heads, _ = query.shape
        rows = cache.rows(layer)
        ranges = metadata.row_ranges if self._visible_rows is None else metadata.windowed_ranges(self._visible_rows)
        attend = self._attend_latent if self.problem.kind == "mla" else self._attend_grouped
        query_float = query.float()
        output = query_float.new_empty(batch, num_slots, heads, self.problem.value_dim)
        lse = query_float.new_empty(batch, num_slots, heads) if return_lse else None
        for index in range(batch):
            if not ranges[index]:
                output[index].zero_()
                if lse is not None:
                    lse[index].fill_(-torch.inf)
                continue
            attend(
                query_float[index],
                _read(rows, ranges[index]),
                (cache.key_scale * softmax_scale, cache.value_scale),
                output[index],
                None if lse is None else lse[index],
            )
        return output.to(query.dtype), lse

    def _attend_latent(
        self, query: Tensor, rows: Tensor, scales: tuple[float, float], output: Tensor, lse: Tensor | None
    ) -> None:
        """query [Q, H, D], rows [n, D] -> output [Q, H, V]"""
        folded = query.reshape(-1, query.shape[-1])
        # beta = 0: the first argument gives a dtype and is not read.
        scores = torch.addmm(folded[:1, :1], folded, rows.t(), beta=0, alpha=scales[0])
        if lse is not None:
            torch.logsumexp(scores, dim=-1, out=lse.view(-1))
        weights = torch.softmax(scores, dim=-1)
        values = rows[:, : output.shape[-1]]
        target = output.view(len(folded), -1)
        torch.addmm(target, weights, values, beta=0, alpha=scales[1], out=target)

    def _attend_grouped(
        self, query: Tensor, rows: Tensor, scales: tuple[float, float], output: Tensor, lse: Tensor | None
    ) -> None:
        """query [Q, H, D], rows [n, 2, G, D] -> output [Q, H, D]"""
        num_slots, _, dim = query.shape
        groups = rows.shape[2]
        # [Q, G, H / G, D] -> [G, Q * H / G, D]
        folded = query.view(num_slots, groups, -1, dim).transpose(0, 1).reshape(groups, -1, dim)
        keys, values = rows.permute(1, 2, 0, 3).unbind(0)  # each [G, n, D]
        scores = torch.baddbmm(folded[:1, :1, :1], folded, keys.transpose(1, 2), beta=0, alpha=scales[0])
        if lse is not None:
            by_group = torch.logsumexp(scores, dim=-1).view(groups, num_slots, -1)
            lse.view(num_slots, groups, -1).copy_(by_group.transpose(0, 1))
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values).view(groups, num_slots, -1, dim)
        output.view(num_slots, groups, -1, dim).copy_(mixed.transpose(0, 1))
        if scales[1] != 1.0:
            output.mul_(scales[1])


def _read(rows: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """The rows of some slot ranges as float32; a view where there is one range of float32."""
    parts = [rows[start:end] for start, end in ranges]
    read = parts[0] if len(parts) == 1 else torch.cat(parts)
    return read.float()
