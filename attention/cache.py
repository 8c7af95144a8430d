"""The paged pool of context rows, and who holds its pages.

Row r of a session lies in `page_ids[r // page_size]` at offset `r % page_size`, the same in every layer; its slot is
`page_id * page_size + offset`. Page 0 belongs to no one: it is never handed out and holds NaN, so that a page table left at
zero shows in the first output and not in the acceptance rate. All other pages start as zeros, because kernels read whole
tiles and multiply the rows they mask by 0.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attention.capabilities import AttentionProblem

RESERVED_PAGE = 0


class OutOfPages(RuntimeError):  # noqa: N818 -- a fact about the pool, which callers handle
    """Fewer pages are free than were asked for; nothing was taken."""

    def __init__(self, wanted: int, num_free: int) -> None:
        self.wanted = wanted
        self.num_free = num_free
        super().__init__(f"{wanted} pages wanted, {num_free} free")


class PageAllocator:
    """Free pages and reference counts. The lowest free pages go first, so that a session's pages tend to be neighbours.

    Args:
        num_pages: pages in the pool, the reserved page 0 included.

    Raises:
        ValueError: no page would be left to hand out.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs 2 pages or more, one of them reserved; got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(1, num_pages))  # a heap
        self._reference_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free)

    def reference_count(self, page: int) -> int:
        """How many hold a page; 0 if it is free."""
        return self._reference_counts[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference. `pop()` on the result yields them upwards.

        Raises:
            OutOfPages: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = [heapq.heappop(self._free) for _ in range(count)][::-1]
        for page in pages:
            self._reference_counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page.

        Raises:
            ValueError: a page is free, or reserved.
        """
        for page in pages:
            if self._reference_counts[page] < 1:
                raise ValueError(f"page {page} is held by no one")
            self._reference_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page; a page without any is free.

        Raises:
            ValueError: a page is free already, or reserved.
        """
        for page in pages:
            if self._reference_counts[page] < 1:
                raise ValueError(f"page {page} is held by no one")
            self._reference_counts[page] -= 1
            if not self._reference_counts[page]:
                heapq.heappush(self._free, page)


class PagedKVCache:
    """The rows of every layer, in pages.

    Args:
        num_layers: draft layers.
        num_pages: pages of each layer, the reserved page 0 included.
        page_size: rows in a page.
        row_shape: of one row; `AttentionProblem.row_shape`.
        dtype: of the stored rows. For float8_e4m3fn a row is stored divided by its scale.
        device: where the pool lies.
        key_scale: of stored keys (of whole rows for `mla`).
        value_scale: of stored values; `mla` values are part of the key row, and this must equal `key_scale`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        row_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        if num_layers < 1 or num_pages < 2 or page_size < 1:
            raise ValueError(f"cannot make a pool of {num_layers} layers, {num_pages} pages and page_size {page_size}")
        if len(row_shape) == 1 and key_scale != value_scale:
            raise ValueError(f"a latent row has one scale, got {key_scale} and {value_scale}")
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.row_shape = tuple(row_shape)
        self.dtype, self.device = dtype, torch.device(device)
        self.key_scale, self.value_scale = key_scale, value_scale
        pool = torch.zeros(num_layers, num_pages, page_size, *row_shape, dtype=dtype, device=device)
        pool[:, RESERVED_PAGE] = math.nan
        self._pool = pool
        self._pages = list(pool.unbind(0))
        self._rows = [pages.flatten(0, 1) for pages in self._pages]
        # Not every device copies float8; bytes will do.
        self._bytes = pool.view(torch.uint8) if dtype.itemsize == 1 else pool
        self._write_rows = [layer.flatten(0, 1) for layer in self._bytes.unbind(0)]
        self._scales = self._row_scales() if dtype.itemsize == 1 else None

    @classmethod
    def for_problem(
        cls, problem: AttentionProblem, *, num_layers: int, num_pages: int, key_scale: float = 1.0, value_scale: float = 1.0
    ) -> PagedKVCache:
        """The pool of layers that share a problem's rows."""
        return cls(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=problem.page_size,
            row_shape=problem.row_shape,
            dtype=problem.kv_cache_dtype,
            device=problem.device,
            key_scale=key_scale,
            value_scale=value_scale,
        )

    @staticmethod
    def page_bytes(*, num_layers: int, page_size: int, row_shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that one page takes in all layers."""
        return num_layers * page_size * math.prod(row_shape) * dtype.itemsize

    def pages(self, layer: int) -> Tensor:
        """The pool of one layer, [num_pages, page_size, *row_shape]."""
        return self._pages[layer]

    def rows(self, layer: int) -> Tensor:
        """The pool of one layer by slot, [num_pages * page_size, *row_shape]."""
        return self._rows[layer]

    def write(self, layer: int, slot_mapping: Tensor, rows: Tensor) -> None:
        """Write rows [n, *row_shape] of any float dtype to slots [n] int64."""
        if self._scales is not None:
            # Past the range float8_e4m3fn has NaN and no infinity.
            limit = torch.finfo(self.dtype).max
            rows = (rows.float() / self._scales).clamp_(-limit, limit).to(self.dtype).view(torch.uint8)
        elif rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        self._write_rows[layer].index_copy_(0, slot_mapping, rows)

    def fill(self, value: float) -> None:
        """Set every number of every page, the reserved one too. For tests and probes."""
        self._pool.fill_(value)

    def copy_page(self, source: int, destination: int) -> None:
        """Copy the rows of one page to another, in every layer."""
        self._bytes[:, destination] = self._bytes[:, source]

    def _row_scales(self) -> Tensor:
        if len(self.row_shape) == 1:
            return torch.tensor(self.key_scale, device=self.device)
        return torch.tensor([self.key_scale, self.value_scale], device=self.device).view(2, 1, 1)


def slots_of(page_ids: Sequence[int], first_row: int, num_rows: int, page_size: int) -> list[int]:
    """The slots of rows [first_row, first_row + num_rows) of a session.

    Raises:
        ValueError: the pages end before the rows do. Rows never wrap around.
    """
    if first_row < 0 or first_row + num_rows > len(page_ids) * page_size:
        raise ValueError(f"rows [{first_row}, {first_row + num_rows}) do not fit {len(page_ids)} pages of {page_size} rows")
    return [page_ids[row // page_size] * page_size + row % page_size for row in range(first_row, first_row + num_rows)]
