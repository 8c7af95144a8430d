"""One keep-alive HTTP/1.1 connection whose every request ends by a deadline.

httpcore is httpx's own transport. It is used bare because httpx's client costs several times the rest of a call, and with
streams of our own because its timeouts are counted for each read: a server that trickles bytes would never be late.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpcore

from draft_engine_client.errors import LateError, TransportError
from draft_engine_client.settings import ClientSettings

_WRITE_BYTES = 256 * 1024
_JOIN_BYTES = 64 * 1024
_USER_AGENT = b"draft-engine-client"


@dataclass(frozen=True)
class HttpReply:
    """A whole HTTP reply."""

    status: int
    media_type: str
    body: bytes


class Deadline:
    """The time the current request of a connection ends at, on time.monotonic().

    `is_head_held` has the next write wait for the one after it, so that a head and a short body leave in one piece.
    """

    def __init__(self) -> None:
        self.at = 0.0
        self.is_head_held = False

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            httpcore.TimeoutException: there are none.
        """
        left = self.at - time.monotonic()
        if left <= 0.0:
            raise httpcore.ReadTimeout("the deadline has passed")
        return left


class DeadlineStream(httpcore.NetworkStream):
    """A stream that counts down one deadline over all reads and writes."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline
        self._head = b""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002 - the deadline rules
        """Read what there is, up to `max_bytes`."""
        return self._stream.read(max_bytes, self._deadline.remaining())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        """Write all of it, in pieces, each of which counts down the deadline."""
        if self._deadline.is_head_held:
            self._deadline.is_head_held = False
            self._head = buffer
            return
        if self._head:
            head, self._head = self._head, b""
            if len(buffer) > _JOIN_BYTES:
                self._stream.write(head, self._deadline.remaining())
            else:
                buffer = head + buffer
        if len(buffer) <= _WRITE_BYTES:
            self._stream.write(buffer, self._deadline.remaining())
            return
        view = memoryview(buffer)
        for first in range(0, len(view), _WRITE_BYTES):
            self._stream.write(view[first : first + _WRITE_BYTES], self._deadline.remaining())  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Put TLS on top; the deadline holds for it too."""
        return DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, self._deadline.remaining()), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        """What the stream underneath says."""
        return self._stream.get_extra_info(info)


class DeadlineBackend(httpcore.SyncBackend):
    """Opens deadline streams, and remembers the socket so that another thread can wake a blocked read."""

    def __init__(self, deadline: Deadline, connect_timeout_s: float) -> None:
        self._deadline = deadline
        self._connect_timeout_s = connect_timeout_s
        self.socket: socket.socket | None = None

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Open a connection, within the connect timeout and the deadline."""
        limit = min(self._connect_timeout_s, self._deadline.remaining())
        stream = super().connect_tcp(host, port, limit, local_address, socket_options)  # sets TCP_NODELAY
        self.socket = stream.get_extra_info("socket")
        return DeadlineStream(stream, self._deadline)


class Channel:
    """One connection. The first request opens it; after an error it is closed for good, and another channel must be made.

    Not thread-safe, but for `abort`.
    """

    def __init__(self, settings: ClientSettings) -> None:
        parts = urlsplit(settings.url)
        host = parts.hostname or ""
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        self._base = parts.path.rstrip("/").encode()
        self._scheme, self._host, self._port = parts.scheme.encode(), host.encode("idna"), port
        self._headers = [
            (b"host", parts.netloc.rpartition("@")[2].encode("ascii", "ignore")),
            (b"user-agent", _USER_AGENT),
            (b"x-draft-client", settings.route_key.encode()),
        ]
        if settings.api_key is not None:
            self._headers.append((b"authorization", b"Bearer " + settings.api_key.encode()))
        self._max_reply_bytes = settings.max_reply_bytes
        self._deadline = Deadline()
        self._backend = DeadlineBackend(self._deadline, settings.connect_timeout_s)
        self._connection = httpcore.HTTPConnection(
            httpcore.Origin(self._scheme, self._host, port), network_backend=self._backend
        )
        self._is_used = False

    @property
    def is_ready(self) -> bool:
        """Whether a request can go out at once: the connection is open, idle, and not closed by the other side."""
        return self._is_used and self._connection.is_idle() and not self._connection.has_expired()

    def request(
        self, method: str, path: str, *, body: bytes, media_type: str, deadline_at: float, max_reply_bytes: int | None = None
    ) -> HttpReply:
        """Send a request and return the whole reply, by `deadline_at` of time.monotonic().

        Args:
            max_reply_bytes: where it is known better than the settings know it.

        Raises:
            LateError: the deadline passed.
            TransportError: the connection failed, or what came back is not HTTP.
        """
        self._deadline.at = deadline_at
        self._deadline.is_head_held = bool(body)
        request = httpcore.Request(
            method,
            httpcore.URL(scheme=self._scheme, host=self._host, port=self._port, target=self._base + path.encode()),
            headers=[
                *self._headers,
                (b"content-type", media_type.encode()),
                (b"content-length", str(len(body)).encode()),
            ],
            content=body,
        )
        try:
            response = self._connection.handle_request(request)
            try:
                content = self._read(response, max_reply_bytes or self._max_reply_bytes)
            finally:
                response.close()
        except httpcore.TimeoutException as error:
            self.close()
            raise LateError("the deadline passed") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ConnectionNotAvailable, OSError, ValueError) as error:
            self.close()
            raise TransportError(f"{type(error).__name__}: {error}") from error
        self._is_used = True
        return HttpReply(response.status, _media_type(response.headers), content)

    def _read(self, response: httpcore.Response, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        for chunk in response.iter_stream():
            size += len(chunk)
            if size > max_bytes:
                raise ValueError(f"the reply has more than {max_bytes} bytes")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        """Close the connection."""
        self._is_used = False
        self._connection.close()

    def abort(self) -> None:
        """Make a request that another thread waits in fail at once."""
        self._deadline.at = 0.0
        current = self._backend.socket
        if current is not None:
            with contextlib.suppress(OSError):
                current.shutdown(socket.SHUT_RDWR)


def _media_type(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.partition(b";")[0].strip().lower().decode("latin-1")
    return ""
