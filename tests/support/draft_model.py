"""Draft checkpoints small enough for unit tests, in the published tensor names, and what to run them with.

The MLA checkpoint fits `tests.support.tiny_target`: same vocabulary, same hidden size, layers that the target has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_model.backbone.mla_dense import DenseMlaDraft, MlaShape
from draft_model.drafter import ContextWrite, Drafter, DraftRequest
from draft_model.sampling import SamplingParams

TINY_CONFIG: Mapping[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "dtype": "float16",
    "block_size": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "max_position_embeddings": 1024,
    "vocab_size": 260,
    "mask_token_id": 5,
    "sample_from_anchor": True,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "target_layer_ids": [0, 2],
    "num_target_layers": 2,
    "target_hidden_size": 48,
    "target_num_hidden_layers": 4,
    "tie_word_embeddings": False,
}


def make_tiny_drafter(
    folder: Path, *, seed: int = 0, has_vocabulary: bool = True, draft_vocab_size: int | None = None, **changes: Any
) -> Path:
    """Write a random MLA draft.

    Args:
        folder: receives config.json and model.safetensors.
        seed: of the weights.
        has_vocabulary: with embedding and LM head of its own; without, the target's are needed to load it.
        draft_vocab_size: a reduced vocabulary, with a d2t tensor of offsets that is not the identity.
        changes: config keys to set; a value of None removes the key.
    """
    config = {**TINY_CONFIG, **changes}
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
    config = {key: value for key, value in config.items() if value is not None}
    tensors = mla_tensors(config, seed)
    if draft_vocab_size is not None:
        tensors["d2t"] = make_draft_to_target(config["vocab_size"], draft_vocab_size, seed) - torch.arange(draft_vocab_size)
    if not has_vocabulary:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    return write_checkpoint(folder, config, tensors)


def make_draft_to_target(vocab_size: int, draft_vocab_size: int, seed: int = 0) -> Tensor:
    """The token ids of a reduced vocabulary, in no order."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size]


def mla_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of an MLA config, every norm weight other than 1."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    query_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    vocab = config["vocab_size"]
    draft_vocab = config.get("draft_vocab_size", vocab)
    width = len(config["target_layer_ids"]) * config["target_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (hidden, width),
        "context_norm.weight": (hidden,),
        "final_norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (draft_vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "self_attn.q_a_proj.weight": (query_rank, hidden),
            prefix + "self_attn.q_a_layernorm.weight": (query_rank,),
            prefix + "self_attn.q_b_proj.weight": (heads * (nope + rope), query_rank),
            prefix + "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
            prefix + "self_attn.kv_a_layernorm.weight": (latent,),
            prefix + "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
            prefix + "self_attn.o_proj.weight": (hidden, heads * value),
        }
    return random_tensors(shapes | head_shapes(config), seed, getattr(torch, config.get("dtype", "float32")))


def head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the Markov and confidence heads that a config asks for."""
    hidden, rank, vocab = config["hidden_size"], config.get("markov_rank", 0), config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (config.get("draft_vocab_size", vocab), rank)
        if config["markov_head_type"] == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if config["markov_head_type"] == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.get("enable_confidence_head"):
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config["confidence_head_with_markov"] else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices that keep the size of what they multiply, norm weights in [0.5, 1.5), biases and embeddings of size 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensor = torch.rand(shape, generator=generator) + 0.5
        else:
            is_table = name in ("embed_tokens.weight", "markov_head.markov_w1.weight") or len(shape) == 1
            tensor = torch.randn(shape, generator=generator) * (1.0 if is_table else shape[-1] ** -0.5)
        tensors[name] = tensor.to(dtype)
    return tensors


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The raw config and tensors of a checkpoint folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def load_drafter(folder: Path, **settings: Any) -> Drafter:
    """Load with a pool of a few hundred rows, full of NaN: a row that nobody wrote shows."""
    values = {"kv_cache_memory": 1 << 19, "page_size": 4, "dtype": torch.float32, **settings}
    drafter = Drafter.load(folder, **values)
    drafter.cache.fill(math.nan)
    return drafter


def load_dense(folder: Path) -> DenseMlaDraft:
    """The MLA draft of a folder with its own vocabulary, in float32, as the differentiable training model."""
    config, tensors = read_checkpoint(folder)
    shape = MlaShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        feature_width=len(config["target_layer_ids"]) * config["target_hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size", config["vocab_size"]),
        markov_rank=config["markov_rank"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        confidence_with_markov=config["confidence_head_with_markov"],
    )
    tensors = {name: tensor.float() for name, tensor in tensors.items() if name != "d2t"}
    embedding, lm_head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    model = DenseMlaDraft(shape, embedding, lm_head, config["mask_token_id"])
    model.load_state_dict(tensors)
    return model.requires_grad_(False)


def make_features(drafter: Drafter, count: int, seed: int = 0) -> Tensor:
    """Random captured states [count, feature_width]."""
    return torch.randn(count, drafter.config.feature_width, generator=torch.Generator().manual_seed(seed))


class TinySession:
    """A session's pages and rows, for tests that drive a drafter by hand.

    Args:
        drafter: to write to.
        page_ids: its pages, scattered or not.
        position: of its first row.
    """

    def __init__(self, drafter: Drafter, page_ids: Sequence[int], position: int = 0) -> None:
        self.drafter, self.page_ids, self.first_position = drafter, list(page_ids), position
        self.num_rows = 0

    def write(self, features: Tensor, *, is_projected: bool = False) -> None:
        """Append rows."""
        self.drafter.write_context([self.context_write(features, is_projected=is_projected)])

    def context_write(self, features: Tensor, *, is_projected: bool = False) -> ContextWrite:
        """The write that appends rows, to be sent with others; the rows count as held from now on."""
        first = self.num_rows
        self.num_rows += len(features)
        return ContextWrite(self.page_ids, first, self.first_position + first, features, is_projected)

    def request(
        self,
        anchor_token_id: int,
        num_draft_tokens: int | None = None,
        *,
        sampling: SamplingParams | None = None,
        draft_probs_topk: int = 0,
        rng_counter: int = 0,
    ) -> DraftRequest:
        """The request of a block after the last row."""
        return DraftRequest(
            self.page_ids,
            self.num_rows,
            self.first_position + self.num_rows,
            anchor_token_id,
            self.drafter.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens,
            SamplingParams() if sampling is None else sampling,
            draft_probs_topk,
            rng_counter,
        )
