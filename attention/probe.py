"""Prove what a backend claims, before the first draft.

A kernel that silently keeps the causal mask costs nothing but acceptance, so nobody notices. Each selected path therefore
runs a tiny case against the reference:

    request 0   2 slots, 10 keys; all queries point at the key of the last slot, the future of the others. Past the length
                lies a row that would win over it
    request 1   zero queries: every visible row weighs the same, so one row too many or too few moves the mean, and the
                log-sum-exp is the logarithm of their count

and again with the layer's own number of slots. The pages are shuffled and the rest of the pool is NaN. A path that differs
or fails is disabled with the reason, and the selection is made again without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention.backends import BACKENDS, default_backends
from attention.backends.base import AttentionBackend
from attention.backends.reference import ReferenceBackend
from attention.block_attention import BlockAttention
from attention.cache import PagedKVCache, slots_of
from attention.capabilities import AttentionProblem
from attention.metadata import BlockMetadata
from attention.selector import Candidate, DecodePath, Selection, select_backend

PROBE_SLOTS = 2
PROBE_KEYS = 10

_LOGGER = logging.getLogger(__name__)
_REFERENCE = Selection(ReferenceBackend.name, DecodePath.FUSED)


def open_attention(
    problems: Sequence[AttentionProblem],
    override: str | None = None,
    *,
    candidates: Sequence[Candidate] | None = None,
    backends: Mapping[str, type[AttentionBackend]] = BACKENDS,
) -> list[BlockAttention]:
    """Select, build and prove the attention of each layer; layers with equal problems share it.

    Args:
        problems: of the layers.
        override: the only backend that may be taken.
        candidates: best first; None for all that the machine knows.
        backends: the classes that the candidates name.

    Raises:
        AttentionSelectionError: no path of any backend is usable and proven.
    """
    if candidates is None:
        candidates = default_backends(backends)
    opened: dict[AttentionProblem, BlockAttention] = {}
    for problem in problems:
        if problem not in opened:
            opened[problem] = _open_proven(problem, override, candidates, backends)
    return [opened[problem] for problem in problems]


def _open_proven(
    problem: AttentionProblem,
    override: str | None,
    candidates: Sequence[Candidate],
    backends: Mapping[str, type[AttentionBackend]],
) -> BlockAttention:
    while True:
        selection = select_backend(problem, candidates, override)
        reason = prove(selection, problem, backends)
        if reason is None:
            break
        _LOGGER.warning("attention: %s, %s path disabled: %s", selection.backend, selection.path, reason)
        candidates = [_without_path(candidate, selection, reason) for candidate in candidates]
    _LOGGER.info("attention: %s; rejected: %s", selection, " | ".join(map(str, selection.rejected)) or "none")
    if selection.fused_reasons:
        _LOGGER.warning("attention: rows are read %d times for each block: %s", problem.draft_block_size, selection)
    if selection.backend == ReferenceBackend.name and override is None:
        _LOGGER.warning("attention: every faster backend is rejected, so the reference serves, which is slow")
    return BlockAttention(selection, problem, backend=backends[selection.backend](problem))


def _without_path(candidate: Candidate, selection: Selection, reason: str) -> Candidate:
    if candidate.name != selection.backend:
        return candidate
    return replace(candidate, disabled_paths={**candidate.disabled_paths, selection.path: reason})


def prove(
    selection: Selection, problem: AttentionProblem, backends: Mapping[str, type[AttentionBackend]] = BACKENDS
) -> str | None:
    """Run the probe of a path; returns why it must not be used, or None if it may."""
    for num_slots in sorted({PROBE_SLOTS, problem.draft_block_size}):
        small = replace(problem, draft_block_size=num_slots)
        try:
            attention = BlockAttention(selection, small, backend=backends[selection.backend](small))
            reason = _compare(attention, small)
        except Exception as error:  # noqa: BLE001 -- compilers and loaders have error trees of their own; all are reasons
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            return f"probe with {num_slots} slots: {reason}"
    return None


@torch.inference_mode()
def _compare(attention: BlockAttention, problem: AttentionProblem) -> str | None:
    query, cache, metadata = _build_case(problem)
    scale = problem.key_dim**-0.5
    reference = BlockAttention(_REFERENCE, problem)
    expected, expected_lse = reference.forward_with_lse(query, cache, 0, metadata, softmax_scale=scale)
    if attention.returns_lse:
        output, lse = attention.forward_with_lse(query, cache, 0, metadata, softmax_scale=scale)
    else:
        output, lse = attention.forward(query, cache, 0, metadata, softmax_scale=scale), None
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return f"output {tuple(output.shape)} {output.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    limit = _tolerance(problem)
    for what, actual, wanted in (("output", output, expected), ("log-sum-exp", lse, expected_lse)):
        difference = 0.0 if actual is None else _largest_difference(actual, wanted)
        if not difference <= limit:
            return f"{what} is off by {difference:.3g}; at most {limit:g} is accepted"
    return None


def _build_case(problem: AttentionProblem) -> tuple[Tensor, PagedKVCache, BlockMetadata]:
    """Queries [2, S, H, D], a pool and the metadata of the module docstring's two requests."""
    slots, size = problem.draft_block_size, problem.page_size
    lengths = [max(PROBE_KEYS, slots), slots + size]
    num_pages = [-(-length // size) + 1 for length in lengths]
    is_scaled = problem.kv_cache_dtype.itemsize == 1
    scale = 0.5 if is_scaled else 1.0
    cache = PagedKVCache.for_problem(problem, num_layers=1, num_pages=sum(num_pages) + 2, key_scale=scale, value_scale=scale)
    # Neighbours in the table are not neighbours in the pool.
    pages = list(range(sum(num_pages), 0, -1))
    page_ids = [pages[: num_pages[0]], pages[num_pages[0] :]]

    generator = torch.Generator().manual_seed(0)
    query = torch.zeros(2, slots, problem.num_heads, problem.key_dim)
    cache.fill(math.nan)
    for index, length in enumerate(lengths):
        capacity = num_pages[index] * size
        rows = torch.randn(capacity, *problem.row_shape, generator=generator)
        if index == 0:
            direction = torch.randn(problem.key_dim, generator=generator).sign()
            # The keys are a row's first numbers (mla) or its first half (gqa).
            keys = rows if problem.kind == "mla" else rows[:, 0]
            keys[length - 1] = 2 * direction
            keys[length] = 4 * direction
            query[index] = direction
        slot_mapping = torch.tensor(slots_of(page_ids[index], 0, capacity, size), device=problem.device)
        cache.write(0, slot_mapping, rows.to(problem.device))
    metadata = BlockMetadata.build(page_ids, lengths, size, problem.device)
    return query.to(problem.device, problem.dtype), cache, metadata


def _tolerance(problem: AttentionProblem) -> float:
    """Rounding, far below what one row too many or too few makes; kernels may use TF32 and round queries to the KV dtype."""
    if problem.kv_cache_dtype.itemsize == 1:
        return 0.1
    return 5e-3 if problem.dtype in (torch.float32, torch.float64) else 0.05


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Of two tensors; NaN if one of them has NaN."""
    return float((actual.float() - expected.float()).abs().max())
