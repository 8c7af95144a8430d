"""Two defects of vLLM on CPUs, in releases 0.32 and 0.33, and what takes their place there. Other devices keep vLLM's own.

`expand_batch_to_tokens` spreads a value of each request over the request's drafts. vLLM's CPU version writes into a temporary
copy unless the values are int64, so the temperatures and top-p of drafted rows are whatever the memory held, and sampling
with drafts follows another distribution than without.

`apply_sampling_constraints` is called for the drafted rows of every step of a server that speculates. In a step without drafts
there are none, and where some request samples with top-k, vLLM's CPU version of top-k raises on them, which ends the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EXPAND_SIGNATURE = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
CONSTRAIN_SIGNATURE = ("logits", "cu_num_draft_tokens", "sampling_metadata")


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each x [batch] for the tokens that `cu_num_tokens` [batch], a running sum, gives it, and replace one value.

    Returns:
        [num_tokens] of the dtype of x.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
    if replace_from == replace_to:
        return expanded
    return expanded.masked_fill(expanded == replace_from, replace_to)


def constrain_drafted_rows(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap vLLM's `apply_sampling_constraints`: without rows there is nothing to constrain."""

    def apply_sampling_constraints(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        return original(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

    return apply_sampling_constraints
