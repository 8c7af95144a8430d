"""The client's mirror of a draft session: the rows of one target request, and how much of them the server is known to hold.

    positions   0 ......... first_row ............. acked_end ............. end
    tokens      [token_start, .................................................. end)
    rows kept               [first_row, ........................................ end)
    on server   [opened_at, ...................... acked_end)   at least; perhaps more, after a reply that never came

Four rules make every failure repair itself with the next call:

* An update starts at `acked_end`. If the server holds more, it truncates; nothing that was not acknowledged is built upon.
* Every attempt has a new `seq`, so an attempt that arrives late is stale and changes nothing.
* Each time a session is opened anew (first use, restarted server, rows lost or in doubt) it takes a higher incarnation.
* Only a reply without an error raises `acked_end`. Whatever is odd in a reply opens the session anew.

Nothing here knows HTTP, clocks or threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draft_engine_client.wire import Sampling, SessionReply, SessionUpdate

_BLOCK_ROWS = 128
_NEVER = -1
_MAX_ID = 256
_GREEDY = Sampling()

# The server will refuse such rows for ever: without them the session may go on.
_REFUSED_ROWS = frozenset({"non_finite_rows", "token_out_of_range", "wrong_shape", "wrong_dtype", "bad_request"})
_REFUSED_EPOCHS = frozenset({"stale_incarnation", "stale_sequence"})


@dataclass(frozen=True)
class SessionStep:
    """One target request's part of a target step: the rows that became known, and the drafts that are wanted.

    Args:
        session_id: the target's own name of the request.
        token_ids: [n] tokens of the new rows.
        features: [n, F] of the dtype that the fingerprint names (bfloat16 as uint16 bits); copied.
        start: position of the first new row. Before the end of what came earlier it takes the rest back; past it, the rows
            between were never seen, and the session goes on without anything before `start`.
        anchor_token_id: the last committed token; it stands at start + n and has no row yet.
        num_draft_tokens: drafts wanted; 0 only hands over the rows.
        sampling: how drafts are drawn.
        draft_probs_topk: size of the returned distributions; 0 returns none.
        prefix_token_ids: tokens of [0, start) for a session that begins at start > 0, to find it in the prefix cache.
        cache_salt: share prefix pages with every client that gives the same; None keeps them to this client.
        context_id: what the features depend on besides the tokens (adapter, images); the first step's counts.
    """

    session_id: str
    token_ids: Sequence[int]
    features: NDArray[Any]
    start: int
    anchor_token_id: int
    num_draft_tokens: int
    sampling: Sampling = _GREEDY
    draft_probs_topk: int = 0
    prefix_token_ids: Sequence[int] = ()
    cache_salt: str | None = None
    context_id: str | None = None


def _are_finite(features: NDArray[Any]) -> bool:
    """Whether no exponent is all ones. Comparing bits is several times faster than np.isfinite of float16."""
    if not features.size:
        return True
    if features.dtype.itemsize == 4:
        return bool((features.view(np.uint32) & 0x7F800000).max() != 0x7F800000)
    exponent = np.uint16(0x7C00 if features.dtype.kind == "f" else 0x7F80)
    return bool((features.view(np.uint16) & exponent).max() != exponent)


class RowStore:
    """Feature rows of positions [first, end), in blocks, so that growing never copies. At most `max_rows` are kept."""

    def __init__(self, first: int, width: int, dtype: np.dtype[Any], max_rows: int) -> None:
        self.first = first
        self.end = first
        self._width = width
        self._dtype = dtype
        self._max_rows = max_rows
        self._block_rows = max(1, min(_BLOCK_ROWS, max_rows // 8))
        self._blocks: list[NDArray[Any]] = []

    def append(self, rows: NDArray[Any]) -> None:
        """Copy rows [n, width] to the end, and forget the oldest block as often as needed."""
        done = 0
        while done < len(rows):
            used = (self.end - self.first) % self._block_rows
            if self.end - self.first == len(self._blocks) * self._block_rows:
                self._blocks.append(np.empty((self._block_rows, self._width), self._dtype))
                used = 0
            count = min(self._block_rows - used, len(rows) - done)
            self._blocks[-1][used : used + count] = rows[done : done + count]
            self.end += count
            done += count
            while self.end - self.first > self._max_rows:
                del self._blocks[0]
                self.first += self._block_rows

    def truncate(self, end: int) -> None:
        """Forget rows from position `end` on; first <= end <= self.end."""
        self.end = end
        del self._blocks[-(-(end - self.first) // self._block_rows) :]

    def pieces(self, start: int, end: int) -> list[NDArray[Any]]:
        """Views of rows [start, end), in order."""
        views = []
        while start < end:
            block, offset = divmod(start - self.first, self._block_rows)
            count = min(self._block_rows - offset, end - start)
            views.append(self._blocks[block][offset : offset + count])
            start += count
        return views


@dataclass(frozen=True)
class Attempt:
    """One update that is under way, as numbers."""

    incarnation: int
    seq: int
    start: int
    end: int
    num_draft_tokens: int
    has_probs: bool


class SessionMirror:
    """See the module docstring.

    Args:
        first: the step that begins the session; take it afterwards.
        width: F.
        dtype: of the features.
        vocab_size: tokens of the target.
        max_rows: rows kept; older ones are forgotten.
        next_incarnation: gives numbers that only grow; shared by the sessions of a client.
    """

    def __init__(
        self,
        first: SessionStep,
        *,
        width: int,
        dtype: np.dtype[Any],
        vocab_size: int,
        max_rows: int,
        next_incarnation: Callable[[], int],
    ) -> None:
        if not 1 <= len(first.session_id) <= _MAX_ID:
            raise ValueError(f"a session_id has 1 to {_MAX_ID} characters")
        self.session_id = first.session_id
        self.anchor_token_id = 0
        self.was_sent = False
        """Whether the server may know this session."""
        self.namespace = ""
        """Who we were to the server that `acked_end` is about."""
        self.is_behind = False
        """Whether the background thread feeds it, as it has too much to send for a step; `is_uploading`: at this moment."""
        self.is_uploading = False
        self.last_fed = 0.0
        self.is_refused = False
        """Whether the server will never take more of it, unless it is taken back."""
        self.retry_at = 0.0
        """When the server wants to hear of it again."""
        self.width = width
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._next_incarnation = next_incarnation
        self._cache_salt, self._context_id = first.cache_salt, first.context_id
        self._incarnation = self._seq = 0
        self._acked_end = self._opened_at = self._sent_end = _NEVER
        self._are_drafts_lost = False
        self._begin(max(first.start, 0), first.prefix_token_ids)

    def _begin(self, start: int, prefix_token_ids: Sequence[int]) -> None:
        """Start over without any row, the anchor at `start`."""
        has_prefix = len(prefix_token_ids) == start
        self._token_start = 0 if has_prefix else start
        self._token_ids = array("i", prefix_token_ids if has_prefix else ())
        self._rows = RowStore(start, self.width, self._dtype, self._max_rows)
        self.forget_server()

    # The target's side -----------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """Position after the last row: the anchor's."""
        return self._rows.end

    @property
    def first_row(self) -> int:
        """Position of the first row kept."""
        return self._rows.first

    @property
    def num_pending(self) -> int:
        """Rows that the server has not acknowledged."""
        return self.end - max(self._acked_end, self.first_row)

    @property
    def acked_end(self) -> int:
        """Position up to which the server is known to hold the rows; 0 when it holds none."""
        return max(self._acked_end, 0)

    def take(self, step: SessionStep) -> None:
        """Add a step's rows. A step that cannot be taken changes nothing.

        Raises:
            ValueError: shapes, dtype, tokens or positions are wrong.
        """
        num_rows = len(step.token_ids)
        features = step.features
        if features.shape != (num_rows, self.width) or features.dtype != self._dtype:
            raise ValueError(
                f"features must be {self._dtype} [{num_rows}, {self.width}]; they are {features.dtype} {list(features.shape)}"
            )
        if step.start < 0:
            raise ValueError(f"start must not be negative; it is {step.start}")
        token_ids = self._checked(step.token_ids)
        prefix = self._checked(step.prefix_token_ids)
        self._checked((step.anchor_token_id,))
        if not _are_finite(features):
            raise ValueError("a feature is not finite")
        self._place(step.start, prefix)
        self._token_ids.extend(token_ids)
        self._rows.append(features)
        self.anchor_token_id = step.anchor_token_id

    def _checked(self, token_ids: Sequence[int]) -> array[int]:
        checked = array("i", token_ids)
        if checked and not 0 <= min(checked) <= max(checked) < self._vocab_size:
            raise ValueError(f"token ids must be in [0, {self._vocab_size})")
        return checked

    def _place(self, start: int, prefix_token_ids: Sequence[int]) -> None:
        """Make `start` the end: take rows back, or past the end begin without what was never seen."""
        if start == self.end:
            return
        self.is_refused = False
        if start > self.end:
            self._begin(start, prefix_token_ids)
            return
        if start >= self.first_row:
            self._rows.truncate(start)
        else:
            self._rows = RowStore(start, self.width, self._dtype, self._max_rows)
        if start >= self._token_start:
            del self._token_ids[start - self._token_start :]
        else:
            self._token_start, self._token_ids = start, array("i")
        self._acked_end = min(self._acked_end, start)
        self._opened_at = min(self._opened_at, start)
        self._sent_end = min(self._sent_end, start)

    # The server's side -----------------------------------------------------------------------------------------------

    def forget_server(self) -> None:
        """Open the session anew with the next update: what the server holds is gone or in doubt."""
        self._incarnation = self._next_incarnation()
        self._seq = 0
        self._acked_end = _NEVER
        self._opened_at = _NEVER
        self._sent_end = _NEVER

    def next_update(self, *, max_rows: int, step: SessionStep | None) -> tuple[SessionUpdate, Attempt]:
        """The next update: of a step, with all pending rows; or without one, of at most `max_rows` and no drafts.

        Raises:
            pydantic.ValidationError: the step asks for something that the wire cannot say.
        """
        first_row = self.first_row
        is_opening = self._acked_end < first_row
        if is_opening and self._opened_at != _NEVER and self._opened_at != first_row:
            self.forget_server()
        start = first_row if is_opening else self._acked_end
        end = self.end if step is not None else min(self.end, start + max_rows)
        prefix: Sequence[int] = ()
        if is_opening and start > 0 and self._token_start == 0:
            prefix = self._token_ids[:start]
        topk = 0 if step is None else step.draft_probs_topk
        update = SessionUpdate(
            session_id=self.session_id,
            incarnation=self._incarnation,
            seq=self._seq,
            start=start,
            num_rows=end - start,
            anchor_token_id=self.anchor_token_id if end == self.end else self._token_ids[end - self._token_start],
            num_draft_tokens=0 if step is None else step.num_draft_tokens,
            sampling=_GREEDY if step is None else step.sampling,
            draft_probs="topk" if topk else "none",
            draft_probs_topk=topk or 64,
            num_verified=0 if self._are_drafts_lost else None,
            prefix_token_ids=tuple(prefix),
            cache_salt=self._cache_salt,
            context_id=self._context_id,
        )
        attempt = Attempt(self._incarnation, self._seq, start, end, update.num_draft_tokens, topk > 0)
        self._seq += 1
        self.was_sent = True
        # Until the reply is there: drafts that came too late were not verified.
        self._are_drafts_lost = update.num_draft_tokens > 0
        if is_opening:
            self._opened_at = start
        self._sent_end = end
        return update, attempt

    def rows_of(self, attempt: Attempt) -> tuple[Sequence[int], list[NDArray[Any]]]:
        """Tokens and row views of an attempt."""
        tokens = self._token_ids[attempt.start - self._token_start : attempt.end - self._token_start]
        return tokens, self._rows.pieces(attempt.start, attempt.end)

    def accept(self, attempt: Attempt, reply: SessionReply) -> str | None:
        """Learn from a reply; returns None if it stands, otherwise the reason that it does not."""
        if (reply.incarnation, reply.seq) != (attempt.incarnation, attempt.seq):
            self.forget_server()
            return "invalid_reply"
        if attempt.incarnation != self._incarnation:
            return "superseded"
        if reply.error is not None:
            self._learn_refusal(reply, reply.error.code)
            return f"refused:{reply.error.code}"
        self._are_drafts_lost = False
        if reply.committed_end != attempt.end or not 0 <= reply.rows_held <= reply.committed_end:
            self.forget_server()
            return "invalid_reply"
        # Rows that were taken back while the attempt was under way do not count.
        self._acked_end = min(attempt.end, self._sent_end)
        if reply.rows_held < attempt.end - self._opened_at:
            # The server lost the session and opened it anew in the middle: the drafts are sound, but poor.
            self.forget_server()
        return None

    def pause(self, now: float, reply: SessionReply, default_s: float, max_s: float) -> None:
        """Leave the session alone for as long as an overloaded server wants, within reason."""
        if reply.error is not None and reply.error.code == "overloaded":
            asked = (reply.error.model_extra or {}).get("retry_after_s", default_s)
            self.retry_at = now + (min(max(asked, 0.0), max_s) if isinstance(asked, int | float) else default_s)

    def _learn_refusal(self, reply: SessionReply, code: str) -> None:
        if code in _REFUSED_ROWS:
            self._begin(self.end, ())
        elif code in _REFUSED_EPOCHS:
            self.forget_server()
        elif code == "context_limit":
            self.is_refused = True
        elif self._acked_end != _NEVER:
            # A refused update changed nothing, so what was acknowledged still stands, unless the server says it holds less.
            self._acked_end = min(self._acked_end, reply.committed_end)
            if self._acked_end < self.first_row or reply.rows_held < self._acked_end - self._opened_at:
                self.forget_server()
