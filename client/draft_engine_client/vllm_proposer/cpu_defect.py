"""A defect of vLLM on CPUs, and what takes its place there.

`expand_batch_to_tokens` spreads a value of each request over the request's drafts. vLLM's CPU version writes into a temporary
copy unless the values are int64, so the temperatures and top-p of drafted rows are whatever the memory held, and sampling
with drafts follows another distribution than without. Releases 0.32 and 0.33 have it. On other devices nothing is replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
