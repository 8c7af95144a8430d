"""The clients that have shaken hands, their leases, and the check that a client's target is the drafter's own.

Everything here belongs to the event loop.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from draft_engine_client.wire import ClientHello, TargetFingerprint
from service.errors import CapacityError, FingerprintError, StateError


@dataclass
class Client:
    """One target server. Its id is the namespace of its sessions."""

    client_id: str
    name: str
    target: TargetFingerprint
    last_seen: float


class ClientTable:
    """Clients by id, least recently seen first.

    Args:
        server_id: changes with every start of the process, so that a client notices a restart.
        max_clients: handshakes beyond it are refused as overloaded.
    """

    def __init__(self, *, server_id: str, lease_seconds: float, max_clients: int) -> None:
        self.server_id = server_id
        self._lease_seconds = lease_seconds
        self._max_clients = max_clients
        self._clients: OrderedDict[str, Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def register(self, hello: ClientHello, now: float) -> Client:
        """Give a client its id. The caller has checked the fingerprint.

        Raises:
            CapacityError: max_clients are registered.
        """
        if len(self._clients) >= self._max_clients:
            raise CapacityError(
                "the server knows as many clients as it may",
                retry_after_s=max(1.0, self._lease_seconds),
                numbers={"num_clients": len(self._clients), "max_clients": self._max_clients},
            )
        client = Client(f"client-{secrets.token_hex(12)}", hello.client_name, hello.target, now)
        self._clients[client.client_id] = client
        return client

    def get(self, client_id: str) -> Client | None:
        """The client, or None."""
        return self._clients.get(client_id)

    def renew(self, client_id: str, server_id: str | None, now: float) -> Client:
        """Renew a client's lease.

        Raises:
            StateError: epoch_mismatch; the client speaks of another process, or its lease has ended.
        """
        client = self._clients.get(client_id)
        if client is None or server_id not in (None, self.server_id):
            raise StateError(
                "epoch_mismatch",
                "this server does not know the client: it was restarted, or the client's lease has ended; shake hands again",
                param="client_id" if client is None else "server_id",
                numbers={"server_id": self.server_id},
            )
        client.last_seen = now
        self._clients.move_to_end(client_id)
        return client

    def expire(self, now: float) -> list[Client]:
        """Forget the clients whose lease has ended, and return them."""
        expired = []
        for client in list(self._clients.values()):
            if now - client.last_seen <= self._lease_seconds:
                break
            expired.append(self._clients.pop(client.client_id))
        return expired


def check_fingerprint(target: TargetFingerprint, expected: TargetFingerprint) -> None:
    """Compare a client's target with the one the drafter was trained for.

    The layer ids count with their order. A client that leaves them out asks to be told; a hash or name is compared where
    both sides have one.

    Raises:
        FingerprintError: names the first field that differs, with both values.
    """
    for field in ("vocab_size", "hidden_size", "num_layers"):
        _require_equal(field, getattr(target, field), getattr(expected, field))
    for field in ("target_layer_ids", "tokenizer_hash"):
        theirs, ours = getattr(target, field), getattr(expected, field)
        if theirs is not None and ours is not None:
            _require_equal(field, theirs, ours)


def _require_equal(field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise FingerprintError(
            "fingerprint_mismatch",
            f"this drafter was trained for a target with {field} {ours}; the client's target has {theirs}",
            param=f"target.{field}",
            numbers={"expected": str(ours), "got": str(theirs)},
        )
