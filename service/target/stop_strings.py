"""Find stop strings in text that arrives in pieces, however the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Passes text through until a stop string appears, and holds back what may still become one.

    The stop string that ends first wins; of those that end together, the one that begins first. It is not part of the output.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not stop for stop in stop_strings):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(sorted(set(stop_strings), key=len, reverse=True))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece of text and return what is safe to show; empty once a stop string was found."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._possible_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return the text still held back when generation ended for another reason."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)
