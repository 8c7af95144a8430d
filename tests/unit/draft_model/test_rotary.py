"""Rotary embeddings against transformers, and far positions against plain arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, apply_rotary_pos_emb_interleave
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from draft_model.errors import CheckpointError
from draft_model.rotary import RopeConfig, RotaryEmbedding, resolve_rope

CPU = torch.device("cpu")
ORIGINAL = 4096
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn with betas": {
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 16.0,
        "beta_slow": 2.0, "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn with attention_factor": {
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.25,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip
NEAR = torch.tensor([0, 1, 2, 63, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 700])
FAR = [ORIGINAL, 8 * ORIGINAL - 1, 131_072, 262_143, 1_048_575]


def resolve(parameters: dict[str, Any], head_dim: int = 64, **settings: Any) -> RopeConfig:
    values = {"where": "there", "head_dim": head_dim, "interleaved": False, "scales_softmax": False, **settings}
    return resolve_rope({"rope_parameters": parameters}, **values)


def theirs(parameters: dict[str, Any], head_dim: int = 64) -> tuple[Tensor, float]:
    config = Qwen3Config(head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=1 << 20)
    is_default = parameters["rope_type"] == "default"
    compute = (
        Qwen3RotaryEmbedding.compute_default_rope_parameters if is_default else ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    )
    frequencies, attention_factor = compute(config)
    return frequencies, attention_factor


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str) -> None:
    config = resolve(SCALINGS[name])
    frequencies, attention_factor = theirs(SCALINGS[name])
    torch.testing.assert_close(config.frequencies().float(), frequencies, rtol=5e-6, atol=0)
    assert config.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_rotated_states_equal_transformers_around_the_original_maximum(name: str) -> None:
    parameters = SCALINGS[name]
    module = Qwen3RotaryEmbedding(Qwen3Config(head_dim=64, rope_parameters=dict(parameters), max_position_embeddings=1 << 20))
    states = torch.randn(len(NEAR), 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = module(states, NEAR[None])
    expected, _ = apply_rotary_pos_emb(states[None], states[None], cos, sin, unsqueeze_dim=2)
    rotated = RotaryEmbedding(resolve(parameters), CPU)(NEAR).apply(states)
    # transformers forms angles in float32: 4796 * 2^-24 is 3e-4.
    torch.testing.assert_close(rotated, expected[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_far_positions_are_exact(name: str) -> None:
    config = resolve(SCALINGS[name])
    states = torch.randn(len(FAR), 1, 64, generator=torch.Generator().manual_seed(0))
    rotated = RotaryEmbedding(config, CPU)(torch.tensor(FAR)).apply(states)
    for row, position in enumerate(FAR):
        for pair, frequency in enumerate(config.frequencies().tolist()):
            angle = math.fmod(position * frequency, 2 * math.pi)
            one, other = float(states[row, 0, pair]), float(states[row, 0, pair + 32])
            turned = one * math.cos(angle) - other * math.sin(angle), one * math.sin(angle) + other * math.cos(angle)
            assert float(rotated[row, 0, pair]) == pytest.approx(config.attention_factor * turned[0], abs=1e-5)
            assert float(rotated[row, 0, pair + 32]) == pytest.approx(config.attention_factor * turned[1], abs=1e-5)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_a_partial_factor_rotates_the_leading_part(name: str) -> None:
    parameters = {**SCALINGS[name], "partial_rotary_factor": 0.5}
    config = resolve(parameters)
    torch.testing.assert_close(config.frequencies().float(), theirs(parameters)[0], rtol=5e-6, atol=0)
    states = torch.randn(len(NEAR), 2, 64)
    rotated = RotaryEmbedding(config, CPU)(NEAR).apply(states)
    assert torch.equal(rotated[..., 32:], states[..., 32:])
    whole = RotaryEmbedding(resolve(SCALINGS[name], head_dim=32), CPU)(NEAR).apply(states[..., :32])
    torch.testing.assert_close(rotated[..., :32], whole)


@pytest.mark.parametrize("name", ["default", "yarn with mscale"])
def test_interleaved_scores_equal_the_mla_models_of_transformers(name: str) -> None:
    """Their rotation also reorders the dimensions, so what can be compared is the product of a query and a key."""
    parameters = SCALINGS[name]
    module = Qwen3RotaryEmbedding(Qwen3Config(head_dim=64, rope_parameters=dict(parameters), max_position_embeddings=1 << 20))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(len(NEAR), 2, 64, generator=generator) for _ in range(2))
    cos, sin = module(query, NEAR[None])
    one, other = apply_rotary_pos_emb_interleave(query[None], key[None], cos, sin, unsqueeze_dim=2)
    rotation = RotaryEmbedding(resolve(parameters, interleaved=True), CPU)(NEAR)
    scores = torch.einsum("qhd,khd->hqk", rotation.apply(query), rotation.apply(key))
    torch.testing.assert_close(scores, torch.einsum("qhd,khd->hqk", one[0], other[0]), atol=1e-2, rtol=0)


@pytest.mark.parametrize("mscale_all_dim", [None, 0.7, 1.0])
def test_yarn_scales_the_softmax_of_mla_models(mscale_all_dim: float | None) -> None:
    parameters = {**SCALINGS["yarn"], "factor": 32.0}
    if mscale_all_dim is not None:
        parameters |= {"mscale": 1.0, "mscale_all_dim": mscale_all_dim}
    config = DeepseekV3Config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, rope_parameters=dict(parameters),
    )  # fmt: skip
    scaling = DeepseekV3Attention(config, layer_idx=0).scaling
    factor = resolve(parameters, head_dim=16, scales_softmax=True).softmax_factor
    assert 32**-0.5 * factor == pytest.approx(scaling, rel=1e-12)
    assert resolve(parameters, head_dim=16).softmax_factor == 1.0


def test_every_spelling_means_the_same() -> None:
    expected = resolve(SCALINGS["yarn"])
    parameters = {key: value for key, value in SCALINGS["yarn"].items() if key not in ("rope_type", "rope_theta")}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **parameters}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **parameters}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "deepseek_yarn", **parameters}},
        {"rope_parameters": {"full_attention": SCALINGS["yarn"], "sliding_attention": SCALINGS["linear"]}},
    ]
    for raw in spellings:
        assert resolve_rope(raw, where="there", head_dim=64, interleaved=False, scales_softmax=False) == expected
    plain = resolve_rope({"rope_theta": 1e6, "rope_scaling": None}, where="there", head_dim=64, interleaved=False,
                         scales_softmax=False)  # fmt: skip
    assert plain == resolve(SCALINGS["default"])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "there: rope_theta is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "there: rope_theta is missing"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
            "rope_type 'dynamic' is not supported",
        ),
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters has no entry for full_attention"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.3}}, "cannot be paired"),
        *[
            ({"rope_parameters": {k: v for k, v in SCALINGS[name].items() if k != key}}, rf"rope_parameters\.{key} is missing")
            for name in ("linear", "llama3", "yarn")
            for key in SCALINGS[name]
            if key not in ("rope_type", "rope_theta")
        ],
        *[
            ({"rope_parameters": {**SCALINGS[name], "surprise": 1}}, r"rope_parameters\.surprise is not a key of rope_type")
            for name in ("linear", "llama3", "yarn", "proportional")
        ],
    ],
)
def test_what_is_missing_or_unknown_is_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_rope(raw, where="there", head_dim=64, interleaved=False, scales_softmax=False)
