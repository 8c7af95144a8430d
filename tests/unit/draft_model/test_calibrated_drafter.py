"""A drafter with `calibration.json` beside its checkpoint: other confidences, the same drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draft_model.calibration import Calibration, save_calibration
from draft_model.checkpoint import fingerprint
from draft_model.drafter import ContextWrite, Drafter, DraftProposal, DraftRequest
from draft_model.errors import CheckpointError
from tests.support.draft_model import make_tiny_drafter

TEMPERATURES = (0.5, 2.0, 1.0, 3.0)


def draft(folder: Path, count: int) -> DraftProposal:
    drafter = Drafter.load(folder, kv_cache_memory=2**20, page_size=16)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(10, drafter.config.feature_width, generator=generator)
    drafter.write_context([ContextWrite([1, 2], 0, 0, features)])
    (proposal,) = drafter.draft([DraftRequest([1, 2], 10, 10, 7, count)])
    return proposal


@pytest.mark.parametrize("count", [4, 2])
def test_confidence_is_scaled_and_nothing_else(tmp_path: Path, count: int) -> None:
    folder = make_tiny_drafter(tmp_path / "tiny")
    before = draft(folder, count)
    save_calibration(folder, Calibration(TEMPERATURES, (1.0,) * 4, "a", 100, fingerprint(folder)))
    after = draft(folder, count)
    assert after.token_ids == before.token_ids
    expected = torch.sigmoid(torch.logit(torch.tensor(before.confidence).double()) / torch.tensor(TEMPERATURES[:count]))
    assert after.confidence == pytest.approx(expected.tolist(), abs=1e-5)
    assert after.survival == pytest.approx(expected.cumprod(0).tolist(), abs=1e-5)


def test_the_file_is_no_part_of_the_fingerprint_and_belongs_to_its_weights(tmp_path: Path) -> None:
    folder, other = make_tiny_drafter(tmp_path / "tiny"), make_tiny_drafter(tmp_path / "other", seed=1)
    before = fingerprint(folder)
    save_calibration(folder, Calibration(TEMPERATURES, (1.0,) * 4, "a", 100, fingerprint(other)))
    assert fingerprint(folder) == before
    with pytest.raises(CheckpointError, match=r"calibration\.json belongs to other weights"):
        Drafter.load(folder, kv_cache_memory=2**20, page_size=16)


def test_a_drafter_without_a_confidence_head_has_nothing_to_scale(tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "tiny", enable_confidence_head=False)
    save_calibration(folder, Calibration(TEMPERATURES, (1.0,) * 4, "a", 100, "any"))
    assert draft(folder, 4).confidence == []
