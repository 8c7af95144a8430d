"""The documented routes: handshake, sessions, models, version, health, metrics.

`POST /v1/propose` is in propose.py; `describe_propose` puts it into the OpenAPI document beside the others.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic.json_schema import models_json_schema

from draft_engine_client import codec
from draft_engine_client.wire import (
    PROTOCOL_VERSION,
    ClientHello,
    ClientWelcome,
    ErrorReply,
    JsonProposeReply,
    JsonProposeRequest,
    Limits,
    Message,
    ModelEntry,
    ModelList,
    Name,
    ProjectionInfo,
    ProposeReply,
    ProposeRequest,
    SessionInfo,
    SessionList,
    VersionInfo,
)
from draft_model.backbone.base import ProjectionWeights
from service.clients import ClientTable, check_hello
from service.engine import DraftEngine
from service.errors import NotFoundError, UnavailableError
from service.metrics import MEDIA_TYPE as METRICS_MEDIA_TYPE
from service.metrics import EngineMetrics
from service.propose import CONTAINER, MAX_JSON_BYTES, connection_of, tensor_view
from service.schedule import VerifyScheduler
from service.serving import Reloader, Serving
from service.sessions import Session, SessionKey, SessionTable
from service.settings import EngineLimits
from service.status_page import HEADERS as PAGE_HEADERS
from service.status_page import ServerState, StatusPage

SCHEMA_REF = "#/components/schemas/{model}"
BINARY_SCHEMA = {"type": "string", "format": "binary"}
ERROR_RESPONSE: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorReply, "description": "Any error. `code` is stable; the numbers of the case are further fields."}
}


class Health(Message):
    """`GET /health`. A degraded server takes work; its warnings name what an operator should look at."""

    status: Literal["ok", "degraded", "draining", "failed"]
    warnings: tuple[str, ...] = ()


class ReloadRequest(Message):
    """`POST /v1/reload`: a folder under the server's --model-root; null loads the folder that it was started with again."""

    model: Name | None = None


@dataclass(frozen=True)
class Services:
    """What the routes need."""

    engine: DraftEngine
    clients: ClientTable
    serving: Serving
    reloader: Reloader
    metrics: EngineMetrics
    version: str
    started_at: float


def wire_limits(limits: EngineLimits) -> Limits:
    """The limits that clients are told."""
    return Limits(
        max_sessions=limits.max_sessions,
        max_sessions_per_call=limits.max_sessions_per_call,
        max_rows_per_call=limits.max_rows_per_call,
        max_body_bytes=limits.max_body_bytes,
        max_context=limits.max_context,
        lease_seconds=limits.lease_seconds,
    )


def health_of(engine: DraftEngine) -> Health:
    """The state of the engine in one word, and its warnings."""
    warnings = tuple(engine.warnings)
    status: Literal["ok", "degraded", "draining", "failed"] = "degraded" if warnings else "ok"
    if not engine.is_alive:
        status = "failed"
    elif engine.is_draining:
        status = "draining"
    return Health(status=status, warnings=warnings)


def build_router(services: Services) -> APIRouter:
    """All routes but the hot path."""
    router = APIRouter(responses=ERROR_RESPONSE)
    _add_protocol_routes(router, services)
    _add_model_routes(router, services)
    _add_health_routes(router, services)
    _add_status_page(router, services)
    return router


def _add_protocol_routes(router: APIRouter, services: Services) -> None:
    engine, clients = services.engine, services.clients

    @router.post("/v1/clients", tags=["protocol"], summary="Handshake")
    async def register_client(hello: ClientHello, request: Request) -> ClientWelcome:
        """Announce a target. 412 names the first field in which it is not the drafter's own."""
        if engine.is_draining:
            raise UnavailableError("draining", "the server is shutting down and takes no new client")
        draft = services.serving.draft
        check_hello(hello, draft.facts, tokenizer_hash=draft.tokenizer_hash)
        scheduler = None
        if hello.schedule is not None:
            scheduler = VerifyScheduler(hello.schedule, draft.facts.max_draft_tokens)
        client = clients.register(hello, time.monotonic(), connection_of(request.scope), scheduler)
        return ClientWelcome(
            protocol_version=PROTOCOL_VERSION,
            client_id=client.client_id,
            server_id=clients.server_id,
            server_version=services.version,
            model=draft.facts,
            limits=wire_limits(draft.limits),
        )

    @router.get("/v1/sessions", tags=["protocol"], summary="List sessions")
    async def list_sessions(
        client_id: Annotated[str | None, Query(description="of this client only")] = None,
    ) -> SessionList:
        """The sessions held, least recently used first."""

        def read(sessions: SessionTable) -> SessionList:
            now = time.monotonic()
            return SessionList(
                data=tuple(session_info(s, now) for s in sessions if client_id is None or s.key.client_id == client_id)
            )

        return await engine.run(read)

    @router.delete("/v1/sessions/{session_id:path}", tags=["protocol"], summary="Close a session", status_code=204)
    async def close_session(session_id: str, client_id: Annotated[str, Query(description="whose session it is")]) -> Response:
        """Free a session's pages. Clients name finished sessions in their next propose call instead."""
        await engine.close_session(SessionKey(client_id, session_id))
        return Response(status_code=204)


def _add_model_routes(router: APIRouter, services: Services) -> None:
    def entry() -> ModelEntry:
        draft = services.serving.draft
        return ModelEntry(
            id=draft.facts.model_id,
            created=int(draft.loaded_at),
            draft_version=draft.version,
            draft=draft.facts,
            limits=wire_limits(draft.limits),
        )

    @router.get("/v1/models", tags=["model"], summary="List the draft model")
    async def list_models() -> ModelList:
        """The one draft model that is served, with everything a client must know of it."""
        return ModelList(data=(entry(),))

    @router.get("/v1/models/{model_id:path}", tags=["model"], summary="Describe the draft model")
    async def describe_model(model_id: str) -> ModelEntry:
        """The same entry by name."""
        served = entry()
        if model_id != served.id:
            raise NotFoundError("model_not_found", f"the model served is {served.id!r}", param="model_id")
        return served

    @router.get(
        "/v1/projection",
        tags=["model"],
        summary="The context projection",
        response_class=Response,
        responses={200: {"description": "The projection.", "content": {CONTAINER.decode(): {"schema": BINARY_SCHEMA}}}},
    )
    async def projection() -> Response:
        """What a target needs to project its rows itself, and to send a fraction of the bytes: `context = norm * rms_normed(
        weight features)`. A safetensors container; its metadata key `message` holds a ProjectionInfo."""
        draft = services.serving.draft
        body = await asyncio.to_thread(encode_projection, draft.projection, draft.facts.fingerprint)
        return Response(body, media_type=CONTAINER.decode())

    @router.post("/v1/reload", tags=["model"], summary="Load another drafter")
    async def reload(wanted: ReloadRequest) -> ModelEntry:
        """Load a drafter in the background and serve it from then on; clients shake hands again and send their rows again.

        422 `reload_failed` says why it was not, and the old drafter is served on.
        """
        await services.reloader.reload(wanted.model)
        return entry()

    @router.get("/version", tags=["model"], summary="Versions")
    async def version() -> VersionInfo:
        """Version of the server and of the protocol, and the id of this process."""
        return VersionInfo(version=services.version, protocol_version=PROTOCOL_VERSION, server_id=services.clients.server_id)


def _add_health_routes(router: APIRouter, services: Services) -> None:
    engine = services.engine

    def answer(health: Health, *, is_good: bool) -> Response:
        body = health.model_dump_json().encode()
        return Response(body, status_code=200 if is_good else 503, media_type="application/json")

    async def health() -> Response:
        """Whether the server takes work: ok, or degraded with warnings. 503 while it drains or when its worker has died."""
        state = health_of(engine)
        return answer(state, is_good=state.status in ("ok", "degraded"))

    async def livez() -> Response:
        """Whether the process should be left alone: 503 only when its worker has died."""
        state = health_of(engine)
        return answer(state, is_good=state.status != "failed")

    for path, endpoint in (("/health", health), ("/readyz", health), ("/livez", livez)):
        name = path[1:]
        shown: dict[int | str, dict[str, Any]] = {
            200: {"model": Health, "description": "Yes."},
            503: {"model": Health, "description": "No."},
        }
        router.add_api_route(path, endpoint, tags=["health"], name=name, operation_id=name, responses=shown)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    @router.get(
        "/metrics",
        tags=["health"],
        summary="Prometheus metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Counters and histograms, all under `draft_engine_`."""
        return Response(services.metrics.exposition(), media_type=METRICS_MEDIA_TYPE)


def _add_status_page(router: APIRouter, services: Services) -> None:
    def read_state() -> ServerState:
        health = health_of(services.engine)
        return ServerState(
            health.status, health.warnings, services.version, services.clients.server_id, started_at=services.started_at
        )

    first = services.serving.draft
    page = StatusPage(services.metrics, first.facts, wire_limits(first.limits), read_state, time.time)

    @router.get(
        "/", tags=["health"], summary="Status page", response_class=Response, responses={200: {"content": {"text/html": {}}}}
    )
    async def status_page() -> Response:
        """The server's state for a person with a browser."""
        draft = services.serving.draft
        page.describe(draft.facts, wire_limits(draft.limits))
        return Response(page.render(), media_type="text/html", headers=dict(PAGE_HEADERS))


def encode_projection(projection: ProjectionWeights, fingerprint: str) -> bytes:
    """The body of `GET /v1/projection`."""
    info = ProjectionInfo(fingerprint=fingerprint, rms_norm_eps=projection.eps)
    tensors = {"weight": tensor_view(projection.weight), "norm": tensor_view(projection.norm)}
    return codec.encode(info.model_dump_json().encode(), tensors)


def session_info(session: Session, now: float) -> SessionInfo:
    """One row of the list of sessions."""
    return SessionInfo(
        session_id=session.key.session_id,
        client_id=session.key.client_id,
        incarnation=session.incarnation,
        seq=max(session.seq, 0),
        committed_end=session.span.committed_end,
        rows_held=session.span.num_rows,
        num_pages=len(session.pages),
        idle_seconds=max(0.0, now - session.last_used),
    )


def describe_propose(document: dict[str, Any]) -> None:
    """Put `POST /v1/propose` and its messages into an OpenAPI document."""
    _, definitions = models_json_schema(
        [
            (ProposeRequest, "validation"),
            (JsonProposeRequest, "validation"),
            (ProposeReply, "validation"),
            (JsonProposeReply, "validation"),
        ],
        ref_template=SCHEMA_REF,
    )
    document["components"]["schemas"].update(definitions["$defs"])
    container = CONTAINER.decode()

    def content(message: str, json_message: str) -> dict[str, Any]:
        return {
            container: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": f"A safetensors container; its metadata key `message` holds the JSON of {message}.",
                    "x-message": {"$ref": SCHEMA_REF.format(model=message)},
                }
            },
            "application/json": {"schema": {"$ref": SCHEMA_REF.format(model=json_message)}},
        }

    document["paths"]["/v1/propose"] = {
        "post": {
            "tags": ["protocol"],
            "summary": "Propose drafts",
            "operationId": "propose",
            "description": "Take in the verified rows of many sessions and draft for them, in one call. What is wrong with one "
            "session is told in its own entry of the reply, with the status it would have had alone, and its neighbours are "
            "served. The reply comes in the media type of the request. JSON is for people and debugging, and is limited to "
            f"{MAX_JSON_BYTES // 2**20} MiB.",
            "requestBody": {"required": True, "content": content("ProposeRequest", "JsonProposeRequest")},
            "responses": {
                "200": {"description": "The call was served.", "content": content("ProposeReply", "JsonProposeReply")},
                "default": {
                    "description": str(ERROR_RESPONSE["default"]["description"]),
                    "content": {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model="ErrorReply")}}},
                },
            },
        }
    }
