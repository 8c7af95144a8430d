"""The rule of `verification.verify_sampled` for a whole batch on a torch device, without a copy to the host.

It is the same rule in the same order of noise: given the numbers that the other one draws, both say the same. Drafts without a
distribution are point masses; `dense_draft_probs` builds the rows that are taken here.

Shape symbols: B requests, n drafts of the longest, V vocab_size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify_batch(
    draft_token_ids: Tensor, num_drafts: Tensor, target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept draft t with probability min(1, target(t) / draft(t)); then draw a recovered or a bonus token.

    Args:
        draft_token_ids: [B, n] int64; anything inside the vocabulary past a request's own drafts
        num_drafts: [B] int64, up to n
        target_probs: [B, n + 1, V], rows that sum to 1; row num_drafts of a request is its bonus row
        draft_probs: [B, n, V], the distribution that each draft was drawn from; None takes every draft as certain. A draft that
            its own distribution rules out is taken as certain too
        uniforms: [B, n + 1] in [0, 1), the verifier's own noise

    Returns:
        How many drafts stay [B], and the token after them [B], both int64.

    Raises:
        ValueError: shapes do not fit.
    """
    batch, count = draft_token_ids.shape
    vocab_size = target_probs.shape[-1]
    if target_probs.shape != (batch, count + 1, vocab_size) or uniforms.shape != (batch, count + 1):
        raise ValueError(
            f"{count} drafts of {batch} requests need target_probs [{batch}, {count + 1}, V] and uniforms [{batch}, "
            f"{count + 1}]; they are {list(target_probs.shape)} and {list(uniforms.shape)}"
        )
    if draft_probs is not None and draft_probs.shape != (batch, count, vocab_size):
        raise ValueError(f"draft_probs must be [{batch}, {count}, {vocab_size}]; they are {list(draft_probs.shape)}")
    target, uniforms = target_probs.double(), uniforms.double()
    drafted = draft_token_ids[..., None]
    certain = torch.zeros_like(target[:, :count]).scatter_(-1, drafted, 1.0)
    if draft_probs is None:
        draft = certain
    else:
        draft = draft_probs.double()
        draft = torch.where(draft.gather(-1, drafted) > 0.0, draft / draft.sum(-1, keepdim=True), certain)
    chances = draft.gather(-1, drafted)[..., 0]
    is_kept = uniforms[:, :count] * chances < target[:, :count].gather(-1, drafted)[..., 0]
    is_kept &= torch.arange(count, device=num_drafts.device) < num_drafts[:, None]
    accepted = is_kept.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(batch, device=accepted.device)
    weights = target[rows, accepted]
    if count:
        is_rejected = accepted < num_drafts
        left = (weights - draft[rows, accepted.clamp_max(count - 1)]).clamp_min(0.0)
        # Where the two are equal nothing is left of rounding, and the target's own row is the limit.
        is_residual = is_rejected & (left.sum(-1) > 0.0)
        weights = torch.where(is_residual[:, None], left, weights)
        drawn_by = accepted + is_rejected.long()
    else:
        drawn_by = accepted
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms[rows, drawn_by, None] * total, right=True)
    # A threshold that rounds up to the total belongs to the last index that has weight.
    last = torch.searchsorted(cumulative, total)
    return accepted, torch.minimum(index, last)[:, 0]
