"""The grouped-query backbone of Qwen3 DSpark and DFlash drafts, and of Gemma4 DSpark, which adds norms around each part.

Per token and layer the cache holds the normed and rotated keys and the values, [2, G, D]. Context rows enter the key and value
projections without the input norm; block rows pass it. Both use the same weights.

Shape symbols: B requests, S draft_block_size, T = B * S block rows, n context rows, H heads, G KV heads, D head_dim, E
hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.block_attention import BlockAttention
from attention.cache import PagedKVCache
from draft_model.backbone.base import ContextProjection, DraftBlocks, Mlp
from draft_model.checkpoint import TensorReader
from draft_model.config import DraftConfig, GqaGeometry
from draft_model.linear import Linear, compute_dtype, rms_norm
from draft_model.rotary import Rotation


@dataclass(frozen=True)
class _Sandwich:
    """What Gemma4 puts around the MLP and after the layer."""

    pre_mlp_norm: Tensor  # [E]
    post_mlp_norm: Tensor  # [E]
    scalar: Tensor  # [1]


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor  # [E]
    query_kv: Linear  # E -> (H + 2 G) * D, or (H + G) * D where a value is its raw key
    query_norm: Tensor  # [D]
    key_norm: Tensor  # [D]
    output: Linear  # H * D -> E
    post_attention_norm: Tensor  # [E]; of the attention's output in a sandwich, else of the MLP's input
    mlp: Mlp
    sandwich: _Sandwich | None


class GqaBackbone:
    """Grouped-query draft layers over a paged cache of keys and values. See `Backbone` for the methods.

    Args:
        config: with a `GqaGeometry`.
        tensors: the checkpoint.
        dtype: of the weights.
        device: where it runs.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """

    def __init__(
        self, config: DraftConfig, geometry: GqaGeometry, tensors: TensorReader, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self._geometry = geometry
        self._dtype, self._device = dtype, device
        self._compute_dtype = compute_dtype(dtype, device)
        self.project = ContextProjection(config, tensors, ("fc", "hidden_norm"), dtype, device)
        key_value = [self._take_key_value(tensors, index) for index in range(config.num_layers)]
        # Every layer's rows of a context state in one product.
        self._context_key_value = Linear(torch.cat(key_value).to(device), dtype)
        self._layers = [self._build_layer(tensors, index, key_value[index]) for index in range(config.num_layers)]
        self._final_norm = self._take_norm(tensors, "norm.weight", config.hidden_size)

    def write_context(self, states: Tensor, rotation: Rotation, slot_mapping: Tensor, cache: PagedKVCache) -> None:
        """See `Backbone`."""
        projected = self._context_key_value(states)
        projected = projected.view(len(states), len(self._layers), self._num_projections, self._geometry.head_dim)
        for index, layer in enumerate(self._layers):
            cache.write(index, slot_mapping, self._rows(projected[:, index], layer, rotation))

    def forward(self, x: Tensor, blocks: DraftBlocks, cache: PagedKVCache, attention: Sequence[BlockAttention]) -> Tensor:
        """See `Backbone`."""
        heads, dim, eps = self.config.num_heads, self._geometry.head_dim, self.config.rms_norm_eps
        for index, layer in enumerate(self._layers):
            projected = layer.query_kv(rms_norm(x, layer.input_norm, eps)).view(len(x), -1, dim)
            cache.write(index, blocks.slot_mapping, self._rows(projected[:, heads:], layer, blocks.rotation))
            query = blocks.rotation.apply(rms_norm(projected[:, :heads], layer.query_norm, eps))
            mixed = attention[index].forward(
                query.view(blocks.batch_size, -1, heads, dim),
                cache,
                index,
                blocks.metadata,
                softmax_scale=self._geometry.softmax_scale,
            )
            x = self._add_parts(x, layer.output(mixed.reshape(len(x), -1)), layer)
        return rms_norm(x, self._final_norm, eps)

    def _add_parts(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        """Add the attention's output [T, E] to the residual stream x [T, E], then the MLP's."""
        eps = self.config.rms_norm_eps
        if layer.sandwich is None:
            x = x + attended
            return x + layer.mlp(rms_norm(x, layer.post_attention_norm, eps))
        x = x + rms_norm(attended, layer.post_attention_norm, eps)
        mlp = layer.mlp(rms_norm(x, layer.sandwich.pre_mlp_norm, eps))
        return (x + rms_norm(mlp, layer.sandwich.post_mlp_norm, eps)) * layer.sandwich.scalar

    def _rows(self, projected: Tensor, layer: _Layer, rotation: Rotation) -> Tensor:
        """Make cache rows [m, 2, G, D] of projected rows [m, 2 G, D], or [m, G, D] where a value is its raw key."""
        groups, eps = self._geometry.num_kv_heads, self.config.rms_norm_eps
        keys, values = projected[:, :groups], projected[:, -groups:]
        if self._geometry.normalises_value:
            values = F.rms_norm(values, values.shape[-1:], eps=eps)
        return torch.stack([rotation.apply(rms_norm(keys, layer.key_norm, eps)), values], dim=1)

    @property
    def _num_projections(self) -> int:
        return self._geometry.num_kv_heads * (2 if self._geometry.has_value_proj else 1)

    def _take_key_value(self, tensors: TensorReader, index: int) -> Tensor:
        """Take the key projection of a layer, and the value projection below it where there is one."""
        width = self._geometry.num_kv_heads * self._geometry.head_dim
        names = ("k_proj", "v_proj") if self._geometry.has_value_proj else ("k_proj",)
        return torch.cat(
            [tensors.take(f"layers.{index}.self_attn.{name}.weight", width, self.config.hidden_size) for name in names]
        )

    def _take_norm(self, tensors: TensorReader, name: str, size: int) -> Tensor:
        return tensors.take(name, size).to(self._device, self._compute_dtype)

    def _build_layer(self, tensors: TensorReader, index: int, key_value: Tensor) -> _Layer:
        config, device, dim = self.config, self._device, self._geometry.head_dim
        prefix = f"layers.{index}."
        attention = prefix + "self_attn."
        query = tensors.take(attention + "q_proj.weight", config.num_heads * dim, config.hidden_size)
        output = tensors.take(attention + "o_proj.weight", config.hidden_size, config.num_heads * dim)
        return _Layer(
            input_norm=self._take_norm(tensors, prefix + "input_layernorm.weight", config.hidden_size),
            query_kv=Linear(torch.cat([query, key_value]).to(device), self._dtype),
            query_norm=self._take_norm(tensors, attention + "q_norm.weight", dim),
            key_norm=self._take_norm(tensors, attention + "k_norm.weight", dim),
            output=Linear(output.to(device), self._dtype),
            post_attention_norm=self._take_norm(tensors, prefix + "post_attention_layernorm.weight", config.hidden_size),
            mlp=Mlp(config, tensors, prefix + "mlp", self._dtype, device),
            sandwich=self._take_sandwich(tensors, prefix) if self._geometry.has_sandwich_norms else None,
        )

    def _take_sandwich(self, tensors: TensorReader, prefix: str) -> _Sandwich:
        size = self.config.hidden_size
        return _Sandwich(
            pre_mlp_norm=self._take_norm(tensors, prefix + "pre_feedforward_layernorm.weight", size),
            post_mlp_norm=self._take_norm(tensors, prefix + "post_feedforward_layernorm.weight", size),
            scalar=self._take_norm(tensors, prefix + "layer_scalar", 1),
        )
