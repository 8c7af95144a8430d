"""The edge of the HTTP server, in plain ASGI: request ids, the API key, bounded bodies and the one error shape.

Everything a request meets before and after its route is here, so that no route can be reached around it.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from service.errors import ApiError, AuthError, InternalError, RequestError
from service.metrics import EngineMetrics

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
_REQUEST_ID_LIMIT = 128
JSON = b"application/json"


class Edge:
    """Wraps the application: gives each request an id, checks its key, and answers what the routes raise.

    Args:
        app: the routes.
        api_key: when set, every path but OPEN_PATHS needs `Authorization: Bearer <api_key>`.
    """

    def __init__(self, app: AsgiApp, *, api_key: str | None, metrics: EngineMetrics) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._api_key is not None and scope["path"] not in OPEN_PATHS:
                self._check_key(scope)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await send_error(error, send_with_id, self._metrics)
        except Exception:
            logger.exception("request %s failed", request_id.decode())
            if has_started:
                raise
            await send_error(InternalError("the server failed to answer this request"), send_with_id, self._metrics)

    def _check_key(self, scope: Scope) -> None:
        given = header(scope, b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        is_right = hmac.compare_digest(token.strip(), self._api_key or b"")
        if scheme.lower() != b"bearer" or not is_right:
            raise AuthError("invalid_api_key", "the API key is missing or wrong", param="authorization")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that lower-case name, or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def request_id_of(scope: Scope) -> bytes:
    """The caller's x-request-id where it is short and printable, else a new one."""
    given = header(scope, b"x-request-id")
    if given and len(given) <= _REQUEST_ID_LIMIT and all(33 <= byte < 127 for byte in given):
        return given
    return secrets.token_hex(8).encode()


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytearray:
    """Read a whole request body of at most `limit` bytes, refusing a longer one before it has been taken in.

    Raises:
        RequestError: body_too_large, or bad_request when the caller went away half way.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("bad_request", "the body ended early", numbers={"got_bytes": len(body)})
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(len(body), limit)
        if not message.get("more_body", False):
            return body


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        "body_too_large",
        f"the body has at least {size} bytes; the limit is {limit}",
        param="body",
        numbers={"body_bytes": size, "max_body_bytes": limit},
    )


def error_object(error: ApiError) -> dict[str, Any]:
    """The OpenAI error object; the numbers of the case are extra fields of it."""
    return {
        "message": error.message,
        "type": error.type,
        "code": error.code,
        "param": error.param,
        **error.numbers,
    }


async def send_error(error: ApiError, send: Send, metrics: EngineMetrics) -> None:
    """Answer a request with an error."""
    metrics.calls.labels(error.code).inc()
    extra = []
    if "retry_after_s" in error.numbers:
        extra.append((b"retry-after", str(max(1, round(float(error.numbers["retry_after_s"])))).encode()))
    if error.code == "invalid_api_key":
        extra.append((b"www-authenticate", b"Bearer"))
    if error.code in ("body_too_large", "draining"):
        extra.append((b"connection", b"close"))
    await send_response(send, error.status, json.dumps({"error": error_object(error)}).encode(), JSON, extra)


async def send_response(
    send: Send, status: int, body: bytes, media_type: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer a request in one piece."""
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *(extra or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
