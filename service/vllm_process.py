"""A vLLM server of another virtual environment as a child process: started, waited for and ended with all of its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from service.errors import StartupError

SERVED_NAME = "target"
_CLIENT = Path(__file__).parents[1] / "client"
_POLL_SECONDS = 0.2
# Nothing leaves the machine; the key-value cache of a CPU is counted in GiB.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class VllmProcess:
    """One vLLM server on a free port of loopback.

    Args:
        python: interpreter that has vLLM
        model: folder of the target
        arguments: further flags
        log: file that receives what it writes
        environment: variables to set beside the inherited ones
        import_path: folders to import from, beside the client's
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        import_path: Sequence[Path] = (),
    ) -> None:
        if not python.is_file():
            raise StartupError(f"there is no vLLM at {python}: run `make vllm`")
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME, *arguments]
        path = os.pathsep.join(map(str, [_CLIENT, *import_path]))
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **(environment or {})},
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            StartupError: it ended, or did not answer in time; the message has what it said of an error.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise StartupError(f"vLLM ended with {self._process.returncode}: {self._last_error()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(_POLL_SECONDS)
        raise StartupError(f"vLLM was not ready after {timeout_s:.0f} s: {self._last_error()}")

    def stop(self, timeout_s: float = 20.0) -> None:
        """Ask the server to end, and end what is left of it and its workers."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error: " in line] or lines
        return " | ".join(errors[-2:]) or "it wrote nothing"


@contextlib.contextmanager
def vllm_process(
    python: Path,
    model: Path,
    arguments: Sequence[str],
    log: Path,
    *,
    timeout_s: float = 300.0,
    environment: Mapping[str, str] | None = None,
    import_path: Sequence[Path] = (),
) -> Iterator[VllmProcess]:
    """Run a vLLM server for the duration of a block."""
    process = VllmProcess(python, model, arguments, log, environment=environment, import_path=import_path)
    try:
        process.wait_ready(timeout_s)
        yield process
    finally:
        process.stop()
