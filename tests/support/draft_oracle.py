"""Draft models written out once more: float64, lists of rows, one slot and one head at a time, no cache and no batch.

It shares no code with what it judges. Weights come as numpy arrays by their published names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


class Oracle:
    """What the draft models share: heads and the left-to-right choice of greedy tokens.

    Args:
        config: the raw config.json.
        tensors: by name.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.config = config
        self.tensors = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}

    def block_states(self, features: Array, first_position: int, anchor: int) -> list[Array]:
        """Final states of the S slots after context rows at first_position, first_position + 1, ..."""
        raise NotImplementedError

    def base_logits(self, state: Array) -> Array:
        logits = self.product("lm_head.weight", state)
        cap = self.config.get("final_logit_softcapping")
        capped: Array = cap * np.tanh(logits / cap) if cap else logits
        return capped

    def draft(self, features: Array, first_position: int, anchor: int) -> tuple[list[int], list[float], list[Array]]:
        """Greedy tokens, confidences and corrected logits of one block (vanilla head, confidence with the Markov
        embedding)."""
        previous, tokens, confidences, all_logits = anchor, [], [], []
        for state in self.block_states(features, first_position, anchor):
            embedded = self.tensors["markov_head.markov_w1.weight"][previous]
            logits = self.base_logits(state) + self.product("markov_head.markov_w2.weight", embedded)
            read = np.concatenate([state, embedded])
            score = self.product("confidence_head.proj.weight", read) + self.tensors["confidence_head.proj.bias"]
            confidences.append(1 / (1 + math.exp(-score[0])))
            all_logits.append(logits)
            previous = int(logits.argmax())
            tokens.append(previous)
        return tokens, confidences, all_logits

    def product(self, name: str, x: Array) -> Array:
        out: Array = self.tensors[name] @ x
        return out

    def block_ids(self, anchor: int) -> list[int]:
        return [anchor] + [self.config["mask_token_id"]] * (self.config["block_size"] - 1)

    def norm(self, x: Array, name: str | None) -> Array:
        scaled = x / math.sqrt(float(np.mean(x * x)) + self.config["rms_norm_eps"])
        return scaled if name is None else scaled * self.tensors[name]


class MlaOracle(Oracle):
    """Kimi-K3-DSpark, not absorbed: every key and value of every head is formed."""

    def block_states(self, features: Array, first_position: int, anchor: int) -> list[Array]:
        context = [self.norm(self.product("context_proj.weight", row), "context_norm.weight") for row in features]
        start = first_position + len(context)
        states = [self.tensors["embed_tokens.weight"][token] for token in self.block_ids(anchor)]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            normed = [self.norm(state, prefix + "input_layernorm.weight") for state in states]
            rows = [self._latent(prefix, row, first_position + index) for index, row in enumerate(context)]
            rows += [self._latent(prefix, row, start + index) for index, row in enumerate(normed)]
            states = [x + self._attend(prefix, normed[i], start + i, rows) for i, x in enumerate(states)]
            states = [x + self._mlp(prefix, self.norm(x, prefix + "post_attention_layernorm.weight")) for x in states]
        return [self.norm(state, "final_norm.weight") for state in states]

    def _latent(self, prefix: str, row: Array, position: int) -> tuple[Array, Array]:
        both = self.product(prefix + "self_attn.kv_a_proj_with_mqa.weight", row)
        rank = self.config["kv_lora_rank"]
        return self.norm(both[:rank], prefix + "self_attn.kv_a_layernorm.weight"), self._rotate(both[rank:], position)

    def _attend(self, prefix: str, row: Array, position: int, rows: Sequence[tuple[Array, Array]]) -> Array:
        config, prefix = self.config, prefix + "self_attn."
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        compressed = self.norm(self.product(prefix + "q_a_proj.weight", row), prefix + "q_a_layernorm.weight")
        query = self.product(prefix + "q_b_proj.weight", compressed)
        outputs = []
        for head in range(config["num_attention_heads"]):
            own = query[head * (nope + rope) : (head + 1) * (nope + rope)]
            own = np.concatenate([own[:nope], self._rotate(own[nope:], position)])
            expand = self.tensors[prefix + "kv_b_proj.weight"][head * (nope + value) : (head + 1) * (nope + value)]
            keys = [np.concatenate([expand[:nope] @ latent, rotated]) for latent, rotated in rows]
            outputs.append(mix(own, keys, [expand[nope:] @ latent for latent, _ in rows], self._softmax_scale()))
        return self.product(prefix + "o_proj.weight", np.concatenate(outputs))

    def _mlp(self, prefix: str, x: Array) -> Array:
        gate = self.product(prefix + "mlp.gate_proj.weight", x)
        return self.product(
            prefix + "mlp.down_proj.weight", gate / (1 + np.exp(-gate)) * self.product(prefix + "mlp.up_proj.weight", x)
        )

    def _softmax_scale(self) -> float:
        rope = self.config["rope_parameters"]
        scale = 1 / math.sqrt(self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"])
        return scale * mscale(rope["factor"], rope["mscale_all_dim"]) ** 2 if "mscale_all_dim" in rope else scale

    def _rotate(self, x: Array, position: int) -> Array:
        """Rotate neighbouring pairs."""
        rope, turned = self.config["rope_parameters"], np.empty_like(x)
        length = 1.0
        if rope["rope_type"] == "yarn":
            length = mscale(rope["factor"], rope.get("mscale", 1.0)) / mscale(rope["factor"], rope.get("mscale_all_dim", 0.0))
        for pair in range(len(x) // 2):
            angle = position * pair_frequency(rope, pair, len(x))
            cos, sin = length * math.cos(angle), length * math.sin(angle)
            turned[2 * pair] = x[2 * pair] * cos - x[2 * pair + 1] * sin
            turned[2 * pair + 1] = x[2 * pair] * sin + x[2 * pair + 1] * cos
        return turned


class Gemma4Oracle(Oracle):
    """Gemma4 DSpark: norms around every part, values normed and never rotated, a share of the pairs turning."""

    def block_states(self, features: Array, first_position: int, anchor: int) -> list[Array]:
        context = [self.norm(self.product("fc.weight", row), "hidden_norm.weight") for row in features]
        start, size = first_position + len(context), math.sqrt(self.config["hidden_size"])
        states = [size * self.tensors["embed_tokens.weight"][token] for token in self.block_ids(anchor)]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            normed = [self.norm(state, prefix + "input_layernorm.weight") for state in states]
            rows = [*context, *normed]
            for i, x in enumerate(states):
                attended = self._attend(prefix + "self_attn.", normed[i], start + i, rows, first_position)
                x = x + self.norm(attended, prefix + "post_attention_layernorm.weight")
                mlp = self._mlp(prefix + "mlp.", self.norm(x, prefix + "pre_feedforward_layernorm.weight"))
                x = x + self.norm(mlp, prefix + "post_feedforward_layernorm.weight")
                states[i] = x * self.tensors[prefix + "layer_scalar"][0]
        return [self.norm(state, "norm.weight") for state in states]

    def _attend(self, prefix: str, row: Array, position: int, rows: Sequence[Array], first_position: int) -> Array:
        dim, heads = self.config["global_head_dim"], self.config["num_attention_heads"]
        shares_key = self.config["attention_k_eq_v"]
        groups = self.config["num_global_key_value_heads" if shares_key else "num_key_value_heads"]
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            own = slice(head * dim, (head + 1) * dim)
            shared = slice(group * dim, (group + 1) * dim)
            query = self._rotate(
                self.norm(self.product(prefix + "q_proj.weight", row)[own], prefix + "q_norm.weight"), position
            )
            raw = [self.product(prefix + "k_proj.weight", other)[shared] for other in rows]
            keys = [self._rotate(self.norm(k, prefix + "k_norm.weight"), first_position + t) for t, k in enumerate(raw)]
            if not shares_key:
                raw = [self.product(prefix + "v_proj.weight", other)[shared] for other in rows]
            outputs.append(mix(query, keys, [self.norm(value, None) for value in raw], 1.0))
        return self.product(prefix + "o_proj.weight", np.concatenate(outputs))

    def _mlp(self, prefix: str, x: Array) -> Array:
        gate = self.product(prefix + "gate_proj.weight", x)
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return self.product(prefix + "down_proj.weight", gate * self.product(prefix + "up_proj.weight", x))

    def _rotate(self, x: Array, position: int) -> Array:
        """Rotate dimension i with i + D / 2, for the first share of the pairs; exponents run over the whole head."""
        rope, half, turned = self.config["rope_parameters"]["full_attention"], len(x) // 2, x.copy()
        for pair in range(int(rope["partial_rotary_factor"] * half)):
            angle = position * math.pow(rope["rope_theta"], -2 * pair / len(x))
            turned[pair] = x[pair] * math.cos(angle) - x[pair + half] * math.sin(angle)
            turned[pair + half] = x[pair] * math.sin(angle) + x[pair + half] * math.cos(angle)
        return turned


def mix(query: Array, keys: Sequence[Array], values: Sequence[Array], scale: float) -> Array:
    """The attention of one query of one head over everything."""
    scores = [scale * float(query @ key) for key in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    mixed: Array = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)  # type: ignore[assignment]
    return mixed


def mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def pair_frequency(rope: Mapping[str, Any], pair: int, dim: int) -> float:
    """Radians per position of one pair: plain, or YaRN's blend of plain and stretched."""
    theta = float(rope["rope_theta"])
    plain = math.pow(theta, -2 * pair / dim)
    if rope["rope_type"] == "default":
        return plain
    original, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])

    def pair_of(turns: float) -> float:
        # The pair that makes this many turns over the original length.
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_of(rope.get("beta_slow", 1))), dim - 1)
    share = min(max((pair - low) / (high - low), 0.0), 1.0)
    return plain * (1 - share) + plain / factor * share
