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
    dtype = draw(st.sampled_from(sorted(_TOLERANCES, key=str)))
    problem = make_problem(
        kind,
        draft_block_size=slots,
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        dtype=dtype,
        kv_cache_dtype=draw(st.sampled_from([dtype, torch.float8_e4m3fn])),
        sliding_window=draw(st.none() | st.integers(0, 20)),
    )
    near_an_edge = st.builds(lambda pages, off: max(pages * page_size + off, slots), st.integers(1, 3), st.integers(-1, 1))
    length = st.just(0) | near_an_edge | st.integers(slots, slots + 3 * page_size)
    return problem, draw(st.lists(length, min_size=1, max_size=9))


def _dense(problem: AttentionProblem, query: Tensor, cache: PagedKVCache, metadata: BlockMetadata) -> tuple[Tensor, Tensor]:
    """Attention request by request and head by head, over the rows as `slots_of` finds them."""
    output = torch.zeros(*query.shape[:3], problem.value_dim)
    lse = torch.full(query.shape[:3], -math.inf)
    for index, (pages, length) in enumerate(zip(metadata.page_ids, metadata.lengths, strict=True)):
        if not length:
            continue
        rows = torch.stack([cache.rows(1)[slot] for slot in slots_of(pages, 0, length, problem.page_size)]).float()
        if problem.sliding_window is not None:
            rows = rows[-(problem.draft_block_size + problem.sliding_window) :]
        for head in range(problem.num_heads):
            group = head * problem.num_kv_heads // problem.num_heads
            keys = rows if problem.kind == "mla" else rows[:, 0, group]
            values = rows[:, : problem.value_dim] if problem.kind == "mla" else rows[:, 1, group]
            scores = query[index, :, head].float() @ (keys * cache.key_scale).T * 0.3
            lse[index, :, head] = scores.logsumexp(-1)
            output[index, :, head] = scores.softmax(-1) @ (values * cache.value_scale)
    return output, lse


@settings(max_examples=150, deadline=None)
@given(case=problems_and_lengths(), seed=st.integers(0, 3))
def test_fused_is_flattened_is_dense(case: tuple[AttentionProblem, list[int]], seed: int) -> None:
    problem, lengths = case
    scale = 0.5 if problem.kv_cache_dtype == torch.float8_e4m3fn else 1.0
    query, cache, metadata = make_case(problem, lengths, seed=seed, scale=scale)
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
