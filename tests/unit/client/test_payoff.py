"""Drafting is on where it pays and off where it does not, and finding out costs next to nothing. Costs are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from draft_engine_client.payoff import Payoff, PayoffSettings, PayoffStats, bucket_of


@dataclass(frozen=True)
class World:
    """What steps cost, in milliseconds, and how many drafts survive."""

    plain_ms: float = 20.0
    extra_ms: float = 10.0
    accepted: float = 1.5
    noise: float = 0.15
    catch_up_ms: float = 0.0

    @property
    def gain(self) -> float:
        return (1.0 + self.accepted) * self.plain_ms / (self.plain_ms + self.extra_ms)


@dataclass
class Run:
    """The time that steps took, against the time that plain decoding of the same tokens takes."""

    stats: PayoffStats
    seconds: float = 0.0
    plain_seconds: float = 0.0
    drafted: list[bool] = None  # type: ignore[assignment]

    @property
    def speed(self) -> float:
        return self.plain_seconds / self.seconds


def simulate(
    worlds: Iterable[World], payoff: Payoff | None = None, *, batch: Callable[[int], int] = lambda step: 1, seed: int = 0
) -> Run:
    payoff = payoff or Payoff()
    dice = random.Random(seed)
    run = Run(payoff.stats, drafted=[])
    for step, world in enumerate(worlds):
        sequences = batch(step)
        wants = payoff.wants_drafts(sequences, 300)
        seconds = world.plain_ms / 1000 * sequences**0.5
        run_plain = seconds
        tokens = sequences
        if wants:
            seconds += world.extra_ms / 1000 * sequences**0.5
            if run.drafted and not run.drafted[-1]:
                seconds += world.catch_up_ms / 1000
            tokens += sum(int(world.accepted) + (dice.random() < world.accepted % 1) for _ in range(sequences))
        seconds *= dice.uniform(1 - world.noise, 1 + world.noise)
        payoff.record(sequences, 300, is_drafted=wants, num_tokens=tokens, seconds=seconds)
        run.seconds += seconds
        run.plain_seconds += run_plain * tokens / sequences
        run.drafted.append(wants)
    run.stats = payoff.stats
    return run


USELESS = World(accepted=0.0)
GOOD = World()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "world",
    [
        USELESS,
        replace(USELESS, extra_ms=1.0),
        replace(USELESS, extra_ms=60.0),
        replace(USELESS, extra_ms=400.0),
        replace(USELESS, catch_up_ms=200.0),
        World(accepted=2.8, extra_ms=80.0),
    ],
    ids=["useless", "cheap", "dear", "very dear", "far behind", "accepted yet slow"],
)
def test_a_drafter_that_does_not_pay_costs_less_than_three_percent(world: World, seed: int) -> None:
    run = simulate([world] * 3000, seed=seed)
    assert run.speed > 0.97
    assert sum(run.drafted[100:]) < 0.05 * len(run.drafted)


@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_pays_is_used_nearly_always(seed: int) -> None:
    run = simulate([GOOD] * 3000, seed=seed)
    assert run.speed > 0.97 * GOOD.gain
    assert sum(run.drafted) > 0.97 * len(run.drafted)
    assert run.stats.buckets_on == 1
    assert run.stats.net_saved_seconds == pytest.approx(run.plain_seconds - run.seconds, rel=0.1)


def test_plain_steps_come_first_and_then_a_trial() -> None:
    run = simulate([GOOD] * 10)
    assert run.drafted == [False] * 3 + [True] * 7
    assert run.stats.switches == 1


def test_a_drafter_that_becomes_useless_is_dropped_and_taken_up_again() -> None:
    payoff = Payoff()
    first = simulate([GOOD] * 1000, payoff)
    bad = simulate([USELESS] * 2000, payoff)
    again = simulate([GOOD] * 2000, payoff)
    assert first.stats.buckets_on == 1
    assert bad.stats.buckets_on == 0
    assert bad.speed > 0.97
    assert again.stats.buckets_on == 1
    assert again.speed > 0.9 * GOOD.gain
    assert again.stats.switches <= 5


def test_a_drafter_at_the_edge_neither_costs_nor_flaps() -> None:
    edge = World(accepted=0.5, extra_ms=10.0)
    assert edge.gain == pytest.approx(1.0)
    run = simulate([edge] * 5000)
    assert run.speed > 0.98
    assert run.stats.switches < 60


@pytest.mark.parametrize("seed", range(3))
def test_batch_sizes_are_judged_apart(seed: int) -> None:
    """At batch 1 drafts pay, at 8 verification is too dear; the batch size changes all the time."""
    sizes = random.Random(seed)
    order = [sizes.choice([1, 8]) for _ in range(6000)]
    payoff = Payoff()
    run = Run(payoff.stats, drafted=[])
    worlds = [GOOD if size == 1 else replace(USELESS, extra_ms=30.0) for size in order]
    run = simulate(worlds, payoff, batch=lambda step: order[step], seed=seed)
    pays = [wants for wants, size in zip(run.drafted, order, strict=True) if size == 1]
    loses = [wants for wants, size in zip(run.drafted, order, strict=True) if size == 8]
    assert sum(pays) > 0.9 * len(pays)
    assert sum(loses) < 0.05 * len(loses)
    assert (run.stats.buckets_on, run.stats.buckets) == (1, 2)


def test_a_new_bucket_starts_as_its_neighbour_is() -> None:
    payoff = Payoff()
    simulate([GOOD] * 200, payoff)
    for _ in range(3):
        assert not payoff.wants_drafts(2, 300)
        payoff.record(2, 300, is_drafted=False, num_tokens=2, seconds=0.03)
    assert payoff.wants_drafts(2, 300)
    assert payoff.stats.buckets_on == 2


def test_the_stretch_after_the_switch_is_short_when_a_drafter_hangs() -> None:
    payoff = Payoff()
    simulate([GOOD] * 500, payoff)
    stuck = simulate([World(accepted=0.0, extra_ms=50.0, noise=0.0)] * 100, payoff)
    assert sum(stuck.drafted) <= 3


def test_the_loss_is_bounded_by_the_account() -> None:
    """Whatever the drafter does: the loss is at most the share of trials, and one stretch for each bucket."""
    settings = PayoffSettings()
    for seed in range(20):
        dice = random.Random(seed)
        worlds = [World(accepted=dice.choice([0.0, 0.0, 4.0]), extra_ms=dice.uniform(0, 60), noise=0.0) for _ in range(40)]
        run = simulate([world for world in worlds for _ in range(50)], seed=seed)
        loss = run.seconds - run.plain_seconds
        # The largest step may come on top of a full account twice.
        assert loss < settings.trial_share * run.seconds + (2 * settings.max_loss_steps + 4) * 0.02


def test_buckets() -> None:
    assert [bucket_of(size, 0)[0] for size in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert [bucket_of(1, context)[1] for context in (0, 255, 256, 511, 512, 1024, 2048)] == [0, 0, 1, 1, 2, 3, 4]
