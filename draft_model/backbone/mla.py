"""The MLA backbone of Kimi-K3-DSpark, absorbed: attention runs over latent rows and no key or value is ever expanded.

Per token and layer the cache holds one row [norm(latent) | rotated rope part]. A head's key is `W_uk latent`, so its score is
`(W_uk^T query) . latent`: the query is mapped into latent space once, and the value projection comes after the weighted sum.

Context rows enter without the input norm; block rows pass it. Both then go through the same kv_a projection.

Shape symbols: B requests, S draft_block_size, T = B * S block rows, n context rows, H heads, E hidden_size, Q q_lora_rank,
L kv_lora_rank, P nope dim, R rope dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.block_attention import BlockAttention
from attention.cache import PagedKVCache
from draft_model.backbone.base import ContextProjection, DraftBlocks, Mlp
from draft_model.checkpoint import TensorReader
from draft_model.config import DraftConfig, MlaGeometry
from draft_model.linear import Linear, compute_dtype, rms_norm
from draft_model.rotary import Rotation


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor  # [E]
    query_kv_a: Linear  # E -> Q + L + R
    query_norm: Tensor  # [Q]
    query_b: Linear  # Q -> H * (P + R)
    latent_norm: Tensor  # [L]
    key_up: Tensor  # [H, P, L]
    value_up: Tensor  # [H, L, v]
    output: Linear  # H * v -> E
    post_attention_norm: Tensor  # [E]
    mlp: Mlp


class MlaBackbone:
    """Latent-attention draft layers over a paged latent cache. See `Backbone` for the methods.

    Args:
        config: with an `MlaGeometry`.
        tensors: the checkpoint.
        dtype: of the weights.
        device: where it runs.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """

    def __init__(
        self, config: DraftConfig, geometry: MlaGeometry, tensors: TensorReader, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self._geometry = geometry
        self._dtype, self._device = dtype, device
        self._compute_dtype = compute_dtype(dtype, device)
        self.project = ContextProjection(config, tensors, ("context_proj", "context_norm"), dtype, device)
        kv_a = [self._take_kv_a(tensors, index) for index in range(config.num_layers)]
        # Every layer's rows of a context state in one product.
        self._context_kv_a = Linear(torch.cat(kv_a).to(device), dtype)
        self._layers = [self._build_layer(tensors, index, kv_a[index]) for index in range(config.num_layers)]
        self._final_norm = self._take_norm(tensors, "final_norm.weight", config.hidden_size)
        self._softmax_scale = (geometry.qk_nope_head_dim + geometry.qk_rope_head_dim) ** -0.5 * config.rope.softmax_factor

    def write_context(self, states: Tensor, rotation: Rotation, slot_mapping: Tensor, cache: PagedKVCache) -> None:
        """See `Backbone`."""
        rows = self._context_kv_a(states).view(len(states), len(self._layers), self._geometry.latent_dim)
        for index, layer in enumerate(self._layers):
            cache.write(index, slot_mapping, self._latent_rows(rows[:, index], layer, rotation))

    def forward(self, x: Tensor, blocks: DraftBlocks, cache: PagedKVCache, attention: Sequence[BlockAttention]) -> Tensor:
        """See `Backbone`."""
        config, geometry, eps = self.config, self._geometry, self.config.rms_norm_eps
        rows, heads, latent = len(x), config.num_heads, geometry.kv_lora_rank
        split = [geometry.q_lora_rank, geometry.latent_dim]
        for index, layer in enumerate(self._layers):
            compressed, kv_a = torch.split(layer.query_kv_a(rms_norm(x, layer.input_norm, eps)), split, dim=-1)
            cache.write(index, blocks.slot_mapping, self._latent_rows(kv_a, layer, blocks.rotation))
            query = layer.query_b(rms_norm(compressed, layer.query_norm, eps)).view(rows, heads, -1)
            nope, rope = torch.split(query, [geometry.qk_nope_head_dim, geometry.qk_rope_head_dim], dim=-1)
            absorbed = torch.bmm(nope.transpose(0, 1), layer.key_up).transpose(0, 1)
            absorbed = torch.cat([absorbed, blocks.rotation.apply(rope)], dim=-1)
            mixed = attention[index].forward(
                absorbed.view(blocks.batch_size, -1, heads, geometry.latent_dim),
                cache,
                index,
                blocks.metadata,
                softmax_scale=self._softmax_scale,
            )
            values = torch.bmm(mixed.reshape(rows, heads, latent).transpose(0, 1), layer.value_up)
            x = x + layer.output(values.transpose(0, 1).reshape(rows, -1))
            x = x + layer.mlp(rms_norm(x, layer.post_attention_norm, eps))
        return rms_norm(x, self._final_norm, eps)

    def _latent_rows(self, kv_a: Tensor, layer: _Layer, rotation: Rotation) -> Tensor:
        """Make cache rows [m, L + R] of projected rows [m, L + R]."""
        latent, rope = torch.split(kv_a, [self._geometry.kv_lora_rank, self._geometry.qk_rope_head_dim], dim=-1)
        rope = rotation.apply(rope[:, None])[:, 0]
        return torch.cat([rms_norm(latent, layer.latent_norm, self.config.rms_norm_eps), rope], dim=-1)

    def _take_kv_a(self, tensors: TensorReader, index: int) -> Tensor:
        name = f"layers.{index}.self_attn.kv_a_proj_with_mqa.weight"
        return tensors.take(name, self._geometry.latent_dim, self.config.hidden_size)

    def _take_norm(self, tensors: TensorReader, name: str, size: int) -> Tensor:
        return tensors.take(name, size).to(self._device, self._compute_dtype)

    def _build_layer(self, tensors: TensorReader, index: int, kv_a: Tensor) -> _Layer:
        config, geometry, device = self.config, self._geometry, self._device
        prefix = f"layers.{index}."
        attention = prefix + "self_attn."
        heads, nope, value = config.num_heads, geometry.qk_nope_head_dim, geometry.v_head_dim
        query_a = tensors.take(attention + "q_a_proj.weight", geometry.q_lora_rank, config.hidden_size)
        query_b = tensors.take(attention + "q_b_proj.weight", heads * (nope + geometry.qk_rope_head_dim), geometry.q_lora_rank)
        kv_b = tensors.take(attention + "kv_b_proj.weight", heads * (nope + value), geometry.kv_lora_rank)
        kv_up = kv_b.to(device, self._compute_dtype).view(heads, nope + value, -1)
        key_up, value_up = torch.split(kv_up, [nope, value], dim=1)
        output = tensors.take(attention + "o_proj.weight", config.hidden_size, heads * value)
        return _Layer(
            input_norm=self._take_norm(tensors, prefix + "input_layernorm.weight", config.hidden_size),
            query_kv_a=Linear(torch.cat([query_a, kv_a]).to(device), self._dtype),
            query_norm=self._take_norm(tensors, attention + "q_a_layernorm.weight", geometry.q_lora_rank),
            query_b=Linear(query_b.to(device), self._dtype),
            latent_norm=self._take_norm(tensors, attention + "kv_a_layernorm.weight", geometry.kv_lora_rank),
            key_up=key_up.contiguous(),
            value_up=value_up.transpose(1, 2).contiguous(),
            output=Linear(output.to(device), self._dtype),
            post_attention_norm=self._take_norm(tensors, prefix + "post_attention_layernorm.weight", config.hidden_size),
            mlp=Mlp(config, tensors, prefix + "mlp", self._dtype, device),
        )
