"""The target's OpenAI-compatible API over a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draft_engine_client.payoff import Payoff
from draft_model.target_model import TargetModel
from service.launch import DrainingServer, serve
from service.target.engine import TargetEngine, TargetEngineLimits
from service.target.routes import TargetFacts, create_target_app
from service.target.settings import TargetSettings
from service.target.text import TargetTokenizer
from tests.integration.test_target_engine import LAYERS, PROMPTS, Oracle, decode_plainly
from tests.support.tiny_target import write_tiny_target

MODEL = "tiny"


class Running:
    """A target server, its engine and a client."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = TargetModel.load(folder), TargetTokenizer(folder)
        plain = {tuple(prompt): decode_plainly(self.model, prompt, 60) for prompt in PROMPTS}
        limits = TargetEngineLimits(max_batch=2, max_waiting=2, max_context=512)
        self.engine = TargetEngine(self.model, self.tokenizer, Oracle(answers=plain), target_layer_ids=LAYERS, limits=limits)
        self.engine.start()
        facts = TargetFacts(MODEL, self.model.config.vocab_size, 3, 0)
        app = create_target_app(self.engine, self.tokenizer, facts, api_key="secret-key")
        self._server: DrainingServer | None = None
        ready = threading.Event()
        self.url = ""

        def on_ready(url: str) -> None:
            self.url = url
            ready.set()

        def run() -> None:
            serve(
                app, TargetSettings(port=0, draft_url=None), on_ready, on_server=lambda server: setattr(self, "_server", server)
            )

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert ready.wait(30)
        self.http = httpx.Client(base_url=self.url, headers={"authorization": "Bearer secret-key"}, timeout=60)

    def close(self) -> None:
        self.http.close()
        assert self._server is not None
        self._server.begin_shutdown()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.engine.stop()

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 20} | fields)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    running = Running(write_tiny_target(tmp_path_factory.mktemp("target"), seed=3))
    yield running
    running.close()


def test_a_completion_has_text_usage_and_what_drafting_did(server: Running) -> None:
    reply = server.complete().raise_for_status().json()
    expected = decode_plainly(server.model, PROMPTS[0], 20)
    choice = reply["choices"][0]
    assert choice["token_ids"] == expected
    assert choice["text"] == server.tokenizer.decode(expected)
    assert choice["finish_reason"] == "length"
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}
    draft = reply["draft"]
    assert draft["accepted"] == sum(draft["accepted_by_position"]) > 10
    assert draft["acceptance_length"] == pytest.approx(1 + draft["accepted"] / draft["rounds"])
    assert sum(draft["milliseconds"][part] for part in ("verify", "draft", "http", "other")) == pytest.approx(
        draft["milliseconds"]["decode"], abs=0.1
    )


def test_a_request_may_decode_plainly_or_with_other_widths(server: Running) -> None:
    plain = server.complete(num_draft_tokens=0).raise_for_status().json()
    assert plain["draft"]["proposed"] == 0
    for width in (1, 5):
        drafted = server.complete(num_draft_tokens=width).raise_for_status().json()
        assert drafted["choices"] == plain["choices"]
        assert len(drafted["draft"]["accepted_by_position"]) == width


def test_metrics_tell_what_drafting_was_worth(server: Running) -> None:
    before = server.http.get("/metrics").raise_for_status().text
    assert "draft_target_running_requests 0.0" in before
    assert "net_saved_seconds" not in before, "nobody measures it here"
    payoff = Payoff()
    for is_drafted in (False, False, False, True):
        payoff.record(1, 10, is_drafted=is_drafted, num_tokens=1 + is_drafted, seconds=1.0)
    server.engine._payoff = payoff
    try:
        after = server.http.get("/metrics").raise_for_status().text
    finally:
        server.engine._payoff = None
    assert "draft_target_net_saved_seconds 1.0" in after
    assert "draft_target_drafted_steps 1.0" in after


def test_a_stream_joins_to_the_whole_answer(server: Running) -> None:
    whole = server.complete().json()
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 20, "stream_options": {"include_usage": True}}
    events = server.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
    assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1] == events[-1] | {"choices": [], "usage": whole["usage"]}


def test_a_chat_renders_the_template_and_streams_deltas(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_completion_tokens": 15}
    whole = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    prompt = server.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert whole["choices"][0]["token_ids"] == decode_plainly(server.model, prompt, 15)
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert whole["object"] == "chat.completion"
    events = server.events("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["choices"][0]["message"]["content"]


def test_stop_strings_and_stop_tokens(server: Running) -> None:
    expected = decode_plainly(server.model, PROMPTS[0], 20)
    stop = server.tokenizer.decode(expected)[5:7]
    reply = server.complete(stop=[stop]).json()["choices"][0]
    assert (reply["finish_reason"], reply["stop_reason"]) == ("stop", stop)
    assert stop not in reply["text"]
    reply = server.complete(stop_token_ids=[expected[4]]).json()["choices"][0]
    assert (reply["finish_reason"], reply["stop_reason"]) == ("stop", expected[4])
    assert reply["token_ids"] == expected[: expected.index(expected[4])]


def test_sampling_with_a_seed_repeats_and_without_one_does_not(server: Running) -> None:
    def sample(**fields: Any) -> list[int]:
        return server.complete(temperature=1.5, max_tokens=30, **fields).json()["choices"][0]["token_ids"]

    assert sample(seed=11) == sample(seed=11)
    assert len({tuple(sample()) for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"prompt": []}, 400, "bad_request", "prompt"),
        ({"prompt": ""}, 400, "bad_request", "prompt"),
        ({"prompt": [5, 260]}, 400, "token_out_of_range", "prompt[1]"),
        ({"prompt": [-1]}, 400, "bad_request", "prompt"),
        ({"max_tokens": 0}, 400, "bad_request", "max_tokens"),
        ({"max_tokens": 600}, 400, "context_limit", "max_tokens"),
        ({"prompt": [1] * 600}, 400, "context_limit", "prompt"),
        ({"temperature": -0.5}, 400, "bad_request", "temperature"),
        ({"temperature": 3}, 400, "bad_request", "temperature"),
        ({"top_p": 0}, 400, "bad_request", "top_p"),
        ({"n": 2}, 400, "bad_request", "n"),
        ({"logprobs": 3}, 400, "bad_request", "logprobs"),
        ({"stop": [""]}, 400, "bad_request", "stop"),
        ({"num_draft_tokens": 99}, 400, "bad_request", "num_draft_tokens"),
        ({"model": "other"}, 404, "model_not_found", "model"),
    ],
)
def test_bad_input_names_the_field(server: Running, fields: dict[str, Any], status: int, code: str, param: str) -> None:
    response = server.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["param"].startswith(param)
    assert param.partition("[")[0] in error["message"] or param == "model"


@pytest.mark.parametrize(
    ("messages", "param"),
    [([], "messages"), ([{"role": "robot", "content": "x"}], "messages"), ([{"role": "user"}], "messages"), (None, "messages")],
)
def test_bad_chats_name_the_field(server: Running, messages: Any, param: str) -> None:
    body = {} if messages is None else {"messages": messages}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_malformed_bodies_unknown_routes_and_keys(server: Running) -> None:
    malformed = server.http.post("/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"})
    assert malformed.status_code == 400
    assert server.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get("/v1/completions").status_code == 405
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    assert server.http.get("/v1/models").json()["data"][0]["id"] == MODEL


def test_a_caller_that_goes_away_frees_its_slot(server: Running) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 500, "temperature": 1.0, "ignore_eos": True}
    was_running = False
    for _ in range(20):  # on a busy machine an answer can be over before it is looked at
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            next(response.iter_lines())
            was_running = server.engine.num_running == 1
        if was_running:
            break
    assert was_running
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 5
    while server.engine.num_running or server.engine.num_waiting:
        assert time.monotonic() < deadline, "a request outlived its caller"
        time.sleep(0.01)


def test_a_full_server_answers_429_and_serves_on(server: Running) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    replies: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: replies.append(server.http.post("/v1/completions", json=body))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 429}
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    answers = {tuple(reply.json()["choices"][0]["token_ids"]) for reply in replies if reply.status_code == 200}
    assert answers == {tuple(decode_plainly(server.model, PROMPTS[0], 400))}


def test_a_body_that_is_too_large_or_of_another_type_is_refused(server: Running) -> None:
    large = server.complete(stop="x" * 256, prompt="y" * 2**20)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    assert large.json()["error"]["max_body_bytes"] == 2**20
    text = server.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert (text.status_code, text.json()["error"]["code"]) == (415, "unsupported_media_type")
