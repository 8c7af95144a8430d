"""A checkpoint loads exactly or not at all, and the error says which file, key or tensor is at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_model.drafter import Drafter
from draft_model.errors import CheckpointError
from draft_model.formats import load_config, resolve_config
from tests.support.draft_model import TINY_CONFIG, TinySession, make_features, make_tiny_drafter, mla_tensors, write_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"
MLA_NAMES = sorted(mla_tensors(TINY_CONFIG))
GQA_CONFIG = json.loads((GOLDEN / "draft_gated" / "config.json").read_text())


def load(folder: Path, **settings: Any) -> Drafter:
    return Drafter.load(folder, kv_cache_memory=1 << 18, page_size=4, **settings)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return mla_tensors(TINY_CONFIG)


def test_five_layers_have_the_published_tensors() -> None:
    """A published folder of 5 layers holds 68 tensors: 12 a layer, the embedding among the other 8, and no LM head."""
    names = set(mla_tensors({**TINY_CONFIG, "num_hidden_layers": 5})) - {"lm_head.weight"}
    assert len(names) == 68


@pytest.mark.parametrize("name", MLA_NAMES)
def test_a_dropped_tensor_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    left = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(write_checkpoint(tmp_path, TINY_CONFIG, left))


@pytest.mark.parametrize("name", MLA_NAMES)
def test_a_renamed_tensor_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    renamed = {("model." + key if key == name else key): tensor for key, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=name):
        load(write_checkpoint(tmp_path, TINY_CONFIG, renamed))


@pytest.mark.parametrize("name", MLA_NAMES)
def test_a_retyped_tensor_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        with pytest.raises(CheckpointError, match=f"tensor {name} has dtype {str(dtype).removeprefix('torch.')}"):
            load(write_checkpoint(tmp_path, TINY_CONFIG, {**tensors, name: tensors[name].to(dtype)}))


@pytest.mark.parametrize("name", MLA_NAMES)
def test_a_reshaped_tensor_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    tensor = tensors[name]
    for wrong in (torch.cat([tensor, tensor[:1]]), tensor[None], tensor.reshape(-1, 1)):
        if wrong.shape == tensor.shape:
            continue
        with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
            load(write_checkpoint(tmp_path, TINY_CONFIG, {**tensors, name: wrong.contiguous()}))


@pytest.mark.parametrize("name", ["fc.weight_scale", "layers.2.input_layernorm.weight", "markov_head.gate_proj.bias", "t2d"])
def test_an_extra_tensor_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"unexpected tensors.*{name}"):
        load(write_checkpoint(tmp_path, TINY_CONFIG, {**tensors, name: torch.zeros(3)}))


def test_the_loaded_model_depends_on_every_tensor(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Nothing keeps an initial value: changing any one tensor changes what is computed."""

    def outcome(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        drafter = load(write_checkpoint(tmp_path, TINY_CONFIG, changed), dtype=torch.float32)
        session = TinySession(drafter, [1, 2, 3])
        session.write(make_features(drafter, 5))
        (proposal,) = drafter.draft([session.request(3)])
        hidden = drafter._block_states([session.request(3)])
        base = drafter._lm_head(hidden)
        assert drafter._markov is not None
        embedded = drafter._markov.embed(torch.tensor([3]))
        bias, _ = drafter._markov.step(embedded, hidden[:1], None)
        return torch.cat([base.flatten(), bias.flatten(), torch.tensor(proposal.confidence)])

    plain = outcome(tensors)
    for name in MLA_NAMES:
        generator = torch.Generator().manual_seed(1)
        noise = 0.2 * torch.randn(tensors[name].shape, generator=generator)
        assert not torch.allclose(outcome({**tensors, name: (tensors[name] + noise).half()}), plain, atol=1e-4), name


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: not a folder"):
        load(tmp_path / "nowhere")
    folder = make_tiny_drafter(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    body = weights.read_bytes()
    weights.write_bytes(body[: len(body) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(folder)


MLA_OPTIONAL = {
    "architectures", "dtype", "sample_from_anchor", "markov_rank", "enable_confidence_head", "num_target_layers",
    "target_num_hidden_layers", "tie_word_embeddings", "model_type",
}  # fmt: skip
GQA_REQUIRED = {
    "block_size", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "markov_head_type", "mask_token_id",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_target_layers",
    "rms_norm_eps", "target_layer_ids", "vocab_size", "confidence_head_with_markov", "model_type",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "key"),
    [(TINY_CONFIG, key) for key in sorted(set(TINY_CONFIG) - MLA_OPTIONAL)]
    + [(GQA_CONFIG, key) for key in sorted(GQA_REQUIRED)],
)
def test_a_missing_key_is_named(config: dict[str, Any], key: str) -> None:
    expected = "rope_theta" if key == "rope_parameters" else key
    for left in ({k: v for k, v in config.items() if k != key}, {**config, key: None}):
        with pytest.raises(CheckpointError, match=rf"there: {expected} (is|\(|must)"):
            resolve_config(left, "there")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": "4"}, "block_size must be a positive integer, not '4'"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"block_size": True}, "block_size must be a positive integer"),
        ({"hidden_size": 48.0}, "hidden_size must be a positive integer"),
        ({"mask_token_id": 260}, "mask_token_id is 260, outside the vocabulary of 260"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported: silu"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'; supported: vanilla, gated, rnn"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"target_layer_ids": []}, "target_layer_ids must be a non-empty list"),
        ({"target_layer_ids": [2, 0]}, "target_layer_ids must be strictly increasing"),
        ({"target_layer_ids": [0, 3]}, "already normed"),
        ({"target_layer_ids": [-2, 0]}, "before the embedding"),
        ({"num_target_layers": 3}, "num_target_layers is 3, but target_layer_ids has 2"),
        ({"mla_use_nope": True}, "mla_use_nope is set"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is set"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm is set"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor is set"),
        ({"q_lora_rank": None}, "q_lora_rank is null or missing"),
        ({"draft_vocab_size": 261}, "draft_vocab_size is 261, more than vocab_size 260"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head must be true or false"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true, but markov_rank is 0"),
        ({"block_size": 1, "sample_from_anchor": False}, "leaves no slot to draft in"),
        ({"is_causal": True}, "is_causal is true"),
        ({"layer_types": ["full_attention"]}, "layer_types must list one type for each of the 2 layers"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types holds 'linear'"),
        ({"layer_types": ["sliding_attention"] * 2}, "is_causal is missing; sliding layers are causal"),
        ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, "sliding_window is missing"),
        ({"rope_parameters": {"rope_type": "warp", "rope_theta": 1.0}}, "rope_type 'warp' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, r"rope_parameters\.factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "factor": 2.0}}, r"rope_parameters\.factor is not"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "not a draft model this engine knows"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_config({**TINY_CONFIG, **changes}, "there")


def test_drafts_inside_a_target_are_refused_with_the_reason() -> None:
    for marks in ({"n_mtp_layers": 3}, {"architectures": ["DeepseekV4ForCausalLM"]}):
        raw = {key: value for key, value in TINY_CONFIG.items() if key not in ("model_type", "architectures")} | marks
        with pytest.raises(CheckpointError, match="DeepSeek-V4 DSpark drafts live inside the target's checkpoint"):
            resolve_config(raw, "there")


def test_the_golden_configs_resolve() -> None:
    for folder in sorted(GOLDEN.glob("draft_*")):
        config = load_config(folder)
        assert config.source_format == "deepspec"
        assert config.draft_block_size == config.max_draft_tokens
        assert config.mask_token_id == 311
        assert config.feature_width == 48 * len(config.target_layer_ids)
        assert (config.head_type == "none") == ("dflash" in folder.name)
