"""How many of the drafts that came are worth verifying in this step.

    fixed      all of them
    threshold  those whose survival reaches a bound
    hardware   the width at which the expected throughput is highest, by step times measured at the start

The target pads every block of a step to the longest, so `hardware` chooses one width for all. No choice looks ahead, see
`draft_model.scheduler`; what is verified is as lossless as what came.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from draft_engine_client.replies import Drafts
from draft_model.scheduler import StepTimes, schedule_width
from draft_model.target_model import TargetModel

ScheduleKind = Literal["fixed", "threshold", "hardware"]
_REPETITIONS = 3
_PROFILE_CONTEXT = 128


class DraftSchedule:
    """Shortens the drafts of a step. Drafts from a drafter without confidence are taken to be sure.

    Args:
        kind: see the module docstring
        threshold: bound on survival, for `threshold`
        step_times: of the target, for `hardware`

    Raises:
        ValueError: `hardware` without step times.
    """

    def __init__(self, kind: ScheduleKind, *, threshold: float = 0.0, step_times: StepTimes | None = None) -> None:
        if kind == "hardware" and step_times is None:
            raise ValueError("a schedule by hardware needs step times")
        self._kind, self._threshold, self._step_times = kind, threshold, step_times

    def shorten(self, drafts: Sequence[Drafts]) -> list[Drafts]:
        """Return the drafts of all sequences of a step, each cut to what should be verified."""
        survival = [draft.survival or (1.0,) * len(draft.token_ids) for draft in drafts]
        if self._kind == "hardware" and self._step_times is not None:
            lengths: Sequence[int] = schedule_width(survival, self._step_times.steps_per_second).lengths
        elif self._kind == "threshold":
            lengths = [sum(chance >= self._threshold for chance in row) for row in survival]
        else:
            return list(drafts)
        return [_cut(draft, length) for draft, length in zip(drafts, lengths, strict=True)]


def _cut(draft: Drafts, length: int) -> Drafts:
    if length == len(draft.token_ids):
        return draft
    return replace(
        draft,
        token_ids=draft.token_ids[:length],
        confidence=draft.confidence[:length],
        survival=draft.survival[:length],
        probs_ids=None if draft.probs_ids is None else draft.probs_ids[:length],
        probs=None if draft.probs is None else draft.probs[:length],
    )


@torch.inference_mode()
def measure_step_times(model: TargetModel, *, max_batch: int, max_width: int) -> StepTimes:
    """Time steps of the target, from one token to `max_batch` blocks of `max_width` tokens, on a short context."""
    shapes = {width: (1, width) for width in range(1, max_width + 1)}
    batch = 2
    while batch <= max_batch:
        for width in range(1, max_width + 1):
            shapes.setdefault(batch * width, (batch, width))
        batch *= 2
    cache = model.new_cache(max_batch, _PROFILE_CONTEXT + max_width)
    seconds = {}
    for num_tokens, (rows, width) in sorted(shapes.items()):
        token_ids = torch.zeros(rows, width, dtype=torch.long)
        starts = torch.full((rows,), _PROFILE_CONTEXT)
        times = []
        for _ in range(1 + _REPETITIONS):
            began = time.perf_counter()
            model.logits(model.forward(token_ids, starts, cache).hidden.flatten(0, 1))
            times.append(time.perf_counter() - began)
        # The first run warms up, and other processes can only add to a time.
        seconds[num_tokens] = min(times[1:])
    # A wider step is never quicker, whatever the clock says.
    longest, rising = 0.0, []
    for num_tokens in sorted(seconds):
        longest = max(longest, seconds[num_tokens])
        rising.append(longest)
    return StepTimes(tuple(sorted(seconds)), tuple(rising))
