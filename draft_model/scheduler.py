"""How many drafts of each request are worth verifying, from their survival and from what a target step costs.

Verifying a draft lengthens the step of everybody in the batch, so it is worth it only if it is likely enough to survive. The
objective is the target's expected throughput: committed tokens per step times steps per second at that step's width.

A schedule must not look ahead. Whether draft k of a request is verified may depend on the tokens before it, never on draft k
itself; the survival of draft k + 1 does depend on it. Dropping a draft because of what it is biases the output, as
dropping bad throws biases a die. Four ways keep to that:

- the prefix whose survival reaches a fixed bound.
- `schedule_prefixes`: admit in the order of survival, and stop at the first draft that does not pay.
- `schedule_width`: the same for a target whose rows are all equally wide, so that shorter blocks save nothing.
- `draft_budget` from an earlier step's survival, then `admit` that many: the search may then be global, since it reads
  nothing of the drafts it decides about. `DelayedScheduler` does this step by step.

`best_prefixes` searches globally over current survival. It is not lossless; it is the bound that the others are compared with.

Shape symbols: R requests, d drafts of a request (each its own), K drafts admitted together. `survival[r][k]` is the chance
that drafts 0 to k of request r are all accepted; it never rises with k.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

StepRate = Callable[[int], float]
"""Steps per second of the target when a step verifies so many tokens, anchors included."""

# Survival of this many steps ago decides the budget, so that a step's width is known before its drafts are.
BUDGET_DELAY = 2


@dataclass(frozen=True)
class Schedule:
    """How many drafts of each request to verify.

    lengths: [R]; num_tokens: width of the step, anchors included; tokens_per_second: what is expected of it.
    """

    lengths: tuple[int, ...]
    num_tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class StepTimes:
    """Measured duration of a target step by its width; a `StepRate` through `steps_per_second`.

    Between two points the time is interpolated, below the first it is the first, and past the last it goes on as steeply as
    between the last two.

    Args:
        num_tokens: widths measured, rising
        seconds: how long a step of each took, positive

    Raises:
        ValueError: no points, widths that do not rise, times that are not positive, or as many of one as not of the other.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.num_tokens or len(self.num_tokens) != len(self.seconds):
            raise ValueError(f"step times need as many widths as times, at least one: {self.num_tokens}, {self.seconds}")
        if self.num_tokens[0] < 1 or any(b <= a for a, b in zip(self.num_tokens, self.num_tokens[1:], strict=False)):
            raise ValueError(f"the widths of step times must rise from at least 1: {self.num_tokens}")
        if not all(0.0 < value < float("inf") for value in self.seconds):
            raise ValueError(f"step times must be positive: {self.seconds}")

    def seconds_at(self, num_tokens: int) -> float:
        """Duration of a step that verifies so many tokens."""
        widths, times = self.num_tokens, self.seconds
        if num_tokens <= widths[0] or len(widths) == 1:
            return times[0]
        right = min(bisect.bisect_left(widths, num_tokens), len(widths) - 1)
        slope = (times[right] - times[right - 1]) / (widths[right] - widths[right - 1])
        # Noise can have the last two points fall; a wider step is never taken to be quicker than any that was measured.
        if num_tokens > widths[-1]:
            slope = max(slope, 0.0)
            return times[-1] + slope * (num_tokens - widths[-1])
        return times[right - 1] + slope * (num_tokens - widths[right - 1])

    def steps_per_second(self, num_tokens: int) -> float:
        """Steps of so many tokens in a second."""
        return 1.0 / self.seconds_at(num_tokens)


def survival_of(confidence: Sequence[float]) -> list[float]:
    """Multiply the chances [d] that each draft is accepted after those before it into the chances that all are."""
    survival, product = [], 1.0
    for chance in confidence:
        product *= chance
        survival.append(product)
    return survival


def schedule_prefixes(survival: Sequence[Sequence[float]], rate: StepRate) -> Schedule:
    """Admit drafts in the order of survival while each raises the expected throughput, and stop at the first that does not.

    The stop is what keeps it lossless: a draft that pays only together with a later one is not admitted, since that would be
    to look ahead.
    """
    return _scan(survival, rate, stops_early=True)


def schedule_width(survival: Sequence[Sequence[float]], rate: StepRate) -> Schedule:
    """Choose one width for all requests, for a target that pads every block to the longest.

    Each further place costs a token for every request, wanted or not. Places are admitted while each raises the expected
    throughput; what is not admitted has no say, as in `schedule_prefixes`.
    """
    requests = len(survival)
    expected, chosen = float(requests), 0
    best = expected * rate(requests) if requests else 0.0
    for place in range(max((len(row) for row in survival), default=0)):
        expected += sum(row[place] for row in survival if place < len(row))
        throughput = expected * rate(requests * (place + 2))
        if throughput <= best:
            break
        best, chosen = throughput, place + 1
    return Schedule(tuple(min(len(row), chosen) for row in survival), requests * (chosen + 1), best)


def best_prefixes(survival: Sequence[Sequence[float]], rate: StepRate) -> Schedule:
    """Find the prefixes of highest expected throughput. Not lossless when applied to the drafts whose survival it reads."""
    return _scan(survival, rate, stops_early=False)


def draft_budget(survival: Sequence[Sequence[float]], rate: StepRate, num_requests: int | None = None) -> int:
    """Find how many drafts a step should verify, given the survival that an earlier step's drafts had.

    Args:
        survival: of the earlier step
        rate: see StepRate
        num_requests: requests of the step that the budget is for; where they are not R, each of them is taken to be like the
            average of the earlier ones. None for R.
    """
    gains = sorted((chance for row in survival for chance in row if chance > 0.0), reverse=True)
    before = len(survival)
    after = before if num_requests is None else num_requests
    if not gains or not after:
        return 0
    expected, best, budget = float(after), after * rate(after), 0
    for count in range(1, len(gains) * after // before + 1):
        expected += gains[(count - 1) * before // after]
        throughput = expected * rate(after + count)
        if throughput > best:
            best, budget = throughput, count
    return budget


def admit(survival: Sequence[Sequence[float]], budget: int) -> tuple[int, ...]:
    """Give `budget` drafts to the requests where they are likeliest to survive; returns lengths [R]."""
    lengths = [0] * len(survival)
    for request, place in _likeliest_first(survival)[: max(budget, 0)]:
        lengths[request] = place + 1
    return tuple(lengths)


class DelayedScheduler:
    """Schedules by a budget from `BUDGET_DELAY` steps earlier, so that the width of a step is known before it is drafted.

    As long as there is no earlier step, `schedule_prefixes` decides.
    """

    def __init__(self, rate: StepRate) -> None:
        self._rate = rate
        self._past: deque[Sequence[Sequence[float]]] = deque(maxlen=BUDGET_DELAY)
        self._past_names: deque[frozenset[Hashable]] = deque(maxlen=BUDGET_DELAY)

    def budget(self, num_requests: int) -> int | None:
        """How many drafts the next step may verify with so many requests; None while it cannot be known."""
        if len(self._past) < BUDGET_DELAY:
            return None
        return draft_budget(self._past[0], self._rate, num_requests)

    def schedule(self, survival: Sequence[Sequence[float]], names: Sequence[Hashable] = ()) -> tuple[int, ...]:
        """Return the lengths [R] of this step, and keep its survival for a later one.

        Args:
            survival: of this step
            names: of its blocks, equal where the same block is drafted again, as after a reply that was lost. Its drafts are
                the same again, so a budget from their own survival would look ahead: earlier steps are then forgotten.
        """
        if any(name in past for past in self._past_names for name in names):
            self._past.clear()
            self._past_names.clear()
        budget = self.budget(len(survival))
        lengths = schedule_prefixes(survival, self._rate).lengths if budget is None else admit(survival, budget)
        if survival:
            self._past.append([list(row) for row in survival])
            self._past_names.append(frozenset(names))
        return lengths


def _scan(survival: Sequence[Sequence[float]], rate: StepRate, *, stops_early: bool) -> Schedule:
    requests = len(survival)
    if not requests:
        return Schedule((), 0, 0.0)
    lengths = [0] * requests
    chosen, num_tokens = tuple(lengths), requests
    width, expected = requests, float(requests)
    best = expected * rate(width)
    for request, place in _likeliest_first(survival):
        lengths[request] = place + 1
        width += 1
        expected += survival[request][place]
        throughput = expected * rate(width)
        if throughput > best:
            best, chosen, num_tokens = throughput, tuple(lengths), width
        elif stops_early:
            break
    return Schedule(chosen, num_tokens, best)


def _likeliest_first(survival: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Order (request, place) by falling survival. Ties go to the earlier place, so a request's drafts stay in their order."""
    items = [
        (-chance, place, request) for request, row in enumerate(survival) for place, chance in enumerate(row) if chance > 0.0
    ]
    return [(request, place) for _, place, request in sorted(items)]
