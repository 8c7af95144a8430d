"""One request on its way through the target: what was asked, what has been committed, and what is told to the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.target.distribution import TargetSampling
from service.target.stop_strings import StopStringScanner
from service.target.text import TextStream

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate.

    Args:
        request_id: unique in this process.
        prompt_token_ids: at least one.
        max_tokens: new tokens at most, at least one.
        sampling: how tokens are drawn.
        stop: texts that end the answer; not part of it.
        stop_token_ids: tokens that end the answer; not part of its text.
        num_draft_tokens: drafts to verify in a step at most; 0 decodes plainly.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: TargetSampling
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    num_draft_tokens: int = 0


@dataclass
class DraftCounts:
    """What drafting did for one request; times in seconds, of the steps the request took part in.

    rounds: verification steps; drafted: steps that had drafts; accepted_at[k]: rounds that accepted draft k.
    verify_seconds: the target's forward and verification; draft_seconds: inside the draft server; http_seconds: the rest of
    the propose calls; total_seconds: from the first decode step to the last.
    """

    rounds: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted_at: list[int] = field(default_factory=list)
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    http_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        """Draft tokens that the target kept."""
        return sum(self.accepted_at)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round: 1 + mean accepted; 1 without rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    def count_round(self, proposed: int, accepted: int) -> None:
        """Count one verification."""
        self.rounds += 1
        self.drafted += proposed > 0
        self.proposed += proposed
        self.accepted_at += [0] * (proposed - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1


@dataclass(frozen=True)
class Chunk:
    """What a step added to an answer. The last chunk has a finish reason and the counts."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    counts: DraftCounts | None = None


@dataclass(eq=False)
class Sequence:
    """The state of one request inside the engine; belongs to the worker thread, but for `is_cancelled`.

    token_ids holds prompt and answer; rows [0, num_fed) are in the target's cache. features holds the captured rows
    [features_start, num_fed) that the drafter has not been sent.
    """

    request: GenerationRequest
    text: TextStream
    scanner: StopStringScanner
    rng: np.random.Generator
    emit: Callable[[Chunk], None]
    token_ids: list[int]
    num_fed: int = 0
    features: list[NDArray[np.float16]] = field(default_factory=list)
    features_start: int = 0
    counts: DraftCounts = field(default_factory=DraftCounts)
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether only the newest token is not in the cache."""
        return self.num_fed >= len(self.request.prompt_token_ids)

    @property
    def drafts_wanted(self) -> int:
        """Drafts worth verifying now: none beyond the answer's last token, which the target gives itself."""
        return max(0, min(self.request.num_draft_tokens, self.request.max_tokens - self.num_generated - 1))

    def append(self, new_token_ids: list[int]) -> Chunk:
        """Commit new tokens up to the first that ends the answer, and return what they add."""
        shown: list[int] = []
        text, is_stopped = "", False
        for token_id in new_token_ids:
            self.token_ids.append(token_id)
            if token_id in self.request.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
                break
            shown.append(token_id)
            text += self.scanner.push(self.text.push(token_id))
            if is_stopped := self._take_stop_string():
                break
            if self.num_generated >= self.request.max_tokens:
                self.finish_reason = "length"
                break
        if self.finish_reason is not None and not is_stopped:
            text += self.scanner.push(self.text.finish())
            text += self.scanner.finish()
            self._take_stop_string()
        counts = self.counts if self.finish_reason is not None else None
        return Chunk(text, tuple(shown), self.finish_reason, self.stop_reason, counts)

    def _take_stop_string(self) -> bool:
        """Finish if a stop string was found."""
        if self.scanner.matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", self.scanner.matched
        return True
