"""What a step of the target costs by its width, for the draft server to schedule drafts by: see `wire.VerifySchedule`."""

from __future__ import annotations

import time

import torch

from draft_engine_client.wire import StepTimeCurve
from draft_model.target_model import TargetModel

_REPETITIONS = 5
_PROFILE_CONTEXT = 128


@torch.inference_mode()
def measure_step_times(model: TargetModel, *, max_batch: int, max_width: int) -> StepTimeCurve:
    """Time steps of the target, from one token to `max_batch` blocks of `max_width` tokens, on a short context."""
    shapes = {width: (1, width) for width in range(1, max_width + 1)}
    batch = 2
    while batch <= max_batch:
        for width in range(1, max_width + 1):
            shapes.setdefault(batch * width, (batch, width))
        batch *= 2
    cache = model.new_cache(max_batch, _PROFILE_CONTEXT + max_width)
    seconds = dict.fromkeys(shapes, float("inf"))
    # In turns, so that a stretch in which the machine is busy does not fall on one width. Other processes only add to a time,
    # so the shortest counts; the first turn warms up.
    for turn in range(1 + _REPETITIONS):
        for num_tokens, (rows, width) in sorted(shapes.items()):
            token_ids = torch.zeros(rows, width, dtype=torch.long)
            starts = torch.full((rows,), _PROFILE_CONTEXT)
            began = time.perf_counter()
            model.logits(model.forward(token_ids, starts, cache).hidden.flatten(0, 1))
            if turn:
                seconds[num_tokens] = min(seconds[num_tokens], time.perf_counter() - began)
    # A narrower step is never slower than a wider one, whatever the clock says.
    shortest, rising = float("inf"), {}
    for num_tokens in sorted(seconds, reverse=True):
        shortest = rising[num_tokens] = min(shortest, seconds[num_tokens])
    widths = tuple(sorted(rising))
    return StepTimeCurve(num_tokens=widths, seconds=tuple(rising[width] for width in widths))
