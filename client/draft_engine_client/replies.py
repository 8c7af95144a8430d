"""What comes back from a draft server, checked before anything is believed.

A drafter may be wrong, and verification deals with that. What is refused here would break the target or its losslessness:
ids outside the vocabulary, more drafts than were asked for, a distribution that its draft cannot have come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from draft_engine_client import codec
from draft_engine_client.codec import CodecError
from draft_engine_client.errors import InvalidReplyError, RefusedError
from draft_engine_client.sessions import Attempt
from draft_engine_client.transport import HttpReply
from draft_engine_client.wire import ErrorReply, ProposeReply, SessionReply

_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Drafts:
    """What one session got out of a step.

    Args:
        token_ids: the drafts, perhaps none.
        confidence: for each draft the chance that it is accepted, given those before it; empty from a drafter without the head.
        survival: running product of confidence.
        probs_ids: int32 [d, K] and
        probs: float32 [d, K]: the distribution that each draft was drawn from, where it was asked for.
        reason: why nothing was drafted, or None: `unavailable` (no connection, or calls are paused), `late`, `failed` (the
            connection broke), `refused:<code>`, `catching_up` (rows are fed in the background), `over_limit` (more sessions
            than one call may have), `invalid_step`, `invalid_reply`, `error` (a bug in this client; it is logged).
        committed_end: position up to which the server is known to hold the rows.
        coverage: rows the server holds over rows committed.
    """

    token_ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    survival: tuple[float, ...] = ()
    probs_ids: NDArray[np.int32] | None = None
    probs: NDArray[np.float32] | None = None
    reason: str | None = None
    committed_end: int = 0
    coverage: float = 1.0


@dataclass(frozen=True)
class CheckedReply:
    """A well-formed reply: `sessions[i]` answers attempt i; `problems[i]` says what is wrong with `drafts[i]`, if anything."""

    sessions: tuple[SessionReply, ...]
    drafts: tuple[Drafts, ...]
    problems: tuple[str | None, ...]
    server_seconds: float


def require_ok(http: HttpReply, media_type: str) -> None:
    """Insist on a success of that media type.

    Raises:
        RefusedError: it is an error reply.
        InvalidReplyError: it is of another type.
    """
    if not 200 <= http.status < 300:
        try:
            error = ErrorReply.model_validate_json(http.body).error
        except ValidationError as cause:
            raise RefusedError(f"http_{http.status}", "the error is not one of the protocol") from cause
        raise RefusedError(error.code, error.message)
    if http.media_type != media_type:
        raise InvalidReplyError(f"the reply is {http.media_type or 'of no type'}, not {media_type}")


def read_reply(
    http: HttpReply, *, server_id: str, session_ids: Sequence[str], attempts: Sequence[Attempt], vocab_size: int
) -> CheckedReply:
    """Read the reply to a propose call in a container.

    Raises:
        RefusedError: the server refused the call.
        InvalidReplyError: the reply as a whole cannot be used.
    """
    require_ok(http, codec.MEDIA_TYPE)
    try:
        container = codec.decode(http.body)
        message = ProposeReply.model_validate_json(container.message)
        probs_ids = _matrix(container, "draft_probs_ids", "I32")
        probs = _matrix(container, "draft_probs", "F32")
    except (CodecError, ValidationError) as error:
        raise InvalidReplyError(str(error)) from error
    if message.server_id != server_id:
        raise InvalidReplyError("another server process answered")
    if [session.session_id for session in message.sessions] != list(session_ids):
        raise InvalidReplyError("the reply is not about the sessions of the call")
    num_drafts = sum(len(session.draft_token_ids) for session in message.sessions)
    has_probs = probs is not None and probs_ids is not None
    if has_probs and not probs_ids.shape == probs.shape == (num_drafts, probs.shape[1]):  # type: ignore[union-attr]
        raise InvalidReplyError(f"draft_probs_ids and draft_probs must both be [{num_drafts}, K]")

    drafts, problems = [], []
    first = 0
    for session, attempt in zip(message.sessions, attempts, strict=True):
        last = first + len(session.draft_token_ids)
        wants_probs = attempt.has_probs and last > first
        ids_part = probs_ids[first:last] if wants_probs and probs_ids is not None else None
        probs_part = probs[first:last] if wants_probs and probs is not None else None
        problem = _wrong_drafts(session, attempt, vocab_size)
        if problem is None and wants_probs:
            problem = _wrong_probs(session.draft_token_ids, ids_part, probs_part, vocab_size)
        problems.append(problem)
        drafts.append(
            Drafts(
                token_ids=session.draft_token_ids,
                confidence=session.confidence,
                survival=session.survival,
                probs_ids=ids_part,
                probs=probs_part,
                committed_end=session.committed_end,
                coverage=session.rows_held / session.committed_end if session.committed_end > 0 else 1.0,
            )
        )
        first = last
    return CheckedReply(message.sessions, tuple(drafts), tuple(problems), message.timings.total_ms / 1000.0)


def _matrix(container: codec.Container, name: str, dtype: str) -> NDArray[Any] | None:
    view = container.tensors.get(name)
    if view is None:
        return None
    if view.dtype != dtype or len(view.shape) != 2:
        raise CodecError(name, f"the tensor must be {dtype} of two dimensions; it is {view.dtype} {list(view.shape)}")
    return view.to_array()


def _wrong_drafts(session: SessionReply, attempt: Attempt, vocab_size: int) -> str | None:
    token_ids = session.draft_token_ids
    count = len(token_ids)
    if session.error is not None:
        return "drafts come with an error" if count else None
    if count > attempt.num_draft_tokens:
        return f"{count} drafts were sent, {attempt.num_draft_tokens} were asked for"
    if count and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return f"a draft is outside the vocabulary of {vocab_size}"
    for name, values in (("confidence", session.confidence), ("survival", session.survival)):
        if len(values) not in (0, count) or (values and not 0.0 <= min(values) <= max(values) <= 1.0):
            return f"{name} must be a number in [0, 1] for each draft"
    return None


def _wrong_probs(
    token_ids: Sequence[int], probs_ids: NDArray[Any] | None, probs: NDArray[Any] | None, vocab_size: int
) -> str | None:
    """Check that each draft lies in the support of a distribution over distinct ids of the vocabulary."""
    if probs_ids is None or probs is None:
        return "draft_probs were asked for and are missing"
    if not (np.isfinite(probs).all() and (probs >= 0.0).all()):
        return "draft_probs must be finite and not negative"
    if (np.abs(probs.sum(axis=1, dtype=np.float64) - 1.0) > _SUM_TOLERANCE).any():
        return "draft_probs must sum to 1"
    is_support = probs > 0.0
    if ((probs_ids < 0) | (probs_ids >= vocab_size))[is_support].any():
        return f"draft_probs_ids must be inside the vocabulary of {vocab_size}"
    if not (is_support & (probs_ids == np.asarray(token_ids)[:, None])).any(axis=1).all():
        return "a draft has no probability in its own distribution"
    # An id twice would count its probability twice. Ids outside the support are made distinct, and so never count.
    columns = np.arange(probs.shape[1])
    ordered = np.sort(np.where(is_support, probs_ids.astype(np.int64), -1 - columns), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "draft_probs_ids has an id twice"
    return None
