"""Run our Triton kernels in Triton's interpreter and compare them with the reference.

A script of its own, because the interpreter must be chosen before the first import of triton and then holds for the whole
process. Prints one JSON object: the largest difference of output and of log-sum-exp for each case, or what was raised.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from attention.backends.triton_decode import TritonBackend
from attention.block_attention import BlockAttention
from attention.capabilities import AttentionProblem
from attention.probe import prove
from attention.selector import DecodePath, Selection
from tests.support.attention import make_attention, make_case, make_problem

_FP32, _FP16, _FP8 = torch.float32, torch.float16, torch.float8_e4m3fn

# name -> what differs from make_problem, lengths, splits
CASES: dict[str, tuple[dict[str, object], list[int], int]] = {
    "mla": ({}, [4, 5, 9], 1),
    "mla, keys in three spans, some of them empty": ({}, [4, 33, 130], 3),
    "mla, float16": ({"dtype": _FP16, "kv_cache_dtype": _FP16}, [4, 40], 2),
    "mla, float8 rows": ({"dtype": _FP16, "kv_cache_dtype": _FP8}, [7, 40], 2),
    "mla, window": ({"sliding_window": 3}, [4, 21], 2),
    "mla, no tail, one head": ({"key_dim": 16, "num_heads": 1}, [5], 1),
    "mla, padding request": ({}, [0, 6, 0], 2),
    "mla, more rows than one tile": ({"draft_block_size": 3, "num_heads": 24}, [9], 1),
    "gqa": ({"kind": "gqa"}, [4, 5, 9], 1),
    "gqa, keys in two spans": ({"kind": "gqa", "page_size": 16}, [4, 70], 2),
    "gqa, float8 rows, window": ({"kind": "gqa", "dtype": _FP16, "kv_cache_dtype": _FP8, "sliding_window": 5}, [4, 23], 1),
    "gqa, head dim not a power of two": ({"kind": "gqa", "key_dim": 24, "value_dim": 24}, [6], 1),
}


def _problem(changes: dict[str, object]) -> AttentionProblem:
    return make_problem(**{"draft_block_size": 2, "num_heads": 4, **changes})  # type: ignore[arg-type]


def _differences(name: str) -> dict[str, list[float]]:
    changes, lengths, num_splits = CASES[name]
    problem = _problem(changes)
    scale = 0.5 if problem.kv_cache_dtype == _FP8 else 1.0
    value_scale = 0.25 if problem.kv_cache_dtype == _FP8 and problem.kind == "gqa" else scale
    query, cache, metadata = make_case(problem, lengths, scale=scale, value_scale=value_scale)
    expected = make_attention(problem, "reference").forward_with_lse(query, cache, 1, metadata, softmax_scale=0.3)
    differences = {}
    for path in DecodePath:
        backend = TritonBackend(problem, num_splits=num_splits)
        attention = BlockAttention(Selection("triton", path), problem, backend=backend)
        actual = attention.forward_with_lse(query, cache, 1, metadata, softmax_scale=0.3)
        differences[path.value] = [_largest(one, two) for one, two in zip(actual, expected, strict=True)]
    return differences


def _largest(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; infinities must be the same."""
    difference = (actual.float() - expected.float()).abs()
    return float(difference.masked_fill(actual.float() == expected.float(), 0).max())


def _results() -> Iterator[tuple[str, object]]:
    for name in CASES:
        try:
            yield name, _differences(name)
        except Exception as error:  # noqa: BLE001 -- told to the test
            yield name, f"{type(error).__name__}: {error}"
    for kind in ("mla", "gqa"):
        for path in DecodePath:
            problem = _problem({"kind": kind, "page_size": 16, "num_heads": 2})
            yield f"probe, {kind}, {path}", prove(Selection("triton", path), problem) or "proven"


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("TRITON_INTERPRET=1 is needed")
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(dict(_results()), allow_nan=True, default=lambda value: math.nan) + "\n")
