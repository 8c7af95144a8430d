from __future__ import annotations

from service.watch import CONSTANT_CALLS, REFUSED_DRAFTS, SILENT_DRAFTS, DraftWatch


def test_silence_is_a_warning_until_drafts_come() -> None:
    watch = DraftWatch()
    watch.saw_drafts([0] * (SILENT_DRAFTS - 1))
    assert watch.warnings == []
    watch.saw_drafts([0])
    assert [warning.partition(":")[0] for warning in watch.warnings] == ["no_drafts"]
    watch.saw_drafts([0, 3])
    assert watch.warnings == []


def test_drafts_that_are_never_kept_are_a_warning_until_one_is() -> None:
    watch = DraftWatch()
    watch.saw_accepted(1)
    for _ in range(REFUSED_DRAFTS - 1):
        watch.saw_accepted(0)
    assert watch.warnings == []
    watch.saw_accepted(0)
    assert [warning.partition(":")[0] for warning in watch.warnings] == ["no_acceptance"]
    watch.saw_accepted(2)
    assert watch.warnings == []


def test_rows_of_one_value_are_a_warning_until_others_come() -> None:
    watch = DraftWatch()
    for _ in range(CONSTANT_CALLS - 1):
        watch.saw_rows(is_constant=True)
    assert watch.warnings == []
    watch.saw_rows(is_constant=True)
    assert [warning.partition(":")[0] for warning in watch.warnings] == ["constant_rows"]
    watch.saw_rows(is_constant=False)
    assert watch.warnings == []
