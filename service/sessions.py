"""The session table: what the draft server holds of each target request, and the rules that change it.

A session holds context rows. Row r of a session lies in `pages[r // page_size]` at offset `r % page_size`; the position a
row stands for is kept apart, because rotary positions are baked into the keys and a session may lack the rows of an early
stretch. Only two stretches are ever held, so `ContextSpan` is four numbers:

    rows [0, prefix_rows)          are positions [0, prefix_rows)               attached from the prefix cache
    rows [prefix_rows, num_rows)   are positions [context_start, committed_end) received from the target

Rows never seen have no row index at all, so no attention can read them.

An update goes through `prepare` (every check, every page, then the truncation) and `advance` (rows now in the pool). A
refused update has changed nothing. A failed write leaves the session truncated at the update's start, so the same update
may be sent again under the same seq; only a reply without an error is stored and answered again for a repeated seq.

Everything here belongs to the worker thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attention.cache import OutOfPages, PageAllocator
from service.errors import ApiError, CapacityError, NotFoundError, RequestError, StateError
from service.prefix_cache import PrefixCache, PrefixChain
from service.settings import EngineLimits


class SessionKey(NamedTuple):
    """A session id is unique within its client only."""

    client_id: str
    session_id: str


class ContextSpan(NamedTuple):
    """Which positions the rows of a session stand for; half-open intervals, see the module docstring."""

    prefix_rows: int = 0
    context_start: int = 0
    committed_end: int = 0

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self.prefix_rows + self.committed_end - self.context_start

    @property
    def is_complete(self) -> bool:
        """Whether row r is position r for every row, which is what makes a page shareable."""
        return self.num_rows == self.committed_end

    def truncated(self, position: int) -> ContextSpan:
        """The span after everything at or after `position` is gone; `position` <= committed_end."""
        if position >= self.context_start:
            return ContextSpan(self.prefix_rows, self.context_start, position)
        if position <= self.prefix_rows:
            return ContextSpan(committed_end=position)
        return ContextSpan(self.prefix_rows, position, position)

    def extended(self, num_rows: int) -> ContextSpan:
        """The span after `num_rows` more rows."""
        return ContextSpan(self.prefix_rows, self.context_start, self.committed_end + num_rows)

    @classmethod
    def opened(cls, start: int, attached_rows: int) -> ContextSpan:
        """The span of a session whose first own row is position `start`, with [0, attached_rows) from the prefix cache."""
        if attached_rows >= start:
            return cls(committed_end=start)
        return cls(prefix_rows=attached_rows, context_start=start, committed_end=start)


@dataclass
class KnownTokens:
    """The tokens of positions [start, start + len(token_ids)): the newest of a session, as far back as there is no gap."""

    start: int
    token_ids: list[int] = field(default_factory=list)

    def truncate(self, position: int) -> None:
        """Forget what stands at `position` or after it."""
        if position < self.start:
            self.start, self.token_ids = position, []
        else:
            del self.token_ids[position - self.start :]


@dataclass
class Session:
    """The state of one target request. `seq` is the last one answered without an error."""

    key: SessionKey
    incarnation: int
    opened_at: float
    last_used: float
    span: ContextSpan
    tokens: KnownTokens
    seq: int = -1
    stored_reply: Any = None
    pages: list[int] = field(default_factory=list)
    chain: PrefixChain | None = None

    @property
    def coverage(self) -> float:
        """Rows held over rows committed; 1.0 for an empty session."""
        return self.span.num_rows / self.span.committed_end if self.span.committed_end else 1.0


class SessionChange(NamedTuple):
    """What an update asks of the table, as numbers; the rows themselves do not come here.

    `prefix_token_ids` are the tokens of positions [0, start) where the caller names them, for the prefix cache.
    """

    key: SessionKey
    incarnation: int
    seq: int
    start: int
    num_rows: int
    scratch_rows: int
    namespace: str = ""
    prefix_token_ids: Sequence[int] = ()


class SessionTable:
    """Sessions by key, the pages they hold, and what is freed when room is needed.

    Args:
        allocator: the pool's pages, shared with `prefix_cache`.
        page_size: rows in a page.
        copy_page: copies the rows of one page to another in every layer; called before a shared page is written.
        prefix_cache: full pages kept for other sessions, or None.
        on_evicted: told the reason and the number of sessions each time some are freed unasked.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        limits: EngineLimits,
        copy_page: Callable[[int, int], None],
        prefix_cache: PrefixCache | None = None,
        on_evicted: Callable[[str, int], None] = lambda reason, count: None,  # noqa: ARG005
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._limits = limits
        self._copy_page = copy_page
        self._prefix_cache = prefix_cache
        self._on_evicted = on_evicted
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()  # least recently used first
        self._closed: OrderedDict[SessionKey, int] = OrderedDict()  # last incarnation of sessions closed by their client

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._allocator.num_free

    @property
    def num_prefix_pages(self) -> int:
        """Pages that the prefix cache holds."""
        return 0 if self._prefix_cache is None else len(self._prefix_cache)

    def get(self, key: SessionKey) -> Session | None:
        """The session, or None."""
        return self._sessions.get(key)

    # The update rules ------------------------------------------------------------------------------------------------

    def stored_reply(self, change: SessionChange, now: float) -> Any | None:
        """The reply already given to exactly this (incarnation, seq), or None if the update is to be applied."""
        session = self._sessions.get(change.key)
        if session is None or session.stored_reply is None:
            return None
        if (session.incarnation, session.seq) != (change.incarnation, change.seq):
            return None
        self._touch(session, now)
        return session.stored_reply

    def prepare(self, change: SessionChange, now: float, busy: frozenset[SessionKey] = frozenset()) -> Session:
        """Check an update, find its pages and truncate the session to its start. `busy` sessions are never evicted.

        Raises:
            ApiError: stale_incarnation, stale_sequence, context_gap, context_limit or overloaded; nothing was changed.
        """
        session = self._sessions.get(change.key)
        self._check_epoch(session, change)
        if session is None or change.incarnation > session.incarnation:
            session = self._open(change, now, busy | {change.key})
        else:
            self._check_contiguous(session, change)
            self._check_room(change)
            self._fit_pages(session, session.span.truncated(change.start), change, now, busy | {change.key})
        self._touch(session, now)
        return session

    def advance(self, session: Session, token_ids: Sequence[int]) -> None:
        """Count rows that are now in the pool as committed, and publish the pages they fill."""
        session.span = session.span.extended(len(token_ids))
        session.tokens.token_ids.extend(token_ids)
        if session.chain is not None and self._prefix_cache is not None:
            session.chain.append(token_ids)
            self._prefix_cache.publish(session.chain, session.pages)

    def commit(self, session: Session, seq: int, reply: Any) -> None:
        """Store the reply of an update that was applied in full."""
        session.seq = seq
        session.stored_reply = reply

    def _check_epoch(self, session: Session | None, change: SessionChange) -> None:
        known = session.incarnation if session is not None else self._closed.get(change.key, -1) + 1
        if change.incarnation < known:
            raise StateError(
                "stale_incarnation",
                f"session {change.key.session_id!r} is at incarnation {known}; the update names {change.incarnation}",
                param="incarnation",
                numbers={"incarnation": known},
            )
        if session is not None and change.incarnation == session.incarnation and change.seq < session.seq:
            raise StateError(
                "stale_sequence",
                f"session {change.key.session_id!r} has answered seq {session.seq}; the update names {change.seq}",
                param="seq",
                numbers={"seq": session.seq, "committed_end": session.span.committed_end},
            )

    def _check_contiguous(self, session: Session, change: SessionChange) -> None:
        if change.start > session.span.committed_end:
            raise StateError(
                "context_gap",
                f"session {change.key.session_id!r} holds rows up to position {session.span.committed_end}; "
                f"the update starts at {change.start}",
                param="start",
                numbers={
                    "committed_end": session.span.committed_end,
                    "context_start": session.span.context_start,
                    "incarnation": session.incarnation,
                    "seq": session.seq,
                },
            )

    def _check_room(self, change: SessionChange) -> None:
        end = change.start + change.num_rows
        if end > self._limits.max_context:
            raise RequestError(
                "context_limit",
                f"the update ends at position {end}; a session holds at most {self._limits.max_context}",
                param="start",
                numbers={"end": end, "max_context": self._limits.max_context},
            )

    def _open(self, change: SessionChange, now: float, busy: frozenset[SessionKey]) -> Session:
        """Open a session, or open it anew at a higher incarnation."""
        self._check_room(change)
        old = self._sessions.get(change.key)
        if old is None and len(self._sessions) >= self._limits.max_sessions and not self._evict_idle(now, busy):
            raise self._full("sessions", len(self._sessions), self._limits.max_sessions)
        has_prefix = len(change.prefix_token_ids) == change.start
        tokens = KnownTokens(0, list(change.prefix_token_ids)) if has_prefix else KnownTokens(change.start)
        session = Session(change.key, change.incarnation, now, now, ContextSpan.opened(change.start, 0), tokens)
        if self._prefix_cache is not None:
            chain = self._prefix_cache.new_chain(change.namespace)
            if change.start > 0 and len(change.prefix_token_ids) == change.start:
                session.pages = self._prefix_cache.attach(chain, change.prefix_token_ids)
                session.span = ContextSpan.opened(change.start, len(session.pages) * self._page_size)
            if session.span.is_complete:
                session.chain = chain
        try:
            old = self._fit_new(session, old, change, now, busy)
        except ApiError:
            self._allocator.release(session.pages)
            raise
        if old is not None:
            self._free(old)
        self._closed.pop(change.key, None)
        self._sessions[change.key] = session
        return session

    def _fit_new(
        self, session: Session, old: Session | None, change: SessionChange, now: float, busy: frozenset[SessionKey]
    ) -> Session | None:
        """Find the pages of a new session; returns `old` where it still holds its own.

        The old incarnation is over whatever becomes of the new one, so it goes where only its pages are left.
        """
        try:
            self._fit_pages(session, session.span, change, now, busy, is_new=True)
        except CapacityError:
            if old is None:
                raise
            self._evict([old], "restart")
            self._fit_pages(session, session.span, change, now, busy, is_new=True)
            return None
        return old

    # Pages -----------------------------------------------------------------------------------------------------------

    def _fit_pages(
        self,
        session: Session,
        span: ContextSpan,
        change: SessionChange,
        now: float,
        busy: frozenset[SessionKey],
        *,
        is_new: bool = False,
    ) -> None:
        """Truncate to `span` and own every page that rows [span.num_rows, end) will be written to."""
        first_row = span.num_rows
        end_row = first_row + change.num_rows + change.scratch_rows
        first_page = first_row // self._page_size
        num_pages = -(-end_row // self._page_size)
        if num_pages == len(session.pages) and all(
            self._allocator.reference_count(page) == 1 for page in session.pages[first_page:]
        ):
            self._truncate(session, span)
            return
        # Pages from the first one to be written on may be shared with the prefix cache or another session.
        writable = [page for page in session.pages[first_page:num_pages] if self._allocator.reference_count(page) == 1]
        fresh = self._allocate(num_pages - first_page - len(writable), now, busy, is_new=is_new)

        kept, old_tail = session.pages[:first_page], session.pages[first_page:]
        new_tail: list[int] = []
        released: list[int] = []
        for index in range(max(num_pages - first_page, len(old_tail))):
            old_page = old_tail[index] if index < len(old_tail) else None
            if index >= num_pages - first_page:
                released.append(session.pages[first_page + index])
            elif old_page is not None and self._allocator.reference_count(old_page) == 1:
                new_tail.append(old_page)
            else:
                page = fresh.pop()
                if old_page is not None:
                    if index == 0 and first_row % self._page_size:
                        self._copy_page(old_page, page)
                    released.append(old_page)
                new_tail.append(page)
        session.pages = kept + new_tail
        self._allocator.release(released)
        self._truncate(session, span)

    def _truncate(self, session: Session, span: ContextSpan) -> None:
        session.span = span
        session.tokens.truncate(span.committed_end)
        if session.chain is not None:
            if span.is_complete:
                session.chain.truncate(span.num_rows)
            else:
                session.chain = None

    def _allocate(self, count: int, now: float, busy: frozenset[SessionKey], *, is_new: bool) -> list[int]:
        """Take pages, freeing unused prefix pages and then idle sessions. A new session leaves one page for each live one.

        Raises:
            CapacityError: nothing more may be freed.
        """
        if count <= 0:
            return []
        reserve = min(len(self._sessions), self._allocator.num_pages // 16) if is_new else 0
        while self._allocator.num_free < count + reserve:
            if self._prefix_cache is not None and self._prefix_cache.evict(count + reserve - self._allocator.num_free):
                continue
            if not self._evict_idle(now, busy):
                raise self._full("pages", self._allocator.num_free, self._allocator.num_pages)
        try:
            return self._allocator.allocate(count)
        except OutOfPages as error:
            raise self._full("pages", self._allocator.num_free, self._allocator.num_pages) from error

    def _full(self, what: str, used: int, limit: int) -> CapacityError:
        return CapacityError(
            f"the server has no room for more {what}",
            retry_after_s=max(1.0, self._limits.idle_seconds),
            numbers={f"num_{what}": used, f"max_{what}": limit},
        )

    # Leaving ---------------------------------------------------------------------------------------------------------

    def close(self, key: SessionKey) -> None:
        """Free a session its client is done with; an update that was still on its way is stale from now on.

        Raises:
            NotFoundError: there is no such session.
        """
        session = self._sessions.get(key)
        if session is None:
            raise NotFoundError("session_not_found", f"there is no session {key.session_id!r}", param="session_id")
        self._free(session)
        self._closed[key] = session.incarnation
        while len(self._closed) > 4 * self._limits.max_sessions:
            self._closed.popitem(last=False)

    def expire(self, now: float, busy: frozenset[SessionKey] = frozenset()) -> int:
        """Free the sessions unused for session_ttl_seconds; returns how many."""
        expired = [
            session
            for session in self._sessions.values()
            if now - session.last_used > self._limits.session_ttl_seconds and session.key not in busy
        ]
        return self._evict(expired, "ttl")

    def drop_client(self, client_id: str, reason: str, busy: frozenset[SessionKey] = frozenset()) -> int:
        """Free every session of one client; returns how many. Other clients' sessions are not looked at."""
        dropped = [s for s in self._sessions.values() if s.key.client_id == client_id and s.key not in busy]
        for key in [key for key in self._closed if key.client_id == client_id]:
            del self._closed[key]
        return self._evict(dropped, reason)

    def clear(self, reason: str = "shutdown") -> None:
        """Free everything, prefix pages too."""
        self._evict(list(self._sessions.values()), reason)
        self._closed.clear()
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def _evict_idle(self, now: float, busy: frozenset[SessionKey]) -> bool:
        """Free the least recently used session that is idle, if there is one."""
        for session in self._sessions.values():
            if now - session.last_used < self._limits.idle_seconds:
                return False
            if session.key not in busy:
                return self._evict([session], "lru") > 0
        return False

    def _evict(self, sessions: Sequence[Session], reason: str) -> int:
        for session in sessions:
            self._free(session)
        if sessions:
            self._on_evicted(reason, len(sessions))
        return len(sessions)

    def _free(self, session: Session) -> None:
        del self._sessions[session.key]
        self._allocator.release(session.pages)
        session.pages = []

    def _touch(self, session: Session, now: float) -> None:
        session.last_used = now
        self._sessions.move_to_end(session.key)
