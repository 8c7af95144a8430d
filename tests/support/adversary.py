"""A draft server for tests of clients: it keeps the protocol to the letter, and misbehaves when told to.

It has no model. Its drafts are a hash of the rows it holds, the anchor and the positions, so a lost, stale, foreign, doubled
or misplaced row changes them; `expected_drafts` says what a server that holds exactly some rows answers. Raw sockets and
threads, so that a test decides what is on the wire.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draft_engine_client import codec
from draft_engine_client.codec import TensorView
from draft_engine_client.wire import (
    ClientHello,
    ClientWelcome,
    Limits,
    ModelFacts,
    ProposeRequest,
    SessionUpdate,
    TargetFingerprint,
)

VOCAB_SIZE = 1_000
WIDTH = 8
BLOCK_SIZE = 4
TARGET = TargetFingerprint(vocab_size=VOCAB_SIZE, hidden_size=4, num_layers=6, target_layer_ids=(1, 3), dtype="float16")
FACTS = ModelFacts(
    model_id="adversary",
    fingerprint="0",
    source_format="none",
    draft_block_size=BLOCK_SIZE,
    max_draft_tokens=BLOCK_SIZE,
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=VOCAB_SIZE,
    target_hidden_size=4,
    target_num_layers=6,
    target_layer_ids=(1, 3),
    feature_width=WIDTH,
    projected_width=4,
    feature_dtypes=("float16", "bfloat16", "float32"),
    has_confidence=True,
    device="cpu",
    dtype="float32",
    attention_backends=("none",),
    decode_paths=("fused",),
)
LIMITS = Limits(
    max_sessions=16,
    max_sessions_per_call=8,
    max_rows_per_call=64,
    max_body_bytes=1 << 20,
    max_context=4_096,
    lease_seconds=30.0,
)


def row_digest(position: int, token_id: int, features: NDArray[Any]) -> bytes:
    """What is kept of a row."""
    raw = np.ascontiguousarray(features).tobytes()
    return hashlib.blake2b(raw + f"{position} {token_id}".encode(), digest_size=8).digest()


def expected_drafts(rows: Iterable[bytes], position: int, anchor_token_id: int, count: int) -> tuple[int, ...]:
    """The drafts of a server that holds exactly these rows, oldest first, with the anchor at `position`."""
    state = hashlib.blake2b(b"".join(rows) + f"{position} {anchor_token_id}".encode(), digest_size=32).digest()
    drafts = []
    for _ in range(count):
        state = hashlib.blake2b(state, digest_size=32).digest()
        drafts.append(int.from_bytes(state[:4], "little") % VOCAB_SIZE)
    return tuple(drafts)


@dataclass(frozen=True)
class Fault:
    """How one propose call goes wrong.

    Args:
        delay_s: waited before the answer.
        is_applied: whether the updates take effect all the same.
        refuse: status and code of an error for the whole call.
        refuse_sessions: code of an error for each session, and fields of it.
        mutate: changes the reply document.
        tensors: changes the reply's tensors.
        manner: `hang_up` closes instead of answering, `truncate` halfway through the body, `garbage` is not HTTP, `noise` is
            HTTP with a body of noise, `trickle` sends a byte now and then, `json` answers in the wrong media type, `hold` says
            nothing for as long as the caller waits.
    """

    delay_s: float = 0.0
    is_applied: bool = True
    refuse: tuple[int, str] | None = None
    refuse_sessions: tuple[str, dict[str, Any]] | None = None
    mutate: Callable[[dict[str, Any]], None] | None = None
    tensors: Callable[[dict[str, TensorView]], dict[str, TensorView]] | None = None
    manner: Literal["reply", "hang_up", "truncate", "garbage", "noise", "trickle", "json", "hold"] = "reply"


@dataclass
class HeldSession:
    """Rows [start, start + len(rows)) of a session."""

    incarnation: int
    start: int
    seq: int = -1
    rows: list[bytes] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


@dataclass
class Seen:
    """One propose call as it arrived."""

    request: ProposeRequest
    num_rows: int
    connection: int
    media_type: str


class Adversary:
    """See the module docstring. A context manager; `url` is where it listens, also after `stop` and `start`."""

    def __init__(self, limits: Limits = LIMITS, facts: ModelFacts = FACTS) -> None:
        self.limits = limits
        self.facts = facts
        self.seen: list[Seen] = []
        self.handshakes: list[ClientHello] = []
        self.headers: list[dict[str, str]] = []
        self.refuse_handshakes: tuple[int, str] | None = None
        self.sessions: dict[tuple[str, str], HeldSession] = {}
        self.num_connections = 0
        self._faults: deque[Fault] = deque()
        self._always: Fault | None = None
        self._clients: set[str] = set()
        self._closed: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._epoch = 0
        self._port = 0
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    # Life ------------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def server_id(self) -> str:
        return f"server-{self._epoch}"

    def __enter__(self) -> Adversary:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(5.0)

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port), reuse_port=False)
        self._port = self._listener.getsockname()[1]
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Stop listening and break every connection."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.break_connections()

    def break_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Come back as another process: another server_id, nothing known, no connection."""
        self.stop()
        with self._lock:
            self._epoch += 1
            self._clients.clear()
            self.sessions.clear()
            self._closed.clear()
        self.start()

    # Orders ----------------------------------------------------------------------------------------------------------

    def fail_next(self, fault: Fault, count: int = 1) -> None:
        """Have the next calls with sessions go wrong."""
        self._faults.extend([fault] * count)

    def fail_always(self, fault: Fault | None) -> None:
        """Have every call with sessions go wrong from now on, or none."""
        self._always = fault

    def admit(self, client_id: str) -> None:
        """Know a client without a handshake."""
        self._clients.add(client_id)

    def forget_sessions(self) -> None:
        """Lose every session, as an eviction does."""
        with self._lock:
            self.sessions.clear()

    def forget_clients(self) -> None:
        """Lose every client, as the end of a lease does."""
        with self._lock:
            self._clients.clear()
            self.sessions.clear()

    # Connections -----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(connection)
                self.num_connections += 1
                number = self.num_connections
            self._spawn(self._serve, connection, number)

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError), connection:
            pending = b""
            while True:
                while b"\r\n\r\n" not in pending:
                    received = connection.recv(65_536)
                    if not received:
                        break
                    pending += received
                else:
                    head, _, pending = pending.partition(b"\r\n\r\n")
                    first, *lines = head.decode("latin-1").split("\r\n")
                    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                    size = int(headers.get("content-length", "0"))
                    body = bytearray(pending)
                    while len(body) < size:
                        received = connection.recv(1 << 20)
                        if not received:
                            return
                        body += received
                    pending = bytes(body[size:])
                    self.headers.append(headers)
                    if not self._answer(connection, number, first.split(" ")[1], headers, bytes(body[:size])):
                        return
                    continue
                return
        with self._lock:
            self._open.discard(connection)

    def _answer(self, connection: socket.socket, number: int, path: str, headers: dict[str, str], body: bytes) -> bool:
        """Answer one request; returns whether the connection stays."""
        if path == "/v1/clients":
            status, document = self._shake_hands(ClientHello.model_validate_json(body))
            _send(connection, status, json.dumps(document).encode(), "application/json")
            return True
        if path != "/v1/propose":
            _send(connection, 404, _error_body("not_found"), "application/json")
            return True
        media_type = headers["content-type"]
        if media_type == "application/json":
            request, tensors = ProposeRequest.model_validate_json(body), {}
        else:
            container = codec.decode(body)
            request, tensors = ProposeRequest.model_validate_json(container.message), dict(container.tensors)
        token_ids = tensors["token_ids"].to_array() if "token_ids" in tensors else np.zeros(0, np.int32)
        self.seen.append(Seen(request, len(token_ids), number, media_type))
        fault = Fault()
        if request.sessions:
            fault = self._faults.popleft() if self._faults else self._always or fault
        if fault.delay_s and not fault.is_applied:
            time.sleep(fault.delay_s)
        if fault.manner == "hold" and not fault.is_applied:
            return bool(connection.recv(1))
        if fault.refuse is not None:
            _send(connection, fault.refuse[0], _error_body(fault.refuse[1]), "application/json")
            return True
        status, document = 200, dict[str, Any]()
        reply_tensors: dict[str, TensorView] = {}
        if fault.is_applied:
            features = tensors["features"].to_array() if "features" in tensors else np.zeros((0, WIDTH), np.float16)
            status, document, reply_tensors = self.propose(request, token_ids, features, fault)
        if fault.delay_s and fault.is_applied:
            time.sleep(fault.delay_s)
        if status != 200:
            _send(connection, status, json.dumps(document).encode(), "application/json")
            return True
        return self._send_reply(connection, media_type, document, reply_tensors, fault)

    def _send_reply(
        self, connection: socket.socket, media_type: str, document: dict[str, Any], tensors: dict[str, TensorView], fault: Fault
    ) -> bool:
        if fault.mutate is not None:
            fault.mutate(document)
        if fault.tensors is not None:
            tensors = fault.tensors(tensors)
        text = json.dumps(document).encode()
        if media_type == "application/json" or fault.manner == "json":
            _send(connection, 200, text, "application/json")
            return True
        body = codec.encode(text, tensors)
        if fault.manner == "hold":
            return bool(connection.recv(1))
        if fault.manner == "hang_up":
            return False
        if fault.manner == "garbage":
            connection.sendall(b"\x00\xff" * 200)
            return False
        if fault.manner == "noise":
            body = bytes(np.random.default_rng(0).integers(0, 256, 300, dtype=np.uint8))
        message = _message(200, body, codec.MEDIA_TYPE)
        if fault.manner == "truncate":
            connection.sendall(message[: -len(body) // 2])
            return False
        if fault.manner == "trickle":
            for first in range(len(message)):
                connection.sendall(message[first : first + 1])
                time.sleep(0.002)
            return True
        connection.sendall(message)
        return True

    # The protocol ----------------------------------------------------------------------------------------------------

    def _shake_hands(self, hello: ClientHello) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.handshakes.append(hello)
            if self.refuse_handshakes is not None:
                status, code = self.refuse_handshakes
                return status, _error(code)
            client_id = f"client-{self._epoch}-{len(self.handshakes)}"
            self._clients.add(client_id)
        welcome = ClientWelcome(
            protocol_version=1,
            client_id=client_id,
            server_id=self.server_id,
            server_version="0",
            model=self.facts,
            limits=self.limits,
        )
        return 200, welcome.model_dump(mode="json")

    def propose(
        self, request: ProposeRequest, token_ids: NDArray[Any], features: NDArray[Any], fault: Fault
    ) -> tuple[int, dict[str, Any], dict[str, TensorView]]:
        """Apply a propose call; returns status, reply document and tensors. Needs no socket."""
        with self._lock:
            if request.client_id not in self._clients or request.server_id not in (None, self.server_id):
                return 409, _error("epoch_mismatch"), {}
            if len(request.sessions) > self.limits.max_sessions_per_call:
                return 400, _error("too_many_sessions"), {}
            if len(token_ids) > self.limits.max_rows_per_call:
                return 400, _error("too_many_rows"), {}
            for session_id in request.finished:
                held = self.sessions.pop((request.client_id, session_id), None)
                if held is not None:
                    self._closed[request.client_id, session_id] = held.incarnation
            replies = []
            ids: list[list[int]] = []
            first = 0
            width = max((u.draft_probs_topk for u in request.sessions if u.draft_probs == "topk"), default=0)
            for update in request.sessions:
                last = first + update.num_rows
                reply = self._update(request.client_id, update, token_ids[first:last], features[first:last], fault)
                ids += [[token_id] for token_id in reply["draft_token_ids"]]
                replies.append(reply)
                first = last
            if first != len(token_ids):
                return 400, _error("wrong_shape"), {}
            tensors = {}
            if width:
                probs_ids, probs = np.zeros((len(ids), width), np.int32), np.zeros((len(ids), width), np.float32)
                for row, (token_id,) in enumerate(ids):
                    probs_ids[row, 0], probs[row, 0] = token_id, 1.0
                tensors = {
                    "draft_probs_ids": TensorView.from_array(probs_ids),
                    "draft_probs": TensorView.from_array(probs),
                }
            timings = dict.fromkeys(("queue_ms", "context_ms", "forward_ms", "head_ms"), 0.0) | {"total_ms": 1.0}
            return 200, {"server_id": self.server_id, "sessions": replies, "timings": timings}, tensors

    def _update(
        self, client_id: str, update: SessionUpdate, token_ids: NDArray[Any], features: NDArray[Any], fault: Fault
    ) -> dict[str, Any]:
        key = (client_id, update.session_id)
        held = self.sessions.get(key)
        error = self._refusal(key, held, update)
        if error is None and fault.refuse_sessions is not None:
            code, fields = fault.refuse_sessions
            error = _error_object(code) | fields
        drafts: tuple[int, ...] = ()
        if error is None:
            if held is None or update.incarnation > held.incarnation:
                held = self.sessions[key] = HeldSession(update.incarnation, update.start)
            if update.start < held.start:
                held.start, held.rows = update.start, []
            del held.rows[update.start - held.start :]
            for offset, (token_id, row) in enumerate(zip(token_ids, features, strict=True)):
                held.rows.append(row_digest(update.start + offset, int(token_id), row))
            held.seq = update.seq
            drafts = expected_drafts(held.rows, held.end, update.anchor_token_id, update.num_draft_tokens)
        end = held.end if held is not None else 0
        rows_held = len(held.rows) if held is not None else 0
        return {
            "session_id": update.session_id,
            "incarnation": update.incarnation,
            "seq": update.seq,
            "committed_end": end,
            "rows_held": rows_held,
            "coverage": rows_held / end if end else 1.0,
            "draft_token_ids": list(drafts),
            "confidence": [0.9] * len(drafts),
            "survival": [0.9 ** (slot + 1) for slot in range(len(drafts))],
            "error": error,
        }

    def _refusal(self, key: tuple[str, str], held: HeldSession | None, update: SessionUpdate) -> dict[str, Any] | None:
        known = held.incarnation if held is not None else self._closed.get(key, -1) + 1
        if update.incarnation < known:
            return _error_object("stale_incarnation")
        if held is not None and update.incarnation == held.incarnation:
            if update.seq <= held.seq:  # stricter than a real server, which answers a repeat: this client never sends one
                return _error_object("stale_sequence")
            if update.start > held.end:
                return _error_object("context_gap") | {"committed_end": held.end}
        if update.start + update.num_rows > self.limits.max_context:
            return _error_object("context_limit")
        return None


def _error_object(code: str) -> dict[str, Any]:
    return {"message": f"told to say {code}", "type": "test", "code": code, "param": None}


def _error(code: str) -> dict[str, Any]:
    return {"error": _error_object(code)}


def _error_body(code: str) -> bytes:
    return json.dumps(_error(code)).encode()


def _message(status: int, body: bytes, media_type: str) -> bytes:
    return f"HTTP/1.1 {status} Told\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _send(connection: socket.socket, status: int, body: bytes, media_type: str) -> None:
    connection.sendall(_message(status, body, media_type))


def make_features(token_ids: Sequence[int], start: int, *, width: int = WIDTH) -> NDArray[np.float16]:
    """Rows that tell their token and position."""
    positions = np.arange(start, start + len(token_ids), dtype=np.float32)[:, None]
    columns = np.arange(width, dtype=np.float32)[None]
    return (positions / 64.0 + np.asarray(token_ids, np.float32).reshape(-1, 1) / 512.0 + columns).astype(np.float16)
