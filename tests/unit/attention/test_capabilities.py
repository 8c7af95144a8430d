"""A refusal is the complete list of reasons, and the selection follows from the flags alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from attention.backends import BACKENDS, default_backends
from attention.capabilities import AttentionCapabilities, QueryLenSupport
from attention.selector import AttentionSelectionError, Candidate, DecodePath, Selection, select_backend
from tests.support.attention import make_problem

_ANY = AttentionCapabilities(
    kinds=frozenset({"mla", "gqa"}),
    query_len_support=QueryLenSupport.UNIFORM,
    supports_non_causal=True,
    supports_non_causal_multi_token=True,
    dtypes=frozenset({torch.float32}),
    kv_cache_dtypes=frozenset({torch.float32}),
    device_types=frozenset({"cpu"}),
)


@pytest.mark.parametrize(
    ("claims", "asked", "word"),
    [
        ({"kinds": frozenset({"gqa"})}, {}, "mla attention"),
        ({"supports_non_causal": False}, {}, "non-causal"),
        ({}, {"dtype": torch.bfloat16}, "queries of torch.bfloat16"),
        ({}, {"kv_cache_dtype": torch.bfloat16}, "KV cache of torch.bfloat16"),
        ({}, {"device": torch.device("cuda")}, "device cuda"),
        ({"max_num_heads": 5}, {}, "6 heads"),
        ({"page_sizes": frozenset({32, 64})}, {}, "page_size 4; supported: [32, 64]"),
        ({"page_size_multiple": 16}, {}, "multiple of 16"),
        ({"key_value_dims": frozenset({(576, 512)})}, {}, "(24, 16); supported: [(576, 512)]"),
        ({}, {"sliding_window": 8}, "sliding window (of 8)"),
        ({}, {"needs_lse": True}, "log-sum-exp"),
        (
            {"kv_dtype_is_query_dtype": True, "kv_cache_dtypes": frozenset({torch.float16, torch.float32})},
            {"kv_cache_dtype": torch.float16},
            "must have the queries' dtype",
        ),
    ],
)
def test_each_limit_has_its_own_reason(claims: dict[str, object], asked: dict[str, object], word: str) -> None:
    capabilities = replace(_ANY, **claims)  # type: ignore[arg-type]
    reasons = capabilities.unsupported_reasons(make_problem(**asked))  # type: ignore[arg-type]
    assert len(reasons) == 1
    assert word in reasons[0]


def test_no_reason_hides_another() -> None:
    capabilities = replace(_ANY, kinds=frozenset(), supports_non_causal=False, max_num_heads=1, page_sizes=frozenset({64}))
    problem = make_problem(dtype=torch.bfloat16, device=torch.device("cuda"), sliding_window=1, needs_lse=True)
    assert len(capabilities.unsupported_reasons(problem)) == 8


@pytest.mark.parametrize(
    ("query_len_support", "multi_token", "max_query_len", "slots", "num_disabled"),
    list(
        itertools.product(
            QueryLenSupport,
            (False, True),
            (None, 2, 4),
            (1, 4),
            (0, 1, 2),
        )
    ),
)
def test_truth_table_of_the_path(
    query_len_support: QueryLenSupport, multi_token: bool, max_query_len: int | None, slots: int, num_disabled: int
) -> None:
    capabilities = replace(
        _ANY,
        query_len_support=query_len_support,
        supports_non_causal_multi_token=multi_token,
        max_query_len=max_query_len,
    )
    disabled = dict.fromkeys(list(DecodePath)[:num_disabled], "planted")
    candidate = Candidate("one", capabilities, disabled_paths=disabled)
    takes_block = (
        query_len_support is not QueryLenSupport.SINGLE_ONLY
        and multi_token
        and (max_query_len is None or max_query_len >= slots)
    )
    expected = None
    if (takes_block or slots == 1) and DecodePath.FUSED not in disabled:
        expected = DecodePath.FUSED
    elif DecodePath.FLATTENED not in disabled:
        expected = DecodePath.FLATTENED
    problem = make_problem(draft_block_size=slots)
    if expected is None:
        with pytest.raises(AttentionSelectionError, match="planted"):
            select_backend(problem, [candidate])
        return
    selection = select_backend(problem, [candidate])
    assert (selection.backend, selection.path) == ("one", expected)
    assert (selection.fused_reasons == ()) == (expected is DecodePath.FUSED)


def test_the_first_usable_candidate_is_taken_and_all_others_are_told() -> None:
    candidates = [
        Candidate("absent", _ANY, machine_reasons=("package absent is not installed", "no device")),
        Candidate("other_kind", replace(_ANY, kinds=frozenset({"gqa"}))),
        Candidate("good", _ANY),
        Candidate("later", _ANY),
    ]
    selection = select_backend(make_problem(), candidates)
    assert (selection.backend, selection.path) == ("good", DecodePath.FUSED)
    assert {rejection.backend: rejection.reasons for rejection in selection.rejected} == {
        "absent": ("package absent is not installed", "no device"),
        "other_kind": ("mla attention is not supported",),
        "later": (),
    }
    assert selection == select_backend(make_problem(), candidates)


def test_a_better_backend_that_must_flatten_comes_before_a_worse_one_that_need_not() -> None:
    single = replace(_ANY, query_len_support=QueryLenSupport.SINGLE_ONLY)
    selection = select_backend(make_problem(), [Candidate("first", single), Candidate("second", _ANY)])
    assert (selection.backend, selection.path) == ("first", DecodePath.FLATTENED)
    assert str(selection) == "first, flattened (one query row per request only)"


def test_override_takes_its_backend_only() -> None:
    candidates = [Candidate("first", _ANY), Candidate("second", _ANY)]
    selection = select_backend(make_problem(), candidates, "second")
    assert selection.backend == "second"
    assert [(rejection.backend, rejection.reasons) for rejection in selection.rejected] == [
        ("first", ("the configuration asks for second",))
    ]


def test_unknown_override_names_the_known_ones() -> None:
    with pytest.raises(AttentionSelectionError, match=r"unknown attention backend 'none'; known: first") as raised:
        select_backend(make_problem(), [Candidate("first", _ANY)], "none")
    assert raised.value.rejected == ()


def test_override_that_cannot_serve_lists_all_its_reasons() -> None:
    bad = replace(_ANY, kinds=frozenset({"gqa"}), max_num_heads=1)
    candidates = [Candidate("good", _ANY), Candidate("bad", bad, machine_reasons=("too old",))]
    with pytest.raises(AttentionSelectionError, match="'bad' cannot serve") as raised:
        select_backend(make_problem(), candidates, "bad")
    (rejection,) = raised.value.rejected
    assert rejection.reasons == ("too old", "mla attention is not supported", "6 heads; at most 1 are supported")


def test_nothing_usable_lists_every_backend() -> None:
    candidates = [Candidate(name, _ANY, machine_reasons=(f"no {name}",)) for name in ("first", "second")]
    with pytest.raises(AttentionSelectionError, match=r"(?s)first: no first.*second: no second"):
        select_backend(make_problem(), candidates)


@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_some_backend_serves_every_problem_on_a_cpu(
    kind: str, dtype: torch.dtype, kv_cache_dtype: torch.dtype, sliding_window: int | None
) -> None:
    problem = make_problem(
        kind,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        sliding_window=sliding_window,
        needs_lse=True,
    )
    selection = select_backend(problem, default_backends())
    assert selection.path is DecodePath.FUSED
    assert isinstance(selection, Selection)
    assert {selection.backend, *(rejection.backend for rejection in selection.rejected)} == set(BACKENDS)


@pytest.mark.parametrize(
    ("capability", "is_usable"),
    [(None, False), ((9, 0), False), ((10, 0), True), ((10, 3), True), ((8, 0), False)],
)
def test_device_reasons(capability: tuple[int, int] | None, is_usable: bool) -> None:
    exact = replace(_ANY, device_types=frozenset({"cuda"}), compute_capabilities=frozenset({(10, 0), (10, 3)}))
    assert (exact.device_reasons(capability) == []) == is_usable
    at_least = replace(_ANY, device_types=frozenset({"cuda"}), min_compute_capability=(10, 0))
    assert (at_least.device_reasons(capability) == []) == is_usable
    assert _ANY.device_reasons(capability) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_block_size": 0},
        {"num_heads": 0},
        {"page_size": 0},
        {"num_kv_heads": 2},
        {"value_dim": 32},
        {"sliding_window": -1},
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|has one|not a multiple"):
        make_problem(**changes)  # type: ignore[arg-type]
