"""Why a call to the draft server gave no drafts. These stay inside the client: `propose` turns them into reasons.

ClientError
  TransportError    no usable HTTP reply; the connection is closed, and whether the request had an effect is unknown
    LateError         the deadline passed first
  RefusedError      the server answered with an error for the whole call
  InvalidReplyError the server answered what the protocol does not allow
"""

from __future__ import annotations

# The server is well and knows us: the connection and the handshake stay as they are.
_PASSING_CODES = frozenset({"overloaded", "draining", "not_ready", "deadline_exceeded", "internal"})


class ClientError(Exception):
    """Base of the above. `reason` is what `Drafts.reason` says."""

    reason = "failed"


class TransportError(ClientError):
    """The request got no usable HTTP reply, and its connection is closed."""


class LateError(TransportError):
    """The deadline passed first."""

    reason = "late"


class InvalidReplyError(ClientError):
    """The reply breaks the protocol."""

    reason = "invalid_reply"


class RefusedError(ClientError):
    """The server refused the whole call.

    Args:
        code: the stable code of the error, or `http_<status>` where the body is not the protocol's.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.reason = f"refused:{code}"

    @property
    def is_passing(self) -> bool:
        """Whether the same call may succeed later without shaking hands again."""
        return self.code in _PASSING_CODES
