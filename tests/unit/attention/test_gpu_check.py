"""The script for GPUs on a CPU: it finds what is planted, and says what it left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor

from attention.backends import BACKENDS
from attention.backends.base import AttentionBackend
from attention.backends.torch_cpu import TorchCpuBackend
from attention.cache import PagedKVCache
from attention.metadata import BlockMetadata
from tests.gpu.check_attention import CASES, Cell, check, figures, main

_FEW = {name: CASES[name] for name in ("smallest block", "grouped heads")}


class _LosesRows(TorchCpuBackend):
    """Right on short contexts, so the probe passes."""

    name: ClassVar[str] = "planted"

    def decode(
        self,
        query: Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: BlockMetadata,
        *,
        softmax_scale: float,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        seen = BlockMetadata(
            metadata.page_ids,
            tuple(length if length < 500 else length // 4 for length in metadata.lengths),
            metadata.page_size,
            metadata.device,
        )
        return super().decode(query, cache, layer, seen, softmax_scale=softmax_scale, return_lse=return_lse)


def test_what_is_right_passes_and_ends_in_json() -> None:
    found = check("cpu", 60.0, {"torch_cpu": TorchCpuBackend, "reference": BACKENDS["reference"]}, _FEW)
    assert found["ok"]
    assert len(found["checks"]) == 3 * 2 * 2  # types, cases, paths
    assert {(cell["types"], cell["batch_size"]) for cell in found["cells"]} == {
        (types, batch) for types in ("float16", "bfloat16", "float8") for batch in (1, 3)
    }
    assert all(cell["fused_ms"] > 0 and cell["flattened_ms"] > 0 and not cell["why"] for cell in found["cells"])
    assert {survey["verdict"] for survey in found["surveys"]} == {"chosen, fused", "usable, fused"}
    json.loads(json.dumps(found, allow_nan=False))


def test_what_is_wrong_is_found_although_its_probe_passes() -> None:
    backends: Mapping[str, type[AttentionBackend]] = {"planted": _LosesRows}
    found = check("cpu", 0.0, backends, _FEW)
    assert not found["ok"]
    assert {(own["case"], "off by" in own["why"]) for own in found["checks"]} == {
        ("smallest block", False),
        ("grouped heads", True),
    }
    assert found["cells"] == []
    assert "planted, float16, batch 1: out of time" in found["left_out"]


def test_figures_are_those_of_the_fastest_backend_on_the_largest_batch() -> None:
    def cell(backend: str, batch: int, fused: float, flattened: float, why: str = "") -> Cell:
        return Cell(backend, "bfloat16", batch, 65536, fused, flattened, 1.0, 0.1, why)

    cells = [cell("slow", 128, 3.0, 30.0), cell("fast", 128, 2.0, 12.0), cell("fast", 32, 1.25, 5.0), cell("fast", 8, 9.0, 9.0)]
    found = figures([*cells, cell("wrong", 128, 0.1, 1.0, "off")])
    assert [(figure["value"], figure["ok"]) for figure in found] == [(4.0, False), (0.5, False)]
    assert all(figure["name"].startswith("bfloat16, fast") for figure in found)


def test_without_a_device_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--output", str(tmp_path / "out.json")]) == 2
    assert not (tmp_path / "out.json").exists()
