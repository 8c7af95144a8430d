"""Another drafter, loaded while targets draft: one version in each reply, no row of the old one read, failures harmless."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from draft_engine_client import wire
from draft_engine_client.client import DraftClient
from draft_engine_client.settings import ClientSettings
from draft_model.drafter import DraftProposal, DraftRequest
from draft_model.errors import CheckpointError
from service.serving import LoadedDraft
from service.subprocesses import server_process
from service.testing import FakeDrafter
from tests.support.draft_model import make_tiny_drafter
from tests.support.service import (
    GatedDrafter,
    Harness,
    Server,
    Update,
    container_body,
    error_of,
    fresh_drafts,
    make_harness,
    post_container,
    reply_of,
    serving,
    shake_hands,
    wait_until,
)
from tests.unit.client.test_real_server import TARGET, Request


@dataclass
class ShiftedDrafter(FakeDrafter):
    """Weights of another generation: every draft is `shift` further on."""

    shift: int = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        return [
            DraftProposal([self.shifted(token) for token in p.token_ids], p.confidence, p.survival)
            for p in super().draft(requests)
        ]

    def shifted(self, token: int) -> int:
        return (token + self.shift) % self.vocab_size


def make_shifted(shift: int) -> Harness:
    return make_harness(ShiftedDrafter(num_pages=512, shift=shift), max_sessions=64)


def version_served(server: Server) -> str:
    return str(server.http.get("/v1/models").json()["data"][0]["draft_version"])


def test_targets_draft_on_while_drafters_are_exchanged() -> None:
    """Four clients step without a pause through five reloads, two of which fail; all of them end on the last drafter."""
    generations = [make_shifted(shift) for shift in (0, 100, 200, 300)]
    coming = iter([generations[1], None, generations[2], None, generations[3]])
    stop = threading.Event()

    def load(path: Path | None) -> LoadedDraft:
        harness = next(coming)
        if harness is None:
            raise CheckpointError("tensor layers.0.mlp.up_proj.weight is missing")
        return harness.loaded

    seen: list[set[int]] = [set() for _ in range(4)]

    def drive(server: Server, place: int) -> int:
        """Draft until the last drafter has answered; returns the shift of the last drafts."""
        settings = ClientSettings(server.url, step_deadline_ms=5_000.0, breaker_min_s=0.02)
        last = -1
        with DraftClient(settings, TARGET) as client:
            assert client.wait_connected(20.0)
            requests = [Request(name, 20, 10 * place + index) for index, name in enumerate("ab")]
            while not stop.is_set() or last != 300:
                for request, drafts in zip(requests, client.propose([r.step() for r in requests]), strict=True):
                    if drafts.reason is None and drafts.coverage == 1.0:
                        shift = (drafts.token_ids[0] - request.right()[0]) % 1_000
                        assert list(drafts.token_ids) == [(token + shift) % 1_000 for token in request.right()]
                        seen[place].add(shift)
                        last = shift
                    if len(request.tokens) > 200:
                        request.rewind(20)
                    request.grow(1)
            assert client.stats.errors == client.stats.invalid_replies == 0
        return last

    with (
        serving(generations[0], load=load) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        drives = [pool.submit(drive, server, place) for place in range(4)]
        versions = [version_served(server)]
        shifts = [0]
        for is_good in (True, False, True, False, True):
            wait_until(lambda: all(shifts[-1] in place for place in seen))
            answer = server.http.post("/v1/reload", json={})
            assert (answer.status_code == 200) == is_good, answer.text
            if is_good:
                versions.append(answer.json()["draft_version"])
                shifts.append(shifts[-1] + 100)
            else:
                assert "up_proj.weight is missing" in error_of(answer)["message"]
                assert error_of(answer)["draft_version"] == versions[-1] == version_served(server)
        stop.set()
        assert [drive.result(60) for drive in drives] == [300] * 4
        assert seen == [{0, 100, 200, 300}] * 4
        assert len(set(versions)) == 4
        text = server.http.get("/metrics").text
        assert 'draft_engine_reloads_total{outcome="ok"} 3.0' in text
        assert 'draft_engine_reloads_total{outcome="failed"} 2.0' in text
        assert f'draft_version="{versions[-1]}"' in text
        for harness in generations[:-1]:
            assert harness.num_leaked_pages == 0, "a drafter that is gone still holds pages"
    assert generations[-1].num_leaked_pages == 0


def test_a_reply_carries_the_version_that_drafted_it_and_old_calls_are_refused() -> None:
    old, new = make_harness(GatedDrafter()), make_shifted(500)
    with serving(old, load=lambda path: new.loaded) as server, ThreadPoolExecutor(3) as pool:
        client_id = shake_hands(server.http)
        inside = pool.submit(post_container, server.http, container_body(client_id, Update("a", 0, [1])))
        assert isinstance(old.model, GatedDrafter)
        assert old.model.entered.wait(20)
        with server.connect() as second, server.connect() as third:
            waiting = pool.submit(post_container, second, container_body(client_id, Update("b", 0, [2])))
            wait_until(lambda: old.engine.num_waiting == 2)
            exchange = pool.submit(third.post, "/v1/reload", json={})
            wait_until(lambda: old.engine._queue._commands)
            busy = server.connect()
            with busy:
                answer = busy.post("/v1/reload", json={})
                assert (answer.status_code, error_of(answer)["code"]) == (409, "reload_in_progress")
            old.model.gate.set()
            first = reply_of(inside.result(20))
            assert first["sessions"][0]["draft_token_ids"] == fresh_drafts([1])
            assert first["draft_version"] == "1-fake"
            refused = waiting.result(20)
            assert (refused.status_code, error_of(refused)["code"]) == (409, "epoch_mismatch")
            assert exchange.result(20).json()["draft_version"] == "2-fake"
        stale = post_container(server.http, container_body(client_id, Update("a", 1, [2], seq=1)))
        assert (stale.status_code, error_of(stale)["code"]) == (409, "epoch_mismatch")
        client_id = shake_hands(server.http)
        later = reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1]))))
        assert later["draft_version"] == "2-fake"
        assert later["sessions"][0]["draft_token_ids"] == [(token + 500) % 1_000 for token in fresh_drafts([1])]
    assert new.num_leaked_pages == 0


def test_a_drafter_of_another_shape_brings_its_own_facts_and_limits() -> None:
    wide = make_harness(FakeDrafter(num_pages=128, draft_block_size=6, feature_width=16), max_context=77)
    with serving(load=lambda path: wide.loaded) as server:
        shake_hands(server.http)
        assert server.http.post("/v1/reload", json={}).status_code == 200
        entry = wire.ModelEntry.model_validate(server.http.get("/v1/models").json()["data"][0])
        assert (entry.draft.draft_block_size, entry.limits.max_context) == (6, 77)
        answer = server.http.post("/v1/clients", json={"client_name": "old", "target": TARGET.model_dump()})
        assert (answer.status_code, error_of(answer)["param"]) == (412, "target.hidden_size")
        client_id = shake_hands(server.http, hidden_size=8)
        reply = reply_of(
            server.http.post(
                "/v1/propose",
                json={
                    "client_id": client_id,
                    "sessions": [Update("a", 0, [1], num_draft_tokens=6).message],
                    "token_ids": [1],
                    "features": [[0.5] * 16],
                },
            )
        )
        assert len(reply["sessions"][0]["draft_token_ids"]) == 6
        assert "fake-drafter" in server.http.get("/").text
    assert wide.num_leaked_pages == 0


def test_only_drafters_under_the_model_root_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "models" / "good" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "outside")
    asked: list[Path | None] = []

    def load(path: Path | None) -> LoadedDraft:
        asked.append(path)
        return make_shifted(1).loaded

    with serving(load=load, model_root=tmp_path / "models") as server:
        for name in ("../outside", str(tmp_path / "outside"), "link", "missing", "."):
            answer = server.http.post("/v1/reload", json={"model": name})
            assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (400, "bad_request", "model")
        assert asked == []
        assert server.http.post("/v1/reload", json={"model": "good"}).status_code == 200
        assert asked == [(tmp_path / "models" / "good").resolve()]
    with serving(load=load) as server:
        answer = server.http.post("/v1/reload", json={"model": "good"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "bad_request")


def test_a_reload_needs_the_key() -> None:
    with serving(load=lambda path: make_shifted(1).loaded, api_key="k") as server:
        answer = server.http.post("/v1/reload", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")


def test_a_drafter_whose_canary_fails_is_not_served() -> None:
    def load(path: Path | None) -> LoadedDraft:
        loaded = make_shifted(1).loaded
        return LoadedDraft(loaded.model, loaded.sessions, loaded.facts, loaded.limits, problems=("canary: 0 of 40 drafts",))

    with serving(load=load) as server:
        answer = server.http.post("/v1/reload", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (422, "reload_failed")
        assert "canary: 0 of 40 drafts" in error_of(answer)["message"]
        assert version_served(server) == "1-fake"


def test_a_device_without_room_is_a_failed_load() -> None:
    def load(path: Path | None) -> LoadedDraft:
        raise RuntimeError("CUDA out of memory")

    with serving(load=load) as server:
        answer = server.http.post("/v1/reload", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (422, "reload_failed")


def test_a_real_server_reloads_by_name_and_by_signal(tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("second", 1), ("broken", 2)):
        make_tiny_drafter(tmp_path / "models" / name, seed=seed)
    weights = tmp_path / "models" / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    models = tmp_path / "models"
    arguments = ["serve", "--port", "0", "--model", str(models / "first"), "--model-root", str(models), "--threads", "1"]
    with (
        server_process([*arguments, "--kv-cache-memory", "4MiB", "--drain-seconds", "0"], tmp_path / "log") as process,
        httpx.Client(base_url=process.url, timeout=30) as http,
    ):

        def served() -> tuple[str, str]:
            entry = http.get("/v1/models").json()["data"][0]
            return str(entry["id"]), str(entry["draft_version"])

        first = served()
        assert first[1].startswith("1-")
        answer = http.post("/v1/reload", json={"model": "second"})
        assert answer.status_code == 200, answer.text
        second = served()
        assert second[0] == "second"
        assert second[1].startswith("2-")
        assert second[1][2:] != first[1][2:], "other weights have another fingerprint"
        refused = http.post("/v1/reload", json={"model": "broken"})
        assert (refused.status_code, error_of(refused)["code"]) == (422, "reload_failed")
        assert "model.safetensors" in error_of(refused)["message"]
        assert served() == second
        os.kill(process.pid, signal.SIGHUP)
        wait_until(lambda: served()[1].startswith("3-"))
        assert served() == ("first", f"3-{first[1][2:]}")
