"""Choosing draft tokens: recorded probabilities, the filters, the draw, and what is reported about it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from draft_model.sampling import BlockSampler, SamplingParams, draft_uniforms, draw, filtered_distribution

GOLDEN = Path(__file__).parents[2] / "golden"
CPU = torch.device("cpu")
# Upper 1e-6 quantiles of the chi-square distribution, by degrees of freedom: the odds of a false alarm.
CHI_SQUARE = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 6: 38.3, 7: 40.5, 8: 42.7, 9: 44.8, 10: 46.9, 11: 48.9}


def make_logits(batch: int = 1, size: int = 12, seed: int = 0) -> Tensor:
    return 2 * torch.randn(batch, size, generator=torch.Generator().manual_seed(seed))


def expected_distribution(logits: Tensor, sampling: SamplingParams, report: int = 0) -> dict[int, float]:
    """The definition, one candidate at a time: temperature, top-k, top-p of what top-k kept, the report cut."""
    weights = [math.exp(value / sampling.temperature) for value in logits.double().tolist()]
    ranked = sorted(((weight / sum(weights), token) for token, weight in enumerate(weights)), reverse=True)
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, before, kept = sum(prob for prob, _ in ranked), 0.0, []
    for prob, token in ranked:
        if sampling.top_p < 1.0 and before >= sampling.top_p * total:
            break
        kept.append((prob, token))
        before += prob
    if report:
        kept = kept[:report]
    total = sum(prob for prob, _ in kept)
    return {token: prob / total for prob, token in kept}


def reported_distribution(logits: Tensor, sampling: SamplingParams, report: int) -> tuple[int, dict[int, float]]:
    """The token of one slot and its reported distribution, without the entries of probability 0."""
    sampler = BlockSampler([sampling], [0], [report], 1, CPU)
    chosen = int(sampler.choose(0, logits[None])[0])
    reported = sampler.reported()
    assert reported is not None
    ids, probs = reported[0][0, 0].tolist(), reported[1][0, 0].tolist()
    assert len(set(ids)) == len(ids)
    return chosen, {token: prob for token, prob in zip(ids, probs, strict=True) if prob > 0}


@pytest.mark.parametrize(("name", "temperature"), [("probs_t0", 0.0), ("probs_t07", 0.7), ("probs_t1", 1.0)])
def test_probabilities_equal_the_recording(name: str, temperature: float) -> None:
    recorded = load_file(GOLDEN / "sampling.safetensors")
    for logits, expected in zip(recorded["logits"][0], recorded[name][0], strict=True):
        _, reported = reported_distribution(logits, SamplingParams(temperature, seed=0), report=11)
        dense = torch.tensor([reported.get(token, 0.0) for token in range(11)])
        torch.testing.assert_close(dense, expected, atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 12, 50]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    report=st.sampled_from([1, 3, 12, 40]),
)
def test_the_reported_distribution_is_the_defined_one(
    seed: int, temperature: float, top_k: int, top_p: float, report: int
) -> None:
    logits = make_logits(seed=seed)[0]
    sampling = SamplingParams(temperature, top_k, top_p, seed)
    chosen, reported = reported_distribution(logits, sampling, report)
    if sampling.is_greedy:
        assert reported == {int(logits.argmax()): 1.0}
        return
    expected = expected_distribution(logits, sampling, report)
    assert chosen in expected
    assert set(reported) <= set(expected)
    for token, prob in expected.items():
        assert reported.get(token, 0.0) == pytest.approx(prob, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "report"),
    [
        (SamplingParams(1.0), 0),
        (SamplingParams(0.6), 0),
        (SamplingParams(1.0), 12),
        (SamplingParams(1.0), 4),
        (SamplingParams(1.5, top_k=5), 0),
        (SamplingParams(1.5, top_k=5), 3),
        (SamplingParams(1.5, top_p=0.8), 0),
        (SamplingParams(1.5, top_k=8, top_p=0.7), 12),
        (SamplingParams(0.0), 4),
        (SamplingParams(2.0, top_k=1), 0),
    ],
)
def test_tokens_follow_the_distribution_that_is_reported(sampling: SamplingParams, report: int) -> None:
    """Chi-square over 20,000 draws."""
    count, logits = 20_000, make_logits(seed=3)
    seeded = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, seed=5)
    sampler = BlockSampler([seeded] * count, range(count), [report] * count, 1, CPU)
    frequencies = Counter(sampler.choose(0, logits.expand(count, -1)).tolist())
    if seeded.is_greedy:
        assert frequencies == {int(logits.argmax()): count}
        return
    expected = expected_distribution(logits[0], seeded, report)
    assert set(frequencies) <= set(expected)
    statistic = sum((frequencies[token] - count * prob) ** 2 / (count * prob) for token, prob in expected.items())
    assert statistic < CHI_SQUARE[len(expected) - 1]


def test_consecutive_slots_are_independent() -> None:
    """Pairs of tokens of two slots against the product of their distributions."""
    count, logits = 20_000, torch.tensor([[0.0, 0.5, 1.0]])
    sampler = BlockSampler([SamplingParams(1.0, seed=1)] * count, range(count), [0] * count, 2, CPU)
    first, second = (sampler.choose(slot, logits.expand(count, -1)).tolist() for slot in range(2))
    pairs, probs = Counter(zip(first, second, strict=True)), torch.softmax(logits[0].double(), -1).tolist()
    expected = {(a, b): count * probs[a] * probs[b] for a in range(3) for b in range(3)}
    assert sum((pairs[pair] - mean) ** 2 / mean for pair, mean in expected.items()) < CHI_SQUARE[8]


def test_noise_is_a_pure_function_of_seed_counter_and_slot() -> None:
    assert draft_uniforms(7, 3, 4) == draft_uniforms(7, 3, 8)[:4]
    assert len({number for seed in range(20) for counter in range(20) for number in draft_uniforms(seed, counter, 4)}) == 1600
    numbers = [number for counter in range(5000) for number in draft_uniforms(1, counter, 4)]
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.01)


def test_a_token_depends_on_its_own_request_alone() -> None:
    logits = make_logits(batch=4, seed=2)
    kinds = [SamplingParams(1.0, seed=9), SamplingParams(), SamplingParams(1.0, top_k=3, seed=9), SamplingParams(0.5, seed=4)]
    together = BlockSampler(kinds, [5, 6, 7, 8], [0, 3, 12, 0], 1, CPU).choose(0, logits.clone())
    for row, sampling in enumerate(kinds):
        report = [0, 3, 12, 0][row]
        alone = BlockSampler([sampling], [5 + row], [report], 1, CPU).choose(0, logits[row : row + 1].clone())
        assert int(alone[0]) == int(together[row])


def test_requests_without_a_seed_draw_fresh_noise() -> None:
    logits = torch.zeros(1, 4096)
    chosen = {int(BlockSampler([SamplingParams(1.0)], [0], [0], 1, CPU).choose(0, logits)[0]) for _ in range(8)}
    assert len(chosen) > 1


def test_a_draw_never_takes_what_has_no_mass() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(6, -1)
    just_below_one = 1 - 2**-53
    chosen = draw(probs, torch.tensor([0.0, 0.25, 0.5, 0.75, just_below_one, 0.4999999], dtype=torch.float64)).tolist()
    assert chosen == [1, 1, 3, 3, 3, 1]
    thirds = torch.full((1, 3), 1 / 3)
    assert draw(thirds, torch.tensor([just_below_one], dtype=torch.float64)).tolist() == [2]


def test_filters_of_a_row_do_not_depend_on_the_others() -> None:
    """The widest row decides how many candidates are gathered; the others' distributions stay what they are."""
    logits = make_logits(batch=3, size=64, seed=5)
    temperature, top_k = torch.ones(3), torch.tensor([2, 0, 40])
    top_p, report = torch.tensor([1.0, 0.6, 0.9]), torch.tensor([0, 8, 0])
    ids, probs = filtered_distribution(logits, temperature, top_k, top_p, report)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    for row in range(3):
        one_ids, one_probs = filtered_distribution(
            *(value[row : row + 1] for value in (logits, temperature, top_k, top_p, report))
        )
        width = one_ids.shape[1]
        assert torch.equal(ids[row, :width][one_probs[0] > 0], one_ids[0][one_probs[0] > 0])
        torch.testing.assert_close(probs[row, :width], one_probs[0])
        assert not probs[row, width:].any()


def test_a_wish_beyond_the_vocabulary_reports_all_of_it() -> None:
    sampler = BlockSampler([SamplingParams(1.0, seed=0)], [0], [50], 1, CPU)
    sampler.choose(0, make_logits(size=6))
    reported = sampler.reported()
    assert reported is not None
    assert reported[0].shape == (1, 1, 6)
    assert sorted(reported[0].flatten().tolist()) == list(range(6))


def test_nothing_is_reported_when_nobody_asks() -> None:
    sampler = BlockSampler([SamplingParams()], [0], [0], 1, CPU)
    sampler.choose(0, make_logits())
    assert sampler.reported() is None
