"""Strict checkpoint loading: what a file holds and what the model needs must be the same set of tensors.

A backbone takes its tensors one by one from a `TensorReader`, naming the shape it expects. A missing, mis-shaped or retyped
tensor fails there; a tensor nobody took fails at the end. No parameter exists before its tensor does, so none can keep an
initial value.

Shape symbols: V vocab_size, D draft_vocab_size, E hidden_size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draft_model.config import D2tFormat, DraftConfig, read_json
from draft_model.errors import CheckpointError

TensorSource = Literal["own", "tied", "target"]

# Where targets of the field keep these tensors, text-only and inside multimodal wrappers.
_TARGET_EMBEDDINGS = tuple(
    f"{prefix}embed_tokens.weight"
    for prefix in ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
)
_TARGET_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_HASH_CHUNK_BYTES = 1 << 22


class TensorReader:
    """The tensors of a checkpoint folder: `model.safetensors`, or shards with `model.safetensors.index.json`.

    Args:
        folder: the checkpoint.
        stored_dtype: the dtype that every floating tensor must have; None accepts any floating dtype.
        names: tensors that will be asked for; shards without any of them need not be there. None for all.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """

    def __init__(self, folder: Path, stored_dtype: torch.dtype | None = None, names: Collection[str] | None = None) -> None:
        self.folder = folder
        self.stored_dtype = stored_dtype
        self.files = weight_files(folder, names)
        self._file_of: dict[str, tuple[Path, Any]] = {}
        self._taken: set[str] = set()
        for file in self.files:
            handle = _open(file)
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in self._file_of:
                    raise CheckpointError(f"{self._where(name)} is in {file.name} too")
                self._file_of[name] = (file, handle)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._entry(name)[1].get_slice(name).get_shape())

    def dtype_name(self, name: str) -> str:
        """Return the safetensors name of a tensor's dtype, such as `F16` or `BOOL`."""
        return str(self._entry(name)[1].get_slice(name).get_dtype())

    def take(self, name: str, *shape: int) -> Tensor:
        """Read a floating tensor of exactly this shape and count it as used.

        Raises:
            CheckpointError: it is missing, or its shape or dtype is another.
        """
        tensor = self._read(name, shape)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self._where(name)} has dtype {_name(tensor.dtype)}, expected a floating dtype")
        if self.stored_dtype is not None and tensor.dtype != self.stored_dtype:
            raise CheckpointError(
                f"{self._where(name)} has dtype {_name(tensor.dtype)}, but config.json declares {_name(self.stored_dtype)}"
            )
        return tensor

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """Read an integer or bool tensor of exactly this shape, as int64, and count it as used. Raises as `take`."""
        tensor = self._read(name, shape)
        if tensor.is_floating_point() or tensor.is_complex():
            raise CheckpointError(f"{self._where(name)} has dtype {_name(tensor.dtype)}, expected integers")
        return tensor.long()

    def finish(self) -> None:
        """Check that every tensor was used.

        Raises:
            CheckpointError: tensors are left; names them.
        """
        left = [name for name in self.names if name not in self._taken]
        if left:
            more = "" if len(left) <= 8 else f" and {len(left) - 8} more"
            raise CheckpointError(
                f"{self.folder}: unexpected tensors that this model has no use for: {', '.join(left[:8])}{more}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        _, handle = self._entry(name)
        stored = self.shape(name)
        if stored != shape:
            raise CheckpointError(f"{self._where(name)} has shape {list(stored)}, expected {list(shape)}")
        self._taken.add(name)
        tensor: Tensor = handle.get_tensor(name)
        return tensor

    def _entry(self, name: str) -> tuple[Path, Any]:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        return self._file_of[name]

    def _where(self, name: str) -> str:
        return f"{self._file_of[name][0]}: tensor {name}"


def weight_files(folder: Path, names: Collection[str] | None = None) -> list[Path]:
    """List the safetensors files of a checkpoint, or only those that hold some of `names`.

    Raises:
        CheckpointError: there are none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{single} does not exist")
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing")
    files = sorted({folder / str(file) for name, file in weight_map.items() if names is None or name in names})
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist, but {index.name} names it")
    return files


def fingerprint(folder: Path) -> str:
    """Hash config and weights of a checkpoint: 16 hex digits that change with any byte of either."""
    digest = hashlib.sha256()
    for file in [folder / "config.json", *weight_files(folder)]:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Vocabulary:
    """The tensors that tie a draft to its target's token ids.

    embedding: [V, E]; lm_head: [D, E]; draft_to_target: [D] int64 token ids, None when the vocabularies are one.
    d2t_format: how the stored d2t was read.
    """

    embedding: Tensor
    lm_head: Tensor
    draft_to_target: Tensor | None
    embedding_source: TensorSource
    lm_head_source: TensorSource
    d2t_format: D2tFormat | None


def load_vocabulary(config: DraftConfig, draft: TensorReader, target_path: Path | None) -> Vocabulary:
    """Read embedding, LM head and vocabulary map: the draft's own, tied, or the target's by name.

    Raises:
        CheckpointError: one is in neither checkpoint, its shape does not fit, or d2t is inconsistent.
    """
    draft_to_target, d2t_format = _read_d2t(config, draft)
    target = None if target_path is None else _Target(target_path)
    shape = (config.vocab_size, config.hidden_size)

    embedding_source: TensorSource = "own"
    if "embed_tokens.weight" in draft:
        embedding = draft.take("embed_tokens.weight", *shape)
    else:
        embedding = _need_target(target, draft, "embed_tokens.weight").embedding(*shape)
        embedding_source = "target"

    if "lm_head.weight" in draft:
        lm_head = draft.take("lm_head.weight", config.draft_vocab_size, config.hidden_size)
        return Vocabulary(embedding, lm_head, draft_to_target, embedding_source, "own", d2t_format)
    lm_head_source: TensorSource
    if config.tie_word_embeddings and embedding_source == "own":
        lm_head, lm_head_source = embedding, "tied"
    else:
        lm_head, lm_head_source = _need_target(target, draft, "lm_head.weight").lm_head(*shape), "target"
    if draft_to_target is not None:
        lm_head = lm_head[draft_to_target]
    return Vocabulary(embedding, lm_head, draft_to_target, embedding_source, lm_head_source, d2t_format)


class _Target:
    """The two tensors a draft may take from its target's checkpoint."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"no target model at {folder}: not a folder")
        raw = read_json(folder / "config.json")
        text = raw.get("text_config")
        self._tied = bool((text if isinstance(text, dict) else raw).get("tie_word_embeddings", raw.get("tie_word_embeddings")))
        # A draft server need not hold the whole target: the shards with these tensors will do.
        self._reader = TensorReader(folder, names={*_TARGET_EMBEDDINGS, *_TARGET_HEADS})

    def embedding(self, *shape: int) -> Tensor:
        return self._first(_TARGET_EMBEDDINGS, shape)

    def lm_head(self, *shape: int) -> Tensor:
        if self._tied and not any(name in self._reader for name in _TARGET_HEADS):
            return self.embedding(*shape)
        return self._first(_TARGET_HEADS, shape)

    def _first(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        for name in names:
            if name in self._reader:
                return self._reader.take(name, *shape)
        raise CheckpointError(f"{self._reader.folder}: the target has none of {', '.join(names)}")


def _need_target(target: _Target | None, draft: TensorReader, name: str) -> _Target:
    if target is None:
        raise CheckpointError(f"{draft.folder}: tensor {name} is missing and no target path was given to take it from")
    return target


def _read_d2t(config: DraftConfig, draft: TensorReader) -> tuple[Tensor | None, D2tFormat | None]:
    """Read the map from draft ids to token ids, and check it against t2d where there is one."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    if "d2t" not in draft:
        if size != vocab:
            raise CheckpointError(f"{draft.folder}: tensor d2t is missing; draft_vocab_size {size} is below vocab_size {vocab}")
        return None, None
    stored = draft.take_integers("d2t", size)
    readings: dict[D2tFormat, Tensor] = {"offset": stored + torch.arange(size), "index": stored}
    valid = {name: ids for name, ids in readings.items() if _is_injection(ids, vocab)}
    if config.d2t_format is not None:
        valid = {name: ids for name, ids in valid.items() if name == config.d2t_format}
    if "t2d" in draft:
        known = _members(draft, vocab)
        valid = {name: ids for name, ids in valid.items() if torch.equal(ids.sort().values, known)}
    if not valid:
        raise CheckpointError(
            f"{draft.folder}: tensor d2t does not map {size} draft ids to distinct token ids below {vocab}"
            + (", or not to those that t2d marks" if "t2d" in draft else "")
            + (f" (read as {config.d2t_format}; d2t_format in config.json says how)" if config.d2t_format else "")
        )
    if len(valid) > 1:
        raise CheckpointError(
            f"{draft.folder}: tensor d2t can be read as offsets and as indices; say which with d2t_format in config.json"
        )
    ((name, ids),) = valid.items()
    return ids, name


def _members(draft: TensorReader, vocab: int) -> Tensor:
    """Return the token ids that t2d marks, ascending: a bool mask [V], or draft ids with -1 for tokens left out."""
    is_mask = draft.dtype_name("t2d") == "BOOL"
    stored = draft.take_integers("t2d", vocab)
    return (stored > 0 if is_mask else stored >= 0).nonzero()[:, 0]


def _is_injection(ids: Tensor, vocab: int) -> bool:
    return bool(len(torch.unique(ids)) == len(ids) and ids.min() >= 0 and ids.max() < vocab)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
