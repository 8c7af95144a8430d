"""The background thread of a client: it keeps the line up, so that a step never waits for it.

    no link       connect; show the server who we are, or shake hands anew; publish the link
    link          feed sessions that are too far behind for a step, on a connection of its own
                  tell the server of finished sessions when no step does, and renew the lease
                  notice that the server closed an idle connection

A new connection is first used for a call without sessions: the server must see the client again soon after it lost one.
"""

from __future__ import annotations

import logging
import threading
import time

from pydantic import ValidationError

from draft_engine_client.breaker import Backoff
from draft_engine_client.calls import ProposeCall, keep_alive
from draft_engine_client.errors import ClientError, InvalidReplyError, RefusedError
from draft_engine_client.projection import fetch_projection
from draft_engine_client.replies import require_ok
from draft_engine_client.sessions import SessionMirror
from draft_engine_client.state import FEATURE_DTYPES, ClientState, Link
from draft_engine_client.transport import Channel
from draft_engine_client.wire import PROTOCOL_VERSION, ClientHello, ClientWelcome

logger = logging.getLogger(__name__)

# A session with no more rows than this to send is left to the steps again.
FEW_ROWS = 16
_LOOK_AROUND_S = 0.25
_FIRST_PAUSE_S = 0.1
_JSON = "application/json"


class Upkeep:
    """See the module docstring."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._settings = state.settings
        self._thread = threading.Thread(target=self._run, name="draft-engine-client", daemon=True)
        self._connect_backoff = Backoff(min(_FIRST_PAUSE_S, self._settings.breaker_min_s), self._settings.breaker_max_s)
        self._side_backoff = Backoff(min(_FIRST_PAUSE_S, self._settings.breaker_min_s), self._settings.breaker_max_s)
        self._next_connect = 0.0
        self._next_side_call = 0.0
        self._busy_with: Channel | None = None
        self._side: Channel | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and what it waits for. The state says that the client is closing."""
        self._state.wake.set()
        channel = self._busy_with
        if channel is not None:
            channel.abort()
        if self._thread.is_alive():
            self._thread.join(self._settings.request_timeout_s + self._settings.connect_timeout_s)

    def _run(self) -> None:
        while not self._state.is_closing:
            try:
                pause = self._look_around(time.monotonic())
            except Exception:
                logger.exception("the upkeep of the draft connection failed")
                pause = self._settings.breaker_max_s
            self._state.wake.wait(pause)
            self._state.wake.clear()
        if self._side is not None:
            self._side.close()

    def _look_around(self, now: float) -> float:
        """Do the most urgent thing; returns how long nothing else needs doing."""
        state = self._state
        with state.lock:
            link = state.link
            if link is not None and not state.is_calling and not link.channel.is_ready:
                state.unlink(link)
                link = None
        if link is None:
            if now >= self._next_connect:
                self._connect()
            return max(0.0, min(_LOOK_AROUND_S, self._next_connect - now))
        if now < self._next_side_call:
            return min(_LOOK_AROUND_S, self._next_side_call - now)
        if self._feed(link, now):
            return 0.0
        with state.lock:
            silent_for = now - state.last_contact
            finished = list(state.finished)
        if silent_for > link.welcome.limits.lease_seconds / 3.0 or (finished and silent_for > _LOOK_AROUND_S):
            self._renew(link, finished)
        return _LOOK_AROUND_S

    # Connecting ------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        state = self._state
        channel: Channel | None = None
        try:
            channel = self._busy_with = Channel(self._settings)
            welcome = self._identify(channel)
        except (ClientError, ValidationError, UnicodeError) as error:
            self._next_connect = time.monotonic() + self._connect_backoff.next_pause()
            if state.refusal != str(error):
                logger.warning("the draft server at %s cannot be used: %s", self._settings.url, error)
            state.refusal = str(error)
            if channel is not None:
                channel.close()
            return
        finally:
            self._busy_with = None
        self._connect_backoff.reset()
        self._next_connect = 0.0
        with state.lock:
            state.refusal = None
            state.last_contact = time.monotonic()
            if state.is_closing:
                channel.close()
                return
            state.welcome = welcome
            state.link = Link(channel, welcome)
            state.stats.reconnects += 1
        state.connected.set()
        logger.info("connected to the draft server at %s", self._settings.url)

    def _identify(self, channel: Channel) -> ClientWelcome:
        """Show the server who we are, and shake hands where it does not know."""
        state = self._state
        with state.lock:
            known, finished = state.welcome, list(state.finished)
        if known is not None:
            try:
                keep_alive(channel, known, finished, self._deadline())
            except RefusedError as error:
                if error.is_passing:
                    raise
            except InvalidReplyError as error:
                logger.info("shaking hands again: %s", error)
            else:
                with state.lock:
                    state.told(finished)
                return known
        return self._shake_hands(channel)

    def _shake_hands(self, channel: Channel) -> ClientWelcome:
        state = self._state
        hello = ClientHello(client_name=self._settings.client_name, target=state.target, schedule=state.schedule)
        # A server from before schedules takes a handshake without one.
        body = hello.model_dump_json(exclude_none=True).encode()
        http = channel.request("POST", "/v1/clients", body=body, media_type=_JSON, deadline_at=self._deadline())
        require_ok(http, _JSON)
        welcome = ClientWelcome.model_validate_json(http.body)
        self._check(welcome)
        projection = state.projection
        if state.is_projecting and (projection is None or projection.fingerprint != welcome.model.fingerprint):
            projection = fetch_projection(channel, welcome.model, self._settings.request_timeout_s)
        with state.lock:
            state.stats.handshakes += 1
            if projection is not None and projection is not state.projection:
                state.learn_projection(projection)
            state.finished.clear()  # they went with the old name
            state.learn_facts(welcome.model)
        return welcome

    def _check(self, welcome: ClientWelcome) -> None:
        """Refuse a drafter that is not for this target, whatever the server made of our fingerprint."""
        target, model = self._state.target, welcome.model
        pairs = [
            ("protocol_version", PROTOCOL_VERSION, welcome.protocol_version),
            ("vocab_size", target.vocab_size, model.vocab_size),
            ("hidden_size", target.hidden_size, model.target_hidden_size),
        ]
        if target.target_layer_ids is not None:
            pairs.append(("target_layer_ids", target.target_layer_ids, model.target_layer_ids))  # type: ignore[arg-type]
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise InvalidReplyError(f"{name} is {ours} here and {theirs} at the draft server")
        if target.dtype not in model.feature_dtypes:
            raise InvalidReplyError(f"the draft server takes no {target.dtype} features")

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.request_timeout_s

    # The side connection ---------------------------------------------------------------------------------------------

    def _side_channel(self) -> Channel:
        if self._side is None or not self._side.is_ready:
            if self._side is not None:
                self._side.close()
            self._side = Channel(self._settings)
        return self._side

    def _renew(self, link: Link, finished: list[str]) -> None:
        state = self._state
        try:
            channel = self._busy_with = self._side_channel()
            keep_alive(channel, link.welcome, finished, self._deadline())
        except ClientError as error:
            self._side_failed(link, error)
        else:
            self._side_backoff.reset()
            with state.lock:
                state.told(finished)
        finally:
            self._busy_with = None

    def _side_failed(self, link: Link, error: ClientError) -> None:
        logger.info("a background call failed: %s", error)
        self._next_side_call = time.monotonic() + self._side_backoff.next_pause()
        if self._side is not None and not isinstance(error, RefusedError):
            self._side.close()
            self._side = None
        if isinstance(error, RefusedError) and not error.is_passing:
            with self._state.lock:
                if not self._state.is_calling:
                    self._state.unlink(link, forget_welcome=True)

    def _feed(self, link: Link, now: float) -> bool:
        """Send one chunk of the session that has waited longest; returns False when there is none to feed."""
        state, limits = self._state, link.welcome.limits
        dtype = FEATURE_DTYPES[state.target.dtype]
        row_bytes = state.row_width(link.welcome.model) * dtype.itemsize
        max_bytes = min(self._settings.max_upload_bytes, limits.max_body_bytes // 2)
        max_rows = min(limits.max_rows_per_call, max(1, max_bytes // row_bytes))
        with state.lock:
            mirror = self._hungriest(link, now)
            if mirror is None:
                return False
            call = ProposeCall(
                link.welcome, dtype, is_bfloat16=state.target.dtype == "bfloat16", is_projected=state.is_projecting
            )
            call.add(mirror, None, max_rows)
            mirror.is_uploading = True
            finished = [session_id for session_id in state.finished if session_id != mirror.session_id]
        try:
            channel = self._busy_with = self._side_channel()
            reply = call.send(channel, self._deadline(), finished)
        except ClientError as error:
            self._side_failed(link, error)
            return True
        else:
            self._side_backoff.reset()
            with state.lock:
                state.told(finished)
                reason = mirror.accept(call.attempts[0], reply.sessions[0])
                if reason is not None:
                    mirror.pause(now, reply.sessions[0], self._settings.breaker_min_s, self._settings.breaker_max_s)
                state.stats.rows_uploaded += call.num_rows
                mirror.is_behind = mirror.num_pending > FEW_ROWS
            return True
        finally:
            self._busy_with = None
            with state.lock:
                mirror.is_uploading = False

    def _hungriest(self, link: Link, now: float) -> SessionMirror | None:
        state = self._state
        if not state.breaker.allows(now):
            return None
        hungry = []
        for mirror in state.mirrors.values():
            if mirror.is_behind and not mirror.is_refused and now >= mirror.retry_at:
                state.adopt(mirror, link.welcome)
                if mirror.num_pending:
                    hungry.append(mirror)
                else:
                    mirror.is_behind = False
        if not hungry:
            return None
        chosen = min(hungry, key=lambda mirror: mirror.last_fed)
        chosen.last_fed = now
        return chosen
