"""What a draft model is: one frozen description, whatever format its checkpoint came in.

`formats.py` turns each source format into a `DraftConfig`. Everything after it (backbone, heads, drafter, service) reads only
this, so no later code asks which format or method a checkpoint is of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from draft_model.errors import CheckpointError
from draft_model.rotary import RopeConfig

SourceFormat = Literal["k3_dspark", "deepspec", "speculators", "dflash"]
HeadType = Literal["vanilla", "gated", "rnn", "none"]
HiddenAct = Literal["silu", "gelu_pytorch_tanh"]
D2tFormat = Literal["offset", "index"]


@dataclass(frozen=True)
class MlaGeometry:
    """Multi-head latent attention: one latent row per token, shared by all heads."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def latent_dim(self) -> int:
        """Width of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class GqaGeometry:
    """Grouped-query attention.

    Args:
        num_kv_heads: key/value heads.
        head_dim: may differ from hidden_size / num_heads.
        has_value_proj: False takes the raw key projection as value (Gemma4's attention_k_eq_v).
        normalises_value: values pass a norm without weight (Gemma4).
        has_sandwich_norms: norms after attention and around the MLP, and a scalar per layer (Gemma4).
        softmax_scale: multiplies query-key products.
    """

    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    has_value_proj: bool = True
    normalises_value: bool = False
    has_sandwich_norms: bool = False


@dataclass(frozen=True)
class DraftConfig:
    """A draft model, resolved.

    Args:
        source_format: the format it was read from.
        model_name: the checkpoint's architecture name, for people.
        attention: the geometry of the backbone; its type says which backbone it is.
        layer_windows: rows before the block that each draft layer sees, None for all of them.
        vocab_size: the target's vocabulary; every token id in and out is one of these.
        draft_vocab_size: rows of the LM head; smaller than vocab_size when the checkpoint has a d2t tensor.
        d2t_format: how d2t is to be read when the config says so.
        draft_block_size: S, slots of one draft forward.
        sample_from_anchor: the anchor's slot predicts too (DSpark); otherwise only the S - 1 mask slots do (DFlash).
        target_layer_ids: decoder layers of the target whose output is captured, 0-based, in feature order; -1 is the
            output of the embedding.
        stored_layer_ids: the same as the checkpoint writes them.
        target_num_layers: layers of the target, where the checkpoint says so.
        has_confidence, confidence_with_markov: the confidence head and whether it reads the Markov embedding.
        logit_scale: multiplies base logits.
        logit_softcap: `cap * tanh(logits / cap)`, before the Markov bias.
        embedding_scale: multiplies embedded block tokens.
        tie_word_embeddings: the LM head is the draft's own embedding.
        stored_dtype: the dtype every floating tensor is declared to have, where the checkpoint says so.
    """

    source_format: SourceFormat
    model_name: str
    attention: MlaGeometry | GqaGeometry
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    hidden_act: HiddenAct
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    vocab_size: int
    draft_vocab_size: int
    mask_token_id: int
    draft_block_size: int
    sample_from_anchor: bool
    target_layer_ids: tuple[int, ...]
    stored_layer_ids: tuple[int, ...]
    target_hidden_size: int
    target_num_layers: int | None
    head_type: HeadType
    markov_rank: int
    has_confidence: bool
    confidence_with_markov: bool
    max_position: int
    tie_word_embeddings: bool
    stored_dtype: torch.dtype | None
    d2t_format: D2tFormat | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embedding_scale: float = 1.0

    @property
    def max_draft_tokens(self) -> int:
        """Drafts one block yields."""
        return self.draft_block_size if self.sample_from_anchor else self.draft_block_size - 1

    @property
    def feature_width(self) -> int:
        """Width of a raw context row."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    @property
    def kv_row_width(self) -> int:
        """Cached numbers per token and layer."""
        if isinstance(self.attention, MlaGeometry):
            return self.attention.latent_dim
        return 2 * self.attention.num_kv_heads * self.attention.head_dim


def read_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return raw
