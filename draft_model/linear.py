"""Linear layers for few rows: weights held the way the device multiplies them fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_model.target_model import PackedLinear


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
