"""The distribution that the target samples from: temperature, then top-k, then top-p, as vLLM orders them.

Shape symbols: Q rows, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TargetSampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep everything; seed None draws a fresh one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the argmax."""
        return self.temperature == 0.0 or self.top_k == 1


def target_distribution(logits: Tensor, sampling: TargetSampling) -> Tensor:
    """Turn logits [Q, V] into the probabilities [Q, V] float64 that tokens are drawn from; `sampling` is not greedy."""
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    probs = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        # A token stays while the mass before it is below top_p, so the first always stays.
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.scatter(-1, order, ordered.masked_fill(dropped, 0.0))
    return probs / probs.sum(-1, keepdim=True)
