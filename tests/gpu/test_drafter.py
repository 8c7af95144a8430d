"""Drafters on a CUDA device against the same drafters on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_model.drafter import Drafter
from draft_model.sampling import SamplingParams
from tests.support.draft_model import TinySession, load_drafter, make_features, make_tiny_drafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GOLDEN = Path(__file__).parents[1] / "golden"
PAGES = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 11, 10, 12]


def draft(drafter: Drafter, sampling: SamplingParams | None = None) -> list[Sequence[int]]:
    sessions = [TinySession(drafter, [page, page + 20, page + 10]) for page in (1, 2, 3)]
    for index, session in enumerate(sessions):
        session.write(make_features(drafter, 3 + index, seed=index))
    requests = [session.request(7, sampling=sampling, rng_counter=index) for index, session in enumerate(sessions)]
    return [proposal.token_ids for proposal in drafter.draft(requests)]


@pytest.mark.parametrize("sampling", [None, SamplingParams(1.0, seed=3), SamplingParams(0.8, top_k=7, top_p=0.9, seed=3)])
@pytest.mark.parametrize("draft_vocab_size", [None, 100])
def test_mla_drafts_equal_those_of_the_cpu(
    tmp_path: Path, draft_vocab_size: int | None, sampling: SamplingParams | None
) -> None:
    folder = make_tiny_drafter(tmp_path, draft_vocab_size=draft_vocab_size)
    on_cpu, on_gpu = load_drafter(folder), load_drafter(folder, device="cuda")
    assert draft(on_gpu, sampling) == draft(on_cpu, sampling)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("case", ["vanilla", "rnn", "dflash"])
def test_recorded_greedy_rounds(case: str, backend: str | None) -> None:
    recorded = load_file(GOLDEN / f"gen_{case}_greedy.safetensors")
    rounds = json.loads((GOLDEN / f"gen_{case}_greedy.json").read_text())["rounds"]
    drafter = load_drafter(GOLDEN / f"draft_{case}", device="cuda", attention_backend=backend)
    session = TinySession(drafter, PAGES)
    for index in range(len(rounds)):
        session.write(recorded[f"r{index:02}.ctx_features"][0])
        (proposal,) = drafter.draft([session.request(int(recorded[f"r{index:02}.draft_input_ids"][0, 0]))])
        assert proposal.token_ids == recorded[f"r{index:02}.draft_tokens_full_block"][0].tolist()
        confidence = recorded.get(f"r{index:02}.confidence_logits_full_block")
        if confidence is not None:
            assert proposal.confidence == pytest.approx(torch.sigmoid(confidence[0]).tolist(), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = load_drafter(make_tiny_drafter(tmp_path), device="cuda", dtype=dtype)
    assert drafter.dtype == dtype
    drafter.warm_up()
    assert all(len(tokens) == 4 for tokens in draft(drafter))
