"""Target features and top-k target probabilities of token sequences, computed once and kept on disk.

Shards (see training/dataset.py) are named by number; a run that was stopped goes on with the first one that is missing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from draft_model.target_model import TargetModel
from draft_model.training.dataset import CachedSequence, save_shard
from draft_model.training.sequences import Sequence

_BATCH_ROWS = 512


def cache_features(
    target: TargetModel,
    sequences: list[Sequence],
    folder: Path,
    *,
    target_layer_ids: tuple[int, ...],
    topk: int,
    sequences_per_shard: int = 128,
) -> list[Path]:
    """Run every sequence through the target and write its shards; returns all shard paths in order."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    starts = range(0, len(sequences), sequences_per_shard)
    progress = tqdm(total=sum(len(sequence.token_ids) for sequence in sequences), unit="tok", desc="features")
    for number, start in enumerate(starts):
        part = sequences[start : start + sequences_per_shard]
        path = folder / f"features-{number:05d}.safetensors"
        if not path.exists():
            _write_shard(target, part, path, target_layer_ids=target_layer_ids, topk=topk)
        progress.update(sum(len(sequence.token_ids) for sequence in part))
        shards.append(path)
    progress.close()
    return shards


def _write_shard(
    target: TargetModel, sequences: list[Sequence], path: Path, *, target_layer_ids: tuple[int, ...], topk: int
) -> None:
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
    features: dict[int, torch.Tensor] = {}
    topk_ids: dict[int, torch.Tensor] = {}
    topk_probs: dict[int, torch.Tensor] = {}
    while order:
        longest = len(sequences[order[-1]].token_ids)
        batch = [order.pop() for _ in range(min(len(order), max(1, _BATCH_ROWS // longest)))]
        token_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, index in enumerate(batch):
            token_ids[row, : len(sequences[index].token_ids)] = sequences[index].token_ids
        cache = target.new_cache(len(batch), longest)
        output = target.forward(token_ids, torch.zeros(len(batch), dtype=torch.long), cache, target_layer_ids)
        for row, index in enumerate(batch):
            length = len(sequences[index].token_ids)
            probs = target.logits(output.hidden[row, :length]).softmax(-1)
            top = probs.topk(topk, dim=-1)
            features[index] = output.features[row, :length].half()
            topk_ids[index], topk_probs[index] = top.indices.int(), top.values.half()
    save_shard(
        path,
        [
            CachedSequence(
                sequence.token_ids,
                sequence.prompt_length,
                sequence.temperature,
                features[index],
                topk_ids[index],
                topk_probs[index],
            )
            for index, sequence in enumerate(sequences)
        ],
    )
