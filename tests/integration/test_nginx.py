"""docker/nginx/nginx.conf, with a real nginx before three draft servers: targets stay, spread, and move as few as they must."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.compose import ROOT
from tests.support.service import HELLO, Server, Update, error_of, json_body, make_harness, reply_of, serving

NGINX = os.environ.get("NGINX") or shutil.which("nginx")
NUM_TARGETS = 300

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


def configuration(folder: Path, port: int, servers: Sequence[Server]) -> str:
    """The committed file, with this machine's addresses and a folder of its own."""
    text = (ROOT / "docker/nginx/nginx.conf").read_text()
    for index, server in enumerate(servers):
        text, count = re.subn(rf"draft-{index}:8100", server.url.removeprefix("http://"), text)
        assert count == 1
    assert text.count("listen 127.0.0.1:8100;") == 1
    return text.replace("listen 127.0.0.1:8100;", f"listen 127.0.0.1:{port};").replace("/tmp/nginx", str(folder / "nginx"))


@contextlib.contextmanager
def proxied(folder: Path, servers: Sequence[Server]) -> Iterator[str]:
    """nginx before `servers`; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / "nginx.conf"
    file.write_text(configuration(folder, port, servers))
    process = subprocess.Popen([str(NGINX), "-c", str(file), "-p", str(folder), "-g", "daemon off; master_process off;"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health")
                break
            assert process.poll() is None, "nginx has ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def homes(http: httpx.Client) -> dict[int, str]:
    """Which server each target is sent to."""
    found = {}
    for target in range(NUM_TARGETS):
        answer = http.get("/version", headers={"x-draft-client": f"target-{target}"})
        assert answer.status_code == 200
        found[target] = str(answer.json()["server_id"])
    return found


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving(make_harness(), server_id=f"server-{index}")) for index in range(3)]


def test_targets_stay_spread_evenly_and_only_those_of_a_dead_server_move(servers: list[Server], tmp_path: Path) -> None:
    with proxied(tmp_path, servers) as url, httpx.Client(base_url=url, timeout=20) as http:
        before = homes(http)
        assert homes(http) == before
        counts = Counter(before.values())
        assert set(counts) == {"server-0", "server-1", "server-2"}
        assert min(counts.values()) > NUM_TARGETS / 3 * 0.6
        dead = before[0]
        servers[int(dead[-1])].server.begin_shutdown()
        servers[int(dead[-1])].thread.join(20)
        after = homes(http)
        moved = {target for target in before if before[target] != after[target]}
        assert moved == {target for target, home in before.items() if home == dead}
        assert dead not in after.values()
        assert len(Counter(after[target] for target in moved)) == 2, "their load is shared"


def test_a_target_that_is_moved_is_told_and_goes_on_after_a_handshake(servers: list[Server], tmp_path: Path) -> None:
    with proxied(tmp_path, servers) as url, httpx.Client(base_url=url, timeout=20, headers={"x-draft-client": "me"}) as http:
        home = http.get("/version").json()["server_id"]
        client_id = http.post("/v1/clients", json=HELLO).json()["client_id"]
        update = Update("s", 0, [11, 12, 13])
        drafted = reply_of(http.post("/v1/propose", json=json_body(client_id, update)))["sessions"][0]["draft_token_ids"]
        servers[int(home[-1])].server.begin_shutdown()
        servers[int(home[-1])].thread.join(20)
        refused = http.post("/v1/propose", json=json_body(client_id, Update("s", 3, [14], seq=1)))
        assert error_of(refused)["code"] == "epoch_mismatch"
        client_id = http.post("/v1/clients", json=HELLO).json()["client_id"]
        again = reply_of(http.post("/v1/propose", json=json_body(client_id, update)))["sessions"][0]["draft_token_ids"]
        assert again == drafted
