"""The edge of the HTTP server, in plain ASGI: request ids, the API key, bounded bodies and the one error shape.

Everything a request meets before and after its route is here, so that no route can be reached around it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from service.errors import ApiError, AuthError, InternalError, RequestError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/version"})
# What a server puts into scope["extensions"] for the application to know one connection from another.
CONNECTION_EXTENSION = "draft_engine.connection"
# A browser asks its user for the key as the password of this page alone.
STATUS_PATH = "/"
BODY_SECONDS = 30.0
_REQUEST_ID_LIMIT = 128
_SHOWN_ERRORS = 3

request_id_var: ContextVar[str] = ContextVar("request_id", default="-")


class Edge:
    """Wraps the application: gives each request an id, checks its key, and answers what the routes raise.

    Args:
        app: the routes.
        api_key: when set, every path but OPEN_PATHS needs `Authorization: Bearer <api_key>`. The status page, which people open
            in a browser, takes it as the password of HTTP Basic authentication too.
    """

    def __init__(self, app: AsgiApp, *, api_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        request_id_var.set(request_id.decode())
        is_started = is_complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started, is_complete
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            else:
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            if self._api_key is not None and scope["path"] not in OPEN_PATHS:
                self._check_key(scope, self._api_key)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            if is_started:
                raise
            self._log(scope, error)
            await send_error(error, send_with_id)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not is_started:
                await send_error(InternalError("the server failed to answer this request"), send_with_id)
            elif not is_complete:
                raise

    def _check_key(self, scope: Scope, api_key: bytes) -> None:
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        is_page = scope["path"] == STATUS_PATH
        if is_page and scheme.lower() == b"basic":
            scheme, token = b"bearer", _password_of(token)
        is_right = hmac.compare_digest(token.strip(), api_key)
        if scheme.lower() != b"bearer" or not is_right:
            raise AuthError(
                "invalid_api_key",
                "the API key is missing or wrong",
                param="authorization",
                challenge='Basic realm="draft-engine"' if is_page else "Bearer",
            )

    def _log(self, scope: Scope, error: ApiError) -> None:
        level = logging.WARNING if error.status >= 500 else logging.DEBUG
        logger.log(level, "%s %s: %d %s: %s", scope["method"], scope["path"], error.status, error.code, error.message)


def _password_of(credentials: bytes) -> bytes:
    """The password in the credentials of HTTP Basic authentication; empty where there is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


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


def declared_length(scope: Scope, limit: int) -> int:
    """The length that a request gives its body; `limit` when it gives none.

    Raises:
        RequestError: body_too_large.
    """
    declared = header(scope, b"content-length")
    if declared is None or not declared.isdigit():
        return limit
    length = int(declared)
    if length > limit:
        raise _too_large(length, limit)
    return length


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytearray:
    """Read a whole request body of at most `limit` bytes, refusing a longer one before it has been taken in.

    Raises:
        RequestError: body_too_large, or bad_request when the caller stopped half way.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_body(scope, receive, limit)
    except TimeoutError as error:
        raise RequestError("bad_request", f"the body did not arrive within {BODY_SECONDS:.0f} s", param="body") from error


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytearray:
    declared_length(scope, limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("bad_request", "the body ended early", param="body", numbers={"got_bytes": len(body)})
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(len(body), limit)
        if not message.get("more_body", False):
            return body


async def with_json_body(scope: Scope, receive: Receive, limit: int) -> Receive:
    """Read the body of a request that takes JSON, and return what hands it to the routes again.

    Raises:
        RequestError: body_too_large or unsupported_media_type.
    """
    if scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
        return receive
    body = await read_body(scope, receive, limit)
    if body:
        require_media_type(scope, (JSON,))
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        "body_too_large",
        f"the body has at least {size} bytes; the limit is {limit}",
        param="body",
        numbers={"body_bytes": size, "max_body_bytes": limit},
    )


def media_type_of(scope: Scope) -> bytes:
    """The media type of the request body in lower case, without parameters."""
    return (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()


def require_media_type(scope: Scope, allowed: tuple[bytes, ...]) -> bytes:
    """The media type of the request body.

    Raises:
        RequestError: unsupported_media_type.
    """
    given = media_type_of(scope)
    if given not in allowed:
        names = " or ".join(name.decode() for name in allowed)
        raise RequestError(
            "unsupported_media_type",
            f"send the body with Content-Type {names}; it came as {given.decode('latin-1') or 'nothing'}",
            param="content-type",
        )
    return given


def field_path(location: tuple[int | str, ...]) -> str:
    """`("sessions", 2, "start")` -> `sessions[2].start`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def validation_error(details: list[ErrorDetails], prefix: str = "") -> RequestError:
    """What is wrong with a message: field paths and limits, never the values, which may be somebody's prompt."""
    told = []
    for item in details[:_SHOWN_ERRORS]:
        path = field_path(item["loc"]) or prefix
        told.append(f"{path}: {item['msg']}" if path else item["msg"])
    if len(details) > _SHOWN_ERRORS:
        told.append(f"and {len(details) - _SHOWN_ERRORS} more")
    return RequestError("bad_request", "; ".join(told), param=(field_path(details[0]["loc"]) or prefix) or None)


def from_validation(error: ValidationError, prefix: str = "") -> RequestError:
    """`validation_error` of a pydantic error."""
    return validation_error(error.errors(include_url=False, include_input=False, include_context=False), prefix)


def error_object(error: ApiError) -> dict[str, Any]:
    """The OpenAI error object; the numbers of the case are extra fields of it."""
    return {
        "message": error.message,
        "type": error.type,
        "code": error.code,
        "param": error.param,
        **error.numbers,
    }


def error_headers(error: ApiError) -> Mapping[str, str]:
    """The HTTP headers that go with an error."""
    headers = {}
    if "retry_after_s" in error.numbers:
        headers["retry-after"] = str(max(1, round(float(error.numbers["retry_after_s"]))))
    if "allow" in error.numbers:
        headers["allow"] = str(error.numbers["allow"])
    if isinstance(error, AuthError):
        headers["www-authenticate"] = error.challenge
    if error.code in ("body_too_large", "draining"):
        headers["connection"] = "close"
    return headers


async def send_error(error: ApiError, send: Send) -> None:
    """Answer a request with an error."""
    extra = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send_response(send, error.status, to_json({"error": error_object(error)}), JSON, extra)


async def send_response(
    send: Send, status: int, body: bytes, media_type: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer a request in one piece."""
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *(extra or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
