"""A real server from its first request to its last: lost connections, leases, drain, keys, overload, many clients."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from jsonschema import Draft202012Validator

from draft_engine_client import codec, wire
from draft_engine_client.schema import json_schema
from draft_model.drafter import ContextWrite, DraftProposal, DraftRequest
from service import propose
from service.errors import StartupError
from service.launch import DrainingServer, bind_tcp, bind_unix, serve
from service.settings import ServeSettings
from service.testing import FakeDrafter
from tests.support.service import (
    HELLO,
    GatedDrafter,
    Server,
    Update,
    container_body,
    error_of,
    fresh_drafts,
    json_body,
    make_app,
    make_harness,
    post_container,
    post_json,
    reply_of,
    serving,
    shake_hands,
    wait_until,
)

KEY = "a-secret-key"


def raw_request(server: Server, body: bytes) -> bytes:
    host = urlsplit(server.url).netloc
    head = (
        f"POST /v1/propose HTTP/1.1\r\nhost: {host}\r\ncontent-type: {codec.MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def raw_connection(server: Server) -> socket.socket:
    place = urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=20)


def num_sessions(server: Server) -> int:
    return len(server.http.get("/v1/sessions").json()["data"])


# Clients that go away ------------------------------------------------------------------------------------------------


def num_clients(server: Server) -> int:
    line = next(line for line in server.http.get("/metrics").text.splitlines() if line.startswith("draft_engine_clients "))
    return int(float(line.split()[1]))


def test_a_client_that_loses_its_connection_while_idle_is_freed() -> None:
    with serving(disconnect_grace_seconds=0.0) as server:
        with server.connect() as target:
            client_id = shake_hands(target)
            reply_of(post_container(target, container_body(client_id, Update("a", 0, [1, 2, 3]))))
            assert num_sessions(server) == 1
        wait_until(lambda: num_sessions(server) == 0)
        again = post_container(server.http, container_body(client_id, Update("a", 3, [4], seq=1)))
        assert (again.status_code, error_of(again)["code"]) == (409, "epoch_mismatch")
        text = server.http.get("/metrics").text
        assert 'draft_engine_evictions_total{reason="disconnect"} 1.0' in text


def test_a_client_that_comes_back_in_time_keeps_its_sessions() -> None:
    with serving(disconnect_grace_seconds=60.0) as server:
        with server.connect() as target:
            client_id = shake_hands(target)
            reply_of(post_container(target, container_body(client_id, Update("a", 0, [1, 2, 3]))))
        with server.connect() as target:
            later = reply_of(post_container(target, container_body(client_id, Update("a", 3, [4], seq=1))))
            assert later["sessions"][0]["draft_token_ids"] == fresh_drafts([1, 2, 3, 4])


def test_a_caller_with_one_connection_a_request_lives_by_its_lease() -> None:
    headers = {"connection": "close"}
    with serving(disconnect_grace_seconds=0.0) as server:
        client_id = httpx.post(f"{server.url}/v1/clients", json=HELLO, headers=headers).json()["client_id"]
        for seq in range(2):
            time.sleep(0.5)
            body = json_body(client_id, Update("a", seq, [1], seq=seq))
            reply_of(httpx.post(f"{server.url}/v1/propose", json=body, headers=headers))
        assert num_sessions(server) == 1


def test_a_silent_client_loses_its_lease_and_its_sessions() -> None:
    with serving(lease_seconds=2.0) as server:
        client_id = shake_hands(server.http)
        reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1]))))
        wait_until(lambda: num_clients(server) == 0 and num_sessions(server) == 0)
        assert 'draft_engine_evictions_total{reason="lease"} 1.0' in server.http.get("/metrics").text


@pytest.mark.parametrize("moment", ["upload", "queue", "forward"])
def test_a_connection_dropped_in_a_call_leaves_nothing(moment: str) -> None:
    model = GatedDrafter()
    with serving(make_harness(model)) as server, raw_connection(server) as sock:
        client_id = shake_hands(server.http)
        body = container_body(client_id, Update("dropped", 0, [1, 2, 3]))
        blocker = threading.Thread(target=lambda: None)
        if moment == "queue":
            first = container_body(client_id, Update("first", 0, [9]))
            blocker = threading.Thread(target=lambda: post_container(server.http, first))
        blocker.start()
        if moment == "queue":
            assert model.entered.wait(20)
        request = raw_request(server, body)
        sock.sendall(request[:-5] if moment == "upload" else request)
        engine = server.harness.engine
        if moment == "forward":
            assert model.entered.wait(20)
        elif moment == "queue":
            wait_until(lambda: engine.num_waiting == 2)
        else:
            time.sleep(0.1)
        sock.close()
        time.sleep(0.1)
        model.gate.set()
        blocker.join(20)
        wait_until(lambda: engine.num_waiting == 0)
        with server.connect() as other:
            held = {info["session_id"] for info in other.get("/v1/sessions").json()["data"]}
        assert held == {"upload": set(), "queue": {"first"}, "forward": {"dropped"}}[moment]
        # A client that keeps its other connection may go on; sending the update again is answered as if nothing happened.
        again = reply_of(post_container(server.http, body))["sessions"][0]
        assert again["draft_token_ids"] == fresh_drafts([1, 2, 3])


def test_a_call_of_a_client_that_left_is_dropped_with_its_sessions() -> None:
    model = GatedDrafter()
    with serving(make_harness(model)) as server:
        sock = raw_connection(server)
        host = urlsplit(server.url).netloc
        hello = json.dumps(HELLO).encode()
        head = f"POST /v1/clients HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(hello)}\r\n\r\n".encode() + hello)
        answer = sock.recv(1 << 16)
        client_id = json.loads(answer.partition(b"\r\n\r\n")[2])["client_id"]
        sock.sendall(raw_request(server, container_body(client_id, Update("a", 0, list(range(8))))))
        assert model.entered.wait(20)
        sock.close()
        wait_until(lambda: num_clients(server) == 0)
        model.gate.set()
        wait_until(lambda: num_sessions(server) == 0)


def test_closing_a_session_in_the_middle_of_its_upload_is_told() -> None:
    @dataclass
    class SlowDrafter(FakeDrafter):
        def write_context(self, writes: Sequence[ContextWrite]) -> None:
            time.sleep(0.05)
            super().write_context(writes)

    with serving(make_harness(SlowDrafter(num_pages=256))) as server:
        client_id = shake_hands(server.http)
        body = container_body(client_id, Update("long", 0, list(range(250))), Update("short", 0, [1]))
        with ThreadPoolExecutor(1) as pool, server.connect() as other:
            call = pool.submit(post_container, server.http, body)
            wait_until(lambda: other.get("/v1/sessions").json()["data"])
            assert other.delete("/v1/sessions/long", params={"client_id": client_id}).status_code == 204
            long, short = reply_of(call.result(20))["sessions"]
        assert long["error"]["code"] == "session_not_found"
        assert short["draft_token_ids"] == fresh_drafts([1])


# Overload, deadlines, failures ---------------------------------------------------------------------------------------


def test_a_full_queue_and_a_passed_deadline_are_told() -> None:
    model = GatedDrafter()
    with serving(make_harness(model, max_queue=2)) as server, ThreadPoolExecutor(2) as pool:
        client_id = shake_hands(server.http)
        first = pool.submit(post_container, server.http, container_body(client_id, Update("a", 0, [1])))
        assert model.entered.wait(20)
        late = pool.submit(post_container, server.http, container_body(client_id, Update("b", 0, [1]), deadline_ms=20))
        wait_until(lambda: server.harness.engine.num_waiting == 2)
        with server.connect() as other:
            refused = post_container(other, container_body(client_id, Update("c", 0, [1])))
        assert (refused.status_code, error_of(refused)["code"], refused.headers["retry-after"]) == (429, "overloaded", "1")
        time.sleep(0.05)
        model.gate.set()
        assert first.result(20).status_code == 200
        answer = late.result(20)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
        assert error_of(answer)["waited_ms"] >= 20


def test_a_failed_forward_is_told_and_the_server_serves_on() -> None:
    with serving(make_harness(FakeDrafter(fail_on_anchor=13))) as server:
        client_id = shake_hands(server.http)
        bad = Update("a", 0, [1, 2], anchor_token_id=13)
        error = reply_of(post_container(server.http, container_body(client_id, bad)))["sessions"][0]["error"]
        assert (error["code"], error["status"], error["committed_end"]) == ("internal", 500, 2)
        good = reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1, 2]))))["sessions"][0]
        assert good["draft_token_ids"] == fresh_drafts([1, 2])


def test_a_drafter_that_drafts_nothing_turns_readyz_to_degraded() -> None:
    @dataclass
    class MuteDrafter(FakeDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
            return [DraftProposal([], [], []) for _ in super().draft(requests)]

    with serving(make_harness(MuteDrafter())) as server:
        client_id = shake_hands(server.http)
        for seq in range(8):
            updates = [Update(str(i), 0, [], seq=seq) for i in range(8)]
            assert server.http.get("/health").json()["warnings"] == []
            reply_of(post_json(server.http, json_body_without_rows(client_id, updates)))
        answer = server.http.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["warnings"][0].startswith("no_drafts")
        assert "draft_engine_warnings 1.0" in server.http.get("/metrics").text


def json_body_without_rows(client_id: str, updates: list[Update]) -> dict[str, Any]:
    return {"client_id": client_id, "sessions": [update.message for update in updates]}


def test_a_dead_worker_is_not_alive() -> None:
    with serving() as server:
        server.harness.engine.stop()
        for path in ("/health", "/livez", "/readyz"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        refused = post_container(server.http, container_body(shake_client_id(server), Update("a", 0, [1])))
        assert (refused.status_code, error_of(refused)["code"]) == (409, "epoch_mismatch")


def shake_client_id(server: Server) -> str:
    answer = server.http.post("/v1/clients", json=HELLO)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "draining")
    return "client-none"


# Keys ----------------------------------------------------------------------------------------------------------------


def test_every_route_but_health_and_version_needs_the_key() -> None:
    with serving(api_key=KEY, headers={"authorization": f"Bearer {KEY}"}) as server, server.connect() as stranger:
        paths = ["/v1/models", "/v1/sessions", "/metrics", "/docs", "/openapi.json", "/nothing", "/health/"]
        for path in paths:
            answer = stranger.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in (KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", "Bearer ü"):
            headers = httpx.Headers([(b"authorization", wrong.encode())])
            assert stranger.get("/v1/models", headers=headers).status_code == 401
        assert stranger.post("/v1/clients", json=HELLO).status_code == 401
        assert stranger.post("/v1/propose", json={}).status_code == 401
        assert stranger.delete("/v1/sessions/a", params={"client_id": "b"}).status_code == 401
        assert stranger.post("/v1/reload", json={}).status_code == 401
        for path in ("/health", "/livez", "/readyz", "/version"):
            assert stranger.get(path).status_code == 200
        open_paths = {"/health", "/livez", "/readyz", "/version"}
        for path, methods in server.http.get("/openapi.json").json()["paths"].items():
            for method in methods:
                answer = stranger.request(method, path.replace("{", "").replace("}", ""))
                assert (answer.status_code == 401) == (path not in open_paths), (method, path)
        client_id = shake_hands(server.http)
        reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1]))))
        assert server.http.get("/openapi.json").json()["security"] == [{"api_key": []}]


# The description -----------------------------------------------------------------------------------------------------


def without_null_defaults(schema: Any) -> Any:
    """FastAPI leaves out `default: null`, which says no more than that the field is not required."""
    if isinstance(schema, dict):
        return {key: without_null_defaults(value) for key, value in schema.items() if (key, value) != ("default", None)}
    return [without_null_defaults(value) for value in schema] if isinstance(schema, list) else schema


def test_openapi_describes_every_route_with_the_schema_of_the_client() -> None:
    with serving() as server:
        assert server.http.get("/docs").status_code == 200
        document = server.http.get("/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        assert set(document["paths"]) == {
            "/v1/clients",
            "/v1/propose",
            "/v1/sessions",
            "/v1/sessions/{session_id}",
            "/v1/models",
            "/v1/models/{model_id}",
            "/v1/projection",
            "/v1/reload",
            "/version",
            "/",
            "/health",
            "/livez",
            "/readyz",
            "/metrics",
        }
        schemas = document["components"]["schemas"]
        assert "HTTPValidationError" not in schemas
        for schema in schemas.values():
            Draft202012Validator.check_schema(schema)
        for pointer in all_references(document):
            assert pointer.removeprefix("#/components/schemas/") in schemas
        exported = json.loads(json.dumps(json_schema()["$defs"]).replace("#/$defs/", "#/components/schemas/"))
        for name in (
            "ClientHello",
            "ProposeRequest",
            "JsonProposeRequest",
            "ProposeReply",
            "JsonProposeReply",
            "SessionUpdate",
        ):
            assert without_null_defaults(schemas[name]) == without_null_defaults(exported[name])

        client_id = shake_hands(server.http)
        body = json_body(client_id, Update("a", 0, [1, 2]), Update("b", 9, [3], num_draft_tokens=5))
        reply = post_json(server.http, body).json()
        for name, instance in (("JsonProposeRequest", body), ("JsonProposeReply", reply)):
            root = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            Draft202012Validator(root).validate(instance)
        propose = document["paths"]["/v1/propose"]["post"]
        assert set(propose["requestBody"]["content"]) == {codec.MEDIA_TYPE, "application/json"}


def all_references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [pointer for value in node.values() for pointer in all_references(value)]
    return [pointer for value in node for pointer in all_references(value)] if isinstance(node, list) else []


# Many clients --------------------------------------------------------------------------------------------------------


def test_many_clients_at_once_each_get_their_own_drafts() -> None:
    """Six targets, sessions of the same names, chunks of all sizes and both kinds of body, against the replay of the rows."""

    def drive(server: Server, seed: int) -> int:
        rng = random.Random(seed)
        committed: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        checked = 0
        with server.connect() as http:
            client_id = shake_hands(http)
            for seq in range(15):
                updates = []
                for name in rng.sample("abc", rng.randint(1, 3)):
                    tokens = committed[name]
                    start = rng.randint(0, len(tokens)) if rng.random() < 0.2 else len(tokens)
                    new = [rng.randrange(1_000) for _ in range(rng.choice([1, 2, 4, 40]))]
                    tokens[start:] = new
                    updates.append(Update(name, start, new, seq=seq, anchor_token_id=rng.randrange(1_000)))
                if rng.random() < 0.5:
                    reply = reply_of(post_container(http, container_body(client_id, *updates)))
                else:
                    reply = reply_of(post_json(http, json_body(client_id, *updates)))
                wire.JsonProposeReply.model_validate(reply)
                for update, session in zip(updates, reply["sessions"], strict=True):
                    expected = fresh_drafts(committed[update.session_id], anchor_token_id=update.anchor_token_id)
                    assert session["draft_token_ids"] == expected
                    checked += 1
        return checked

    with (
        serving(make_harness(FakeDrafter(num_pages=2_048), max_sessions=64)) as server,
        ThreadPoolExecutor(6) as pool,
    ):
        assert sum(pool.map(lambda seed: drive(server, seed), range(6))) > 100
        wait_until(lambda: num_sessions(server) == 0)


# Start and end -------------------------------------------------------------------------------------------------------


def test_drain_answers_what_is_inside_and_refuses_what_is_new() -> None:
    model = GatedDrafter()
    with serving(make_harness(model), drain_seconds=3.0) as server, ThreadPoolExecutor(1) as pool:
        client_id = shake_hands(server.http)
        inside = pool.submit(post_container, server.http, container_body(client_id, Update("a", 0, [1])))
        assert model.entered.wait(20)
        server.server.begin_shutdown()
        with server.connect() as other:
            wait_until(lambda: other.get("/readyz").status_code == 503)
            assert other.get("/health").json()["status"] == "draining"
            assert other.get("/livez").status_code == 200
            refused = post_container(other, container_body(client_id, Update("b", 0, [1])))
            assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")
            assert other.post("/v1/clients", json=HELLO).status_code == 503
        model.gate.set()
        assert reply_of(inside.result(20))["sessions"][0]["draft_token_ids"] == fresh_drafts([1])
        server.thread.join(20)
        assert not server.thread.is_alive()


PROGRAM = """
from service.launch import configure_logging, serve
from service.settings import ServeSettings
from tests.support.service import make_app, make_harness

configure_logging("info", "json")
harness = make_harness()
settings = ServeSettings(port=0, drain_seconds=0.1)
serve(make_app(harness), settings, lambda url: print(url, flush=True), on_drain=harness.engine.drain)
print("pages", harness.num_leaked_pages, flush=True)
"""

SMALL_PROGRAM = """
from service.launch import serve
from service.settings import ServeSettings

async def app(scope, receive, send):
    while scope["type"] == "lifespan":
        event = (await receive())["type"]
        await send({"type": event + ".complete"})
        if event == "lifespan.shutdown":
            return

def say(text="drain"):
    print(text, flush=True)

serve(app, ServeSettings(port=0, drain_seconds=60), say, on_drain=say)
say("end")
"""


def start(program: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'client'}"}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_sigterm_drains_and_exits_with_zero() -> None:
    with start(PROGRAM) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(base_url=url, timeout=20) as http:
            client_id = shake_hands(http)
            prompt = Update("prompt-nobody-may-see", 0, [1, 2])
            reply_of(post_container(http, container_body(client_id, prompt)))
            http.post("/v1/propose", json={"client_id": client_id, "sessions": [{"session_id": "prompt-nobody-may-see"}]})
            process.send_signal(signal.SIGTERM)
            output, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert output == "pages 0\n"
    records = [json.loads(line) for line in log.splitlines()]
    assert {"time", "level", "logger", "request_id", "message"} <= set(records[0])
    assert f"listening on {url}" in {record["message"] for record in records}
    assert "prompt-nobody-may-see" not in log


def test_a_second_sigint_ends_at_once() -> None:
    with start(SMALL_PROGRAM) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "drain\n"
        process.send_signal(signal.SIGINT)
        output, log = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "end\n"), log


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
            serve(make_app(make_harness()), ServeSettings(port=port))
    with pytest.raises(StartupError, match="--host"):
        bind_tcp("no.such.host.invalid", 0)
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind_tcp("192.0.2.1", 0)


def test_a_unix_socket_is_served_and_replaced_when_stale(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    bind_unix(path).close()
    assert path.is_socket()
    harness = make_harness()
    urls: list[str] = []
    ready = threading.Event()
    servers: list[DrainingServer] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    settings = ServeSettings(uds=path, drain_seconds=0)
    thread = threading.Thread(target=lambda: serve(make_app(harness), settings, on_ready, on_server=servers.append))
    thread.start()
    try:
        assert ready.wait(20)
        assert urls == [f"unix:{path}"]
        with pytest.raises(StartupError, match="another server listens there"):
            bind_unix(path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://draft") as http:
            assert http.get("/health").json()["status"] == "ok"
            client_id = shake_hands(http)
            reply_of(post_container(http, container_body(client_id, Update("a", 0, [1]))))
    finally:
        servers[0].begin_shutdown()
        thread.join(20)
    assert not path.exists()


def test_bad_unix_sockets_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StartupError, match="no socket"):
        bind_unix(tmp_path / "file")
    with pytest.raises(StartupError, match=r"--uds .*No such file"):
        bind_unix(tmp_path / "missing" / "draft.sock")
    with pytest.raises(StartupError, match=r"--uds .*too long"):
        bind_unix(tmp_path / ("x" * 200))


def test_a_bad_certificate_is_one_line(tmp_path: Path) -> None:
    settings = ServeSettings(port=0, ssl_certfile=tmp_path / "missing.pem", ssl_keyfile=tmp_path / "missing.key")
    with pytest.raises(StartupError, match="--ssl-certfile"):
        serve(make_app(make_harness()), settings)


def test_a_worker_that_cannot_start_is_an_error() -> None:
    def fail() -> None:
        raise StartupError("no device")

    with pytest.raises(StartupError, match="could not start"):
        serve(make_app(make_harness(on_worker_start=fail)), ServeSettings(port=0))


def test_long_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "BODY_BUDGET", 1)
    model = GatedDrafter()
    with serving(make_harness(model, max_body_bytes=3_000)) as server, ThreadPoolExecutor(1) as pool:
        client_id = shake_hands(server.http)
        long, other = (container_body(client_id, Update(name, 0, list(range(40)))) for name in "ab")
        assert 1_500 < len(long) <= 3_000
        inside = pool.submit(post_container, server.http, long)
        assert model.entered.wait(20)
        with server.connect() as http:
            refused = post_container(http, other)
            assert (refused.status_code, error_of(refused)["used_bytes"]) == (429, len(long))
            model.gate.set()
            assert inside.result(20).status_code == 200
            reply_of(post_container(http, other))


def test_long_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "MAX_JSON_BYTES", 500)
    with serving() as server:
        client_id = shake_hands(server.http)
        answer = post_json(server.http, json_body(client_id, Update("a", 0, list(range(30)))))
        assert (answer.status_code, error_of(answer)["max_body_bytes"]) == (413, 500)
        reply_of(post_container(server.http, container_body(client_id, Update("a", 0, list(range(30))))))
