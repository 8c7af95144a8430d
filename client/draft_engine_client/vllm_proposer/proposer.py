"""The proposer that vLLM loads. Once per step: rows that stay -> one propose call -> drafts, and their distributions."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from draft_engine_client.client import DraftClient
from draft_engine_client.projection import ContextProjection
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.vllm_proposer import runner_patch
from draft_engine_client.vllm_proposer.connecting import Pairing, connect
from draft_engine_client.vllm_proposer.errors import PairingError
from draft_engine_client.vllm_proposer.features import RowProjection, gather_features, to_wire, vllm_layer_ids
from draft_engine_client.vllm_proposer.probabilities import dense_draft_probs
from draft_engine_client.vllm_proposer.rows import RequestRows, row_indices
from draft_engine_client.vllm_proposer.settings import read_settings
from draft_engine_client.vllm_proposer.tensor_parallel import RankGroup, on_first_rank
from draft_engine_client.wire import Sampling, TargetFingerprint

# Below vLLM's own logger, so that lines appear where vLLM's do.
logger = logging.getLogger("vllm.draft_engine")

runner_patch.install()


class DraftEngineProposer:
    """See the module docstring. vLLM makes one for each worker.

    Raises:
        PairingError: vLLM, its layout, its settings and the draft server do not go together.
    """

    is_draft_engine_proposer = True

    def __init__(self, vllm_config: Any) -> None:
        refuse_layout(vllm_config)
        self._settings = read_settings(vllm_config.additional_config)
        self._num_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._group = _tensor_parallel_group()
        self._client: DraftClient | None = None
        self._row_projection: RowProjection | None = None
        self._ends: dict[str, int] = {}
        self._log_at = time.monotonic() + self._settings.log_interval_s
        self._coverage_sum = 0.0
        self._num_covered = 0
        _show_client_log()
        pairing = on_first_rank(self._group, lambda: self._connect(vllm_config))
        if pairing.problem is not None:
            raise PairingError(pairing.problem)
        self._target_layer_ids = pairing.target_layer_ids
        self.vllm_layer_ids = vllm_layer_ids(pairing.target_layer_ids)

    def load_model(self, model: Any) -> None:
        """Called when the target is loaded; there is nothing to load here."""
        logger.info(
            "drafts come from %s; hidden states of layers %s of %s leave as %s rows of %s",
            self._settings.url,
            list(self._target_layer_ids),
            type(model).__name__,
            self._settings.rows,
            self._settings.row_dtype,
        )

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """The entry point of a proposer that needs tokens only. It is never called while the runner is patched.

        Raises:
            PairingError: always.
        """
        raise PairingError("this vLLM's model runner does not call the proposer through the patch")

    def propose_step(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled: Sequence[Sequence[int]],
        states: Sequence[Tensor] | None,
        attention: Any,
    ) -> tuple[list[list[int]], Tensor | None]:
        """Get the drafts of a step.

        Args:
            sampled: [R] tokens that each request of the batch committed, none while its prompt is not done
            states: one [T, H] for each of `vllm_layer_ids`

        Returns:
            drafts [R], and their distributions [R, K, V] where one is asked for.
        """
        drafts = on_first_rank(self._group, lambda: self._drafts_or_none(runner, scheduler_output, sampled, states, attention))
        token_ids = [list(one.token_ids) for one in drafts]
        return token_ids, dense_draft_probs(drafts, self._num_draft_tokens, self._vocab_size, runner.device)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests that are over."""
        finished = list(request_ids)
        for request_id in finished:
            self._ends.pop(request_id, None)
        if self._client is not None:
            self._client.finish(finished)

    def _connect(self, vllm_config: Any) -> Pairing:
        model = vllm_config.model_config
        text = model.hf_text_config
        target = TargetFingerprint(
            vocab_size=self._vocab_size,
            hidden_size=int(text.hidden_size),
            num_layers=int(text.num_hidden_layers),
            dtype=self._settings.row_dtype,
            model_id=str(model.model)[-256:],
        )
        parallel = vllm_config.parallel_config
        rank_name = f"-dp{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
        pairing, self._client = connect(self._settings, self._settings.client_settings(rank_name), target)
        if self._client is not None:
            atexit.register(self._client.close)
        return pairing

    def _drafts_or_none(self, runner: Any, scheduler_output: Any, sampled: Any, states: Any, attention: Any) -> list[Drafts]:
        """The drafts of a step. A bug in here must not fail the step, nor leave the other ranks waiting."""
        try:
            return self._drafts(runner, scheduler_output, sampled, states, attention)
        except Exception:
            logger.exception("a step goes on without drafts")
            return [_NONE] * len(sampled)

    def _drafts(self, runner: Any, scheduler_output: Any, sampled: Any, states: Any, attention: Any) -> list[Drafts]:
        client = self._client
        drafts = [_NONE] * len(sampled)
        if client is None or states is None:
            return drafts
        projection = client.projection
        if projection is None and self._settings.rows == "projected":
            return drafts
        known = self._read_batch(runner, scheduler_output, sampled, attention)
        gathered = gather_features(states, row_indices([rows for _, rows in known]), self._target_layer_ids)
        features = to_wire(self._project(gathered, projection), self._settings.row_dtype)
        limit = min(self._num_draft_tokens, scheduler_output.num_spec_tokens_to_schedule or self._num_draft_tokens)
        steps, first = [], 0
        for index, rows in known:
            steps.append(self._step(runner, index, rows, features[first : first + rows.num_rows], limit))
            first += rows.num_rows
        for (index, _), step, answer in zip(known, steps, client.propose(steps, projection), strict=True):
            drafts[index] = answer
            if step.num_draft_tokens and answer.reason is None:
                self._coverage_sum += answer.coverage
                self._num_covered += 1
        self._report(client)
        return drafts

    def _project(self, gathered: Tensor, projection: ContextProjection | None) -> Tensor:
        if projection is None:
            return gathered
        if self._row_projection is None or self._row_projection.source is not projection:
            self._row_projection = RowProjection(projection, gathered.device)
        return self._row_projection(gathered)

    def _read_batch(self, runner: Any, scheduler_output: Any, sampled: Any, attention: Any) -> list[tuple[int, RequestRows]]:
        """What the step knows of each request that can be drafted for, with its place in the batch."""
        batch = runner.input_batch
        firsts = attention.query_start_loc_cpu
        known = []
        for index, request_id in enumerate(batch.req_ids):
            if runner.requests[request_id].prompt_embeds is not None:
                continue  # there are no tokens to draft after
            rows = RequestRows(
                request_id=request_id,
                first=int(firsts[index]),
                start=int(batch.num_computed_tokens_cpu[index]),
                num_scheduled=scheduler_output.num_scheduled_tokens[request_id],
                num_drafts=len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())),
                num_sampled=len(sampled[index]),
                num_tokens=int(batch.num_tokens_no_spec[index]),
            )
            if rows.problem is None:
                known.append((index, rows))
            else:
                logger.warning("request %s gets no drafts in this step: %s", request_id, rows.problem)
        return known

    def _step(self, runner: Any, index: int, rows: RequestRows, features: Any, limit: int) -> SessionStep:
        batch = runner.input_batch
        tokens = batch.token_ids_cpu[index]
        is_known = rows.start <= self._ends.get(rows.request_id, 0)
        self._ends[rows.request_id] = rows.end
        sampling = Sampling(
            temperature=max(float(batch.temperature_cpu[index]), 0.0),
            top_k=int(batch.top_k_cpu[index]) if batch.top_k_cpu[index] < self._vocab_size else 0,
            top_p=float(batch.top_p_cpu[index]),
        )
        return SessionStep(
            session_id=rows.request_id,
            token_ids=tokens[rows.start : rows.end].tolist(),
            features=features,
            start=rows.start,
            anchor_token_id=int(tokens[rows.end]),
            num_draft_tokens=rows.num_drafts_wanted(limit, self._max_model_len),
            sampling=sampling,
            draft_probs_topk=self._settings.draft_probs_topk if sampling.temperature > 0.0 else 0,
            prefix_token_ids=() if is_known else tokens[: rows.start].tolist(),
            context_id=context_id(runner.requests[rows.request_id]),
        )

    def _report(self, client: DraftClient) -> None:
        now = time.monotonic()
        if now < self._log_at:
            return
        self._log_at = now + self._settings.log_interval_s
        stats = client.stats
        coverage = self._coverage_sum / self._num_covered if self._num_covered else 0.0
        self._coverage_sum, self._num_covered = 0.0, 0
        logger.info(
            "draft engine: connected %s, steps %d, drafts %d, draft tokens %d, mean coverage %.3f, ms per call %.1f "
            "(server %.1f), late %d, failures %d, refusals %d, reconnects %d",
            stats.is_connected,
            stats.steps,
            stats.drafts,
            stats.draft_tokens,
            coverage,
            1000.0 * stats.http_seconds / max(stats.calls, 1),
            1000.0 * stats.server_seconds / max(stats.calls, 1),
            stats.late,
            stats.failures,
            stats.refusals,
            stats.reconnects,
        )


_NONE = Drafts()


def refuse_layout(vllm_config: Any) -> None:
    """Refuse what the proposer does not work with.

    Raises:
        PairingError: says what to change.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise PairingError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: the hidden states of earlier stages do not reach "
            "the proposer; use tensor parallel ranks instead"
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise PairingError(f"{name} is {getattr(parallel, name)}: a rank then holds a part of each request's rows only")
    if vllm_config.scheduler_config.async_scheduling:
        raise PairingError(
            "async scheduling is on: the proposer needs each step's tokens; start vLLM without --async-scheduling"
        )


def context_id(request: Any) -> str | None:
    """What the rows of a request depend on besides its tokens, or None: an adapter, images."""
    parts = []
    if request.lora_request is not None:
        parts.append(f"lora {request.lora_request.lora_int_id} {request.lora_request.lora_name}")
    parts += [f"{feature.modality} {feature.identifier}" for feature in request.mm_features]
    return " ".join(parts)[:256] or None


def _tensor_parallel_group() -> RankGroup:
    from vllm.distributed import get_tp_group

    group: RankGroup = get_tp_group()
    return group


def _show_client_log() -> None:
    """Have the client's warnings appear where vLLM's do; its logger is not one of vLLM's."""
    log = logging.getLogger("draft_engine_client")
    log.parent = logging.getLogger("vllm")
