"""One deadline over all reads and writes of a request, without a clock to wait for."""

from __future__ import annotations

import ssl
import time
from typing import Any

import httpcore
import pytest

from draft_engine_client.settings import ClientSettings
from draft_engine_client.transport import Channel, Deadline, DeadlineStream


class RecordingStream(httpcore.NetworkStream):
    """Notes the time it is given for each operation."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []
        self.written = b""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.timeouts.append(timeout)
        return b"x"

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)
        self.written += buffer

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self.timeouts.append(timeout)
        return self

    def get_extra_info(self, info: str) -> Any:
        return info


@pytest.fixture
def inner() -> RecordingStream:
    return RecordingStream()


def make_stream(inner: RecordingStream, seconds: float) -> DeadlineStream:
    deadline = Deadline()
    deadline.at = time.monotonic() + seconds
    return DeadlineStream(inner, deadline)


def test_every_operation_is_given_what_is_left(inner: RecordingStream) -> None:
    stream = make_stream(inner, 100.0)
    stream.read(1, timeout=None)
    stream.write(b"abc", timeout=1e9)
    stream.read(1)
    wrapped = stream.start_tls(ssl.create_default_context())
    wrapped.read(1)
    given = [timeout for timeout in inner.timeouts if timeout is not None]
    assert len(given) == 5
    assert given == sorted(given, reverse=True)
    assert 0 < given[-1] < given[0] <= 100.0


def test_nothing_is_tried_after_the_deadline(inner: RecordingStream) -> None:
    stream = make_stream(inner, -0.001)
    for operation in (lambda: stream.read(1), lambda: stream.write(b"abc"), lambda: stream.write(bytes(1 << 20))):
        with pytest.raises(httpcore.TimeoutException):
            operation()
    assert inner.timeouts == []


def test_a_long_write_goes_in_pieces_and_whole(inner: RecordingStream) -> None:
    body = bytes(range(256)) * 4_096
    make_stream(inner, 100.0).write(body)
    assert inner.written == body
    assert len(inner.timeouts) > 1


@pytest.mark.parametrize(("size", "num_writes"), [(10, 1), (100_000, 2)])
def test_a_head_leaves_together_with_a_short_body(inner: RecordingStream, size: int, num_writes: int) -> None:
    deadline = Deadline()
    deadline.at = time.monotonic() + 100.0
    stream = DeadlineStream(inner, deadline)
    for _ in range(2):
        deadline.is_head_held = True
        stream.write(b"head")
        stream.write(b"b" * size)
    assert inner.written == (b"head" + b"b" * size) * 2
    assert len(inner.timeouts) == 2 * num_writes


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1/base/", "https://draft.example"])
def test_a_channel_is_not_ready_before_its_first_request(url: str) -> None:
    channel = Channel(ClientSettings(url))
    assert not channel.is_ready
    channel.abort()
    channel.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "127.0.0.1:8100"},
        {"url": "ftp://host"},
        {"url": "http://"},
        {"client_name": ""},
        {"route_key": ""},
        {"route_key": "a\nb"},
        {"api_key": ""},
        {"api_key": "ключ"},
        {"api_key": "a\nb"},
        {"step_deadline_ms": 0.0},
        {"step_deadline_ms": -1.0},
        {"step_deadline_ms": float("inf")},
        {"connect_timeout_s": float("nan")},
        {"breaker_failures": 0},
        {"max_history_rows": 0},
        {"breaker_min_s": 9.0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ClientSettings(**({"url": "http://host"} | changes))
