"""The load-bearing claim and its attack.

Every slot of a block sees all rows of its request and nothing else: one call over the block, one call over single rows, and
dense attention written out here say the same, over ragged batches, page sizes and shuffled pages in a pool of NaN. A case in
which the future dominates is one that a causal kernel cannot pass.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.backends.torch_cpu import TorchCpuBackend
from attention.block_attention import BlockAttention, BlockMetadata
from attention.cache import PagedKVCache, slots_of
from attention.capabilities import AttentionProblem
from attention.selector import DecodePath
from tests.support.attention import make_attention, make_case, make_problem

_PATHS = [(backend, path) for backend in ("torch_cpu", "reference") for path in DecodePath]
_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@st.composite
def problems_and_lengths(draw: st.DrawFn) -> tuple[AttentionProblem, list[int]]:
    kind = draw(st.sampled_from(["mla", "gqa"]))
    slots, page_size = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    num_kv_heads = 1 if kind == "mla" else draw(st.integers(1, 4))
    heads_per_kv_head = draw(st.integers(1, 5) | st.sampled_from([8, 24, 32]))
    if kind == "mla":
        heads_per_kv_head = draw(st.just(heads_per_kv_head) | st.sampled_from([64, 96, 128]))
    dtype = draw(st.sampled_from(sorted(_TOLERANCES, key=str)))
    problem = make_problem(
        kind,
        draft_block_size=slots,
        num_heads=num_kv_heads * heads_per_kv_head,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        dtype=dtype,
        kv_cache_dtype=draw(st.sampled_from([dtype, torch.float8_e4m3fn])),
        sliding_window=draw(st.none() | st.integers(0, 20)),
    )
    near_an_edge = st.builds(lambda pages, off: max(pages * page_size + off, slots), st.integers(1, 3), st.integers(-1, 1))
    length = st.just(0) | near_an_edge | st.integers(slots, slots + 3 * page_size)
    return problem, draw(st.lists(length, min_size=1, max_size=9))


def _lay_out(query: Tensor, layout: str) -> Tensor:
    """The same queries behind other strides."""
    if layout == "padded":
        padded = query.new_full((*query.shape[:3], query.shape[3] + 8), math.nan)
        padded[..., : query.shape[3]] = query
        return padded[..., : query.shape[3]]
    return query.transpose(1, 2).contiguous().transpose(1, 2) if layout == "heads first" else query


def _dense(problem: AttentionProblem, query: Tensor, cache: PagedKVCache, metadata: BlockMetadata) -> tuple[Tensor, Tensor]:
    """Attention request by request, over the rows as `slots_of` finds them."""
    output = torch.zeros(*query.shape[:3], problem.value_dim)
    lse = torch.full(query.shape[:3], -math.inf)
    for index, (pages, length) in enumerate(zip(metadata.page_ids, metadata.lengths, strict=True)):
        if not length:
            continue
        rows = cache.rows(1)[torch.tensor(slots_of(pages, 0, length, problem.page_size))].float()
        if problem.sliding_window is not None:
            rows = rows[-(problem.draft_block_size + problem.sliding_window) :]
        # [n, H, D] and [n, H, V]: the row that each head reads.
        groups = torch.arange(problem.num_heads) * problem.num_kv_heads // problem.num_heads
        keys = rows[:, None].expand(-1, problem.num_heads, -1) if problem.kind == "mla" else rows[:, 0, groups]
        values = keys[..., : problem.value_dim] if problem.kind == "mla" else rows[:, 1, groups]
        scores = torch.einsum("qhd,nhd->qhn", query[index].float(), keys * cache.key_scale) * 0.3
        lse[index] = scores.logsumexp(-1)
        output[index] = torch.einsum("qhn,nhv->qhv", scores.softmax(-1), values * cache.value_scale)
    return output, lse


@settings(max_examples=150, deadline=None)
@given(case=problems_and_lengths(), seed=st.integers(0, 3), layout=st.sampled_from(["packed", "padded", "heads first"]))
def test_fused_is_flattened_is_dense(case: tuple[AttentionProblem, list[int]], seed: int, layout: str) -> None:
    problem, lengths = case
    is_float8 = problem.kv_cache_dtype == torch.float8_e4m3fn
    scale, value_scale = (0.5, 0.25 if problem.kind == "gqa" else 0.5) if is_float8 else (1.0, 1.0)
    query, cache, metadata = make_case(problem, lengths, seed=seed, scale=scale, value_scale=value_scale)
    query = _lay_out(query, layout)
    expected, expected_lse = _dense(problem, query, cache, metadata)
    limit = _TOLERANCES[problem.dtype]
    for backend, path in _PATHS:
        output, lse = make_attention(problem, backend, path).forward_with_lse(query, cache, 1, metadata, softmax_scale=0.3)
        assert output.dtype == problem.dtype
        torch.testing.assert_close(output.float(), expected, rtol=limit, atol=limit)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("backend", "path"), _PATHS)
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_future_row_that_dominates_is_seen_by_every_slot(backend: str, path: DecodePath, kind: str) -> None:
    problem = make_problem(kind, draft_block_size=2, num_heads=2)
    query, cache, metadata = make_case(problem, [10])
    direction = torch.full((problem.key_dim,), 4.0)
    last_slot = slots_of(metadata.page_ids[0], 9, 1, problem.page_size)[0]
    row = cache.rows(1)[last_slot]
    (row if kind == "mla" else row[0])[:] = direction
    query[:] = direction
    output = make_attention(problem, backend, path).forward(query, cache, 1, metadata, softmax_scale=1.0)
    value = row[: problem.value_dim] if kind == "mla" else row[1]
    torch.testing.assert_close(output, value.expand_as(output))


@pytest.mark.parametrize(("backend", "path"), _PATHS)
def test_zero_queries_count_the_rows(backend: str, path: DecodePath) -> None:
    problem = make_problem(draft_block_size=2)
    query, cache, metadata = make_case(problem, [2, 3, 4, 5, 9, 10])
    attention = make_attention(problem, backend, path)
    _, lse = attention.forward_with_lse(query.zero_(), cache, 1, metadata, softmax_scale=1.0)
    expected = torch.tensor(metadata.lengths).log().view(-1, 1, 1).expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=0, atol=2e-6)


@settings(max_examples=30, deadline=None)
@given(case=problems_and_lengths(), path=st.sampled_from(DecodePath))
def test_a_request_does_not_depend_on_its_batch_mates(case: tuple[AttentionProblem, list[int]], path: DecodePath) -> None:
    problem, lengths = case
    query, cache, metadata = make_case(problem, lengths)
    attention = make_attention(problem, path=path)
    together = attention.forward(query, cache, 1, metadata, softmax_scale=0.3)
    for index, length in enumerate(lengths):
        alone = BlockMetadata.build([metadata.page_ids[index]], [length], problem.page_size, "cpu")
        output = attention.forward(query[index : index + 1], cache, 1, alone, softmax_scale=0.3)
        assert output.equal(together[index : index + 1])


def test_where_pages_lie_does_not_matter() -> None:
    problem = make_problem(page_size=8)
    query, cache, metadata = make_case(problem, [29])
    neighbours = PagedKVCache.for_problem(problem, num_layers=2, num_pages=6)
    slots = torch.tensor(slots_of(metadata.page_ids[0], 0, 29, 8))
    neighbours.write(1, torch.arange(8, 37), cache.rows(1)[slots])
    attention = make_attention(problem)
    moved = BlockMetadata.build([[1, 2, 3, 4]], [29], 8, "cpu")
    output = attention.forward(query, cache, 1, metadata, softmax_scale=0.3)
    assert output.equal(attention.forward(query, neighbours, 1, moved, softmax_scale=0.3))


def test_a_table_left_at_zero_shows() -> None:
    problem = make_problem()
    query, cache, _ = make_case(problem, [6])
    lost = BlockMetadata(((0, 0),), (6,), problem.page_size, problem.device)
    assert make_attention(problem).forward(query, cache, 1, lost, softmax_scale=0.3).isnan().all()


@pytest.mark.parametrize(("backend", "path"), _PATHS)
def test_rows_that_were_never_written_count_for_nothing(backend: str, path: DecodePath) -> None:
    """A session that lacks the start of its context has no rows for it, so its pages hold what follows and no gap."""
    problem = make_problem(page_size=8)
    query, cache, metadata = make_case(problem, [21, 6])
    attention = make_attention(problem, backend, path)
    output = attention.forward(query, cache, 1, metadata, softmax_scale=0.3)
    assert output.isfinite().all()
    for filled in (1e4, -1e4):
        other = PagedKVCache.for_problem(problem, num_layers=2, num_pages=cache.num_pages)
        other.fill(filled)
        for pages, length in zip(metadata.page_ids, metadata.lengths, strict=True):
            slots = torch.tensor(slots_of(pages, 0, length, 8))
            other.write(1, slots, cache.rows(1)[slots])
        assert attention.forward(query, other, 1, metadata, softmax_scale=0.3).equal(output)


def test_an_empty_batch_is_an_empty_answer() -> None:
    problem = make_problem()
    query, cache, metadata = make_case(problem, [])
    for backend, path in _PATHS:
        output = make_attention(problem, backend, path).forward(query, cache, 1, metadata, softmax_scale=1.0)
        assert output.shape == (0, 4, 6, 16)


def test_shapes_are_checked_at_the_door() -> None:
    problem = make_problem()
    query, cache, metadata = make_case(problem, [6, 7])
    attention = make_attention(problem)
    other = PagedKVCache.for_problem(make_problem(page_size=8), num_layers=1, num_pages=3)
    short = BlockMetadata.build([[1], [2]], [3, 4], 4, "cpu")
    wide_pages = BlockMetadata.build([[1], [2]], [4, 4], 8, "cpu")
    for arguments, word in [
        ((query[:1], cache, metadata), "query has shape"),
        ((query[:, :3], cache, metadata), "query has shape"),
        ((query, other, metadata), "the pool has rows"),
        ((query, cache, short), "must count the 4 slots"),
        ((query, cache, wide_pages), "the metadata has page_size 8"),
    ]:
        with pytest.raises(ValueError, match=word):
            attention.forward(arguments[0], arguments[1], 0, arguments[2], softmax_scale=1.0)


def test_attention_without_lse_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCpuBackend, "capabilities", replace(TorchCpuBackend.capabilities, lse_base=None))
    problem = make_problem()
    query, cache, metadata = make_case(problem, [6])
    attention: BlockAttention = make_attention(problem)
    assert not attention.returns_lse
    with pytest.raises(ValueError, match="torch_cpu returns no log-sum-exp"):
        attention.forward_with_lse(query, cache, 1, metadata, softmax_scale=1.0)
