"""The HTTP application: one edge around two sets of routes.

    Edge           request id, API key, errors -> the OpenAI error shape
      /v1/propose  plain ASGI, straight to the engine
      the rest     FastAPI, with /docs and /openapi.json

Its lifespan starts the engine, frees what clients leave behind, and stops the engine in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.clients import ClientTable
from service.edge import AsgiApp, Edge, Receive, Scope, Send, with_json_body
from service.engine import DraftEngine
from service.exception_handlers import EXCEPTION_HANDLERS
from service.metrics import EngineMetrics
from service.propose import ProposeEndpoint
from service.routes import Services, build_router, describe_propose
from service.serving import Reloader, Serving
from service.tracing import Tracing

logger = logging.getLogger(__name__)

SMALL_BODY_BYTES = 64 * 1024
CLIENT_SWEEP_SECONDS = 0.2
_PROPOSE_PATH = "/v1/propose"
_CLIENTS_PATH = "/v1/clients"


def create_app(
    *,
    engine: DraftEngine,
    clients: ClientTable,
    serving: Serving,
    reloader: Reloader,
    metrics: EngineMetrics,
    version: str,
    api_key: str | None = None,
    tracing: Tracing | None = None,
) -> AsgiApp:
    """Build the application. The engine must not have been started; the lifespan starts and stops it.

    Args:
        engine: serves the calls.
        clients: knows the callers, and the id of this process.
        serving: the drafter, as clients are told of it, and what calls are held to.
        reloader: exchanges it.
        metrics: of the engine; the application adds gauges of its own.
        version: of the server.
        api_key: when set, every route but health and the version needs it.
        tracing: makes a span of each propose call, and is closed in the end.
    """
    services = Services(engine, clients, serving, reloader, metrics, version, time.time())
    metrics.describe(version)
    metrics.describe_draft(serving.draft.facts, serving.draft.version)
    metrics.track("clients", "Clients that have shaken hands.", lambda: float(len(clients)))
    metrics.track("sessions", "Sessions held.", lambda: float(engine.num_sessions))
    metrics.track("free_pages", "Pages of the context pool that nobody holds.", lambda: float(engine.num_free_pages))
    metrics.track("prefix_cache_pages", "Pages that the prefix cache holds.", lambda: float(engine.num_prefix_pages))
    metrics.track("waiting_calls", "Calls taken in and not yet answered.", lambda: float(engine.num_waiting))
    metrics.track("warnings", "Warnings of /health that stand now.", lambda: float(len(engine.warnings)))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(engine.start)
        sweep = asyncio.create_task(_sweep_clients(engine, clients))
        try:
            yield
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
            await asyncio.to_thread(engine.stop)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    documented = FastAPI(
        title="Draft engine",
        description="Draft tokens for speculative decoding, over HTTP.",
        version=version,
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers=dict(EXCEPTION_HANDLERS),
    )
    documented.include_router(build_router(services))
    documented.openapi = lambda: _openapi(documented, needs_key=api_key is not None)  # type: ignore[method-assign]
    propose = ProposeEndpoint(engine, clients, serving, metrics, tracing)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await documented(scope, receive, send)
        elif scope["path"] == _PROPOSE_PATH:
            await propose(scope, receive, send)
        else:
            await documented(scope, await with_json_body(scope, receive, SMALL_BODY_BYTES), send)

    return Edge(dispatch, api_key=api_key)


async def _sweep_clients(engine: DraftEngine, clients: ClientTable) -> None:
    while True:
        for client, reason in clients.departed(time.monotonic()):
            logger.info("client %s (%s) has left: %s", client.client_id, client.name, reason)
            engine.drop_client(client.client_id, reason)
        await asyncio.sleep(CLIENT_SWEEP_SECONDS)


def _openapi(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        describe_propose(document)
        if needs_key:
            document["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"api_key": []}]
        app.openapi_schema = document
    return app.openapi_schema
