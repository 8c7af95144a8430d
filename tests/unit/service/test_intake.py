from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_engine_client.codec import TensorView
from draft_engine_client.wire import ProposeRequest
from service.calls import ProposeCall
from service.errors import RequestError
from service.intake import ContextRows, build_call
from service.propose import to_tensor
from service.testing import FakeDrafter
from tests.support.service import LIMITS, Update, make_rows, to_view

FACTS = FakeDrafter().facts


def build(*updates: Update, features: torch.Tensor | None = None, facts: Any = FACTS, **more: Any) -> ProposeCall:
    message = {"client_id": "c", "sessions": [update.message for update in updates], **more}
    request = ProposeRequest.model_validate(message)
    tokens = [token for update in updates for token in update.token_ids]
    made = torch.cat([make_rows(u.token_ids, u.start) for u in updates])
    rows = ContextRows(tokens, made if features is None else features)
    return build_call(request, rows, facts=facts, limits=LIMITS, arrived_at=5.0)


def refusals(call: ProposeCall) -> list[tuple[str, str | None] | None]:
    return [None if item.refused is None else (item.refused.code, item.refused.param) for item in call.items]


def test_rows_go_to_their_sessions_without_a_copy() -> None:
    rows = torch.cat([make_rows([1, 2], 0), make_rows([3], 4)])
    call = build(Update("a", 0, [1, 2]), Update("b", 9, []), Update("c", 4, [3]), features=rows, deadline_ms=20, finished=["d"])
    first, second, third = call.items
    assert (first.token_ids, second.token_ids, third.token_ids) == ([1, 2], [], [3])
    assert first.features is not None
    assert third.features is not None
    assert second.features is None
    assert first.features.data_ptr() == rows.data_ptr()
    assert torch.equal(third.features, rows[2:])
    assert call.deadline_at == pytest.approx(5.02)
    assert [tuple(key) for key in call.closes] == [("c", "d")]


def test_prefix_tokens_go_to_the_session_change() -> None:
    call = build(Update("a", 2, [1], more={"prefix_token_ids": [4, 5]}))
    assert call.items[0].change.prefix_token_ids == (4, 5)
    assert refusals(build(Update("a", 2, [1], more={"prefix_token_ids": [4, 1_000]}))) == [
        ("token_out_of_range", "sessions[0].prefix_token_ids[1]")
    ]


def test_scratch_rows_are_for_calls_that_want_drafts() -> None:
    call = build(Update("a", 0, [1], num_draft_tokens=1), Update("b", 0, [1], num_draft_tokens=0))
    assert [item.change.scratch_rows for item in call.items] == [4, 0]


def test_a_threshold_needs_a_confidence_head() -> None:
    update = Update("a", 0, [1], more={"confidence_threshold": 0.5})
    assert refusals(build(update)) == [None]
    headless = FACTS.model_copy(update={"has_confidence": False})
    assert refusals(build(update, facts=headless)) == [("unsupported_sampling", "sessions[0].confidence_threshold")]


def test_projected_rows_have_a_width_of_their_own() -> None:
    call = build(Update("a", 0, [1]), features=torch.zeros(1, 4), rows="projected")
    assert call.items[0].is_projected
    with pytest.raises(RequestError) as caught:
        build(Update("a", 0, [1]), features=torch.zeros(1, 8), rows="projected")
    assert (caught.value.code, caught.value.numbers["expected_width"]) == ("wrong_shape", 4)


def test_dtypes_the_drafter_does_not_take_are_refused() -> None:
    facts = FACTS.model_copy(update={"feature_dtypes": ("float16",)})
    with pytest.raises(RequestError) as caught:
        build(Update("a", 0, [1]), facts=facts)
    assert (caught.value.code, caught.value.param) == ("wrong_dtype", "features")


@given(st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.integers(0, 5), st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_a_value_that_is_not_finite_is_found_wherever_it_is(value: float, row: int, column: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = make_rows([1] * 6, 0).to(dtype)
        rows[row, column] = value
        call = build(Update("a", 0, [1] * 2), Update("b", 0, [1] * 4), features=rows)
        bad, offset = (0, row) if row < 2 else (1, row - 2)
        expected: list[tuple[str, str] | None] = [None, None]
        expected[bad] = ("non_finite_rows", f"sessions[{bad}].features[{offset}]")
        assert refusals(call) == expected


def test_rows_of_one_value_are_noticed_and_served() -> None:
    call = build(Update("a", 0, [1, 2]), features=torch.zeros(2, 8))
    assert call.has_constant_rows
    assert refusals(call) == [None]
    assert not build(Update("a", 0, [1, 2])).has_constant_rows


def test_large_finite_values_pass() -> None:
    rows = torch.full((2, 8), torch.finfo(torch.float32).max)
    rows[1] = -rows[0]
    assert refusals(build(Update("a", 0, [1, 2]), features=rows)) == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_tensors_are_windows_on_the_body(dtype: torch.dtype, offset: int) -> None:
    rows = make_rows([1, 2, 3], 0).to(dtype)
    view = to_view(rows)
    body = bytearray(offset) + bytearray(view.data)
    tensor = to_tensor(TensorView(view.dtype, view.shape, memoryview(body)[offset:]))
    assert tensor is not None
    assert torch.equal(tensor, rows)
    body[offset:] = bytes(len(body) - offset)
    is_window = offset % dtype.itemsize == 0
    assert bool((tensor == 0).all()) is is_window, "aligned bytes are viewed, others are copied"
    assert to_tensor(TensorView(view.dtype, (0, 8), memoryview(bytearray()))) is None
