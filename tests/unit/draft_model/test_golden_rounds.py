"""Every recorded round of the public reference, through the served path: paged rows, blocks, heads, confidence, drafts.

The context features of a round go in as they were recorded. At temperature > 0 the recorded drafts are fed to the heads, so
that each slot sees the prefix it saw in the recording; the noise of the draw is not part of the comparison.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import draft_model.drafter as drafter_module
from draft_model.drafter import Drafter
from draft_model.sampling import SamplingParams
from tests.support.draft_model import TinySession, load_drafter

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(file.stem for file in GOLDEN.glob("gen_*.json"))
SCATTERED = [7, 2, 28, 11, 5, 19, 3, 23, 13, 17, 29, 4, 26]


@dataclass
class RecordingSampler:
    """Takes the recorded tokens and keeps the logits it was shown."""

    tokens: Tensor  # [S]
    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, *args: Any) -> RecordingSampler:
        return self

    def choose(self, slot: int, logits: Tensor) -> Tensor:
        self.logits.append(logits[0])
        return self.tokens[slot : slot + 1]

    def reported(self) -> None:
        return None


class RoundsOfCase:
    """The recorded rounds of one generation."""

    def __init__(self, case: str) -> None:
        self.tensors = load_file(GOLDEN / f"{case}.safetensors")
        self.facts = json.loads((GOLDEN / f"{case}.json").read_text())
        name = case.removeprefix("gen_")
        folders = sorted((folder.name for folder in GOLDEN.glob("draft_*")), key=len, reverse=True)
        self.folder = GOLDEN / next(folder for folder in folders if name.startswith(folder.removeprefix("draft_") + "_"))

    def tensor(self, index: int, name: str) -> Tensor | None:
        found = self.tensors.get(f"r{index:02}.{name}")
        return None if found is None else found[0]

    def need(self, index: int, name: str) -> Tensor:
        found = self.tensor(index, name)
        assert found is not None, f"round {index} has no {name}"
        return found


def assert_near(actual: Tensor, expected: Tensor | None) -> None:
    if expected is not None:
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch_cpu", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_every_round_equals_the_recording(case: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = RoundsOfCase(case)
    drafter = load_drafter(rounds.folder, attention_backend=backend)
    session = TinySession(drafter, SCATTERED)
    is_greedy = rounds.facts["temperature"] == 0
    for index, facts in enumerate(rounds.facts["rounds"]):
        features = rounds.need(index, "ctx_features")
        assert_near(drafter._backbone.project(features), rounds.tensor(index, "ctx_fused"))
        assert session.num_rows == facts["draft_cache_len_before"]
        session.write(features)
        assert session.num_rows == facts["draft_cache_len_after"] == facts["start"]

        block = rounds.need(index, "draft_input_ids")
        recorded = rounds.need(index, "draft_tokens_full_block")
        request = session.request(int(block[0]))
        if is_greedy:
            assert drafter.draft([request])[0].token_ids == recorded.tolist()
        sampler = RecordingSampler(recorded)
        with monkeypatch.context() as patch:
            patch.setattr(drafter_module, "BlockSampler", sampler)
            (proposal,) = drafter.draft([request])
        assert proposal.token_ids == recorded.tolist()
        hidden = drafter._block_states([request])
        assert_near(hidden, rounds.need(index, "block_hidden"))
        assert_near(drafter._lm_head(hidden), rounds.tensor(index, "base_logits"))
        assert_near(torch.stack(sampler.logits), rounds.need(index, "draft_logits_corrected"))
        confidence = rounds.tensor(index, "confidence_logits_full_block")
        assert bool(proposal.confidence) == (confidence is not None)
        if confidence is not None:
            assert_near(torch.tensor(proposal.confidence), torch.sigmoid(confidence))
            assert_near(torch.tensor(proposal.survival), torch.sigmoid(confidence).cumprod(0))


@pytest.mark.parametrize("case", CASES)
def test_reported_probabilities_and_acceptance_equal_the_recording(case: str) -> None:
    """The distribution we report for each slot, given the recorded prefix, is the one the recording was judged with."""
    rounds = RoundsOfCase(case)
    drafter = load_drafter(rounds.folder)
    temperature = rounds.facts["temperature"]
    session = TinySession(drafter, SCATTERED)
    sampling = SamplingParams(temperature=temperature, seed=0)
    for index, facts in enumerate(rounds.facts["rounds"]):
        session.write(rounds.need(index, "ctx_features"))
        verified = rounds.need(index, "verify_input_ids")
        logits = rounds.need(index, "draft_logits_corrected")
        # The first slot depends on the anchor alone, so its report is the recorded one whatever is drawn.
        request = session.request(int(verified[0]), 1, sampling=sampling, draft_probs_topk=drafter.config.vocab_size)
        (proposal,) = drafter.draft([request])
        assert proposal.probs is not None
        assert proposal.probs_ids is not None
        reported = torch.zeros(drafter.config.vocab_size).scatter(0, proposal.probs_ids[0].long(), proposal.probs[0])
        draft_probs = distributions(logits, temperature)
        assert_near(reported, draft_probs[0])

        # Verification as the reference does it, with the recorded uniforms.
        target_probs = distributions(rounds.need(index, "target_logits"), temperature)
        drafted = verified[1 : 1 + facts["effective_proposal_length"]]
        uniforms = rounds.need(index, "accept_uniforms")
        accepted = 0
        for slot, token in enumerate(drafted.tolist()):
            ratio = target_probs[slot, token] / draft_probs[slot, token].clamp_min(1e-8)
            if uniforms[slot] >= ratio.clamp_max(1.0):
                break
            accepted += 1
        assert accepted == facts["accepted"]
        next_dist = rounds.tensor(index, "next_token_dist")
        if next_dist is not None:
            expected = target_probs[accepted]
            if accepted < len(drafted):
                residual = (expected - draft_probs[accepted]).clamp_min(0)
                expected = residual / residual.sum()
            assert_near(expected, next_dist)


def distributions(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities of logits [S, V]; point masses at temperature 0."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.softmax(logits / temperature, dim=-1)


def test_rounds_of_several_generations_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy generations of one model, drafted together, equal their recordings; their lengths differ."""
    rounds = RoundsOfCase("gen_vanilla_greedy")
    drafter: Drafter = load_drafter(rounds.folder)
    sessions, expected = [], []
    for count in range(1, 1 + len(rounds.facts["rounds"])):
        session = TinySession(drafter, range(1 + 12 * (count - 1), 1 + 12 * count))
        for index in range(count):
            session.write(rounds.need(index, "ctx_features"))
        sessions.append(session.request(int(rounds.need(count - 1, "draft_input_ids")[0])))
        expected.append(rounds.need(count - 1, "draft_tokens_full_block").tolist())
    assert [proposal.token_ids for proposal in drafter.draft(sessions)] == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("case", ["gen_vanilla_greedy", "gen_rnn_greedy", "gen_gated_t1", "gen_dflash_greedy"])
def test_half_precision_stays_near_the_recording(
    case: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 keeps 11 bits of a weight and bfloat16 8; logits are of size 10."""
    rounds = RoundsOfCase(case)
    drafter = load_drafter(rounds.folder, dtype=dtype)
    session = TinySession(drafter, SCATTERED)
    for index in range(2):
        session.write(rounds.need(index, "ctx_features"))
        sampler = RecordingSampler(rounds.need(index, "draft_tokens_full_block"))
        with monkeypatch.context() as patch:
            patch.setattr(drafter_module, "BlockSampler", sampler)
            drafter.draft([session.request(int(rounds.need(index, "draft_input_ids")[0]))])
        expected = rounds.need(index, "draft_logits_corrected")
        worst = (torch.stack(sampler.logits) - expected).abs().max() / expected.abs().max()
        assert worst < tolerance
