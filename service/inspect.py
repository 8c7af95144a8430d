"""`draft-engine inspect`: what a checkpoint is, whether it loads, and which attention backend would serve it."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from attention.backends import default_backends
from attention.selector import AttentionSelectionError, select_backend
from draft_model.backbone.base import attention_problem
from draft_model.checkpoint import TensorReader, fingerprint
from draft_model.config import DraftConfig, MlaGeometry
from draft_model.formats import load_config
from draft_model.linear import compute_dtype
from service.settings import EngineSettings


class InspectSettings(EngineSettings):
    """Describing a checkpoint."""

    model: Path | None = Field(None, description="Folder of the draft checkpoint. Default: the drafter that ships.")
    device: str = Field("cpu", description="Device to choose attention backends for: cpu, cuda or cuda:N.")
    page_size: int = Field(64, ge=1, le=1024, description="Context rows in a page.")


def print_report(folder: Path, settings: InspectSettings, console: Console) -> None:
    """Print everything about the checkpoint in `folder`.

    Raises:
        CheckpointError: it cannot be loaded; the message names file, key or tensor.
    """
    config = load_config(folder)
    tensors = TensorReader(folder, config.stored_dtype)
    facts = Table(title=str(folder), show_header=False)
    for name, value in describe(config).items():
        facts.add_row(name, value)
    numbers = [tensors.shape(name) for name in tensors.names]
    facts.add_row("tensors", f"{len(numbers)}, {sum(torch.Size(shape).numel() for shape in numbers):,} numbers")
    facts.add_row("files", ", ".join(f"{file.name} {file.stat().st_size / 2**20:.1f} MiB" for file in tensors.files))
    facts.add_row("fingerprint", fingerprint(folder))
    console.print(facts)
    console.print(attention_table(config, settings))


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
        "context row": f"{config.kv_row_width} numbers per layer",
        "longest position": f"{config.max_position:,}",
    }


def attention_table(config: DraftConfig, settings: InspectSettings) -> Table:
    """Which backend would serve the first layer, and why the others would not."""
    device = torch.device(settings.device)
    dtype = compute_dtype(config.stored_dtype or torch.float16, device)
    table = Table(title=f"attention on {device}, {str(dtype).removeprefix('torch.')}")
    for title in ("backend", "verdict"):
        table.add_column(title)
    problem = attention_problem(config, 0, page_size=settings.page_size, device=device, dtype=dtype)
    try:
        selection = select_backend(problem, default_backends(), None)
    except AttentionSelectionError as error:
        for rejection in error.rejected:
            table.add_row(rejection.backend, "; ".join(rejection.reasons))
        return table
    table.add_row(selection.backend, f"chosen, {selection.path}")
    for rejection in selection.rejected:
        table.add_row(rejection.backend, "; ".join(rejection.reasons))
    return table
