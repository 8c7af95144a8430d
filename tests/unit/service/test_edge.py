from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from service import edge
from service.edge import Edge, Message, Receive, Scope, Send, field_path, read_body, request_id_var
from service.errors import CapacityError, RequestError, UnavailableError
from service.launch import JsonFormatter, RequestIdFilter, configure_logging, logging_config


def make_scope(path: str = "/v1/models", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "GET", "path": path, "headers": pairs}


def feed(*messages: dict[str, Any]) -> Receive:
    queue = list(messages)

    async def receive() -> Message:
        if not queue:
            await asyncio.sleep(60)
        return queue.pop(0)

    return receive


def call(app: edge.AsgiApp, scope: dict[str, Any], *, api_key: str | None = None) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(Edge(app, api_key=api_key)(scope, feed(), send), 10))
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:])


async def good(scope: Scope, receive: Receive, send: Send) -> None:
    await edge.send_response(send, 200, b"{}", edge.JSON)


def raising(error: Exception) -> edge.AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    return app


def test_errors_carry_their_numbers_and_headers() -> None:
    status, headers, body = call(raising(CapacityError("full", retry_after_s=2.4, numbers={"max_queue": 7})), make_scope())
    assert (status, headers[b"retry-after"], headers[b"content-type"]) == (429, b"2", b"application/json")
    assert json.loads(body)["error"] == {
        "message": "full",
        "type": "overloaded_error",
        "code": "overloaded",
        "param": None,
        "max_queue": 7,
        "retry_after_s": 2.4,
    }
    _, headers, _ = call(raising(UnavailableError("draining", "bye")), make_scope())
    assert headers[b"connection"] == b"close"
    _, headers, _ = call(raising(RequestError("method_not_allowed", "no", numbers={"allow": "POST"})), make_scope())
    assert headers[b"allow"] == b"POST"


def test_a_bug_is_told_without_its_data_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    status, _, body = call(raising(ValueError("prompt text")), make_scope())
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal")
    assert b"prompt" not in body
    assert "GET /v1/models failed" in caplog.text


def test_an_error_after_the_head_breaks_the_response() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        call(app, make_scope())


def test_the_key_is_compared_whole() -> None:
    for headers in ({}, {"authorization": "Bearer k"}, {"authorization": "Token key"}, {"authorization": "key"}):
        assert call(good, make_scope(**headers), api_key="key")[0] == 401
    assert call(good, make_scope(authorization="Bearer key"), api_key="key")[0] == 200
    assert call(good, make_scope(authorization="bearer  key "), api_key="key")[0] == 200
    assert call(good, make_scope("/health"), api_key="key")[0] == 200
    assert call(good, make_scope("/healthz"), api_key="key")[0] == 401


def test_request_ids_are_echoed_made_and_logged() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record = logging.LogRecord("x", logging.INFO, "", 0, "hello %s", ("you",), None)
        RequestIdFilter().filter(record)
        seen.append(json.loads(JsonFormatter().format(record))["request_id"])
        await good(scope, receive, send)

    assert call(app, make_scope(x_request_id="abc-1"))[1][b"x-request-id"] == b"abc-1"
    assert seen == ["abc-1"]
    for bad in ("", "a b", "x" * 200, "a\nb"):
        assert call(app, make_scope(x_request_id=bad))[1][b"x-request-id"] == seen[-1].encode() != bad.encode()
    assert request_id_var.get() == "-"


def test_bodies_are_bounded_before_they_are_read() -> None:
    async def read(scope: dict[str, Any], *messages: dict[str, Any]) -> bytearray:
        return await read_body(scope, feed(*messages), 10)

    part = {"type": "http.request", "body": b"12345", "more_body": True}
    last = {"type": "http.request", "body": b"67890", "more_body": False}
    assert asyncio.run(read(make_scope(), part, last)) == b"1234567890"
    for scope, messages in ((make_scope(content_length="11"), ()), (make_scope(), (part, part, part))):
        with pytest.raises(RequestError) as caught:
            asyncio.run(read(scope, *messages))
        assert (caught.value.code, caught.value.numbers["max_body_bytes"]) == ("body_too_large", 10)
    with pytest.raises(RequestError, match="ended early"):
        asyncio.run(read(make_scope(), part, {"type": "http.disconnect"}))


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "BODY_SECONDS", 0.05)
    with pytest.raises(RequestError, match="did not arrive"):
        asyncio.run(read_body(make_scope(), feed(), 10))


def test_field_paths() -> None:
    assert field_path(("sessions", 2, "sampling", "top_p")) == "sessions[2].sampling.top_p"
    assert field_path(()) == ""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_log_has_request_ids(log_format: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    assert logging_config("info", log_format)["root"]["level"] == "INFO"
    configure_logging("info", log_format)
    token = request_id_var.set("trace-9")
    try:
        logging.getLogger("service.test").info("served %d", 3)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("service.test").exception("failed")
    finally:
        request_id_var.reset(token)
    first, *rest = capsys.readouterr().err.splitlines()
    if log_format == "json":
        entry = json.loads(first)
        assert (entry["message"], entry["request_id"], entry["level"]) == ("served 3", "trace-9", "info")
        assert "ValueError: broken" in json.loads(rest[0])["traceback"]
    else:
        assert "INFO    service.test [trace-9] served 3" in first
        assert "ValueError: broken" in rest[-1]
