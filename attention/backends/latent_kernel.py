"""What the optional kernels for DeepSeek-shaped latent rows (512 + 64) share: loading them, and requests of length 0.

Shape symbols: B requests, Q query rows per request, H query heads, L kv_lora_rank.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.base import AttentionBackend, import_reasons, missing_package
from attention.metadata import BlockMetadata

LATENT, ROPE = 512, 64


class LatentKernelBackend(AttentionBackend):
    """A kernel of a package that may be missing; `module` is what is imported of it."""

    module: ClassVar[str]

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """See `AttentionBackend`."""
        # Importing takes seconds, so only where it could be of use.
        return super().machine_reasons() + missing_package(cls.module.partition(".")[0]) or import_reasons(cls.module)


def nothing_attended(query: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The result [B, Q, H, L] and log-sum-exp [B, Q, H] of a batch in which every length is 0."""
    rows = query.shape[:3]
    lse = query.new_full(rows, -torch.inf, dtype=torch.float32) if with_lse else None
    return query.new_zeros(*rows, LATENT), lse


def without_padding(output: Tensor, lse: Tensor | None, metadata: BlockMetadata) -> tuple[Tensor, Tensor | None]:
    """Replace what a kernel left in output [B, Q, H, L] and lse [B, Q, H] for requests of length 0."""
    if all(metadata.lengths):
        return output, lse
    is_padding = (metadata.seq_lens == 0)[:, None, None]
    output = output.masked_fill(is_padding[..., None], 0)
    return output, None if lse is None else lse.masked_fill(is_padding, -torch.inf)
