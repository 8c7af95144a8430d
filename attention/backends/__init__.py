"""The backends, best first, and how each is loaded.

Nothing optional is imported before it is asked for; a package that is missing is a reason and not an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attention.backends.base import AttentionBackend
from attention.backends.flash_mla import FlashMlaBackend
from attention.backends.flashinfer import FlashInferBackend
from attention.backends.reference import ReferenceBackend
from attention.backends.tokenspeed_mla import TokenSpeedMlaBackend
from attention.backends.torch_cpu import TorchCpuBackend
from attention.backends.triton_decode import TritonBackend
from attention.selector import Candidate

_BEST_FIRST: tuple[type[AttentionBackend], ...] = (
    TokenSpeedMlaBackend,
    FlashMlaBackend,
    FlashInferBackend,
    TritonBackend,
    TorchCpuBackend,
    ReferenceBackend,
)
BACKENDS: Mapping[str, type[AttentionBackend]] = MappingProxyType({backend.name: backend for backend in _BEST_FIRST})


def default_backends(backends: Mapping[str, type[AttentionBackend]] = BACKENDS) -> list[Candidate]:
    """Every backend with its claims and what this machine lacks for it, best first."""
    return [Candidate(name, backend.capabilities, tuple(backend.machine_reasons())) for name, backend in backends.items()]
