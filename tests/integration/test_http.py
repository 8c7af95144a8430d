"""The protocol over a real server on loopback, with a drafter whose drafts are a function of exactly the rows it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draft_engine_client import codec, wire
from service.testing import FakeDrafter
from tests.support.service import (
    CONTAINER_TYPE,
    HELLO,
    Server,
    Update,
    container_body,
    error_of,
    features_of,
    fresh_drafts,
    json_body,
    make_harness,
    post_container,
    post_json,
    reply_of,
    serving,
    shake_hands,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(make_harness(FakeDrafter(num_pages=1_024), max_sessions=512)) as running:
        yield running


# Handshake -----------------------------------------------------------------------------------------------------------


def test_handshake_tells_the_facts_of_the_model(server: Server) -> None:
    answer = server.http.post("/v1/clients", json=HELLO)
    welcome = wire.ClientWelcome.model_validate_json(answer.content)
    assert welcome.model == server.harness.model.facts
    assert (welcome.server_id, welcome.server_version) == ("server-1", "1.2.3")
    assert welcome.limits.max_body_bytes == server.harness.limits.max_body_bytes


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("vocab_size", 1_001, "1000"),
        ("hidden_size", 8, "4"),
        ("num_layers", 4, "3"),
        ("target_layer_ids", [2, 0], "[0, 2]"),
        ("target_layer_ids", [0, 1], "[0, 2]"),
    ],
)
def test_handshake_refuses_another_target_by_field(server: Server, field: str, value: object, expected: str) -> None:
    hello = {**HELLO, "target": {**HELLO["target"], field: value}}
    answer = server.http.post("/v1/clients", json=hello)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (412, "fingerprint_mismatch", f"target.{field}")
    assert (error["expected"], error["got"]) == (expected, str(value))


def test_handshake_refuses_another_protocol_version(server: Server) -> None:
    answer = server.http.post("/v1/clients", json={**HELLO, "protocol_version": 2})
    assert (answer.status_code, error_of(answer)["param"]) == (412, "protocol_version")


def test_handshake_without_layer_ids_asks_to_be_told(server: Server) -> None:
    hello = {**HELLO, "target": {**HELLO["target"], "target_layer_ids": None}}
    assert server.http.post("/v1/clients", json=hello).json()["model"]["target_layer_ids"] == [0, 2]


@pytest.mark.parametrize(
    ("change", "path", "limit"),
    [
        ({"client_name": ""}, "client_name", "at least 1"),
        ({"surprise": 1}, "surprise", "not permitted"),
        ({"target": {**HELLO["target"], "vocab_size": 0}}, "target.vocab_size", "greater than 0"),
        ({"target": {**HELLO["target"], "dtype": "int8"}}, "target.dtype", "float16"),
    ],
)
def test_handshake_names_the_field_and_the_limit(server: Server, change: dict[str, Any], path: str, limit: str) -> None:
    answer = server.http.post("/v1/clients", json={**HELLO, **change})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "bad_request", path)
    assert path in error["message"]
    assert limit in error["message"]


def test_handshake_takes_json_only(server: Server) -> None:
    answer = server.http.post("/v1/clients", content=b"client_name=x", headers={"content-type": "text/plain"})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    answer = server.http.post("/v1/clients", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "bad_request")


# Propose -------------------------------------------------------------------------------------------------------------


def test_drafts_follow_the_rows_of_the_session(server: Server) -> None:
    client_id = shake_hands(server.http)
    first = reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1, 2, 3]))))
    assert wire.ProposeReply.model_validate(first)
    session = first["sessions"][0]
    assert session["draft_token_ids"] == fresh_drafts([1, 2, 3])
    assert (session["committed_end"], session["rows_held"], session["coverage"]) == (3, 3, 1.0)
    assert session["survival"] == pytest.approx([0.9, 0.81, 0.729, 0.6561])
    more = Update("a", 3, [7, 9], seq=1, anchor_token_id=4, num_draft_tokens=2)
    second = reply_of(post_container(server.http, container_body(client_id, more)))
    assert second["sessions"][0]["draft_token_ids"] == fresh_drafts([1, 2, 3, 7, 9], anchor_token_id=4, count=2)
    rewind = Update("a", 1, [8], seq=2)
    third = reply_of(post_container(server.http, container_body(client_id, rewind)))
    assert third["sessions"][0]["draft_token_ids"] == fresh_drafts([1, 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_json_and_container_give_equal_replies(server: Server, dtype: torch.dtype) -> None:
    updates = [
        Update("a", 0, [1, 2, 3], more={"draft_probs": "topk", "draft_probs_topk": 3}),
        Update("b", 0, [4, 5], more={"sampling": {"temperature": 0.7, "seed": 1}}),
        Update("c", 0, [6], num_draft_tokens=2, more={"draft_probs": "topk", "draft_probs_topk": 5}),
    ]
    name = str(dtype).removeprefix("torch.")
    as_container = post_container(server.http, container_body(shake_hands(server.http, dtype=name), *updates, dtype=dtype))
    as_json = post_json(server.http, json_body(shake_hands(server.http, dtype=name), *updates))
    container = codec.decode(as_container.content)
    reply, json_reply = reply_of(as_container), as_json.json()
    wire.JsonProposeReply.model_validate(json_reply)
    assert reply["sessions"] == json_reply["sessions"]
    for tensor in ("draft_probs_ids", "draft_probs"):
        assert container.tensors[tensor].to_array().tolist() == json_reply[tensor]
        assert container.tensors[tensor].shape == (10, 5)
    probs = json_reply["draft_probs"]
    assert [sum(row) for row in probs] == [1.0] * 4 + [0.0] * 4 + [1.0] * 2
    assert [row[0] for row in json_reply["draft_probs_ids"]][8:] == reply["sessions"][2]["draft_token_ids"]


def test_a_call_without_sessions_or_rows_is_legal(server: Server) -> None:
    client_id = shake_hands(server.http)
    assert reply_of(post_json(server.http, {"client_id": client_id}))["sessions"] == []
    body = codec.encode(json.dumps({"client_id": client_id}).encode(), {})
    assert reply_of(post_container(server.http, body))["sessions"] == []
    reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1, 2]))))
    again = reply_of(post_container(server.http, container_body(client_id, Update("a", 2, [], seq=1))))
    assert again["sessions"][0]["draft_token_ids"] == fresh_drafts([1, 2])


def test_a_repeated_seq_is_answered_from_memory(server: Server) -> None:
    client_id = shake_hands(server.http)
    body = container_body(client_id, Update("a", 0, [1, 2, 3]))
    first = reply_of(post_container(server.http, body))
    written = server.harness.model.rows_written
    assert reply_of(post_container(server.http, body))["sessions"] == first["sessions"]
    assert server.harness.model.rows_written == written
    reply_of(post_container(server.http, container_body(client_id, Update("a", 3, [4], seq=1))))
    stale = reply_of(post_container(server.http, body))["sessions"][0]
    assert (stale["error"]["code"], stale["error"]["status"], stale["committed_end"]) == ("stale_sequence", 409, 4)


def test_a_gap_is_refused_with_its_numbers_and_changes_nothing(server: Server) -> None:
    client_id = shake_hands(server.http)
    reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1, 2, 3]))))
    gap = reply_of(post_container(server.http, container_body(client_id, Update("a", 5, [4], seq=1))))["sessions"][0]
    assert (gap["error"]["code"], gap["error"]["status"]) == ("context_gap", 409)
    assert (gap["error"]["committed_end"], gap["committed_end"], gap["rows_held"]) == (3, 3, 3)
    assert "draft_token_ids" not in gap
    repaired = Update("a", 3, [9, 9, 4], seq=1)
    fixed = reply_of(post_container(server.http, container_body(client_id, repaired)))["sessions"][0]
    assert fixed["draft_token_ids"] == fresh_drafts([1, 2, 3, 9, 9, 4])


def test_bad_sessions_leave_their_neighbours_served(server: Server) -> None:
    client_id = shake_hands(server.http)
    updates = [
        Update("good", 0, [1, 2, 3]),
        Update("nan", 0, [1, 2]),
        Update("token", 0, [5, 1_000]),
        Update("anchor", 0, [5], anchor_token_id=1_000),
        Update("many", 0, [5], num_draft_tokens=5),
        Update("prefix", 2, [5], more={"prefix_token_ids": [1]}),
        Update("long", 0, [], more={"start": 2_000}),
        Update("also good", 0, [6]),
    ]
    rows = features_of([update for update in updates if update.token_ids])
    rows[4, 1] = float("nan")
    reply = reply_of(post_container(server.http, container_body(client_id, *updates, features=rows)))
    sessions = {session["session_id"]: session for session in reply["sessions"]}
    assert sessions["good"]["draft_token_ids"] == fresh_drafts([1, 2, 3])
    assert sessions["also good"]["draft_token_ids"] == fresh_drafts([6])
    told = {name: (s["error"]["code"], s["error"]["param"]) for name, s in sessions.items() if s.get("error") is not None}
    assert told == {
        "nan": ("non_finite_rows", "sessions[1].features[1]"),
        "token": ("token_out_of_range", "sessions[2].token_ids[1]"),
        "anchor": ("token_out_of_range", "sessions[3].anchor_token_id"),
        "many": ("too_many_draft_tokens", "sessions[4].num_draft_tokens"),
        "prefix": ("wrong_shape", "sessions[5].prefix_token_ids"),
        "long": ("context_limit", "start"),
    }
    held = server.http.get("/v1/sessions", params={"client_id": client_id}).json()["data"]
    assert {info["session_id"] for info in held} == {"good", "also good"}


def test_a_prefix_brings_back_the_pages_of_another_session(server: Server) -> None:
    client_id = shake_hands(server.http)
    tokens = list(range(20, 32))
    reply_of(post_container(server.http, container_body(client_id, Update("first", 0, tokens))))
    told = Update("second", 12, [3], more={"prefix_token_ids": tokens})
    second = reply_of(post_container(server.http, container_body(client_id, told)))["sessions"][0]
    assert (second["rows_held"], second["coverage"]) == (13, 1.0)
    assert second["draft_token_ids"] == fresh_drafts([*tokens, 3])
    untold = reply_of(post_container(server.http, container_body(client_id, Update("third", 12, [3]))))["sessions"][0]
    assert (untold["rows_held"], untold["coverage"]) == (1, pytest.approx(1 / 13))
    other = shake_hands(server.http)
    foreign = reply_of(post_container(server.http, container_body(other, told)))["sessions"][0]
    assert foreign["rows_held"] == 1, "another client's rows are never attached"


def test_tenants_share_a_prefix_only_under_one_salt_and_one_context(server: Server) -> None:
    """Neither a salt that spells another client's id nor the same tokens under another adapter reaches somebody's pages."""
    tokens = list(range(40, 52))
    owner, stranger = shake_hands(server.http), shake_hands(server.http)

    def rows_found(client_id: str, name: str, **more: Any) -> int:
        update = Update(name, 12, [3], more={"prefix_token_ids": tokens, **more})
        found = reply_of(post_container(server.http, container_body(client_id, update)))["sessions"][0]
        expected = fresh_drafts([*tokens, 3]) if found["rows_held"] == 13 else fresh_drafts([3], start=12)
        assert found["draft_token_ids"] == expected
        return int(found["rows_held"]) - 1

    salted = {"cache_salt": "team", "context_id": "adapter-1"}
    reply_of(post_container(server.http, container_body(owner, Update("own", 0, tokens))))
    reply_of(post_container(server.http, container_body(owner, Update("salted", 0, tokens, more=salted))))
    assert rows_found(owner, "1") == 12
    assert rows_found(stranger, "1") == 0
    assert rows_found(stranger, "2", cache_salt=owner) == 0
    assert rows_found(stranger, "3", cache_salt="team") == 0
    assert rows_found(stranger, "4", **{**salted, "context_id": "adapter-2"}) == 0
    assert rows_found(stranger, "5", **salted) == 12
    assert rows_found(owner, "6", context_id="adapter-1") == 0


def test_finished_sessions_are_closed(server: Server) -> None:
    client_id = shake_hands(server.http)
    reply_of(post_container(server.http, container_body(client_id, Update("a", 0, [1]), Update("b", 0, [2]))))
    reply_of(post_container(server.http, container_body(client_id, Update("b", 1, [3], seq=1), finished=["a"])))
    held = wire.SessionList.model_validate_json(server.http.get("/v1/sessions", params={"client_id": client_id}).content).data
    assert [(info.session_id, info.committed_end, info.seq) for info in held] == [("b", 2, 1)]
    late = reply_of(post_container(server.http, container_body(client_id, Update("a", 1, [4], seq=1))))["sessions"][0]
    assert late["error"]["code"] == "stale_incarnation"


def test_sessions_are_closed_by_name(server: Server) -> None:
    client_id = shake_hands(server.http)
    reply_of(post_container(server.http, container_body(client_id, Update("a/b c", 0, [1]))))
    other = server.http.delete("/v1/sessions/a%2Fb%20c", params={"client_id": "client-of-somebody-else"})
    assert (other.status_code, error_of(other)["code"]) == (404, "session_not_found")
    assert server.http.delete("/v1/sessions/a%2Fb%20c", params={"client_id": client_id}).status_code == 204
    gone = server.http.delete("/v1/sessions/a%2Fb%20c", params={"client_id": client_id})
    assert (gone.status_code, error_of(gone)["code"]) == (404, "session_not_found")
    unnamed = server.http.delete("/v1/sessions/x")
    assert (unnamed.status_code, error_of(unnamed)["param"]) == (400, "client_id")


def test_a_client_of_another_process_must_shake_hands_again(server: Server) -> None:
    client_id = shake_hands(server.http)
    for body in (json_body("client-unknown", Update("a", 0, [1])), json_body(client_id, Update("a", 0, [1]), server_id="old")):
        answer = post_json(server.http, body)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["server_id"]) == (409, "epoch_mismatch", "server-1")


# Malformed calls -----------------------------------------------------------------------------------------------------


def test_truncated_and_padded_bodies_are_refused_and_the_connection_serves_on(server: Server) -> None:
    client_id = shake_hands(server.http)
    body = container_body(client_id, Update("a", 0, [1, 2, 3]))
    for cut in (0, 1, 7, 8, 30, 200, len(body) - 1):
        answer = post_container(server.http, body[:cut])
        assert (answer.status_code, error_of(answer)["code"]) == (400, "bad_request"), cut
    assert post_container(server.http, body + b"\0").status_code == 400
    assert post_container(server.http, b"\xff" * 64).status_code == 400
    assert post_json(server.http, json.loads("[1]")).status_code == 400
    assert reply_of(post_container(server.http, body))["sessions"][0]["committed_end"] == 3


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"sessions": [{**Update("a", 0, [1]).message, "start": -1}]}, "bad_request", "sessions[0].start"),
        (
            {"sessions": [{**Update("a", 0, [1]).message, "sampling": {"top_p": 2}}]},
            "bad_request",
            "sessions[0].sampling.top_p",
        ),
        ({"sessions": [{**Update("a", 0, [1]).message, "surprise": 1}]}, "bad_request", "sessions[0].surprise"),
        ({"sessions": [Update("a", 0, [1]).message, Update("a", 0, []).message]}, "bad_request", "sessions[1].session_id"),
        ({"finished": ["a"]}, "bad_request", "finished[0]"),
        ({"token_ids": [1, 2]}, "wrong_shape", "token_ids"),
        ({"features": [[0.0] * 8] * 2}, "wrong_shape", "features"),
        ({"features": [[0.0] * 7]}, "wrong_shape", "features"),
        ({"features": []}, "wrong_shape", "features"),
        ({"features": [[0.0] * 8, [0.0]]}, "wrong_shape", "features[1]"),
        ({"deadline_ms": 0}, "bad_request", "deadline_ms"),
        ({"rows": "cooked"}, "bad_request", "rows"),
        ({"sessions": [Update(str(i), 0, []).message for i in range(17)], "token_ids": []}, "too_many_sessions", "sessions"),
        ({"sessions": [{**Update("a", 0, []).message, "num_rows": 257}]}, "too_many_rows", "sessions"),
    ],
)
def test_calls_that_cannot_be_served_are_refused_by_field(
    server: Server, change: dict[str, Any], code: str, param: str
) -> None:
    body = {**json_body(shake_hands(server.http), Update("a", 0, [1])), **change}
    answer = post_json(server.http, body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


def test_huge_numbers_are_refused_for_their_session_only(server: Server) -> None:
    client_id = shake_hands(server.http, dtype="float16")
    body = json_body(client_id, Update("a", 0, [1]), Update("b", 0, [10**30]), Update("c", 0, [2]))
    body["features"][2][0] = 1e6
    first, second, third = reply_of(post_json(server.http, body))["sessions"]
    assert first["draft_token_ids"] == fresh_drafts([1])
    assert second["error"]["code"] == "token_out_of_range"
    assert third["error"]["code"] == "non_finite_rows"


def test_tensors_of_the_wrong_kind_are_named(server: Server) -> None:
    client_id = shake_hands(server.http)
    update = Update("a", 0, [1])
    message = json.dumps({"client_id": client_id, "sessions": [update.message]}).encode()
    ids, rows = torch.tensor([1], dtype=torch.int32), features_of([update])
    cases: list[tuple[dict[str, torch.Tensor], str, str]] = [
        ({"token_ids": rows, "features": rows}, "wrong_dtype", "token_ids"),
        ({"token_ids": ids, "features": ids[None]}, "wrong_dtype", "features"),
        ({"token_ids": ids[None], "features": rows}, "wrong_shape", "token_ids"),
        ({"token_ids": ids, "features": rows[0]}, "wrong_shape", "features"),
        ({"token_ids": ids, "features": rows, "more": rows}, "bad_request", "tensors.more"),
        ({"token_ids": ids}, "wrong_shape", "features"),
        ({"features": rows}, "wrong_shape", "token_ids"),
    ]
    for tensors, code, param in cases:
        views = {name: codec.TensorView.from_array(tensor.numpy()) for name, tensor in tensors.items()}
        error = error_of(post_container(server.http, codec.encode(message, views)))
        assert (error["code"], error["param"]) == (code, param)


def test_oversized_bodies_are_refused_before_they_are_read(server: Server) -> None:
    limit = server.harness.limits.max_body_bytes
    answer = post_container(server.http, b"\0" * (limit + 1))
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["max_body_bytes"]) == (413, "body_too_large", limit)

    def chunks() -> Iterator[bytes]:
        for _ in range(limit // 2**16 + 2):
            yield b"\0" * 2**16

    answer = server.http.post("/v1/propose", content=chunks(), headers=CONTAINER_TYPE)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    answer = server.http.post("/v1/clients", content=b" " * 100_000, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["max_body_bytes"]) == (413, 65_536)


def test_unknown_paths_methods_and_media_types_have_the_one_error_shape(server: Server) -> None:
    missing = server.http.get("/v2/models")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    for path, allow in (("/v1/propose", "POST"), ("/v1/clients", "POST"), ("/v1/sessions/x", "DELETE")):
        wrong = server.http.get(path)
        assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == allow
    for headers in ({}, {"content-type": "application/octet-stream"}):
        answer = server.http.post("/v1/propose", content=b"x", headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    unknown = server.http.get("/v1/models/other")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


def test_request_ids_come_back(server: Server) -> None:
    assert server.http.get("/health", headers={"x-request-id": "trace-7"}).headers["x-request-id"] == "trace-7"
    made = server.http.get("/health", headers={"x-request-id": "two words"}).headers["x-request-id"]
    assert made != "two words"
    assert len(made) == 16


# The other routes ----------------------------------------------------------------------------------------------------


def test_models_and_version_tell_what_is_served(server: Server) -> None:
    models = wire.ModelList.model_validate_json(server.http.get("/v1/models").content)
    assert [entry.id for entry in models.data] == ["fake-drafter"]
    assert models.data[0].draft == server.harness.model.facts
    assert server.http.get("/v1/models/fake-drafter").json() == models.model_dump(mode="json")["data"][0]
    version = wire.VersionInfo.model_validate_json(server.http.get("/version").content)
    assert (version.version, version.server_id) == ("1.2.3", "server-1")


def test_health_is_good(server: Server) -> None:
    for path in ("/health", "/livez", "/readyz"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "warnings": []})
        assert server.http.head(path).status_code == 200


def test_metrics_count_calls_and_sessions_and_name_no_session(server: Server) -> None:
    client_id = shake_hands(server.http)
    secret = Update("a-session-that-nobody-should-see", 0, [1, 2])
    reply_of(post_container(server.http, container_body(client_id, secret)))
    reply_of(post_container(server.http, container_body(client_id, Update("b", 0, [1], num_draft_tokens=5))))
    post_container(server.http, b"")
    text = server.http.get("/metrics").text
    for line in (
        'draft_engine_calls_total{code="ok"}',
        'draft_engine_calls_total{code="bad_request"}',
        'draft_engine_session_errors_total{code="too_many_draft_tokens"}',
        "draft_engine_sessions ",
        "draft_engine_clients ",
        "draft_engine_forward_seconds_count",
    ):
        assert line in text
    assert secret.session_id not in text
    assert client_id not in text
