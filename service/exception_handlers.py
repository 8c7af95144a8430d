"""How FastAPI's own errors, and ours, become the one error shape; shared by the draft server and the target server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from service.edge import JSON, error_headers, error_object, validation_error
from service.errors import ApiError, InternalError, NotFoundError, RequestError

Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def _respond(error: ApiError) -> Response:
    return Response(
        to_json({"error": error_object(error)}),
        status_code=error.status,
        media_type=JSON.decode(),
        headers=error_headers(error),
    )


async def _on_api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _respond(error)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    details = [{**item, "loc": item["loc"][1:]} for item in error.errors()]  # without FastAPI's "body" or "query"
    return _respond(validation_error(details))  # type: ignore[arg-type]


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself raises: an unknown path, a wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        return _respond(NotFoundError("not_found", f"there is no route {request.url.path}"))
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return _respond(RequestError("method_not_allowed", f"this path takes {allow}", numbers={"allow": allow}))
    return _respond(RequestError("bad_request", str(error.detail)))


async def _on_exception(_request: Request, _error: Exception) -> Response:
    """Answer what no handler knows; Starlette raises it again afterwards, and the edge logs it."""
    return _respond(InternalError("the server failed to answer this request"))


EXCEPTION_HANDLERS: Mapping[int | type[Exception], Handler] = MappingProxyType(
    {
        ApiError: _on_api_error,
        HTTPException: _on_http_exception,
        RequestValidationError: _on_validation_error,
        Exception: _on_exception,
    }
)
