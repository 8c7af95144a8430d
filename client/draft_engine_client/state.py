"""What the stepping thread and the background thread of a client share, and the small operations on it.

Everything here is read and changed with `lock` held, unless it says otherwise; the lock is never held over a request.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from draft_engine_client.breaker import CircuitBreaker
from draft_engine_client.projection import ContextProjection
from draft_engine_client.sessions import SessionMirror, SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.transport import Channel
from draft_engine_client.wire import ClientWelcome, ModelFacts, TargetFingerprint, VerifySchedule

logger = logging.getLogger(__name__)

# What features look like to numpy, which has no bfloat16.
FEATURE_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32)}
)


@dataclass
class ClientStats:
    """Counters since the start, and the state of the line.

    `http_seconds` is time spent in calls of steps, `server_seconds` what of it the server says it spent. `failures` counts
    calls without a usable reply: late, broken, invalid or refused. `refusals` counts sessions refused on their own.
    """

    steps: int = 0
    calls: int = 0
    failures: int = 0
    late: int = 0
    refusals: int = 0
    invalid_replies: int = 0
    errors: int = 0
    http_seconds: float = 0.0
    server_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    rows_sent: int = 0
    rows_uploaded: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    handshakes: int = 0
    reconnects: int = 0
    is_connected: bool = False
    breaker_open: bool = False
    times_breaker_opened: int = 0
    live_sessions: int = 0


@dataclass(frozen=True)
class Link:
    """A connection that is open, and who we are on it."""

    channel: Channel
    welcome: ClientWelcome


class ClientState:
    """See the module docstring."""

    def __init__(
        self,
        settings: ClientSettings,
        target: TargetFingerprint,
        *,
        is_projecting: bool = False,
        schedule: VerifySchedule | None = None,
    ) -> None:
        self.settings = settings
        self.schedule = schedule
        """What the server is asked to shorten drafts by; None for nothing."""
        self.is_projecting = is_projecting
        """Whether rows come projected."""
        self.projection: ContextProjection | None = None
        """What they must be projected with; None where they are raw, and before the first handshake."""
        self.target = target
        self.lock = threading.Lock()
        self.wake = threading.Event()
        """Set to have the background thread look around."""
        self.connected = threading.Event()
        self.stats = ClientStats()
        self.breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_min_s, settings.breaker_max_s)
        self.mirrors: dict[str, SessionMirror] = {}
        self.finished: dict[str, None] = {}
        """Sessions that the server has to be told are over, in order."""
        self.facts: ModelFacts | None = None
        self.welcome: ClientWelcome | None = None
        """Who we are to the server, as long as it is believed to know us; it outlives connections."""
        self.link: Link | None = None
        self.refusal: str | None = None
        self.is_calling = False
        """Whether the stepping thread is using the link's channel."""
        self.is_closing = False
        self.last_contact = 0.0
        self._incarnations = itertools.count()

    def snapshot(self) -> ClientStats:
        """A copy of the counters."""
        return replace(
            self.stats,
            is_connected=self.link is not None,
            breaker_open=self.breaker.is_open,
            times_breaker_opened=self.breaker.times_opened,
            live_sessions=len(self.mirrors),
        )

    def learn_facts(self, facts: ModelFacts) -> None:
        """Take in what a server says of its model. Rows that were captured for another model are of no use to it."""
        before = self.facts
        if before is not None and before.target_layer_ids != facts.target_layer_ids:
            logger.warning("the draft server now wants layers %s, not %s", facts.target_layer_ids, before.target_layer_ids)
            self.mirrors.clear()
        unusable = [mirror.session_id for mirror in self.mirrors.values() if mirror.width != self.row_width(facts)]
        for session_id in unusable:
            del self.mirrors[session_id]
        self.facts = facts

    def learn_projection(self, projection: ContextProjection) -> None:
        """Project with this from now on. Rows that were projected for another drafter are of no use."""
        if self.projection is not None and self.mirrors:
            logger.warning("the draft server has another drafter; rows that were projected for the one before are forgotten")
            self.mirrors.clear()
        self.projection = projection

    def row_width(self, facts: ModelFacts) -> int:
        """Values of a row that is sent."""
        return facts.projected_width if self.is_projecting else facts.feature_width

    def take(self, step: SessionStep) -> str | None:
        """Add a step's rows to the mirror of its session; returns what is wrong with the step, or None."""
        try:
            mirror = self.mirrors.get(step.session_id)
            if mirror is None:
                mirror = SessionMirror(
                    step,
                    width=self.row_width(self.facts) if self.facts is not None else step.features.shape[1],
                    dtype=FEATURE_DTYPES[self.target.dtype],
                    vocab_size=self.target.vocab_size,
                    max_rows=self.settings.max_history_rows,
                    next_incarnation=lambda: next(self._incarnations),
                )
            mirror.take(step)
        except (ValueError, TypeError, OverflowError, AttributeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        self.mirrors[step.session_id] = mirror
        return None

    def finish(self, session_ids: Iterable[str]) -> None:
        """Forget sessions, and remember to tell the server of those it may know."""
        for session_id in session_ids:
            mirror = self.mirrors.pop(session_id, None)
            if mirror is not None and mirror.was_sent:
                self.finished[session_id] = None

    def told(self, session_ids: Iterable[str]) -> None:
        """The server has been told that these are over."""
        for session_id in session_ids:
            self.finished.pop(session_id, None)
        self.last_contact = time.monotonic()

    def adopt(self, mirror: SessionMirror, welcome: ClientWelcome) -> None:
        """Forget what was told to another server process, or to this one under another id of ours: it is gone."""
        if mirror.namespace != welcome.client_id:
            if mirror.was_sent:
                mirror.forget_server()
            mirror.namespace = welcome.client_id

    def unlink(self, link: Link, *, forget_welcome: bool = False) -> None:
        """Close a link for good, and have the background thread make another."""
        if forget_welcome and self.welcome is link.welcome:
            self.welcome = None
        if self.link is link:
            self.link = None
            self.connected.clear()
        link.channel.close()
        self.wake.set()
