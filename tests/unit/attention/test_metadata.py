"""Pages and lengths of a batch, as numbers and as tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.block_attention import BlockMetadata
from attention.cache import slots_of


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    page_size = draw(st.sampled_from([1, 2, 4, 16, 64, 128, 256]))
    counts = draw(st.lists(st.integers(0, 5), max_size=5))
    order = draw(st.permutations(range(1, sum(counts) + 3)))
    page_ids, lengths = [], []
    for count in counts:
        page_ids.append([order.pop() for _ in range(count)])
        lengths.append(draw(st.integers(0, count * page_size)))
    return page_ids, lengths, page_size


@settings(max_examples=100, deadline=None)
@given(batch=batches(), window=st.integers(0, 40))
def test_ranges_are_exactly_the_slots_of_the_rows(batch: tuple[list[list[int]], list[int], int], window: int) -> None:
    page_ids, lengths, page_size = batch
    metadata = BlockMetadata.build(page_ids, lengths, page_size, "cpu")
    windowed = metadata.windowed_ranges(window)
    for index, (pages, length) in enumerate(zip(page_ids, lengths, strict=True)):
        slots = slots_of(pages, 0, length, page_size)
        assert [slot for start, end in metadata.row_ranges[index] for slot in range(start, end)] == slots
        kept = slots[max(length - window, 0) :]
        assert [slot for start, end in windowed[index] for slot in range(start, end)] == kept


@settings(max_examples=100, deadline=None)
@given(batch=batches())
def test_the_table_is_whole_tiles_of_pages_that_the_request_owns(batch: tuple[list[list[int]], list[int], int]) -> None:
    page_ids, lengths, page_size = batch
    metadata = BlockMetadata.build(page_ids, lengths, page_size, "cpu")
    table = metadata.page_table
    assert table.shape[0] == len(lengths)
    assert table.shape[1] * page_size % 128 == 0
    assert table.shape[1] * page_size >= max(lengths, default=0)
    assert metadata.seq_lens.tolist() == lengths
    for row, pages, length in zip(table.tolist(), page_ids, lengths, strict=True):
        used = -(-length // page_size)
        assert row[:used] == pages[:used]
        assert set(row[used:]) <= ({pages[used - 1]} if used else {0}), "a padded entry points at someone else's page"


def test_neighbouring_pages_make_one_range() -> None:
    metadata = BlockMetadata.build([[3, 4, 5], [3, 5, 6], [6, 5]], [10, 11, 8], 4, "cpu")
    assert metadata.row_ranges == (((12, 22),), ((12, 16), (20, 27)), ((24, 28), (20, 24)))


def test_flattened_rows_share_pages_and_the_length_of_the_block() -> None:
    metadata = BlockMetadata.build([[3, 4], [7]], [7, 2], 4, "cpu")
    flat = metadata.flattened(2)
    assert flat.page_ids == ((3, 4), (3, 4), (7,), (7,))
    assert flat.lengths == (7, 7, 2, 2)
    assert flat.page_table.equal(metadata.page_table.repeat_interleave(2, dim=0))
    assert flat.seq_lens.equal(metadata.seq_lens.repeat_interleave(2))
    assert metadata.flattened(2) is flat
    assert metadata.flattened(3).batch_size == 6


@pytest.mark.parametrize(
    ("page_ids", "lengths", "word"),
    [
        ([[1]], [5], "length 5 does not fit 1 pages of 4 rows"),
        ([[1]], [-1], "length -1"),
        ([[1], [0, 2]], [1, 1], "request 1: page 0 is reserved"),
        ([[1]], [1, 2], "1 page lists and 2 lengths"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(page_ids: list[list[int]], lengths: list[int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        BlockMetadata.build(page_ids, lengths, 4, "cpu")
