"""From settings to a loaded drafter: which folders, which device, which dtype. For every command that loads one."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from draft_model.drafter import Drafter
from service.errors import StartupError
from service.settings import ServeSettings
from service.shipped import shipped_drafter
from service.target.weights import default_cache_dir, ensure_target

logger = logging.getLogger(__name__)


def model_folders(settings: ServeSettings) -> tuple[Path, Path | None]:
    """Return the draft checkpoint and its target's folder; the drafter that ships belongs to the embedded target.

    Raises:
        StartupError: the shipped drafter or the embedded target cannot be had.
    """
    if settings.model is not None:
        return settings.model, settings.target_model
    return shipped_drafter(), settings.target_model or ensure_target(default_cache_dir(), logger.info)


def resolve_device(name: str) -> torch.device:
    """Turn `auto` into the best device there is, and any other name into that device.

    Raises:
        StartupError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"--device {name}: no such device; auto, cpu, cuda or cuda:N") from error


def load_drafter(
    settings: ServeSettings, path: Path, target_path: Path | None, *, kv_cache_memory: int | None = None
) -> Drafter:
    """Load the draft model as `serve` does, with its pool, or with a smaller one.

    Raises:
        StartupError: the device is not there.
        CheckpointError: the checkpoint cannot be loaded exactly.
        AttentionSelectionError: no attention backend can serve it.
    """
    device = resolve_device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"--device {settings.device}: no CUDA device is available")
    return Drafter.load(
        path,
        target_path=target_path,
        device=device,
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        kv_cache_memory=settings.kv_cache_memory if kv_cache_memory is None else kv_cache_memory,
        page_size=settings.page_size,
        attention_backend=settings.attention_backend,
        context_bias=settings.context_bias,
    )


def tokenizer_folder(target_path: Path | None) -> Path | None:
    """Return the target's folder where it holds a tokenizer."""
    has_one = target_path is not None and (target_path / "tokenizer.json").is_file()
    return target_path if has_one else None
