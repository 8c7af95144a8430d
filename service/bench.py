"""`draft-engine bench`: the same blocks drafted in process and through a draft server, and what HTTP adds.

Both sides run the same checkpoint on the same machine, one after the other within each round, so that their ratio means
something on a noisy one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from rich.console import Console
from rich.table import Table

from draft_engine_client.client import DraftClient
from draft_engine_client.sessions import SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.wire import TargetFingerprint
from draft_model.drafter import ContextWrite, Drafter, DraftRequest
from service.errors import StartupError
from service.figures import Figure, write_figures
from service.settings import DEFAULT_CONTEXT_BIAS, EngineSettings
from service.shipped import shipped_drafter
from service.subprocesses import server_process
from service.target.weights import default_cache_dir, ensure_target

GOAL_HTTP_MS = 1.5


class BenchSettings(EngineSettings):
    """Measuring a drafter."""

    model: Path | None = Field(None, description="Folder of the draft checkpoint. Default: the drafter that ships.")
    target_model: Path | None = Field(None, description="Folder of its target. Default: the embedded target.")
    context: int = Field(256, ge=1, le=4096, description="Context rows of each session.")
    rows_per_step: int = Field(2, ge=1, le=32, description="New rows in each step.")
    rounds: int = Field(50, ge=5, le=10_000, description="Steps to time.")
    output: Path = Field(Path("build/bench_propose.json"), description="File for the figures.")


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one step of `sessions` sessions: in process, over HTTP, and inside the server."""

    sessions: int
    in_process: float
    over_http: float
    in_server: float
    same_drafts: bool

    @property
    def http(self) -> float:
        """What the client waited beyond the server's own time."""
        return self.over_http - self.in_server


def run_bench(settings: BenchSettings, console: Console) -> int:
    """Run the benchmark and write its figures; returns the exit code.

    Raises:
        StartupError: the server does not start or cannot be reached.
    """
    path = settings.model or shipped_drafter()
    target_path = settings.target_model or ensure_target(default_cache_dir(), console.print)
    drafter = Drafter.load(path, target_path=target_path, context_bias=DEFAULT_CONTEXT_BIAS)
    arguments = ["serve", "--port", "0", "--model", str(path), "--target-model", str(target_path)]
    with server_process(arguments, settings.output.parent / "logs" / "bench-draft.log") as server:
        timings = [_time_sessions(drafter, server.url, sessions, settings) for sessions in (1, 4, 16)]
    table = Table(title="one step: take in rows, draft one block (median ms)")
    for title in ("sessions", "in process", "over HTTP", "of it in the server", "HTTP", "drafts"):
        table.add_column(title, justify="right")
    for timing in timings:
        numbers = (timing.in_process, timing.over_http, timing.in_server, timing.http)
        table.add_row(
            str(timing.sessions), *(f"{value:.2f}" for value in numbers), "same" if timing.same_drafts else "DIFFERENT"
        )
    console.print(table)
    figures = [Figure("same_drafts", all(timing.same_drafts for timing in timings), "", True)]
    for timing in timings:
        goal = GOAL_HTTP_MS if timing.sessions == 1 else None
        figures += [
            Figure(f"in_process_{timing.sessions}", timing.in_process, "ms"),
            Figure(f"over_http_{timing.sessions}", timing.over_http, "ms"),
            Figure(f"http_{timing.sessions}", timing.http, "ms", goal, is_cost=True),
        ]
    write_figures(settings.output, figures, {"model": str(path)})
    console.print(f"figures in {settings.output}")
    return 0 if all(timing.same_drafts for timing in timings) else 1


def _time_sessions(drafter: Drafter, url: str, sessions: int, settings: BenchSettings) -> Timing:
    config = drafter.config
    rng = np.random.default_rng(sessions)
    rows = settings.context + settings.rounds * settings.rows_per_step
    features = [rng.standard_normal((rows, config.feature_width)).astype(np.float16) for _ in range(sessions)]
    tokens = [rng.integers(1, config.vocab_size, rows + 1).tolist() for _ in range(sessions)]
    pages_each = -(-(rows + config.draft_block_size) // drafter.page_size)
    if sessions * pages_each >= drafter.cache.num_pages:
        raise StartupError(f"--context {settings.context} and --rounds {settings.rounds} need more pages than the pool has")
    pages = [list(range(1 + index * pages_each, 1 + (index + 1) * pages_each)) for index in range(sessions)]
    client = DraftClient(ClientSettings(url, step_deadline_ms=5_000.0, max_rows_per_step=8_192), _fingerprint(drafter))
    client.start()
    try:
        if not client.wait_connected(10.0):
            raise StartupError(f"the draft server at {url} cannot be used: {client.refusal}")
        local_ms, remote_ms, server_ms = [], [], []
        is_same = True
        bounds = [0, *range(settings.context, rows + 1, settings.rows_per_step)]
        for first, last in itertools.pairwise(bounds):
            began = time.perf_counter()
            local = _draft_in_process(drafter, pages, features, tokens, first, last)
            middle = time.perf_counter()
            before = client.stats.server_seconds
            remote = client.propose(_steps(features, tokens, first, last, config.max_draft_tokens))
            ended = time.perf_counter()
            is_same &= local == [draft.token_ids for draft in remote]
            local_ms.append(1000.0 * (middle - began))
            remote_ms.append(1000.0 * (ended - middle))
            server_ms.append(1000.0 * (client.stats.server_seconds - before))
    finally:
        client.close()
    # The first step takes in the whole context, and the next ones warm up.
    timed = slice(4, None)
    in_process, over_http, in_server = (statistics.median(values[timed]) for values in (local_ms, remote_ms, server_ms))
    return Timing(sessions, in_process, over_http, in_server, is_same)


def _fingerprint(drafter: Drafter) -> TargetFingerprint:
    config = drafter.config
    return TargetFingerprint(
        vocab_size=config.vocab_size,
        hidden_size=config.target_hidden_size,
        num_layers=config.target_num_layers or max(config.target_layer_ids) + 2,
        target_layer_ids=config.target_layer_ids,
    )


def _draft_in_process(
    drafter: Drafter,
    pages: Sequence[Sequence[int]],
    features: Sequence[NDArray[np.float16]],
    tokens: Sequence[Sequence[int]],
    first: int,
    last: int,
) -> list[tuple[int, ...]]:
    drafter.write_context(
        [ContextWrite(own, first, first, torch.from_numpy(rows[first:last])) for own, rows in zip(pages, features, strict=True)]
    )
    count = drafter.config.max_draft_tokens
    requests = [
        DraftRequest(own, last, last, ids[last], count, context_token_ids=ids[:last])
        for own, ids in zip(pages, tokens, strict=True)
    ]
    return [tuple(proposal.token_ids) for proposal in drafter.draft(requests)]


def _steps(
    features: Sequence[NDArray[np.float16]], tokens: Sequence[Sequence[int]], first: int, last: int, count: int
) -> list[SessionStep]:
    return [
        SessionStep(
            session_id=f"bench-{len(features)}-{index}",
            token_ids=ids[first:last],
            features=rows[first:last],
            start=first,
            anchor_token_id=ids[last],
            num_draft_tokens=count,
        )
        for index, (rows, ids) in enumerate(zip(features, tokens, strict=True))
    ]
