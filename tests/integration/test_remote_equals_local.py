"""The core claim: after any calls in any order, a remote session drafts as one in process that was fed its accepted rows.

A state machine drives a real server over loopback: prefill chunks, verified steps with accepted and rejected drafts, rewinds,
preemption and resumption at 0 and above it, prefix hits, forks, batches with a bad member, duplicates, lost calls, lost
replies, reordered calls, closes and evictions. After every call the drafts are those of a fresh session in this process that
holds exactly the rows that the rules say; twice, over a hash of all rows and over a real draft model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from draft_engine_client.wire import ModelFacts
from draft_model.drafter import ContextWrite, Drafter, DraftRequest
from draft_model.sampling import SamplingParams
from service.facts import model_facts
from service.testing import FakeDrafter, expected_drafts, row_digest
from tests.support.draft_model import load_drafter, make_tiny_drafter
from tests.support.service import Server, Update, container_body, make_harness, post_container, reply_of, serving, shake_hands

NAMES = "abcde"
MAX_SESSIONS = 4
PAGE_SIZE = 4
SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 11}


@dataclass(frozen=True)
class Draft:
    """Everything that a draft may depend on; `rows` are (position, token) of the rows held, in order."""

    rows: tuple[tuple[int, int], ...]
    position: int
    anchor_token_id: int
    is_sampled: bool


@dataclass(frozen=True)
class Pair:
    """A server, and what a drafter in this process would answer."""

    server: Server
    target: Mapping[str, Any]
    vocab_size: int
    features: Callable[[int, int], Tensor]
    in_process: Callable[[Draft], list[int]]


def features_of_row(width: int, position: int, token_id: int) -> Tensor:
    """A row that tells its position and its token, as a target's hidden states do."""
    seed = hashlib.blake2b(f"{position} {token_id}".encode(), digest_size=6).digest()
    return torch.randn(width, generator=torch.Generator().manual_seed(int.from_bytes(seed, "little")))


@pytest.fixture(scope="module")
def hashed() -> Iterator[Pair]:
    model = FakeDrafter(num_pages=96, page_size=PAGE_SIZE)
    features = partial(features_of_row, model.feature_width)

    def in_process(draft: Draft) -> list[int]:
        rows = [row_digest(position, features(position, token)) for position, token in draft.rows]
        return expected_drafts(rows, draft.position, draft.anchor_token_id, 4, model.vocab_size)

    with serving(make_harness(model, max_sessions=MAX_SESSIONS, idle_seconds=0.0, rows_per_chunk=8)) as server:
        yield Pair(server, {}, model.vocab_size, features, in_process)


class ServedDrafter:
    """A real drafter where the harness expects a fake one."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.num_pages, self.page_size = drafter.cache.num_pages, drafter.page_size
        self.facts: ModelFacts = model_facts(drafter, "tiny")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = make_tiny_drafter(tmp_path_factory.mktemp("draft"), dtype="float32")
    served, local = load_drafter(folder), load_drafter(folder)
    features = partial(features_of_row, local.config.feature_width)

    def in_process(draft: Draft) -> list[int]:
        pages = list(range(1, local.cache.num_pages))
        local.cache.fill(float("nan"))
        for row, (position, token) in enumerate(draft.rows):
            local.write_context([ContextWrite(pages, row, position, features(position, token)[None])])
        sampling = SamplingParams(**SAMPLING) if draft.is_sampled else SamplingParams()
        request = DraftRequest(
            pages, len(draft.rows), draft.position, draft.anchor_token_id, 4, sampling, rng_counter=draft.position
        )
        return list(local.draft([request])[0].token_ids)

    model: Any = ServedDrafter(served)
    target = {"vocab_size": 260, "hidden_size": 48, "num_layers": 4}
    with serving(make_harness(model, max_sessions=MAX_SESSIONS, idle_seconds=0.0, rows_per_chunk=8)) as server:
        yield Pair(server, target, local.config.vocab_size, features, in_process)


@dataclass
class Held:
    """What the server must hold of a session: the rows of the accepted updates alone."""

    incarnation: int
    seq: int = -1
    end: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    last_body: bytes = b""
    last_reply: dict[str, Any] = field(default_factory=dict)


class RemoteMachine(RuleBasedStateMachine):
    """See the module docstring."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair, self.http = pair, pair.server.http
        self.client_id = shake_hands(self.http, **pair.target)
        self.held: dict[str, Held] = {}
        self.next_incarnation = dict.fromkeys(NAMES, 0)
        self.num_calls = 0

    # Talking to the server -------------------------------------------------------------------------------------------

    def update(self, name: str, start: int, tokens: Sequence[int], *, seq: int, incarnation: int, **more: Any) -> Update:
        self.num_calls += 1
        if self.num_calls % 2:
            more["sampling"] = dict(SAMPLING)
        more = {"incarnation": incarnation, **more}
        return Update(name, start, tokens, seq, anchor_token_id=self.num_calls % 200, more=more)

    def next_update(self, name: str, start: int, tokens: Sequence[int], **more: Any) -> Update:
        held = self.held.get(name)
        if held is None:
            return self.update(name, start, tokens, seq=0, incarnation=self.next_incarnation[name], **more)
        return self.update(name, start, tokens, seq=held.seq + 1, incarnation=held.incarnation, **more)

    def body(self, *updates: Update, **more: Any) -> bytes:
        rows = [self.pair.features(u.start + i, token) for u in updates for i, token in enumerate(u.token_ids)]
        width = self.pair.server.harness.model.facts.feature_width
        features = torch.stack(rows) if rows else torch.zeros(0, width)
        return container_body(self.client_id, *updates, features=features, **more)

    def send(self, *updates: Update, finished: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Send a call, and hold every session of the reply against what the rules say."""
        body = self.body(*updates, finished=list(finished))
        replies = reply_of(post_container(self.http, body))["sessions"]
        self.forget_evicted(replies)
        for update, reply in zip(updates, replies, strict=True):
            if reply.get("error") is None:
                self.apply(update, reply, body)
        return list(replies)

    def apply(self, update: Update, reply: dict[str, Any], body: bytes) -> None:
        name, incarnation = update.session_id, update.more["incarnation"]
        held = self.held.get(name)
        if held is None or incarnation > held.incarnation:
            found = reply["rows_held"] - len(update.token_ids)
            prefix = update.more.get("prefix_token_ids", ())
            assert found in range(len(prefix) + 1)
            held = self.held[name] = Held(incarnation, end=update.start, rows=dict(enumerate(prefix[:found])))
            self.next_incarnation[name] = incarnation + 1
        held.rows = {position: token for position, token in held.rows.items() if position < update.start}
        held.rows.update({update.start + i: token for i, token in enumerate(update.token_ids)})
        held.seq, held.end = update.seq, update.start + len(update.token_ids)
        held.last_body, held.last_reply = body, reply
        assert (reply["committed_end"], reply["rows_held"]) == (held.end, len(held.rows))
        held.drafts = list(reply.get("draft_token_ids", ()))
        if update.num_draft_tokens:
            rows = tuple(sorted(held.rows.items()))
            wanted = Draft(rows, held.end, update.anchor_token_id, "sampling" in update.more)
            assert held.drafts == self.pair.in_process(wanted)

    def forget_evicted(self, replies: Sequence[dict[str, Any]]) -> None:
        there = {info["session_id"] for info in self.sessions()}
        fresh = {reply["session_id"] for reply in replies}
        self.held = {name: held for name, held in self.held.items() if name in there or name in fresh}

    def sessions(self) -> list[dict[str, Any]]:
        return list(self.http.get("/v1/sessions", params={"client_id": self.client_id}).json()["data"])

    def code(self, reply: dict[str, Any]) -> str:
        return "ok" if reply.get("error") is None else str(reply["error"]["code"])

    # What a target does ----------------------------------------------------------------------------------------------

    tokens = st.lists(st.integers(0, 2), max_size=9)
    names = st.sampled_from(NAMES)

    @rule(name=names, chunks=st.lists(tokens, min_size=1, max_size=3))
    def prefill(self, name: str, chunks: list[list[int]]) -> None:
        for chunk in chunks:
            update = self.next_update(name, self.held[name].end if name in self.held else 0, chunk)
            update.num_draft_tokens = 0
            assert self.code(self.send(update)[0]) == "ok"

    @rule(name=names, accepted=st.integers(0, 4), anchor=st.integers(0, 2))
    def verify(self, name: str, accepted: int, anchor: int) -> None:
        """The target keeps some drafts and throws the others away: rows of the rejected ones are never sent."""
        held = self.held.get(name)
        kept = held.drafts[:accepted] if held is not None else []
        assert self.code(self.send(self.next_update(name, held.end if held else 0, [anchor, *kept]))[0]) == "ok"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), back=st.integers(1, 12), tokens=tokens)
    def rewind(self, data: st.DataObject, back: int, tokens: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        assert self.code(self.send(self.next_update(name, max(0, self.held[name].end - back), tokens))[0]) == "ok"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_told=st.booleans(), pages=st.integers(0, 3))
    def preempt_and_resume(self, data: st.DataObject, is_told: bool, pages: int) -> None:
        """Its rows are gone at the target; it comes back at 0 or behind a prefix that the target has cached."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[name]
        if is_told:
            self.send(finished=[name])
            self.held.pop(name, None)
        start = min(pages * PAGE_SIZE, held.end)
        tokens = [held.rows.get(position, 0) for position in range(start)]
        late = self.update(name, held.end, [1], seq=held.seq + 1, incarnation=held.incarnation)
        again = self.update(name, start, [2], seq=0, incarnation=held.incarnation + 1, prefix_token_ids=tokens)
        assert self.code(self.send(again)[0]) == "ok"
        assert self.code(self.send(late)[0]) == "stale_incarnation"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), child=names, cut=st.integers(1, 12))
    def fork(self, data: st.DataObject, child: str, cut: int) -> None:
        parent = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        start = min(cut, parent.end)
        if child in self.held or any(position not in parent.rows for position in range(start)):
            return
        prefix = [parent.rows[position] for position in range(start)]
        reply = self.send(self.next_update(child, start, [1], prefix_token_ids=prefix))[0]
        assert self.code(reply) == "ok"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), other=names)
    def batch_with_a_bad_member(self, data: st.DataObject, other: str) -> None:
        bad = data.draw(st.sampled_from(sorted(self.held)))
        if other == bad or other not in self.held:
            return
        gapped = self.next_update(bad, self.held[bad].end + 3, [1])
        told, served = self.send(gapped, self.next_update(other, self.held[other].end, [2]))
        assert (self.code(told), self.code(served)) == ("context_gap", "ok")

    # What a network does ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def duplicate(self, data: st.DataObject) -> None:
        """The same call again, when no other came between: the same answer, and no row written."""
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        written = getattr(self.pair.server.harness.model, "rows_written", 0)
        replies = reply_of(post_container(self.http, held.last_body))["sessions"]
        if len(replies) == 1:
            assert replies == [held.last_reply]
            assert getattr(self.pair.server.harness.model, "rows_written", 0) == written

    @precondition(lambda self: self.held)
    @rule(data=st.data(), lost=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def lost_call(self, data: st.DataObject, lost: list[int]) -> None:
        """The next call names the gap, is told where to go on, and one more call repairs it."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        end = self.held[name].end
        told = self.send(self.next_update(name, end + len(lost), [1]))[0]
        assert (self.code(told), told["error"]["committed_end"]) == ("context_gap", end)
        assert self.code(self.send(self.next_update(name, told["error"]["committed_end"], [*lost, 1]))[0]) == "ok"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=tokens)
    def lost_reply(self, data: st.DataObject, tokens: list[int]) -> None:
        """A client that never heard sends the same rows again under a new seq."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[name]
        unheard = self.next_update(name, held.end, tokens)
        post_container(self.http, self.body(unheard))
        again = self.update(name, held.end, [*tokens, 2], seq=unheard.seq + 1, incarnation=held.incarnation)
        assert self.code(self.send(again)[0]) == "ok"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=tokens)
    def reordered(self, data: st.DataObject, tokens: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[name]
        first = self.next_update(name, held.end, tokens)
        second = self.update(name, held.end, [*tokens, 1], seq=first.seq + 1, incarnation=held.incarnation)
        assert self.code(self.send(second)[0]) == "ok"
        assert self.code(self.send(first)[0]) == "stale_sequence"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held.pop(name)
        assert self.http.delete(f"/v1/sessions/{name}", params={"client_id": self.client_id}).status_code == 204
        late = self.update(name, held.end, [1], seq=held.seq + 1, incarnation=held.incarnation)
        assert self.code(self.send(late)[0]) == "stale_incarnation"

    @invariant()
    def the_server_holds_the_accepted_rows(self) -> None:
        found = {info["session_id"]: (info["committed_end"], info["rows_held"]) for info in self.sessions()}
        assert found == {name: (held.end, len(held.rows)) for name, held in self.held.items()}
        assert len(found) <= MAX_SESSIONS

    def teardown(self) -> None:
        for name in sorted(self.held):
            if name in self.held:
                self.send(self.next_update(name, self.held[name].end, []))
        self.send(finished=sorted(self.held))
        assert self.sessions() == []


def run_machine(pair: Pair, *, max_examples: int, stateful_step_count: int) -> None:
    machine: Any = partial(RemoteMachine, pair)
    few = settings(max_examples=max_examples, stateful_step_count=stateful_step_count, deadline=None)
    run_state_machine_as_test(machine, settings=few)


def test_remote_drafts_equal_those_in_process_over_a_hash_of_all_rows(hashed: Pair) -> None:
    run_machine(hashed, max_examples=40, stateful_step_count=25)
    evicted = hashed.server.harness.metrics.evictions.labels("lru")._value.get()
    assert evicted > 0, "no schedule filled the table"
    assert hashed.server.harness.prefix_cache.hit_rows > 0, "no schedule hit the prefix cache"


def test_remote_drafts_equal_those_in_process_over_a_real_draft_model(drafted: Pair) -> None:
    run_machine(drafted, max_examples=12, stateful_step_count=20)
    assert drafted.server.harness.prefix_cache.hit_rows > 0
