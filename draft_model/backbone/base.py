"""What the drafter asks of a backbone, and the parts that all of them share.

Shape symbols: B requests, S draft_block_size, T = B * S block rows, n context rows, E hidden_size, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.block_attention import BlockAttention, BlockMetadata
from attention.cache import PagedKVCache
from attention.capabilities import AttentionKind, AttentionProblem
from draft_model.checkpoint import TensorReader
from draft_model.config import DraftConfig, HiddenAct, MlaGeometry
from draft_model.linear import Linear, rms_norm
from draft_model.rotary import Rotation


@dataclass(frozen=True)
class DraftBlocks:
    """The blocks of one draft forward.

    Args:
        batch_size: B
        rotation: of the T block rows
        slot_mapping: [T] int64, where the rows of the block's own keys and values go
        metadata: pages and lengths, the block included
    """

    batch_size: int
    rotation: Rotation
    slot_mapping: Tensor
    metadata: BlockMetadata


class Backbone(Protocol):
    """The decoder of a draft model, over paged context rows."""

    @property
    def project(self) -> ContextProjection:
        """Fuses raw features [n, F] into the context states [n, E] that every layer reads."""

    def write_context(self, states: Tensor, rotation: Rotation, slot_mapping: Tensor, cache: PagedKVCache) -> None:
        """Write the rows of context states [n, E] to the cache, in every layer."""

    def forward(self, x: Tensor, blocks: DraftBlocks, cache: PagedKVCache, attention: Sequence[BlockAttention]) -> Tensor:
        """Map embedded block tokens [T, E] to final normed states [T, E]; writes the block's own rows on the way."""


def attention_problem(
    config: DraftConfig,
    layer: int,
    *,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None = None,
) -> AttentionProblem:
    """Say what a draft layer needs of an attention backend.

    Args:
        config: of the draft.
        layer: of the draft.
        page_size: rows in a page.
        device: where the pool lies.
        dtype: of queries.
        kv_cache_dtype: of the rows in the pool; None for that of queries.
    """
    geometry = config.attention
    kind: AttentionKind
    if isinstance(geometry, MlaGeometry):
        kind, num_kv_heads, key_dim, value_dim = "mla", 1, geometry.latent_dim, geometry.kv_lora_rank
    else:
        kind, num_kv_heads, key_dim, value_dim = "gqa", geometry.num_kv_heads, geometry.head_dim, geometry.head_dim
    return AttentionProblem(
        kind=kind,
        draft_block_size=config.draft_block_size,
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        kv_cache_dtype=dtype if kv_cache_dtype is None else kv_cache_dtype,
        page_size=page_size,
        device=device,
        sliding_window=config.layer_windows[layer],
    )


@dataclass(frozen=True)
class ProjectionWeights:
    """What it takes to project features elsewhere: `context = norm * rms_normed(weight features)`.

    Args:
        weight: [E, F]
        norm: [E], of the same dtype
        eps: of the root mean square
    """

    weight: Tensor
    norm: Tensor
    eps: float


class ContextProjection:
    """context = norm(W features): the fusion of the target's captured states."""

    def __init__(
        self, config: DraftConfig, tensors: TensorReader, names: tuple[str, str], dtype: torch.dtype, device: torch.device
    ) -> None:
        projection, norm = names
        weight = tensors.take(f"{projection}.weight", config.hidden_size, config.feature_width)
        self._linear = Linear(weight.to(device), dtype)
        self._norm = tensors.take(f"{norm}.weight", config.hidden_size).to(device).to(self._linear.dtype)
        self._eps = config.rms_norm_eps

    @property
    def weights(self) -> ProjectionWeights:
        """As they are multiplied."""
        return ProjectionWeights(self._linear.weight, self._norm, self._eps)

    def __call__(self, features: Tensor) -> Tensor:
        """Map [n, F] to [n, E]."""
        return rms_norm(self._linear(features), self._norm, self._eps)


class Mlp:
    """`down(act(gate x) * up x)`, gate and up in one product."""

    def __init__(
        self, config: DraftConfig, tensors: TensorReader, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        wide, narrow = config.intermediate_size, config.hidden_size
        gate_up = [tensors.take(f"{prefix}.{name}_proj.weight", wide, narrow) for name in ("gate", "up")]
        self._gate_up = Linear(torch.cat(gate_up).to(device), dtype)
        self._down = Linear(tensors.take(f"{prefix}.down_proj.weight", narrow, wide).to(device), dtype)
        self._act: HiddenAct = config.hidden_act

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, E] to [T, E]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        gate = F.silu(gate) if self._act == "silu" else F.gelu(gate, approximate="tanh")
        return self._down(gate * up)
