"""Settings of a client. Every value is checked when it is made; a deadline of zero is an error and never means "for ever"."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class ClientSettings:
    """How a target server talks to its draft server.

    Args:
        url: base of the draft server, such as `http://127.0.0.1:8100`.
        client_name: name of this target server, for people.
        route_key: sent with every request as the header `x-draft-client`, for a proxy that keeps a client at one of several
            draft servers by hashing it. Default: random.
        step_deadline_ms: longest that one `propose` may take.
        connect_timeout_s: longest that opening a connection may take; done in the background, apart from any step.
        request_timeout_s: longest that a background request (handshake, upload of rows) may take.
        api_key: sent as a bearer token.
        breaker_failures: failed or late calls in a row after which steps stop calling.
        breaker_min_s: the first pause after that; it doubles with each failed trial.
        breaker_max_s: the longest pause.
        max_history_rows: rows kept of one session to feed a restarted server; of a longer one the oldest are forgotten.
        max_rows_per_step: rows that one `propose` sends at most; a session with more to send is fed in the background.
        max_upload_bytes: size of one background upload.
        max_reply_bytes: a longer reply is refused.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    url: str
    client_name: str = "target"
    route_key: str = field(default_factory=lambda: secrets.token_hex(8))
    step_deadline_ms: float = 50.0
    connect_timeout_s: float = 1.0
    request_timeout_s: float = 5.0
    api_key: str | None = field(default=None, repr=False)
    breaker_failures: int = 3
    breaker_min_s: float = 0.5
    breaker_max_s: float = 5.0
    max_history_rows: int = 8_192
    max_rows_per_step: int = 256
    max_upload_bytes: int = 1 << 20
    max_reply_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://host:port or https://host:port; it is {self.url!r}")
        if not 1 <= len(self.client_name) <= 256:
            raise ValueError("client_name must have 1 to 256 characters")
        if not (1 <= len(self.route_key) <= 256 and self.route_key.isascii() and self.route_key.isprintable()):
            raise ValueError("route_key must have 1 to 256 printable ASCII characters")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ValueError("api_key must be printable ASCII")
        for name in ("step_deadline_ms", "connect_timeout_s", "request_timeout_s", "breaker_min_s", "breaker_max_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number; it is {value}")
        for name in ("breaker_failures", "max_history_rows", "max_rows_per_step", "max_upload_bytes", "max_reply_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; it is {getattr(self, name)}")
        if self.breaker_max_s < self.breaker_min_s:
            raise ValueError(f"breaker_max_s ({self.breaker_max_s}) must not be below breaker_min_s ({self.breaker_min_s})")
