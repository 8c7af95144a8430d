"""What a step of the target costs by its width, for the draft server to schedule drafts by: see `wire.VerifySchedule`."""

from __future__ import annotations

import time

import torch

from draft_engine_client.wire import StepTimeCurve
from draft_model.target_model import TargetModel

_REPETITIONS = 3
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
    return StepTimeCurve(num_tokens=tuple(sorted(seconds)), seconds=tuple(rising))
