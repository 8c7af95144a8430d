"""A drafter small enough to read, for tests of everything around the model.

`FakeDrafter` has the interface of `draft_model.drafter.Drafter` and real pages, and no weights. Its drafts are a hash of
the rows it finds in the pages it is given, the anchor and the positions. So a lost, stale, foreign, doubled or misplaced
row changes the drafts, and `expected_drafts` says what a drafter that had seen exactly some rows would have answered.
Like the real one it writes its block over the scratch rows, here with values that no context row has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_engine_client.wire import ModelFacts
from draft_model.backbone.base import ProjectionWeights
from draft_model.drafter import ContextWrite, DraftProposal, DraftRequest

_SCRATCH = -1.0


def row_digest(position: int, features: Tensor) -> float:
    """The value the fake keeps of one context row; exact in float64."""
    raw = features.detach().to(torch.float32).contiguous().numpy().tobytes()
    return float(int.from_bytes(hashlib.blake2b(raw + str(position).encode(), digest_size=6).digest(), "little"))


def expected_drafts(
    rows: Sequence[float], position: int, anchor_token_id: int, num_draft_tokens: int, vocab_size: int
) -> list[int]:
    """The drafts of a fresh session that holds exactly `rows` (see `row_digest`), with its anchor at `position`."""
    state = hashlib.blake2b(repr((list(rows), position, anchor_token_id)).encode(), digest_size=32).digest()
    drafts = []
    for slot in range(num_draft_tokens):
        state = hashlib.blake2b(state + bytes([slot]), digest_size=32).digest()
        drafts.append(int.from_bytes(state[:4], "little") % vocab_size)
    return drafts


@dataclass
class FakeDrafter:
    """See the module docstring. `rows_written` and `batches` record what the engine asked for."""

    num_pages: int = 64
    page_size: int = 4
    draft_block_size: int = 4
    vocab_size: int = 1_000
    feature_width: int = 8
    projected_width: int = 4
    max_context: int = 4_096
    fail_on_anchor: int | None = None
    rows_written: int = 0
    head_seconds: float = 0.0
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pool = torch.full((self.num_pages, self.page_size), float("nan"), dtype=torch.float64)

    @property
    def facts(self) -> ModelFacts:
        """What a server over this drafter tells its clients: a target of 3 layers, two of which are sent."""
        return ModelFacts(
            model_id="fake-drafter",
            fingerprint="fake",
            source_format="fake",
            draft_block_size=self.draft_block_size,
            max_draft_tokens=self.draft_block_size,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.vocab_size,
            target_hidden_size=self.feature_width // 2,
            target_num_layers=3,
            target_layer_ids=(0, 2),
            feature_width=self.feature_width,
            projected_width=self.projected_width,
            feature_dtypes=("float16", "bfloat16", "float32"),
            has_confidence=True,
            device="cpu",
            dtype="float32",
            attention_backends=("fake",),
            decode_paths=("fused",),
        )

    @property
    def projection(self) -> ProjectionWeights:
        """A projection of its own; drafts hash whatever rows they are given."""
        weight = torch.arange(float(self.projected_width * self.feature_width)).view(self.projected_width, -1) / 16.0
        return ProjectionWeights(weight, torch.linspace(0.5, 1.5, self.projected_width), 1e-6)

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page to another."""
        self._pool[destination] = self._pool[source]

    def write_context(self, writes: Sequence[ContextWrite]) -> None:
        """Keep a digest of each row in its slot."""
        for write in writes:
            for offset, features in enumerate(write.features):
                self._store(write.page_ids, write.first_row + offset, row_digest(write.position + offset, features))
            self.rows_written += len(write.features)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """Hash what the pages hold into drafts.

        Raises:
            RuntimeError: a request's anchor is `fail_on_anchor`, as a crashing forward would.
        """
        self.batches.append(len(requests))
        if any(request.anchor_token_id == self.fail_on_anchor for request in requests):
            raise RuntimeError("the fake forward was told to fail")
        proposals = []
        for request in requests:
            rows = [self._load(request.page_ids, row) for row in range(request.num_rows)]
            for row in range(request.num_rows, request.num_rows + self.draft_block_size):
                self._store(request.page_ids, row, _SCRATCH)
            drafts = expected_drafts(rows, request.position, request.anchor_token_id, request.num_draft_tokens, self.vocab_size)
            confidence = [0.9] * len(drafts)
            survival = [0.9 ** (slot + 1) for slot in range(len(drafts))]
            proposals.append(DraftProposal(drafts, confidence, survival, *self._probs(drafts, request)))
        return proposals

    def _probs(self, drafts: Sequence[int], request: DraftRequest) -> tuple[Tensor | None, Tensor | None]:
        """A point mass on each draft, padded to the width asked for."""
        if not request.draft_probs_topk:
            return None, None
        ids = torch.zeros(len(drafts), request.draft_probs_topk, dtype=torch.int32)
        probs = torch.zeros(len(drafts), request.draft_probs_topk)
        for slot, token_id in enumerate(drafts):
            ids[slot, 0], probs[slot, 0] = token_id, 1.0
        return ids, probs

    def _store(self, page_ids: Sequence[int], row: int, value: float) -> None:
        self._pool[page_ids[row // self.page_size], row % self.page_size] = value

    def _load(self, page_ids: Sequence[int], row: int) -> float:
        return float(self._pool[page_ids[row // self.page_size], row % self.page_size])
