"""A server of this project as a child process: started, waited for, watched and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from service.errors import StartupError

_LISTENING = re.compile(rb"listening on (http://\S+)")
_POLL_SECONDS = 0.05


class ServerProcess:
    """One `draft-engine` command that serves HTTP.

    Args:
        arguments: of the command line, such as ("serve", "--port", "0")
        log: file that receives what the process writes
        environment: variables to set beside the inherited ones
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.arguments, self.log = tuple(arguments), log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "service.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait_ready(self, timeout_s: float, health_path: str = "/health") -> str:
        """Wait until the server answers; returns its URL.

        Raises:
            StartupError: it ended, or did not answer in time; the message has the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise StartupError(
                    f"`draft-engine {self.arguments[0]}` ended with {self._process.returncode}: {self._log_tail()}"
                )
            match = _LISTENING.search(self.log.read_bytes())
            if match is not None:
                self.url = match.group(1).decode()
                if self._answers(health_path):
                    return self.url
            time.sleep(_POLL_SECONDS)
        raise StartupError(f"`draft-engine {self.arguments[0]}` was not ready after {timeout_s:.0f} s: {self._log_tail()}")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the server to end, and end it if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "it wrote nothing"


@contextlib.contextmanager
def server_process(
    arguments: Sequence[str], log: Path, *, timeout_s: float = 120.0, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run a server for the duration of a block."""
    process = ServerProcess(arguments, log, environment)
    try:
        process.wait_ready(timeout_s)
        yield process
    finally:
        process.stop()
