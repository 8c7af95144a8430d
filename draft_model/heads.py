"""The heads: from block states to corrected logits and confidence.

A block's slots are computed at once and know nothing of each other's tokens; the Markov head repairs that, left to right, with
a low-rank bias from the token drafted before. Its embedding `markov_w1` is indexed by TARGET token ids (the anchor may be any
token), the rows of `markov_w2` and of the LM head are DRAFT ids.

Shape symbols: B requests, S slots, E hidden_size, V vocab_size, D draft_vocab_size, r markov_rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_model.checkpoint import TensorReader, Vocabulary
from draft_model.config import DraftConfig
from draft_model.linear import Linear, compute_dtype


class MarkovHead(Protocol):
    """A bias on the logits of a slot that depends on the tokens before it."""

    def embed(self, previous_ids: Tensor) -> Tensor:
        """Embed target token ids [...] to [..., r]."""

    def start(self, batch_size: int) -> Tensor | None:
        """Return the state before the first slot."""

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias [B, D] of a slot and the next state, from embedded [B, r] and block states hidden [B, E]."""


class _RankBias:
    """What the three kinds share: the embedding of the previous token and the map from rank to draft logits."""

    def __init__(self, config: DraftConfig, tensors: TensorReader, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = compute_dtype(dtype, device)
        w1 = tensors.take("markov_head.markov_w1.weight", config.vocab_size, config.markov_rank)
        w2 = tensors.take("markov_head.markov_w2.weight", config.draft_vocab_size, config.markov_rank)
        self._w1 = w1.to(device, dtype)
        self._w2 = Linear(w2.to(device), dtype)

    def embed(self, previous_ids: Tensor) -> Tensor:
        return F.embedding(previous_ids, self._w1).to(self._dtype)

    def start(self, batch_size: int) -> Tensor | None:  # noqa: ARG002 (only the rnn head has a state)
        return None


class VanillaHead(_RankBias):
    """bias = W2 e."""

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        """See `MarkovHead.step`."""
        return self._w2(embedded), state


class GatedHead(_RankBias):
    """bias = W2 (e * sigmoid(gate [h; e]))."""

    def __init__(self, config: DraftConfig, tensors: TensorReader, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, tensors, dtype, device)
        rank = config.markov_rank
        weight = tensors.take("markov_head.gate_proj.weight", rank, config.hidden_size + rank)
        bias = tensors.take("markov_head.gate_proj.bias", rank)
        self._gate = Linear(weight.to(device), dtype, bias.to(device))

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead.step`."""
        gate = torch.sigmoid(self._gate(torch.cat([hidden, embedded], dim=-1)))
        return self._w2(embedded * gate), state


class RnnHead(_RankBias):
    """A recurrent cell over the drafted tokens of a block; its state is zero before every block.

    [g; c; o] = joint [s; e; h], bias = W2 tanh(o), and then s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c).
    """

    def __init__(self, config: DraftConfig, tensors: TensorReader, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, tensors, dtype, device)
        rank = self._rank = config.markov_rank
        weight = tensors.take("markov_head.joint_proj.weight", 3 * rank, 2 * rank + config.hidden_size)
        bias = tensors.take("markov_head.joint_proj.bias", 3 * rank)
        self._joint = Linear(weight.to(device), dtype, bias.to(device))
        self._device = device

    def start(self, batch_size: int) -> Tensor | None:
        """See `MarkovHead.start`."""
        return torch.zeros(batch_size, self._rank, dtype=self._dtype, device=self._device)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead.step`."""
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self._joint(torch.cat([state, embedded, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return self._w2(torch.tanh(output)), gate * state + (1 - gate) * torch.tanh(candidate)


class LmHead:
    """Base logits of block states, with the scale and soft cap of the model."""

    def __init__(self, config: DraftConfig, vocabulary: Vocabulary, dtype: torch.dtype, device: torch.device) -> None:
        self._linear = Linear(vocabulary.lm_head.to(device), dtype)
        self._scale, self._cap = config.logit_scale, config.logit_softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map [T, E] to [T, D] float32."""
        logits = self._linear(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


class ConfidenceHead:
    """The chance that a slot's token is accepted, given that those before it were. Kept in float32."""

    def __init__(self, config: DraftConfig, tensors: TensorReader, device: torch.device) -> None:
        self._weight = tensors.take("confidence_head.proj.weight", 1, config.confidence_width).to(device).float()
        self._bias = tensors.take("confidence_head.proj.bias", 1).to(device).float()
        self._with_markov = config.confidence_with_markov

    def logits(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Return [B, S] float32 from block states [B, S, E] and the Markov embeddings [B, S, r] of the tokens before."""
        if self._with_markov and embedded is not None:
            hidden = torch.cat([hidden, embedded], dim=-1)
        return F.linear(hidden.float(), self._weight, self._bias)[..., 0]


def load_markov_head(config: DraftConfig, tensors: TensorReader, dtype: torch.dtype, device: torch.device) -> MarkovHead | None:
    """Load the head that the config names; None when the model has none. Raises CheckpointError as `TensorReader.take`."""
    if config.head_type == "vanilla":
        return VanillaHead(config, tensors, dtype, device)
    if config.head_type == "gated":
        return GatedHead(config, tensors, dtype, device)
    if config.head_type == "rnn":
        return RnnHead(config, tensors, dtype, device)
    return None
