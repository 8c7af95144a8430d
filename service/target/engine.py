"""The embedded target's engine: one thread, one loop.

    admit   -> a free slot and a prefill chunk for a waiting request
    draft   -> one propose call for all sequences that want drafts
    verify  -> anchor and drafts of every sequence in one forward
    commit  -> accepted drafts and the target's own token, to the callers

Drafting can only save steps. Whatever the drafter answers, or does not, each token is the target's own choice: a draft stays
only where verification keeps it, and a step without drafts is plain decoding.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_engine_client.payoff import Payoff, PayoffStats
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.state import ClientStats
from draft_engine_client.verification import verify_greedy, verify_sampled
from draft_engine_client.wire import Sampling
from draft_model.target_model import TargetModel
from service.errors import CapacityError, UnavailableError
from service.rounds import RoundLog
from service.target.distribution import target_distribution
from service.target.sequences import Chunk, GenerationRequest, Sequence
from service.target.stop_strings import StopStringScanner
from service.target.text import TargetTokenizer, TextStream

logger = logging.getLogger(__name__)

_NO_DRAFTS = Drafts()


class DraftSource(Protocol):
    """Where drafts come from: `draft_engine_client.client.DraftClient`. It never raises and never outlasts its deadline."""

    def propose(self, steps: Rows[SessionStep]) -> list[Drafts]:
        """Return one answer for each step; an empty one is always legal."""

    def finish(self, session_ids: Rows[str]) -> None:
        """Say that sessions are over."""

    @property
    def stats(self) -> ClientStats:
        """Counters since the start."""


@dataclass(frozen=True)
class TargetEngineLimits:
    """max_batch: sequences that decode together; max_waiting: beyond them; max_context: tokens of prompt and answer;
    prefill_chunk: prompt tokens fed between two decode steps.

    draft_probs_topk: support of the distributions that sampled requests have their drafts drawn from; they are lossless as far
    as the drafter reports them truthfully. 0 has the likeliest drafts verified as certain ones, which needs no trust.
    """

    max_batch: int = 8
    max_waiting: int = 64
    max_context: int = 2048
    prefill_chunk: int = 256
    draft_probs_topk: int = 0


class TargetEngine:
    """Runs requests. `start`, `submit` from any thread, `stop`.

    Args:
        model: owned by the worker from `start` on
        tokenizer: of the model
        drafts: where drafts come from; None decodes plainly
        target_layer_ids: layers whose output the drafter reads
        limits: see TargetEngineLimits
        payoff: decides in which steps drafts are asked for; None always asks
        rounds: where to write the confidence and outcome of each verified block
    """

    def __init__(
        self,
        model: TargetModel,
        tokenizer: TargetTokenizer,
        drafts: DraftSource | None,
        *,
        target_layer_ids: tuple[int, ...],
        limits: TargetEngineLimits,
        payoff: Payoff | None = None,
        rounds: RoundLog | None = None,
    ) -> None:
        self._model, self._tokenizer, self._drafts = model, tokenizer, drafts
        self._payoff, self._rounds = payoff, rounds
        self._layers = target_layer_ids
        self.limits = limits
        # A block may reach past the last committed row.
        self._cache = model.new_cache(limits.max_batch, limits.max_context + 64)
        self._condition = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="target-worker", daemon=True)

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Abort what runs and end the worker."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot yet."""
        return len(self._waiting)

    @property
    def payoff(self) -> PayoffStats | None:
        """What drafting was worth so far; None where nobody measures it."""
        return None if self._payoff is None else self._payoff.stats

    def submit(self, request: GenerationRequest, emit: Callable[[Chunk], None]) -> Sequence:
        """Queue a request. `emit` is called from the worker, once per step, until a chunk has a finish reason.

        Raises:
            CapacityError: max_waiting requests wait.
            UnavailableError: the engine is stopping.
        """
        sequence = Sequence(
            request,
            TextStream(self._tokenizer),
            StopStringScanner(request.stop),
            np.random.default_rng(request.sampling.seed),
            emit,
            token_ids=list(request.prompt_token_ids),
        )
        with self._condition:
            if self._is_closed:
                raise UnavailableError("draining", "the target is shutting down and takes no new work")
            if len(self._waiting) >= self.limits.max_waiting:
                raise CapacityError(
                    f"{len(self._waiting)} requests are waiting, which is the limit",
                    retry_after_s=1.0,
                    numbers={"num_waiting": len(self._waiting), "max_waiting": self.limits.max_waiting},
                )
            self._waiting.append(sequence)
            self._condition.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request whose caller has gone; its slot is free before the next step."""
        sequence.is_cancelled = True
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._waiting or self._running or self._is_closed):
                    self._condition.wait()
                if self._is_closed:
                    break
            try:
                self._admit()
                self._decode([sequence for sequence in self._running if sequence.is_prefilled])
            except Exception:
                logger.exception("a step of the target failed; its sequences are aborted")
                self._abort([*self._running])
        self._abort([*self._running, *self._waiting])

    def _abort(self, sequences: Rows[Sequence]) -> None:
        for sequence in sequences:
            sequence.finish_reason = "abort"
            sequence.emit(Chunk("", (), "abort", counts=sequence.counts))
        self._leave(sequences)

    # Admit -----------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Drop cancelled sequences, give out slots, and feed one chunk of the first prompt that is not done."""
        self._leave([sequence for sequence in self._running if sequence.is_cancelled])
        with self._condition:
            for sequence in [sequence for sequence in self._waiting if sequence.is_cancelled]:
                self._waiting.remove(sequence)
            while self._waiting and len(self._running) < self.limits.max_batch:
                self._running.append(self._waiting.popleft())
        # Slot i of the cache belongs to running[i]; decoding takes the slots in front, so prompts in progress stay behind.
        for slot, sequence in enumerate(self._running):
            if not sequence.is_prefilled:
                self._prefill(slot, sequence)
                return

    def _prefill(self, slot: int, sequence: Sequence) -> None:
        prompt = sequence.request.prompt_token_ids
        first, last = sequence.num_fed, min(len(prompt), sequence.num_fed + self.limits.prefill_chunk)
        capture = self._layers if self._drafts is not None and sequence.request.num_draft_tokens else ()
        output = self._model.forward(torch.tensor([prompt[first:last]]), torch.tensor([first]), self._cache, capture, slot=slot)
        self._keep_features(sequence, output.features[0])
        sequence.num_fed = last
        if last == len(prompt):
            logits = self._model.logits(output.hidden[0, -1:])
            self._commit(sequence, self._choose(sequence, logits, _NO_DRAFTS)[1])
            self._leave([sequence for sequence in self._running if sequence.finish_reason is not None])

    def _keep_features(self, sequence: Sequence, rows: Tensor) -> None:
        if rows.shape[-1]:
            sequence.features.append(rows.half().numpy())

    # Decode ----------------------------------------------------------------------------------------------------------

    def _decode(self, sequences: list[Sequence]) -> None:
        """Run one step of the sequences whose prompts are done; they hold the slots in front."""
        if not sequences:
            return
        context = max(sequence.num_fed for sequence in sequences)
        is_drafted = self._is_worth_drafting(sequences, context)
        began = time.perf_counter()
        drafts, server = self._draft(sequences) if is_drafted else ([_NO_DRAFTS] * len(sequences), 0.0)
        drafted = time.perf_counter()

        width = 1 + max(len(draft.token_ids) for draft in drafts)
        token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            block = [sequence.token_ids[-1], *draft.token_ids]
            token_ids[row, : len(block)] = torch.tensor(block)
        capture = self._layers if self._drafts is not None and any(s.request.num_draft_tokens for s in sequences) else ()
        starts = torch.tensor([sequence.num_fed for sequence in sequences])
        output = self._model.forward(token_ids, starts, self._cache, capture)
        logits = self._model.logits(output.hidden.flatten(0, 1)).view(len(sequences), width, -1)
        greedy = logits.argmax(-1).tolist()

        results = []
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            accepted, new_token_ids = self._choose(sequence, logits[row], draft, greedy[row])
            sequence.num_fed += accepted + 1
            if sequence.request.num_draft_tokens:
                self._keep_features(sequence, output.features[row, : accepted + 1])
            sequence.counts.count_round(len(draft.token_ids), accepted)
            if self._rounds is not None and draft.confidence:
                self._rounds.add(draft.confidence, accepted)
            results.append(new_token_ids)
        ended = time.perf_counter()
        if self._payoff is not None:
            committed = sum(len(tokens) for tokens in results)
            self._payoff.record(len(sequences), context, is_drafted=is_drafted, num_tokens=committed, seconds=ended - began)
        for sequence in sequences:
            counts = sequence.counts
            counts.verify_seconds += ended - drafted
            counts.draft_seconds += server
            counts.http_seconds += drafted - began - server
            counts.total_seconds += ended - began
        for sequence, new_token_ids in zip(sequences, results, strict=True):
            self._commit(sequence, new_token_ids)
        self._leave([sequence for sequence in sequences if sequence.finish_reason is not None])

    def _is_worth_drafting(self, sequences: list[Sequence], context: int) -> bool:
        """Whether somebody wants drafts, and they are expected to pay."""
        if self._drafts is None or not any(sequence.drafts_wanted for sequence in sequences):
            return False
        return self._payoff is None or self._payoff.wants_drafts(len(sequences), context)

    def _draft(self, sequences: list[Sequence]) -> tuple[list[Drafts], float]:
        """Get one answer for each sequence, and the seconds that the draft server worked on them."""
        wanting = [sequence for sequence in sequences if sequence.drafts_wanted]
        if self._drafts is None:
            return [_NO_DRAFTS] * len(sequences), 0.0
        steps = [self._session_step(sequence) for sequence in wanting]
        before = self._drafts.stats.server_seconds
        answers = dict(zip((id(sequence) for sequence in wanting), self._drafts.propose(steps), strict=True))
        server = self._drafts.stats.server_seconds - before
        for sequence in wanting:
            sequence.features_start, sequence.features = sequence.num_fed, []
        return [answers.get(id(sequence), _NO_DRAFTS) for sequence in sequences], server

    def _session_step(self, sequence: Sequence) -> SessionStep:
        sampling, topk = sequence.request.sampling, self.limits.draft_probs_topk
        is_greedy = sampling.is_greedy or topk == 0
        features: NDArray[np.float16] = np.concatenate(sequence.features)
        return SessionStep(
            session_id=sequence.request.request_id,
            token_ids=sequence.token_ids[sequence.features_start : sequence.num_fed],
            features=features,
            start=sequence.features_start,
            anchor_token_id=sequence.token_ids[-1],
            num_draft_tokens=sequence.drafts_wanted,
            sampling=Sampling()
            if is_greedy
            else Sampling(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed),
            draft_probs_topk=0 if is_greedy else topk,
        )

    def _choose(
        self, sequence: Sequence, logits: Tensor, draft: Drafts, greedy: list[int] | None = None
    ) -> tuple[int, list[int]]:
        """Verify one sequence's drafts against its logits [Q, V]; returns how many stay, and the tokens to commit."""
        sampling, count = sequence.request.sampling, len(draft.token_ids)
        if sampling.is_greedy:
            verdict = verify_greedy(draft.token_ids, greedy if greedy is not None else logits.argmax(-1).tolist())
        else:
            probs = target_distribution(logits[: count + 1], sampling).numpy()
            verdict = verify_sampled(
                draft.token_ids, probs, sequence.rng, draft_probs_ids=draft.probs_ids, draft_probs=draft.probs
            )
        return verdict.num_accepted, [*draft.token_ids[: verdict.num_accepted], verdict.next_token_id]

    def _commit(self, sequence: Sequence, new_token_ids: list[int]) -> None:
        sequence.emit(sequence.append(new_token_ids))

    def _leave(self, sequences: Rows[Sequence]) -> None:
        """Free the slots of sequences that are done, and close the gaps they leave."""
        leaving = [sequence for sequence in sequences if sequence in self._running]
        for sequence in leaving:
            slot = self._running.index(sequence)
            # The last decoding sequence takes the free slot; the prompts behind move up and keep their order.
            last = self._num_prefilled() - 1
            if last > slot:
                moved = self._running[last]
                self._cache.move(last, slot, moved.num_fed)
                self._running[slot], slot = moved, last
            self._running.pop(slot)
            for place in range(slot, len(self._running)):
                if self._running[place].num_fed:
                    self._cache.move(place + 1, place, self._running[place].num_fed)
        if leaving and self._drafts is not None:
            self._drafts.finish([s.request.request_id for s in leaving if s.request.num_draft_tokens])

    def _num_prefilled(self) -> int:
        return sum(sequence.is_prefilled for sequence in self._running)
