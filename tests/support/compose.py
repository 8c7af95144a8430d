"""docker/compose.yaml read without Docker, and its services run as processes of this machine.

Only what the file uses is understood: merge keys, `${NAME}`, `${NAME:-default}` and `${NAME:?message}`, short port and volume
syntax. A service becomes a process with the image's entry point, its own command and environment, and the paths, names and
addresses of its container put into those of this machine:

    /run/secrets/api_key    -> a file with the key          http://draft:8100 -> http://127.0.0.1:<published port>
    /configs, health check  -> the files of the repository  0.0.0.0:8100      -> the address and port it is published on
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker" / "compose.yaml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<rest>[^}]*))?\}|\$\$")


class ComposeError(Exception):
    """The file cannot be used, or a service does not come up."""


@dataclass(frozen=True)
class Published:
    """A port of a service: where it is published, and its number inside the container."""

    address: str
    port: int
    container_port: int


def load_compose(environment: Mapping[str, str], path: Path = COMPOSE_FILE) -> dict[str, Any]:
    """Read the file and put in what `environment` says."""
    return dict(_interpolated(yaml.safe_load(path.read_text()), environment))


def services_of(document: Mapping[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    """The services of a profile, each after those that it depends on."""
    chosen = {name: service for name, service in document["services"].items() if profile in service["profiles"]}
    ordered: dict[str, dict[str, Any]] = {}
    while len(ordered) < len(chosen):
        ready = [
            name
            for name, service in chosen.items()
            if name not in ordered and all(on in ordered or on not in chosen for on in service.get("depends_on", {}))
        ]
        if not ready:
            raise ComposeError(f"profile {profile}: services wait for each other")
        ordered |= {name: chosen[name] for name in ready}
    return ordered


def published_port(service: Mapping[str, Any]) -> Published:
    """The one port of a service."""
    (text,) = service["ports"]
    address, port, container_port = text.rsplit(":", 2)
    return Published(address, int(port), int(container_port))


def image_environment(path: Path = DOCKERFILE) -> dict[str, str]:
    """What the shared stage of the images sets, but for the path of their programs."""
    stage = path.read_text().split("AS runtime\n")[1].split("\nFROM ")[0].replace("\\\n", " ")
    pairs = [pair for line in stage.splitlines() if line.startswith("ENV ") for pair in line.split()[1:]]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs) if name != "PATH"}


@dataclass
class Project:
    """The services of one profile, as processes.

    Args:
        document: of `load_compose`
        profile: whose services to run
        folder: for logs and secrets
        secrets: values of the file's secrets, by name
        more_environment: variables to add, by service
    """

    document: Mapping[str, Any]
    profile: str
    folder: Path
    secrets: Mapping[str, str]
    more_environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.services = services_of(self.document, self.profile)
        self._places = {
            "/usr/local/bin/": f"{ROOT}/docker/",
            "/configs/": f"{ROOT}/configs/",
            "/cache": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, value in self.secrets.items():
            file = self.folder / f"secret_{name}"
            file.touch(mode=0o600)
            file.write_text(value)
            self._places[f"/run/secrets/{name}"] = str(file)
        for name, service in self.services.items():
            if "ports" in service:
                published = published_port(service)
                self._places[f"http://{name}:{published.container_port}"] = f"http://127.0.0.1:{published.port}"

    def start(self, name: str) -> None:
        """Start a service, without waiting for it."""
        service = self.services[name]
        command = ["/usr/local/bin/entrypoint.sh", *service["command"]]
        with self.log_of(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [self.here(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment_of(name),
            )

    def start_all(self) -> Iterator[tuple[str, float]]:
        """Start every service in order, each once its dependencies are healthy; yields names and seconds till healthy."""
        for name, service in self.services.items():
            began = time.monotonic()
            self.start(name)
            self.wait_healthy(name, _seconds(service["healthcheck"]["start_period"]))
            yield name, time.monotonic() - began

    def environment_of(self, name: str) -> dict[str, str]:
        """What the process of a service is given: the image's variables, then its own."""
        service = self.services[name]
        published = published_port(service)
        container = {**image_environment(), **service["environment"]}
        environment = {key: self.here(str(value)) for key, value in container.items()}
        if environment["DRAFT_ENGINE_PORT"] != str(published.container_port):
            raise ComposeError(f"{name} publishes port {published.container_port} and listens on another one")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("DRAFT_ENGINE_")}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        listening = {"DRAFT_ENGINE_HOST": published.address, "DRAFT_ENGINE_PORT": str(published.port)}
        return {**inherited, **environment, **listening, "PATH": programs, **self.more_environment.get(name, {})}

    def is_healthy(self, name: str) -> bool:
        """Run the health check of a service."""
        test = self.services[name]["healthcheck"]["test"]
        if test[0] != "CMD":
            raise ComposeError(f"{name}: a health check of the kind {test[0]} needs a shell")
        command = [self.here(part) for part in test[1:]]
        check = subprocess.run(command, env=self.environment_of(name), capture_output=True, check=False, timeout=30)
        return check.returncode == 0

    def wait_healthy(self, name: str, timeout_s: float) -> None:
        """Wait until the health check of a service passes.

        Raises:
            ComposeError: the process ended or the time is up; the message has the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy(name):
            code = self.processes[name].poll()
            if code is not None or time.monotonic() > deadline:
                state = "is not healthy" if code is None else f"ended with {code}"
                tail = self.log_of(name).read_text(errors="replace").strip().splitlines()[-3:]
                raise ComposeError(f"{name} {state}: {' | '.join(tail)}")
            time.sleep(0.2)

    def wait_unhealthy(self, name: str, timeout_s: float) -> None:
        """Wait until the health check of a service fails.

        Raises:
            ComposeError: the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_healthy(name):
            if time.monotonic() > deadline:
                raise ComposeError(f"{name} is still healthy")
            time.sleep(0.1)

    def stop(self, name: str, timeout_s: float | None = None) -> int:
        """End a service as Docker does: SIGTERM, then a kill when its grace is over. Returns the exit code."""
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout_s or _seconds(self.services[name]["stop_grace_period"]))
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def stop_all(self) -> dict[str, int]:
        """End every service, the last one first. Returns exit codes."""
        return {name: self.stop(name) for name in reversed(self.processes)}

    def url_of(self, name: str) -> str:
        """Where a service is published."""
        published = published_port(self.services[name])
        return f"http://{published.address}:{published.port}"

    def log_of(self, name: str) -> Path:
        """What a service wrote."""
        return self.folder / f"{name}.log"

    def here(self, text: str) -> str:
        """Put what a container calls by one name into its place on this machine."""
        for there, place in self._places.items():
            if text.startswith(there):
                return place + text.removeprefix(there)
        return text


def dashboard_queries(path: Path = ROOT / "docker/monitoring/grafana/dashboards/draft-engine.json") -> list[tuple[str, str]]:
    """Title and expression of every query of the dashboard."""
    panels = json.loads(path.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def _interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, environment) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        given = environment.get(match["name"], "")
        if given or match["kind"] is None:
            return given
        if match["kind"] == ":?":
            raise ComposeError(match["rest"])
        return match["rest"]

    return _VARIABLE.sub(replace, value)


def _seconds(duration: str) -> float:
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|s|m|h)", duration))
