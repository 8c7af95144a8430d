"""The values that travel through the engine: one propose call, its work items, and what each session is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_model.drafter import DraftProposal, SamplingParams
from service.errors import ApiError
from service.schedule import VerifyScheduler
from service.sessions import Session, SessionChange, SessionKey


@dataclass(frozen=True)
class SessionOutcome:
    """What one session is told: a proposal (None when no drafts were asked for), or an error.

    `confidence` is what the proposal had before it was recalibrated.
    """

    incarnation: int
    seq: int
    committed_end: int
    rows_held: int
    proposal: DraftProposal | None = None
    confidence: Sequence[float] = ()
    error: ApiError | None = None


@dataclass(eq=False)
class SessionWork:
    """One session's update on its way through the engine.

    Args:
        change: what the session table checks.
        token_ids: the tokens of positions [start, start + num_rows).
        features: [num_rows, width], raw features or projected rows as `is_projected` says; None without rows.
        num_draft_tokens: 0 takes the rows in and drafts nothing.
        confidence_threshold: keep the drafts whose survival is at least this, or all.
        num_verified: how many of the drafts last sent back were verified; None for all.
        refused: why the update is not to be applied, found before it came to the engine.
    """

    change: SessionChange
    token_ids: Sequence[int]
    features: Tensor | None
    is_projected: bool
    anchor_token_id: int
    num_draft_tokens: int
    sampling: SamplingParams
    draft_probs_topk: int = 0
    confidence_threshold: float | None = None
    num_verified: int | None = None
    refused: ApiError | None = None
    outcome: SessionOutcome | None = None
    session: Session | None = None
    rows_done: int = 0

    @property
    def key(self) -> SessionKey:
        """The session."""
        return self.change.key

    @property
    def rows_left(self) -> int:
        """Context rows not yet written."""
        return 0 if self.outcome is not None else self.change.num_rows - self.rows_done

    @property
    def wants_drafts(self) -> bool:
        """Whether drafts are asked for and still possible."""
        return self.outcome is None and self.change.scratch_rows > 0


@dataclass
class CallTimings:
    """Where the time of a call went, in milliseconds."""

    queue_ms: float = 0.0
    context_ms: float = 0.0
    forward_ms: float = 0.0
    head_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(eq=False)
class ProposeCall:
    """One propose request. `is_cancelled` may be set from the event loop at any time; times are of time.monotonic().

    `draft_version` is the drafter that the call was checked against; None where nobody exchanges it.
    `scheduler` shortens the drafts of the call as its client wishes; None leaves them whole.
    """

    client_id: str
    items: list[SessionWork]
    closes: list[SessionKey]
    arrived_at: float
    deadline_ms: float | None = None
    has_constant_rows: bool = False
    draft_version: str | None = None
    scheduler: VerifyScheduler | None = None
    is_cancelled: bool = False
    is_started: bool = False
    timings: CallTimings = field(default_factory=CallTimings)
    finish: Callable[[ApiError | None], None] = lambda error: None  # noqa: ARG005
    keys: frozenset[SessionKey] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = frozenset([*(item.key for item in self.items), *self.closes])

    @property
    def deadline_at(self) -> float | None:
        """When the caller stops waiting."""
        return None if self.deadline_ms is None else self.arrived_at + self.deadline_ms / 1000.0
