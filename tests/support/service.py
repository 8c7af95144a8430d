"""Makers shared by the tests of the service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from attention.cache import PageAllocator
from draft_engine_client import codec
from draft_engine_client.codec import TensorView
from draft_model.drafter import DraftProposal, DraftRequest, SamplingParams
from service.app import create_app
from service.calls import ProposeCall, SessionWork
from service.clients import ClientTable
from service.edge import AsgiApp
from service.engine import DraftEngine
from service.launch import DrainingServer, serve
from service.metrics import EngineMetrics
from service.prefix_cache import PrefixCache
from service.serving import LoadedDraft, Reloader, Serving
from service.sessions import SessionChange, SessionKey, SessionTable
from service.settings import EngineLimits, ServeSettings
from service.testing import FakeDrafter, expected_drafts, row_digest


@dataclass
class GatedDrafter(FakeDrafter):
    """A fake whose next forward waits until the test opens the gate."""

    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        self.entered.set()
        assert self.gate.wait(20)
        return super().draft(requests)


LIMITS = EngineLimits(
    max_sessions=16,
    max_sessions_per_call=16,
    max_rows_per_call=256,
    max_body_bytes=1 << 20,
    max_context=1_024,
    max_queue=16,
    rows_per_chunk=32,
    lease_seconds=30.0,
    session_ttl_seconds=300.0,
    idle_seconds=5.0,
)


def make_limits(**changes: object) -> EngineLimits:
    return replace(LIMITS, **changes)  # type: ignore[arg-type]


@dataclass
class Harness:
    """A running engine over a FakeDrafter, with the parts a test looks at."""

    model: FakeDrafter
    allocator: PageAllocator
    prefix_cache: PrefixCache
    table: SessionTable
    limits: EngineLimits
    metrics: EngineMetrics
    engine: DraftEngine

    @property
    def loaded(self) -> LoadedDraft:
        """Its drafter, to be exchanged for another harness's."""
        return LoadedDraft(self.model, self.table, self.model.facts, self.limits)

    @property
    def num_leaked_pages(self) -> int:
        return self.allocator.num_pages - 1 - self.allocator.num_free


def make_harness(
    model: FakeDrafter | None = None, on_worker_start: Callable[[], None] = lambda: None, **limits: object
) -> Harness:
    model = model or FakeDrafter()
    metrics = EngineMetrics()
    allocator = PageAllocator(model.num_pages)
    prefix_cache = PrefixCache(allocator, page_size=model.page_size, fingerprint="fake")
    resolved = make_limits(**limits)
    table = SessionTable(
        allocator,
        page_size=model.page_size,
        limits=resolved,
        copy_page=model.copy_page,
        prefix_cache=prefix_cache,
        on_evicted=lambda reason, count: metrics.evictions.labels(reason).inc(count),
    )
    engine = DraftEngine(model, table, resolved, metrics, on_worker_start=on_worker_start)
    return Harness(model, allocator, prefix_cache, table, resolved, metrics, engine)


def insist_that_nothing_is_left(harness: Harness) -> None:
    """After every test of an engine: no worker, no call, no session, and every page free."""
    engine = harness.engine
    assert not engine.is_alive
    left = (engine.num_waiting, engine.num_sessions, len(harness.table), len(harness.prefix_cache), harness.num_leaked_pages)
    assert left == (0, 0, 0, 0, 0)
    assert all(harness.allocator.reference_count(page) == 0 for page in range(1, harness.allocator.num_pages))


@contextlib.asynccontextmanager
async def running(harness: Harness) -> AsyncIterator[DraftEngine]:
    """Start the engine, stop it in the end and insist that no page is left held."""
    harness.engine.start()
    try:
        yield harness.engine
    finally:
        await asyncio.to_thread(harness.engine.stop)
        insist_that_nothing_is_left(harness)


def make_rows(token_ids: Sequence[int], start: int, width: int = 8) -> torch.Tensor:
    """Feature rows that tell their token and position, as a target's hidden states would."""
    rows = torch.arange(start, start + len(token_ids), dtype=torch.float32)[:, None].repeat(1, width)
    return rows + torch.tensor(token_ids, dtype=torch.float32)[:, None] / 1024.0


def make_work(
    session_id: str,
    start: int,
    token_ids: Sequence[int],
    *,
    seq: int = 0,
    client_id: str = "client",
    anchor_token_id: int = 7,
    num_draft_tokens: int = 4,
    incarnation: int = 0,
    confidence_threshold: float | None = None,
) -> SessionWork:
    return SessionWork(
        change=SessionChange(
            key=SessionKey(client_id, session_id),
            incarnation=incarnation,
            seq=seq,
            start=start,
            num_rows=len(token_ids),
            scratch_rows=4 if num_draft_tokens else 0,
        ),
        token_ids=list(token_ids),
        features=make_rows(token_ids, start) if token_ids else None,
        is_projected=False,
        anchor_token_id=anchor_token_id,
        num_draft_tokens=num_draft_tokens,
        sampling=SamplingParams(),
        confidence_threshold=confidence_threshold,
    )


def make_call(*works: SessionWork, deadline_ms: float | None = None, closes: Sequence[SessionKey] = ()) -> ProposeCall:
    client_id = works[0].key.client_id if works else closes[0].client_id
    return ProposeCall(client_id, list(works), list(closes), time.monotonic(), deadline_ms)


def fresh_drafts(token_ids: Sequence[int], *, start: int = 0, anchor_token_id: int = 7, count: int = 4) -> list[int]:
    """What a fresh session fed exactly these rows would draft."""
    rows = [row_digest(start + i, row) for i, row in enumerate(make_rows(token_ids, start))]
    return expected_drafts(rows, start + len(token_ids), anchor_token_id, count, vocab_size=1_000)


# Over HTTP -----------------------------------------------------------------------------------------------------------


def load_nothing(path: Path | None) -> LoadedDraft:
    raise RuntimeError("this test has no other drafter")


def make_app(
    harness: Harness,
    *,
    api_key: str | None = None,
    lease_seconds: float = 300.0,
    disconnect_grace_seconds: float = 0.3,
    server_id: str = "server-1",
    load: Callable[[Path | None], LoadedDraft] = load_nothing,
    model_root: Path | None = None,
    **options: Any,
) -> AsgiApp:
    clients = ClientTable(server_id=server_id, lease_seconds=lease_seconds, disconnect_grace_seconds=disconnect_grace_seconds)
    serving = Serving(harness.loaded)
    reloader = Reloader(
        engine=harness.engine,
        clients=clients,
        serving=serving,
        metrics=harness.metrics,
        load=load,
        model_root=model_root,
    )
    return create_app(
        engine=harness.engine,
        clients=clients,
        serving=serving,
        metrics=harness.metrics,
        version="1.2.3",
        api_key=api_key,
        reloader=reloader,
        **options,
    )


@dataclass
class Server:
    """A real server on loopback, in a thread of its own."""

    harness: Harness
    url: str
    server: DrainingServer
    thread: threading.Thread
    http: httpx.Client

    def connect(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, headers=headers)


@contextlib.contextmanager
def serving(
    harness: Harness | None = None, *, drain_seconds: float = 0.0, headers: dict[str, str] | None = None, **options: Any
) -> Iterator[Server]:
    """Serve a harness; afterwards nothing may be left."""
    harness = harness or make_harness()
    app = make_app(harness, **options)
    settings = ServeSettings(port=0, drain_seconds=drain_seconds)
    ready = threading.Event()
    urls: list[str] = []
    servers: list[DrainingServer] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(
        target=lambda: serve(app, settings, on_ready, on_drain=harness.engine.drain, on_server=servers.append)
    )
    thread.start()
    assert ready.wait(20)
    with httpx.Client(base_url=urls[0], timeout=20, headers=headers) as http:
        try:
            yield Server(harness, urls[0], servers[0], thread, http)
        finally:
            servers[0].begin_shutdown()
            thread.join(20)
    assert not thread.is_alive()
    insist_that_nothing_is_left(harness)


HELLO: dict[str, Any] = {
    "client_name": "test target",
    "target": {"vocab_size": 1_000, "hidden_size": 4, "num_layers": 3, "target_layer_ids": [0, 2], "dtype": "float32"},
}


def shake_hands(http: httpx.Client, **target: Any) -> str:
    hello = {**HELLO, "target": {**HELLO["target"], **target}}
    answer = http.post("/v1/clients", json=hello)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["client_id"])


@dataclass
class Update:
    """One session of a propose request, with its rows."""

    session_id: str
    start: int
    token_ids: Sequence[int]
    seq: int = 0
    anchor_token_id: int = 7
    num_draft_tokens: int = 4
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "seq": self.seq,
            "start": self.start,
            "num_rows": len(self.token_ids),
            "anchor_token_id": self.anchor_token_id,
            "num_draft_tokens": self.num_draft_tokens,
            **self.more,
        }


def features_of(updates: Sequence[Update]) -> torch.Tensor:
    return torch.cat([make_rows(update.token_ids, update.start) for update in updates])


def json_body(client_id: str, *updates: Update, **more: Any) -> dict[str, Any]:
    return {
        "client_id": client_id,
        "sessions": [update.message for update in updates],
        "token_ids": [token for update in updates for token in update.token_ids],
        "features": features_of(updates).tolist(),
        **more,
    }


def to_view(tensor: torch.Tensor) -> TensorView:
    if tensor.dtype == torch.bfloat16:
        return TensorView.from_array(tensor.view(torch.uint16).numpy(), is_bfloat16=True)
    return TensorView.from_array(tensor.numpy())


def container_body(
    client_id: str, *updates: Update, dtype: torch.dtype = torch.float32, features: torch.Tensor | None = None, **more: Any
) -> bytes:
    message = {"client_id": client_id, "sessions": [update.message for update in updates], **more}
    token_ids = np.array([token for update in updates for token in update.token_ids], dtype=np.int32)
    rows = features_of(updates) if features is None else features
    return codec.encode(
        json.dumps(message).encode(),
        {"token_ids": TensorView.from_array(token_ids), "features": to_view(rows.to(dtype))},
    )


CONTAINER_TYPE = {"content-type": codec.MEDIA_TYPE}


def post_container(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post("/v1/propose", content=body, headers=CONTAINER_TYPE)


def post_json(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return http.post("/v1/propose", json=body)


def reply_of(response: httpx.Response) -> dict[str, Any]:
    """The message of a reply of either kind."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == codec.MEDIA_TYPE:
        return dict(json.loads(codec.decode(response.content).message))
    return dict(response.json())


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert {"message", "type", "code", "param"} <= set(body["error"])
    assert response.headers["x-request-id"]
    return dict(body["error"])


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)
