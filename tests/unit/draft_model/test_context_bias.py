"""The context bias: what it finds, and that it is part of the distribution drafts are drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_model.context_bias import BlockBias, ContextBias, find_continuation
from draft_model.drafter import ContextWrite, Drafter, DraftRequest, SamplingParams
from tests.support.draft_model import make_tiny_drafter

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, st.integers(1, 5), st.integers(1, 5))
def test_the_longest_and_then_the_latest_match_wins(tokens: list[int], count: int, max_match: int) -> None:
    """Against every earlier place, compared token by token."""
    best = (0, -1)
    for place in range(len(tokens) - 1):
        length = 0
        while length < max_match and length <= place and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length:
            best = max(best, (length, place))
    found = find_continuation(tokens, count, max_match)
    assert found.match_length == best[0]
    assert list(found.token_ids) == (tokens[best[1] + 1 : best[1] + 1 + count] if best[0] else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("draft") / "tiny", draft_vocab_size=200)


def draft(folder: Path, bonuses: tuple[float, ...], context: list[int], anchor: int, **fields: object):
    drafter = Drafter.load(folder, kv_cache_memory=1 << 20, page_size=16, context_bias=bonuses)
    features = torch.randn(len(context), drafter.config.feature_width, generator=torch.Generator().manual_seed(1))
    drafter.write_context([ContextWrite([1, 2], 0, 0, features)])
    request = DraftRequest([1, 2], len(context), len(context), anchor, 3, context_token_ids=context, **fields)  # type: ignore[arg-type]
    return drafter, drafter.draft([request])[0]


def known_tokens(folder: Path) -> list[int]:
    drafter = Drafter.load(folder, kv_cache_memory=1 << 20, page_size=16)
    ids = [token for token, draft_id in enumerate(drafter._draft_ids or []) if draft_id >= 0]
    return ids[:6]


def test_a_large_bonus_continues_the_match_and_none_leaves_the_drafts_alone(folder: Path) -> None:
    a, b, c, d, e, f = known_tokens(folder)
    context = [a, b, c, d, e, f, a]
    _, plain = draft(folder, (), context, b)
    assert draft(folder, (0.0, 0.0), context, b)[1].token_ids == plain.token_ids
    assert list(draft(folder, (0.0, 1000.0), context, b)[1].token_ids) == [c, d, e]
    # A match of one token earns nothing here.
    assert draft(folder, (0.0, 1000.0), [c, b, d, a], b)[1].token_ids == draft(folder, (), [c, b, d, a], b)[1].token_ids


def test_the_bonus_ends_where_the_drafts_leave_the_continuation() -> None:
    bias = BlockBias([(5.0, [1, 2, 3]), (5.0, [1, 2, 3])], None)
    logits = torch.zeros(2, 4)
    bias.add_to(logits, 0)
    assert logits.tolist() == [[0, 5, 0, 0], [0, 5, 0, 0]]
    bias.follow(torch.tensor([1, 0]), 0)
    logits = torch.zeros(2, 4)
    bias.add_to(logits, 1)
    assert logits.tolist() == [[0, 0, 5, 0], [0, 0, 0, 0]]


def test_a_token_outside_the_draft_vocabulary_is_passed_over(folder: Path) -> None:
    drafter = Drafter.load(folder, kv_cache_memory=1 << 20, page_size=16)
    unknown = next(token for token, draft_id in enumerate(drafter._draft_ids or []) if draft_id < 0)
    a, b, *_ = known_tokens(folder)
    context = [a, b, unknown, a]
    assert draft(folder, (9.0, 1000.0), context, b)[1].token_ids == draft(folder, (), context, b)[1].token_ids


def test_the_reported_distribution_has_the_bonus_in_it(folder: Path) -> None:
    a, b, c, d, e, f = known_tokens(folder)
    context = [a, b, c, d, e, f, a]
    sampling = SamplingParams(temperature=1.0, seed=3)
    shares = []
    for bonus in (0.0, 3.0):
        _, proposal = draft(folder, (bonus, bonus), context, b, sampling=sampling, draft_probs_topk=200)
        assert proposal.probs_ids is not None
        assert proposal.probs is not None
        shares.append(float(proposal.probs[0][proposal.probs_ids[0] == c]))
        drawn = proposal.probs[0][proposal.probs_ids[0] == proposal.token_ids[0]]
        assert float(drawn) > 0
        assert float(proposal.probs[0].sum()) == pytest.approx(1.0, abs=1e-5)
    odds = [share / (1 - share) for share in shares]
    assert odds[1] / odds[0] == pytest.approx(torch.e**3.0, rel=1e-2)


@pytest.mark.parametrize("bonuses", [(-1.0,), (float("nan"),), (1.0, float("inf"))])
def test_bonuses_that_make_no_sense_are_refused(bonuses: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="context_bias"):
        ContextBias(bonuses)
