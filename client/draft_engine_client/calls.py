"""One propose call: collect updates and rows, send them in one request, read the answer."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from draft_engine_client import codec
from draft_engine_client.codec import TensorView
from draft_engine_client.errors import InvalidReplyError
from draft_engine_client.replies import CheckedReply, read_reply, require_ok
from draft_engine_client.sessions import Attempt, SessionMirror, SessionStep
from draft_engine_client.transport import Channel
from draft_engine_client.wire import ClientWelcome, ProposeRequest, SessionUpdate

_PATH = "/v1/propose"
_JSON = "application/json"


class ProposeCall:
    """Updates of some sessions, at most one of each.

    `add` needs the client's lock; `send` must not have it. Rows are windows on the mirrors until they are sent: if a session
    is taken back meanwhile, what was sent of it past that point does not count (see `sessions.py`).
    """

    def __init__(self, welcome: ClientWelcome, dtype: np.dtype[np.generic], *, is_bfloat16: bool, is_projected: bool) -> None:
        self.mirrors: list[SessionMirror] = []
        self.attempts: list[Attempt] = []
        self.num_rows = 0
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self._welcome = welcome
        self._dtype = dtype
        self._is_bfloat16 = is_bfloat16
        self._is_projected = is_projected
        self._updates: list[SessionUpdate] = []
        self._token_ids = array("i")
        self._rows: list[NDArray[np.generic]] = []

    def __len__(self) -> int:
        return len(self.mirrors)

    def add(self, mirror: SessionMirror, step: SessionStep | None, max_rows: int) -> None:
        """Add a session's next update: all pending rows and the drafts of `step`; or without one, some rows and no drafts.

        Raises:
            pydantic.ValidationError: the step asks for something the wire cannot say; nothing was added.
        """
        update, attempt = mirror.next_update(max_rows=max_rows, step=step)
        token_ids, rows = mirror.rows_of(attempt)
        self.mirrors.append(mirror)
        self.attempts.append(attempt)
        self.num_rows += len(token_ids)
        self._updates.append(update)
        self._token_ids.extend(token_ids)
        self._rows.extend(rows)

    def send(self, channel: Channel, deadline_at: float, finished: Iterable[str] = ()) -> CheckedReply:
        """Send the call and read the reply, by `deadline_at` of time.monotonic().

        Raises:
            ClientError: there is no usable reply.
        """
        body = self._encode(deadline_at, tuple(finished))
        self.num_bytes_sent = len(body)
        http = channel.request("POST", _PATH, body=body, media_type=codec.MEDIA_TYPE, deadline_at=deadline_at)
        self.num_bytes_received = len(http.body)
        return read_reply(
            http,
            server_id=self._welcome.server_id,
            session_ids=[mirror.session_id for mirror in self.mirrors],
            attempts=self.attempts,
            vocab_size=self._welcome.model.vocab_size,
        )

    def _encode(self, deadline_at: float, finished: tuple[str, ...]) -> bytes:
        request = ProposeRequest(
            client_id=self._welcome.client_id,
            server_id=self._welcome.server_id,
            rows="projected" if self._is_projected else "raw",
            sessions=tuple(self._updates),
            finished=finished,
            deadline_ms=max(0.001, (deadline_at - time.monotonic()) * 1000.0),
        )
        if len(self._rows) == 1:
            features = self._rows[0]
        elif self._rows:
            features = np.concatenate(self._rows)
        else:
            model = self._welcome.model
            features = np.empty((0, model.projected_width if self._is_projected else model.feature_width), self._dtype)
        tensors = {
            "token_ids": TensorView.from_array(np.array(self._token_ids, dtype=np.int32)),
            "features": TensorView.from_array(features, is_bfloat16=self._is_bfloat16),
        }
        return codec.encode(request.model_dump_json(exclude_defaults=True).encode(), tensors)


def keep_alive(channel: Channel, welcome: ClientWelcome, finished: Iterable[str], deadline_at: float) -> None:
    """A call without sessions: it closes `finished`, renews the lease and shows whether the server still knows us.

    Raises:
        ClientError: it does not, or there is no usable reply.
    """
    request = ProposeRequest(client_id=welcome.client_id, server_id=welcome.server_id, finished=tuple(finished))
    body = request.model_dump_json(exclude_defaults=True).encode()
    http = channel.request("POST", _PATH, body=body, media_type=_JSON, deadline_at=deadline_at)
    require_ok(http, _JSON)
    if welcome.server_id.encode() not in http.body:
        raise InvalidReplyError("another server process answered")
