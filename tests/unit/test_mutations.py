"""The table of mutations fits the sources and the tests as they are, and tests/README.md lists it."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, problem_of, table

RULES_ELSEWHERE = {21}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks.replace(" ", "-"))
def test_a_mutation_can_still_be_applied(mutation: Mutation) -> None:
    assert problem_of(mutation) is None
    assert mutation.old != mutation.new


def test_every_rule_has_a_mutation_and_the_readme_lists_it() -> None:
    assert {mutation.rule for mutation in MUTATIONS} | RULES_ELSEWHERE == set(range(1, 25))
    assert table() in (ROOT / "tests/README.md").read_text(encoding="utf-8")
