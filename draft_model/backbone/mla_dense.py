"""The MLA draft model as one differentiable forward over dense tensors, for training and as a second opinion in tests.

Parameter names are those of a Kimi-K3-DSpark checkpoint. Serving runs the same weights absorbed, over a paged latent cache;
here keys and values are expanded per head and no cache exists.

Shape symbols: B sequences, N context rows, A anchors per sequence, S draft_block_size, H heads, E hidden_size, F feature
width (m * target hidden size), L kv_lora_rank, P nope dim, R rope dim, V vocab_size, D draft_vocab_size, r markov_rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class MlaShape:
    """The sizes of an MLA draft model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    feature_width: int
    vocab_size: int
    draft_vocab_size: int
    markov_rank: int
    rms_norm_eps: float
    rope_theta: float
    confidence_with_markov: bool = True


class RmsNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate_interleaved(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [..., R] by the unit complex numbers rotation [..., R / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).reshape(x.shape)


class MlaAttention(nn.Module):
    """Multi-head latent attention, expanded: a block attends to the context before its anchor and to itself, unmasked."""

    def __init__(self, shape: MlaShape) -> None:
        super().__init__()
        self.shape = shape
        key_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        self.scale = key_dim**-0.5
        self.q_a_proj = nn.Linear(shape.hidden_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RmsNorm(shape.q_lora_rank, shape.rms_norm_eps)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, shape.num_heads * key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(shape.kv_lora_rank, shape.rms_norm_eps)
        expanded = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.v_head_dim, shape.hidden_size, bias=False)

    def expand(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Make keys [B, H, n, P + R] and values [B, H, n, v] of rows x [B, n, E] with rotation [B, n, R / 2]."""
        shape = self.shape
        latent, rope = self.kv_a_proj_with_mqa(x).split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.view(*x.shape[:2], shape.num_heads, -1).transpose(1, 2)
        nope, value = expanded.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        rope = rotate_interleaved(rope, rotation)[:, None].expand(-1, shape.num_heads, -1, -1)
        return torch.cat([nope, rope], dim=-1), value

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], visible: Tensor, rotation: Tensor, block_size: int) -> Tensor:
        """Attend from block rows.

        Args:
            x: [B, A * S, E] normed block states
            context: keys [B, H, N, P + R] and values [B, H, N, v]
            visible: [B, 1, A * S, N] bool, True where a slot may see a context row
            rotation: [B, A * S, R / 2] complex64
            block_size: S
        Returns:
            [B, A * S, E]
        """
        shape = self.shape
        batch, rows, slots = x.shape[0], x.shape[1], block_size
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, rows, shape.num_heads, -1).transpose(1, 2)
        nope, rope = query.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        query = torch.cat([nope, rotate_interleaved(rope, rotation[:, None])], dim=-1) * self.scale
        keys, values = self.expand(x, rotation)
        blocks = (batch, shape.num_heads, rows // slots, slots, -1)
        to_context = (query @ context[0].transpose(-1, -2)).masked_fill(~visible, float("-inf"))
        to_block = query.view(blocks) @ keys.view(blocks).transpose(-1, -2)
        weights = torch.cat([to_context, to_block.reshape(batch, shape.num_heads, rows, slots)], dim=-1).softmax(-1)
        on_context, on_block = torch.split(weights, [context[0].shape[2], slots], dim=-1)
        mixed = on_context @ context[1] + (on_block.reshape(blocks) @ values.view(blocks)).view(
            batch, shape.num_heads, rows, -1
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        return out


class Mlp(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., E] to [..., E]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MlaLayer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, shape: MlaShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = MlaAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(
        self, x: Tensor, context: Tensor, visible: Tensor, rotation: Tensor, context_rotation: Tensor, block_size: int
    ) -> Tensor:
        """Map block states [B, A * S, E]; the context [B, N, E] enters without the input norm."""
        attention = self.self_attn
        keys_values = attention.expand(context, context_rotation)
        x = x + attention(self.input_layernorm(x), keys_values, visible, rotation, block_size)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """The vanilla Markov head: a low-rank bias from the previous token (dspark.md 1.4)."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """A linear estimate of the chance that a draft is accepted, given that those before it were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


@dataclass(frozen=True)
class DenseOutput:
    """One training forward: hidden [B, A, S, E], logits [B, A, S, D] with the Markov bias, confidence logits [B, A, S]."""

    hidden: Tensor
    logits: Tensor
    confidence: Tensor


class DenseMlaDraft(nn.Module):
    """The whole draft model; embedding [V, E] and LM head [D, E] are frozen copies of the target's and not parameters."""

    def __init__(self, shape: MlaShape, embedding: Tensor, lm_head: Tensor, mask_token_id: int) -> None:
        super().__init__()
        self.shape = shape
        self.mask_token_id = mask_token_id
        self.context_proj = nn.Linear(shape.feature_width, shape.hidden_size, bias=False)
        self.context_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(MlaLayer(shape) for _ in range(shape.num_layers))
        self.final_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.markov_head = MarkovHead(shape.vocab_size, shape.draft_vocab_size, shape.markov_rank)
        width = shape.hidden_size + (shape.markov_rank if shape.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(width)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)
        size = shape.qk_rope_head_dim
        frequency = shape.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        self.register_buffer("frequency", frequency, persistent=False)
        self.embedding: Tensor
        self.lm_head: Tensor
        self.frequency: Tensor

    def rotation(self, positions: Tensor) -> Tensor:
        """Return the unit complex numbers [..., R / 2] of positions [...]."""
        angles = positions[..., None].double() * self.frequency
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def hidden(self, features: Tensor, anchor_ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
        """Run the backbone.

        Args:
            features: [B, N, F] float; row t belongs to position t
            anchor_ids: [B, A] token at each anchor
            anchors: [B, A] positions; a block sees context rows before its anchor only
            block_size: S
        Returns:
            [B, A, S, E], after final_norm
        """
        batch, count = anchors.shape
        context = self.context_norm(self.context_proj(features))
        context_positions = torch.arange(features.shape[1], device=features.device)
        ids = torch.full((batch, count, block_size), self.mask_token_id, device=features.device)
        ids[:, :, 0] = anchor_ids
        x = F.embedding(ids.view(batch, -1), self.embedding)
        positions = (anchors[:, :, None] + torch.arange(block_size, device=anchors.device)).view(batch, -1)
        visible = context_positions < anchors.repeat_interleave(block_size, dim=1)[:, None, :, None]
        rotation, context_rotation = self.rotation(positions), self.rotation(context_positions)[None]
        for layer in self.layers:
            x = layer(x, context, visible, rotation, context_rotation, block_size)
        out: Tensor = self.final_norm(x).view(batch, count, block_size, -1)
        return out

    def markov_bias(self, previous_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's embedding [..., r] and bias [..., D] of previous tokens (target ids)."""
        embedded = self.markov_head.markov_w1(previous_ids)
        return embedded, self.markov_head.markov_w2(embedded)

    def confidence_logits(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return [...] from hidden [..., E] and the Markov embedding [..., r]."""
        if self.shape.confidence_with_markov:
            hidden = torch.cat([hidden, embedded], dim=-1)
        out: Tensor = self.confidence_head.proj(hidden).squeeze(-1)
        return out

    def forward(self, features: Tensor, anchor_ids: Tensor, anchors: Tensor, previous_ids: Tensor) -> DenseOutput:
        """Teacher-forced forward; previous_ids [B, A, S] are x_0..x_{S-1} as target ids. See `hidden` for the rest."""
        hidden = self.hidden(features, anchor_ids, anchors, previous_ids.shape[2])
        embedded, bias = self.markov_bias(previous_ids)
        logits = F.linear(hidden, self.lm_head) + bias
        return DenseOutput(hidden, logits, self.confidence_logits(hidden, embedded))
