"""FlashInfer's paged MLA on Ampere to Hopper: fused and non-causal through its fa2 and fa3 kernels.

A wrapper is planned once for each batch, on the host, and run by every layer. float8 pools keep queries in bfloat16 and take
the scale of the rows at run time. Newer devices get other kernels from the same wrapper, and of those the ones that take a
block mask it causally: they are left to the other backends.

Shape symbols: B requests, Q query rows per request, T = B * Q query rows, H query heads.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.latent_kernel import LATENT, ROPE, LatentKernelBackend, nothing_attended, without_padding
from attention.cache import RESERVED_PAGE, PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem, QueryLenSupport
from attention.metadata import BlockMetadata

_WORKSPACE_BYTES = 128 * 2**20


class FlashInferBackend(LatentKernelBackend):
    """See the module docstring."""

    name: ClassVar[str] = "flashinfer"
    module: ClassVar[str] = "flashinfer.mla"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        kinds=frozenset({"mla"}),
        query_len_support=QueryLenSupport.VARLEN,
        supports_non_causal=True,
        supports_non_causal_multi_token=True,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_cache_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        device_types=frozenset({"cuda"}),
        max_num_heads=128,
        key_value_dims=frozenset({(LATENT + ROPE, LATENT)}),
        lse_base="2",
        kv_dtype_is_query_dtype=True,
        compute_capabilities=frozenset({(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)}),
    )

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._module = importlib.import_module(self.module)
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
        # The metadata object is the batch; an address would come back for another one.
        self._planned: tuple[weakref.ref[BlockMetadata], tuple[int, float, bool], Any] | None = None

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
        """See `AttentionBackend`."""
        batch, num_slots, heads, _ = query.shape
        if not metadata.max_seq_len:
            return nothing_attended(query, with_lse=return_lse)
        is_float8 = cache.dtype.itemsize == 1
        result = self._wrapper_for(metadata, num_slots, softmax_scale, return_lse).run(
            query=query.flatten(0, 1).contiguous(),
            kv_cache=cache.pages(layer),
            return_lse=return_lse,
            ckv_scale=cache.key_scale if is_float8 else None,
            kpe_scale=cache.key_scale if is_float8 else None,
        )
        output: Tensor = (result[0] if return_lse else result).view(batch, num_slots, heads, LATENT)
        lse: Tensor | None = result[1].view(batch, num_slots, heads) if return_lse else None
        return without_padding(output, lse, metadata)

    def _wrapper_for(self, metadata: BlockMetadata, num_slots: int, softmax_scale: float, return_lse: bool) -> Any:
        asked = num_slots, softmax_scale, return_lse
        if self._planned is None or self._planned[0]() is not metadata or self._planned[1] != asked:
            self._planned = weakref.ref(metadata), asked, self._plan(metadata, *asked)
        return self._planned[2]

    def _plan(self, metadata: BlockMetadata, num_slots: int, softmax_scale: float, return_lse: bool) -> Any:
        problem = self.problem
        # A padding request is planned as the shortest one there is and its output thrown away.
        lengths = [length or num_slots for length in metadata.lengths]
        counts = [-(-length // problem.page_size) for length in lengths]
        pages = [
            [*own[:count], *[RESERVED_PAGE] * (count - len(own))] for own, count in zip(metadata.page_ids, counts, strict=True)
        ]
        wrapper = self._module.BatchMLAPagedAttentionWrapper(self._workspace, backend="auto")
        wrapper.plan(
            metadata=self._module.MLAPlanMetadata.csr(
                qo_indptr=_int32(range(0, (len(lengths) + 1) * num_slots, num_slots)),
                kv_indptr=torch.cat([_int32([0]), _int32(counts).cumsum(0, dtype=torch.int32)]),
                kv_indices=_int32([page for own in pages for page in own]),
                kv_len_arr=_int32(lengths),
            ),
            num_heads=problem.num_heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=problem.page_size,
            causal=False,
            sm_scale=softmax_scale,
            q_data_type=problem.dtype,
            kv_data_type=problem.kv_cache_dtype,
            query_layout="packed",
            kv_cache_layout="packed",
            lse_mode="base2" if return_lse else "none",
            scale_mode="kv-per-tensor" if problem.kv_cache_dtype.itemsize == 1 else "default",
        )
        return wrapper


def _int32(values: Any) -> Tensor:
    """Plans are made on the host, so their tensors stay there."""
    return torch.tensor(list(values), dtype=torch.int32)
