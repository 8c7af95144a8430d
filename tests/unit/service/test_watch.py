from __future__ import annotations

from service.watch import CONSTANT_CALLS, REFUSED_DRAFTS, SILENT_DRAFTS, UNFIT_BLOCKS, DraftWatch


def test_silence_is_a_warning_until_drafts_come() -> None:
    watch = DraftWatch()
    watch.saw_drafts([0] * (SILENT_DRAFTS - 1))
    assert watch.warnings == []
    watch.saw_drafts([0])
    assert [warning.partition(":")[0] for warning in watch.warnings] == ["no_drafts"]
    watch.saw_drafts([0, 3])
    assert watch.warnings == []


def test_acceptance_below_the_floor_is_a_warning_with_the_likely_fields_until_it_rises() -> None:
    watch = DraftWatch(acceptance_floor=0.1)
    for block in range(2 * REFUSED_DRAFTS - 1):
        watch.saw_accepted("good", 1)
        watch.saw_accepted("bad", int(block % 20 == 0))
    assert [warning.partition(":")[0] for warning in watch.warnings] == ["low_acceptance"], "a good client hides no bad one"
    assert "targets of 1 clients kept fewer than 0.1" in watch.warnings[0]
    assert "target_layer_ids" in watch.warnings[0]
    assert "bad" not in watch.warnings[0], "ids of clients are nobody's business"
    for _ in range(REFUSED_DRAFTS + 1):
        watch.saw_accepted("bad", 1)
    assert watch.warnings == []


def test_a_client_that_leaves_takes_its_warning_along() -> None:
    watch = DraftWatch()
    for _ in range(REFUSED_DRAFTS):
        watch.saw_accepted("bad", 0)
    assert watch.warnings
    watch.forget("bad")
    assert watch.warnings == []


def test_a_floor_of_zero_does_not_look() -> None:
    watch = DraftWatch(acceptance_floor=0.0)
    for _ in range(REFUSED_DRAFTS):
        watch.saw_accepted("bad", 0)
    assert watch.warnings == []


def test_a_block_that_is_not_finite_is_a_warning_until_many_are() -> None:
    watch = DraftWatch()
    watch.saw_unfit()
    assert [warning.partition(":")[0] for warning in watch.warnings] == ["non_finite"]
    watch.saw_drafts([4] * (UNFIT_BLOCKS - 1))
    assert watch.warnings
    watch.saw_drafts([4])
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
