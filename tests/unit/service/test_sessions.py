"""The session table against a plain model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from attention.cache import PageAllocator
from service.errors import ApiError
from service.prefix_cache import PrefixCache
from service.sessions import ContextSpan, Session, SessionChange, SessionKey, SessionTable
from tests.support.service import make_limits

PAGE_SIZE = 4
SCRATCH = 3


@dataclass
class Pool:
    """A table over real pages, with the rows written to them in a dict: (page, offset) -> value."""

    num_pages: int = 32
    max_sessions: int = 8
    idle_seconds: float = 5.0
    use_prefix_cache: bool = True
    slots: dict[tuple[int, int], object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages)
        self.prefix_cache = (
            PrefixCache(self.allocator, page_size=PAGE_SIZE, fingerprint="model") if self.use_prefix_cache else None
        )
        self.evicted: list[tuple[str, int]] = []
        self.table = SessionTable(
            self.allocator,
            page_size=PAGE_SIZE,
            limits=make_limits(
                max_sessions=self.max_sessions, max_context=200, idle_seconds=self.idle_seconds, session_ttl_seconds=100
            ),
            copy_page=self._copy,
            prefix_cache=self.prefix_cache,
            on_evicted=lambda reason, count: self.evicted.append((reason, count)),
        )

    def _copy(self, source: int, destination: int) -> None:
        for offset in range(PAGE_SIZE):
            self.slots[destination, offset] = self.slots.get((source, offset))

    def apply(self, change: SessionChange, tokens: list[int], now: float = 0.0) -> Session:
        """Prepare, write, advance, scribble over the scratch rows as a draft forward does, commit."""
        session = self.table.prepare(change, now)
        first = session.span.num_rows
        for offset, token in enumerate(tokens):
            self.write(session, first + offset, (change.start + offset, token))
        self.table.advance(session, tokens)
        for row in range(first + len(tokens), first + len(tokens) + change.scratch_rows):
            self.write(session, row, "scratch")
        self.table.commit(session, change.seq, ("reply", change.seq))
        return session

    def write(self, session: Session, row: int, value: object) -> None:
        page = session.pages[row // PAGE_SIZE]
        assert self.allocator.reference_count(page) == 1, "a shared page was written"
        self.slots[page, row % PAGE_SIZE] = value

    def rows(self, session: Session) -> list[object]:
        return [self.slots.get((session.pages[row // PAGE_SIZE], row % PAGE_SIZE)) for row in range(session.span.num_rows)]


def change(
    session_id: str = "a", start: int = 0, num_rows: int = 0, seq: int = 0, incarnation: int = 0, **more: object
) -> SessionChange:
    return SessionChange(
        key=SessionKey(str(more.pop("client", "c")), session_id),
        incarnation=incarnation,
        seq=seq,
        start=start,
        num_rows=num_rows,
        scratch_rows=SCRATCH,
        **more,  # type: ignore[arg-type]
    )


def refusal(pool: Pool, update: SessionChange, now: float = 0.0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        pool.table.prepare(update, now)
    return caught.value


def test_a_gap_is_refused_and_changes_nothing() -> None:
    pool = Pool()
    session = pool.apply(change(num_rows=5), [1, 2, 3, 4, 5])
    before = (pool.rows(session), session.span, list(session.pages), session.seq)
    error = refusal(pool, change(start=6, num_rows=1, seq=1))
    assert (error.code, error.status, error.numbers["committed_end"]) == ("context_gap", 409, 5)
    assert (pool.rows(session), session.span, list(session.pages), session.seq) == before


def test_a_rewind_truncates_everything_after_it() -> None:
    pool = Pool()
    pool.apply(change(num_rows=9), list(range(9)))
    session = pool.apply(change(start=3, num_rows=2, seq=1), [70, 71])
    assert pool.rows(session) == [(0, 0), (1, 1), (2, 2), (3, 70), (4, 71)]
    assert session.span.committed_end == 5


def test_a_repeat_is_answered_from_store_and_an_older_seq_is_stale() -> None:
    pool = Pool()
    pool.apply(change(num_rows=2, seq=4), [1, 2])
    assert pool.table.stored_reply(change(num_rows=2, seq=4), 0.0) == ("reply", 4)
    assert pool.table.stored_reply(change(start=2, seq=5), 0.0) is None
    assert refusal(pool, change(start=2, seq=3)).code == "stale_sequence"


def test_a_higher_incarnation_starts_over_and_a_lower_one_is_stale() -> None:
    pool = Pool()
    pool.apply(change(num_rows=3, incarnation=1), [1, 2, 3])
    session = pool.apply(change(num_rows=1, incarnation=2), [9])
    assert pool.rows(session) == [(0, 9)]
    assert refusal(pool, change(incarnation=1, seq=9)).code == "stale_incarnation"


def test_an_update_that_arrives_after_close_does_not_revive_the_session() -> None:
    pool = Pool()
    pool.apply(change(num_rows=3), [1, 2, 3])
    pool.table.close(SessionKey("c", "a"))
    assert refusal(pool, change(start=3, num_rows=1, seq=1)).code == "stale_incarnation"
    assert len(pool.table) == 0
    pool.apply(change(num_rows=1, incarnation=1), [1])


def test_closing_what_is_not_there_says_so() -> None:
    with pytest.raises(ApiError) as caught:
        Pool().table.close(SessionKey("c", "nobody"))
    assert (caught.value.code, caught.value.status) == ("session_not_found", 404)


def test_rows_never_sent_have_no_row_index() -> None:
    pool = Pool()
    session = pool.apply(change(start=50, num_rows=2), [1, 2])
    assert pool.rows(session) == [(50, 1), (51, 2)]
    assert (session.span.num_rows, session.span.committed_end, session.coverage) == (2, 52, 2 / 52)


def test_a_rewind_below_the_first_row_held_keeps_none() -> None:
    pool = Pool()
    pool.apply(change(start=50, num_rows=6), list(range(6)))
    session = pool.apply(change(start=10, num_rows=1, seq=1), [8])
    assert pool.rows(session) == [(10, 8)]


def test_a_prefix_is_attached_and_forks_are_independent() -> None:
    pool = Pool()
    tokens = list(range(100, 112))
    parent = pool.apply(change("parent", num_rows=12), tokens)
    child = pool.apply(change("child", start=8, num_rows=1, prefix_token_ids=tokens[:8]), [7])
    assert pool.rows(child) == [*((p, tokens[p]) for p in range(8)), (8, 7)]
    assert child.pages[:2] == parent.pages[:2]
    pool.apply(change("child", start=2, num_rows=1, seq=1), [5])
    assert pool.rows(parent) == [(p, tokens[p]) for p in range(12)]
    assert pool.rows(child) == [(0, 100), (1, 101), (2, 5)]


def test_a_prefix_held_in_part_leaves_a_hole_and_says_so() -> None:
    pool = Pool()
    tokens = list(range(100, 110))
    pool.apply(change("parent", num_rows=10), tokens)
    child = pool.apply(change("child", start=10, num_rows=1, prefix_token_ids=tokens), [7])
    assert pool.rows(child) == [*((p, tokens[p]) for p in range(8)), (10, 7)]
    assert (child.span.num_rows, child.span.committed_end) == (9, 11)
    pool.apply(change("child", start=9, num_rows=1, seq=1), [6])
    assert pool.rows(child) == [*((p, tokens[p]) for p in range(8)), (9, 6)]


def test_tenants_share_pages_only_under_one_salt() -> None:
    pool = Pool()
    tokens = list(range(8))
    pool.apply(change("a", num_rows=8, client="one", namespace="one"), tokens)
    stranger = pool.apply(change("b", start=8, client="two", namespace="two", prefix_token_ids=tokens), [])
    friend = pool.apply(change("c", start=8, client="two", namespace="one", prefix_token_ids=tokens), [])
    assert (stranger.span.num_rows, friend.span.num_rows) == (0, 8)


def test_a_full_table_refuses_new_sessions_only() -> None:
    pool = Pool(max_sessions=2)
    pool.apply(change("a", num_rows=1), [1], now=0.0)
    pool.apply(change("b", num_rows=1), [1], now=1.0)
    error = refusal(pool, change("c", num_rows=1), now=2.0)
    assert (error.code, error.status) == ("overloaded", 429)
    pool.apply(change("a", start=1, num_rows=1, seq=1), [2], now=2.0)


def test_eviction_takes_the_least_recently_used_idle_session() -> None:
    pool = Pool(max_sessions=2)
    pool.apply(change("a", num_rows=1), [1], now=0.0)
    pool.apply(change("b", num_rows=1), [1], now=1.0)
    pool.apply(change("a", start=1, seq=1), [], now=2.0)
    pool.apply(change("c", num_rows=1), [1], now=6.5)
    assert sorted(session.key.session_id for session in pool.table) == ["a", "c"]
    assert pool.evicted == [("lru", 1)]


def test_a_full_pool_refuses_the_new_session_and_the_old_ones_go_on() -> None:
    pool = Pool(num_pages=9, use_prefix_cache=False)
    session = pool.apply(change("a", num_rows=20), list(range(20)))
    assert refusal(pool, change("b", num_rows=16)).code == "overloaded"
    pool.apply(change("a", start=20, num_rows=4, seq=1), [1, 2, 3, 4])
    assert session.span.committed_end == 24


def test_a_session_that_starts_over_may_take_its_own_old_pages() -> None:
    pool = Pool(num_pages=9, use_prefix_cache=False)
    pool.apply(change("a", num_rows=20), list(range(20)))
    session = pool.apply(change("a", num_rows=24, incarnation=1), list(range(24)))
    assert (session.span.committed_end, len(pool.table)) == (24, 1)
    assert pool.evicted == [("restart", 1)]
    assert refusal(pool, change("a", num_rows=60, incarnation=2)).code == "overloaded"
    assert len(pool.table) == 0


def test_a_refused_update_of_a_full_pool_leaves_the_session_as_it_was() -> None:
    pool = Pool(num_pages=9, use_prefix_cache=False)
    session = pool.apply(change("a", num_rows=8), list(range(8)))
    before = (pool.rows(session), session.span, list(session.pages))
    assert refusal(pool, change("a", start=4, num_rows=60, seq=1)).code == "overloaded"
    assert (pool.rows(session), session.span, list(session.pages)) == before


def test_the_context_limit_is_told_with_both_numbers() -> None:
    error = refusal(Pool(), change(start=198, num_rows=3))
    assert (error.code, error.numbers) == ("context_limit", {"end": 201, "max_context": 200})


def test_dropping_a_client_leaves_the_others_alone() -> None:
    pool = Pool()
    pool.apply(change("a", num_rows=3, client="one"), [1, 2, 3])
    other = pool.apply(change("a", num_rows=3, client="two"), [4, 5, 6])
    assert pool.table.drop_client("one", "lease") == 1
    assert list(pool.table) == [other]
    assert pool.rows(other) == [(0, 4), (1, 5), (2, 6)]


def test_unused_sessions_expire() -> None:
    pool = Pool()
    pool.apply(change("old", num_rows=1), [1], now=0.0)
    pool.apply(change("new", num_rows=1), [1], now=90.0)
    assert pool.table.expire(101.0) == 1
    assert [session.key.session_id for session in pool.table] == ["new"]


@pytest.mark.parametrize(
    ("span", "position", "expected"),
    [
        (ContextSpan(committed_end=9), 4, ContextSpan(committed_end=4)),
        (ContextSpan(8, 12, 20), 15, ContextSpan(8, 12, 15)),
        (ContextSpan(8, 12, 20), 12, ContextSpan(8, 12, 12)),
        (ContextSpan(8, 12, 20), 10, ContextSpan(8, 10, 10)),
        (ContextSpan(8, 12, 20), 8, ContextSpan(committed_end=8)),
        (ContextSpan(8, 12, 20), 3, ContextSpan(committed_end=3)),
        (ContextSpan(0, 12, 20), 5, ContextSpan(0, 5, 5)),
        (ContextSpan(0, 12, 20), 0, ContextSpan()),
    ],
)
def test_truncation_of_a_span(span: ContextSpan, position: int, expected: ContextSpan) -> None:
    assert span.truncated(position) == expected


@dataclass
class Expected:
    """The plain model: rows by position, from the accepted updates alone."""

    incarnation: int
    seq: int
    committed_end: int
    rows: dict[int, int]


class SessionMachine(RuleBasedStateMachine):
    """Random appends, rewinds, repeats, stale and gapped updates, forks, closes, evictions: state == replay."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(num_pages=24, max_sessions=4, idle_seconds=3.0)
        self.expected: dict[SessionKey, Expected] = {}
        self.closed: dict[SessionKey, int] = {}
        self.now = 0.0

    def forget_evicted(self) -> None:
        for key in [key for key in self.expected if self.pool.table.get(key) is None]:
            del self.expected[key]

    def send(self, key: SessionKey, start: int, tokens: list[int], **more: object) -> str:
        self.now += 1.0
        known = self.expected.get(key)
        incarnation = known.incarnation if known else self.closed.get(key, -1) + 1
        update = SessionChange(
            key=key,
            incarnation=int(more.get("incarnation", incarnation)),  # type: ignore[call-overload]
            seq=int(more.get("seq", known.seq + 1 if known else 0)),  # type: ignore[call-overload]
            start=start,
            num_rows=len(tokens),
            scratch_rows=SCRATCH,
            prefix_token_ids=more.get("prefix", ()),  # type: ignore[arg-type]
        )
        try:
            session = self.pool.apply(update, tokens, self.now)
        except ApiError as error:
            self.forget_evicted()
            return error.code
        self.forget_evicted()
        known = self.expected.get(key)
        if known is None or update.incarnation > known.incarnation:
            prefix = {p: update.prefix_token_ids[p] for p in range(session.span.prefix_rows or 0)}
            if session.span.is_complete:
                prefix = {p: update.prefix_token_ids[p] for p in range(start)}
            known = Expected(update.incarnation, update.seq, start, prefix)
        known.rows = {p: t for p, t in known.rows.items() if p < start}
        known.rows.update({start + i: token for i, token in enumerate(tokens)})
        known.seq, known.committed_end = update.seq, start + len(tokens)
        self.expected[key] = known
        return "ok"

    @rule(target=keys, name=st.sampled_from("abcdef"), client=st.sampled_from(["one", "two"]))
    def name(self, name: str, client: str) -> SessionKey:
        return SessionKey(client, name)

    @rule(key=keys, count=st.integers(0, 9), data=st.data())
    def append(self, key: SessionKey, count: int, data: st.DataObject) -> None:
        known = self.expected.get(key)
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        assert self.send(key, known.committed_end if known else 0, tokens) in ("ok", "overloaded")

    @rule(key=keys, back=st.integers(1, 12), count=st.integers(0, 5), data=st.data())
    def rewind(self, key: SessionKey, back: int, count: int, data: st.DataObject) -> None:
        known = self.expected.get(key)
        if known is not None:
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
            assert self.send(key, max(0, known.committed_end - back), tokens) in ("ok", "overloaded")

    @rule(key=keys, gap=st.integers(1, 5))
    def gap(self, key: SessionKey, gap: int) -> None:
        known = self.expected.get(key)
        if known is not None:
            assert self.send(key, known.committed_end + gap, [1]) == "context_gap"

    @rule(key=keys)
    def repeat(self, key: SessionKey) -> None:
        known = self.expected.get(key)
        if known is not None:
            update = SessionChange(key, known.incarnation, known.seq, 0, 0, SCRATCH)
            assert self.pool.table.stored_reply(update, self.now) == ("reply", known.seq)

    @rule(key=keys, back=st.integers(1, 3))
    def stale(self, key: SessionKey, back: int) -> None:
        known = self.expected.get(key)
        if known is not None:
            assert self.send(key, 0, [1], seq=known.seq - back) == "stale_sequence"
            assert self.send(key, 0, [1], incarnation=known.incarnation - 1) == "stale_incarnation"

    @rule(key=keys)
    def restart(self, key: SessionKey) -> None:
        known = self.expected.get(key)
        if known is not None:
            assert self.send(key, 0, [2], incarnation=known.incarnation + 1, seq=0) in ("ok", "overloaded")

    @rule(parent=keys, child=keys, pages=st.integers(1, 3))
    def fork(self, parent: SessionKey, child: SessionKey, pages: int) -> None:
        known = self.expected.get(parent)
        start = pages * PAGE_SIZE
        if known is None or child in self.expected or any(p not in known.rows for p in range(start)):
            return
        prefix = [known.rows[p] for p in range(start)]
        assert self.send(child, start, [1], prefix=prefix) in ("ok", "overloaded")

    @rule(key=consumes(keys))
    def close(self, key: SessionKey) -> None:
        if key in self.expected:
            self.pool.table.close(key)
            self.closed[key] = self.expected.pop(key).incarnation
            assert self.send(key, 3, [1], incarnation=self.closed[key]) == "stale_incarnation"

    @rule()
    def wait(self) -> None:
        self.now += 2.0

    @rule(client=st.sampled_from(["one", "two"]))
    def lose_client(self, client: str) -> None:
        self.pool.table.drop_client(client, "lease")
        self.expected = {key: known for key, known in self.expected.items() if key.client_id != client}
        self.closed = {key: value for key, value in self.closed.items() if key.client_id != client}

    @rule(target=keys)
    def nothing_more(self) -> object:
        return multiple()

    @invariant()
    def state_is_the_replay_of_accepted_rows(self) -> None:
        assert {session.key for session in self.pool.table} == set(self.expected)
        for session in self.pool.table:
            known = self.expected[session.key]
            assert self.pool.rows(session) == sorted(known.rows.items())
            assert session.span.committed_end == known.committed_end

    @invariant()
    def pages_are_exactly_those_held(self) -> None:
        held: dict[int, int] = {}
        for session in self.pool.table:
            for page in session.pages:
                held[page] = held.get(page, 0) + 1
        assert self.pool.prefix_cache is not None
        allocator = self.pool.allocator
        cached = sum(allocator.reference_count(page) for page in range(1, 24)) - sum(held.values())
        assert cached == len(self.pool.prefix_cache)
        assert all(allocator.reference_count(page) >= count for page, count in held.items())

    def teardown(self) -> None:
        self.pool.table.clear()
        assert self.pool.allocator.num_free == self.pool.allocator.num_pages - 1


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
