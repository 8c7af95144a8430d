"""FlashMLA's dense decode on Hopper: fused and non-causal, in bfloat16 or float16.

Its schedule is frozen from the lengths of the first call it is given to, so each batch gets one of its own, which the layers
share. One-token queries are never causal there, so the flattened path needs nothing else.

Shape symbols: B requests, Q query rows per request, H query heads.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.latent_kernel import LATENT, ROPE, LatentKernelBackend, nothing_attended, without_padding
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem, QueryLenSupport
from attention.metadata import BlockMetadata


class FlashMlaBackend(LatentKernelBackend):
    """See the module docstring."""

    name: ClassVar[str] = "flash_mla"
    module: ClassVar[str] = "flash_mla.flash_mla_interface"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        kinds=frozenset({"mla"}),
        query_len_support=QueryLenSupport.UNIFORM,
        supports_non_causal=True,
        supports_non_causal_multi_token=True,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_cache_dtypes=frozenset({torch.bfloat16, torch.float16}),
        device_types=frozenset({"cuda"}),
        max_num_heads=128,
        page_sizes=frozenset({64}),
        key_value_dims=frozenset({(LATENT + ROPE, LATENT)}),
        # It returns one, whose base is not documented: none is claimed.
        lse_base=None,
        kv_dtype_is_query_dtype=True,
        compute_capabilities=frozenset({(9, 0)}),
    )

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._module = importlib.import_module(self.module)
        # SGLang's build has dense decoding on its legacy side alone; others have one side and no such argument.
        arguments = inspect.signature(self._module.flash_mla_with_kvcache).parameters
        self._side = {"use_legacy": True} if "use_legacy" in arguments else {}
        # The metadata object is the batch; an address would come back for another one.
        self._schedule: tuple[weakref.ref[BlockMetadata], int, Any] | None = None

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
        """See `AttentionBackend`; no log-sum-exp is returned."""
        if return_lse:
            raise ValueError("flash_mla claims no log-sum-exp")
        num_slots = query.shape[1]
        if not metadata.max_seq_len:
            return nothing_attended(query, with_lse=False)
        output, _ = self._module.flash_mla_with_kvcache(
            q=query.contiguous(),
            k_cache=cache.pages(layer).unsqueeze(2),  # [pages, 64, 1, 576]
            block_table=metadata.page_table,
            cache_seqlens=metadata.seq_lens.clamp(min=num_slots),
            head_dim_v=LATENT,
            tile_scheduler_metadata=self._schedule_of(metadata, num_slots),
            softmax_scale=softmax_scale,
            causal=False,
            **self._side,
        )
        return without_padding(output, None, metadata)

    def _schedule_of(self, metadata: BlockMetadata, num_slots: int) -> Any:
        if self._schedule is None or self._schedule[0]() is not metadata or self._schedule[1] != num_slots:
            schedule, _ = self._module.get_mla_metadata()
            self._schedule = weakref.ref(metadata), num_slots, schedule
        return self._schedule[2]
