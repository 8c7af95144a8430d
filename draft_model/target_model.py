"""The embedded target: a Llama-shaped decoder that verifies several tokens for the price of one.

A verification step feeds an anchor and its drafts through the target at once. It only pays if those rows cost what one row
costs, so every linear layer is packed once for skinny inputs, and the arithmetic of a row does not depend on how many rows
travel with it: greedy decoding with and without drafts then picks the same tokens, and not only nearly the same.

Shape symbols: B requests, Q query rows per request, T = B * Q, N rows of context, G key/value heads, R query heads per
key/value head, D head_dim, E hidden_size, V vocab_size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from draft_model.errors import CheckpointError
from draft_model.linear import PackedLinear, WeightDtype, padded_rows

# The context that attention reads is rounded up to whole spans, so that a row's sums are cut at the same places whether the
# step carries one row or a whole block.
_CONTEXT_SPAN = 128


@dataclass(frozen=True)
class TargetConfig:
    """The fields of a Llama `config.json` that the embedded target reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    model_type: str

    @classmethod
    def load(cls, path: Path) -> TargetConfig:
        """Read `path/config.json`.

        Raises:
            CheckpointError: the file is missing or malformed, a key is missing, or the model is of another kind.
        """
        file = path / "config.json"
        try:
            raw = json.loads(file.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"no target model at {path}: config.json is missing") from None
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from None
        if raw.get("model_type") != "llama":
            raise CheckpointError(f"{file}: model_type is {raw.get('model_type')!r}, the embedded target runs 'llama'")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"{file}: rope_type {rope['rope_type']!r} is not supported by the embedded target")
        theta = rope.get("rope_theta", raw.get("rope_theta"))
        if theta is None:
            raise CheckpointError(f"{file}: rope_theta is missing")
        if raw.get("hidden_act") != "silu":
            raise CheckpointError(f"{file}: hidden_act is {raw.get('hidden_act')!r}, expected 'silu'")
        if raw.get("attention_bias") or raw.get("mlp_bias"):
            raise CheckpointError(f"{file}: attention_bias and mlp_bias must be false for the embedded target")
        try:
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=raw["num_attention_heads"],
                num_kv_heads=raw["num_key_value_heads"],
                head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
                rms_norm_eps=raw["rms_norm_eps"],
                rope_theta=float(theta),
                max_position_embeddings=raw["max_position_embeddings"],
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                model_type=raw["model_type"],
            )
        except KeyError as error:
            raise CheckpointError(f"{file}: {error.args[0]} is missing") from None


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    output: PackedLinear
    post_attention_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class TargetCache:
    """Keys and values of up to `num_slots` requests, `max_len` rows each, float32.

    keys, values: one [num_slots, G, max_len, D] tensor per layer. A row is valid once its position has been fed; rows at and
    after a request's committed length are scratch and are overwritten by its next step.
    """

    def __init__(self, config: TargetConfig, num_slots: int, max_len: int) -> None:
        rows = -(-max_len // _CONTEXT_SPAN) * _CONTEXT_SPAN
        shape = (num_slots, config.num_kv_heads, rows, config.head_dim)
        self.num_slots = num_slots
        self.max_len = max_len
        self.keys = [torch.zeros(shape) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_layers)]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` rows of slot `source` over slot `destination`."""
        for tensor in (*self.keys, *self.values):
            tensor[destination, :, :length] = tensor[source, :, :length]


@dataclass(frozen=True)
class TargetOutput:
    """One forward of the target.

    hidden: [B, Q, E] float32, normed final states (the input of the LM head).
    features: [B, Q, m * E] float32, the residual stream after each captured layer, concatenated in the order asked for.
    """

    hidden: Tensor
    features: Tensor


class TargetModel:
    """A Llama-shaped decoder over a slot cache, on the CPU."""

    def __init__(self, config: TargetConfig, tensors: dict[str, Tensor], weight_dtype: WeightDtype) -> None:
        self.config = config
        self.weight_dtype = weight_dtype
        self.embedding = tensors["model.embed_tokens.weight"].float()
        self.final_norm = tensors["model.norm.weight"].float()
        head = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self._head = PackedLinear(head, weight_dtype)
        self._layers = [self._build_layer(tensors, index) for index in range(config.num_layers)]
        frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * frequency
        # [max_position_embeddings, D / 2] complex64
        self._rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    @classmethod
    def load(cls, path: Path, weight_dtype: WeightDtype = "float16") -> TargetModel:
        """Load an HF folder (`config.json`, `model.safetensors`).

        Raises:
            CheckpointError: a file or a tensor is missing or unreadable.
        """
        config = TargetConfig.load(path)
        try:
            with safe_open(path / "model.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return cls(config, tensors, weight_dtype)
        except KeyError as error:
            raise CheckpointError(f"{path / 'model.safetensors'}: tensor {error.args[0]} is missing") from None
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path / 'model.safetensors'} cannot be read: {error}") from None

    def _build_layer(self, tensors: dict[str, Tensor], index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        attention = prefix + "self_attn."
        query = _interleave(tensors[attention + "q_proj.weight"].float(), config.head_dim) * config.head_dim**-0.5
        key = _interleave(tensors[attention + "k_proj.weight"].float(), config.head_dim)
        value = tensors[attention + "v_proj.weight"].float()
        gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"].float() for name in ("gate", "up")]
        return _Layer(
            input_norm=tensors[prefix + "input_layernorm.weight"].float(),
            qkv=PackedLinear(torch.cat([query, key, value]), self.weight_dtype),
            output=PackedLinear(tensors[attention + "o_proj.weight"], self.weight_dtype),
            post_attention_norm=tensors[prefix + "post_attention_layernorm.weight"].float(),
            gate_up=PackedLinear(torch.cat(gate_up), self.weight_dtype),
            down=PackedLinear(tensors[prefix + "mlp.down_proj.weight"], self.weight_dtype),
        )

    def new_cache(self, num_slots: int, max_len: int) -> TargetCache:
        """Make an empty cache of `num_slots` requests of up to `max_len` tokens."""
        return TargetCache(self.config, num_slots, max_len)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, starts: Tensor, cache: TargetCache, capture: tuple[int, ...] = (), slot: int = 0
    ) -> TargetOutput:
        """Feed rows [starts[b], starts[b] + Q) of the requests in slots [slot, slot + B).

        A row sees its own context up to and including itself. Rows that are only padding are harmless: what they write lies
        after every real row and is overwritten by the next step.

        Args:
            token_ids: [B, Q] int64
            starts: [B] int64, absolute position of each request's first row
            cache: holds positions [0, starts[b]) of each request
            capture: layer indices whose output is returned, ascending
            slot: first slot of the batch
        """
        config, eps = self.config, self.config.rms_norm_eps
        batch, asked = token_ids.shape
        rows = padded_rows(batch * asked)
        # A request that is alone takes the padding rows as queries of its own, so that attention too sums as it does for a
        # block; in a batch the contexts differ in length anyway and sums agree to rounding only.
        queries = rows if batch == 1 else asked
        if queries != asked:
            token_ids = F.pad(token_ids, (0, queries - asked))
        positions = starts[:, None] + torch.arange(queries)
        last = int(starts.max()) + queries
        length = min(-(-last // _CONTEXT_SPAN) * _CONTEXT_SPAN, cache.keys[0].shape[2])
        positions = positions.clamp_max(cache.keys[0].shape[2] - 1)
        mask = torch.zeros(batch, 1, 1, queries, length)
        mask.masked_fill_(torch.arange(length) > positions[:, None, None, :, None], float("-inf"))
        rotation = self._rotation[positions.clamp_max(config.max_position_embeddings - 1)][:, :, None]
        slots = torch.arange(slot, slot + batch)[:, None]
        groups, repeat, width = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        real = batch * queries

        x = F.embedding(token_ids.reshape(-1), self.embedding)
        if rows != real:
            x = F.pad(x, (0, 0, 0, rows - real))
        captured = []
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(F.rms_norm(x, (config.hidden_size,), layer.input_norm, eps))
            qkv = qkv[:real].view(batch, queries, -1, width)
            rotated = torch.view_as_real(
                torch.view_as_complex(torch.unflatten(qkv[:, :, : config.num_heads + groups], -1, (-1, 2))) * rotation
            ).flatten(-2)
            keys, values = cache.keys[index], cache.values[index]
            keys[slots, :, positions] = rotated[:, :, config.num_heads :]
            values[slots, :, positions] = qkv[:, :, config.num_heads + groups :]
            # [B * G, R * Q, D] against [B * G, N, D]
            query = torch.unflatten(rotated[:, :, : config.num_heads], 2, (groups, repeat)).permute(0, 2, 3, 1, 4)
            query = query.reshape(batch * groups, repeat * queries, width)
            context = keys[slot : slot + batch, :, :length].flatten(0, 1)
            scores = torch.bmm(query, context.transpose(1, 2)).view(batch, groups, repeat, queries, length)
            weights = torch.softmax(scores.add_(mask), dim=-1).view(batch * groups, repeat * queries, length)
            mixed = torch.bmm(weights, values[slot : slot + batch, :, :length].flatten(0, 1))
            mixed = mixed.view(batch, groups, repeat, queries, width).permute(0, 3, 1, 2, 4).reshape(real, -1)
            if rows != real:
                mixed = F.pad(mixed, (0, 0, 0, rows - real))
            x = x + layer.output(mixed)
            gate, up = layer.gate_up(F.rms_norm(x, (config.hidden_size,), layer.post_attention_norm, eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if index in capture:
                captured.append(x)
        hidden = F.rms_norm(x, (config.hidden_size,), self.final_norm, eps)
        features = torch.cat(captured, dim=-1) if captured else x.new_empty(rows, 0)
        shape = (batch, queries, -1)
        return TargetOutput(
            hidden=hidden[:real].view(shape)[:, :asked],
            features=features[:real].view(batch, queries, features.shape[-1])[:, :asked],
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Map normed states [T, E] to logits [T, V]."""
        rows = hidden.shape[0]
        return self._head(F.pad(hidden, (0, 0, 0, padded_rows(rows) - rows)))[:rows]


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows so that rotary pairs (i, i + D/2) become neighbours (2i, 2i + 1)."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
