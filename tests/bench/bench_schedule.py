"""How many drafts to verify: plain decoding, all drafts, a threshold and the measured step times, at three loads in one run.

The target runs in this process and the drafter in a server beside it, as in the demo. At each load the ways take turns,
round after round with the same prompts, so that whatever else the machine does hits all of them. The median round is
reported; a round before them warms up. `hardware` and `useless` have drafting turned off where it does not pay, and the
drafts of `useless` are wrong on purpose.

    python -m tests.bench.bench_schedule [--rounds 3] [--max-tokens 64] [--output build/bench_schedule.json]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import queue
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draft_engine_client.client import DraftClient
from draft_engine_client.payoff import Payoff
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.state import ClientStats
from draft_engine_client.wire import TargetFingerprint, VerifySchedule
from draft_model.config import DraftConfig
from draft_model.formats import load_config
from draft_model.target_model import TargetModel
from service.errors import StartupError
from service.figures import Figure, write_figures
from service.prompts import DEMO_PROMPTS
from service.shipped import shipped_drafter
from service.subprocesses import server_process
from service.target.distribution import TargetSampling
from service.target.engine import TargetEngine, TargetEngineLimits
from service.target.schedule import measure_step_times
from service.target.sequences import Chunk, DraftCounts, GenerationRequest
from service.target.text import TargetTokenizer
from service.target.weights import default_cache_dir, ensure_target

LOADS = (1, 4, 16)
WAYS = ("plain", "fixed", "threshold", "hardware", "useless")
RIVALS = ("plain", "fixed", "threshold")
GOAL_AGAINST_BEST = 0.97
GOAL_USELESS = 0.97
_THRESHOLD = 0.3
_DEADLINE_MS = 200.0


@dataclass
class Measured:
    """Rounds of one way at one load: tokens per second of each, and what drafting did in all of them."""

    tokens_per_second: list[float] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second of the median round."""
        return statistics.median(self.tokens_per_second)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed by a sequence in a step."""
        return 1.0 + self.accepted / max(self.rounds, 1)

    @property
    def verified_tokens(self) -> float:
        """Tokens that a sequence had verified in a step, its anchor included."""
        return 1.0 + self.proposed / max(self.rounds, 1)

    def add(self, counts: Sequence[DraftCounts], tokens: int, seconds: float) -> None:
        """Take in a round."""
        self.tokens_per_second.append(tokens / seconds)
        self.tokens += tokens
        self.rounds += sum(one.rounds for one in counts)
        self.proposed += sum(one.proposed for one in counts)
        self.accepted += sum(one.accepted for one in counts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="draft checkpoint; default: the drafter that ships")
    parser.add_argument("--target-model", type=Path, help="its target; default: the embedded target")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("build/bench_schedule.json"))
    options = parser.parse_args(argv)
    console = Console(highlight=False, width=120)
    path = options.model or shipped_drafter()
    target_path = options.target_model or ensure_target(default_cache_dir(), console.print)
    config, model, tokenizer = load_config(path), TargetModel.load(target_path), TargetTokenizer(target_path)
    width = config.max_draft_tokens
    arguments = ["serve", "--port", "0", "--model", str(path), "--target-model", str(target_path)]
    log = options.output.parent / "logs" / "bench-schedule-draft.log"
    with server_process(arguments, log) as server, contextlib.ExitStack() as stack:
        step_times = measure_step_times(model, max_batch=max(LOADS), max_width=1 + width)
        schedules = {
            "plain": None,
            "fixed": None,
            "threshold": VerifySchedule(kind="threshold", threshold=_THRESHOLD, is_padded=True),
            "hardware": VerifySchedule(kind="hardware", step_times=step_times, is_padded=True),
            "useless": None,
        }
        engines = {way: stack.enter_context(_engine(model, tokenizer, config, server.url, way, schedules[way])) for way in WAYS}
        measured = {(load, way): Measured() for load in LOADS for way in WAYS}
        prompts = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": p.text}])) for p in DEMO_PROMPTS]
        for load in LOADS:
            # The round before the first one warms up: caches, connections and what the payoff has to learn.
            for number in range(options.rounds + 1):
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    asked = 0 if way == "plain" else width
                    counts, tokens, seconds = _run(engines[way], prompts, load, asked, options.max_tokens)
                    if number:
                        measured[load, way].add(counts, tokens, seconds)
        net_saved = engines["hardware"].payoff
    _print_table(measured, console)
    figures = _figures(measured)
    details = {
        "model": str(path),
        "num_draft_tokens": width,
        "step_ms": dict(zip(step_times.num_tokens, (1000 * value for value in step_times.seconds), strict=True)),
        "net_saved_seconds": net_saved.net_saved_seconds if net_saved is not None else None,
    }
    write_figures(options.output, figures, details)
    console.print(f"figures in {options.output}")
    return 0


@contextlib.contextmanager
def _engine(
    model: TargetModel,
    tokenizer: TargetTokenizer,
    config: DraftConfig,
    url: str,
    way: str,
    schedule: VerifySchedule | None,
) -> Iterator[TargetEngine]:
    fingerprint = TargetFingerprint(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
        target_layer_ids=config.target_layer_ids,
    )
    client = DraftClient(ClientSettings(url, step_deadline_ms=_DEADLINE_MS), fingerprint, schedule=schedule)
    client.start()
    engine = TargetEngine(
        model,
        tokenizer,
        _Useless(client, model.config.vocab_size) if way == "useless" else client,
        target_layer_ids=config.target_layer_ids,
        limits=TargetEngineLimits(max_batch=max(LOADS), max_waiting=2 * max(LOADS), max_context=1024),
        payoff=Payoff() if way in ("hardware", "useless") else None,
    )
    engine.start()
    try:
        if not client.wait_connected(30.0):
            raise StartupError(f"the draft server at {url} cannot be used: {client.refusal}")
        yield engine
    finally:
        engine.stop()
        client.close()


class _Useless:
    """A real draft server whose drafts are made wrong on purpose: they cost what drafts cost, and help nobody."""

    def __init__(self, client: DraftClient, vocab_size: int) -> None:
        self._client, self._vocab_size = client, vocab_size

    @property
    def stats(self) -> ClientStats:
        return self._client.stats

    def propose(self, steps: Sequence[SessionStep]) -> list[Drafts]:
        answers = self._client.propose(steps)
        return [
            replace(one, token_ids=tuple((token + 1 + place) % self._vocab_size for place, token in enumerate(one.token_ids)))
            for one in answers
        ]

    def finish(self, session_ids: Sequence[str]) -> None:
        self._client.finish(session_ids)


_numbers = itertools.count()


def _run(
    engine: TargetEngine, prompts: Sequence[Sequence[int]], load: int, num_draft_tokens: int, max_tokens: int
) -> tuple[list[DraftCounts], int, float]:
    """Answer `load` prompts at once, greedily and to their full length; returns counts, tokens and seconds."""
    chunks: queue.Queue[Chunk] = queue.Queue()
    began = time.perf_counter()
    for index in range(load):
        prompt = tuple(prompts[index % len(prompts)])
        request_id = f"bench-{next(_numbers)}"
        sampling = TargetSampling(temperature=0.0)
        engine.submit(
            GenerationRequest(request_id, prompt, max_tokens, sampling, num_draft_tokens=num_draft_tokens), chunks.put
        )
    counts: list[DraftCounts] = []
    tokens = 0
    while len(counts) < load:
        chunk = chunks.get(timeout=600)
        tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            counts.append(chunk.counts or DraftCounts())
    return counts, tokens, time.perf_counter() - began


def _print_table(measured: dict[tuple[int, str], Measured], console: Console) -> None:
    table = Table(title="greedy decoding, prompts included")
    for title in ("requests", "way", "tokens/s", "acceptance length", "verified per step"):
        table.add_column(title, justify="left" if title == "way" else "right")
    for (load, way), one in measured.items():
        numbers = (f"{one.speed:.1f}", f"{one.acceptance_length:.2f}", f"{one.verified_tokens:.2f}")
        table.add_row(str(load), way, *numbers, end_section=way == WAYS[-1])
    console.print(table)


def _figures(measured: dict[tuple[int, str], Measured]) -> list[Figure]:
    figures = []
    for load in LOADS:
        for way in WAYS:
            one = measured[load, way]
            figures += [
                Figure(f"tokens_per_second_{load}_{way}", one.speed, "tokens/s"),
                Figure(f"acceptance_length_{load}_{way}", one.acceptance_length, "tokens"),
                Figure(f"verified_tokens_{load}_{way}", one.verified_tokens, "tokens"),
            ]
        hardware, _useless = (measured[load, way].speed for way in ("hardware", "useless"))
        best = max(measured[load, way].speed for way in RIVALS)
        figures += [
            Figure(f"hardware_against_best_{load}", hardware / best, "", GOAL_AGAINST_BEST),
            Figure(f"hardware_against_plain_{load}", hardware / measured[load, "plain"].speed, "", 1.0),
            Figure(
                f"useless_against_plain_{load}",
                measured[load, "useless"].speed / measured[load, "plain"].speed,
                "",
                GOAL_USELESS,
            ),
        ]
    return figures


if __name__ == "__main__":
    sys.exit(main())
