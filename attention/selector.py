"""Choose the backend and the path of a draft layer. Pure: the same arguments give the same `Selection`.

    usable backends, in the order of `candidates`  ->  the first one
    path = FUSED      if it takes S non-causal query rows of a request in one call
         = FLATTENED  if it takes one, and that path has not been disabled
    none             ->  AttentionSelectionError: each backend with all its reasons

Whatever the machine has to say (a package that is missing, a device too old, a path that failed its probe) is in the
candidates already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from attention.capabilities import AttentionCapabilities, AttentionProblem


class DecodePath(StrEnum):
    """How the S slots of a block reach the kernel."""

    FUSED = "fused"
    FLATTENED = "flattened"


@dataclass(frozen=True)
class Candidate:
    """A backend that may be chosen.

    Args:
        name: of the backend.
        capabilities: what it claims.
        machine_reasons: why this machine cannot run it at all; empty if it can.
        disabled_paths: why a path must not be taken although the claims allow it.
    """

    name: str
    capabilities: AttentionCapabilities
    machine_reasons: tuple[str, ...] = ()
    disabled_paths: Mapping[DecodePath, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejection:
    """A backend that was not chosen, with every reason; none if a better one came first."""

    backend: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend}: {'; '.join(self.reasons) or 'usable, but comes later'}"


@dataclass(frozen=True)
class Selection:
    """The backend and path of a layer, and what was turned down for it.

    Args:
        backend: its name.
        path: how the slots reach it.
        rejected: the other candidates.
        fused_reasons: why the path is not FUSED; empty if it is.
    """

    backend: str
    path: DecodePath
    rejected: tuple[Rejection, ...] = ()
    fused_reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f" ({'; '.join(self.fused_reasons)})" if self.fused_reasons else ""
        return f"{self.backend}, {self.path}{why}"


class AttentionSelectionError(ValueError):
    """No backend may serve a layer. `rejected` lists each one with its reasons."""

    def __init__(self, message: str, rejected: Sequence[Rejection]) -> None:
        self.rejected = tuple(rejected)
        super().__init__("\n  ".join([message, *map(str, rejected)]))


@dataclass(frozen=True)
class _Assessment:
    path: DecodePath | None
    reasons: tuple[str, ...]
    fused_reasons: tuple[str, ...]


def select_backend(problem: AttentionProblem, candidates: Sequence[Candidate], override: str | None = None) -> Selection:
    """Choose for `problem` among `candidates`, best first; `override` names the only one that may be taken.

    Raises:
        AttentionSelectionError: nothing is usable, or `override` is unknown or not usable.
    """
    names = [candidate.name for candidate in candidates]
    if override is not None and override not in names:
        raise AttentionSelectionError(f"unknown attention backend {override!r}; known: {', '.join(names)}", ())
    chosen: tuple[Candidate, _Assessment] | None = None
    rejected = []
    for candidate in candidates:
        assessment = _assess(problem, candidate)
        is_allowed = override is None or candidate.name == override
        if chosen is None and is_allowed and assessment.path is not None:
            chosen = candidate, assessment
        elif is_allowed or assessment.reasons:
            rejected.append(Rejection(candidate.name, assessment.reasons))
        else:
            rejected.append(Rejection(candidate.name, (f"the configuration asks for {override}",)))
    if chosen is None:
        if override is not None:
            rejected = [rejection for rejection in rejected if rejection.backend == override]
        who = f"attention backend {override!r} cannot" if override is not None else "no attention backend can"
        raise AttentionSelectionError(f"{who} serve {problem}:", rejected)
    candidate, assessment = chosen
    path = assessment.path or DecodePath.FLATTENED
    return Selection(candidate.name, path, tuple(rejected), assessment.fused_reasons)


def _assess(problem: AttentionProblem, candidate: Candidate) -> _Assessment:
    """The path a candidate would take, or every reason why it has none."""
    fused_reasons = candidate.capabilities.fused_reasons(problem)
    if DecodePath.FUSED in candidate.disabled_paths:
        fused_reasons.append(candidate.disabled_paths[DecodePath.FUSED])
    reasons = [*candidate.machine_reasons, *candidate.capabilities.unsupported_reasons(problem)]
    if not reasons and not fused_reasons:
        return _Assessment(DecodePath.FUSED, (), ())
    flattened_reason = candidate.disabled_paths.get(DecodePath.FLATTENED)
    if not reasons and flattened_reason is None:
        return _Assessment(DecodePath.FLATTENED, (), tuple(fused_reasons))
    if flattened_reason is not None:
        reasons += [*fused_reasons, flattened_reason]
    return _Assessment(None, tuple(reasons), tuple(fused_reasons))
