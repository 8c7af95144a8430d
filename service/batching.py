"""Which waiting calls the next step serves. Policy only: no tensor, no HTTP, no clock of its own.

A call is one `propose` request; it has one work item for each session. Three rules decide:

* Order. A client's calls are ranked by deadline, and every client's first call goes before anyone's second. Between calls
  of one rank the nearer deadline goes first. A call without a deadline is due one second after it came, so nobody starves.
* Drafts before bulk rows. A call is interactive when all the rows it still has to write fit in one chunk and it wants
  drafts; everything else is bulk. A step serves interactive calls first and then writes one chunk of bulk rows, shared
  evenly between the clients. So a draft waits for at most one chunk of somebody's prefill.
* One call at a time for a session, in order of arrival; a later call on the same session waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from service.calls import ProposeCall, SessionWork
from service.errors import CapacityError, UnavailableError
from service.sessions import SessionKey

DEFAULT_DUE_S = 1.0


@dataclass(frozen=True)
class BulkShare:
    """Rows of one work item to write in this step."""

    call: ProposeCall
    item: SessionWork
    num_rows: int


@dataclass(frozen=True)
class Intake:
    """Waiting calls sorted by what may happen to them now; what is in no list waits for an earlier call on its session."""

    ready: list[ProposeCall] = field(default_factory=list)
    expired: list[ProposeCall] = field(default_factory=list)
    cancelled: list[ProposeCall] = field(default_factory=list)


@dataclass(frozen=True)
class StepPlan:
    """One step: serve `interactive`, answer `finished`, write `bulk`. What is in no list keeps waiting."""

    interactive: list[ProposeCall] = field(default_factory=list)
    bulk: list[BulkShare] = field(default_factory=list)
    finished: list[ProposeCall] = field(default_factory=list)


def is_interactive(call: ProposeCall, rows_per_chunk: int) -> bool:
    """Whether the call can be answered in one step without holding up the others for more than one chunk."""
    return any(item.wants_drafts for item in call.items) and rows_left(call) <= rows_per_chunk


def rows_left(call: ProposeCall) -> int:
    """Context rows the call still has to write."""
    return sum(item.rows_left for item in call.items)


def take_in(waiting: Sequence[ProposeCall], now: float) -> Intake:
    """Sort `waiting`, which is in order of arrival; `ready` comes out in the order of service."""
    intake = Intake()
    taken_keys: set[SessionKey] = set()
    for call in waiting:
        if call.is_cancelled:
            intake.cancelled.append(call)
        elif call.deadline_at is not None and call.deadline_at <= now:
            intake.expired.append(call)
        else:
            if taken_keys.isdisjoint(call.keys):
                intake.ready.append(call)
            taken_keys |= call.keys
    if len(intake.ready) > 1:
        intake.ready[:] = fair_order(intake.ready)
    return intake


def plan_step(ready: Sequence[ProposeCall], *, rows_per_chunk: int, max_sessions: int) -> StepPlan:
    """Choose from calls in the order of service.

    At most `max_sessions` sessions and `rows_per_chunk` rows are interactive, except that the first call always goes, and
    at most `rows_per_chunk` rows are bulk.
    """
    plan = StepPlan()
    bulk_calls: list[ProposeCall] = []
    sessions = rows = 0
    for call in ready:
        more_rows, more_sessions = rows_left(call), len(call.items)
        if is_interactive(call, rows_per_chunk):
            fits = rows + more_rows <= rows_per_chunk and sessions + more_sessions <= max_sessions
            if fits or not plan.interactive:
                plan.interactive.append(call)
                rows += more_rows
                sessions += more_sessions
        elif more_rows:
            bulk_calls.append(call)
        else:
            plan.finished.append(call)
    plan.bulk.extend(share_chunk(bulk_calls, rows_per_chunk))
    return plan


def fair_order(calls: Iterable[ProposeCall]) -> list[ProposeCall]:
    """Rank each client's calls by due time, then order by rank and due time."""
    of_client: dict[str, list[ProposeCall]] = {}
    for call in calls:
        of_client.setdefault(call.client_id, []).append(call)
    ranked: list[tuple[int, float, float, int, ProposeCall]] = []
    for client_calls in of_client.values():
        client_calls.sort(key=due_at)
        ranked.extend((rank, due_at(c), c.arrived_at, id(c), c) for rank, c in enumerate(client_calls))
    return [entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:-1])]


def due_at(call: ProposeCall) -> float:
    """The time the order goes by."""
    return call.deadline_at if call.deadline_at is not None else call.arrived_at + DEFAULT_DUE_S


def share_chunk(calls: Sequence[ProposeCall], rows_per_chunk: int) -> list[BulkShare]:
    """Share one chunk of rows between the clients of `calls`, evenly; what one client leaves goes to the others."""
    queues: dict[str, deque[tuple[ProposeCall, SessionWork, int]]] = {}
    for call in calls:
        queue = queues.setdefault(call.client_id, deque())
        queue.extend((call, item, item.rows_left) for item in call.items if item.rows_left)
    shares: dict[int, BulkShare] = {}
    budget = rows_per_chunk
    while budget and queues:
        quota = max(1, budget // len(queues))
        for client_id in list(queues):
            left = min(quota, budget)
            queue = queues[client_id]
            while left and queue:
                call, item, available = queue[0]
                take = min(left, available)
                before = shares[id(item)].num_rows if id(item) in shares else 0
                shares[id(item)] = BulkShare(call, item, before + take)
                left -= take
                budget -= take
                if take == available:
                    queue.popleft()
                else:
                    queue[0] = (call, item, available - take)
            if not queue:
                del queues[client_id]
            if not budget:
                break
    return list(shares.values())


class CallQueue:
    """The one way from the event loop to the worker thread: calls and commands in, bounded.

    `put` and `post` may be called from any thread, `collect` from the worker alone.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._condition = threading.Condition()
        self._calls: list[ProposeCall] = []
        self._commands: list[Callable[[], None]] = []
        self._num_waiting = 0
        self._is_closed = False
        self._is_draining = False

    @property
    def num_waiting(self) -> int:
        """Calls put and not yet reported done."""
        return self._num_waiting

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._is_draining

    def put(self, call: ProposeCall) -> None:
        """Queue a call.

        Raises:
            UnavailableError: the server is draining.
            CapacityError: max_waiting calls wait already.
        """
        with self._condition:
            if self._is_draining or self._is_closed:
                raise UnavailableError("draining", "the server is shutting down and takes no new work")
            if self._num_waiting >= self._max_waiting:
                raise CapacityError(
                    f"{self._num_waiting} calls are waiting, which is the limit",
                    retry_after_s=1.0,
                    numbers={"num_waiting": self._num_waiting, "max_queue": self._max_waiting},
                )
            self._num_waiting += 1
            self._calls.append(call)
            self._condition.notify()

    def post(self, command: Callable[[], None]) -> None:
        """Have the worker run `command` between two steps.

        Raises:
            UnavailableError: the worker has stopped.
        """
        with self._condition:
            if self._is_closed:
                raise UnavailableError("draining", "the server has shut down")
            self._commands.append(command)
            self._condition.notify()

    def done(self, count: int = 1) -> None:
        """Report calls as answered, which makes room for others."""
        with self._condition:
            self._num_waiting -= count

    def drain(self) -> None:
        """Refuse new calls; those already in are served."""
        with self._condition:
            self._is_draining = True

    def close(self) -> None:
        """Let the worker stop once it has nothing left."""
        with self._condition:
            self._is_draining = True
            self._is_closed = True
            self._condition.notify()

    def collect(self, timeout_s: float | None) -> tuple[list[ProposeCall], list[Callable[[], None]], bool]:
        """New calls, commands and whether the queue is closed; waits up to `timeout_s` when there is nothing."""
        with self._condition:
            if timeout_s != 0 and not (self._calls or self._commands or self._is_closed):
                self._condition.wait(timeout_s)
            calls, self._calls = self._calls, []
            commands, self._commands = self._commands, []
            return calls, commands, self._is_closed
