"""What the metrics say of the start-up."""

from __future__ import annotations

from service.metrics import EngineMetrics


def test_a_layer_that_is_flattened_shows() -> None:
    metrics = EngineMetrics()
    metrics.describe_attention(("triton", "triton", "reference"), ("fused", "flattened", "fused"))
    lines = metrics.exposition().decode().splitlines()
    assert 'draft_engine_attention_layers{backend="triton",path="flattened"} 1.0' in lines
    assert 'draft_engine_attention_layers{backend="triton",path="fused"} 1.0' in lines
    assert 'draft_engine_attention_layers{backend="reference",path="fused"} 1.0' in lines
