"""The target server's HTTP routes, in the shape of the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from pydantic import BaseModel

from service.edge import Edge, Receive, Scope, Send, with_json_body
from service.errors import NotFoundError, RequestError
from service.exception_handlers import EXCEPTION_HANDLERS
from service.metrics import MEDIA_TYPE as METRICS_MEDIA_TYPE
from service.target.distribution import TargetSampling
from service.target.engine import TargetEngine
from service.target.schema import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionRequest,
    DraftReport,
    SamplingFields,
    Usage,
)
from service.target.sequences import Chunk, DraftCounts, GenerationRequest
from service.target.sequences import Sequence as TargetSequence
from service.target.text import TargetTokenizer


@dataclass(frozen=True)
class TargetFacts:
    """model_name: in /v1/models; vocab_size: of the target; num_draft_tokens: where a request names none."""

    model_name: str
    vocab_size: int
    num_draft_tokens: int
    created: int


class Answer:
    """One request in flight: its chunks, in the order of generation. Leaving the context cancels what is left of it."""

    def __init__(self, engine: TargetEngine, request: GenerationRequest) -> None:
        self._engine, self.request = engine, request
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._sequence: TargetSequence | None = None

    async def __aenter__(self) -> Answer:
        loop = asyncio.get_running_loop()

        def emit(chunk: Chunk) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

        self._sequence = self._engine.submit(self.request, emit)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._sequence is not None and self._sequence.finish_reason is None:
            self._engine.cancel(self._sequence)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield chunks up to and including the one with a finish reason."""
        while True:
            chunk = await self._chunks.get()
            yield chunk
            if chunk.finish_reason is not None:
                return


def create_target_app(
    engine: TargetEngine, tokenizer: TargetTokenizer, facts: TargetFacts, *, api_key: str | None, max_body_bytes: int = 2**20
) -> Edge:
    """Make the ASGI application around an engine that has been started."""
    app = FastAPI(
        title="draft-engine target",
        description="The embedded target: an OpenAI-compatible server.",
        redoc_url=None,
        exception_handlers=dict(EXCEPTION_HANDLERS),
    )
    service = _TargetService(engine, tokenizer, facts)

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, given as text or as token ids."""
        return await service.complete(body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        return await service.chat(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model that is served."""
        return service.models()

    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while the worker runs."""
        return JSONResponse(service.health(), 200 if engine.is_alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """What drafting was worth, for Prometheus."""
        return Response(service.metrics(), media_type=METRICS_MEDIA_TYPE)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = await with_json_body(scope, receive, max_body_bytes)
        await app(scope, receive, send)

    return Edge(dispatch, api_key=api_key)


class _TargetService:
    def __init__(self, engine: TargetEngine, tokenizer: TargetTokenizer, facts: TargetFacts) -> None:
        self._engine, self._tokenizer, self._facts = engine, tokenizer, facts

    def models(self) -> dict[str, Any]:
        entry = {
            "id": self._facts.model_name,
            "object": "model",
            "created": self._facts.created,
            "owned_by": "draft-engine",
            "max_model_len": self._engine.limits.max_context,
        }
        return {"object": "list", "data": [entry]}

    def health(self) -> dict[str, Any]:
        alive, payoff = self._engine.is_alive, self._engine.payoff
        return {
            "status": "ok" if alive else "failed",
            "running": self._engine.num_running,
            "waiting": self._engine.num_waiting,
            "payoff": None if payoff is None else asdict(payoff),
        }

    def metrics(self) -> bytes:
        registry = CollectorRegistry()

        def gauge(name: str, text: str, value: float) -> None:
            Gauge(f"draft_target_{name}", text, (), registry=registry).set(value)

        gauge("running_requests", "Requests that hold a slot.", self._engine.num_running)
        gauge("waiting_requests", "Requests without a slot yet.", self._engine.num_waiting)
        payoff = self._engine.payoff
        if payoff is not None:
            gauge("net_saved_seconds", "Worth minus duration of all drafted steps.", payoff.net_saved_seconds)
            gauge("steps", "Decode steps.", payoff.steps)
            gauge("drafted_steps", "Decode steps that asked for drafts.", payoff.drafted_steps)
            gauge("draft_switches", "Times that drafting was turned on or off.", payoff.switches)
            gauge("draft_buckets_on", "Buckets of batch size and context that drafting is on in.", payoff.buckets_on)
            gauge("draft_buckets", "Buckets of batch size and context seen.", payoff.buckets)
        return generate_latest(registry)

    async def complete(self, body: CompletionRequest, http: Request) -> Response:
        prompt = self._tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        request = self._request("cmpl", body, prompt, body.max_tokens, "prompt", "max_tokens")
        return await self._respond(_CompletionShape(request.request_id, self._facts.model_name), body, request, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise RequestError(
                "bad_request", "max_tokens and max_completion_tokens are two names of one field", param="max_tokens"
            )
        text = self._tokenizer.render_chat([message.model_dump() for message in body.messages])
        prompt = self._tokenizer.encode(text)
        field = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
        room = max(1, self._engine.limits.max_context - len(prompt))
        request = self._request("chatcmpl", body, prompt, getattr(body, field) or room, "messages", field)
        return await self._respond(_ChatShape(request.request_id, self._facts.model_name), body, request, http)

    def _request(
        self, kind: str, body: SamplingFields, prompt: Sequence[int], max_tokens: int, prompt_field: str, max_field: str
    ) -> GenerationRequest:
        if body.model is not None and body.model != self._facts.model_name:
            raise NotFoundError("model_not_found", f"this server serves {self._facts.model_name!r}", param="model")
        if not prompt:
            raise RequestError("bad_request", "the prompt is empty", param=prompt_field)
        for index, token_id in enumerate(prompt):
            if token_id >= self._facts.vocab_size:
                raise RequestError(
                    "token_out_of_range",
                    f"{prompt_field}[{index}] is {token_id}; the vocabulary has {self._facts.vocab_size} tokens",
                    param=f"{prompt_field}[{index}]",
                    numbers={"token_id": token_id, "vocab_size": self._facts.vocab_size},
                )
        limit = self._engine.limits.max_context
        if len(prompt) + max_tokens > limit:
            raise RequestError(
                "context_limit",
                f"the prompt has {len(prompt)} tokens and {max_field} is {max_tokens}; together they may be at most {limit}",
                param=max_field if len(prompt) < limit else prompt_field,
                numbers={"prompt_tokens": len(prompt), "max_tokens": max_tokens, "max_context": limit},
            )
        ends = frozenset() if body.ignore_eos else self._tokenizer.end_token_ids
        wanted = self._facts.num_draft_tokens if body.num_draft_tokens is None else body.num_draft_tokens
        return GenerationRequest(
            request_id=f"{kind}-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=TargetSampling(body.temperature, body.top_k, body.top_p, body.seed),
            stop=body.stop_strings,
            stop_token_ids=ends | frozenset(body.stop_token_ids),
            num_draft_tokens=wanted,
        )

    async def _respond(
        self, shape: _CompletionShape | _ChatShape, body: SamplingFields, request: GenerationRequest, http: Request
    ) -> Response:
        answer = Answer(self._engine, request)
        if body.stream:
            await answer.__aenter__()
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(_stream(answer, shape, include_usage=include_usage), media_type="text/event-stream")
        async with answer, _cancelled_when_gone(http):
            chunks = [chunk async for chunk in answer.chunks()]
        reply = shape.whole(chunks, _usage(request, chunks))
        return Response(reply.model_dump_json(), media_type="application/json")


@contextlib.asynccontextmanager
async def _cancelled_when_gone(http: Request) -> AsyncIterator[None]:
    """Cancel the enclosed work when the caller closes its connection."""
    work = asyncio.current_task()

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        if work is not None:
            work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def _stream(answer: Answer, shape: _CompletionShape | _ChatShape, *, include_usage: bool) -> AsyncIterator[str]:
    try:
        for event in shape.opening():
            yield _event(event)
        chunks = []
        async for chunk in answer.chunks():
            chunks.append(chunk)
            if chunk.text or chunk.token_ids or chunk.finish_reason is not None:
                yield _event(shape.piece(chunk))
        if include_usage:
            yield _event(shape.usage(_usage(answer.request, chunks)))
        yield "data: [DONE]\n\n"
    finally:
        await answer.__aexit__()


def _event(piece: BaseModel) -> str:
    return f"data: {piece.model_dump_json(exclude_none=True)}\n\n"


class _CompletionShape:
    """Completions, whole and in pieces."""

    def __init__(self, request_id: str, model: str) -> None:
        self._common = {"id": request_id, "created": int(time.time()), "model": model}

    def opening(self) -> list[Completion]:
        return []

    def piece(self, chunk: Chunk) -> Completion:
        choice = CompletionChoice(
            text=chunk.text,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=list(chunk.token_ids),
        )
        return Completion(choices=[choice], draft=_report(chunk.counts), **self._common)

    def usage(self, usage: Usage) -> Completion:
        return Completion(choices=[], usage=usage, **self._common)

    def whole(self, chunks: Sequence[Chunk], usage: Usage) -> Completion:
        return self.piece(_joined(chunks)).model_copy(update={"usage": usage})


class _ChatShape:
    """Chat answers, whole and in pieces."""

    def __init__(self, request_id: str, model: str) -> None:
        self._common: Mapping[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}

    def opening(self) -> list[ChatChunk]:
        return [ChatChunk(choices=[ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))], **self._common)]

    def piece(self, chunk: Chunk) -> ChatChunk:
        choice = ChatChunkChoice(
            delta=ChatDelta(content=chunk.text),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=list(chunk.token_ids),
        )
        return ChatChunk(choices=[choice], draft=_report(chunk.counts), **self._common)

    def usage(self, usage: Usage) -> ChatChunk:
        return ChatChunk(choices=[], usage=usage, **self._common)

    def whole(self, chunks: Sequence[Chunk], usage: Usage) -> ChatCompletion:
        joined = _joined(chunks)
        choice = ChatChoice(
            message=ChatAnswer(content=joined.text),
            finish_reason=joined.finish_reason or "abort",
            stop_reason=joined.stop_reason,
            token_ids=list(joined.token_ids),
        )
        report = _report(joined.counts or DraftCounts())
        return ChatCompletion(choices=[choice], usage=usage, draft=report, **self._common)


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    last = chunks[-1]
    token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    return Chunk("".join(chunk.text for chunk in chunks), token_ids, last.finish_reason, last.stop_reason, last.counts)


def _usage(request: GenerationRequest, chunks: Sequence[Chunk]) -> Usage:
    prompt = len(request.prompt_token_ids)
    # A token that ended the answer was generated too, though it is not part of it.
    ended_by_token = isinstance(chunks[-1].stop_reason, int)
    completion = sum(len(chunk.token_ids) for chunk in chunks) + ended_by_token
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _report(counts: DraftCounts | None) -> DraftReport | None:
    if counts is None:
        return None
    other = counts.total_seconds - counts.verify_seconds - counts.draft_seconds - counts.http_seconds
    seconds = {
        "verify": counts.verify_seconds,
        "draft": counts.draft_seconds,
        "http": counts.http_seconds,
        "other": other,
        "decode": counts.total_seconds,
    }
    return DraftReport(
        rounds=counts.rounds,
        rounds_with_drafts=counts.drafted,
        proposed=counts.proposed,
        accepted=counts.accepted,
        accepted_by_position=counts.accepted_at,
        acceptance_length=counts.acceptance_length,
        milliseconds={name: round(1000.0 * value, 3) for name, value in seconds.items()},
    )
