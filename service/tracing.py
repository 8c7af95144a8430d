"""OpenTelemetry spans of propose calls. Off unless --otlp-endpoint names a collector; then the extra `otel` must be installed.

    POST /v1/propose                     child of the caller's `traceparent`, where there is one
      queue, context, forward, head      where its time went, laid end to end: the engine measures how long, not when

Attributes are counts, a version and a code. Nothing tells a session, a token or a row.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from service.edge import Scope, header
from service.errors import ApiError, StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from service.calls import ProposeCall

SERVICE_NAME = "draft-engine"


class Tracing:
    """Makes spans and hands them to an exporter in the background.

    Args:
        provider: of the OpenTelemetry SDK; `close` shuts it down.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self.tracer = provider.get_tracer(SERVICE_NAME)
        self.propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> CallTrace:
        """Take the time at which a call came."""
        return CallTrace(self, scope)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


class CallTrace:
    """One propose call. Set `call` once it is known, then `end`."""

    def __init__(self, tracing: Tracing, scope: Scope) -> None:
        self._tracing, self._scope = tracing, scope
        self._began_ns = time.time_ns()
        self.call: ProposeCall | None = None

    def end(self, error: ApiError | None = None, *, is_cancelled: bool = False) -> None:
        """Make the spans."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        names = ("traceparent", "tracestate")
        carrier = {name: value.decode("latin-1") for name in names if (value := header(self._scope, name.encode()))}
        tracer, now_ns = self._tracing.tracer, time.time_ns()
        span = tracer.start_span(
            "POST /v1/propose",
            context=self._tracing.propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=self._began_ns,
            attributes={"http.request.method": "POST", "http.route": "/v1/propose"},
        )
        call = self.call
        if call is not None:
            proposals = [work.outcome.proposal for work in call.items if work.outcome is not None]
            span.set_attributes(
                {
                    "draft_engine.sessions": len(call.items),
                    "draft_engine.rows": sum(work.change.num_rows for work in call.items),
                    "draft_engine.draft_tokens": sum(len(p.token_ids) for p in proposals if p is not None),
                    "draft_engine.refused_sessions": sum(
                        work.outcome is not None and work.outcome.error is not None for work in call.items
                    ),
                    "draft_engine.draft_version": call.draft_version or "",
                }
            )
            timings, at_ns = call.timings, self._began_ns
            parent = set_span_in_context(span)
            for name in ("queue", "context", "forward", "head"):
                end_ns = at_ns + int(getattr(timings, f"{name}_ms") * 1e6)
                tracer.start_span(name, context=parent, start_time=at_ns).end(end_ns)
                at_ns = end_ns
        if error is not None:
            span.set_attributes({"http.response.status_code": error.status, "error.type": error.code})
            span.set_status(Status(StatusCode.ERROR if error.status >= 500 else StatusCode.UNSET))
        elif is_cancelled:
            span.set_attribute("error.type", "cancelled")
        else:
            span.set_attribute("http.response.status_code", 200)
        span.end(now_ns)


def open_tracing(endpoint: str | None, version: str) -> Tracing | None:
    """Export spans to an OTLP collector over HTTP; None without an endpoint.

    Raises:
        StartupError: the extra `otel` is not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise StartupError(f"--otlp-endpoint needs OpenTelemetry: pip install 'draft-engine[otel]' ({error})") from error
    return tracing_to(OTLPSpanExporter(endpoint=endpoint), version)


def tracing_to(exporter: SpanExporter, version: str) -> Tracing:
    """Hand spans to `exporter`, in batches and from a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": SERVICE_NAME, "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
