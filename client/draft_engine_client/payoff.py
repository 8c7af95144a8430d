"""Whether drafting pays here and now: measured, not assumed.

High acceptance is not speed. A step with drafts waits for the drafter and verifies more tokens, and what that costs depends on
batch size and context. So time is measured by bucket of both, in the target's own steps:

    worth of a step  = (tokens committed / sequences) * duration of a plain step
    saved            = worth - duration

and drafting is on in a bucket while its worth exceeds its cost. Where it is off, now and then a short trial finds out whether
that has changed; where it is on, now and then a plain step keeps the comparison honest.

Trials cost time when drafting is useless. Each bucket keeps a debt: what its drafted steps lose is added, and plain steps pay
it off with a small share of their time. A trial starts only without debt, and after each one that failed the wait doubles. So
a bucket loses at most that share of its time, and one trial or late switch (`max_loss_steps` plain steps, and the step that
goes beyond).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

Bucket = tuple[int, int]

_FIRST_PLAIN_INTERVAL = 16


@dataclass(frozen=True)
class PayoffSettings:
    """How drafting is turned on and off.

    Args:
        turn_on: worth over cost at which a trial turns drafting on.
        turn_off: worth over cost below which it is turned off; under `turn_on`, so that noise does not make it flap.
        trial_steps: drafted steps of a trial, and before a bucket that is on is judged.
        plain_steps: plain steps that a bucket is measured by before the first drafted one.
        max_loss_steps: plain steps' worth of time after which a trial or a losing stretch ends whatever the averages say.
        trial_share: share of plain time that trials may cost.
        min_wait, max_wait: plain steps between two trials, at first and at most.
        plain_interval: drafted steps between two plain ones, at most; at first there are fewer.
        memory: weight of the past at each step, in (0, 1).
    """

    turn_on: float = 1.04
    turn_off: float = 1.0
    trial_steps: int = 6
    plain_steps: int = 3
    max_loss_steps: float = 4.0
    trial_share: float = 0.01
    min_wait: int = 16
    max_wait: int = 512
    plain_interval: int = 256
    memory: float = 0.96


@dataclass(frozen=True)
class PayoffStats:
    """What drafting was worth.

    net_saved_seconds: worth minus duration of all drafted steps; steps: all; drafted_steps: with drafting on; switches: on or
    off; buckets_on, buckets: that drafting is on in, and known.
    """

    net_saved_seconds: float = 0.0
    steps: int = 0
    drafted_steps: int = 0
    switches: int = 0
    buckets_on: int = 0
    buckets: int = 0


@dataclass
class _Average:
    """A mean that forgets."""

    memory: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = self.memory * self.total + value
        self.weight = self.memory * self.weight + 1.0

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass
class _BucketState:
    """`run` counts drafted steps since drafting was last off, `rest` plain steps since then; `balance` is what the run saved,
    and `peak` its highest.
    """

    memory: float
    is_on: bool
    wait: int
    plain: _Average = field(init=False)
    num_plain: int = 0
    drafted: _Average = field(init=False)
    tokens: _Average = field(init=False)
    run: int = 0
    rest: int = 0
    debt: float = 0.0
    balance: float = 0.0
    peak: float = 0.0
    plain_interval: int = _FIRST_PLAIN_INTERVAL
    since_plain: int = 0

    def __post_init__(self) -> None:
        self.plain = _Average(self.memory)
        self.begin_run()

    def begin_run(self) -> None:
        """Forget earlier drafted steps: the drafter may be another one by now."""
        self.drafted, self.tokens = _Average(self.memory), _Average(self.memory)
        self.run = self.since_plain = 0
        self.balance = self.peak = 0.0

    @property
    def gain(self) -> float:
        """Worth over cost of drafted steps."""
        return self.tokens.mean * self.plain.mean / self.drafted.mean if self.drafted.total > 0.0 else 1.0


class Payoff:
    """Decides step by step: ask `wants_drafts`, run the step, and `record` it. `stats` may be read from any thread."""

    def __init__(self, settings: PayoffSettings | None = None) -> None:
        self._settings = settings or PayoffSettings()
        self._buckets: dict[Bucket, _BucketState] = {}
        self._lock = threading.Lock()
        self._net = 0.0
        self._steps = self._drafted_steps = self._switches = 0

    def wants_drafts(self, num_sequences: int, context: int) -> bool:
        """Whether a step of so many sequences, the longest of `context` tokens, should be drafted for."""
        settings = self._settings
        with self._lock:
            state = self._state(bucket_of(num_sequences, context))
            if state.num_plain < settings.plain_steps:
                return False
            if state.is_on:
                return state.since_plain < state.plain_interval
            is_first = state.num_plain == state.rest
            return state.run > 0 or (state.debt <= 0.0 and (is_first or state.rest >= state.wait))

    def record(self, num_sequences: int, context: int, *, is_drafted: bool, num_tokens: int, seconds: float) -> None:
        """Take in a step.

        Args:
            num_sequences: in the step
            context: tokens of the longest of them, as `wants_drafts` was told
            is_drafted: whether drafts were asked for
            num_tokens: committed by all sequences
            seconds: from before drafts were asked for to after verification
        """
        with self._lock:
            self._steps += 1
            state = self._state(bucket_of(num_sequences, context))
            if is_drafted:
                self._record_drafted(state, num_tokens / num_sequences, seconds)
            else:
                self._record_plain(state, seconds)

    @property
    def stats(self) -> PayoffStats:
        """What came of it so far."""
        with self._lock:
            buckets_on = sum(state.is_on for state in self._buckets.values())
            return PayoffStats(self._net, self._steps, self._drafted_steps, self._switches, buckets_on, len(self._buckets))

    def _record_plain(self, state: _BucketState, seconds: float) -> None:
        settings = self._settings
        state.plain.add(seconds)
        state.num_plain += 1
        state.rest += 1
        if state.is_on:
            if state.since_plain:
                state.plain_interval = min(2 * state.plain_interval, settings.plain_interval)
            state.since_plain = 0
        else:
            state.debt = max(state.debt - settings.trial_share * seconds, 0.0)
            # A trial that was interrupted starts anew.
            state.run = 0

    def _record_drafted(self, state: _BucketState, tokens: float, seconds: float) -> None:
        settings = self._settings
        if state.run == 0:
            state.begin_run()
        state.run += 1
        state.since_plain += 1
        self._drafted_steps += 1
        saved = tokens * state.plain.mean - seconds
        self._net += saved
        state.debt = max(state.debt - saved, 0.0)
        state.balance += saved
        state.peak = max(state.peak, state.balance)
        # After a stretch without drafts the first step brings the drafter up to date. That costs, but does not recur.
        if state.run > 1:
            state.drafted.add(seconds)
            state.tokens.add(tokens)
        is_judged = state.run > settings.trial_steps
        is_losing = state.peak - state.balance > settings.max_loss_steps * state.plain.mean
        if not state.is_on and is_judged and state.gain >= settings.turn_on:
            self._turn_on(state)
        elif is_losing or (is_judged and state.gain < (settings.turn_off if state.is_on else settings.turn_on)):
            self._turn_off(state)

    def _turn_on(self, state: _BucketState) -> None:
        self._switches += 1
        state.is_on = True
        state.plain_interval, state.since_plain = _FIRST_PLAIN_INTERVAL, 0
        state.peak = state.balance

    def _turn_off(self, state: _BucketState) -> None:
        """Give up on drafting, or on a trial of it."""
        settings = self._settings
        # A stretch that lasted was no mistake; one that did not makes the next trial wait longer.
        has_lasted = state.is_on and state.run > settings.min_wait * settings.trial_steps
        state.wait = settings.min_wait if has_lasted else min(2 * state.wait, settings.max_wait)
        self._switches += state.is_on
        state.is_on = False
        state.run = state.rest = 0

    def _state(self, bucket: Bucket) -> _BucketState:
        state = self._buckets.get(bucket)
        if state is None:
            # What holds in the nearest bucket is the best guess for a new one.
            nearest = min(
                self._buckets, key=lambda other: sum(abs(a - b) for a, b in zip(bucket, other, strict=True)), default=None
            )
            is_on = nearest is not None and self._buckets[nearest].is_on
            state = self._buckets[bucket] = _BucketState(self._settings.memory, is_on, self._settings.min_wait)
        return state


def bucket_of(num_sequences: int, context: int) -> Bucket:
    """Put steps of like cost together: batches of 1, 2, 3 to 4, 5 to 8 and so on; contexts below 256, 512, 1024 and so on."""
    return (num_sequences - 1).bit_length(), (context // 256).bit_length()
