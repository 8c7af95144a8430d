"""From the target's hidden states to what the wire carries: gathered -> projected -> rows on the host.

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
from torch.nn import functional

from draft_engine_client.codec import TensorView
from draft_engine_client.projection import ContextProjection
from draft_engine_client.wire import FeatureDtype

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def vllm_layer_ids(target_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Numbers that vLLM gives to the outputs of `target_layer_ids`, ascending."""
    return tuple(sorted({layer + 1 for layer in target_layer_ids}))


def gather_features(states: Sequence[Tensor], indices: Sequence[int], target_layer_ids: Sequence[int]) -> Tensor:
    """Pick rows out of the states of a step, and put the drafter's layers side by side.

    Args:
        states: one [T, H] for each of `vllm_layer_ids(target_layer_ids)`, in that order
        indices: [N] rows to pick
        target_layer_ids: the drafter's layers, in its order

    Returns:
        [N, len(target_layer_ids) * H], of the states' dtype and on their device.
    """
    numbers = vllm_layer_ids(target_layer_ids)
    if len(states) != len(numbers):
        raise ValueError(f"the target returned {len(states)} hidden states; {len(numbers)} were asked for")
    place = {number: index for index, number in enumerate(numbers)}
    picked = torch.tensor(indices, dtype=torch.int64, device=states[0].device)
    columns = [states[place[layer + 1]].index_select(0, picked) for layer in target_layer_ids]
    return torch.cat(columns, dim=1)


class RowProjection:
    """The drafter's context projection, on the target's device.

    Args:
        projection: as the draft server gave it.
    """

    def __init__(self, projection: ContextProjection, device: torch.device | str) -> None:
        self.source = projection
        self._weight = _to_tensor(projection.weight).to(device)
        self._norm = _to_tensor(projection.norm).to(device)

    def __call__(self, features: Tensor) -> Tensor:
        """Map [N, F] to [N, E], in the projection's dtype."""
        projected = functional.linear(features.to(self._weight.dtype), self._weight)
        return functional.rms_norm(projected, self._norm.shape, self._norm, self.source.eps)


def _to_tensor(view: TensorView) -> Tensor:
    tensor = torch.from_numpy(view.to_array().copy())
    return tensor.view(torch.bfloat16) if view.dtype == "BF16" else tensor


def to_wire(rows: Tensor, dtype: FeatureDtype) -> NDArray[Any]:
    """Bring rows to the host, as `dtype`; bfloat16 as uint16 bits."""
    rows = rows.to(_DTYPES[dtype]).contiguous().cpu()
    if dtype == "bfloat16":
        return np.asarray(rows.view(torch.uint16).numpy())
    return np.asarray(rows.numpy())
