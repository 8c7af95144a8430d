"""Verification loses nothing: whatever is drafted, the output is the target's own.

Greedy output is compared token by token. Sampled output is compared with the target's exact distribution over whole sequences
(chi-square), for drafters from perfect to hostile. Each comparison has a control that it must fail.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draft_engine_client.verification import Verdict, verify_greedy, verify_sampled

VOCAB_SIZE = 3
LENGTH = 3
NUM_SEQUENCES = 1_000
Probs = NDArray[np.float64]

# A target that knows one token back: row t is the distribution after token t. It has a zero.
TARGET = np.array([[0.60, 0.25, 0.15], [0.10, 0.30, 0.60], [0.00, 0.70, 0.30]])
START = 0
DRAFTERS = {
    "the target itself": TARGET,
    "even": np.full((3, 3), 1.0 / 3.0),
    "likes what the target does not": (1.0 - TARGET) / 2.0,
    "certain of one token": np.tile(np.array([0.0, 0.0, 1.0]), (3, 1)),
    "only what the target never says": np.tile(np.array([1.0, 0.0, 0.0]), (3, 1)),
    "too sure of the target's favourite": TARGET**4 / (TARGET**4).sum(1, keepdims=True),
}


@dataclass(frozen=True)
class Block:
    """Drafts and the distributions they were drawn from, as a drafter reports them."""

    token_ids: list[int]
    probs_ids: NDArray[np.int32]
    probs: NDArray[np.float32]


class Drafter:
    """Draws from the k likeliest tokens, renormalised, and reports exactly that."""

    def __init__(self, table: Probs, k: int) -> None:
        self._ids = np.argsort(-table, axis=1, kind="stable")[:, :k].astype(np.int32)
        kept = np.take_along_axis(table, self._ids, axis=1)
        self._probs = (kept / kept.sum(1, keepdims=True)).astype(np.float32)
        self._cumulative = (np.cumsum(self._probs, axis=1, dtype=np.float64)).tolist()

    def draft(self, anchor: int, count: int, noise: np.random.Generator) -> Block:
        anchors, token_ids = [anchor], []
        for _ in range(count):
            cumulative = self._cumulative[anchors[-1]]
            column = min(bisect.bisect_right(cumulative, noise.random() * cumulative[-1]), len(cumulative) - 1)
            token_ids.append(int(self._ids[anchors[-1], column]))
            anchors.append(token_ids[-1])
        return Block(token_ids, self._ids[anchors[:-1]], self._probs[anchors[:-1]])


Verify = Callable[[Block, Probs, np.random.Generator], Verdict]


def with_probs(block: Block, rows: Probs, rng: np.random.Generator) -> Verdict:
    return verify_sampled(block.token_ids, rows, rng, draft_probs_ids=block.probs_ids, draft_probs=block.probs)


def as_point_mass(block: Block, rows: Probs, rng: np.random.Generator) -> Verdict:
    return verify_sampled(block.token_ids, rows, rng)


def accept_everything(block: Block, rows: Probs, rng: np.random.Generator) -> Verdict:
    return Verdict(len(block.token_ids), int(rng.choice(VOCAB_SIZE, p=rows[-1])))


def with_false_probs(block: Block, rows: Probs, rng: np.random.Generator) -> Verdict:
    return verify_sampled(
        block.token_ids, rows, rng, draft_probs_ids=block.probs_ids, draft_probs=np.full_like(block.probs, 1.0 / VOCAB_SIZE)
    )


def distance(drafter: Drafter, verify: Verify, *, num_drafts: int = 2, seed: int = 5) -> float:
    """Chi-square of many generated sequences against the target's own distribution, in standard deviations of a normal."""
    draft_noise, verifier_noise = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(NUM_SEQUENCES):
        tokens = [START]
        while len(tokens) <= LENGTH:
            block = drafter.draft(tokens[-1], num_drafts, draft_noise)
            verdict = verify(block, TARGET[[tokens[-1], *block.token_ids]], verifier_noise)
            tokens += [*block.token_ids[: verdict.num_accepted], verdict.next_token_id]
        sequence = tuple(tokens[1 : LENGTH + 1])
        counts[sequence] = counts.get(sequence, 0) + 1
    return chi_square_deviations(counts)


def chi_square_deviations(counts: dict[tuple[int, ...], int]) -> float:
    """Cells that are too rare for the statistic are pooled; a sequence that the target never says is infinitely far."""
    pooled_expected = pooled_seen = statistic = 0.0
    cells = 0
    for sequence in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        chance = math.prod(TARGET[before, after] for before, after in itertools.pairwise((START, *sequence)))
        expected, seen = chance * NUM_SEQUENCES, counts.get(sequence, 0)
        if expected == 0.0:
            if seen:
                return math.inf
        elif expected < 5.0:
            pooled_expected += expected
            pooled_seen += seen
        else:
            statistic += (seen - expected) ** 2 / expected
            cells += 1
    if pooled_expected:
        statistic += (pooled_seen - pooled_expected) ** 2 / pooled_expected
        cells += 1
    degrees = cells - 1
    # Wilson and Hilferty: the cube root of chi-square over its degrees is nearly normal.
    spread = 2.0 / (9.0 * degrees)
    return float(((statistic / degrees) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(("verify", "k"), [(with_probs, VOCAB_SIZE), (with_probs, 2), (as_point_mass, VOCAB_SIZE)])
def test_sampled_output_has_the_targets_distribution(name: str, verify: Verify, k: int) -> None:
    assert distance(Drafter(DRAFTERS[name], k), verify) < 3.7


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("even", accept_everything),
        ("too sure of the target's favourite", accept_everything),
        ("too sure of the target's favourite", with_false_probs),
    ],
)
def test_the_comparison_sees_a_verifier_that_is_wrong(name: str, verify: Verify) -> None:
    assert distance(Drafter(DRAFTERS[name], VOCAB_SIZE), verify) > 6.0


def test_the_comparison_sees_noise_that_is_shared() -> None:
    """Why the drafter's noise must not be the verifier's: with the same uniforms, losslessness is gone."""
    drafter = Drafter(DRAFTERS["even"], VOCAB_SIZE)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(NUM_SEQUENCES):
        tokens = [START]
        while len(tokens) <= LENGTH:
            shared = seed * 10 + len(tokens)
            block = drafter.draft(tokens[-1], 1, np.random.default_rng(shared))
            verdict = with_probs(block, TARGET[[tokens[-1], *block.token_ids]], np.random.default_rng(shared))
            tokens += [*block.token_ids[: verdict.num_accepted], verdict.next_token_id]
        sequence = tuple(tokens[1 : LENGTH + 1])
        counts[sequence] = counts.get(sequence, 0) + 1
    assert chi_square_deviations(counts) > 6.0


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_rate_of_acceptance_is_the_overlap_of_the_distributions(name: str) -> None:
    noise, rng = np.random.default_rng(1), np.random.default_rng(2)
    drafter = Drafter(DRAFTERS[name], VOCAB_SIZE)
    trials = 1_000
    accepted = 0
    for _ in range(trials):
        block = drafter.draft(START, 1, noise)
        accepted += with_probs(block, TARGET[[START, *block.token_ids]], rng).num_accepted
    overlap = float(np.minimum(TARGET[START], DRAFTERS[name][START]).sum())
    assert accepted / trials == pytest.approx(overlap, abs=4.0 * math.sqrt(0.25 / trials))


# Single decisions ----------------------------------------------------------------------------------------------------


class Scripted(np.random.Generator):
    """A generator that says what it is told to."""

    def __init__(self, *uniforms: float) -> None:
        super().__init__(np.random.PCG64(0))
        self._uniforms = iter(uniforms)

    def random(self, *args: object, **more: object) -> float:  # type: ignore[override]
        return next(self._uniforms)


def test_a_draft_stays_strictly_below_the_ratio() -> None:
    rows = np.array([[0.5, 0.5], [1.0, 0.0]])
    ids, probs = np.array([[0, 1]]), np.array([[0.8, 0.2]])
    below, at = Scripted(0.6249, 0.0), Scripted(0.625, 0.0)
    assert verify_sampled([0], rows, below, draft_probs_ids=ids, draft_probs=probs) == Verdict(1, 0)
    assert verify_sampled([0], rows, at, draft_probs_ids=ids, draft_probs=probs) == Verdict(0, 1)


def test_a_token_without_target_probability_never_stays_even_at_zero_noise() -> None:
    rows = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert verify_sampled([0], rows, Scripted(0.0, 0.0)) == Verdict(0, 1)


def test_the_largest_noise_draws_a_token_that_has_probability() -> None:
    rows = np.array([[0.3, 0.7, 0.0]])
    assert verify_sampled([], rows, Scripted(1.0 - 2.0**-53)) == Verdict(0, 1)


def test_a_rejected_point_mass_is_never_drawn_again() -> None:
    rows = np.array([[0.4, 0.3, 0.3], [1.0, 0.0, 0.0]])
    drawn = {verify_sampled([0], rows, Scripted(0.9, uniform)).next_token_id for uniform in np.linspace(0, 0.999, 50)}
    assert drawn == {1, 2}


def test_a_draft_outside_its_own_distribution_is_judged_as_a_point_mass() -> None:
    rows = np.array([[0.4, 0.6], [1.0, 0.0]])
    ids, probs = np.array([[1, 0]]), np.array([[1.0, 0.0]])
    assert verify_sampled([0], rows, Scripted(0.39, 0.0), draft_probs_ids=ids, draft_probs=probs).num_accepted == 1
    assert verify_sampled([0], rows, Scripted(0.41, 0.0), draft_probs_ids=ids, draft_probs=probs).num_accepted == 0


def test_padding_columns_change_nothing() -> None:
    rows = TARGET[[0, 1]]
    ids, probs = np.array([[1, 2]]), np.array([[0.7, 0.3]])
    padded_ids, padded_probs = np.array([[1, 2, 0, 0]]), np.array([[0.7, 0.3, 0.0, 0.0]])
    for seed in range(50):
        plain = verify_sampled([1], rows, np.random.default_rng(seed), draft_probs_ids=ids, draft_probs=probs)
        padded = verify_sampled([1], rows, np.random.default_rng(seed), draft_probs_ids=padded_ids, draft_probs=padded_probs)
        assert plain == padded


def test_a_certain_target_makes_sampling_greedy() -> None:
    chosen = [2, 1, 0]
    for drafts in itertools.product(range(VOCAB_SIZE), repeat=2):
        verdict = verify_sampled(drafts, np.eye(VOCAB_SIZE)[chosen], np.random.default_rng(0))
        assert verdict == verify_greedy(drafts, chosen)


@pytest.mark.parametrize(
    ("drafts", "rows", "ids", "probs"),
    [
        ([1], np.ones((1, 4)), None, None),
        ([1], np.ones((3, 4)), None, None),
        ([1], np.ones(4), None, None),
        ([1], np.ones((2, 4)), np.ones((1, 2), int), None),
        ([1], np.ones((2, 4)), None, np.ones((1, 2))),
        ([1], np.ones((2, 4)), np.ones((1, 3), int), np.ones((1, 2))),
        ([1], np.ones((2, 4)), np.ones((2, 2), int), np.ones((2, 2))),
        ([1], np.ones((2, 4)), np.ones(2, int), np.ones(2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    drafts: Sequence[int], rows: Probs, ids: NDArray[np.int64] | None, probs: Probs | None
) -> None:
    with pytest.raises(ValueError, match=r"must be|go together"):
        verify_sampled(drafts, rows, np.random.default_rng(0), draft_probs_ids=ids, draft_probs=probs)


# Greedy --------------------------------------------------------------------------------------------------------------


def greedy_target(tokens: Sequence[int]) -> int:
    return (7 * tokens[-1] + 3 * sum(tokens) + len(tokens)) % 11


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 8), st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 10)), max_size=8), max_size=30))
def test_greedy_output_is_the_targets_own_at_every_width(prompt: int, blocks: list[list[tuple[bool, int]]]) -> None:
    """Drafts are right or wrong at any place, of any number from none on."""
    tokens = [prompt]
    for block in blocks:
        drafts: list[int] = []
        for is_right, wrong in block:
            drafts.append(greedy_target(tokens + drafts) if is_right else wrong)
        chosen = [greedy_target(tokens + drafts[:place]) for place in range(len(drafts) + 1)]
        verdict = verify_greedy(drafts, chosen)
        assert 0 <= verdict.num_accepted <= len(drafts)
        tokens += [*drafts[: verdict.num_accepted], verdict.next_token_id]
    plain = [prompt]
    while len(plain) < len(tokens):
        plain.append(greedy_target(plain))
    assert tokens == plain


def test_greedy_needs_a_row_for_each_draft_and_the_bonus() -> None:
    with pytest.raises(ValueError, match="2 drafts need 3 rows"):
        verify_greedy([1, 2], [1, 2])
