"""`make stack`: the processes of docker/compose.yaml's profile `cpu`, on this machine and without Docker.

    start draft, wait until it is healthy -> start target -> a small load, with and without drafts
    -> Prometheus scrapes, where it is installed, and every query of the dashboard is asked -> SIGTERM, and clean ends

Commands, environment, ports and health checks are those of the file (see `compose.py`). PROMETHEUS names the binary where it
is not on the path.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml  # type: ignore[import-untyped]

from tests.support.compose import ROOT, ComposeError, Project, dashboard_queries, load_compose

PROMPTS = ("Why do cats sleep so much?", "Write a short poem about the sea.", "What is 7 times 8?", "Name three rivers.")
# Counters of faults have no series before the first fault.
_MAY_BE_EMPTY = ("Errors", "Sessions freed unasked")


@dataclass(frozen=True)
class Load:
    """What the target answered: requests, drafts proposed and accepted, and whether greedy text was the plain text."""

    requests: int
    proposed: int
    accepted: int
    is_same: bool


def run_load(url: str, api_key: str, *, max_tokens: int = 32) -> Load:
    """Ask every prompt with drafts, all at once, then one prompt alone both ways."""
    with httpx.Client(base_url=url, timeout=300.0, headers={"authorization": f"Bearer {api_key}"}) as http:

        def ask(prompt: str, **more: Any) -> dict[str, Any]:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_completion_tokens": max_tokens,
                **more,
            }
            return dict(http.post("/v1/chat/completions", json=body).raise_for_status().json())

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            replies = list(pool.map(ask, PROMPTS))
        drafted, plain = ask(PROMPTS[0]), ask(PROMPTS[0], num_draft_tokens=0)
    replies.append(drafted)
    return Load(
        requests=len(replies) + 1,
        proposed=sum(reply["draft"]["proposed"] for reply in replies),
        accepted=sum(reply["draft"]["accepted"] for reply in replies),
        is_same=drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"],
    )


def wait_for_drafts(url: str, api_key: str, timeout_s: float = 60.0) -> None:
    """Ask until an answer had drafts: the target connects in the background.

    Raises:
        ComposeError: none had in time.
    """
    deadline = time.monotonic() + timeout_s
    while run_load(url, api_key, max_tokens=8).proposed == 0:
        if time.monotonic() > deadline:
            raise ComposeError(f"the target had no drafts within {timeout_s:.0f} s")
        time.sleep(0.2)


def find_prometheus() -> str | None:
    """The Prometheus binary, or None."""
    return os.environ.get("PROMETHEUS") or shutil.which("prometheus")


class Prometheus:
    """A Prometheus with the configuration of the compose file, scraping a draft server of this machine."""

    def __init__(self, binary: str, project: Project, port: int) -> None:
        folder = project.folder / "prometheus"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "docker/monitoring/rules.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(self.configuration(project)))
        self.url = f"http://127.0.0.1:{port}"
        arguments = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with project.log_of("prometheus").open("wb") as log:
            self._process = subprocess.Popen([binary, *arguments], stdout=log, stderr=subprocess.STDOUT)

    @staticmethod
    def configuration(project: Project) -> dict[str, Any]:
        """The committed configuration, with the draft server's address on this machine in the place of its name."""
        config = dict(yaml.safe_load((ROOT / "docker/monitoring/prometheus.yml").read_text()))
        (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "draft-engine")
        names = job.pop("dns_sd_configs")[0]["names"]
        addresses = [project.url_of(name).removeprefix("http://") for name in names if name in project.services]
        job["static_configs"] = [{"targets": addresses}]
        job["authorization"]["credentials_file"] = project.here(job["authorization"]["credentials_file"])
        config["scrape_configs"] = [job]
        return config

    def wait_scraped(self, count: int, timeout_s: float = 90.0) -> None:
        """Wait until each draft server was scraped `count` times.

        Raises:
            ComposeError: that did not happen in time.
        """
        deadline = time.monotonic() + timeout_s
        while not any(float(value) >= count for value in self.ask('min(count_over_time(up{job="draft-engine"}[5m]))')):
            if time.monotonic() > deadline:
                raise ComposeError("Prometheus did not scrape the draft server in time")
            time.sleep(0.5)

    def ask(self, expression: str) -> list[str]:
        """The values of an instant query; none while Prometheus starts."""
        try:
            reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10.0)
        except httpx.TransportError:
            return []
        if reply.status_code == 503:
            return []
        return [sample["value"][1] for sample in reply.raise_for_status().json()["data"]["result"]]

    def unanswered(self) -> list[str]:
        """The titles of dashboard panels with a query that returns nothing, or no number."""
        titles = []
        for title, expression in dashboard_queries():
            values = self.ask(as_query(expression))
            if (not values or "NaN" in values) and title not in _MAY_BE_EMPTY:
                titles.append(title)
        return titles

    def alerts(self) -> dict[str, str]:
        """Health of every alerting rule, by name."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=10.0).raise_for_status().json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


def as_query(expression: str) -> str:
    """A dashboard's expression with Grafana's variables put in."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$step_ms", "30")


def run_stack(
    folder: Path,
    report: Callable[[str], None],
    *,
    environment: Mapping[str, str],
    more_environment: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Run the profile `cpu` once through.

    Raises:
        ComposeError: a service did not come up or did not end well, or something that should hold does not.
    """
    api_key = environment.get("DRAFT_ENGINE_API_KEY") or secrets.token_hex(16)
    document = load_compose({**environment, "DRAFT_ENGINE_API_KEY": api_key})
    project = Project(document, "cpu", folder, {"api_key": api_key}, more_environment or {})
    binary, prometheus = find_prometheus(), None
    try:
        for name, seconds in project.start_all():
            report(f"{name:<11} healthy after {seconds:.1f} s on {project.url_of(name)}")
        wait_for_drafts(project.url_of("target"), api_key)
        if binary is not None:
            port = int(document["services"]["prometheus"]["ports"][0].split(":")[1])
            prometheus = Prometheus(binary, project, port)
        load = run_load(project.url_of("target"), api_key)
        report(f"load        {load.requests} requests, {load.accepted} of {load.proposed} drafts accepted")
        _require(load.proposed > 0, "the target had no drafts to verify")
        _require(load.is_same, "greedy output with drafts is not the plain output")
        if prometheus is None:
            report("prometheus  is not installed here; its part is left out")
        else:
            _check_prometheus(prometheus, project, api_key, report)
    finally:
        if prometheus is not None:
            prometheus.stop()
        codes = project.stop_all()
    report(f"stopped     exit codes {codes}")
    _require(not any(codes.values()), f"a service did not end well: {codes}; logs in {folder}")


def _check_prometheus(prometheus: Prometheus, project: Project, api_key: str, report: Callable[[str], None]) -> None:
    deadline = time.monotonic() + 120.0
    prometheus.wait_scraped(2)
    while True:
        run_load(project.url_of("target"), api_key, max_tokens=16)
        unanswered = prometheus.unanswered()
        if not unanswered or time.monotonic() > deadline:
            break
        time.sleep(2.0)
    _require(not unanswered, f"dashboard panels without data: {', '.join(unanswered)}")
    alerts = prometheus.alerts()
    while "unknown" in alerts.values() and time.monotonic() < deadline:
        time.sleep(1.0)
        alerts = prometheus.alerts()
    _require(set(alerts.values()) == {"ok"}, f"alerting rules that cannot be evaluated: {alerts}")
    report(f"prometheus  {len(dashboard_queries())} dashboard queries answered, {len(alerts)} alerting rules evaluated")


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise ComposeError(message)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the stack; returns the exit code."""
    try:
        run_stack(Path("build/stack").resolve(), _tell, environment=os.environ)
    except ComposeError as error:
        sys.stderr.write(f"make stack: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
