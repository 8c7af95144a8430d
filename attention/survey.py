"""What every backend would do with a layer on this machine: its reasons, its probes, and which one would serve.

`open_attention` stops at the first path that is proven. A survey goes on and probes each path of each backend that can serve
at all, so that a person sees what is left when the first choice goes away. It ends in the same selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from attention.backends import BACKENDS, default_backends
from attention.backends.base import AttentionBackend
from attention.capabilities import AttentionProblem
from attention.probe import prove
from attention.selector import AttentionSelectionError, Candidate, DecodePath, Selection, select_backend

PROVEN = "proven"


@dataclass(frozen=True)
class BackendSurvey:
    """One backend.

    Args:
        backend: its name.
        verdict: `chosen, <path>`, `usable, <path>` or `not usable`.
        reasons: why it does not serve, or not fused; empty for one that only comes later.
        probes: of each path, `PROVEN` or why it is not; empty for a backend that is refused before it is run.
    """

    backend: str
    verdict: str
    reasons: tuple[str, ...]
    probes: Mapping[DecodePath, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionSurvey:
    """All backends for one problem.

    Args:
        problem: what was asked.
        selection: what would serve; None if nothing may.
        error: why nothing may; None if something does.
        backends: best first.
    """

    problem: AttentionProblem
    selection: Selection | None
    error: str | None
    backends: tuple[BackendSurvey, ...]


def survey_attention(
    problem: AttentionProblem,
    override: str | None = None,
    *,
    candidates: Sequence[Candidate] | None = None,
    backends: Mapping[str, type[AttentionBackend]] = BACKENDS,
) -> AttentionSurvey:
    """Probe every path of every usable backend. Arguments as for `open_attention`; nothing that is refused raises."""
    if candidates is None:
        candidates = default_backends(backends)
    proven = [_probe(problem, candidate, backends) for candidate in candidates]
    selection, error = None, None
    try:
        selection = select_backend(problem, [candidate for candidate, _ in proven], override)
    except AttentionSelectionError as refused:
        error = str(refused)
    return AttentionSurvey(
        problem, selection, error, tuple(_report(problem, candidate, probes, selection) for candidate, probes in proven)
    )


def _probe(
    problem: AttentionProblem, candidate: Candidate, backends: Mapping[str, type[AttentionBackend]]
) -> tuple[Candidate, dict[DecodePath, str]]:
    """The candidate without the paths that failed, and what each path's probe said."""
    try:
        best = select_backend(problem, [candidate])
    except AttentionSelectionError:
        return candidate, {}
    probes: dict[DecodePath, str] = {}
    failed: dict[DecodePath, str] = {}
    for path in DecodePath:
        if path is DecodePath.FUSED and best.fused_reasons:
            probes[path] = "; ".join(best.fused_reasons)
            continue
        reason = prove(Selection(candidate.name, path), problem, backends)
        probes[path] = PROVEN if reason is None else reason
        if reason is not None:
            failed[path] = reason
    return replace(candidate, disabled_paths={**candidate.disabled_paths, **failed}), probes


def _report(
    problem: AttentionProblem, candidate: Candidate, probes: Mapping[DecodePath, str], selection: Selection | None
) -> BackendSurvey:
    if selection is not None and selection.backend == candidate.name:
        return BackendSurvey(candidate.name, f"chosen, {selection.path}", selection.fused_reasons, probes)
    try:
        own = select_backend(problem, [candidate])
    except AttentionSelectionError as refused:
        return BackendSurvey(candidate.name, "not usable", refused.rejected[0].reasons, probes)
    rejected = {} if selection is None else {rejection.backend: rejection.reasons for rejection in selection.rejected}
    return BackendSurvey(candidate.name, f"usable, {own.path}", rejected.get(candidate.name, ()), probes)
