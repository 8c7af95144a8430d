"""TokenSpeed's MLA decode on Blackwell: fused and non-causal, in bfloat16, float16 or float8.

What the kernel asks for and does not check: page table rows that fill tiles of 128 keys, lengths that are never shorter than
the block, a pool in the queries' dtype, page ids that exist. It validates its workspace, which is int8.

float8 has no scale arguments: queries are rounded without a scale, the key scale goes into the softmax scale and the value
scale into the output scale; the output is bfloat16.

Shape symbols: B requests, Q query rows per request, H query heads, L kv_lora_rank, R rope dim.
"""

from __future__ import annotations

import importlib
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.latent_kernel import LATENT, ROPE, LatentKernelBackend, nothing_attended, without_padding
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem, QueryLenSupport
from attention.metadata import BlockMetadata

_TILE_ROWS = 64


class TokenSpeedMlaBackend(LatentKernelBackend):
    """See the module docstring.

    Args:
        problem: what it serves.
        num_sms: multiprocessors of the device; None asks the device.
    """

    name: ClassVar[str] = "tokenspeed_mla"
    # The package imports even where it cannot work and then fails at the first call; its submodule does not.
    module: ClassVar[str] = "tokenspeed_mla.mla_decode"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        kinds=frozenset({"mla"}),
        query_len_support=QueryLenSupport.UNIFORM,
        supports_non_causal=True,
        supports_non_causal_multi_token=True,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_cache_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        device_types=frozenset({"cuda"}),
        max_num_heads=128,
        page_sizes=frozenset({32, 64}),
        key_value_dims=frozenset({(LATENT + ROPE, LATENT)}),
        lse_base="2",
        kv_dtype_is_query_dtype=True,
        compute_capabilities=frozenset({(10, 0), (10, 3), (10, 7)}),
    )

    def __init__(self, problem: AttentionProblem, *, num_sms: int | None = None) -> None:
        super().__init__(problem)
        self._kernel = importlib.import_module(self.module).tokenspeed_mla_decode
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
        # Partial sums of all splits: the kernel keeps tiles * splits below the number of multiprocessors, and a row of a split
        # is L + 1 floats. The flattened path has more requests of fewer rows, which changes neither bound.
        rows = max(problem.draft_block_size * problem.num_heads, _TILE_ROWS)
        self._workspace = torch.empty(num_sms * rows * (LATENT + 1) * 4, dtype=torch.int8, device=problem.device)

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
        num_slots = query.shape[1]
        if not metadata.max_seq_len:
            return nothing_attended(query, with_lse=return_lse)
        kernel_query = query
        if cache.dtype.itemsize == 1:
            limit = torch.finfo(cache.dtype).max
            kernel_query = query.clamp(-limit, limit).to(cache.dtype)
        result = self._kernel(
            query=kernel_query.contiguous(),
            kv_cache=cache.pages(layer),
            workspace_buffer=self._workspace,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            block_tables=metadata.page_table,
            # A length of 0 leaves the output as it was allocated.
            seq_lens=metadata.seq_lens.clamp(min=num_slots),
            max_seq_len=max(metadata.max_seq_len, num_slots),
            softmax_scale=softmax_scale * cache.key_scale,
            output_scale=cache.value_scale,
            is_var_seq=True,
            # Of one row both masks are the same. The flattened path stands in where the non-causal one fails its probe, so it
            # takes the mask that every other caller of the kernel takes.
            causal_mask=num_slots == 1,
            return_lse=return_lse,
        )
        output: Tensor = result[0] if return_lse else result
        lse: Tensor | None = result[1] if return_lse else None
        output, lse = without_padding(output, lse, metadata)
        return output.to(query.dtype), lse
