"""Served drafters against the float64 oracle, far from position 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_model.errors import CheckpointError
from draft_model.formats import resolve_config
from tests.support.draft_model import (
    TinySession,
    head_shapes,
    load_drafter,
    make_features,
    make_tiny_drafter,
    random_tensors,
    read_checkpoint,
    write_checkpoint,
)
from tests.support.draft_oracle import Gemma4Oracle, MlaOracle, Oracle

# The published shape of the scaling, with a short original length.
YARN = {
    "rope_type": "yarn", "rope_theta": 50_000.0, "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def assert_equals_oracle(folder: Path, oracle: Oracle, *, first_position: int, backend: str = "torch_cpu") -> None:
    drafter = load_drafter(folder, attention_backend=backend)
    session = TinySession(drafter, [5, 2, 9, 4], position=first_position)
    features = make_features(drafter, 7, seed=first_position)
    session.write(features)
    request = session.request(17)
    (proposal,) = drafter.draft([request])
    tokens, confidences, _ = oracle.draft(features.double().numpy(), first_position, 17)
    states = torch.from_numpy(np.stack(oracle.block_states(features.double().numpy(), first_position, 17)))
    torch.testing.assert_close(drafter._block_states([request]).double(), states, atol=1e-4, rtol=0)
    assert proposal.token_ids == tokens
    assert proposal.confidence == pytest.approx(confidences, abs=1e-5)


@pytest.mark.parametrize("first_position", [0, 60, 2_000])
@pytest.mark.parametrize("rope", [None, YARN, {**YARN, "mscale_all_dim": 0.5}])
def test_mla_drafts_equal_the_oracle(tmp_path: Path, rope: dict[str, Any] | None, first_position: int) -> None:
    changes: dict[str, Any] = {} if rope is None else {"rope_parameters": rope}
    folder = make_tiny_drafter(tmp_path, **changes)
    config, tensors = read_checkpoint(folder)
    oracle = MlaOracle(config, {name: tensor.double().numpy() for name, tensor in tensors.items()})
    assert_equals_oracle(folder, oracle, first_position=first_position)


GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "dtype": "float32",
    "block_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0,
    "layer_types": ["full_attention", "full_attention"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
    },
    "max_position_embeddings": 512,
    "vocab_size": 80,
    "mask_token_id": 4,
    "target_layer_ids": [0, 2],
    "num_target_layers": 6,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}


def gemma4_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, heads, dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "global_head_dim")
    )
    groups = config["num_global_key_value_heads" if config["attention_k_eq_v"] else "num_key_value_heads"]
    vocab = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in names}
        shapes |= {
            prefix + "layer_scalar": (1,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "self_attn.q_proj.weight": (heads * dim, hidden),
            prefix + "self_attn.k_proj.weight": (groups * dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * dim),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
        }
        if not config["attention_k_eq_v"]:
            shapes[prefix + "self_attn.v_proj.weight"] = (groups * dim, hidden)
    return random_tensors(shapes | head_shapes(config), 0, torch.float32)


@pytest.mark.parametrize(("shares_key", "cap"), [(True, 2.0), (False, None)])
def test_gemma4_drafts_equal_the_oracle(tmp_path: Path, *, shares_key: bool, cap: float | None) -> None:
    config = {**GEMMA4, "attention_k_eq_v": shares_key, "final_logit_softcapping": cap}
    tensors = gemma4_tensors(config)
    folder = write_checkpoint(tmp_path, config, tensors)
    oracle = Gemma4Oracle(config, {name: tensor.double().numpy() for name, tensor in tensors.items()})
    assert_equals_oracle(folder, oracle, first_position=30)
    assert_equals_oracle(folder, oracle, first_position=0, backend="reference")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is set"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is set"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "Gemma4 drafts have full attention only"),
        ({"attention_k_eq_v": None}, "attention_k_eq_v is missing"),
        ({"global_head_dim": None}, "global_head_dim is missing"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads is missing"),
        ({"rope_parameters": {"sliding_attention": {}}}, "no entry for full_attention"),
    ],
)
def test_gemma4_variants_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_config({**GEMMA4, **changes}, "there")
    uncapped = {key: value for key, value in GEMMA4.items() if key != "final_logit_softcapping"}
    with pytest.raises(CheckpointError, match="final_logit_softcapping is missing"):
        resolve_config(uncapped, "there")


def test_the_embedding_scale_is_rounded_as_the_reference_does() -> None:
    config = {**GEMMA4, "hidden_size": 3840, "dtype": "bfloat16"}
    assert resolve_config(config, "there").embedding_scale == 62.0
    assert resolve_config({**config, "dtype": "float32"}, "there").embedding_scale == pytest.approx(3840**0.5)
