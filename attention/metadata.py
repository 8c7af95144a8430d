"""Which rows each request of a batch may read: pages and lengths, the block included.

The same facts are kept twice, because CPU code wants Python numbers and kernels want tensors; the tensors are made when they
are first asked for. A batch is described once per step and read by every layer.

Flattening turns each request into one row per slot. All of them share the request's pages and its block-end length: a decode
kernel masks by length only, so equal lengths let every slot see the whole block.

Rules: a length lies in [S, capacity of its pages] or is 0, and anything else is refused and not clamped, because a clamped
length would draft from the wrong rows in silence. Rows have no gaps: a session that lacks the start of its context has no rows
for it, so what was never written is never counted. All blocks have S slots; whoever wants fewer drafts takes the first ones.

Shape symbols: B requests, S draft_block_size, P page table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attention.cache import RESERVED_PAGE

# Kernels walk a table in tiles of this many keys and may read the ids of a whole tile.
TABLE_ALIGNMENT_ROWS = 128


@dataclass(frozen=True)
class BlockMetadata:
    """Pages and lengths of a batch. Make it with `build`.

    A request of length 0 is padding: its output is zero and nothing is read for it.

    Args:
        page_ids: of each request, in row order.
        lengths: rows of each request that its slots may read, the block's S rows included.
        page_size: rows in a page.
        device: of the tensors.
    """

    page_ids: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    page_size: int
    device: torch.device
    _flattened: dict[int, BlockMetadata] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls, page_ids: Sequence[Sequence[int]], seq_lens: Sequence[int], page_size: int, device: torch.device | str
    ) -> BlockMetadata:
        """Describe a batch.

        Raises:
            ValueError: a length is negative or its pages end before it, or a page is the reserved one.
        """
        if len(page_ids) != len(seq_lens):
            raise ValueError(f"{len(page_ids)} page lists and {len(seq_lens)} lengths")
        for index, (pages, length) in enumerate(zip(page_ids, seq_lens, strict=True)):
            if not 0 <= length <= len(pages) * page_size:
                raise ValueError(f"request {index}: length {length} does not fit {len(pages)} pages of {page_size} rows")
            if RESERVED_PAGE in pages:
                raise ValueError(f"request {index}: page {RESERVED_PAGE} is reserved")
        return cls(tuple(map(tuple, page_ids)), tuple(seq_lens), page_size, torch.device(device))

    @property
    def batch_size(self) -> int:
        """B"""
        return len(self.lengths)

    @cached_property
    def max_seq_len(self) -> int:
        """The longest length; 0 for an empty batch."""
        return max(self.lengths, default=0)

    @cached_property
    def seq_lens(self) -> Tensor:
        """[B] int32"""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def page_table(self) -> Tensor:
        """[B, P] int32, P * page_size a multiple of 128.

        Kernels load masked rows too and multiply them by 0, so a row is padded with a page that holds finite numbers: its own
        last one. Only a request without pages has the reserved page.
        """
        step = max(TABLE_ALIGNMENT_ROWS // self.page_size, 1)
        used = max((-(-length // self.page_size) for length in self.lengths), default=0)
        width = max(-(-used // step), 1) * step
        rows = []
        for pages, length in zip(self.page_ids, self.lengths, strict=True):
            row = pages[: -(-length // self.page_size)]
            rows.append([*row, *[row[-1] if row else RESERVED_PAGE] * (width - len(row))])
        return torch.tensor(rows, dtype=torch.int32, device=self.device).view(-1, width)

    @cached_property
    def row_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each request, the slot ranges [a, b) its rows [0, length) lie in; neighbouring pages make one range."""
        return tuple(self._ranges(0, index) for index in range(self.batch_size))

    def windowed_ranges(self, num_rows: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """As `row_ranges`, for the last `num_rows` rows of each request."""
        starts = [max(length - num_rows, 0) for length in self.lengths]
        return tuple(self._ranges(start, index) for index, start in enumerate(starts))

    def flattened(self, num_slots: int) -> BlockMetadata:
        """One row per slot: row b * num_slots + s is slot s of request b. Made once."""
        if num_slots not in self._flattened:
            self._flattened[num_slots] = BlockMetadata(
                tuple(pages for pages in self.page_ids for _ in range(num_slots)),
                tuple(length for length in self.lengths for _ in range(num_slots)),
                self.page_size,
                self.device,
            )
        return self._flattened[num_slots]

    def _ranges(self, start: int, index: int) -> tuple[tuple[int, int], ...]:
        pages, length, size = self.page_ids[index], self.lengths[index], self.page_size
        ranges: list[tuple[int, int]] = []
        while start < length:
            page = start // size
            end_page = page + 1
            while end_page * size < length and pages[end_page] == pages[end_page - 1] + 1:
                end_page += 1
            end = min(end_page * size, length)
            first_slot = pages[page] * size + start % size
            ranges.append((first_slot, first_slot + end - start))
            start = end
        return tuple(ranges)
