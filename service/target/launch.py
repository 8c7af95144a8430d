"""Building and running the embedded target server: settings -> model -> draft client -> engine -> application."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from draft_engine_client.client import DraftClient
from draft_engine_client.payoff import Payoff
from draft_engine_client.settings import ClientSettings
from draft_engine_client.wire import TargetFingerprint, VerifySchedule
from draft_model.target_model import TargetModel
from service.errors import StartupError
from service.launch import serve
from service.rounds import RoundLog
from service.shipped import SHIPPED_NAME
from service.target.engine import TargetEngine, TargetEngineLimits
from service.target.routes import TargetFacts, create_target_app
from service.target.schedule import measure_step_times
from service.target.settings import TargetSettings
from service.target.text import TargetTokenizer
from service.target.weights import ensure_target

logger = logging.getLogger(__name__)


def serve_target(settings: TargetSettings) -> None:
    """Serve until a signal ends it.

    Raises:
        StartupError: the model, the tokenizer or the address cannot be used.
    """
    path = settings.model or ensure_target(settings.cache_dir, logger.info)
    model = TargetModel.load(path, settings.weight_dtype)
    last = model.config.num_layers - 1
    if max(settings.target_layer_ids) >= last or min(settings.target_layer_ids) < 0:
        raise StartupError(
            f"--target-layer-ids {list(settings.target_layer_ids)}: the target's layers [0, {last}) can be captured"
        )
    tokenizer = TargetTokenizer(path)
    name = settings.served_model_name or (SHIPPED_NAME if settings.model is None else path.resolve().name)
    with contextlib.ExitStack() as stack:
        drafts = stack.enter_context(_draft_client(settings, model, tokenizer, name))
        rounds = None
        if settings.record_rounds is not None:
            rounds = stack.enter_context(contextlib.closing(RoundLog(settings.record_rounds)))
        engine = TargetEngine(
            model,
            tokenizer,
            drafts,
            target_layer_ids=settings.target_layer_ids,
            limits=TargetEngineLimits(
                max_batch=settings.max_batch,
                max_waiting=settings.max_waiting,
                max_context=min(settings.max_context, model.config.max_position_embeddings),
                prefill_chunk=settings.prefill_chunk,
                draft_probs_topk=settings.draft_probs_topk,
            ),
            payoff=Payoff() if settings.draft_when == "pays" else None,
            rounds=rounds,
        )
        engine.start()
        try:
            api_key = settings.api_key.get_secret_value() if settings.api_key else None
            facts = TargetFacts(name, model.config.vocab_size, settings.num_draft_tokens, int(time.time()))
            app = create_target_app(engine, tokenizer, facts, api_key=api_key, max_body_bytes=settings.max_body_bytes)
            serve(app, settings)
        finally:
            engine.stop()


def _verify_schedule(settings: TargetSettings, model: TargetModel) -> VerifySchedule | None:
    """What the draft server is asked to shorten drafts by; None has it send all, as recording whole blocks needs."""
    if settings.schedule == "fixed":
        return None
    step_times = None
    if settings.schedule == "hardware":
        step_times = measure_step_times(model, max_batch=settings.max_batch, max_width=1 + settings.num_draft_tokens)
        points = zip(step_times.num_tokens, step_times.seconds, strict=True)
        logger.info("step times: %s", ", ".join(f"{width}: {1000 * seconds:.1f} ms" for width, seconds in points))
    return VerifySchedule(kind=settings.schedule, threshold=settings.schedule_threshold, step_times=step_times, is_padded=True)


@contextlib.contextmanager
def _draft_client(
    settings: TargetSettings, model: TargetModel, tokenizer: TargetTokenizer, name: str
) -> Iterator[DraftClient | None]:
    if settings.draft_url is None:
        yield None
        return
    fingerprint = TargetFingerprint(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
        target_layer_ids=settings.target_layer_ids,
        dtype="float16",
        tokenizer_hash=tokenizer.hash,
        model_id=name,
    )
    client = DraftClient(
        ClientSettings(
            url=settings.draft_url,
            client_name=name,
            step_deadline_ms=settings.draft_deadline_ms,
            api_key=settings.draft_api_key.get_secret_value() if settings.draft_api_key else None,
        ),
        fingerprint,
        schedule=_verify_schedule(settings, model),
    )
    client.start()
    try:
        yield client
    finally:
        client.close()
