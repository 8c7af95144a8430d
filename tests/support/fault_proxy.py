"""A TCP proxy in front of a real server that loses, delays, repeats, reorders, cuts and changes whole HTTP messages."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

FAULTS = ("drop_request", "drop_reply", "delay", "duplicate", "reorder", "truncate", "corrupt_request", "corrupt_reply")


@dataclass
class FaultProxy:
    """Passes requests of any number of connections to `port` of this host, and harms a share of those to `path`.

    Args:
        seed: of the schedule of faults.
        share: of the requests that a fault happens to; may be changed at any time. 0 passes everything as it is.
        delay_s: how long a delayed reply is held.
    """

    port: int
    seed: int
    share: float = 0.0
    delay_s: float = 0.4
    path: bytes = b"/v1/propose"
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._held: bytes | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket) -> None:
        with self._opened(near), contextlib.suppress(OSError), self._opened(self._connect()) as far:
            requests, replies = near.makefile("rb"), far.makefile("rb")
            while request := read_message(requests):
                if not self._pass_on(request, near, far, replies):
                    return

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    @contextlib.contextmanager
    def _opened(self, connection: socket.socket) -> Iterator[socket.socket]:
        with self._lock:
            self._open.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _choose(self, request: bytes) -> str:
        with self._lock:
            is_hit = request.split(b" ", 2)[1].startswith(self.path) and self._random.random() < self.share
            fault = self._random.choice(FAULTS) if is_hit else "none"
            self.counts[fault] += 1
            return fault

    def _pass_on(self, request: bytes, near: socket.socket, far: socket.socket, replies: BinaryIO) -> bool:
        """Answer one request; returns whether the connection goes on."""
        fault = self._choose(request)
        if fault == "drop_request":
            return False
        if fault == "reorder":
            with self._lock:
                self._held = request
            return False
        far.sendall(self._changed(request) if fault == "corrupt_request" else request)
        reply = read_message(replies)
        if fault == "duplicate":
            self._send_apart(request)
        self._send_held()
        if not reply or fault == "drop_reply":
            return False
        if fault == "delay":
            time.sleep(self.delay_s)
        elif fault == "truncate":
            near.sendall(reply[: len(reply) * 2 // 3])
            return False
        elif fault == "corrupt_reply":
            reply = self._changed(reply)
        near.sendall(reply)
        return True

    def _send_held(self) -> None:
        """A request that was held back arrives now, after younger ones."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            self._send_apart(held)

    def _send_apart(self, request: bytes) -> None:
        with self._connect() as other:
            other.sendall(request)
            read_message(other.makefile("rb"))

    def _changed(self, message: bytes) -> bytes:
        """The message with one to four other bytes in its body."""
        start = message.index(b"\r\n\r\n") + 4
        changed = bytearray(message)
        with self._lock:
            for _ in range(self._random.randint(1, 4) if start < len(message) else 0):
                changed[self._random.randrange(start, len(message))] ^= self._random.randint(1, 255)
        return bytes(changed)


def read_message(stream: BinaryIO) -> bytes:
    """One HTTP message whose length its head tells; nothing where the connection ended before it was whole."""
    head, length = b"", 0
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return b""
        head += line
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    body = stream.read(length)
    return head + body if len(body) == length else b""
