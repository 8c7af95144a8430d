"""When to stop calling a draft server that does not help, and when to try again. Pure: the caller brings the time."""

from __future__ import annotations


class Backoff:
    """Pauses that double from `min_s` to `max_s`, and start over after a success."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._next_s = min_s

    def next_pause(self) -> float:
        """The pause after one more failure, in seconds."""
        pause = self._next_s
        self._next_s = min(2.0 * pause, self._max_s)
        return pause

    def reset(self) -> None:
        """Start over."""
        self._next_s = self._min_s


class CircuitBreaker:
    """Closed: calls go through. Open: none does, until a pause is over and one trial is let through.

    `failures` failures in a row open it. A trial that succeeds closes it; one that fails opens it for twice as long.
    """

    def __init__(self, failures: int, min_s: float, max_s: float) -> None:
        self._limit = failures
        self._backoff = Backoff(min_s, max_s)
        self._failures = 0
        self._retry_at: float | None = None
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether the last word was a failure too many."""
        return self._retry_at is not None

    def allows(self, now: float) -> bool:
        """Whether a call may be made."""
        return self._retry_at is None or now >= self._retry_at

    def record_success(self) -> None:
        """Close."""
        self._failures = 0
        self._retry_at = None
        self._backoff.reset()

    def record_failure(self, now: float) -> None:
        """Count a failure; open after too many, and at once after a failed trial."""
        self._failures += 1
        if self._failures >= self._limit:
            if self._retry_at is None:
                self.times_opened += 1
            self._retry_at = now + self._backoff.next_pause()
