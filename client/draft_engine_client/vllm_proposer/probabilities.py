"""From top-k draft probabilities to the dense tensor that vLLM's rejection sampler reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_engine_client.replies import Drafts


def dense_draft_probs(
    drafts: Sequence[Drafts], num_draft_tokens: int, vocab_size: int, device: torch.device | str
) -> Tensor | None:
    """Spread the reported distributions over the vocabulary.

    A draft without a distribution, as greedy ones are, counts as certain: its row has all probability on it, and that is
    lossless whatever was drafted.

    Args:
        drafts: one for each of R requests, in the batch's order
        num_draft_tokens: K of the result; no request has more drafts

    Returns:
        float32 [R, K, vocab_size], zero past a request's drafts; None when no request has a distribution.
    """
    if all(one.probs is None for one in drafts):
        return None
    dense = torch.zeros(len(drafts), num_draft_tokens, vocab_size, device=device)
    for index, one in enumerate(drafts):
        count = len(one.token_ids)
        if not count:
            continue
        rows = dense[index, :count]
        if one.probs is None or one.probs_ids is None:
            rows.scatter_(1, torch.tensor(one.token_ids, device=device)[:, None], 1.0)
            continue
        probs = torch.from_numpy(one.probs.copy()).to(device)
        # Columns past a distribution's own support have probability 0 and any id.
        ids = torch.from_numpy(one.probs_ids.copy()).to(device=device, dtype=torch.int64).masked_fill(probs <= 0.0, 0)
        rows.scatter_add_(1, ids, probs / probs.sum(dim=1, keepdim=True))
    return dense
