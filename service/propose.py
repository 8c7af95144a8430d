"""`POST /v1/propose`, the hot path, in plain ASGI: body -> call -> engine -> body.

The body is a safetensors container or JSON; the reply comes in the container of the request. Rows are never copied on the way
in: the tensors that the worker reads are windows on the bytes that came from the socket. Each message is validated once, when
it is parsed; replies are written from the engine's own values.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from pydantic_core import to_json
from torch import Tensor

from draft_engine_client import codec
from draft_engine_client.codec import CodecError, TensorView
from draft_engine_client.wire import JsonProposeRequest, ProposeRequest
from service.calls import ProposeCall, SessionOutcome, SessionWork
from service.clients import Client, ClientTable, Connection
from service.edge import (
    CONNECTION_EXTENSION,
    JSON,
    Receive,
    Scope,
    Send,
    declared_length,
    error_object,
    from_validation,
    read_body,
    require_media_type,
    send_response,
)
from service.engine import DraftEngine
from service.errors import ApiError, CapacityError, RequestError
from service.intake import FEATURE_DTYPES, ContextRows, build_call
from service.metrics import EngineMetrics
from service.serving import Serving
from service.tracing import CallTrace, Tracing

RequestT = TypeVar("RequestT", bound=ProposeRequest)

CONTAINER = codec.MEDIA_TYPE.encode()
MEDIA_TYPES = (CONTAINER, JSON)
# JSON is for people and debugging: parsing a long one would hold up everybody else's calls.
MAX_JSON_BYTES = 4 * 2**20
# Bodies being received and served, as a multiple of the longest one.
BODY_BUDGET = 4
# Of a container's header, which holds the whole message; prefix tokens are the longest part of it.
MAX_HEADER_BYTES = 16 * 2**20
_WIRE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class ProposeEndpoint:
    """The route, as an ASGI application of its own."""

    def __init__(
        self,
        engine: DraftEngine,
        clients: ClientTable,
        serving: Serving,
        metrics: EngineMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._clients = clients
        self._serving = serving
        self._max_body_bytes = serving.draft.limits.max_body_bytes
        self._bodies = BodyBudget(BODY_BUDGET * self._max_body_bytes)
        self._calls = metrics.calls
        self._calls_ok = metrics.calls.labels("ok")
        self._session_errors = metrics.session_errors
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            ApiError: the call as a whole is refused.
        """
        trace = None if self._tracing is None else self._tracing.begin(scope)
        try:
            reply = await self._reply(scope, receive, trace)
        except ApiError as error:
            self._calls.labels(error.code).inc()
            if trace is not None:
                trace.end(error)
            raise
        if trace is not None:
            trace.end(is_cancelled=reply is None)
        if reply is not None:
            self._calls_ok.inc()
            await send_response(send, 200, *reply)

    async def _reply(self, scope: Scope, receive: Receive, trace: CallTrace | None) -> tuple[bytes, bytes] | None:
        """Body and media type of the reply; None when the caller has gone away meanwhile."""
        arrived_at = time.monotonic()
        if scope["method"] != "POST":
            raise RequestError("method_not_allowed", "this path takes POST", numbers={"allow": "POST"})
        media_type = require_media_type(scope, MEDIA_TYPES)
        limit = self._max_body_bytes if media_type == CONTAINER else min(MAX_JSON_BYTES, self._max_body_bytes)
        with self._bodies.reserve(declared_length(scope, limit)):
            body = await read_body(scope, receive, limit)
            call = self._call(scope, body, media_type, arrived_at)
            if trace is not None:
                trace.call = call
            if not await self._serve(call, receive):
                return None
        for work in call.items:
            error = outcome_of(work).error
            if error is not None:
                self._session_errors.labels(error.code).inc()
        encode_reply = encode_json if media_type == JSON else encode
        return encode_reply(call, self._clients.server_id), media_type

    def _call(self, scope: Scope, body: bytearray, media_type: bytes, arrived_at: float) -> ProposeCall:
        request: ProposeRequest
        if media_type == JSON:
            request = json_request = _parse(JsonProposeRequest, body)
            client = self._renew(request, scope, arrived_at)
            rows = rows_of_json(json_request, client)
        else:
            request, rows = decode_container(body)
            client = self._renew(request, scope, arrived_at)
        draft = self._serving.draft
        call = build_call(request, rows, facts=draft.facts, limits=draft.limits, arrived_at=arrived_at)
        call.draft_version, call.scheduler = draft.version, client.scheduler
        return call

    def _renew(self, request: ProposeRequest, scope: Scope, now: float) -> Client:
        return self._clients.renew(request.client_id, request.server_id, now, connection_of(scope))

    async def _serve(self, call: ProposeCall, receive: Receive) -> bool:
        """Have the engine serve a call; returns False when the caller has gone away meanwhile."""
        answer = self._engine.submit(call)
        gone = asyncio.ensure_future(receive())  # after the body, the next event of a request is that its caller left
        gone.add_done_callback(lambda _: answer.cancel())
        try:
            await answer
        except asyncio.CancelledError:
            if gone.done() and not gone.cancelled():
                return False
            raise
        finally:
            gone.cancel()
        return True


class BodyBudget:
    """Bounds the memory of all bodies together: callers that would go over are asked to come back."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0

    @contextlib.contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` as used while the context lasts.

        Raises:
            CapacityError: there is no room for them.
        """
        if self._used_bytes + num_bytes > self._max_bytes:
            raise CapacityError(
                "too many long bodies are on their way",
                retry_after_s=1.0,
                numbers={"body_bytes": num_bytes, "used_bytes": self._used_bytes, "max_bytes": self._max_bytes},
            )
        self._used_bytes += num_bytes
        try:
            yield
        finally:
            self._used_bytes -= num_bytes


def connection_of(scope: Scope) -> Connection | None:
    """The transport connection, where the server tells connections apart."""
    found = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
    return found if isinstance(found, Connection) else None


def outcome_of(work: SessionWork) -> SessionOutcome:
    """What the session of a served call is told."""
    if work.outcome is None:
        raise RuntimeError("a call was answered before all of its sessions were")
    return work.outcome


# Requests ------------------------------------------------------------------------------------------------------------


def decode_container(body: bytearray) -> tuple[ProposeRequest, ContextRows]:
    """Read a container; the rows lie in `body`.

    Raises:
        RequestError: bad_request, wrong_dtype or wrong_shape, with the part at fault as `param`.
    """
    try:
        container = codec.decode(body, max_header_bytes=MAX_HEADER_BYTES)
    except CodecError as error:
        raise RequestError("bad_request", error.message, param=error.param) from error
    request = _parse(ProposeRequest, container.message)
    token_ids: Sequence[int] = ()
    features = None
    for name, view in container.tensors.items():
        if name == "token_ids":
            _require_tensor(name, view, ("I32",), ("N",))
            token_ids = view.to_array().tolist()
        elif name == "features":
            _require_tensor(name, view, tuple(_WIRE_DTYPES), ("N", "F"))
            features = to_tensor(view)
        else:
            raise RequestError("bad_request", "a propose call has the tensors token_ids and features", param=f"tensors.{name}")
    return request, ContextRows(token_ids, features)


def rows_of_json(request: JsonProposeRequest, client: Client) -> ContextRows:
    """The rows of a JSON request, in the dtype that the client announced, so that both kinds of body mean the same numbers.

    Raises:
        RequestError: wrong_shape; rows of different width.
    """
    if not request.features:
        return ContextRows(request.token_ids, None)
    width = len(request.features[0])
    for index, row in enumerate(request.features):
        if len(row) != width:
            raise RequestError(
                "wrong_shape", f"row 0 has {width} values, row {index} has {len(row)}", param=f"features[{index}]"
            )
    rows = torch.tensor(request.features, dtype=torch.float32)
    return ContextRows(request.token_ids, rows.to(FEATURE_DTYPES[client.target.dtype]))


def to_tensor(view: TensorView) -> Tensor | None:
    """View a tensor of the body without a copy; None when it has no bytes."""
    if not view.data.nbytes:
        return None
    dtype = _WIRE_DTYPES[view.dtype]
    raw = torch.frombuffer(view.data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(view.shape)


def _parse(message: type[RequestT], document: bytes | bytearray) -> RequestT:
    try:
        return message.model_validate_json(document)
    except ValidationError as error:
        raise from_validation(error) from error


def tensor_view(tensor: Tensor) -> TensorView:
    """A float tensor as it is sent; one that is elsewhere is copied to the host."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return TensorView.from_array(host.view(torch.uint16).numpy(), is_bfloat16=True)
    return TensorView.from_array(host.numpy())


def _require_tensor(name: str, view: TensorView, dtypes: tuple[str, ...], axes: tuple[str, ...]) -> None:
    if view.dtype not in dtypes:
        raise RequestError("wrong_dtype", f"{name} must be {' or '.join(dtypes)}; it is {view.dtype}", param=name)
    if len(view.shape) != len(axes):
        raise RequestError("wrong_shape", f"{name} must be [{', '.join(axes)}]; it is {list(view.shape)}", param=name)


# Replies -------------------------------------------------------------------------------------------------------------


def encode(call: ProposeCall, server_id: str) -> bytes:
    """The reply of a served call as a container."""
    tensors = {}
    reported = draft_probs(call.items)
    if reported is not None:
        ids, probs = reported
        tensors = {
            "draft_probs_ids": TensorView.from_array(ids.numpy()),
            "draft_probs": TensorView.from_array(probs.numpy()),
        }
    return codec.encode(to_json(reply_document(call, server_id)), tensors)


def encode_json(call: ProposeCall, server_id: str) -> bytes:
    """The reply of a served call as JSON."""
    document = reply_document(call, server_id)
    reported = draft_probs(call.items)
    if reported is not None:
        document["draft_probs_ids"], document["draft_probs"] = reported[0].tolist(), reported[1].tolist()
    return to_json(document)


def reply_document(call: ProposeCall, server_id: str) -> dict[str, Any]:
    """The fields of `wire.ProposeReply`."""
    timings = call.timings
    return {
        "server_id": server_id,
        "draft_version": call.draft_version or "",
        "sessions": [session_reply(work) for work in call.items],
        "timings": {
            "queue_ms": timings.queue_ms,
            "context_ms": timings.context_ms,
            "forward_ms": timings.forward_ms,
            "head_ms": timings.head_ms,
            "total_ms": timings.total_ms,
        },
    }


def session_reply(work: SessionWork) -> dict[str, Any]:
    """The fields of `wire.SessionReply`."""
    outcome = outcome_of(work)
    reply: dict[str, Any] = {
        "session_id": work.key.session_id,
        "incarnation": outcome.incarnation,
        "seq": outcome.seq,
        "committed_end": outcome.committed_end,
        "rows_held": outcome.rows_held,
        "coverage": outcome.rows_held / outcome.committed_end if outcome.committed_end else 1.0,
    }
    if outcome.proposal is not None:
        reply["draft_token_ids"] = outcome.proposal.token_ids
        reply["confidence"] = outcome.proposal.confidence
        reply["survival"] = outcome.proposal.survival
    if outcome.error is not None:
        reply["error"] = {**error_object(outcome.error), "status": outcome.error.status}
    return reply


def draft_probs(works: Sequence[SessionWork]) -> tuple[Tensor, Tensor] | None:
    """The distributions of all drafts of a call: ids [D, K] int32 and probabilities [D, K] float32; None if none was asked for.

    K is the widest support. Narrower ones, and the drafts of sessions that asked for none, are filled up with probability 0.
    """
    proposals = [proposal for work in works if (proposal := outcome_of(work).proposal) is not None]
    width = max((proposal.probs.shape[1] for proposal in proposals if proposal.probs is not None), default=0)
    if not width:
        return None
    num_drafts = sum(len(proposal.token_ids) for proposal in proposals)
    ids, probs = torch.zeros(num_drafts, width, dtype=torch.int32), torch.zeros(num_drafts, width)
    first = 0
    for proposal in proposals:
        last = first + len(proposal.token_ids)
        if proposal.probs is not None and proposal.probs_ids is not None:
            ids[first:last, : proposal.probs_ids.shape[1]] = proposal.probs_ids
            probs[first:last, : proposal.probs.shape[1]] = proposal.probs
        first = last
    return ids, probs
