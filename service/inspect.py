"""`draft-engine inspect`: what a checkpoint is, whether it loads, and which attention backend would serve it.

Every attention backend is listed with all its reasons, and every path of a usable one is probed on this machine, exactly as
`serve` does with the one that it takes. With `--target` the draft is held against that target, and every reason why the two do
not belong together is listed. With `--json` the same facts are one JSON document, for scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from attention.backends import BACKENDS
from attention.survey import AttentionSurvey, BackendSurvey, survey_attention
from draft_model.backbone.base import attention_problem
from draft_model.checkpoint import TensorReader, fingerprint
from draft_model.config import DraftConfig, MlaGeometry
from draft_model.formats import LAYER_ID_CONVENTIONS, load_config
from draft_model.linear import compute_dtype
from draft_model.pairing import pairing_problems
from draft_model.rotary import RopeConfig
from service.errors import StartupError
from service.loading import resolve_device
from service.settings import EngineSettings

_KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class InspectSettings(EngineSettings):
    """Describing a checkpoint."""

    model: Path | None = Field(None, description="Folder of the draft checkpoint. Default: the drafter that ships.")
    target: Path | None = Field(None, description="Folder of a target model to hold the draft against; config.json will do.")
    attention: bool = Field(False, description="Only the attention backends: usable or not, every reason, the path taken.")
    json_: bool = Field(False, description="Print one JSON document.")
    device: str = Field("auto", description="Device to choose attention backends for: auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Type of the draft weights.")
    attention_backend: str | None = Field(None, description="Force one attention backend. Default: best that fits.")
    page_size: int = Field(64, ge=1, le=1024, description="Context rows in a page.")


@dataclass(frozen=True)
class LayerSurvey:
    """The attention of some layers that ask for the same."""

    layers: tuple[int, ...]
    survey: AttentionSurvey


def print_report(folder: Path, settings: InspectSettings, console: Console) -> bool:
    """Print what was asked about the checkpoint in `folder`.

    Returns whether an attention backend may serve every layer and the draft fits the target, where one is given.

    Raises:
        CheckpointError: a folder cannot be loaded; the message names file, key or tensor.
        StartupError: the device or the attention backend is unknown.
    """
    config = load_config(folder)
    facts = {} if settings.attention else {"checkpoint": str(folder), **_file_facts(folder, config), **describe(config)}
    problems = None if settings.target is None else pairing_problems(folder, config, settings.target)
    surveys = survey_layers(config, settings)
    if settings.json_:
        document = {
            **({"facts": facts} if facts else {}),
            **({} if problems is None else {"target": {"path": str(settings.target), "problems": problems}}),
            "attention": [_as_json(own) for own in surveys],
        }
        console.out(json.dumps(document, indent=1), highlight=False)
    else:
        if facts:
            table = Table(show_header=False)
            for name, value in facts.items():
                table.add_row(name, value)
            console.print(table)
        if problems is not None:
            verdict = "fits the draft" if not problems else "does not fit the draft:"
            console.print("\n  ".join([f"target {settings.target}: {verdict}", *problems]), markup=False)
        for own in surveys:
            console.print(_as_table(own))
            if own.survey.error is not None:
                console.print(own.survey.error, markup=False)
    return not problems and all(own.survey.error is None for own in surveys)


def _file_facts(folder: Path, config: DraftConfig) -> dict[str, str]:
    tensors = TensorReader(folder, config.stored_dtype)
    shapes = [torch.Size(tensors.shape(name)) for name in tensors.names]
    return {
        "tensors": f"{len(shapes)}, {sum(shape.numel() for shape in shapes):,} numbers",
        "files": ", ".join(f"{file.name} {file.stat().st_size / 2**20:.1f} MiB" for file in tensors.files),
        "fingerprint": fingerprint(folder),
    }


def describe(config: DraftConfig) -> dict[str, str]:
    """The facts of a config, for people."""
    attention = config.attention
    if isinstance(attention, MlaGeometry):
        geometry = f"MLA, {config.num_heads} heads, latent {attention.kv_lora_rank} + {attention.qk_rope_head_dim}"
    else:
        geometry = f"GQA, {config.num_heads} heads over {attention.num_kv_heads} of {attention.head_dim}"
    return {
        "format": f"{config.source_format} ({config.model_name})",
        "backbone": f"{config.num_layers} layers, hidden {config.hidden_size}, MLP {config.intermediate_size}",
        "attention": geometry,
        "block": f"{config.draft_block_size} slots, {config.max_draft_tokens} drafts",
        "heads": f"Markov {config.head_type} (rank {config.markov_rank}), "
        f"confidence {'yes' if config.has_confidence else 'no'}",
        "vocabulary": f"{config.draft_vocab_size:,} draft tokens of {config.vocab_size:,}",
        "target": f"hidden {config.target_hidden_size}, {config.target_num_layers or '?'} layers, "
        f"features of layers {list(config.target_layer_ids)}",
        "mask token": str(config.mask_token_id),
        "layer ids": f"stored {list(config.stored_layer_ids)}; {LAYER_ID_CONVENTIONS[config.source_format].meaning}",
        "rotary": _rotary(config.rope),
        "windows": ", ".join("all" if window is None else str(window) for window in config.layer_windows),
        "context row": f"{config.kv_row_width} numbers per layer",
        "KV bytes per token": ", ".join(
            f"{name} {config.num_layers * config.kv_row_width * size:,}" for name, size in _KV_BYTES.items()
        ),
        "longest position": f"{config.max_position:,}",
    }


def _rotary(rope: RopeConfig) -> str:
    said = [f"{rope.rope_type}, theta {rope.theta:g}", f"{rope.rotary_dim} of {rope.head_dim} dimensions"]
    said.append("neighbouring pairs" if rope.interleaved else "halves")
    if rope.rope_type != "default":
        said.append(f"factor {rope.factor:g} over {rope.original_max_position:,} positions")
    if rope.attention_factor != 1.0 or rope.softmax_factor != 1.0:
        said.append(f"cosines x {rope.attention_factor:.4g}, softmax scale x {rope.softmax_factor:.4g}")
    return "; ".join(said)


def survey_layers(config: DraftConfig, settings: InspectSettings) -> list[LayerSurvey]:
    """Probe the attention backends for every kind of layer that the draft has.

    Raises:
        StartupError: the device or the attention backend is unknown.
    """
    override = settings.attention_backend
    if override is not None and override not in BACKENDS:
        raise StartupError(f"--attention-backend {override}: unknown; known: {', '.join(BACKENDS)}")
    device = resolve_device(settings.device)
    weight_dtype = config.stored_dtype or torch.float16
    if settings.dtype != "auto":
        weight_dtype = getattr(torch, settings.dtype)
    dtype = compute_dtype(weight_dtype, device)
    layers: dict[Any, list[int]] = {}
    for layer in range(config.num_layers):
        problem = attention_problem(config, layer, page_size=settings.page_size, device=device, dtype=dtype)
        layers.setdefault(problem, []).append(layer)
    return [LayerSurvey(tuple(own), survey_attention(problem, override)) for problem, own in layers.items()]


def _as_table(own: LayerSurvey) -> Table:
    table = Table(title=f"layers {', '.join(map(str, own.layers))}: {own.survey.problem}", title_justify="left")
    for title in ("backend", "verdict", "probes", "reasons"):
        table.add_column(title, overflow="fold")
    for backend in own.survey.backends:
        table.add_row(backend.backend, backend.verdict, _probe_text(backend), "\n".join(backend.reasons))
    return table


def _probe_text(backend: BackendSurvey) -> str:
    return "\n".join(f"{path}: {said}" for path, said in backend.probes.items()) or "not run"


def _as_json(own: LayerSurvey) -> Mapping[str, Any]:
    problem, selection = own.survey.problem, own.survey.selection
    return {
        "layers": list(own.layers),
        "problem": {
            "kind": problem.kind,
            "draft_block_size": problem.draft_block_size,
            "num_heads": problem.num_heads,
            "num_kv_heads": problem.num_kv_heads,
            "key_dim": problem.key_dim,
            "value_dim": problem.value_dim,
            "dtype": _short(problem.dtype),
            "kv_cache_dtype": _short(problem.kv_cache_dtype),
            "page_size": problem.page_size,
            "sliding_window": problem.sliding_window,
            "device": str(problem.device),
        },
        "backend": None if selection is None else selection.backend,
        "path": None if selection is None else str(selection.path),
        "error": own.survey.error,
        "backends": [
            {
                "backend": backend.backend,
                "verdict": backend.verdict,
                "reasons": list(backend.reasons),
                "probes": {str(path): said for path, said in backend.probes.items()},
            }
            for backend in own.survey.backends
        ],
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
