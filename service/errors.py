"""Errors of the service, and the one map from error code to HTTP status.

ServiceError
  StartupError            the process cannot start as asked; one line for the operator, no traceback
  ApiError                the caller is told: a stable `code`, a message, the parameter at fault and the numbers of the case
    RequestError            the request is malformed or breaks a limit; sending it again changes nothing
    AuthError               the API key is missing or wrong
    NotFoundError           the named session, model or route does not exist
    StateError              the caller's idea of a session, or of the server, is out of date; `numbers` say how to repair it
    FingerprintError        the caller's target is not the one this drafter was trained for
    CapacityError           no room now; come back after `retry_after_s`
    UnavailableError        the server is starting, draining or broken
    DeadlineError           the call's own deadline passed before it was served
    InternalError           a forward pass failed; the sessions of its batch are told, the others are not touched
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

STATUS_OF_CODE: Mapping[str, int] = MappingProxyType(
    {
        "bad_request": 400,
        "wrong_shape": 400,
        "wrong_dtype": 400,
        "non_finite_rows": 400,
        "token_out_of_range": 400,
        "too_many_draft_tokens": 400,
        "too_many_sessions": 400,
        "too_many_rows": 400,
        "context_limit": 400,
        "unsupported_sampling": 400,
        "invalid_api_key": 401,
        "not_found": 404,
        "session_not_found": 404,
        "model_not_found": 404,
        "method_not_allowed": 405,
        "context_gap": 409,
        "epoch_mismatch": 409,
        "stale_sequence": 409,
        "stale_incarnation": 409,
        "reload_in_progress": 409,
        "fingerprint_mismatch": 412,
        "body_too_large": 413,
        "unsupported_media_type": 415,
        "reload_failed": 422,
        "overloaded": 429,
        "internal": 500,
        "draining": 503,
        "not_ready": 503,
        "deadline_exceeded": 504,
    }
)


class ServiceError(Exception):
    """Base of everything this package raises on purpose."""


class StartupError(ServiceError):
    """The process cannot start with these settings, files or address."""


class ApiError(ServiceError):
    """An error the caller is told.

    Args:
        code: a key of STATUS_OF_CODE; clients branch on it, so it never changes.
        message: one sentence for a person.
        param: the field at fault, as a path such as `sessions[2].num_draft_tokens`.
        numbers: the values of the case (limits, positions), sent as extra fields of the error object.
    """

    type: ClassVar[str] = "server_error"

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        numbers: Mapping[str, int | float | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = STATUS_OF_CODE[code]
        self.message = message
        self.param = param
        self.numbers = dict(numbers or {})


class RequestError(ApiError):
    """The request is malformed, or asks for more than a limit allows."""

    type = "invalid_request_error"


class AuthError(ApiError):
    """The API key is missing or wrong. `challenge` is the WWW-Authenticate header that goes with it."""

    type = "authentication_error"

    def __init__(self, code: str, message: str, *, param: str, challenge: str = "Bearer") -> None:
        super().__init__(code, message, param=param)
        self.challenge = challenge


class NotFoundError(ApiError):
    """The named session, model or route does not exist."""

    type = "not_found_error"


class StateError(ApiError):
    """The caller's idea of a session or of the server is out of date."""

    type = "conflict_error"


class FingerprintError(ApiError):
    """The caller's target is not the one this drafter belongs to."""

    type = "fingerprint_error"


class CapacityError(ApiError):
    """No room now."""

    type = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float, numbers: Mapping[str, int | float | str]) -> None:
        super().__init__("overloaded", message, numbers={**numbers, "retry_after_s": retry_after_s})
        self.retry_after_s = retry_after_s


class UnavailableError(ApiError):
    """The server is starting, draining or broken."""

    type = "unavailable_error"


class DeadlineError(ApiError):
    """The call's own deadline passed before it was served."""

    type = "deadline_error"

    def __init__(self, waited_ms: float, deadline_ms: float) -> None:
        super().__init__(
            "deadline_exceeded",
            f"the call waited {waited_ms:.1f} ms; its deadline was {deadline_ms:.1f} ms",
            numbers={"waited_ms": round(waited_ms, 3), "deadline_ms": deadline_ms},
        )


class InternalError(ApiError):
    """A forward pass failed. The message names the kind of failure, never its data."""

    type = "internal_error"

    def __init__(self, message: str, *, numbers: Mapping[str, int | float | str] | None = None) -> None:
        super().__init__("internal", message, numbers=numbers)
