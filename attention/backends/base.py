"""What `BlockAttention` asks of a backend.

Shape symbols: B requests, Q query rows per request, H query heads, D key_dim, V value_dim.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from attention.cache import PagedKVCache
from attention.capabilities import AttentionCapabilities, AttentionProblem
from attention.metadata import BlockMetadata


class AttentionBackend(ABC):
    """A decode kernel and its claims. It knows no paths: Q is S on the fused path and 1 on the flattened one."""

    name: ClassVar[str]
    capabilities: ClassVar[AttentionCapabilities]

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """Every reason why this machine cannot run it: a missing package, an old device. Empty if it can."""
        return cls.capabilities.device_reasons(_cuda_capability())

    @abstractmethod
    def decode(
        self,
        query: Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: BlockMetadata,
        *,
        softmax_scale: float,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, each query row to all rows its request's length counts.

        With a sliding window W: to the last S + W of them, S the problem's draft_block_size whatever Q is.

        Args:
            query: [B, Q, H, D]
            cache: the pool; rows past a length are never read, or never count.
            layer: of the pool.
            metadata: of the B requests.
            softmax_scale: multiplies the scores.
            return_lse: return the log-sum-exp of the scaled scores too.

        Returns:
            output [B, Q, H, V] in the query's dtype, and lse [B, Q, H] float32 in the base that `capabilities` names, or None.
        """


def _cuda_capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def missing_package(name: str) -> list[str]:
    """A reason if a package is not installed. Nothing is imported."""
    return [] if importlib.util.find_spec(name) is not None else [f"package {name} is not installed"]


def import_reasons(module: str) -> list[str]:
    """A reason if a module of an optional package cannot be imported; a package that is missing is not looked into."""
    reasons = missing_package(module.partition(".")[0])
    if not reasons:
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reasons.append(f"{module} cannot be imported: {type(error).__name__}: {error}")
    return reasons
