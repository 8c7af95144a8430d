"""From a decoded propose request to a call for the engine: every check that needs no session state.

What is wrong with the request as a whole (counts, shapes, dtypes, sizes) refuses the call. What is wrong with one session
(a token outside the vocabulary, a row that is not finite, too many drafts) is kept in that session's work item, and its
neighbours are served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from draft_engine_client.wire import ModelFacts, ProposeRequest, SessionUpdate
from draft_model.drafter import SamplingParams
from service.calls import ProposeCall, SessionWork
from service.errors import ApiError, RequestError
from service.sessions import SessionChange, SessionKey
from service.settings import EngineLimits

FEATURE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class ContextRows:
    """The rows of a whole request, session after session.

    Args:
        token_ids: [N], any integers
        features: [N, width] on the CPU, or None when there is no row.
    """

    token_ids: Sequence[int]
    features: Tensor | None


def build_call(
    request: ProposeRequest, rows: ContextRows, *, facts: ModelFacts, limits: EngineLimits, arrived_at: float
) -> ProposeCall:
    """Check a request and split it into one work item for each session.

    Raises:
        RequestError: the request as a whole cannot be served; the message names the field and the limit.
    """
    _check_sizes(request, rows, limits)
    _check_features(request, rows, facts)
    has_bad_token = not _are_tokens(rows.token_ids, facts.vocab_size)
    has_bad_row, has_constant_rows = _check_values(rows.features)

    works = []
    ends = list(accumulate((update.num_rows for update in request.sessions), initial=0))
    for index, update in enumerate(request.sessions):
        first, last = ends[index], ends[index + 1]
        token_ids = rows.token_ids[first:last]
        features = rows.features[first:last] if rows.features is not None and update.num_rows else None
        refused = _refusal(index, update, facts)
        if refused is None and has_bad_token:
            refused = _check_tokens(f"sessions[{index}].token_ids", token_ids, facts)
        if refused is None and has_bad_row and features is not None:
            refused = _check_finite(index, features)
        works.append(_work(request, update, token_ids, features, facts, refused))
    closes = [SessionKey(request.client_id, session_id) for session_id in request.finished]
    return ProposeCall(request.client_id, works, closes, arrived_at, request.deadline_ms, has_constant_rows=has_constant_rows)


def _work(
    request: ProposeRequest,
    update: SessionUpdate,
    token_ids: Sequence[int],
    features: Tensor | None,
    facts: ModelFacts,
    refused: ApiError | None,
) -> SessionWork:
    sampling = update.sampling
    return SessionWork(
        change=SessionChange(
            key=SessionKey(request.client_id, update.session_id),
            incarnation=update.incarnation,
            seq=update.seq,
            start=update.start,
            num_rows=update.num_rows,
            scratch_rows=facts.draft_block_size if update.num_draft_tokens else 0,
            namespace=_namespace(request.client_id, update),
            prefix_token_ids=update.prefix_token_ids,
        ),
        token_ids=token_ids,
        features=features,
        is_projected=request.rows == "projected",
        anchor_token_id=update.anchor_token_id,
        num_draft_tokens=update.num_draft_tokens,
        sampling=SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
        ),
        draft_probs_topk=update.draft_probs_topk if update.draft_probs == "topk" else 0,
        confidence_threshold=update.confidence_threshold,
        num_verified=update.num_verified,
        refused=refused,
    )


def _namespace(client_id: str, update: SessionUpdate) -> str:
    """Name those whose prefix pages may be shared; as JSON, so that no salt can spell another client's namespace."""
    owner = ["client", client_id] if update.cache_salt is None else ["salt", update.cache_salt]
    return json.dumps([*owner, update.context_id])


def _check_sizes(request: ProposeRequest, rows: ContextRows, limits: EngineLimits) -> None:
    num_sessions, num_rows = len(request.sessions), sum(update.num_rows for update in request.sessions)
    if num_sessions > limits.max_sessions_per_call:
        raise RequestError(
            "too_many_sessions",
            f"the call has {num_sessions} sessions; the limit is {limits.max_sessions_per_call}",
            param="sessions",
            numbers={"num_sessions": num_sessions, "max_sessions_per_call": limits.max_sessions_per_call},
        )
    if num_rows > limits.max_rows_per_call:
        raise RequestError(
            "too_many_rows",
            f"the call has {num_rows} context rows; the limit is {limits.max_rows_per_call}",
            param="sessions",
            numbers={"num_rows": num_rows, "max_rows_per_call": limits.max_rows_per_call},
        )
    if len(rows.token_ids) != num_rows:
        raise RequestError(
            "wrong_shape",
            f"the sessions name {num_rows} rows; token_ids has {len(rows.token_ids)}",
            param="token_ids",
            numbers={"expected": num_rows, "got": len(rows.token_ids)},
        )
    seen: set[str] = set()
    for index, update in enumerate(request.sessions):
        if update.session_id in seen:
            raise RequestError(
                "bad_request",
                f"session {update.session_id!r} is in the call twice",
                param=f"sessions[{index}].session_id",
            )
        seen.add(update.session_id)
    for index, session_id in enumerate(request.finished):
        if session_id in seen:
            raise RequestError(
                "bad_request",
                f"session {session_id!r} is both updated and finished in one call",
                param=f"finished[{index}]",
            )


def _check_features(request: ProposeRequest, rows: ContextRows, facts: ModelFacts) -> None:
    width = facts.projected_width if request.rows == "projected" else facts.feature_width
    features = rows.features
    num_rows = len(rows.token_ids)
    if features is None:
        if num_rows:
            raise RequestError("wrong_shape", f"{num_rows} rows have no features", param="features")
        return
    if tuple(features.shape) != (num_rows, width):
        raise RequestError(
            "wrong_shape",
            f"features must be [{num_rows}, {width}] for {request.rows} rows; they are {list(features.shape)}",
            param="features",
            numbers={"expected_rows": num_rows, "expected_width": width, "got": str(list(features.shape))},
        )
    allowed = [FEATURE_DTYPES[name] for name in facts.feature_dtypes]
    if features.dtype not in allowed:
        raise RequestError(
            "wrong_dtype",
            f"features must be one of {', '.join(facts.feature_dtypes)}; they are {features.dtype}",
            param="features",
        )


def _refusal(index: int, update: SessionUpdate, facts: ModelFacts) -> ApiError | None:
    place = f"sessions[{index}]"
    if update.num_draft_tokens > facts.max_draft_tokens:
        return RequestError(
            "too_many_draft_tokens",
            f"{update.num_draft_tokens} drafts were asked for; this drafter makes at most {facts.max_draft_tokens}",
            param=f"{place}.num_draft_tokens",
            numbers={"num_draft_tokens": update.num_draft_tokens, "max_draft_tokens": facts.max_draft_tokens},
        )
    if update.anchor_token_id >= facts.vocab_size:
        return _token_error(f"{place}.anchor_token_id", update.anchor_token_id, facts)
    if update.confidence_threshold and not facts.has_confidence:
        return RequestError(
            "unsupported_sampling",
            "this drafter has no confidence head, so confidence_threshold means nothing to it",
            param=f"{place}.confidence_threshold",
        )
    prefix = update.prefix_token_ids
    if prefix and len(prefix) != update.start:
        return RequestError(
            "wrong_shape",
            f"prefix_token_ids names {len(prefix)} tokens; the session starts at position {update.start}",
            param=f"{place}.prefix_token_ids",
            numbers={"expected": update.start, "got": len(prefix)},
        )
    if not _are_tokens(prefix, facts.vocab_size):
        return _check_tokens(f"{place}.prefix_token_ids", prefix, facts)
    return None


def _are_tokens(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def _check_tokens(place: str, token_ids: Sequence[int], facts: ModelFacts) -> ApiError | None:
    for offset, token_id in enumerate(token_ids):
        if not 0 <= token_id < facts.vocab_size:
            return _token_error(f"{place}[{offset}]", token_id, facts)
    return None


def _token_error(param: str, token_id: int, facts: ModelFacts) -> RequestError:
    return RequestError(
        "token_out_of_range",
        f"{param} is {token_id}; the vocabulary has {facts.vocab_size} tokens",
        param=param,
        numbers={"token_id": token_id, "vocab_size": facts.vocab_size},
    )


def _check_values(features: Tensor | None) -> tuple[bool, bool]:
    """Whether a value is not finite, and whether all values are the same, which no captured state ever is.

    One pass and no temporary: `isfinite().all()` takes 25 times as long.
    """
    if features is None or not features.numel():
        return False, False
    extremes = torch.aminmax(features)
    low, high = extremes.min.item(), extremes.max.item()
    return not (math.isfinite(low) and math.isfinite(high)), low == high


def _check_finite(index: int, features: Tensor) -> ApiError | None:
    finite_rows = torch.isfinite(features).all(dim=1)
    if bool(finite_rows.all()):
        return None
    row = int(torch.nonzero(~finite_rows)[0])
    return RequestError(
        "non_finite_rows",
        f"row {row} of session {index} has values that are not finite",
        param=f"sessions[{index}].features[{row}]",
        numbers={"row": row},
    )
