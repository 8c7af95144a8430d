"""Non-causal attention of draft blocks over the paged pool: the one class a backbone calls.

Every slot of a block sees all context rows and the whole block. The block's own rows are in the pool before the call, and
the lengths count them.

    fused       one call over [B, S, ...]; a request's rows are read once
    flattened   each slot becomes a request of its own, with the pages and the length of its block; rows are read S times

Shape symbols: B requests, S draft_block_size, H query heads, D key_dim, V value_dim.
"""

from __future__ import annotations

import math

from torch import Tensor

from attention.backends import BACKENDS
from attention.backends.base import AttentionBackend
from attention.cache import PagedKVCache
from attention.capabilities import AttentionProblem
from attention.metadata import BlockMetadata as BlockMetadata
from attention.selector import DecodePath, Selection


class BlockAttention:
    """The attention of the layers that share a problem.

    Args:
        selection: backend and path.
        problem: what it serves.
        backend: an instance to use instead of the one that `selection` names.
    """

    def __init__(self, selection: Selection, problem: AttentionProblem, *, backend: AttentionBackend | None = None) -> None:
        self.selection = selection
        self.problem = problem
        self._backend = BACKENDS[selection.backend](problem) if backend is None else backend
        self._is_flattened = selection.path is DecodePath.FLATTENED

    @property
    def returns_lse(self) -> bool:
        """Whether `forward_with_lse` is there."""
        return self._backend.capabilities.lse_base is not None

    def forward(
        self, query: Tensor, cache: PagedKVCache, layer: int, metadata: BlockMetadata, *, softmax_scale: float
    ) -> Tensor:
        """Attend; each request's S slots to all the rows its length counts.

        Args:
            query: [B, S, H, D]
            cache: the pool, with the block's rows written.
            layer: of the pool.
            metadata: of the B requests.
            softmax_scale: multiplies the scores.

        Returns:
            [B, S, H, V] in the query's dtype; zeros for a request of length 0.

        Raises:
            ValueError: a shape does not fit the problem, or a length is shorter than S.
        """
        return self._decode(query, cache, layer, metadata, softmax_scale, return_lse=False)[0]

    def forward_with_lse(
        self, query: Tensor, cache: PagedKVCache, layer: int, metadata: BlockMetadata, *, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the natural log-sum-exp of the scaled scores, [B, S, H] float32; -inf for a length of 0.

        Raises:
            ValueError: as `forward`, or the backend returns none.
        """
        base = self._backend.capabilities.lse_base
        output, lse = self._decode(query, cache, layer, metadata, softmax_scale, return_lse=base is not None)
        if lse is None:
            raise ValueError(f"attention backend {self._backend.name} returns no log-sum-exp")
        return output, lse * math.log(2) if base == "2" else lse

    def _decode(
        self,
        query: Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: BlockMetadata,
        softmax_scale: float,
        *,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_shapes(query, cache, metadata)
        if not self._is_flattened:
            return self._backend.decode(query, cache, layer, metadata, softmax_scale=softmax_scale, return_lse=return_lse)
        batch, slots = query.shape[:2]
        output, lse = self._backend.decode(
            query.flatten(0, 1).unsqueeze(1),
            cache,
            layer,
            metadata.flattened(slots),
            softmax_scale=softmax_scale,
            return_lse=return_lse,
        )
        return output.view(batch, slots, *output.shape[2:]), None if lse is None else lse.view(batch, slots, -1)

    def _check_shapes(self, query: Tensor, cache: PagedKVCache, metadata: BlockMetadata) -> None:
        problem = self.problem
        slots = problem.draft_block_size
        expected = (metadata.batch_size, slots, problem.num_heads, problem.key_dim)
        if tuple(query.shape) != expected:
            raise ValueError(f"query has shape {tuple(query.shape)}, not {expected}")
        if cache.row_shape != problem.row_shape or cache.page_size != problem.page_size:
            raise ValueError(
                f"the pool has rows {cache.row_shape} in pages of {cache.page_size}, "
                f"not {problem.row_shape} in {problem.page_size}"
            )
        if metadata.page_size != problem.page_size:
            raise ValueError(f"the metadata has page_size {metadata.page_size}, not {problem.page_size}")
        if any(0 < length < slots for length in metadata.lengths):
            raise ValueError(f"every length must count the {slots} slots of the block, got {metadata.lengths}")
