from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from service.target.distribution import TargetSampling, target_distribution


def brute_force(logits: list[float], sampling: TargetSampling) -> list[float]:
    """Temperature, then top-k, then top-p, token by token."""
    probs = torch.tensor(logits, dtype=torch.float64).div(sampling.temperature).softmax(-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, kept, mass = sum(probs[token] for token in ranked), [], 0.0
    for token in ranked:
        if mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += probs[token]
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12, unique=True),
    st.floats(0.2, 3.0),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
)
def test_filters_equal_a_token_by_token_account(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    # Values closer than float32 can tell apart would make ties, whose order is nobody's promise.
    logits = [round(value, 2) + 0.001 * index for index, value in enumerate(logits)]
    sampling = TargetSampling(temperature, top_k, top_p)
    probs = target_distribution(torch.tensor([logits], dtype=torch.float64), sampling)[0]
    expected = torch.tensor(brute_force(logits, sampling), dtype=torch.float64)
    # The nucleus may keep one token more or less where the mass before it is top_p to the last digit.
    if (expected > 0).equal(probs > 0):
        torch.testing.assert_close(probs, expected, atol=1e-9, rtol=1e-9)
    else:
        assert abs(int((expected > 0).sum()) - int((probs > 0).sum())) == 1
    assert abs(float(probs.sum()) - 1.0) < 1e-12


def test_greedy_is_told_by_temperature_or_by_top_k_one() -> None:
    assert TargetSampling(temperature=0.0).is_greedy
    assert TargetSampling(temperature=1.0, top_k=1).is_greedy
    assert not TargetSampling(temperature=0.7).is_greedy
