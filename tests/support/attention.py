"""Small attention cases with a poisoned pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attention.block_attention import BlockAttention, BlockMetadata
from attention.cache import PagedKVCache, slots_of
from attention.capabilities import AttentionProblem
from attention.selector import DecodePath, Selection


def make_problem(kind: str = "mla", **changes: object) -> AttentionProblem:
    values: dict[str, object] = {
        "kind": kind,
        "draft_block_size": 4,
        "num_heads": 6,
        "num_kv_heads": 1 if kind == "mla" else 2,
        "key_dim": 24 if kind == "mla" else 16,
        "value_dim": 16,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "page_size": 4,
        "device": torch.device("cpu"),
    }
    return AttentionProblem(**{**values, **changes})  # type: ignore[arg-type]


def make_pages(
    lengths: Sequence[int], page_size: int, generator: torch.Generator, *, spare_pages: int = 3
) -> tuple[list[list[int]], int]:
    """Shuffled pages for requests of some lengths, and the size of a pool with a few pages that nobody holds."""
    counts = [-(-length // page_size) for length in lengths]
    order = (torch.randperm(sum(counts) + spare_pages, generator=generator) + 1).tolist()
    page_ids = [[order.pop() for _ in range(count)] for count in counts]
    return page_ids, sum(counts) + spare_pages + 1


def make_case(
    problem: AttentionProblem, lengths: Sequence[int], *, seed: int = 0, scale: float = 1.0, value_scale: float | None = None
) -> tuple[Tensor, PagedKVCache, BlockMetadata]:
    """Queries, a pool whose every row past a length and every unused page is NaN, and the metadata."""
    generator = torch.Generator().manual_seed(seed)
    page_ids, num_pages = make_pages(lengths, problem.page_size, generator)
    cache = PagedKVCache.for_problem(
        problem, num_layers=2, num_pages=num_pages, key_scale=scale, value_scale=scale if value_scale is None else value_scale
    )
    cache.fill(math.nan)
    for pages, length in zip(page_ids, lengths, strict=True):
        slots = torch.tensor(slots_of(pages, 0, length, problem.page_size), dtype=torch.int64, device=problem.device)
        cache.write(1, slots, torch.randn(length, *problem.row_shape, generator=generator).to(problem.device))
    shape = len(lengths), problem.draft_block_size, problem.num_heads, problem.key_dim
    query = torch.randn(*shape, generator=generator).to(problem.device, problem.dtype)
    return query, cache, BlockMetadata.build(page_ids, lengths, problem.page_size, problem.device)


def make_attention(
    problem: AttentionProblem, backend: str = "torch_cpu", path: DecodePath = DecodePath.FUSED
) -> BlockAttention:
    return BlockAttention(Selection(backend, path), problem)
