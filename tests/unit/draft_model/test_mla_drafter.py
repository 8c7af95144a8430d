"""The served MLA drafter (absorbed, paged) against the dense training model, and the rules of blocks and pages."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draft_model.backbone.mla_dense import DenseMlaDraft
from draft_model.drafter import ContextWrite, Drafter
from draft_model.errors import CheckpointError, DraftRequestError
from draft_model.sampling import SamplingParams
from draft_model.training.export import export_checkpoint
from tests.support.draft_model import (
    TINY_CONFIG,
    TinySession,
    load_dense,
    load_drafter,
    make_draft_to_target,
    make_features,
    make_tiny_drafter,
)
from tests.support.tiny_target import write_tiny_target

SCATTERED = [9, 3, 14, 5, 1]
SAMPLED = SamplingParams(temperature=1.3, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def drafter(folder: Path) -> Drafter:
    return load_drafter(folder)


def dense_greedy(
    dense: DenseMlaDraft, features: Tensor, anchor: int, draft_to_target: Tensor | None = None, *, block_size: int = 4
) -> tuple[list[int], Tensor]:
    """Greedy target ids and confidence [S] of one block after all of `features`."""
    # The row at the anchor's own position is one that no slot may see.
    padded = F.pad(features, (0, 0, 0, 1), value=7.0)
    hidden = dense.hidden(padded[None], torch.tensor([[anchor]]), torch.tensor([[len(features)]]), block_size)[0, 0]
    previous, drafted, confidence = torch.tensor(anchor), [], []
    for state in hidden:
        embedded, bias = dense.markov_bias(previous)
        confidence.append(torch.sigmoid(dense.confidence_logits(state, embedded)))
        previous = (F.linear(state, dense.lm_head) + bias).argmax()
        if draft_to_target is not None:
            previous = draft_to_target[previous]
        drafted.append(int(previous))
    return drafted, torch.stack(confidence)


@pytest.mark.parametrize("backend", ["torch_cpu", "reference"])
def test_drafts_and_confidence_equal_the_dense_model(folder: Path, backend: str) -> None:
    drafter, dense = load_drafter(folder, attention_backend=backend), load_dense(folder)
    for count, anchor in [(1, 3), (6, 100), (15, 259)]:
        session = TinySession(drafter, SCATTERED)
        features = make_features(drafter, count, seed=count)
        session.write(features)
        (proposal,) = drafter.draft([session.request(anchor)])
        token_ids, confidence = dense_greedy(dense, features, anchor)
        assert proposal.token_ids == token_ids
        torch.testing.assert_close(torch.tensor(proposal.confidence), confidence, atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(proposal.survival), confidence.cumprod(0), atol=1e-5, rtol=0)


def test_a_context_of_no_rows_drafts_from_the_block_alone(drafter: Drafter, folder: Path) -> None:
    (proposal,) = drafter.draft([TinySession(drafter, SCATTERED).request(17)])
    token_ids, _ = dense_greedy(load_dense(folder), make_features(drafter, 0), 17)
    assert proposal.token_ids == token_ids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_keep_the_confidence(folder: Path, dtype: torch.dtype) -> None:
    drafter, dense = load_drafter(folder, dtype=dtype), load_dense(folder)
    session = TinySession(drafter, SCATTERED)
    features = make_features(drafter, 10)
    session.write(features)
    (proposal,) = drafter.draft([session.request(11)])
    _, confidence = dense_greedy(dense, features, 11)
    # The first slot's inputs are the same whatever was drafted; bfloat16 has 8 bits.
    tolerance = 0.002 if dtype == torch.float16 else 0.05
    assert proposal.confidence[0] == pytest.approx(float(confidence[0]), abs=tolerance)


def test_trained_exports_draft_as_they_were_trained(tmp_path: Path) -> None:
    made = make_tiny_drafter(tmp_path / "made", draft_vocab_size=100)
    target = write_tiny_target(tmp_path / "target")
    dense = load_dense(made)
    drafter = load_drafter(made)
    draft_to_target = make_draft_to_target(260, 100)
    export_checkpoint(
        dense,
        draft_to_target,
        tmp_path / "exported",
        block_size=4,
        target_layer_ids=(0, 2),
        target_hidden_size=48,
        target_num_layers=4,
        max_position_embeddings=512,
    )
    exported = load_drafter(tmp_path / "exported", target_path=target)
    embedding = exported._embedding
    dense.embedding, dense.lm_head = embedding, embedding[draft_to_target]
    features = make_features(drafter, 9)
    session = TinySession(exported, SCATTERED)
    session.write(features)
    (proposal,) = exported.draft([session.request(8)])
    assert proposal.token_ids == dense_greedy(dense, features, 8, draft_to_target)[0]


def test_a_reduced_vocabulary_speaks_target_ids(tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path, draft_vocab_size=90)
    drafter, dense = load_drafter(folder), load_dense(folder)
    draft_to_target = make_draft_to_target(260, 90)
    session = TinySession(drafter, SCATTERED)
    features = make_features(drafter, 7)
    session.write(features)
    # Anchors may be tokens that the draft cannot propose.
    outside = next(token for token in range(260) if token not in draft_to_target)
    for anchor in (int(draft_to_target[3]), outside):
        (proposal,) = drafter.draft([session.request(anchor)])
        assert proposal.token_ids == dense_greedy(dense, features, anchor, draft_to_target)[0]
    request = session.request(outside, sampling=SAMPLED, draft_probs_topk=20)
    (proposal,) = drafter.draft([request])
    assert proposal.probs_ids is not None
    assert set(proposal.probs_ids.flatten().tolist()) <= set(draft_to_target.tolist())
    for ids, token in zip(proposal.probs_ids, proposal.token_ids, strict=True):
        assert token in ids


def test_only_the_rows_matter_and_not_the_pages_they_lie_in(folder: Path) -> None:
    proposals = []
    for page_ids in ([1, 2, 3, 4], [4, 3, 2, 1], [20, 2, 11, 7]):
        drafter = load_drafter(folder)
        session = TinySession(drafter, page_ids)
        session.write(make_features(drafter, 11))
        proposals += drafter.draft([session.request(42)])
    assert proposals[0].token_ids == proposals[1].token_ids == proposals[2].token_ids
    for other in proposals[1:]:
        assert other.confidence == pytest.approx(proposals[0].confidence, abs=1e-6)


def make_ragged(drafter: Drafter) -> list[TinySession]:
    """Nine sessions whose rows are written in one call."""
    lengths = [1, 3, 4, 5, 0, 8, 13, 2, 16]
    sessions, writes, next_page = [], [], 1
    for index, length in enumerate(lengths):
        num_pages = -(-(length + drafter.draft_block_size) // drafter.page_size)
        session = TinySession(drafter, range(next_page + num_pages - 1, next_page - 1, -1), position=3 * index)
        next_page += num_pages
        writes.append(session.context_write(make_features(drafter, length, seed=index)))
        sessions.append(session)
    drafter.write_context(writes)
    return sessions


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, SamplingParams(0.8, top_k=5, top_p=0.9, seed=3)])
def test_a_request_draws_the_same_in_every_batch(drafter: Drafter, sampling: SamplingParams) -> None:
    sessions = make_ragged(drafter)
    requests = [
        session.request(10 * index, 1 + index % 4, sampling=sampling, draft_probs_topk=5 * (index % 2), rng_counter=index)
        for index, session in enumerate(sessions)
    ]
    alone = [drafter.draft([request])[0] for request in requests]
    for size in range(1, len(requests) + 1):
        together = drafter.draft(requests[:size])
        for one, other in zip(alone, together, strict=False):
            assert other.token_ids == one.token_ids
            assert other.confidence == pytest.approx(one.confidence, abs=1e-5)
            assert (one.probs is None) == (other.probs is None)
            if one.probs is not None and other.probs is not None:
                assert one.probs_ids is not None
                assert one.probs.shape == other.probs.shape
                torch.testing.assert_close(other.probs, one.probs, atol=1e-5, rtol=0)


def test_packed_weights_draft_the_same_in_every_batch(folder: Path) -> None:
    """FBGEMM may sum one or two rows in another order than more of them, so equality is to rounding."""
    drafter = load_drafter(folder, dtype=torch.float16)
    requests = [session.request(10 * index) for index, session in enumerate(make_ragged(drafter))]
    alone = [drafter.draft([request])[0] for request in requests]
    for size in (2, 5, 9):
        for one, other in zip(alone, drafter.draft(requests[:size]), strict=False):
            assert other.token_ids == one.token_ids
            assert other.confidence == pytest.approx(one.confidence, abs=1e-5)


def test_requests_of_one_batch_may_each_sample_their_own_way(drafter: Drafter) -> None:
    sessions = make_ragged(drafter)
    kinds = [SamplingParams(), SAMPLED, SamplingParams(0.8, top_k=5, seed=3), SamplingParams(2.0, top_p=0.5, seed=4)]
    requests = [session.request(index, sampling=kinds[index % 4]) for index, session in enumerate(sessions)]
    for request, proposal in zip(requests, drafter.draft(requests), strict=True):
        assert proposal.token_ids == drafter.draft([request])[0].token_ids


def test_rows_in_pieces_equal_rows_at_once(folder: Path) -> None:
    drafter = load_drafter(folder)
    features = make_features(drafter, 14)
    at_once, in_pieces = TinySession(drafter, [1, 2, 3, 4, 5]), TinySession(drafter, [10, 8, 9, 7, 6])
    at_once.write(features)
    for part in torch.split(features, [1, 6, 2, 5]):
        # A block drafted on the way leaves nothing that a later one sees.
        drafter.draft([in_pieces.request(33)])
        in_pieces.write(part)
    one, other = drafter.draft([at_once.request(1), in_pieces.request(1)])
    assert one.token_ids == other.token_ids
    assert other.confidence == pytest.approx(one.confidence, abs=1e-5)


def test_rows_written_over_rejected_ones_equal_a_replay(drafter: Drafter) -> None:
    session, replayed = TinySession(drafter, [1, 2, 3, 4, 5]), TinySession(drafter, [6, 7, 8, 9, 10])
    session.write(make_features(drafter, 13, seed=1))
    session.num_rows = 6
    tail = make_features(drafter, 3, seed=2)
    session.write(tail)
    replayed.write(torch.cat([make_features(drafter, 13, seed=1)[:6], tail]))
    one, other = drafter.draft([session.request(2), replayed.request(2)])
    assert one.token_ids == other.token_ids
    assert one.confidence == pytest.approx(other.confidence, abs=1e-5)


def test_a_copied_page_holds_the_rows_of_every_layer(drafter: Drafter) -> None:
    session = TinySession(drafter, [1, 2, 3])
    session.write(make_features(drafter, 6))
    drafter.copy_page(1, 11)
    drafter.copy_page(2, 12)
    copied = replace(session.request(9), page_ids=[11, 12, 13])
    one, other = drafter.draft([session.request(9), copied])
    assert one == other


def test_projected_rows_equal_raw_ones(drafter: Drafter) -> None:
    features = make_features(drafter, 5)
    raw, projected, late = (TinySession(drafter, range(first, first + 3)) for first in (1, 4, 7))
    states = drafter._backbone.project(features)
    writes = [projected.context_write(states, is_projected=True), raw.context_write(features), late.context_write(features)]
    drafter.write_context(writes)
    one, two, three = drafter.draft([raw.request(9), projected.request(9), late.request(9)])
    assert one.token_ids == two.token_ids == three.token_ids
    assert one.confidence == pytest.approx(two.confidence, abs=1e-6)
    assert one.confidence == pytest.approx(three.confidence, abs=1e-6)


def test_positions_are_apart_from_rows(drafter: Drafter) -> None:
    """Rotary attention sees differences of positions only, so a shift of everything changes nothing, and a gap does."""
    features = make_features(drafter, 8)
    plain, shifted, gapped = (TinySession(drafter, range(first, first + 3), position) for first, position in
                              [(1, 0), (4, 500), (7, 0)])  # fmt: skip
    for session in (plain, shifted, gapped):
        session.write(features)
    with_gap = replace(gapped.request(20), position=600)
    one, two, three = drafter.draft([plain.request(20), shifted.request(20), with_gap])
    assert two.token_ids == one.token_ids
    assert two.confidence == pytest.approx(one.confidence, abs=1e-4)
    assert three.confidence != pytest.approx(one.confidence, abs=1e-4)


def test_missing_rows_equal_a_dense_model_that_never_had_them(drafter: Drafter, folder: Path) -> None:
    """Rows [0, 5) were never seen: the session holds rows 5.. at their own positions."""
    dense = load_dense(folder)
    features = make_features(drafter, 12)
    session = TinySession(drafter, SCATTERED, position=5)
    session.write(features[5:])
    (proposal,) = drafter.draft([session.request(60)])
    # A shift of all positions changes nothing, so the dense model may count from 0.
    assert proposal.token_ids == dense_greedy(dense, features[5:], 60)[0]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_fewer_drafts_are_the_prefix_of_all(drafter: Drafter, sampling: SamplingParams) -> None:
    session = TinySession(drafter, SCATTERED)
    session.write(make_features(drafter, 9))
    (full,) = drafter.draft([session.request(4, sampling=sampling, draft_probs_topk=7)])
    assert full.probs is not None
    assert full.probs_ids is not None
    for count in range(1, 4):
        (part,) = drafter.draft([session.request(4, count, sampling=sampling, draft_probs_topk=7)])
        assert part.token_ids == full.token_ids[:count]
        assert part.confidence == pytest.approx(full.confidence[:count], abs=1e-6)
        assert part.survival == pytest.approx(full.survival[:count], abs=1e-6)
        assert part.probs is not None
        assert part.probs_ids is not None
        torch.testing.assert_close(part.probs, full.probs[:count])
        assert torch.equal(part.probs_ids, full.probs_ids[:count])


@pytest.mark.parametrize("count", [0, 5, -1])
def test_counts_outside_the_block_are_refused_with_both_numbers(drafter: Drafter, count: int) -> None:
    with pytest.raises(DraftRequestError, match="4") as caught:
        drafter.draft([TinySession(drafter, SCATTERED).request(1, count)])
    assert caught.value.code == "too_many_draft_tokens"
    assert caught.value.numbers == {"num_draft_tokens": count, "max_draft_tokens": 4}


@pytest.mark.parametrize("token", [-1, 260])
def test_anchors_outside_the_vocabulary_are_refused(drafter: Drafter, token: int) -> None:
    with pytest.raises(DraftRequestError, match="260") as caught:
        drafter.draft([TinySession(drafter, SCATTERED).request(token)])
    assert caught.value.code == "token_out_of_range"


def test_pages_without_room_are_refused_before_anything_is_written(drafter: Drafter) -> None:
    full = TinySession(drafter, [1, 2])
    full.write(make_features(drafter, 6))
    with pytest.raises(ValueError, match=r"rows \[6, 10\) do not fit 2 pages of 4 rows"):
        drafter.draft([full.request(1)])
    before = drafter.cache.rows(0).clone()
    with pytest.raises(ValueError, match=r"rows \[6, 9\) do not fit"):
        full.write(make_features(drafter, 3))
    torch.testing.assert_close(drafter.cache.rows(0), before, equal_nan=True, atol=0, rtol=0)


def test_nothing_to_do_is_no_error(drafter: Drafter) -> None:
    drafter.write_context([])
    drafter.write_context([TinySession(drafter, [1]).context_write(make_features(drafter, 0))])
    assert drafter.draft([]) == []


def test_rows_of_the_wrong_width_are_refused(drafter: Drafter) -> None:
    with pytest.raises(DraftRequestError, match="96") as caught:
        drafter.write_context([ContextWrite([1], 0, 0, torch.zeros(2, 95))])
    assert caught.value.numbers == {"expected_width": 96}


def test_reported_probabilities_are_the_distribution_of_the_tokens(drafter: Drafter) -> None:
    """Frequencies over many counters against the reported distribution: chi-square, odds of a false alarm 1e-6."""
    session = TinySession(drafter, SCATTERED)
    session.write(make_features(drafter, 5))
    sampling = SamplingParams(temperature=1.0, top_k=6, top_p=0.95, seed=11)
    requests = [session.request(3, 1, sampling=sampling, draft_probs_topk=6, rng_counter=counter) for counter in range(4000)]
    proposals = [proposal for start in range(0, 4000, 500) for proposal in drafter.draft(requests[start : start + 500])]
    first = proposals[0]
    assert first.probs is not None
    assert first.probs_ids is not None
    assert float(first.probs.sum()) == pytest.approx(1.0, abs=1e-6)
    drawn = torch.tensor([proposal.token_ids[0] for proposal in proposals])
    statistic, cells = 0.0, 0
    for token, prob in zip(first.probs_ids[0].tolist(), first.probs[0].tolist(), strict=True):
        observed = int((drawn == token).sum())
        if prob == 0:
            assert observed == 0
            continue
        expected = 4000 * prob
        statistic += (observed - expected) ** 2 / expected
        cells += 1
    assert cells >= 2
    assert statistic < {2: 23.9, 3: 27.6, 4: 30.7, 5: 33.4, 6: 35.9}[cells]


def test_greedy_reports_a_point_mass(drafter: Drafter) -> None:
    session = TinySession(drafter, SCATTERED)
    session.write(make_features(drafter, 5))
    (proposal,) = drafter.draft([session.request(3, draft_probs_topk=4)])
    assert proposal.probs is not None
    assert proposal.probs_ids is not None
    assert proposal.probs.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 4
    assert proposal.probs_ids[:, 0].tolist() == proposal.token_ids
    assert all(len(set(ids)) == 4 for ids in proposal.probs_ids.tolist())


def test_confidence_changes_with_a_flag_and_is_absent_without_a_head(tmp_path: Path) -> None:
    without = load_drafter(make_tiny_drafter(tmp_path / "a", enable_confidence_head=False))
    plain = load_drafter(make_tiny_drafter(tmp_path / "b", confidence_head_with_markov=False))
    for drafter in (without, plain):
        session = TinySession(drafter, SCATTERED)
        session.write(make_features(drafter, 5))
        (proposal,) = drafter.draft([session.request(3)])
        assert len(proposal.confidence) == len(proposal.survival) == (0 if drafter is without else 4)


def test_warm_up_and_a_pool_without_room(folder: Path) -> None:
    drafter = load_drafter(folder)
    drafter.warm_up()
    with pytest.raises(CheckpointError, match="kv_cache_memory of 100 bytes"):
        load_drafter(folder, kv_cache_memory=100)


def test_the_pool_holds_what_was_asked_for(folder: Path) -> None:
    drafter = load_drafter(folder, kv_cache_memory=100_000)
    row_bytes = (TINY_CONFIG["kv_lora_rank"] + TINY_CONFIG["qk_rope_head_dim"]) * 4 * 2
    assert drafter.cache.num_pages == 100_000 // (row_bytes * 4)
    assert [selection.backend for selection in drafter.selections] == ["torch_cpu"] * 2
    assert not math.isnan(float(drafter._embedding.sum()))
