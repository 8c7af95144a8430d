"""Drafting loses nothing: the short form of `draft-engine verify-lossless`.

By the bound of the report a correct engine fails the sampled part once in a thousand seeds; the seed is fixed, so it either
passes on every run or on none.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from service.cli import main
from service.lossless import (
    BLOCK_SIZE,
    CUTS,
    DEFECT_P_VALUE,
    DEFECTS,
    FORMS,
    NUM_COMPARED,
    Case,
    ChiSquare,
    Decoder,
    Outcome,
    Report,
    all_cases,
    appendix_a_pair,
    compare_with_exact,
    make_pairs,
    make_target_logits,
    print_report,
    verify_pairs,
)

PAIRS = make_pairs(make_target_logits())


@pytest.fixture(scope="module")
def report() -> Report:
    # 37 is prime to the sizes of the grid, so that its steps pass through every form, cut and drafter.
    return verify_pairs(all_cases()[::37], samples=700, seed=0)


def test_the_cases_chosen_have_every_form_cut_and_drafter(report: Report) -> None:
    cases = [outcome.case for outcome in report.outcomes]
    assert {case.form for case in cases} == set(FORMS)
    assert {case.cut for case in cases} == set(CUTS)
    assert {case.drafter for case in cases} >= set(PAIRS)
    assert {(case.top_k, case.top_p) for case in cases} >= {(0, 1.0), (0, 0.8), (2, 1.0), (2, 0.8)}


def test_sampled_tokens_have_the_targets_distribution(report: Report) -> None:
    assert not report.failures
    assert report.pooled.p_value >= report.false_alarm_rate / 2
    assert report.ok


def test_greedy_tokens_are_the_targets_own_at_every_width(report: Report) -> None:
    assert report.greedy_blocks > 1000
    assert report.greedy_differences == 0


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(report: Report, name: str) -> None:
    assert report.defects[name].result.p_value < DEFECT_P_VALUE
    assert name not in report.missed_defects


def test_the_schedule_in_retrospect_biases_as_the_paper_says() -> None:
    decoder, case = DEFECTS["schedule in retrospect"]
    counts = decoder(appendix_a_pair(), case, 3).counts(2000)
    share = counts[0].sum() / counts.sum()
    assert share == pytest.approx(0.85, abs=4 * math.sqrt(0.85 * 0.15 / 2000))
    assert decoder(appendix_a_pair(), case, 3).exact()[0].sum() == pytest.approx(0.7)


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_takes_different_lengths_and_changes_no_kept_draft(cut: str) -> None:
    decoder = Decoder(PAIRS["random"], Case("random", "full", cut, 1.0), 5)  # type: ignore[arg-type]
    lengths = set()
    cut_blocks = decoder.cut

    def watched(proposals, scheduler):
        kept = cut_blocks(proposals, scheduler)
        for before, after in zip(proposals, kept, strict=True):
            length = len(after.token_ids)
            lengths.add(length)
            assert after.token_ids == before.token_ids[:length]
            assert after.probs is not None
            assert before.probs is not None
            assert torch.equal(after.probs, before.probs[:length])
        return kept

    decoder.cut = watched  # type: ignore[method-assign]
    decoder.counts(200)
    assert lengths == ({BLOCK_SIZE} if cut == "none" else lengths)
    assert len(lengths) > 1 or cut == "none"


def test_one_wrong_case_fails_the_report(report: Report) -> None:
    case = report.outcomes[0].case
    broken = Report([*report.outcomes, Outcome(case, 700, ChiSquare(300.0, 40))], 1, 0, report.defects)
    assert len(broken.failures) == 1
    assert not broken.ok
    assert not Report(report.outcomes, 1, 1, report.defects).ok
    blind = {name: Outcome(case, 700, ChiSquare(40.0, 40)) for name in DEFECTS}
    assert Report(report.outcomes, 1, 0, blind).missed_defects == list(DEFECTS)


def test_many_small_biases_fail_together() -> None:
    case = all_cases()[0]
    # Each alone is a common sight.
    drifting = Report([Outcome(case, 700, ChiSquare(52.0, 40)) for _ in range(60)], 1, 0)
    assert not drifting.failures
    assert drifting.pooled.p_value < 1e-9
    assert not drifting.ok


# The statistic -------------------------------------------------------------------------------------------------------


def test_the_exact_distribution_is_the_product_of_the_rows() -> None:
    exact = Decoder(PAIRS["random"], Case("random", "full", "none", 0.7), 0).exact()
    assert exact.shape == (4,) * NUM_COMPARED
    table = make_target_logits().double().div(0.7).softmax(-1)
    for first, second, third in ((0, 1, 2), (1, 3, 0), (2, 2, 2)):
        assert exact[first, second, third] == pytest.approx(
            float(table[0, first] * table[first, second] * table[second, third])
        )


def test_the_p_value_is_the_tail_of_chi_square() -> None:
    for statistic, degrees, p_value in ((3.841459, 1, 0.05), (18.307038, 10, 0.05), (29.588298, 10, 0.001), (0.0, 3, 1.0)):
        assert ChiSquare(statistic, degrees).p_value == pytest.approx(p_value, rel=1e-5)
    assert ChiSquare(math.inf, 1).p_value == 0.0


def test_false_alarms_are_as_rare_as_stated() -> None:
    """The tail of the statistic, pooled cells included, where nothing is wrong."""
    rng = np.random.default_rng(11)
    exact = Decoder(PAIRS["random"], Case("random", "full", "none", 0.7), 0).exact()
    runs = 4000
    p_values = np.array([compare_with_exact(rng.multinomial(1000, exact.ravel()), exact.ravel()).p_value for _ in range(runs)])
    for level in (0.5, 0.1, 0.01):
        assert (p_values < level).mean() == pytest.approx(level, abs=4 * math.sqrt(level / runs) + 0.15 * level)


def test_a_token_that_the_target_never_says_fails_at_once() -> None:
    exact = Decoder(PAIRS["random"], Case("random", "full", "none", 1.0), 0).exact()
    impossible = np.argwhere(exact == 0.0)[0]
    counts = np.round(exact * 1000).astype(np.int64)
    assert compare_with_exact(counts, exact).p_value > 0.5
    counts[tuple(impossible)] = 1
    assert compare_with_exact(counts, exact).p_value == 0.0


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    assert main(["verify-lossless", "--samples", "300", "--every", "211", "--output", str(output)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "planted defects" in shown
    assert "A correct engine fails this with probability 0.001 at most" in shown
    written = json.loads(output.read_text())
    assert written["ok"] is True
    assert written["false_alarm_rate"] == 1e-3
    assert all(case["samples"] == 300 and 0.0 <= case["p_value"] <= 1.0 for case in written["cases"])
    assert set(written["defects"]) == set(DEFECTS)


def test_a_missed_defect_is_told(report: Report) -> None:
    blind = {name: Outcome(outcome.case, 1, ChiSquare(1.0, 1)) for name, outcome in report.defects.items()}
    console = Console(width=120, record=True)
    print_report(Report(report.outcomes, 1, 0, blind), console)
    assert console.export_text().count(" no ") == len(DEFECTS)
