"""Served drafters against the float64 oracle, far from position 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.draft_model import TinySession, load_drafter, make_features, make_tiny_drafter, read_checkpoint
from tests.support.draft_oracle import MlaOracle, Oracle

# The published shape of the scaling, with a short original length.
YARN = {
    "rope_type": "yarn", "rope_theta": 50_000.0, "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def assert_equals_oracle(folder: Path, oracle: Oracle, *, first_position: int, backend: str = "torch_cpu") -> None:
    drafter = load_drafter(folder, attention_backend=backend)
    session = TinySession(drafter, [5, 2, 9, 4], position=first_position)
    features = make_features(drafter, 7, seed=first_position)
    session.write(features)
    request = session.request(17)
    (proposal,) = drafter.draft([request])
    tokens, confidences, _ = oracle.draft(features.double().numpy(), first_position, 17)
    states = torch.from_numpy(np.stack(oracle.block_states(features.double().numpy(), first_position, 17)))
    torch.testing.assert_close(drafter._block_states([request]).double(), states, atol=1e-4, rtol=0)
    assert proposal.token_ids == tokens
    assert proposal.confidence == pytest.approx(confidences, abs=1e-5)


@pytest.mark.parametrize("first_position", [0, 60, 2_000])
@pytest.mark.parametrize("rope", [None, YARN, {**YARN, "mscale_all_dim": 0.5}])
def test_mla_drafts_equal_the_oracle(tmp_path: Path, rope: dict[str, Any] | None, first_position: int) -> None:
    changes: dict[str, Any] = {} if rope is None else {"rope_parameters": rope}
    folder = make_tiny_drafter(tmp_path, **changes)
    config, tensors = read_checkpoint(folder)
    oracle = MlaOracle(config, {name: tensor.double().numpy() for name, tensor in tensors.items()})
    assert_equals_oracle(folder, oracle, first_position=first_position)
