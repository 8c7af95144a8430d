"""The status page: what it shows, that nothing can be smuggled into it, and who may look at it."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

import pytest

from draft_engine_client.wire import ModelFacts
from service.metrics import EngineMetrics
from service.routes import wire_limits
from service.status_page import ServerState, StatusPage
from service.testing import FakeDrafter
from tests.support.service import (
    Update,
    error_of,
    json_body,
    make_harness,
    make_limits,
    post_json,
    reply_of,
    serving,
    shake_hands,
    wait_until,
)

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """The text of a page, and whether its elements are closed in order. `href`s and the names of tags are kept."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " | ".join(self.words)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def make_page(metrics: EngineMetrics, clock: Clock, *, warnings: tuple[str, ...] = (), status: str = "ok") -> StatusPage:
    state = ServerState(status, warnings, "1.2.3", "server-1", started_at=clock.now)
    return StatusPage(metrics, FakeDrafter().facts, wire_limits(make_limits()), lambda: state, clock)


def test_an_idle_server_says_so() -> None:
    page = Page(make_page(EngineMetrics(), Clock()).render())
    assert "fake-drafter" in page.text
    assert "No target has told yet what became of a draft." in page.text
    assert "layer 0: " in page.text
    assert page.tags.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert page.links == ["/docs", "/metrics", "/health"]


def test_acceptance_is_shown_by_position_context_and_coverage() -> None:
    metrics = EngineMetrics()
    for accepted in (0, 1, 1, 2):
        metrics.saw_acceptance(accepted, 100, 1.0)
    for _ in range(4):
        metrics.saw_acceptance(4, 5_000, 0.2)
    metrics.publish_acceptance()
    metrics.saw_acceptance(4, 100_000, 1.0)
    metrics.saw_acceptance(4, 20_000, 0.5)
    metrics.saw_acceptance(0, 2_000, 0.5)
    metrics.saw_acceptance(0, 2_000, 0.5)
    metrics.publish_acceptance()
    text = Page(make_page(metrics, Clock()).render()).text
    assert "acceptance length | 3.33" in text
    places = [text.index(f"| {bucket} |") for bucket in ("<1k", "1k-4k", "4k-16k", "16k-64k", ">=64k")]
    assert places == sorted(places)
    for place, kept in enumerate(("75.0%", "58.3%", "50.0%", "50.0%")):
        assert f"{place} | {kept}" in text
    assert "<1k | 4 | 2.00" in text
    assert "4k-16k | 4 | 5.00" in text
    assert "low | 4 | 5.00" in text
    assert "half | 3 | 2.33" in text


def test_rates_are_those_of_the_last_minute() -> None:
    metrics, clock = EngineMetrics(), Clock()
    page = make_page(metrics, clock)
    metrics.drafts.inc(10)
    clock.now += 10.0
    assert "blocks a second | 1.0" in Page(page.render()).text
    metrics.drafts.inc(100)
    clock.now += 20.0
    text = Page(page.render()).text
    assert "blocks a second | 5.0" in text
    assert "the last 20 s" in text
    clock.now += 1_000.0
    assert "the whole run" in Page(page.render()).text


def test_faults_are_counted_by_their_codes() -> None:
    metrics = EngineMetrics()
    metrics.calls.labels("ok").inc(7)
    metrics.calls.labels("overloaded").inc(3)
    metrics.session_errors.labels("context_gap").inc(2)
    metrics.evictions.labels("idle").inc()
    text = Page(make_page(metrics, Clock()).render()).text
    assert "overloaded 3" in text
    assert "context_gap 2" in text
    assert "idle 1" in text
    assert "ok 7" not in text


def test_nothing_can_be_smuggled_in() -> None:
    clock = Clock()
    facts = replace_facts(model_id="<script>alert(1)</script>")
    state = ServerState("ok", ("<img src=x onerror=alert(1)>",), "<b>", '"><i>', started_at=clock.now)
    page = Page(StatusPage(EngineMetrics(), facts, wire_limits(make_limits()), lambda: state, clock).render())
    assert page.tags.isdisjoint({"script", "img", "i"})
    assert "<script>alert(1)</script>" in page.text


def replace_facts(**changes: object) -> ModelFacts:
    return FakeDrafter().facts.model_copy(update=changes)


@pytest.mark.parametrize("status", ["draining", "failed"])
def test_a_server_in_trouble_says_so_at_the_top(status: str) -> None:
    document = make_page(EngineMetrics(), Clock(), status=status, warnings=("no_drafts: none came",)).render()
    assert f"class='state {status}'" in document
    assert "no_drafts: none came" in Page(document).text


def test_the_page_of_a_running_server_shows_its_sessions() -> None:
    with serving(make_harness()) as server:
        client_id = shake_hands(server.http)
        drafted = reply_of(post_json(server.http, json_body(client_id, Update("a-secret-session", 0, [11, 12]))))["sessions"][0]
        tokens = [7, *drafted["draft_token_ids"][:2]]
        reply_of(post_json(server.http, json_body(client_id, Update("a-secret-session", 2, tokens, seq=1))))
        answer = server.http.get("/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        wait_until(lambda: "acceptance length | 3.00" in Page(server.http.get("/").text).text)
        text = Page(server.http.get("/").text).text
        assert "sessions | 1" in text
        assert "targets | 1" in text
        assert "a-secret-session" not in text


def test_a_browser_is_asked_for_the_key_and_only_for_this_page() -> None:
    def basic(password: str) -> dict[str, str]:
        return {"authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}

    with serving(make_harness(), api_key="key:with a colon") as server:
        refused = server.http.get("/")
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == 'Basic realm="draft-engine"'
        assert server.http.get("/", headers=basic("key:with a colon")).status_code == 200
        assert server.http.get("/", headers={"authorization": "Bearer key:with a colon"}).status_code == 200
        for headers in (basic("wrong"), {"authorization": "Basic nonsense!"}, {"authorization": "Basic"}):
            assert server.http.get("/", headers=headers).status_code == 401
        other = server.http.get("/v1/models", headers=basic("key:with a colon"))
        assert (other.status_code, other.headers["www-authenticate"]) == (401, "Bearer")
