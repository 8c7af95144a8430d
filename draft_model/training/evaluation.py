"""Held-out acceptance: greedy drafts against greedy answers, walked as a server would."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_model.backbone.mla_dense import DenseMlaDraft
from draft_model.training.dataset import CachedSequence


@dataclass(frozen=True)
class Acceptance:
    """acceptance_length: 1 + mean accepted drafts of a round; by_position[k]: share of rounds that accept draft k."""

    acceptance_length: float
    by_position: tuple[float, ...]
    rounds: int


@torch.inference_mode()
def measure_acceptance(
    model: DenseMlaDraft, sequences: list[CachedSequence], draft_to_target: Tensor, block_size: int
) -> Acceptance:
    """Draft greedily at every anchor of every answer, then walk each answer round by round.

    Args:
        model: in evaluation mode
        sequences: greedy answers
        draft_to_target: [D] target id of each draft id
        block_size: drafts per round
    """
    accepted_counts = torch.zeros(block_size, dtype=torch.long)
    rounds = 0
    for sequence in sequences:
        ids, length = sequence.token_ids, len(sequence.token_ids)
        anchors = torch.arange(sequence.prompt_length, length - 1)
        if len(anchors) == 0:
            continue
        device = model.lm_head.device
        hidden = model.hidden(
            sequence.features[None].float().to(device),
            ids[anchors][None].to(device),
            anchors[None].to(device),
            block_size,
        )[0]
        logits = F.linear(hidden, model.lm_head)
        previous = ids[anchors].to(device)
        drafts = []
        for slot in range(block_size):
            previous = draft_to_target[(logits[:, slot] + model.markov_bias(previous)[1]).argmax(-1)]
            drafts.append(previous)
        window = (anchors[:, None] + torch.arange(1, block_size + 1)).clamp_max(length - 1)
        exists = anchors[:, None] + torch.arange(1, block_size + 1) < length
        matches = (torch.stack(drafts, 1).cpu() == ids[window]) & exists
        accepted = matches.long().cumprod(1).sum(1)
        at = 0
        while at < len(anchors):
            count = int(accepted[at])
            accepted_counts[:count] += 1
            rounds += 1
            at += count + 1
    by_position = tuple((accepted_counts / max(rounds, 1)).tolist())
    return Acceptance(1 + sum(by_position), by_position, rounds)
