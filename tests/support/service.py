"""Makers shared by the tests of the service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import torch

from attention.cache import PageAllocator
from draft_model.drafter import SamplingParams
from service.calls import ProposeCall, SessionWork
from service.engine import DraftEngine
from service.metrics import EngineMetrics
from service.prefix_cache import PrefixCache
from service.sessions import SessionChange, SessionKey, SessionTable
from service.settings import EngineLimits
from service.testing import FakeDrafter, expected_drafts, row_digest

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
    def num_leaked_pages(self) -> int:
        return self.allocator.num_pages - 1 - self.allocator.num_free


def make_harness(model: FakeDrafter | None = None, **limits: object) -> Harness:
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
    return Harness(model, allocator, prefix_cache, table, resolved, metrics, DraftEngine(model, table, resolved, metrics))


@contextlib.asynccontextmanager
async def running(harness: Harness) -> AsyncIterator[DraftEngine]:
    """Start the engine, stop it in the end and insist that no page is left held."""
    harness.engine.start()
    try:
        yield harness.engine
    finally:
        await asyncio.to_thread(harness.engine.stop)
        assert not harness.engine.is_alive
        assert harness.num_leaked_pages == 0


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
