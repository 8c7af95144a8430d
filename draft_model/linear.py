"""Linear layers for few rows: weights held the way the device multiplies them fastest."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

WeightDtype = Literal["float16", "float32"]

# FBGEMM multiplies in tiles of up to six rows; tiles of one or two rows sum in another order than the others.
_TILE_ROWS = 6
_MIN_TILE_ROWS = 3


def padded_rows(rows: int) -> int:
    """Return the smallest row count >= `rows` for which every FBGEMM tile sums in the same order."""
    tail = rows % _TILE_ROWS
    if 0 < tail < _MIN_TILE_ROWS or rows < _MIN_TILE_ROWS:
        return rows - tail + _MIN_TILE_ROWS
    return rows


def has_packed_float16() -> bool:
    """Tell whether this build of torch has FBGEMM's float16-weight linear (x86-64 builds do)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class PackedLinear:
    """`y = x @ weight.T` for few rows, with the weight packed once.

    float16 weights halve what a step reads from memory; sums stay in float32. Without FBGEMM the weight is rounded to the
    same float16 values and kept in float32.
    """

    def __init__(self, weight: Tensor, dtype: WeightDtype) -> None:
        self._packed = None
        if dtype == "float16" and has_packed_float16():
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)
        else:
            self._weight = weight.to(getattr(torch, dtype)).float().contiguous()

    @property
    def weight(self) -> Tensor:
        """[out, in] float32, as it is multiplied."""
        if self._packed is not None:
            unpacked: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
            return unpacked.float()
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] float32 to [T, out] float32."""
        if self._packed is not None:
            out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
            return out
        return F.linear(x, self._weight)


class Linear:
    """`y = x @ weight.T + bias`, without autograd.

    On a CPU float16 weights are packed for FBGEMM and sums are float32: half the memory traffic of float32 weights, and the
    same values as the stored ones. Elsewhere weights and activations share one dtype.

    Args:
        weight: [out, in], on the device of its inputs
        weight_dtype: what the weight is kept in; inputs are `compute_dtype` of it
        bias: [out] or None

    Attributes:
        dtype: of inputs and outputs
    """

    def __init__(self, weight: Tensor, weight_dtype: torch.dtype, bias: Tensor | None = None) -> None:
        self.dtype = dtype = compute_dtype(weight_dtype, weight.device)
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.to(dtype)
        self._packed = None
        if dtype != weight_dtype:
            self._packed = PackedLinear(weight, "float16")
        else:
            self._weight = weight.to(dtype).contiguous()

    @property
    def weight(self) -> Tensor:
        """[out, in] of `dtype`, as it is multiplied."""
        return self._weight if self._packed is None else self._packed.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        out = self._packed(x)
        return out if self._bias is None else out + self._bias


def compute_dtype(weight_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and KV: float32 beside float16 weights on a CPU, else the weights' own."""
    if device.type == "cpu" and weight_dtype == torch.float16:
        return torch.float32
    return weight_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)
