"""The clients that have shaken hands, their leases and connections, and the check that a client's target is the drafter's own.

A client leaves in one of two ways: it is silent for longer than its lease, or it has lost its last connection and does not
come back within a short grace. The second applies to clients that keep connections, which shows in a second request on one;
a caller that opens one for each request (curl) lives by its lease alone. A client that has left must shake hands again, and
hears so in the first answer it gets; it never finds its sessions half gone.

Everything here belongs to the event loop.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from draft_engine_client.wire import PROTOCOL_VERSION, ClientHello, ModelFacts, TargetFingerprint
from service.errors import CapacityError, FingerprintError, StateError
from service.schedule import VerifyScheduler


class Connection:
    """One transport connection, as far as the application knows it: it tells its listeners once when it is lost."""

    def __init__(self) -> None:
        self.num_requests: dict[str, int] = {}
        self._listeners: list[Callable[[Connection], None]] = []

    def when_lost(self, listener: Callable[[Connection], None]) -> None:
        """Have `listener` called when the connection is lost."""
        self._listeners.append(listener)

    def lost(self) -> None:
        """Tell the listeners."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(self)


@dataclass
class Client:
    """One target server. Its id is the namespace of its sessions."""

    client_id: str
    name: str
    target: TargetFingerprint
    last_seen: float
    connections: set[Connection] = field(default_factory=set)
    keeps_connections: bool = False
    scheduler: VerifyScheduler | None = None


class Departure(NamedTuple):
    """A client that has left, and why."""

    client: Client
    reason: Literal["lease", "disconnect"]


class ClientTable:
    """Clients by id, least recently seen first.

    Args:
        server_id: changes with every start of the process, so that a client notices a restart.
        lease_seconds: a client silent for so long has left.
        disconnect_grace_seconds: a client without a connection for so long has left.
        max_clients: handshakes beyond it are refused as overloaded.
    """

    def __init__(
        self,
        *,
        server_id: str,
        lease_seconds: float,
        disconnect_grace_seconds: float = 0.5,
        max_clients: int = 1_024,
    ) -> None:
        self.server_id = server_id
        self._lease_seconds = lease_seconds
        self._disconnect_grace_seconds = disconnect_grace_seconds
        self._max_clients = max_clients
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._lonely: dict[str, float | None] = {}  # without a connection, since when; None: not stamped yet

    def __len__(self) -> int:
        return len(self._clients)

    def register(
        self,
        hello: ClientHello,
        now: float,
        connection: Connection | None = None,
        scheduler: VerifyScheduler | None = None,
    ) -> Client:
        """Give a client its id. The caller has checked the fingerprint; `scheduler` is then the engine worker's.

        Raises:
            CapacityError: max_clients are registered.
        """
        if len(self._clients) >= self._max_clients:
            raise CapacityError(
                "the server knows as many clients as it may",
                retry_after_s=max(1.0, self._lease_seconds),
                numbers={"num_clients": len(self._clients), "max_clients": self._max_clients},
            )
        client = Client(f"client-{secrets.token_hex(12)}", hello.client_name, hello.target, now, scheduler=scheduler)
        self._clients[client.client_id] = client
        self._bind(client, connection)
        return client

    def get(self, client_id: str) -> Client | None:
        """The client, or None."""
        return self._clients.get(client_id)

    def renew(self, client_id: str, server_id: str | None, now: float, connection: Connection | None = None) -> Client:
        """Renew a client's lease.

        Raises:
            StateError: epoch_mismatch; the client speaks of another process, or it had left.
        """
        client = self._clients.get(client_id)
        if client is None or server_id not in (None, self.server_id):
            raise StateError(
                "epoch_mismatch",
                "this server does not know the client: it was restarted, or the client had left; shake hands again",
                param="client_id" if client is None else "server_id",
                numbers={"server_id": self.server_id},
            )
        client.last_seen = now
        self._clients.move_to_end(client_id)
        self._bind(client, connection)
        return client

    def forget_all(self) -> None:
        """Have every client shake hands again; their sessions are gone already."""
        self._clients.clear()
        self._lonely.clear()

    def departed(self, now: float) -> list[Departure]:
        """Forget the clients that have left, and return them."""
        left: list[Departure] = []
        for client in list(self._clients.values()):
            if now - client.last_seen <= self._lease_seconds:
                break
            left.append(self._forget(client.client_id, "lease"))
        for client_id, since in list(self._lonely.items()):
            if since is None:
                self._lonely[client_id] = now
            elif now - since >= self._disconnect_grace_seconds:
                left.append(self._forget(client_id, "disconnect"))
        return left

    def _bind(self, client: Client, connection: Connection | None) -> None:
        self._lonely.pop(client.client_id, None)
        if connection is None or connection in client.connections:
            return
        seen = connection.num_requests.get(client.client_id, 0)
        connection.num_requests[client.client_id] = seen + 1
        if seen or client.keeps_connections:
            client.keeps_connections = True
            client.connections.add(connection)
            connection.when_lost(lambda lost: self._unbind(client, lost))

    def _unbind(self, client: Client, connection: Connection) -> None:
        client.connections.discard(connection)
        if not client.connections and client.client_id in self._clients:
            self._lonely[client.client_id] = None

    def _forget(self, client_id: str, reason: Literal["lease", "disconnect"]) -> Departure:
        self._lonely.pop(client_id, None)
        return Departure(self._clients.pop(client_id), reason)


def check_hello(hello: ClientHello, facts: ModelFacts, *, tokenizer_hash: str | None = None) -> None:
    """Compare a client's protocol and target with those of the drafter.

    The layer ids count with their order. A client that leaves them out asks to be told; the number of layers and the
    tokenizer are compared where both sides know theirs.

    Raises:
        FingerprintError: names the first field that differs, with both values.
    """
    _require("protocol_version", hello.protocol_version, PROTOCOL_VERSION, "this server speaks protocol version")
    ours = {
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.target_hidden_size,
        "num_layers": facts.target_num_layers,
        "target_layer_ids": facts.target_layer_ids,
        "tokenizer_hash": tokenizer_hash,
    }
    for name, expected in ours.items():
        got = getattr(hello.target, name)
        if expected is not None and got is not None:
            _require(f"target.{name}", got, expected, f"this drafter was trained for a target with {name}")
    if hello.target.dtype not in facts.feature_dtypes:
        _require("target.dtype", hello.target.dtype, ", ".join(facts.feature_dtypes), "this drafter takes features of type")


def _require(param: str, got: object, expected: object, claim: str) -> None:
    if got != expected:
        raise FingerprintError(
            "fingerprint_mismatch",
            f"{claim} {_text(expected)}; the client's {param} is {_text(got)}",
            param=param,
            numbers={"expected": _text(expected), "got": _text(got)},
        )


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
