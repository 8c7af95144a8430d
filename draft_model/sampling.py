"""Choosing draft tokens from corrected logits, and saying exactly which distribution they were drawn from.

A lossless verifier needs the true draft distribution, so every filter is part of it: temperature, then top-k, then top-p,
then the cut to the probabilities that travel back. Whatever is left is renormalised, drawn from and reported.

The noise belongs to the draft alone: it is a hash of the request's seed and counter, equal on every device and in every
batch, and shares nothing with the generator that the verifier uses.

Shape symbols: B requests, D draft_vocab_size, K reported probabilities, W kept candidates.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this a temperature means argmax, as in the public reference.
_GREEDY_TEMPERATURE = 1e-5
_MANTISSA_BITS = 53


@dataclass(frozen=True)
class SamplingParams:
    """How draft tokens are chosen. temperature 0 is argmax; top_k 0 and top_p 1 filter nothing; seed None draws a fresh one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the argmax."""
        return self.temperature < _GREEDY_TEMPERATURE or self.top_k == 1


def draft_uniforms(seed: int, counter: int, count: int) -> list[float]:
    """Return `count` numbers in [0, 1), a pure function of seed and counter."""
    uniforms = []
    for index in range(count):
        key = f"draft-noise:{seed}:{counter}:{index}".encode()
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        uniforms.append((bits >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS))
    return uniforms


def filtered_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, report: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply temperature, top-k, top-p and the report cut.

    Args:
        logits: [B, D] float32
        temperature: [B] float32, positive
        top_k: [B] int64, 0 for all
        top_p: [B] float32, in (0, 1]
        report: [B] int64, how many candidates may be kept, 0 for all
    Returns:
        ids [B, W] int64, likeliest first and distinct in a row, and probabilities [B, W] float32 that sum to 1; candidates
        that were filtered out have probability 0. W is at least every row's `report`, up to D.
    """
    size = logits.shape[1]
    report_limit = torch.where(report > 0, report, size).clamp_max(size)
    top_k_limit = torch.where(top_k > 0, top_k, size).clamp_max(size)
    # Top-p needs the mass that top-k kept, so a row with top-k gathers that many; without top-k that mass is 1.
    width = int(torch.maximum(torch.where(top_k > 0, top_k_limit, report_limit), report.clamp_max(size)).max())
    probs, ids = torch.softmax(logits / temperature[:, None], dim=-1).topk(width, dim=-1)
    rank = torch.arange(width, device=logits.device)
    probs = probs.double().masked_fill(rank >= top_k_limit[:, None], 0.0)
    kept_mass = torch.where(top_k > 0, probs.sum(-1), 1.0)
    # Nucleus: a candidate stays while the mass before it is below top_p, so the first always stays.
    mass_before = probs.cumsum(-1) - probs
    outside = mass_before >= top_p.double()[:, None] * kept_mass[:, None]
    probs = probs.masked_fill(outside & (top_p < 1.0)[:, None], 0.0)
    probs = probs.masked_fill(rank >= report_limit[:, None], 0.0)
    return ids, (probs / probs.sum(-1, keepdim=True)).float()


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one column per row of probs [B, W] by inverting its cumulative sum at uniforms [B]; never one of probability 0."""
    cumulative = probs.double().cumsum(-1)
    threshold = uniforms.double()[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)
    # A threshold that rounds up to the total belongs to the last column that has mass.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(index, last)[:, 0]


class BlockSampler:
    """Chooses the tokens of one block, slot by slot, for all requests of a batch.

    Args:
        sampling: one per request.
        counters: [B] noise counters; a counter must not be used twice with one seed.
        report: how many probabilities each request wants back, 0 for none.
        num_slots: slots that will be chosen.
        device: where the logits are.
    """

    def __init__(
        self,
        sampling: Sequence[SamplingParams],
        counters: Sequence[int],
        report: Sequence[int],
        num_slots: int,
        device: torch.device,
    ) -> None:
        self._report = report
        self._probs_ids: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._device = device
        self._filtered = self._rows(sampling, counters, num_slots, self._is_filtered(sampling, report, wanted=True))
        self._plain = self._rows(sampling, counters, num_slots, self._is_filtered(sampling, report, wanted=False))
        self._width = max(report, default=0)

    @staticmethod
    def _is_filtered(sampling: Sequence[SamplingParams], report: Sequence[int], *, wanted: bool) -> list[int]:
        sampled = [(i, s) for i, s in enumerate(sampling) if not s.is_greedy]
        return [i for i, s in sampled if (s.top_k > 0 or s.top_p < 1.0 or report[i] > 0) == wanted]

    def _rows(
        self, sampling: Sequence[SamplingParams], counters: Sequence[int], num_slots: int, rows: list[int]
    ) -> _SampledRows | None:
        if not rows:
            return None
        uniforms = []
        for i in rows:
            seed = sampling[i].seed
            uniforms.append(draft_uniforms(secrets.randbits(63) if seed is None else seed, counters[i], num_slots))
        return _SampledRows(
            rows=torch.tensor(rows, device=self._device),
            temperature=torch.tensor([sampling[i].temperature for i in rows], device=self._device),
            top_k=torch.tensor([sampling[i].top_k for i in rows], device=self._device),
            top_p=torch.tensor([sampling[i].top_p for i in rows], device=self._device),
            report=torch.tensor([self._report[i] for i in rows], device=self._device),
            uniforms=torch.tensor(uniforms, dtype=torch.float64, device=self._device),
        )

    def choose(self, slot: int, logits: Tensor) -> Tensor:
        """Choose a draft id for each request from the corrected logits [B, D] float32 of one slot; returns [B] int64."""
        chosen = logits.argmax(dim=-1)
        if self._plain is not None:
            part = self._plain
            probs = torch.softmax(logits[part.rows] / part.temperature[:, None], dim=-1)
            chosen[part.rows] = draw(probs, part.uniforms[:, slot])
        filtered = None
        if self._filtered is not None:
            part = self._filtered
            filtered = filtered_distribution(logits[part.rows], part.temperature, part.top_k, part.top_p, part.report)
            chosen[part.rows] = filtered[0].gather(1, draw(filtered[1], part.uniforms[:, slot])[:, None])[:, 0]
        if self._width:
            self._keep_probs(logits, chosen, filtered)
        return chosen

    def _keep_probs(self, logits: Tensor, chosen: Tensor, filtered: tuple[Tensor, Tensor] | None) -> None:
        """Remember the distribution each request was drawn from: its filtered one, or a point mass."""
        width = min(self._width, logits.shape[1])
        # The chosen id first, then others that have probability 0, so that the ids of a row are distinct.
        ids = logits.scatter(1, chosen[:, None], float("inf")).topk(width, dim=-1).indices
        probs = torch.zeros(len(logits), width, device=self._device)
        probs[:, 0] = 1.0
        if self._filtered is not None and filtered is not None:
            rows = self._filtered.rows
            reported = min(width, filtered[0].shape[1])
            ids[rows, :reported] = filtered[0][:, :reported]
            probs[rows, :reported] = filtered[1][:, :reported]
        self._probs_ids.append(ids)
        self._probs.append(probs)

    def reported(self) -> tuple[Tensor, Tensor] | None:
        """Return draft ids and probabilities [B, slots, K] of the slots chosen so far, K the most that any request wants.

        Columns past a request's own wish hold nothing of use. None when nobody wants any.
        """
        if not self._width:
            return None
        return torch.stack(self._probs_ids, dim=1), torch.stack(self._probs, dim=1)


@dataclass(frozen=True)
class _SampledRows:
    """Parameters of the requests that are drawn the same way, one entry per row."""

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    report: Tensor
    uniforms: Tensor
