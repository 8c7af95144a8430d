"""The pool: who holds its pages, and where a row lies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from attention.cache import OutOfPages, PageAllocator, PagedKVCache, slots_of
from tests.support.attention import make_problem

_NUM_PAGES = 9


class AllocatorMachine(RuleBasedStateMachine):
    """Counts as a plain dict has them."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(_NUM_PAGES)
        self.counts: dict[int, int] = {}

    @rule(count=st.integers(0, _NUM_PAGES))
    def allocate(self, count: int) -> None:
        if count > self.allocator.num_free:
            with pytest.raises(OutOfPages, match=f"{count} pages wanted"):
                self.allocator.allocate(count)
            return
        for page in self.allocator.allocate(count):
            assert page not in self.counts, "a held page was handed out"
            self.counts[page] = 1

    @rule(data=st.data())
    def retain_or_release(self, data: st.DataObject) -> None:
        if not self.counts:
            return
        page = data.draw(st.sampled_from(sorted(self.counts)))
        if data.draw(st.booleans()):
            self.allocator.retain([page])
            self.counts[page] += 1
        else:
            self.allocator.release([page])
            self.counts[page] -= 1
            if not self.counts[page]:
                del self.counts[page]

    @rule(page=st.integers(0, _NUM_PAGES - 1), is_release=st.booleans())
    def touching_a_free_page_is_refused(self, page: int, is_release: bool) -> None:
        if page not in self.counts:
            with pytest.raises(ValueError, match=f"page {page} is held by no one"):
                (self.allocator.release if is_release else self.allocator.retain)([page])

    @invariant()
    def counts_agree(self) -> None:
        assert [self.allocator.reference_count(page) for page in range(_NUM_PAGES)] == [
            self.counts.get(page, 0) for page in range(_NUM_PAGES)
        ]
        assert self.allocator.num_free == _NUM_PAGES - 1 - len(self.counts)
        assert 0 not in self.counts, "the reserved page was handed out"


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, deadline=None)


def test_pages_come_upwards_for_whoever_pops_them() -> None:
    allocator = PageAllocator(8)
    fresh = allocator.allocate(4)
    assert [fresh.pop() for _ in range(4)] == [1, 2, 3, 4]


def test_a_pool_needs_a_page_besides_the_reserved_one() -> None:
    with pytest.raises(ValueError, match="2 pages or more"):
        PageAllocator(1)
    with pytest.raises(ValueError, match="1 pages"):
        PagedKVCache(num_layers=1, num_pages=1, page_size=4, row_shape=(8,), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_found_where_they_were_written(kind: str, dtype: torch.dtype) -> None:
    problem = make_problem(kind, kv_cache_dtype=dtype)
    cache = PagedKVCache.for_problem(problem, num_layers=2, num_pages=6)
    pages = [4, 1, 3]
    rows = torch.randn(7, *problem.row_shape)
    cache.write(1, torch.tensor(slots_of(pages, 3, 7, problem.page_size)), rows)
    for row in range(7):
        stored = cache.pages(1)[pages[(row + 3) // 4], (row + 3) % 4]
        torch.testing.assert_close(stored.float(), rows[row].to(dtype).float(), rtol=0, atol=0)
    assert not cache.pages(0)[1:].float().any(), "another layer was written"
    assert cache.pages(1)[[2, 5]].float().eq(0).all(), "another page was written"


def test_the_reserved_page_is_poison_and_the_rest_is_finite() -> None:
    cache = PagedKVCache.for_problem(make_problem(), num_layers=2, num_pages=4)
    for layer in range(2):
        assert cache.pages(layer)[0].isnan().all()
        assert cache.pages(layer)[1:].isfinite().all()


def test_every_layer_is_one_contiguous_block_of_pages() -> None:
    """Kernels get strides, but none has to cope with padded ones."""
    cache = PagedKVCache.for_problem(make_problem("gqa"), num_layers=3, num_pages=5)
    assert all(cache.pages(layer).is_contiguous() and cache.rows(layer).is_contiguous() for layer in range(3))
    cache.write(2, torch.tensor([9]), torch.ones(1, *cache.row_shape))
    assert cache.pages(2)[2, 1].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_copy_page_copies_every_layer_and_nothing_else(dtype: torch.dtype) -> None:
    problem = make_problem(kv_cache_dtype=dtype)
    cache = PagedKVCache.for_problem(problem, num_layers=3, num_pages=5)
    for layer in range(3):
        cache.write(layer, torch.arange(4, 20), torch.randn(16, *problem.row_shape))
    before = [cache.pages(layer).float().clone() for layer in range(3)]
    cache.copy_page(2, 4)
    for layer in range(3):
        before[layer][4] = before[layer][2]
        torch.testing.assert_close(cache.pages(layer).float(), before[layer], rtol=0, atol=0, equal_nan=True)


def test_float8_rows_are_divided_by_their_scales_and_never_overflow_to_nan() -> None:
    problem = make_problem("gqa", kv_cache_dtype=torch.float8_e4m3fn)
    cache = PagedKVCache.for_problem(problem, num_layers=1, num_pages=3, key_scale=2.0, value_scale=0.5)
    rows = torch.ones(2, *problem.row_shape)
    rows[1] = 1e6
    cache.write(0, torch.tensor([4, 5]), rows)
    stored = cache.rows(0).float()
    assert stored[4, 0].eq(0.5).all()
    assert stored[4, 1].eq(2.0).all()
    assert stored[5].eq(448.0).all()


def test_a_latent_row_has_one_scale() -> None:
    with pytest.raises(ValueError, match="one scale"):
        PagedKVCache.for_problem(make_problem(), num_layers=1, num_pages=3, key_scale=2.0)


def test_page_bytes_are_what_the_pool_takes() -> None:
    problem = make_problem("gqa", kv_cache_dtype=torch.bfloat16)
    size = PagedKVCache.page_bytes(num_layers=3, page_size=4, row_shape=problem.row_shape, dtype=torch.bfloat16)
    cache = PagedKVCache.for_problem(problem, num_layers=3, num_pages=5)
    assert size * 5 == sum(cache.pages(layer).nbytes for layer in range(3))


def test_rows_past_the_pages_are_refused_and_never_wrap() -> None:
    assert slots_of([5, 2], 2, 4, 4) == [22, 23, 8, 9]
    assert slots_of([5, 2], 8, 0, 4) == []
    for first_row, num_rows in ((6, 3), (-1, 2), (9, 1)):
        with pytest.raises(ValueError, match="do not fit 2 pages"):
            slots_of([5, 2], first_row, num_rows, 4)
