"""From the target's hidden states to what the wire carries.

vLLM numbers a hidden state by the layer that reads it, so the output of layer i is number i + 1, and it returns the states in
ascending order. A drafter numbers a state by the layer that made it, and lists them in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_engine_client.wire import FeatureDtype

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def vllm_layer_ids(target_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Numbers that vLLM gives to the outputs of `target_layer_ids`, ascending."""
    return tuple(sorted({layer + 1 for layer in target_layer_ids}))


def gather_features(
    states: Sequence[Tensor], indices: Sequence[int], target_layer_ids: Sequence[int], dtype: FeatureDtype
) -> NDArray[Any]:
    """Pick rows out of the states of a step, put the drafter's layers side by side, and bring them to the host.

    Args:
        states: one [T, H] for each of `vllm_layer_ids(target_layer_ids)`, in that order
        indices: [N] rows to pick
        target_layer_ids: the drafter's layers, in its order

    Returns:
        [N, len(target_layer_ids) * H] of `dtype`, bfloat16 as uint16 bits.
    """
    numbers = vllm_layer_ids(target_layer_ids)
    if len(states) != len(numbers):
        raise ValueError(f"the target returned {len(states)} hidden states; {len(numbers)} were asked for")
    place = {number: index for index, number in enumerate(numbers)}
    picked = torch.tensor(indices, dtype=torch.int64, device=states[0].device)
    columns = [states[place[layer + 1]].index_select(0, picked) for layer in target_layer_ids]
    rows = torch.cat(columns, dim=1).to(_DTYPES[dtype]).contiguous().cpu()
    if dtype == "bfloat16":
        return np.asarray(rows.view(torch.uint16).numpy())
    return np.asarray(rows.numpy())
