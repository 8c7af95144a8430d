"""Rotary position embedding: every scaling the draft checkpoints of the field use, resolved from their config.

A rotation is a table of cosines and sines per position; two styles pair the dimensions. `interleaved` rotates neighbours
(2i, 2i + 1), as MLA checkpoints do; otherwise dimension i goes with i + R / 2, as Qwen3 and Llama checkpoints do. A wrong
style, theta or scaling is silent (only acceptance suffers), so nothing here has a default that a config could have meant.

Shape symbols: n positions, R rotary dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draft_model.errors import CheckpointError

RopeType = Literal["default", "linear", "llama3", "yarn", "proportional"]

# Names that checkpoints use for the same scaling.
_TYPE_NAMES: Mapping[str, RopeType] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "deepseek_yarn": "yarn",
    "proportional": "proportional",
}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS_OF_TYPE: Mapping[RopeType, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "attention_factor", "truncate",
        }
    ),
    "proportional": frozenset({"factor"}),
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """One resolved rotary embedding.

    Args:
        rope_type: the scaling.
        theta: base of the frequencies.
        head_dim: dimensions of a head that the rotary config speaks of.
        rotary_dim: leading dimensions that are rotated; the rest pass through. `proportional` rotates all of them, with
            frequency 0 past the partial share.
        interleaved: neighbouring pairs instead of halves.
        factor, original_max_position, low_freq_factor, high_freq_factor, beta_fast, beta_slow, truncate: of the scaling.
        attention_factor: multiplies cosines and sines (YaRN).
        softmax_factor: multiplies the softmax scale (YaRN's mscale squared in MLA checkpoints).
    """

    rope_type: RopeType
    theta: float
    head_dim: int
    rotary_dim: int
    interleaved: bool
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    attention_factor: float = 1.0
    softmax_factor: float = 1.0

    def frequencies(self) -> Tensor:
        """Return the angle per position of each rotated pair, [rotary_dim / 2] float64."""
        if self.rope_type == "proportional":
            return self._proportional()
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        plain = self.theta**-exponents
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(plain)
        return plain

    def _proportional(self) -> Tensor:
        """Rotate a share of the pairs; the exponent runs over the whole head."""
        rotated = int(self.partial_rotary_factor * self.head_dim // 2)
        exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.float64) / self.head_dim
        still = torch.zeros(self.head_dim // 2 - rotated, dtype=torch.float64)
        return torch.cat([self.theta**-exponents, still]) / self.factor

    def _llama3(self, plain: Tensor) -> Tensor:
        """Divide slow waves by the factor, keep fast ones, blend between."""
        wavelength = 2 * math.pi / plain
        slowest = self.original_max_position / self.low_freq_factor
        fastest = self.original_max_position / self.high_freq_factor
        blend = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        mixed = (1 - blend) * plain / self.factor + blend * plain
        scaled = torch.where(wavelength > slowest, plain / self.factor, plain)
        return torch.where((wavelength <= slowest) & (wavelength >= fastest), mixed, scaled)

    def _yarn(self, plain: Tensor) -> Tensor:
        """Interpolate the pairs that turn less than `beta_slow` times over the original length, keep the fast ones."""
        low, high = (self._pair_of_turns(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, self.rotary_dim - 1.0)
        span = high - low if high != low else 0.001
        ramp = ((torch.arange(self.rotary_dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _pair_of_turns(self, turns: float) -> float:
        ratio = self.original_max_position / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(ratio) / (2 * math.log(self.theta))


def resolve_rope(
    raw: Mapping[str, Any],
    *,
    where: str,
    head_dim: int,
    interleaved: bool,
    scales_softmax: bool,
    layer_type: str = "full_attention",
) -> RopeConfig:
    """Read the rotary settings of a config, spelled as in transformers 4 or 5.

    Version 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.

    Args:
        raw: the config.
        where: file name for messages.
        head_dim: size of the part of a head that is rotated, before a partial factor.
        interleaved: the pairing of the backbone.
        scales_softmax: the backbone multiplies its softmax scale by YaRN's mscale_all_dim squared (MLA).
        layer_type: which entry to take when `rope_parameters` holds one per layer type.
    Raises:
        CheckpointError: theta or a key of the scaling is missing, or the scaling is not known.
    """
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{where}: rope_parameters must be an object")
    if isinstance(nested.get(layer_type), Mapping):
        nested = nested[layer_type]
    elif any(isinstance(value, Mapping) for value in nested.values()):
        raise CheckpointError(f"{where}: rope_parameters has no entry for {layer_type}")

    name = nested.get("rope_type", nested.get("type", "default"))
    rope_type = _TYPE_NAMES.get(name)
    if rope_type is None:
        raise CheckpointError(f"{where}: rope_type {name!r} is not supported; known: {', '.join(sorted(_TYPE_NAMES))}")
    unknown = {key for key, value in nested.items() if value is not None} - _COMMON_KEYS - _KEYS_OF_TYPE[rope_type]
    if unknown:
        raise CheckpointError(f"{where}: rope_parameters.{sorted(unknown)[0]} is not a key of rope_type {rope_type!r}")
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise CheckpointError(f"{where}: rope_theta is missing")
    partial = nested.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    share = 1.0 if partial is None else float(partial)
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"{where}: rotary dim {rotary_dim} of a head of {head_dim} cannot be paired")

    def need(key: str) -> float:
        if nested.get(key) is None:
            raise CheckpointError(f"{where}: rope_parameters.{key} is missing (rope_type {rope_type!r} needs it)")
        return float(nested[key])

    common: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": float(theta),
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
        "partial_rotary_factor": share,
    }
    if rope_type == "linear":
        common["factor"] = need("factor")
    if rope_type == "proportional":
        common["factor"] = float(nested.get("factor") or 1.0)
    if rope_type == "llama3":
        common["factor"] = need("factor")
        common["low_freq_factor"] = need("low_freq_factor")
        common["high_freq_factor"] = need("high_freq_factor")
        common["original_max_position"] = int(need("original_max_position_embeddings"))
    if rope_type == "yarn":
        common |= _resolve_yarn(nested, need("factor"), scales_softmax=scales_softmax)
        common["original_max_position"] = int(need("original_max_position_embeddings"))
    return RopeConfig(**common)


def _resolve_yarn(nested: Mapping[str, Any], factor: float, *, scales_softmax: bool) -> dict[str, Any]:
    mscale, mscale_all_dim = nested.get("mscale"), nested.get("mscale_all_dim")
    attention_factor = nested.get("attention_factor")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return {
        "factor": factor,
        "beta_fast": float(nested.get("beta_fast") or 32.0),
        "beta_slow": float(nested.get("beta_slow") or 1.0),
        "truncate": bool(nested.get("truncate", True)),
        "attention_factor": float(attention_factor),
        "softmax_factor": _yarn_mscale(factor, mscale_all_dim) ** 2 if scales_softmax and mscale_all_dim else 1.0,
    }


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotation:
    """Unit complex numbers [n, R / 2] (complex64) of n positions, and how they pair the dimensions."""

    turns: Tensor
    interleaved: bool

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the leading R dimensions of x [n, heads, D]; returns x's dtype."""
        rotary_dim = 2 * self.turns.shape[-1]
        rotated = x[..., :rotary_dim].float()
        turns = self.turns[:, None]
        if self.interleaved:
            turned = torch.view_as_real(torch.view_as_complex(rotated.reshape(*rotated.shape[:-1], -1, 2)) * turns).flatten(-2)
        else:
            pairs = torch.complex(*rotated.chunk(2, dim=-1)) * turns
            turned = torch.cat([pairs.real, pairs.imag], dim=-1)
        turned = turned.to(x.dtype)
        return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], dim=-1)


class RotaryEmbedding:
    """Makes rotations; angles are formed in float64, so they stay exact at a million positions."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self._frequencies = config.frequencies().to(device)
        self._length = torch.tensor(config.attention_factor, dtype=torch.float64, device=device)

    def __call__(self, positions: Tensor) -> Rotation:
        """Return the rotation of positions [n] int64."""
        angles = positions[:, None] * self._frequencies
        return Rotation(torch.polar(self._length.expand_as(angles), angles).to(torch.complex64), self.config.interleaved)
