"""The canary: a drafter that would draft garbage is found before it serves, and one as recorded is not suspected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_model.drafter import Drafter, DraftProposal, DraftRequest
from draft_model.errors import CheckpointError
from draft_model.target_model import TargetModel
from service import canary
from service.canary import FILE_NAME, agreement, canary_problems, load_canary, record, save_canary
from service.errors import StartupError
from tests.support.draft_model import load_drafter, make_tiny_drafter
from tests.support.tiny_target import write_tiny_target

PROMPT = [5, 9, 3, 7]
ROWS = 40


class Parrot:
    """A drafter that knows what comes."""

    def __init__(self, drafter: Drafter, token_ids: list[int]) -> None:
        self._drafter, self._token_ids = drafter, token_ids

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)

    def draft(self, requests: list[DraftRequest]) -> list[DraftProposal]:
        return [DraftProposal(self._token_ids[r.position + 1 :][: r.num_draft_tokens], [], []) for r in requests]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the canary of a drafter that is always right; a tiny random one is never."""
    folder = make_tiny_drafter(tmp_path_factory.mktemp("draft"))
    target = TargetModel.load(write_tiny_target(tmp_path_factory.mktemp("target")))
    drafter = load_drafter(folder)
    tokens = record_tokens(target, drafter)
    save_canary(folder, record(Parrot(drafter, tokens), target, PROMPT, ROWS))  # type: ignore[arg-type]
    return folder


def record_tokens(target: TargetModel, drafter: Drafter) -> list[int]:
    cache, tokens = target.new_cache(1, ROWS + 8), list(PROMPT)
    while len(tokens) <= ROWS:
        output = target.forward(torch.tensor([tokens]), torch.tensor([0]), cache)
        tokens.append(int(target.logits(output.hidden[0, -1:]).argmax()))
    return tokens


def test_a_drafter_as_recorded_passes_and_a_useless_one_is_told_with_the_likely_fields(recorded: Path) -> None:
    drafter, stored = load_drafter(recorded), load_canary(recorded)
    assert stored is not None
    assert stored.agreed > 60
    assert canary_problems(Parrot(drafter, stored.token_ids), recorded) == ()  # type: ignore[arg-type]
    (problem,) = canary_problems(drafter, recorded)
    assert problem.startswith("canary_failed: ")
    assert str(stored.agreed) in problem
    assert "target_layer_ids" in problem


def test_the_rows_are_those_of_the_target(recorded: Path, tmp_path: Path) -> None:
    stored = load_canary(recorded)
    assert stored is not None
    target = TargetModel.load(write_tiny_target(tmp_path))
    output = target.forward(torch.tensor([stored.token_ids[:ROWS]]), torch.tensor([0]), target.new_cache(1, ROWS), (0, 2))
    torch.testing.assert_close(stored.features.float(), output.features[0], atol=2e-2, rtol=2e-2)
    assert stored.token_ids[: len(PROMPT)] == PROMPT
    assert (stored.first_anchor, len(stored.token_ids)) == (len(PROMPT), ROWS + 1)


def test_drafts_that_are_not_finite_are_told_even_without_a_recording(tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path)
    assert canary_problems(load_drafter(folder), folder) == ()
    tensors = load_file(folder / "model.safetensors")
    tensors["final_norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert "not finite" in canary_problems(load_drafter(folder), folder)[0]


def test_a_drafter_that_is_useless_from_the_start_is_not_recorded(tmp_path: Path) -> None:
    drafter = load_drafter(make_tiny_drafter(tmp_path / "draft"))
    target = TargetModel.load(write_tiny_target(tmp_path / "target"))
    with pytest.raises(StartupError, match="drafts agree"):
        record(drafter, target, PROMPT, ROWS)
    with pytest.raises(StartupError, match="leaves nothing of 4 rows"):
        record(drafter, target, PROMPT, 4)


def test_a_damaged_canary_and_one_of_another_target_are_refused(recorded: Path, tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "narrow", target_layer_ids=[0], num_target_layers=1)
    (folder / FILE_NAME).write_bytes((recorded / FILE_NAME).read_bytes())
    with pytest.raises(CheckpointError, match="rows of 96 values; this drafter takes 48"):
        canary_problems(load_drafter(folder), folder)
    (folder / FILE_NAME).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a canary"):
        canary_problems(load_drafter(folder), folder)


def test_a_pool_too_small_for_the_rows_measures_what_fits(recorded: Path) -> None:
    drafter, stored = load_drafter(recorded), load_canary(recorded)
    assert stored is not None
    assert canary.agreement(drafter, stored).drafted > agreement(Small(drafter), stored).drafted > 0  # type: ignore[arg-type]


class Small(Parrot):
    """A drafter with room for twenty rows."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, [0] * 64)
        self.cache = type("Cache", (), {"num_pages": 7})


def test_the_drafter_that_ships_has_a_canary() -> None:
    from service.shipped import shipped_drafter

    stored = load_canary(shipped_drafter())
    assert stored is not None
    assert stored.agreed >= 10
