"""Running an application: the socket, the log, uvicorn, and an orderly end.

bind      the address is taken before anything is served, so that a wrong one is a line for the operator and no traceback
serve     one process, one event loop
SIGTERM   (or SIGINT) drain: new work is answered 503 while load balancers take note, then what is inside is finished.
          A second signal ends at once.
SIGHUP    load the drafter again, where the application offers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import logging.config
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.clients import Connection
from service.edge import CONNECTION_EXTENSION, AsgiApp, request_id_var
from service.errors import StartupError

logger = logging.getLogger(__name__)

BACKLOG = 1_024
KEEP_ALIVE_SECONDS = 600
# A peer whose machine has vanished sends no FIN: probe after 15 s of silence, give up after three probes 5 s apart.
TCP_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
SHUTDOWN_SECONDS = 30


class ServerSettings(Protocol):
    """What `serve` reads of the settings of a command."""

    @property
    def host(self) -> str:
        """Address to listen on."""

    @property
    def port(self) -> int:
        """Port; 0 takes a free one."""

    @property
    def uds(self) -> Path | None:
        """Unix socket to listen on instead."""

    @property
    def ssl_certfile(self) -> Path | None:
        """TLS certificate chain."""

    @property
    def ssl_keyfile(self) -> Path | None:
        """TLS private key."""

    @property
    def drain_seconds(self) -> float:
        """How long to answer 503 before the end."""


def serve(
    app: AsgiApp,
    settings: ServerSettings,
    on_ready: Callable[[str], None] = lambda url: None,  # noqa: ARG005
    *,
    on_drain: Callable[[], None] = lambda: None,
    on_reload: Callable[[], None] | None = None,
    on_server: Callable[[DrainingServer], None] = lambda server: None,  # noqa: ARG005
) -> None:
    """Serve `app` until a signal, or `DrainingServer.begin_shutdown`, ends it.

    Args:
        app: an ASGI application.
        settings: where to listen.
        on_ready: told the URL once requests are answered there; a unix socket is told as unix:/path.
        on_drain: called when the end begins, to refuse new work (`DraftEngine.drain`).
        on_reload: called in the event loop on SIGHUP; without it, SIGHUP is left as it is.
        on_server: given the server before it starts, for callers in another thread.

    Raises:
        StartupError: the address or the certificate cannot be used.
    """
    listener = bind(settings)
    try:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=ServerProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        config.load()
    except (OSError, ValueError) as error:
        listener.close()
        raise StartupError(f"--ssl-certfile {settings.ssl_certfile}: {error}") from error
    server = DrainingServer(config, url_of(listener, settings), settings.drain_seconds, on_ready, on_drain, on_reload)
    on_server(server)
    try:
        server.run(sockets=[listener])
    except SystemExit as error:  # uvicorn has logged why the application's lifespan failed
        raise StartupError("the server could not start; the log says why") from error
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with a drain before the end and a clean exit code after it."""

    def __init__(
        self,
        config: uvicorn.Config,
        url: str,
        drain_seconds: float,
        on_ready: Callable[[str], None],
        on_drain: Callable[[], None],
        on_reload: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self.url = url
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._on_drain = on_drain
        self._on_reload = on_reload
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then report the address."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        logger.info("listening on %s", self.url)
        self._on_ready(self.url)

    def begin_shutdown(self) -> None:
        """Drain and end; from any thread. A second call ends at once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)
        else:
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """End on a signal."""
        self.begin_shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving. Unlike uvicorn's own, it does not raise them again: an asked-for end is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        if self._on_reload is not None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._handle_reload)
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _handle_reload(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self._loop is not None and self._on_reload is not None:
            self._loop.call_soon_threadsafe(self._on_reload)

    def _end(self) -> None:
        if self._is_ending:
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        logger.info("draining for %.1f s", self._drain_seconds)
        self._on_drain()
        asyncio.get_running_loop().call_later(self._drain_seconds, self._stop_serving)

    def _stop_serving(self) -> None:
        self.should_exit = True


class ServerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with two things more.

    It lets the application know one connection from another. And it sends the head of a response together with the body:
    uvicorn writes them apart, which costs a system call here, a packet, and a second wake-up over there.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection."""
        self._connection = Connection()
        self._joined = _JoinedTransport(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the listeners."""
        super().connection_lost(exc)
        self._connection.lost()

    def on_message_begin(self) -> None:
        """Put the connection into the request's scope."""
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION_EXTENSION: self._connection}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """Have the response of this request written in one piece; its task has been made and does not run yet."""
        super().on_headers_complete()
        self.cycle.transport = self._joined  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """Send a head that no body followed."""
        self._joined.flush()
        super().on_response_complete()


class _JoinedTransport:
    """What a uvicorn response needs of a transport; it keeps the head of the response back until the body comes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


# The address ---------------------------------------------------------------------------------------------------------


def bind(settings: ServerSettings) -> socket.socket:
    """Listen where the settings say.

    Raises:
        StartupError: the address is taken, not ours or not allowed.
    """
    return bind_unix(settings.uds) if settings.uds is not None else bind_tcp(settings.host, settings.port)


def bind_tcp(host: str, port: int) -> socket.socket:
    """Listen on host and port; 0 takes a free port. Accepted connections inherit TCP_NODELAY and keep-alive probes.

    Raises:
        StartupError: see `bind`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise StartupError(f"--host {host}: {error.strerror or error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP_KEEPALIVE:
            if hasattr(socket, name):  # not every system has every option
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "the port is in use; choose another with --port, or --port 0 for a free one"
        raise StartupError(f"cannot listen on {host}:{port}: {why}") from error
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Listen on a unix socket, replacing one that nobody listens on any more.

    Raises:
        StartupError: see `bind`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = "another server listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise StartupError(f"--uds {path}: {why}") from error
    except StartupError:
        listener.close()
        raise
    return listener


def _is_stale(path: Path) -> bool:
    """Whether a socket file is left of a server that is gone."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"--uds {path}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
    return False


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Where a client reaches the listener."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# The log -------------------------------------------------------------------------------------------------------------


class RequestIdFilter(logging.Filter):
    """Gives each record the id of the request it was written for."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        record.request_id = request_id_var.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write time, level, logger, request id, message and, where there is one, the traceback."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def logging_config(level: str, log_format: str) -> dict[str, Any]:
    """The log of a command, to stderr: text for people or JSON for machines. Nothing logs tokens, rows or text."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"request_id": {"()": RequestIdFilter}},
        "formatters": {
            "text": {"format": "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"},
            "json": {"()": JsonFormatter},
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": log_format,
                "filters": ["request_id"],
                "stream": "ext://sys.stderr",
            }
        },
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        # uvicorn tells of its own starts and stops, which `serve` tells better, and httpx of every request.
        "loggers": {"uvicorn": {"level": "WARNING"}, "httpx": {"level": "WARNING"}, "httpcore": {"level": "WARNING"}},
    }


def configure_logging(level: str, log_format: str) -> None:
    """Set up the log of this process."""
    logging.config.dictConfig(logging_config(level, log_format))
