"""Does a draft belong to a target? Answered from the two checkpoint folders, with every reason why not.

A wrong pair drafts and verifies without an error and only accepts less, so it must be found before it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_model.checkpoint import TensorReader, load_vocabulary
from draft_model.config import DraftConfig, read_json
from draft_model.errors import CheckpointError


def target_differences(config: DraftConfig, target: Mapping[str, Any]) -> list[str]:
    """How a target's config.json differs from the target that the drafter was trained for. Empty: in nothing that it says.

    Args:
        config: of the draft.
        target: a config.json of any decoder, or of a multimodal model around one (`text_config`).
    """
    text = target.get("text_config", target)
    expected = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.target_num_layers,
    }
    differences = [
        f"{name} is {text.get(name)}, the drafter's target has {value}"
        for name, value in expected.items()
        if value is not None and text.get(name) != value
    ]
    num_layers, last_captured = text.get("num_hidden_layers"), config.target_layer_ids[-1]
    # A draft that names no layer count can still name a layer that this target lacks, or whose captured state is normed.
    if config.target_num_layers is None and isinstance(num_layers, int) and last_captured >= num_layers - 1:
        differences.append(f"num_hidden_layers is {num_layers}, the drafter reads the unnormed output of layer {last_captured}")
    return differences


def pairing_problems(path: Path, config: DraftConfig, target_path: Path) -> list[str]:
    """Why the draft checkpoint `path` does not fit the target in `target_path`; empty when it does.

    Reads the tensors that the draft takes from the target (embedding, LM head), and only those.

    Raises:
        CheckpointError: one of the folders cannot be read.
    """
    problems = target_differences(config, read_json(target_path / "config.json"))
    tensors = TensorReader(path, config.stored_dtype)
    try:
        load_vocabulary(config, tensors, target_path if _takes_from_target(config, tensors) else None)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def _takes_from_target(config: DraftConfig, tensors: TensorReader) -> bool:
    has_embedding = "embed_tokens.weight" in tensors
    return not has_embedding or not (config.tie_word_embeddings or "lm_head.weight" in tensors)
