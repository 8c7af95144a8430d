"""First values of a draft model's parameters, taken from the target where it knows something useful.

The Markov head starts as the target's own bigram: the target is shown each frequent token with nothing before it, and the
logits it gives for the next token are factored to the head's rank. The backbone starts small, so the first drafts are that
bigram and training has only the rest to learn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draft_model.backbone.mla_dense import DenseMlaDraft, MlaShape
from draft_model.target_model import TargetModel

_STD = 0.02
_BIGRAM_BATCH = 256


def build_draft(
    shape: MlaShape, target: TargetModel, draft_to_target: Tensor, *, mask_token_id: int, seed: int
) -> DenseMlaDraft:
    """Make a draft model that shares the target's embedding and LM head; its Markov head is random still.

    Args:
        shape: sizes
        target: gives embedding and head rows of the draft vocabulary
        draft_to_target: [D] target id of each draft id
        mask_token_id: fills slots 1..S-1 of a block
        seed: of the random part
    """
    torch.manual_seed(seed)
    model = DenseMlaDraft(shape, target.embedding.clone(), target.embedding[draft_to_target].clone(), mask_token_id)
    residual_std = _STD / (2 * shape.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else _STD)
    nn.init.zeros_(model.confidence_head.proj.bias)
    with torch.no_grad():
        model.final_norm.weight.copy_(0.5 * target.final_norm)
    return model


@torch.no_grad()
def start_from_bigram(model: DenseMlaDraft, target: TargetModel, draft_to_target: Tensor, token_weights: Tensor) -> None:
    """Give the Markov head the target's own bigram; takes as long as a minute of training, so a resumed run goes without.

    Args:
        model: made by `build_draft`
        target: gives the bigram
        draft_to_target: [D] target id of each draft id
        token_weights: [V] how often each token occurs
    """
    embedded, bias = bigram_factors(target, draft_to_target, token_weights, model.shape.markov_rank)
    first = model.markov_head.markov_w1.weight
    first.zero_()
    first[draft_to_target] = embedded.to(first.device)
    model.markov_head.markov_w2.weight.copy_(bias)


@torch.inference_mode()
def bigram_factors(target: TargetModel, draft_to_target: Tensor, token_weights: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor the target's next-token logits after a lone token.

    Returns:
        w1 [D, rank] and w2 [D, rank] with w1[i] @ w2.T close to the logits after token i, less their mean over tokens; frequent
        tokens are met best.
    """
    hidden = []
    for part in torch.split(draft_to_target, _BIGRAM_BATCH):
        # A separator first: the very first position of a Llama carries an attention sink and not its token.
        token_ids = torch.stack([torch.full_like(part, int(draft_to_target[token_weights[draft_to_target].argmax()])), part], 1)
        cache = target.new_cache(len(part), 2)
        hidden.append(target.forward(token_ids, torch.zeros(len(part), dtype=torch.long), cache).hidden[:, 1])
    states = torch.cat(hidden)
    weights = token_weights[draft_to_target].float().clamp_min(1e-9)
    weights = (weights / weights.sum())[:, None]
    states = states - (states * weights).sum(0)
    head = target.embedding[draft_to_target]
    head = head - head.mean(0)
    # states @ head.T = sum of singular triplets; found in hidden space, where both factors have 576 columns.
    left, left_values, left_basis = torch.linalg.svd(states * weights.sqrt(), full_matrices=False)
    _, right_values, right_basis = torch.linalg.svd(head, full_matrices=False)
    core = (left_values[:, None] * left_basis) @ (right_values[:, None] * right_basis).T
    u, values, vh = torch.linalg.svd(core)
    scale = values[:rank].sqrt()
    right = (head @ right_basis.T / right_values) @ vh[:rank].T * scale
    left_factor = (left @ u[:, :rank]) / weights.sqrt() * scale
    return left_factor, right
