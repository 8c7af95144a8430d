"""Fused against flattened decode of draft blocks on this CPU, and dense SDPA beside them.

Fused reads a request's rows once, flattened once per slot; how much that saves depends on what the products cost. Each cell
also says how close fused comes to the limit of the machine: the larger of its arithmetic at the speed of a large matrix
product and its bytes at the speed of a large copy, both measured just before it.

The three ways of a cell take turns, so that whatever else the machine does hits all of them, and the quartile that other
processes disturb least is reported. `--quick` runs the cells that the figures are about.

    python -m tests.bench.bench_attention [--quick] [--output build/bench_attention.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from attention.block_attention import BlockAttention, BlockMetadata
from attention.cache import PagedKVCache
from attention.capabilities import AttentionProblem
from attention.selector import DecodePath, Selection
from service.figures import Figure, write_figures

_LATENT, _ROPE, _SLOTS, _PAGE_SIZE = 512, 64, 7, 64
_SCALE = 192**-0.5
_MIN_ROUNDS, _CELL_SECONDS = 5, 1.5
# The embedded drafter's own block: a lone request on a short context.
_SERVED_HEADS, _SERVED_SLOTS, _SERVED_CONTEXTS = 9, 3, (300, 2000)

_HEADER = (
    "dtype     heads slots batch context    fused ms  flattened ms  dense SDPA ms  flat/fused  of limit  us/query row"
    "  GFLOP/s  GB/s"
)


@dataclass(frozen=True)
class Machine:
    """What the machine can do at most, as measured."""

    gemm_gflops: float
    copy_gbytes_s: float

    def limit_ms(self, flops: float, num_bytes: float) -> float:
        """The shortest time for some arithmetic over some bytes."""
        return max(flops / self.gemm_gflops, num_bytes / self.copy_gbytes_s) / 1e6


@dataclass(frozen=True)
class Cell:
    """Lower quartile times of one shape."""

    dtype: str
    num_heads: int
    num_slots: int
    batch_size: int
    context: int
    rounds: int
    fused_ms: float
    flattened_ms: float
    dense_ms: float
    limit_ms: float
    machine: Machine

    @property
    def ratio(self) -> float:
        """How much slower flattened is."""
        return self.flattened_ms / self.fused_ms

    @property
    def share_of_limit(self) -> float:
        """The limit's time over fused's."""
        return self.limit_ms / self.fused_ms

    @property
    def us_per_query_row(self) -> float:
        """Fused time of one slot of one request."""
        return 1000 * self.fused_ms / (self.batch_size * self.num_slots)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _take_turns(runs: Sequence[Callable[[], object]]) -> tuple[list[float], int]:
    """The lower quartile of each, in milliseconds, and the number of rounds."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    started = time.perf_counter()
    while len(times[0]) < _MIN_ROUNDS or (time.perf_counter() - started < _CELL_SECONDS and len(times[0]) < 400):
        for run, own in zip(runs, times, strict=True):
            own.append(_seconds(run))
    return [1000 * sorted(own)[len(own) // 4] for own in times], len(times[0])


def measure_machine() -> Machine:
    """A large matrix product in float32 and a large copy."""
    size = 1536
    left, right = torch.randn(size, size), torch.randn(size, size)
    product = min(_seconds(lambda: torch.mm(left, right)) for _ in range(4))
    source = torch.ones(2**26)
    destination = torch.empty_like(source)
    copy = min(_seconds(lambda: destination.copy_(source)) for _ in range(4))
    return Machine(2 * size**3 / product / 1e9, 2 * source.nbytes / copy / 1e9)


def measure_cell(dtype: torch.dtype, num_heads: int, num_slots: int, batch_size: int, context: int) -> Cell:
    """Time one shape; every request has pages of its own."""
    problem = AttentionProblem(
        kind="mla",
        draft_block_size=num_slots,
        num_heads=num_heads,
        num_kv_heads=1,
        key_dim=_LATENT + _ROPE,
        value_dim=_LATENT,
        dtype=dtype,
        kv_cache_dtype=dtype,
        page_size=_PAGE_SIZE,
        device=torch.device("cpu"),
    )
    pages = -(-context // _PAGE_SIZE)
    cache = PagedKVCache.for_problem(problem, num_layers=1, num_pages=1 + batch_size * pages)
    cache.pages(0).normal_()
    page_ids = [range(1 + index * pages, 1 + (index + 1) * pages) for index in range(batch_size)]
    metadata = BlockMetadata.build(page_ids, [context] * batch_size, _PAGE_SIZE, "cpu")
    query = torch.randn(batch_size, num_slots, num_heads, problem.key_dim).to(dtype)
    fused, flattened = (BlockAttention(Selection("torch_cpu", path), problem) for path in DecodePath)

    rows = torch.stack([cache.rows(0)[own[0] * _PAGE_SIZE :][:context] for own in page_ids]).unsqueeze(1)
    folded = query.view(batch_size, 1, num_slots * num_heads, -1)
    machine = measure_machine()
    times, rounds = _take_turns(
        [
            lambda: fused.forward(query, cache, 0, metadata, softmax_scale=_SCALE),
            lambda: flattened.forward(query, cache, 0, metadata, softmax_scale=_SCALE),
            lambda: F.scaled_dot_product_attention(folded, rows, rows[..., :_LATENT], scale=_SCALE),
        ]
    )
    visits = batch_size * context
    flops = 2.0 * visits * num_slots * num_heads * (problem.key_dim + _LATENT)
    limit_ms = machine.limit_ms(flops, visits * problem.key_dim * dtype.itemsize)
    name = str(dtype).removeprefix("torch.")
    return Cell(name, num_heads, num_slots, batch_size, context, rounds, times[0], times[1], times[2], limit_ms, machine)


def _figures(cells: Sequence[Cell]) -> list[Figure]:
    """What is to be reached, and whether it was."""
    grid = [cell for cell in cells if cell.num_slots == _SLOTS]
    (key,) = [cell for cell in grid if (cell.dtype, cell.num_heads, cell.batch_size, cell.context) == ("float32", 8, 8, 4096)]
    rows: list[tuple[str, float, str, float | None]] = [
        ("smallest flattened / fused", min(cell.ratio for cell in grid), "x", 1.0),
        ("flattened / fused at 8 heads, batch 8, context 4k, float32", key.ratio, "x", 1.5),
        ("share of the machine's limit at 8 heads, batch 8, context 4k, float32", key.share_of_limit, "", 0.6),
    ]
    rows += [
        (
            f"fused, one request, {_SERVED_SLOTS} slots, {_SERVED_HEADS} heads, context {cell.context}, float32",
            1000 * cell.fused_ms,
            "us",
            None,
        )
        for cell in cells
        if cell.num_slots == _SERVED_SLOTS
    ]
    return [Figure(name, value, unit, goal) for name, value, unit, goal in rows]


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _line(cell: Cell) -> str:
    shape = f"{cell.dtype:9} {cell.num_heads:5} {cell.num_slots:5} {cell.batch_size:5} {cell.context:7}"
    times = f"{cell.fused_ms:11.3f} {cell.flattened_ms:13.3f} {cell.dense_ms:14.3f}"
    rates = f"{cell.machine.gemm_gflops:8.0f} {cell.machine.copy_gbytes_s:5.1f}"
    return f"{shape} {times} {cell.ratio:9.2f}x {cell.share_of_limit:9.0%} {cell.us_per_query_row:13.1f} {rates}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and one line of JSON, and write the JSON; 1 if a figure is not reached."""
    parser = argparse.ArgumentParser(description="fused against flattened decode on a CPU")
    parser.add_argument("--quick", action="store_true", help="only the cells that the figures are about")
    parser.add_argument("--output", type=Path, default=Path("build/bench_attention.json"))
    options = parser.parse_args(arguments)

    dtypes = [torch.float32] if options.quick else [torch.float32, torch.bfloat16]
    heads, batches, contexts = ([8], [1, 8], [1024, 4096]) if options.quick else ([8, 16], [1, 8, 32], [1024, 4096, 16384])
    shapes = [(torch.float32, _SERVED_HEADS, _SERVED_SLOTS, 1, context) for context in _SERVED_CONTEXTS]
    shapes += [(dtype, h, _SLOTS, b, c) for dtype, h, b, c in itertools.product(dtypes, heads, batches, contexts)]

    _say(_HEADER)
    cells = []
    with torch.inference_mode():
        for shape in shapes:
            cell = measure_cell(*shape)
            cells.append(cell)
            _say(_line(cell))
    figures = _figures(cells)
    for figure in figures:
        goal = "" if figure.to_reach is None else f", to reach {figure.to_reach}: {'yes' if figure.ok else 'NO'}"
        _say(f"{figure.name}: {figure.value:.3f} {figure.unit}{goal}")
    details = {
        "bench": "attention",
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
        "num_threads": torch.get_num_threads(),
        "cells": [asdict(cell) for cell in cells],
    }
    write_figures(options.output, figures, details)
    _say(json.dumps(json.loads(options.output.read_text())))
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
