"""Write a trained draft as a checkpoint folder in the Kimi-K3-DSpark layout, without the target's embedding and head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_model.backbone.mla_dense import DenseMlaDraft


def export_checkpoint(
    model: DenseMlaDraft,
    draft_to_target: Tensor,
    folder: Path,
    *,
    block_size: int,
    target_layer_ids: tuple[int, ...],
    target_hidden_size: int,
    target_num_layers: int,
    max_position_embeddings: int,
) -> None:
    """Write `config.json` and `model.safetensors` (float16; d2t as int64 offsets: target id = draft id + d2t[draft id])."""
    shape = model.shape
    config: dict[str, Any] = {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "dtype": "float16",
        "block_size": block_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "mask_token_id": model.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": shape.confidence_with_markov,
        "target_layer_ids": list(target_layer_ids),
        "num_target_layers": len(target_layer_ids),
        "target_hidden_size": target_hidden_size,
        "target_num_hidden_layers": target_num_layers,
        "tie_word_embeddings": False,
    }
    tensors = {name: parameter.detach().cpu().half().contiguous() for name, parameter in model.named_parameters()}
    tensors["d2t"] = draft_to_target - torch.arange(len(draft_to_target))
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
