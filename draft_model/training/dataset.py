"""Training batches: several sequences, some anchors each, cut from cached features.

Shape symbols: B sequences, N rows (padded), A anchors per sequence, S draft_block_size, K cached target probabilities.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class CachedSequence:
    """One sequence with what the target said about it.

    token_ids: [n] int64; the answer is [prompt_length, n), drawn at `temperature` (0 = greedy).
    features: [n, F] float16, the residual stream after each target layer of target_layer_ids.
    topk_ids, topk_probs: [n, K] int32 and float16, the target's distribution (temperature 1) of the token after each row.
    """

    token_ids: Tensor
    prompt_length: int
    temperature: float
    features: Tensor
    topk_ids: Tensor
    topk_probs: Tensor


def save_shard(path: Path, sequences: list[CachedSequence]) -> None:
    """Write one feature shard, whole or not at all.

    A shard is flat: `token_ids` int32 [n], `offsets` int64 [rows + 1] (sequence r is [offsets[r], offsets[r + 1])),
    `prompt_length` int32 [rows], `temperature` float32 [rows], `features` float16 [n, m * E], `topk_ids` int32 [n, K] and
    `topk_probs` float16 [n, K].
    """
    lengths = torch.tensor([0] + [len(sequence.token_ids) for sequence in sequences])
    tensors = {
        "token_ids": torch.cat([sequence.token_ids.int() for sequence in sequences]),
        "offsets": lengths.cumsum(0),
        "prompt_length": torch.tensor([sequence.prompt_length for sequence in sequences], dtype=torch.int32),
        "temperature": torch.tensor([sequence.temperature for sequence in sequences], dtype=torch.float32),
        "features": torch.cat([sequence.features for sequence in sequences]),
        "topk_ids": torch.cat([sequence.topk_ids for sequence in sequences]),
        "topk_probs": torch.cat([sequence.topk_probs for sequence in sequences]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def count_tokens(path: Path) -> int:
    """Read how many tokens a shard holds, from its header alone."""
    with safe_open(path, framework="pt") as file:
        return int(file.get_slice("token_ids").get_shape()[0])


@dataclass(frozen=True)
class Batch:
    """One training step's input.

    features: [B, N, F] float32; anchors: [B, A] int64; token_ids: [B, A, S + 1] int64, the anchor and the S tokens after it;
    valid: [B, A, S] bool, slot k predicts a token that exists; topk_ids, topk_probs: [B, A, S, K], the target's distribution
    of the token that slot k predicts, as target ids.
    """

    features: Tensor
    anchors: Tensor
    token_ids: Tensor
    valid: Tensor
    topk_ids: Tensor
    topk_probs: Tensor


def load_cached(paths: list[Path]) -> list[CachedSequence]:
    """Read feature shards into memory."""
    sequences = []
    for path in paths:
        shard = load_file(path)
        offsets = shard["offsets"].tolist()
        for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
            sequences.append(
                CachedSequence(
                    token_ids=shard["token_ids"][start:stop].long(),
                    prompt_length=int(shard["prompt_length"][row]),
                    temperature=float(shard["temperature"][row]),
                    features=shard["features"][start:stop],
                    topk_ids=shard["topk_ids"][start:stop],
                    topk_probs=shard["topk_probs"][start:stop],
                )
            )
    return sequences


def make_batch(sequences: list[CachedSequence], anchors: list[Tensor], block_size: int) -> Batch:
    """Cut blocks at the given anchors (equally many per sequence)."""
    rows = torch.nn.utils.rnn.pad_sequence([sequence.features for sequence in sequences], batch_first=True).float()
    ids, valid, topk_ids, topk_probs = [], [], [], []
    for sequence, at in zip(sequences, anchors, strict=True):
        length = len(sequence.token_ids)
        window = at[:, None] + torch.arange(block_size + 1)
        ids.append(sequence.token_ids[window.clamp_max(length - 1)])
        valid.append(window[:, 1:] < length)
        # The target's distribution of the token at t is cached at row t - 1.
        predicting = window[:, :-1].clamp_max(length - 1)
        topk_ids.append(sequence.topk_ids[predicting].long())
        topk_probs.append(sequence.topk_probs[predicting].float())
    return Batch(
        features=rows,
        anchors=torch.stack(anchors),
        token_ids=torch.stack(ids),
        valid=torch.stack(valid),
        topk_ids=torch.stack(topk_ids),
        topk_probs=torch.stack(topk_probs),
    )


class BatchStream:
    """Endless batches in an order that `seed` fixes; anchors lie in the answers, and some in the user turns."""

    def __init__(
        self,
        sequences: list[CachedSequence],
        *,
        block_size: int,
        sequences_per_batch: int,
        anchors_per_sequence: int,
        user_turn_share: float,
        seed: int,
    ) -> None:
        self._sequences = [sequence for sequence in sequences if len(sequence.token_ids) - sequence.prompt_length >= 4]
        self._block_size = block_size
        self._width = sequences_per_batch
        self._anchors = anchors_per_sequence
        self._user_turn_share = user_turn_share
        self._seed = seed

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield the batches of steps step, step + 1, ...; the same step always gives the same batch."""
        while True:
            dice = random.Random(f"{self._seed}-{step}")
            # Long answers have more to teach: a sequence is drawn in proportion to its answer.
            lengths = [len(sequence.token_ids) - sequence.prompt_length for sequence in self._sequences]
            chosen = dice.choices(self._sequences, weights=lengths, k=self._width)
            yield make_batch(chosen, [self._draw_anchors(sequence, dice) for sequence in chosen], self._block_size)
            step += 1

    def _draw_anchors(self, sequence: CachedSequence, dice: random.Random) -> Tensor:
        last = len(sequence.token_ids) - 1
        user = round(self._anchors * self._user_turn_share)
        answer = range(sequence.prompt_length - 1, last)
        drawn = dice.sample(answer, min(len(answer), self._anchors - user))
        drawn += [dice.randrange(max(2, sequence.prompt_length // 3), last) for _ in range(self._anchors - len(drawn))]
        return torch.tensor(sorted(drawn))
