"""Does each rule of the protocol have a test that fails when the rule is broken? `make mutations` breaks them one by one.

Every mutation replaces one piece of one source file in a copy of the tree and runs the test that names the rule, which must
fail there. The tests pass unbroken first. `make test` holds the table itself against the sources, so that no mutation can rot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("attention", "draft_model", "service", "client", "tests", "docs", "pyproject.toml")
ENGINE = "tests/unit/service/test_engine.py"
SESSIONS = "tests/unit/service/test_sessions.py"
REMOTE = "tests/integration/test_remote_equals_local.py::test_remote_drafts_equal_those_in_process_over_a_hash_of_all_rows"
REAL_MODEL = "tests/integration/test_remote_equals_local.py::test_remote_drafts_equal_those_in_process_over_a_real_draft_model"
HTTP = "tests/integration/test_http.py"
LIFE = "tests/integration/test_http_lifecycle.py"
CLIENT = "tests/unit/client/test_client.py"
_tell = partial(print, flush=True)


@dataclass(frozen=True)
class Mutation:
    """`old`, which `file` has once, becomes `new`, and `test` must notice; `rule` is its number in tests/README.md."""

    rule: int
    breaks: str
    test: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        1,
        "a gap is accepted",
        f"{SESSIONS}::test_a_gap_is_refused_and_changes_nothing",
        "service/sessions.py",
        "if change.start > session.span.committed_end:",
        "if False:",
    ),
    Mutation(
        2,
        "drafts are made for the position after the anchor's",
        f"{ENGINE}::test_drafts_are_those_of_a_session_fed_the_accepted_rows",
        "service/engine.py",
        "position=session.span.committed_end,\n        anchor_token_id",
        "position=session.span.committed_end + 1,\n        anchor_token_id",
    ),
    Mutation(
        3,
        "an update starts at the committed end, wherever it says that it starts",
        REMOTE,
        "service/sessions.py",
        "session.span.truncated(change.start), change",
        "session.span, change",
    ),
    Mutation(
        4,
        "the names of shared pages survive a rewind",
        REMOTE,
        "service/sessions.py",
        "session.chain.truncate(span.num_rows)",
        "pass",
    ),
    Mutation(
        4,
        "the tokens that the drafter sees survive a rewind",
        f"{ENGINE}::test_the_drafter_is_told_the_tokens_of_the_context_as_far_as_they_are_known",
        "service/sessions.py",
        "session.tokens.truncate(span.committed_end)",
        "pass",
    ),
    Mutation(
        5,
        "a refused session ends the step of its neighbours",
        f"{ENGINE}::test_one_refused_session_leaves_the_rest_of_its_batch_served",
        "service/engine.py",
        "work.outcome = self._refusal(work, error)\n\n    def _prepare",
        "raise\n\n    def _prepare",
    ),
    Mutation(
        5,
        "a refused update of a full pool has truncated its session",
        f"{SESSIONS}::test_a_refused_update_of_a_full_pool_leaves_the_session_as_it_was",
        "service/sessions.py",
        "fresh = self._allocate(num_pages - first_page",
        "self._truncate(session, span)\n        fresh = self._allocate(num_pages - first_page",
    ),
    Mutation(
        6,
        "a repeat is applied again",
        f"{ENGINE}::test_a_repeat_writes_nothing_again",
        "service/sessions.py",
        "if (session.incarnation, session.seq) != (change.incarnation, change.seq):",
        "if True:",
    ),
    Mutation(
        6,
        "an older seq is applied",
        f"{SESSIONS}::test_a_repeat_is_answered_from_store_and_an_older_seq_is_stale",
        "service/sessions.py",
        "change.incarnation == session.incarnation and change.seq < session.seq:",
        "False:",
    ),
    Mutation(
        6,
        "a closed session is revived by what arrives late",
        f"{SESSIONS}::test_an_update_that_arrives_after_close_does_not_revive_the_session",
        "service/sessions.py",
        "self._closed[key] = session.incarnation",
        "pass",
    ),
    Mutation(
        6,
        "a client of another process is served",
        f"{HTTP}::test_a_client_of_another_process_must_shake_hands_again",
        "service/clients.py",
        "server_id not in (None, self.server_id)",
        "False",
    ),
    Mutation(
        7,
        "a reply is believed whatever it answers",
        f"{CLIENT}::test_a_fault_costs_the_drafts_of_its_step_and_repairs_itself",
        "client/draft_engine_client/sessions.py",
        "if (reply.incarnation, reply.seq) != (attempt.incarnation, attempt.seq):",
        "if False:",
    ),
    Mutation(
        8,
        "the client takes a restarted server for the old one",
        f"{CLIENT}::test_drafts_after_a_restart_equal_drafts_without_it",
        "client/draft_engine_client/state.py",
        "            if mirror.was_sent:\n                mirror.forget_server()\n",
        "",
    ),
    Mutation(
        9,
        "a silent client keeps its lease",
        f"{LIFE}::test_a_silent_client_loses_its_lease_and_its_sessions",
        "service/clients.py",
        "if now - client.last_seen <= self._lease_seconds:",
        "if True:",
    ),
    Mutation(
        9,
        "a client that leaves takes the sessions of the others along",
        f"{SESSIONS}::test_dropping_a_client_leaves_the_others_alone",
        "service/sessions.py",
        "if s.key.client_id == client_id and s.key not in busy]",
        "if s.key not in busy]",
    ),
    Mutation(
        10,
        "what a server held counts as held after it was given up",
        f"{CLIENT}::test_a_fault_costs_the_drafts_of_its_step_and_repairs_itself",
        "client/draft_engine_client/sessions.py",
        "        self._acked_end = _NEVER\n        self._opened_at = _NEVER\n        self._sent_end = _NEVER\n",
        "",
    ),
    Mutation(
        11,
        "a call is served after its deadline",
        f"{ENGINE}::test_a_call_past_its_deadline_is_told_so_and_has_changed_nothing",
        "service/batching.py",
        "call.deadline_at is not None and call.deadline_at <= now",
        "False",
    ),
    Mutation(
        12,
        "the layers of a target are not compared",
        f"{HTTP}::test_handshake_refuses_another_target_by_field",
        "service/clients.py",
        '"target_layer_ids": facts.target_layer_ids,',
        "",
    ),
    Mutation(
        13,
        "all clients share their prefix pages",
        f"{HTTP}::test_tenants_share_a_prefix_only_under_one_salt_and_one_context",
        "service/intake.py",
        '["client", client_id] if',
        '["client"] if',
    ),
    Mutation(
        13,
        "a salt may spell the id of another client",
        f"{HTTP}::test_tenants_share_a_prefix_only_under_one_salt_and_one_context",
        "service/intake.py",
        '["salt", update.cache_salt]',
        '["client", update.cache_salt]',
    ),
    Mutation(
        13,
        "contexts of several adapters share pages",
        f"{HTTP}::test_tenants_share_a_prefix_only_under_one_salt_and_one_context",
        "service/intake.py",
        "json.dumps([*owner, update.context_id])",
        "json.dumps(owner)",
    ),
    Mutation(
        13,
        "a fork writes into the pages of its parent",
        f"{SESSIONS}::test_a_prefix_is_attached_and_forks_are_independent",
        "service/sessions.py",
        "elif old_page is not None and self._allocator.reference_count(old_page) == 1:",
        "elif old_page is not None:",
    ),
    Mutation(
        14,
        "rows that were never seen count as held",
        f"{SESSIONS}::test_rows_never_sent_have_no_row_index",
        "service/sessions.py",
        "return cls(prefix_rows=attached_rows, context_start=start, committed_end=start)",
        "return cls(committed_end=start)",
    ),
    Mutation(
        14,
        "attention reads one row that was never written",
        "tests/unit/draft_model/test_mla_drafter.py::test_missing_rows_equal_a_dense_model_that_never_had_them",
        "draft_model/drafter.py",
        "[request.num_rows + size for request in requests],",
        "[request.num_rows + size + 1 for request in requests],",
    ),
    Mutation(
        15,
        "the positions of a batch are those of its first request",
        "tests/unit/draft_model/test_mla_drafter.py::test_a_request_draws_the_same_in_every_batch",
        "draft_model/drafter.py",
        "positions += range(request.position, request.position + size)",
        "positions += range(requests[0].position, requests[0].position + size)",
    ),
    Mutation(
        15,
        "the newest pages of a session are not its own",
        REAL_MODEL,
        "service/sessions.py",
        "self._copy_page(old_page, page)",
        "pass",
    ),
    Mutation(
        16,
        "a draft outside its own distribution is believed",
        f"{CLIENT}::test_a_distribution_that_its_draft_cannot_come_from_is_refused",
        "client/draft_engine_client/replies.py",
        "if not (is_support & (probs_ids == np.asarray(token_ids)[:, None])).any(axis=1).all():",
        "if False:",
    ),
    Mutation(
        17,
        "two blocks of a session draw the same noise",
        "tests/unit/draft_model/test_sampling.py::test_noise_is_a_pure_function_of_seed_counter_and_slot",
        "draft_model/sampling.py",
        "draft-noise:{seed}:{counter}:{index}",
        "draft-noise:{seed}:{index}",
    ),
    Mutation(
        18,
        "tokens outside the vocabulary pass",
        f"{HTTP}::test_bad_sessions_leave_their_neighbours_served",
        "service/intake.py",
        "has_bad_token = not _are_tokens(rows.token_ids, facts.vocab_size)",
        "has_bad_token = False",
    ),
    Mutation(
        18,
        "values that are not finite pass",
        "tests/unit/service/test_intake.py::test_a_value_that_is_not_finite_is_found_wherever_it_is",
        "service/intake.py",
        "return not (math.isfinite(low) and math.isfinite(high)), low == high",
        "return False, low == high",
    ),
    Mutation(
        18,
        "rows of one value pass unnoticed",
        "tests/unit/service/test_intake.py::test_rows_of_one_value_are_noticed_and_served",
        "service/intake.py",
        "math.isfinite(high)), low == high",
        "math.isfinite(high)), False",
    ),
    Mutation(
        19,
        "nobody looks at acceptance",
        f"{ENGINE}::test_a_target_that_keeps_hardly_anything_is_a_warning_that_names_the_likely_fields",
        "service/watch.py",
        "if mean < self._floor:",
        "if False:",
    ),
    Mutation(
        20,
        "a request that was preempted goes on in its old rows",
        REMOTE,
        "service/sessions.py",
        "if session is None or change.incarnation > session.incarnation:",
        "if session is None:",
    ),
    Mutation(
        20,
        "an update without drafts takes pages for a block",
        "tests/unit/service/test_intake.py::test_scratch_rows_are_for_calls_that_want_drafts",
        "service/intake.py",
        "scratch_rows=facts.draft_block_size if update.num_draft_tokens else 0,",
        "scratch_rows=facts.draft_block_size,",
    ),
    Mutation(
        20,
        "a session that skips a step is dropped",
        f"{ENGINE}::test_a_session_that_skips_steps_is_not_rebuilt",
        "service/engine.py",
        "        self._reply(plan.interactive)\n",
        "        self._reply(plan.interactive)\n"
        "        served = {work.key for call in plan.interactive for work in call.items}\n"
        "        for key in [one.key for one in self._sessions if one.key not in served]:\n"
        "            self._sessions.close(key)\n",
    ),
    Mutation(
        22,
        "bulk rows are written whole",
        f"{ENGINE}::test_a_hundred_thousand_rows_of_one_client_push_no_draft_of_another_past_its_deadline",
        "service/batching.py",
        "plan.bulk.extend(share_chunk(bulk_calls, rows_per_chunk))",
        "plan.bulk.extend(share_chunk(bulk_calls, 10**9))",
    ),
    Mutation(
        23,
        "a full server takes new sessions",
        f"{SESSIONS}::test_a_full_table_refuses_new_sessions_only",
        "service/sessions.py",
        "len(self._sessions) >= self._limits.max_sessions and not self._evict_idle(now, busy)",
        "False",
    ),
    Mutation(
        23,
        "an active session is evicted",
        f"{SESSIONS}::test_a_full_table_refuses_new_sessions_only",
        "service/sessions.py",
        "if now - session.last_used < self._limits.idle_seconds:",
        "if False:",
    ),
    Mutation(
        23,
        "the session used last is evicted",
        f"{SESSIONS}::test_eviction_takes_the_least_recently_used_idle_session",
        "service/sessions.py",
        "self._sessions.move_to_end(session.key)",
        "pass",
    ),
    Mutation(
        24,
        "the buffer of a body is used again while the worker reads it",
        f"{LIFE}::test_many_clients_at_once_each_get_their_own_drafts",
        "service/edge.py",
        "    body = bytearray()\n",
        '    body = _read_body.__dict__.setdefault("body", bytearray())\n    del body[:]\n',
    ),
    Mutation(
        24,
        "the client keeps the caller's rows instead of copying them",
        f"{CLIENT}::test_rows_are_copied",
        "client/draft_engine_client/sessions.py",
        "self._blocks[-1][used : used + count] = rows[done : done + count]",
        "self._blocks[-1] = rows[done : done + count]",
    ),
)


def problem_of(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Say why a mutation cannot be applied to the sources as they are, or None."""
    found = (root / mutation.file).read_text(encoding="utf-8").count(mutation.old)
    if found != 1:
        return f"{mutation.file} has {found} times {mutation.old!r}"
    file, _, name = mutation.test.partition("::")
    if f"def {name}(" not in (root / file).read_text(encoding="utf-8"):
        return f"{file} has no {name}"
    return None


def table() -> str:
    """The mutations as rows of tests/README.md."""
    rows = ["| rule | test | mutation that it catches |", "| --- | --- | --- |"]
    rows += [f"| {m.rule} | `{m.test.removeprefix('tests/')}` | {m.breaks} |" for m in MUTATIONS]
    return "\n".join(rows)


def main() -> int:
    """Apply every mutation to a copy of the tree; returns the exit code."""
    problems = [problem for mutation in MUTATIONS if (problem := problem_of(mutation)) is not None]
    if problems:
        _tell("\n".join(problems))
        return 1
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(source, tree / name)
        code, output = _run(tree, sorted({mutation.test for mutation in MUTATIONS}))
        if code != 0:
            _tell(f"the tests fail before anything is broken:\n{output}")
            return 1
        survivors = [mutation for mutation in MUTATIONS if not _is_caught(tree, mutation)]
    _tell(f"{len(MUTATIONS) - len(survivors)} of {len(MUTATIONS)} mutations were caught")
    return 1 if survivors else 0


def _is_caught(tree: Path, mutation: Mutation) -> bool:
    file = tree / mutation.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code, output = _run(tree, [mutation.test])
    finally:
        file.write_text(whole, encoding="utf-8")
    is_caught = code == 1  # 1: a test failed; anything else means that it did not run
    _tell(f"rule {mutation.rule:2}: {'caught  ' if is_caught else 'SURVIVED'} {mutation.breaks}")
    if code not in (0, 1):
        _tell(output)
    return is_caught


def _run(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests in the copy, whose packages come before any that are installed."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'client'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout[-4_000:] + done.stderr[-2_000:]


if __name__ == "__main__":
    sys.exit(main())
