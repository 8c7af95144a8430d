"""Token sequences that the target wrote itself, and where they lie on disk.

A sequence file is a safetensors file with `token_ids` int32 [N, L] padded with -1 (a whole chat: system prompt, user turn,
assistant turn), `prompt_length` int32 [N] (index at which the answer starts) and `temperature` float32 [N] of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_model.errors import CheckpointError

PADDING = -1


@dataclass(frozen=True)
class Sequence:
    """One chat: token_ids int64 [n]; the answer is [prompt_length, n); temperature 0 means greedy."""

    token_ids: Tensor
    prompt_length: int
    temperature: float


def load_sequences(paths: Iterable[Path]) -> list[Sequence]:
    """Read sequence files in order.

    Raises:
        CheckpointError: a file is missing, unreadable or lacks a tensor.
    """
    sequences: list[Sequence] = []
    for path in paths:
        try:
            tensors = load_file(path)
            rows = zip(tensors["token_ids"], tensors["prompt_length"], tensors["temperature"], strict=True)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"sequence file {path} cannot be read: {error}") from None
        except KeyError as error:
            raise CheckpointError(f"sequence file {path} lacks the tensor {error.args[0]}") from None
        sequences += [Sequence(ids[ids != PADDING].long(), int(prompt), float(heat)) for ids, prompt, heat in rows]
    return sequences


def save_sequences(path: Path, sequences: list[Sequence]) -> None:
    """Write one sequence file, whole or not at all."""
    token_ids = torch.nn.utils.rnn.pad_sequence(
        [sequence.token_ids.int() for sequence in sequences], batch_first=True, padding_value=PADDING
    )
    tensors = {
        "token_ids": token_ids,
        "prompt_length": torch.tensor([sequence.prompt_length for sequence in sequences], dtype=torch.int32),
        "temperature": torch.tensor([sequence.temperature for sequence in sequences], dtype=torch.float32),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)
