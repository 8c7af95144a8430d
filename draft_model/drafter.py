"""The drafter: context rows in, blocks of draft tokens out, for many requests in one forward.

    write_context   features -> context states -> each layer's rows, written to the pages of their sessions
    draft           [anchor, mask, ...] -> backbone over context and block -> base logits -> Markov head, slot by slot

It keeps no sessions. The caller owns pages and positions; a row's place in its pages and the position it stands for are told
apart, because a session may lack the rows of an early stretch. A block's own rows are scratch: they are written after the
session's last row and belong to nobody once `draft` has returned.

Shape symbols: B requests, S draft_block_size, n rows, E hidden_size, D draft_vocab_size, d drafts of a request, K reported
probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.block_attention import BlockMetadata
from attention.cache import PagedKVCache, slots_of
from attention.probe import open_attention
from attention.selector import Selection
from draft_model.backbone.base import Backbone, DraftBlocks, ProjectionWeights, attention_problem
from draft_model.backbone.gqa import GqaBackbone
from draft_model.backbone.mla import MlaBackbone
from draft_model.calibration import FILE_NAME as CALIBRATION_FILE
from draft_model.calibration import load_calibration
from draft_model.checkpoint import TensorReader, Vocabulary, load_vocabulary
from draft_model.checkpoint import fingerprint as fingerprint_of
from draft_model.config import DraftConfig, MlaGeometry
from draft_model.context_bias import BlockBias, ContextBias
from draft_model.errors import CheckpointError, DraftRequestError
from draft_model.formats import load_config
from draft_model.heads import ConfidenceHead, LmHead, load_markov_head
from draft_model.linear import compute_dtype
from draft_model.rotary import RotaryEmbedding, Rotation
from draft_model.sampling import BlockSampler, SamplingParams

GREEDY = SamplingParams()


@dataclass(frozen=True)
class ContextWrite:
    """Context rows of one session.

    Args:
        page_ids: the session's pages; row r lies in page_ids[r // page_size] at r % page_size.
        first_row: row that the first of `features` is written to.
        position: absolute position of that row.
        features: [n, feature_width] captured states, or [n, E] context states.
        is_projected: whether they are context states.
    """

    page_ids: Sequence[int]
    first_row: int
    position: int
    features: Tensor
    is_projected: bool = False


@dataclass(frozen=True)
class DraftRequest:
    """One block to draft.

    Args:
        page_ids: the session's pages, with room for rows [num_rows, num_rows + S).
        num_rows: context rows held.
        position: absolute position of the anchor.
        anchor_token_id: the last committed token.
        num_draft_tokens: drafts wanted, 1 to `max_draft_tokens`; the block is S wide whatever is wanted.
        sampling: how tokens are chosen.
        draft_probs_topk: report the distribution of each draft with this support; 0 for none.
        rng_counter: of the draft noise; one counter serves one block.
        context_token_ids: the tokens before the anchor as far as they are known, for the context bias; empty for none.
    """

    page_ids: Sequence[int]
    num_rows: int
    position: int
    anchor_token_id: int
    num_draft_tokens: int
    sampling: SamplingParams = GREEDY
    draft_probs_topk: int = 0
    rng_counter: int = 0
    context_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class DraftProposal:
    """What was drafted: d target token ids, their confidence and survival (both empty without a confidence head).

    probs_ids [d, K] int32 and probs [d, K] float32 are the distribution each draft was drawn from, when asked for.
    """

    token_ids: Sequence[int]
    confidence: Sequence[float]
    survival: Sequence[float]
    probs_ids: Tensor | None = None
    probs: Tensor | None = None


class Drafter:
    """A loaded draft model with its context pool. Owned by one thread at a time.

    Attributes:
        config: what the model is
        fingerprint: hash of the checkpoint
        cache: the context pool
        selections: attention backend and decode path of each layer
        head_seconds: time of the last `draft` in the sequential head; on an asynchronous device it includes the wait for the
            forward before it
        device, dtype: where it runs, and what activations and context rows are kept in
    """

    def __init__(
        self,
        config: DraftConfig,
        tensors: TensorReader,
        vocabulary: Vocabulary,
        *,
        device: torch.device,
        weight_dtype: torch.dtype,
        kv_cache_memory: int,
        page_size: int,
        attention_backend: str | None = None,
        context_bias: Sequence[float] = (),
        fingerprint: str = "",
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """Args:
        config: of the checkpoint
        tensors: the checkpoint; every tensor is taken
        vocabulary: embedding, LM head and vocabulary map
        device: where to run
        weight_dtype: what weights are kept in
        kv_cache_memory: bytes of the context pool
        page_size: rows in a page
        attention_backend: name of the backend to use, None for the best that fits
        context_bias: bonus of a token that continues an earlier match of 1, 2, ... tokens; empty for none
        fingerprint: hash of the checkpoint
        temperatures: [d] that the confidence of each position is scaled by; None leaves it as the head gives it

        Raises:
            CheckpointError: a tensor is missing, left over or does not fit; or the pool has room for no page.
            AttentionSelectionError: no path of any backend can serve a layer.
        """
        self.config, self.fingerprint = config, fingerprint
        self.device, self.dtype = device, compute_dtype(weight_dtype, device)
        self.page_size, self.draft_block_size = page_size, config.draft_block_size
        self._backbone: Backbone = _load_backbone(config, tensors, weight_dtype, device)
        self._markov = load_markov_head(config, tensors, weight_dtype, device)
        self._confidence = ConfidenceHead(config, tensors, device) if config.has_confidence else None
        self._temperatures = None if temperatures is None else torch.tensor(temperatures, device=device)
        tensors.finish()
        self._embedding = vocabulary.embedding.to(device, weight_dtype)
        self._lm_head = LmHead(config, vocabulary, weight_dtype, device)
        self._draft_to_target = None if vocabulary.draft_to_target is None else vocabulary.draft_to_target.to(device)
        self._rotary = RotaryEmbedding(config.rope, device)

        row_bytes = config.kv_row_width * self.dtype.itemsize
        num_pages = kv_cache_memory // (config.num_layers * page_size * row_bytes)
        if num_pages < 2:
            raise CheckpointError(
                f"kv_cache_memory of {kv_cache_memory} bytes has no room for two pages of {page_size} rows "
                f"({config.num_layers} layers of {row_bytes} bytes a row)"
            )
        problems = [
            attention_problem(config, layer, page_size=page_size, device=device, dtype=self.dtype)
            for layer in range(config.num_layers)
        ]
        self.cache = PagedKVCache.for_problem(problems[0], num_layers=config.num_layers, num_pages=num_pages)
        self._attention = open_attention(problems, attention_backend)
        self.selections: tuple[Selection, ...] = tuple(attention.selection for attention in self._attention)
        self.head_seconds = 0.0
        self._context_bias = ContextBias(context_bias)
        self._draft_ids = (
            None if vocabulary.draft_to_target is None else _inverse(vocabulary.draft_to_target, config.vocab_size)
        )
        self._first_slot = 0 if config.sample_from_anchor else 1

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        target_path: Path | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        kv_cache_memory: int = 256 * 2**20,
        page_size: int = 64,
        attention_backend: str | None = None,
        context_bias: Sequence[float] = (),
    ) -> Drafter:
        """Load a checkpoint folder.

        Args:
            path: folder with config.json and safetensors
            target_path: the target's folder, for a draft that shares its embedding or head
            device: where to run
            dtype: of the weights; None keeps the stored one
            kv_cache_memory: bytes of the context pool
            page_size: rows in a page
            attention_backend: name of the backend to use, None for the best that fits
            context_bias: bonus of a token that continues an earlier match of 1, 2, ... tokens; empty for none

        Raises:
            CheckpointError: the checkpoint cannot be loaded exactly; the message names file, key or tensor.
        """
        config = load_config(path)
        tensors = TensorReader(path, config.stored_dtype)
        vocabulary = load_vocabulary(config, tensors, target_path)
        checkpoint = fingerprint_of(path)
        calibration = load_calibration(path, config.max_draft_tokens) if config.has_confidence else None
        if calibration is not None and calibration.fingerprint != checkpoint:
            raise CheckpointError(f"{path / CALIBRATION_FILE} belongs to other weights; calibrate again, or delete it")
        return cls(
            config,
            tensors,
            vocabulary,
            device=torch.device(device),
            weight_dtype=dtype or config.stored_dtype or vocabulary.embedding.dtype,
            kv_cache_memory=kv_cache_memory,
            page_size=page_size,
            attention_backend=attention_backend,
            context_bias=context_bias,
            fingerprint=checkpoint,
            temperatures=None if calibration is None else calibration.temperatures,
        )

    def copy_page(self, source: int, destination: int) -> None:
        """Copy the rows of one page to another, in every layer."""
        self.cache.copy_page(source, destination)

    @property
    def projection(self) -> ProjectionWeights:
        """How raw features become projected rows, for targets that do it themselves."""
        return self._backbone.project.weights

    @torch.inference_mode()
    def write_context(self, writes: Sequence[ContextWrite]) -> None:
        """Write context rows of several sessions.

        Raises:
            DraftRequestError: wrong_shape; nothing was written.
            ValueError: the pages of a session end before its rows do.
        """
        raw = [self._rows(write) for write in writes if not write.is_projected]
        states = [self._backbone.project(_cat(raw))] if raw else []
        states += [self._rows(write) for write in writes if write.is_projected]
        positions: list[int] = []
        slots: list[int] = []
        for write in sorted(writes, key=lambda write: write.is_projected):
            count = len(write.features)
            positions += range(write.position, write.position + count)
            slots += slots_of(write.page_ids, write.first_row, count, self.page_size)
        if slots:
            self._backbone.write_context(_cat(states), self._rotation(positions), self._indices(slots), self.cache)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """Draft one block for each request, in one forward.

        Raises:
            DraftRequestError: too_many_draft_tokens, token_out_of_range.
            ValueError: the pages of a session have no room for its block.
        """
        if not requests:
            return []
        wanted = max(self._check(request) for request in requests)
        batch, size = len(requests), self.draft_block_size
        hidden = self._block_states(requests).view(batch, size, -1)[:, self._first_slot : self._first_slot + wanted]
        base = self._lm_head(hidden.reshape(batch * wanted, -1)).view(batch, wanted, -1)

        began = time.perf_counter()
        sampler = BlockSampler(
            [request.sampling for request in requests],
            [request.rng_counter for request in requests],
            [request.draft_probs_topk for request in requests],
            wanted,
            self.device,
        )
        bias = BlockBias(
            [self._context_bias.look_up(r.context_token_ids, r.anchor_token_id, wanted) for r in requests], self._draft_ids
        )
        previous = self._indices([request.anchor_token_id for request in requests])
        drafted, embedded = [], []
        state = None if self._markov is None else self._markov.start(batch)
        for slot in range(wanted):
            logits = base[:, slot]
            if self._markov is not None:
                embedded.append(self._markov.embed(previous))
                markov_bias, state = self._markov.step(embedded[-1], hidden[:, slot], state)
                logits = logits + markov_bias
            bias.add_to(logits, slot)
            previous = self._to_target(sampler.choose(slot, logits))
            bias.follow(previous, slot)
            drafted.append(previous)
        token_ids = torch.stack(drafted, dim=1).tolist()
        confidence = None
        if self._confidence is not None:
            logits = self._confidence.logits(hidden, torch.stack(embedded, dim=1) if embedded else None)
            if self._temperatures is not None:
                logits = logits / self._temperatures[:wanted]
            confidence = torch.sigmoid(logits)
        proposals = self._proposals(requests, token_ids, confidence, sampler)
        self.head_seconds = time.perf_counter() - began
        return proposals

    def warm_up(self) -> None:
        """Run one context write and one draft over scratch pages, so that the first request finds everything loaded."""
        pages = list(range(1, 2 + self.draft_block_size // self.page_size))
        if pages[-1] >= self.cache.num_pages:
            return
        features = torch.zeros(1, self.config.feature_width, dtype=self.dtype, device=self.device)
        self.write_context([ContextWrite(pages, 0, 0, features)])
        self.draft([DraftRequest(pages, 1, 1, 0, self.config.max_draft_tokens)])

    def _rows(self, write: ContextWrite) -> Tensor:
        width = self.config.hidden_size if write.is_projected else self.config.feature_width
        if write.features.ndim != 2 or write.features.shape[1] != width:
            raise DraftRequestError(
                "wrong_shape",
                f"context rows must be [n, {width}]; they are {list(write.features.shape)}",
                {"expected_width": width},
            )
        return write.features.to(self.device, self.dtype)

    def _block_states(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Run the backbone over the blocks; returns [B * S, E] after the final norm."""
        size, masks = self.draft_block_size, [self.config.mask_token_id] * (self.draft_block_size - 1)
        ids = [token_id for request in requests for token_id in (request.anchor_token_id, *masks)]
        x = F.embedding(self._indices(ids), self._embedding).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        positions: list[int] = []
        slots: list[int] = []
        for request in requests:
            positions += range(request.position, request.position + size)
            slots += slots_of(request.page_ids, request.num_rows, size, self.page_size)
        metadata = BlockMetadata.build(
            [request.page_ids for request in requests],
            [request.num_rows + size for request in requests],
            page_size=self.page_size,
            device=self.device,
        )
        blocks = DraftBlocks(len(requests), self._rotation(positions), self._indices(slots), metadata)
        return self._backbone.forward(x, blocks, self.cache, self._attention)

    def _proposals(
        self,
        requests: Sequence[DraftRequest],
        token_ids: list[list[int]],
        confidence: Tensor | None,
        sampler: BlockSampler,
    ) -> list[DraftProposal]:
        chances = [[] for _ in requests] if confidence is None else confidence.tolist()
        survivals = [[] for _ in requests] if confidence is None else confidence.cumprod(dim=1).tolist()
        reported = sampler.reported()
        proposals = []
        for row, request in enumerate(requests):
            count, probs_ids, probs = request.num_draft_tokens, None, None
            if reported is not None and request.draft_probs_topk:
                width = min(request.draft_probs_topk, reported[0].shape[2])
                probs_ids = self._to_target(reported[0][row, :count, :width]).int().cpu()
                probs = reported[1][row, :count, :width].float().cpu()
            proposals.append(
                DraftProposal(token_ids[row][:count], chances[row][:count], survivals[row][:count], probs_ids, probs)
            )
        return proposals

    def _check(self, request: DraftRequest) -> int:
        if not 0 < request.num_draft_tokens <= self.config.max_draft_tokens:
            raise DraftRequestError(
                "too_many_draft_tokens",
                f"{request.num_draft_tokens} drafts were asked for; a block yields 1 to {self.config.max_draft_tokens}",
                {"num_draft_tokens": request.num_draft_tokens, "max_draft_tokens": self.config.max_draft_tokens},
            )
        if not 0 <= request.anchor_token_id < self.config.vocab_size:
            raise DraftRequestError(
                "token_out_of_range",
                f"the anchor is token {request.anchor_token_id}; the vocabulary has {self.config.vocab_size}",
                {"token_id": request.anchor_token_id, "vocab_size": self.config.vocab_size},
            )
        return request.num_draft_tokens

    def _rotation(self, positions: Sequence[int]) -> Rotation:
        return self._rotary(self._indices(positions))

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._draft_to_target is None else self._draft_to_target[draft_ids]


def _load_backbone(config: DraftConfig, tensors: TensorReader, dtype: torch.dtype, device: torch.device) -> Backbone:
    if isinstance(config.attention, MlaGeometry):
        return MlaBackbone(config, config.attention, tensors, dtype, device)
    return GqaBackbone(config, config.attention, tensors, dtype, device)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _inverse(draft_to_target: Tensor, vocab_size: int) -> list[int]:
    """Return the draft id of each target id, -1 where there is none."""
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.long)
    draft_ids[draft_to_target.cpu()] = torch.arange(len(draft_to_target))
    listed: list[int] = draft_ids.tolist()
    return listed


__all__ = ["ContextWrite", "DraftProposal", "DraftRequest", "Drafter", "SamplingParams"]
