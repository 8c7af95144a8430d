"""What the metrics say of the start-up."""

from __future__ import annotations

from service.metrics import EngineMetrics
from service.testing import FakeDrafter


def test_a_layer_that_is_flattened_shows() -> None:
    metrics = EngineMetrics()
    backends, paths = ("triton", "triton", "reference"), ("fused", "flattened", "fused")
    facts = FakeDrafter().facts.model_copy(update={"attention_backends": backends, "decode_paths": paths})
    metrics.describe("1.0")
    metrics.describe_draft(facts, "1-fake")
    metrics.describe_draft(facts, "2-fake")
    lines = metrics.exposition().decode().splitlines()
    assert 'draft_engine_attention_layers{backend="triton",path="flattened"} 1.0' in lines
    assert 'draft_engine_attention_layers{backend="triton",path="fused"} 1.0' in lines
    assert 'draft_engine_attention_layers{backend="reference",path="fused"} 1.0' in lines
    (version,) = [line for line in lines if line.startswith("draft_engine_version_info")]
    assert 'version="1.0"' in version
    assert 'draft_version="2-fake"' in version
