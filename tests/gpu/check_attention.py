"""Every attention backend that a CUDA device can run: proven, compared with the reference, and timed fused against flattened.

    python -m tests.gpu.check_attention [--device cuda] [--budget-seconds 270] [--output build/gpu_attention.json]

Three parts, each over float16, bfloat16 and float8 rows beside bfloat16 queries:

    probes    `survey_attention`: each path of each usable backend runs the start-up probe
    checks    ragged batches on shuffled pages in a pool of NaN, lengths around page edges, 1 to 128 heads
    timings   7 slots, 8 heads, a context of 64K, batch 1 to 128: one call over the block against one row per slot

Cells come largest batch last; once the budget is spent the rest is listed under `left_out` and the script ends, so that it
never takes more than five minutes. A cell is flushed out of the device's cache before each run, so bytes come from memory;
plans that are made once per batch are made before. The last line is one JSON document; the exit code is 1 if a check or a
figure failed.

`--device cpu` runs the same on tiny sizes and the CPU's backends. It proves this script and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.backends import BACKENDS, default_backends
from attention.backends.base import AttentionBackend
from attention.block_attention import BlockAttention, BlockMetadata
from attention.cache import PagedKVCache
from attention.capabilities import AttentionProblem
from attention.selector import AttentionSelectionError, Candidate, DecodePath, Selection, select_backend
from attention.survey import survey_attention
from tests.support.attention import make_case, make_problem

_LATENT, _ROPE, _SLOTS, _PAGE_SIZE = 512, 64, 7, 64
_SCALE = 192**-0.5
_FLOAT8 = torch.float8_e4m3fn
_MLA = {"key_dim": _LATENT + _ROPE, "value_dim": _LATENT, "page_size": _PAGE_SIZE}
_GQA = {"kind": "gqa", "num_kv_heads": 2, "key_dim": 128, "value_dim": 128, "page_size": 16}

# name -> dtype of queries, dtype of rows, limit of a difference, limit of the log-sum-exp's
TYPES: Mapping[str, tuple[torch.dtype, torch.dtype, float, float]] = {
    "float16": (torch.float16, torch.float16, 1e-2, 5e-3),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 3e-2, 1e-2),
    "float8": (torch.bfloat16, _FLOAT8, 0.1, 0.1),
}

# name -> what is asked, lengths
CASES: Mapping[str, tuple[Mapping[str, object], tuple[int, ...]]] = {
    "smallest block": ({**_MLA, "draft_block_size": 2, "num_heads": 2}, (10,)),
    "one slot, one head": ({**_MLA, "draft_block_size": 1, "num_heads": 1}, (1, 2, 63, 64, 65)),
    "page edges": ({**_MLA, "draft_block_size": 7, "num_heads": 8}, (7, 63, 64, 65, 127, 128, 129, 191, 192)),
    "ragged with padding": ({**_MLA, "draft_block_size": 7, "num_heads": 16}, (1000, 8, 300, 0, 0)),
    "many heads": ({**_MLA, "draft_block_size": 8, "num_heads": 64}, (8, 129, 500)),
    "most heads": ({**_MLA, "draft_block_size": 7, "num_heads": 128}, (200, 70)),
    "pages of 32": ({**_MLA, "draft_block_size": 4, "num_heads": 9, "page_size": 32}, (31, 32, 33, 300)),
    "window": ({**_MLA, "draft_block_size": 4, "num_heads": 9, "sliding_window": 100}, (4, 103, 104, 105, 700)),
    "grouped heads": ({**_GQA, "draft_block_size": 7, "num_heads": 8}, (7, 15, 16, 17, 600)),
    "grouped heads, window": ({**_GQA, "draft_block_size": 7, "num_heads": 8, "sliding_window": 40}, (7, 46, 47, 48, 600)),
}


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    context: int
    batches: tuple[int, ...]
    num_heads: int
    seconds_per_path: float
    copy_bytes: int
    gemm_size: int


_LARGE_BATCH = 32
ON_GPU = Sizes(65_536, (1, 2, 4, 8, 16, 32, 64, 128), 8, 0.25, 2**31, 8192)
ON_CPU = Sizes(150, (1, 3), 2, 0.0, 2**20, 64)


@dataclass(frozen=True)
class Check:
    """One comparison with the reference; `why` is empty if it holds."""

    backend: str
    path: str
    types: str
    case: str
    why: str


@dataclass(frozen=True)
class Cell:
    """Median times of one backend on one shape, and what the device could do at most."""

    backend: str
    types: str
    batch_size: int
    context: int
    fused_ms: float
    flattened_ms: float
    copy_limit_ms: float
    gemm_limit_ms: float
    why: str

    @property
    def ratio(self) -> float:
        """How much slower flattened is."""
        return self.flattened_ms / self.fused_ms

    @property
    def share_of_copy(self) -> float:
        """Bytes of the rows over fused's time, as a share of the speed of a copy."""
        return self.copy_limit_ms / self.fused_ms


@dataclass
class Report:
    """What was found, in the order it was found."""

    surveys: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Device:
    """The device under test and its clock."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self._is_cuda = device.type == "cuda"
        # Larger than any last-level cache, so that what is timed reads memory.
        self._flush = torch.empty(2**28 if self._is_cuda else 1, dtype=torch.uint8, device=device)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """The median of several runs, each with a cold cache."""
        run()
        first = self._once(run)
        rounds = max(3, min(30, int(1000 * self.sizes.seconds_per_path / max(first, 1e-3))))
        times = sorted(self._once(run) for _ in range(rounds))
        return times[len(times) // 2]

    def limits(self) -> tuple[float, float]:
        """Bytes per ms of a large copy, counted both ways, and operations per ms of a large bfloat16 product."""
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        destination = torch.empty_like(source)
        copy = 2 * source.nbytes / self.milliseconds(lambda: destination.copy_(source))
        size = self.sizes.gemm_size
        left = torch.randn(size, size, device=self.device).to(torch.bfloat16)
        return copy, 2 * size**3 / self.milliseconds(lambda: left @ left)

    def _once(self, run: Callable[[], object]) -> float:
        self._flush.zero_()
        if not self._is_cuda:
            start = time.perf_counter()
            run()
            return 1000 * (time.perf_counter() - start)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))


def problem_of(changes: Mapping[str, object], types: str, device: torch.device) -> AttentionProblem:
    dtype, kv_cache_dtype, _, _ = TYPES[types]
    return make_problem(**{**changes, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "device": device})  # type: ignore[arg-type]


def usable_paths(problem: AttentionProblem, candidate: Candidate) -> tuple[DecodePath, ...]:
    """The paths that a backend claims for a problem; none if it cannot serve it."""
    try:
        best = select_backend(problem, [candidate])
    except AttentionSelectionError:
        return ()
    return tuple(path for path in DecodePath if path is DecodePath.FLATTENED or best.path is DecodePath.FUSED)


def run_case(problem: AttentionProblem, lengths: Sequence[int], attention: BlockAttention, types: str) -> str:
    """Compare with the reference; returns what differs, or nothing."""
    scale = 0.5 if problem.kv_cache_dtype == _FLOAT8 else 1.0
    query, cache, metadata = make_case(problem, lengths, scale=scale)
    softmax_scale = problem.key_dim**-0.5
    reference = BlockAttention(Selection("reference", DecodePath.FUSED), problem)
    expected, expected_lse = reference.forward_with_lse(query, cache, 1, metadata, softmax_scale=softmax_scale)
    _, _, limit, lse_limit = TYPES[types]
    if not attention.returns_lse:
        return difference(attention.forward(query, cache, 1, metadata, softmax_scale=softmax_scale), expected, limit)
    output, lse = attention.forward_with_lse(query, cache, 1, metadata, softmax_scale=softmax_scale)
    return difference(output, expected, limit) or difference(lse, expected_lse, lse_limit, "log-sum-exp: ")


def difference(actual: Tensor, expected: Tensor, limit: float, what: str = "") -> str:
    """Say how far two tensors are apart if any number is off by more than `limit` * (1 + its size); infinities are equal."""
    if actual.shape != expected.shape:
        return f"{what}shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    actual, expected = actual.float(), expected.float()
    is_same = actual == expected
    off = ((actual - expected).abs() / (1 + expected.abs())).masked_fill(is_same, 0)
    largest = float(off.max()) if off.numel() else 0.0
    return "" if largest <= limit else f"{what}off by {largest:.3g}, at most {limit:g} is accepted"


def run_checks(
    device: torch.device,
    candidates: Sequence[Candidate],
    backends: Mapping[str, type[AttentionBackend]],
    cases: Mapping[str, tuple[Mapping[str, object], tuple[int, ...]]] = CASES,
) -> Iterator[Check]:
    """Every case on every path that a backend claims. What a kernel raises is told, not raised."""
    for types in TYPES:
        for candidate in _judged(candidates):
            for case, (changes, lengths) in cases.items():
                problem = problem_of(changes, types, device)
                for path in usable_paths(problem, candidate):
                    try:
                        backend = backends[candidate.name](problem)
                        attention = BlockAttention(Selection(candidate.name, path), problem, backend=backend)
                        why = run_case(problem, lengths, attention, types)
                    except Exception as error:  # noqa: BLE001 -- compilers and loaders have error trees of their own
                        why = f"{type(error).__name__}: {error}"[:500]
                    yield Check(candidate.name, str(path), types, case, why)


def _judged(candidates: Sequence[Candidate]) -> list[Candidate]:
    """All but the judge."""
    return [candidate for candidate in candidates if candidate.name != "reference"]


def fill_pool(problem: AttentionProblem, sizes: Sizes) -> tuple[PagedKVCache, list[range]]:
    """A pool in which every request of the largest batch has pages of its own."""
    pages = -(-sizes.context // problem.page_size)
    batch = max(sizes.batches)
    cache = PagedKVCache.for_problem(problem, num_layers=1, num_pages=1 + batch * pages)
    rows = torch.randn(sizes.context, *problem.row_shape, device=problem.device)
    page_ids = [range(1 + index * pages, 1 + (index + 1) * pages) for index in range(batch)]
    for own in page_ids:
        slots = torch.arange(sizes.context, device=problem.device) + own[0] * problem.page_size
        cache.write(0, slots, rows)
        rows = rows.roll(1, 0)
    return cache, page_ids


def time_types(
    types: str,
    device: Device,
    candidates: Sequence[Candidate],
    backends: Mapping[str, type[AttentionBackend]],
    limits: tuple[float, float],
    report: Report,
    ends_at: float,
) -> None:
    """Time every usable backend on rows of one type, small batches first."""
    sizes = device.sizes
    problem = problem_of({**_MLA, "draft_block_size": _SLOTS, "num_heads": sizes.num_heads}, types, device.device)
    timed = [one for one in _judged(candidates) if DecodePath.FUSED in usable_paths(problem, one)]
    if not timed:
        return
    row_bytes = problem.key_dim * problem.kv_cache_dtype.itemsize
    batches = tuple(batch for batch in sizes.batches if _fits(batch * sizes.context * row_bytes, device.device))
    report.left_out += [f"{types}, batch {batch}: no memory" for batch in sizes.batches if batch not in batches]
    if not batches:
        return
    cache, page_ids = fill_pool(problem, replace(sizes, batches=batches))
    query = torch.randn(max(batches), _SLOTS, problem.num_heads, problem.key_dim, device=device.device).to(problem.dtype)
    for batch in batches:
        metadata = BlockMetadata.build(page_ids[:batch], [sizes.context] * batch, problem.page_size, device.device)
        for candidate in timed:
            if time.monotonic() > ends_at:
                report.left_out.append(f"{candidate.name}, {types}, batch {batch}: out of time")
                continue
            try:
                times, why = _time_paths(
                    device, problem, backends[candidate.name](problem), candidate.name, query[:batch], cache, metadata, types
                )
            except Exception as error:  # noqa: BLE001 -- compilers and loaders have error trees of their own
                times, why = {path: float("inf") for path in DecodePath}, f"{type(error).__name__}: {error}"[:500]
            visits = batch * sizes.context
            flops = 2.0 * visits * _SLOTS * problem.num_heads * (problem.key_dim + problem.value_dim)
            cell = Cell(
                candidate.name,
                types,
                batch,
                sizes.context,
                times[DecodePath.FUSED],
                times[DecodePath.FLATTENED],
                visits * row_bytes / limits[0],
                flops / limits[1],
                why,
            )
            report.cells.append(cell)
            _say(_line(cell))


def _time_paths(
    device: Device,
    problem: AttentionProblem,
    backend: AttentionBackend,
    name: str,
    query: Tensor,
    cache: PagedKVCache,
    metadata: BlockMetadata,
    types: str,
) -> tuple[dict[DecodePath, float], str]:
    """The times of both paths, and how their outputs differ."""
    times, outputs = {}, []
    for path in DecodePath:
        attention = BlockAttention(Selection(name, path), problem, backend=backend)

        def run(attention: BlockAttention = attention) -> Tensor:
            return attention.forward(query, cache, 0, metadata, softmax_scale=_SCALE)

        outputs.append(run())
        times[path] = device.milliseconds(run)
    return times, difference(outputs[0], outputs[1], TYPES[types][2], "fused and flattened differ: ")


def figures(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What is to be reached, of the backend that is fastest on the largest batch of each type."""
    found: list[dict[str, Any]] = []
    for types in TYPES:
        large = [cell for cell in cells if cell.types == types and cell.batch_size >= _LARGE_BATCH and not cell.why]
        if not large:
            continue
        most = max(cell.batch_size for cell in large)
        best = min((cell for cell in large if cell.batch_size == most), key=lambda cell: cell.fused_ms).backend
        own = [cell for cell in large if cell.backend == best]
        for what, value, goal in (
            ("flattened / fused, batch 32 and above", min(cell.ratio for cell in own), 5.0),
            ("share of copy bandwidth, batch 32 and above", min(cell.share_of_copy for cell in own), 0.6),
        ):
            found.append({"name": f"{types}, {best}: {what}", "value": round(value, 3), "to_reach": goal, "ok": value >= goal})
    return found


def _fits(num_bytes: int, device: torch.device) -> bool:
    return device.type != "cuda" or num_bytes < 0.8 * torch.cuda.mem_get_info(device)[0]


def _line(cell: Cell) -> str:
    times = f"{cell.fused_ms:10.3f} {cell.flattened_ms:10.3f} {cell.ratio:6.2f}x {cell.share_of_copy:6.0%}"
    return f"{cell.backend:15} {cell.types:9} batch {cell.batch_size:4} {times} {cell.why}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


@torch.inference_mode()
def check(
    device_name: str,
    budget_seconds: float,
    backends: Mapping[str, type[AttentionBackend]] = BACKENDS,
    cases: Mapping[str, tuple[Mapping[str, object], tuple[int, ...]]] = CASES,
) -> dict[str, Any]:
    """Run everything; returns the JSON document."""
    started = time.monotonic()
    device = torch.device(device_name)
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    report, candidates = Report(), default_backends(backends)
    for types in TYPES:
        problem = problem_of({**_MLA, "draft_block_size": _SLOTS, "num_heads": sizes.num_heads}, types, device)
        for own in survey_attention(problem, candidates=candidates, backends=backends).backends:
            probes = {str(path): said for path, said in own.probes.items()}
            report.surveys.append({"types": types, **asdict(replace(own, probes={})), "probes": probes})
            _say(f"{types:9} {own.backend:15} {own.verdict}: {'; '.join(own.reasons) or probes}")
    for found in run_checks(device, candidates, backends, cases):
        report.checks.append(found)
        if found.why:
            _say(f"DIFFERS {found.types} {found.backend} {found.path}, {found.case}: {found.why}")
    _say(f"{len(report.checks)} checks, {sum(bool(found.why) for found in report.checks)} of them failed")

    clock = Device(device, sizes)
    limits = clock.limits()
    _say(f"{'backend':15} {'types':9} {'':10} {'fused ms':>10} {'flat. ms':>10} {'ratio':>7} {'of copy':>6}")
    for types in TYPES:
        time_types(types, clock, candidates, backends, limits, report, started + budget_seconds)
    reached = figures(report.cells)
    for figure in reached:
        _say(f"{figure['name']}: {figure['value']}, to reach {figure['to_reach']}: {'yes' if figure['ok'] else 'NO'}")
    # Goals that nothing was timed for were not reached.
    is_judged = bool(reached) or max(sizes.batches) < _LARGE_BATCH
    is_right = not any(found.why for found in report.checks) and not any(cell.why for cell in report.cells)
    return {
        "check": "gpu_attention",
        "ok": bool(report.checks) and is_right and is_judged and all(figure["ok"] for figure in reached),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "versions": {
            name: _version_of(name) for name in ("torch", "triton", "flashinfer-python", "flash-mla", "tokenspeed-mla")
        },
        "copy_gbytes_s": limits[0] / 1e6,
        "gemm_tflops": limits[1] / 1e9,
        "surveys": report.surveys,
        "checks": [asdict(found) for found in report.checks],
        "cells": [{**asdict(cell), "ratio": cell.ratio, "share_of_copy": cell.share_of_copy} for cell in report.cells],
        "figures": reached,
        "left_out": report.left_out,
        "seconds": round(time.monotonic() - started, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is found and one line of JSON, and write the JSON; 1 if a check or a figure failed."""
    parser = argparse.ArgumentParser(description="attention backends on a CUDA device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-seconds", type=float, default=270.0)
    parser.add_argument("--output", type=Path, default=Path("build/gpu_attention.json"))
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.stderr.write("there is no CUDA device; --device cpu tries the script out\n")
        return 2
    found = check(options.device, options.budget_seconds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    _say(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
