"""Checkpoint formats: one resolver each, from `config.json` to a `DraftConfig`.

    k3_dspark     Kimi-K3-DSpark (MLA backbone), and the drafts this project trains
    deepspec      DeepSpec: Qwen3 and Gemma4 DSpark, and its DFlash (the same with Markov rank 0)
    speculators   the speculators library: the draft's decoder config is nested, the vocabulary may be reduced
    dflash        z-lab DFlash: mask token and layer ids are nested in `dflash_config`

A key that decides what the model computes is required. Its absence is an error that names it, never a default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from draft_model.config import (
    D2tFormat,
    DraftConfig,
    GqaGeometry,
    HeadType,
    HiddenAct,
    MlaGeometry,
    SourceFormat,
    read_json,
)
from draft_model.errors import CheckpointError
from draft_model.rotary import resolve_rope

T = TypeVar("T")


@dataclass(frozen=True)
class LayerIdConvention:
    """How a format counts the target layers it captures.

    Args:
        offset: add to a stored id to get the 0-based decoder layer whose output is captured (-1: the embedding's output).
        meaning: the convention in words.
    """

    offset: int
    meaning: str


# The one place where layer ids are translated.
LAYER_ID_CONVENTIONS: Mapping[SourceFormat, LayerIdConvention] = MappingProxyType(
    {
        "k3_dspark": LayerIdConvention(0, "id k is the output of decoder layer k"),
        "deepspec": LayerIdConvention(0, "id k is the output of decoder layer k; -1 is the embedding's output"),
        "dflash": LayerIdConvention(0, "id k is the output of decoder layer k"),
        "speculators": LayerIdConvention(-1, "id k is the input of decoder layer k; 0 is the embedding's output"),
    }
)

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
_HEAD_TYPES: Mapping[str, HeadType] = MappingProxyType({"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"})
_D2T_FORMATS: Mapping[str, D2tFormat] = MappingProxyType({"offset": "offset", "index": "index"})
_SPECULATORS_TYPES: Mapping[str, str] = MappingProxyType({"dspark": "dspark", "dflash": "dflash"})
_HIDDEN_ACTS: Mapping[str, HiddenAct] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"})


class _Keys:
    """Typed access to a config object; every error names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.raw, self.where, self._prefix = raw, where, prefix

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self._prefix}{key} {problem}")

    @property
    def place(self) -> str:
        """File and enclosing key, for messages of others."""
        return f"{self.where}: {self._prefix.removesuffix('.')}" if self._prefix else self.where

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def need(self, key: str) -> Any:
        if not self.has(key):
            raise self.fail(key, "is missing")
        return self.raw[key]

    def size(self, key: str) -> int:
        value = self.need(key)
        if not _is_int(value) or value < 1:
            raise self.fail(key, f"must be a positive integer, not {value!r}")
        return int(value)

    def count(self, key: str, default: int) -> int:
        value = self.raw.get(key, default)
        if not _is_int(value) or value < 0:
            raise self.fail(key, f"must be an integer of at least 0, not {value!r}")
        return int(value)

    def token_id(self, key: str) -> int:
        self.need(key)
        return self.count(key, 0)

    def number(self, key: str) -> float:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool | None) -> bool:
        value = self.need(key) if default is None else self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {value!r}")
        return value

    def one_of(self, key: str, choices: Mapping[str, T]) -> T:
        value = self.need(key)
        if not isinstance(value, str) or value not in choices:
            raise self.fail(key, f"is {value!r}; supported: {', '.join(choices)}")
        return choices[value]

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.need(key)
        if not isinstance(value, list) or not value or not all(_is_int(item) for item in value):
            raise self.fail(key, f"must be a non-empty list of integers, not {value!r}")
        return tuple(value)

    def nested(self, key: str) -> _Keys:
        value = self.need(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, "must be an object")
        return _Keys(value, self.where, f"{self._prefix}{key}.")

    def refuse_true(self, *keys: str) -> None:
        for key in keys:
            if self.raw.get(key):
                raise self.fail(key, "is set; this engine has no such variant of the backbone")


def load_config(path: Path) -> DraftConfig:
    """Read `path/config.json` and resolve it.

    Raises:
        CheckpointError: the file is missing or malformed, the format is unknown or refused, a key is missing or inconsistent.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise CheckpointError(f"no draft model at {path}: not a folder")
    return resolve_config(read_json(file), str(file))


def resolve_config(raw: Mapping[str, Any], where: str) -> DraftConfig:
    """Resolve a config object; `where` names it in messages. Raises as `load_config`."""
    keys = _Keys(raw, where)
    source_format = detect_format(raw, where)
    keys.refuse_true("quantization_config", "attention_sink_bias")
    config = _RESOLVERS[source_format](keys)
    _check(config, keys)
    return config


def detect_format(raw: Mapping[str, Any], where: str) -> SourceFormat:
    """Tell the format of a config.

    Raises:
        CheckpointError: it is none that is supported, with the reason.
    """
    names = [name for name in raw.get("architectures") or [] if isinstance(name, str)]
    model_type = raw.get("model_type")
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return "speculators"
    if model_type == "k3_dspark" or "K3DSparkModel" in names:
        return "k3_dspark"
    if any(key in raw for key in ("n_mtp_layers", "dspark_block_size", "dspark_target_layer_ids")) or any(
        "DeepseekV4" in name or "DeepSeekV4" in name for name in names
    ):
        raise CheckpointError(
            f"{where}: DeepSeek-V4 DSpark drafts live inside the target's checkpoint (mtp.* tensors: mixture-of-experts layers "
            "with hyper-connections over a sliding window) and cannot be served apart from it"
        )
    if raw.get("dflash_config") is not None:
        return "dflash"
    if any(name in ("Qwen3DSparkModel", "Gemma4DSparkModel") for name in names):
        return "deepspec"
    raise CheckpointError(
        f"{where}: not a draft model this engine knows (architectures {names}, model_type {model_type!r}); "
        f"supported formats: {', '.join(_RESOLVERS)}"
    )


def _resolve_k3(keys: _Keys) -> DraftConfig:
    keys.refuse_true("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor", "attention_bias")
    if not keys.has("q_lora_rank"):
        raise keys.fail("q_lora_rank", "is null or missing; the MLA draft needs the low-rank query projection")
    attention = MlaGeometry(
        q_lora_rank=keys.size("q_lora_rank"),
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_dim=keys.size("qk_nope_head_dim"),
        qk_rope_head_dim=keys.size("qk_rope_head_dim"),
        v_head_dim=keys.size("v_head_dim"),
    )
    stored = keys.integers("target_layer_ids")
    if keys.has("num_target_layers") and keys.size("num_target_layers") != len(stored):
        raise keys.fail("num_target_layers", f"is {keys.raw['num_target_layers']}, but target_layer_ids has {len(stored)}")
    head_type, markov_rank = _markov(keys)
    has_confidence, with_markov = _confidence(keys)
    vocab_size = keys.size("vocab_size")
    return DraftConfig(
        source_format="k3_dspark",
        model_name="K3DSparkModel",
        attention=attention,
        hidden_size=keys.size("hidden_size"),
        intermediate_size=keys.size("intermediate_size"),
        num_layers=keys.size("num_hidden_layers"),
        num_heads=keys.size("num_attention_heads"),
        hidden_act=keys.one_of("hidden_act", _HIDDEN_ACTS),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=resolve_rope(
            keys.raw, where=keys.where, head_dim=attention.qk_rope_head_dim, interleaved=True, scales_softmax=True
        ),
        layer_windows=_layer_windows(keys, _check_not_causal(keys)),
        vocab_size=vocab_size,
        draft_vocab_size=keys.size("draft_vocab_size") if keys.has("draft_vocab_size") else vocab_size,
        # The published checkpoints have no d2t; the drafts this project trains have offsets.
        d2t_format=_d2t_format(keys) or "offset",
        mask_token_id=keys.token_id("mask_token_id"),
        draft_block_size=keys.size("block_size"),
        sample_from_anchor=keys.flag("sample_from_anchor", True),
        target_layer_ids=_translate(stored, "k3_dspark"),
        stored_layer_ids=stored,
        target_hidden_size=keys.size("target_hidden_size"),
        target_num_layers=keys.size("target_num_hidden_layers") if keys.has("target_num_hidden_layers") else None,
        head_type=head_type,
        markov_rank=markov_rank,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
        max_position=keys.size("max_position_embeddings"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        stored_dtype=_stored_dtype(keys),
        logit_scale=keys.number("logit_scale") if keys.has("logit_scale") else 1.0,
    )


def _resolve_deepspec(keys: _Keys) -> DraftConfig:
    if "Gemma4DSparkModel" in keys.raw["architectures"]:
        return _resolve_gemma4(keys)
    return _resolve_qwen3(
        keys,
        keys,
        source_format="deepspec",
        layer_windows=_layer_windows(keys, _check_not_causal(keys)),
        stored_layer_ids=keys.integers("target_layer_ids"),
        mask_token_id=keys.token_id("mask_token_id"),
        sample_from_anchor=True,
        target_num_layers=keys.size("num_target_layers"),
    )


def _resolve_gemma4(keys: _Keys) -> DraftConfig:
    """Resolve a Gemma4 DSpark draft: every layer has the geometry of the target's full-attention layers."""
    keys.refuse_true(
        "attention_bias", "enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"
    )
    head_dim, hidden_size, vocab_size = keys.size("global_head_dim"), keys.size("hidden_size"), keys.size("vocab_size")
    shares_key = keys.flag("attention_k_eq_v", None)
    head_type, markov_rank = _markov(keys)
    has_confidence, with_markov = _confidence(keys)
    stored = keys.integers("target_layer_ids")
    stored_dtype = _stored_dtype(keys)
    if "final_logit_softcapping" not in keys.raw:
        raise keys.fail("final_logit_softcapping", "is missing; null means no cap")
    sliding_error = keys.fail("layer_types", "holds sliding_attention; Gemma4 drafts have full attention only")
    return DraftConfig(
        source_format="deepspec",
        model_name="Gemma4DSparkModel",
        attention=GqaGeometry(
            num_kv_heads=keys.size("num_global_key_value_heads" if shares_key else "num_key_value_heads"),
            head_dim=head_dim,
            softmax_scale=1.0,
            has_value_proj=not shares_key,
            normalises_value=True,
            has_sandwich_norms=True,
        ),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_layers=keys.size("num_hidden_layers"),
        num_heads=keys.size("num_attention_heads"),
        hidden_act=keys.one_of("hidden_activation", _HIDDEN_ACTS),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=resolve_rope(keys.raw, where=keys.where, head_dim=head_dim, interleaved=False, scales_softmax=False),
        layer_windows=_layer_windows(keys, sliding_error),
        vocab_size=vocab_size,
        draft_vocab_size=keys.size("draft_vocab_size") if keys.has("draft_vocab_size") else vocab_size,
        d2t_format=_d2t_format(keys),
        mask_token_id=keys.token_id("mask_token_id"),
        draft_block_size=keys.size("block_size"),
        sample_from_anchor=True,
        target_layer_ids=_translate(stored, "deepspec"),
        stored_layer_ids=stored,
        target_hidden_size=keys.size("target_hidden_size") if keys.has("target_hidden_size") else hidden_size,
        target_num_layers=keys.size("num_target_layers"),
        head_type=head_type,
        markov_rank=markov_rank,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
        max_position=keys.size("max_position_embeddings"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        stored_dtype=stored_dtype,
        logit_softcap=keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None,
        # The reference rounds the scale to the dtype of the table.
        embedding_scale=float(torch.tensor(hidden_size**0.5).to(stored_dtype or torch.float32)),
    )


def _resolve_dflash(keys: _Keys) -> DraftConfig:
    nested = keys.nested("dflash_config")
    nested.refuse_true("use_swa")
    stored = _agreeing(keys, nested, "target_layer_ids", _Keys.integers)
    if keys.has("eagle_aux_hidden_state_layer_ids"):
        inputs = keys.integers("eagle_aux_hidden_state_layer_ids")
        if inputs != tuple(layer_id + 1 for layer_id in stored):
            raise keys.fail("eagle_aux_hidden_state_layer_ids", f"must be target_layer_ids + 1, not {list(inputs)}")
    return _resolve_qwen3(
        keys,
        keys,
        source_format="dflash",
        layer_windows=_layer_windows(keys, _check_not_causal(keys)),
        stored_layer_ids=stored,
        mask_token_id=_agreeing(keys, nested, "mask_token_id", _Keys.token_id),
        sample_from_anchor=_samples_from_anchor(keys, nested),
        target_num_layers=keys.size("num_target_layers") if keys.has("num_target_layers") else None,
    )


def _samples_from_anchor(keys: _Keys, nested: _Keys) -> bool:
    """Tell whether the anchor's slot predicts. DFlash means no; a DSpark draft with a `dflash_config` has to say."""
    said = [place.flag("sample_from_anchor", None) for place in (keys, nested) if place.has("sample_from_anchor")]
    if keys.has("dspark_bonus_anchor"):
        said.append(not keys.flag("dspark_bonus_anchor", None))
    if len(set(said)) > 1:
        raise keys.fail("sample_from_anchor", "contradicts dflash_config.sample_from_anchor or dspark_bonus_anchor")
    is_dspark = keys.count("markov_rank", 0) > 0 or any("DSpark" in str(name) for name in keys.raw.get("architectures") or [])
    if not said and is_dspark:
        raise keys.fail("sample_from_anchor", "is missing, and a DSpark draft with a dflash_config may be either")
    return said[0] if said else False


def _resolve_speculators(keys: _Keys) -> DraftConfig:
    keys.one_of("speculators_model_type", _SPECULATORS_TYPES)
    keys.refuse_true("shift_label")
    if keys.raw.get("projector_type", "dflash") != "dflash":
        raise keys.fail("projector_type", f"is {keys.raw['projector_type']!r}; supported: dflash")
    sliding_error = None
    if not keys.flag("sliding_window_non_causal", False):
        sliding_error = keys.fail("sliding_window_non_causal", "is not true, so the sliding layers are causal")
    decoder = keys.nested("transformer_layer_config")
    return _resolve_qwen3(
        keys,
        decoder,
        source_format="speculators",
        layer_windows=_layer_windows(decoder, sliding_error),
        stored_layer_ids=keys.integers("aux_hidden_state_layer_ids"),
        mask_token_id=keys.token_id("mask_token_id"),
        sample_from_anchor=_speculators_anchor(keys),
        target_num_layers=None,
    )


def _speculators_anchor(keys: _Keys) -> bool:
    """Tell whether the anchor's slot predicts: older checkpoints say so only by how many tokens they propose."""
    block_size = keys.size("block_size")
    if keys.has("sample_from_anchor"):
        return keys.flag("sample_from_anchor", None)
    config = keys.raw.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, Mapping) else None
    counts = {method.get("speculative_tokens") for method in methods or [] if isinstance(method, Mapping)}
    for is_anchor, count in ((True, block_size), (False, block_size - 1)):
        if counts == {count}:
            return is_anchor
    raise keys.fail("sample_from_anchor", f"is missing, and speculators_config does not propose {block_size} or one fewer")


def _resolve_qwen3(
    keys: _Keys,
    decoder: _Keys,
    *,
    source_format: SourceFormat,
    layer_windows: tuple[int | None, ...],
    stored_layer_ids: tuple[int, ...],
    mask_token_id: int,
    sample_from_anchor: bool,
    target_num_layers: int | None,
) -> DraftConfig:
    """Resolve a Qwen3 decoder and the draft's own fields, which stand beside it or around it."""
    if decoder.raw.get("model_type") != "qwen3":
        raise decoder.fail("model_type", f"is {decoder.raw.get('model_type')!r}; the GQA backbone runs 'qwen3' decoders")
    decoder.refuse_true("attention_bias", "mlp_bias")
    head_dim = decoder.size("head_dim")
    head_type, markov_rank = _markov(keys)
    has_confidence, with_markov = _confidence(keys)
    vocab_size = decoder.size("vocab_size")
    hidden_size = decoder.size("hidden_size")
    return DraftConfig(
        source_format=source_format,
        model_name=(keys.raw.get("architectures") or ["unnamed"])[0],
        attention=GqaGeometry(decoder.size("num_key_value_heads"), head_dim, softmax_scale=head_dim**-0.5),
        hidden_size=hidden_size,
        intermediate_size=decoder.size("intermediate_size"),
        num_layers=decoder.size("num_hidden_layers"),
        num_heads=decoder.size("num_attention_heads"),
        hidden_act=decoder.one_of("hidden_act", _HIDDEN_ACTS),
        rms_norm_eps=decoder.number("rms_norm_eps"),
        rope=resolve_rope(decoder.raw, where=decoder.place, head_dim=head_dim, interleaved=False, scales_softmax=False),
        layer_windows=layer_windows,
        vocab_size=vocab_size,
        draft_vocab_size=keys.size("draft_vocab_size") if keys.has("draft_vocab_size") else vocab_size,
        d2t_format=_d2t_format(keys),
        mask_token_id=mask_token_id,
        draft_block_size=keys.size("block_size"),
        sample_from_anchor=sample_from_anchor,
        target_layer_ids=_translate(stored_layer_ids, source_format),
        stored_layer_ids=stored_layer_ids,
        target_hidden_size=keys.size("target_hidden_size") if keys.has("target_hidden_size") else hidden_size,
        target_num_layers=target_num_layers,
        head_type=head_type,
        markov_rank=markov_rank,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
        max_position=decoder.size("max_position_embeddings"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        stored_dtype=_stored_dtype(keys),
    )


_RESOLVERS: Mapping[SourceFormat, Callable[[_Keys], DraftConfig]] = MappingProxyType(
    {
        "k3_dspark": _resolve_k3,
        "deepspec": _resolve_deepspec,
        "speculators": _resolve_speculators,
        "dflash": _resolve_dflash,
    }
)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _translate(stored: tuple[int, ...], source_format: SourceFormat) -> tuple[int, ...]:
    offset = LAYER_ID_CONVENTIONS[source_format].offset
    return tuple(layer_id + offset for layer_id in stored)


def _markov(keys: _Keys) -> tuple[HeadType, int]:
    rank = keys.count("markov_rank", 0)
    if rank == 0:
        return "none", 0
    return keys.one_of("markov_head_type", _HEAD_TYPES), rank


def _confidence(keys: _Keys) -> tuple[bool, bool]:
    if not keys.flag("enable_confidence_head", False):
        return False, False
    with_markov = keys.flag("confidence_head_with_markov", None)
    if with_markov and keys.count("markov_rank", 0) == 0:
        raise keys.fail("confidence_head_with_markov", "is true, but markov_rank is 0")
    return True, with_markov


def _agreeing(keys: _Keys, nested: _Keys, key: str, read: Callable[[_Keys, str], T]) -> T:
    """Read a key that stands in one of two places or, equally, in both."""
    if nested.has(key) and keys.has(key) and read(nested, key) != read(keys, key):
        raise nested.fail(key, f"is {nested.raw[key]!r}, but the one at the top is {keys.raw[key]!r}")
    return read(nested if nested.has(key) else keys, key)


def _d2t_format(keys: _Keys) -> D2tFormat | None:
    return keys.one_of("d2t_format", _D2T_FORMATS) if keys.has("d2t_format") else None


def _check_not_causal(keys: _Keys) -> CheckpointError | None:
    """Refuse causal layers: a draft block is attended to as a whole.

    Returns:
        What is wrong with sliding layers, which are causal unless the config says that they are not.
    """
    nested = keys.raw.get("dflash_config")
    said = keys.raw.get("is_causal")
    if said is None and isinstance(nested, Mapping):
        said = nested.get("causal")
    if said:
        raise keys.fail("is_causal", "is true; this engine drafts with non-causal blocks only")
    return keys.fail("is_causal", "is missing; sliding layers are causal unless it is false") if said is None else None


def _layer_windows(keys: _Keys, sliding_error: CheckpointError | None) -> tuple[int | None, ...]:
    """Read each layer's sliding window: rows before the block that its slots see, all of them the same ones."""
    num_layers = keys.size("num_hidden_layers")
    if not keys.has("layer_types"):
        return (None,) * num_layers
    types = keys.raw["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.fail("layer_types", f"must list one type for each of the {num_layers} layers")
    windows: list[int | None] = []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.fail("layer_types", f"holds {kind!r}; supported: full_attention, sliding_attention")
        if kind == "sliding_attention" and sliding_error is not None:
            raise sliding_error
        windows.append(keys.size("sliding_window") if kind == "sliding_attention" else None)
    return tuple(windows)


def _stored_dtype(keys: _Keys) -> torch.dtype | None:
    for key in ("dtype", "torch_dtype"):
        if keys.has(key):
            return keys.one_of(key, _DTYPES)
    return None


def _check(config: DraftConfig, keys: _Keys) -> None:
    """Refuse what every format forbids."""
    ids = config.target_layer_ids
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        raise keys.fail("target_layer_ids", f"must be strictly increasing, not {list(config.stored_layer_ids)}")
    if ids[0] < -1:
        raise keys.fail("target_layer_ids", f"names a layer before the embedding: {config.stored_layer_ids[0]}")
    if config.target_num_layers is not None and ids[-1] >= config.target_num_layers - 1:
        raise keys.fail(
            "target_layer_ids",
            f"names the target's last layer or one past it ({config.stored_layer_ids[-1]} of {config.target_num_layers}); the "
            "last layer's captured state is already normed, so it is not a residual stream value",
        )
    if config.mask_token_id >= config.vocab_size:
        raise keys.fail("mask_token_id", f"is {config.mask_token_id}, outside the vocabulary of {config.vocab_size}")
    if config.draft_vocab_size > config.vocab_size:
        raise keys.fail("draft_vocab_size", f"is {config.draft_vocab_size}, more than vocab_size {config.vocab_size}")
    if config.max_draft_tokens < 1:
        raise keys.fail("block_size", f"is {config.draft_block_size}, which leaves no slot to draft in")
    if isinstance(config.attention, GqaGeometry) and config.num_heads % config.attention.num_kv_heads:
        raise keys.fail("num_attention_heads", f"must be a multiple of num_key_value_heads {config.attention.num_kv_heads}")
    if config.head_type == "rnn" and not config.sample_from_anchor:
        raise keys.fail(
            "markov_head_type", "is rnn, whose state would depend on the anchor's slot, which predicts nothing here"
        )
    if config.head_type == "none" and config.confidence_with_markov:
        raise keys.fail("confidence_head_with_markov", "needs a Markov head")
