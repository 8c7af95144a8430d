"""Spans of propose calls, as a collector gets them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.errors import StartupError
from service.testing import FakeDrafter
from service.tracing import open_tracing
from tests.support.service import Update, container_body, make_harness, post_container, serving, shake_hands

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


@contextmanager
def collecting() -> Iterator[tuple[str, list[Any]]]:
    """A collector of OTLP over HTTP: its address, and the spans that came."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for r in message.resource_spans for scope in r.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes_of(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_a_call_is_a_child_of_its_caller_and_tells_where_its_time_went() -> None:
    with collecting() as (endpoint, spans):
        with serving(tracing=open_tracing(endpoint, "1.2.3")) as server:
            client_id = shake_hands(server.http)
            updates = [Update("a-prompt", 0, [1, 2, 3]), Update("b", 0, [4], num_draft_tokens=5)]
            server.http.headers["traceparent"] = f"00-{TRACE_ID}-{PARENT_ID}-01"
            assert post_container(server.http, container_body(client_id, *updates)).status_code == 200
            del server.http.headers["traceparent"]
            assert post_container(server.http, b"").status_code == 400
        traced = [span for span in spans if span.trace_id.hex() == TRACE_ID]
        (call,) = [span for span in traced if span.name == "POST /v1/propose"]
        assert call.parent_span_id.hex() == PARENT_ID
        assert attributes_of(call) == {
            "http.request.method": "POST",
            "http.route": "/v1/propose",
            "http.response.status_code": 200,
            "draft_engine.sessions": 2,
            "draft_engine.rows": 4,
            "draft_engine.draft_tokens": 4,
            "draft_engine.refused_sessions": 1,
            "draft_engine.draft_version": "1-fake",
        }
        parts = [span for span in traced if span is not call]
        assert [span.name for span in parts] == ["queue", "context", "forward", "head"]
        assert all(span.parent_span_id == call.span_id for span in parts)
        assert all(first.end_time_unix_nano == then.start_time_unix_nano for first, then in itertools.pairwise(parts))
        (refused,) = [span for span in spans if span.trace_id.hex() != TRACE_ID]
        assert attributes_of(refused)["error.type"] == "bad_request"
        assert refused.parent_span_id == b""
        assert b"a-prompt" not in b"".join(span.SerializeToString() for span in spans)


def test_a_collector_that_is_not_there_costs_no_call() -> None:
    with serving(make_harness(FakeDrafter()), tracing=open_tracing("http://127.0.0.1:9/v1/traces", "1")) as server:
        client_id = shake_hands(server.http)
        for seq in range(3):
            assert post_container(server.http, container_body(client_id, Update("a", seq, [1], seq=seq))).status_code == 200


def test_tracing_is_off_without_an_endpoint_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracing(None, "1") is None
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match=r"draft-engine\[otel\]"):
        open_tracing("http://127.0.0.1:4318/v1/traces", "1")
