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

from attention.backends.base import AttentionBackend, import_reasons, missing_package
from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem, QueryLenSupport
from attention.metadata import BlockMetadata

# The package imports even where it cannot work and then fails at the first call; its submodule does not.
_MODULE = "tokenspeed_mla.mla_decode"
_LATENT, _ROPE = 512, 64
_TILE_ROWS = 64


class TokenSpeedMlaBackend(AttentionBackend):
    """See the module docstring.

    Args:
        problem: what it serves.
        num_sms: multiprocessors of the device; None asks the device.
    """

    name: ClassVar[str] = "tokenspeed_mla"
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
        key_value_dims=frozenset({(_LATENT + _ROPE, _LATENT)}),
        lse_base="2",
        kv_dtype_is_query_dtype=True,
        compute_capabilities=frozenset({(10, 0), (10, 3), (10, 7)}),
    )

    def __init__(self, problem: AttentionProblem, *, num_sms: int | None = None) -> None:
        super().__init__(problem)
        self._kernel = importlib.import_module(_MODULE).tokenspeed_mla_decode
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
        # Partial sums of all splits: the kernel keeps tiles * splits below the number of multiprocessors, and a row of a split
        # is L + 1 floats. The flattened path has more requests of fewer rows, which changes neither bound.
        rows = max(problem.draft_block_size * problem.num_heads, _TILE_ROWS)
        self._workspace = torch.empty(num_sms * rows * (_LATENT + 1) * 4, dtype=torch.int8, device=problem.device)

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """See `AttentionBackend`."""
        # Importing takes seconds, so only where it could be of use.
        return super().machine_reasons() + missing_package("tokenspeed_mla") or import_reasons(_MODULE)

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
            nothing = query.new_full((batch, num_slots, heads), -torch.inf, dtype=torch.float32)
            return query.new_zeros(batch, num_slots, heads, _LATENT), nothing if return_lse else None
        kernel_query = query
        if cache.dtype.itemsize == 1:
            limit = torch.finfo(cache.dtype).max
            kernel_query = query.clamp(-limit, limit).to(cache.dtype)
        result = self._kernel(
            query=kernel_query.contiguous(),
            kv_cache=cache.pages(layer),
            workspace_buffer=self._workspace,
            kv_lora_rank=_LATENT,
            qk_rope_head_dim=_ROPE,
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
        if not all(metadata.lengths):
            is_padding = (metadata.seq_lens == 0)[:, None, None]
            output = output.masked_fill(is_padding[..., None], 0)
            lse = None if lse is None else lse.masked_fill(is_padding, -torch.inf)
        return output.to(query.dtype), lse
