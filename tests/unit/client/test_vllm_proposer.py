"""The parts of the vLLM proposer that need no vLLM: settings, rows of a step, features, probabilities, ranks, signatures."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_engine_client import codec
from draft_engine_client.projection import ContextProjection
from draft_engine_client.replies import Drafts
from draft_engine_client.vllm_proposer import cpu_defects
from draft_engine_client.vllm_proposer.connecting import connect
from draft_engine_client.vllm_proposer.errors import PairingError
from draft_engine_client.vllm_proposer.features import RowProjection, gather_features, to_wire, vllm_layer_ids
from draft_engine_client.vllm_proposer.probabilities import dense_draft_probs
from draft_engine_client.vllm_proposer.rows import RequestRows, row_indices
from draft_engine_client.vllm_proposer.runner_patch import (
    RUNNER_SIGNATURES,
    check_release,
    check_signatures,
    mend_cpu_sampling,
    patch_runner,
)
from draft_engine_client.vllm_proposer.settings import API_KEY_VARIABLE, ProposerSettings, read_settings
from draft_engine_client.vllm_proposer.tensor_parallel import on_first_rank
from draft_engine_client.wire import TargetFingerprint
from service.routes import encode_projection
from tests.support.draft_model import TinySession, load_drafter, make_features, make_tiny_drafter
from tests.support.service import serving

# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "additional-config"),
        (None, "additional-config"),
        ({"draft_engine": {"url": "http://h:1", "colour": "red"}}, "colour"),
        ({"draft_engine": {}}, "url"),
        ({"draft_engine": {"url": "h:1"}}, "url"),
        ({"draft_engine": {"url": "http://h:1", "step_deadline_ms": 0}}, "step_deadline_ms"),
        ({"draft_engine": {"url": "http://h:1", "row_dtype": "int8"}}, "row_dtype"),
        ({"draft_engine": {"url": "http://h:1", "target_layer_ids": []}}, "target_layer_ids"),
        ({"draft_engine": {"url": "http://h:1", "breaker_min_s": 9, "breaker_max_s": 1}}, "breaker_max_s"),
        ({"draft_engine": "http://h:1"}, "draft_engine"),
    ],
)
def test_a_wrong_setting_is_named(config: object, named: str) -> None:
    with pytest.raises(PairingError, match=named):
        read_settings(config)


def test_the_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "a-long-secret")
    settings = read_settings({"draft_engine": {"url": "http://h:1"}})
    assert settings.client_settings("-dp1").api_key == "a-long-secret"
    assert settings.client_settings("-dp1").client_name == "vllm-dp1"
    assert "a-long-secret" not in repr(settings)
    with pytest.raises(PairingError, match="api_key"):
        read_settings({"draft_engine": {"url": "http://h:1", "api_key": "a-long-secret"}})


# Rows of a step ------------------------------------------------------------------------------------------------------


def rows(**counts: int) -> RequestRows:
    return RequestRows("r", **{"first": 0, "start": 0, "num_drafts": 0, **counts})  # type: ignore[arg-type]


def test_a_whole_prompt() -> None:
    one = rows(num_scheduled=5, num_sampled=1, num_tokens=6)
    assert (one.num_rows, one.end, one.problem) == (5, 5, None)


def test_a_chunk_of_a_prompt_is_handed_over_and_asks_for_nothing() -> None:
    one = rows(start=64, num_scheduled=64, num_sampled=0, num_tokens=300)
    assert (one.num_rows, one.end, one.problem) == (64, 128, None)
    assert one.num_drafts_wanted(7, 1_000) == 0


@given(num_drafts=st.integers(0, 7), start=st.integers(1, 500), data=st.data())
def test_what_a_verification_keeps(num_drafts: int, start: int, data: st.DataObject) -> None:
    accepted = data.draw(st.integers(0, num_drafts))
    one = rows(
        start=start,
        num_scheduled=num_drafts + 1,
        num_drafts=num_drafts,
        num_sampled=accepted + 1,
        num_tokens=start + 1 + accepted + 1,
    )
    assert one.problem is None
    assert one.num_rows == 1 + accepted, "the row of the last anchor, and of each draft that stays"
    assert one.end == one.num_tokens - 1


@pytest.mark.parametrize(
    "counts",
    [
        {"num_scheduled": 5, "num_sampled": 1, "num_tokens": 9},  # the anchor is not the last token
        {"num_scheduled": 5, "num_sampled": 0, "num_tokens": 5},  # no token stands at the anchor
        {"num_scheduled": 2, "num_drafts": 1, "num_sampled": 3, "num_tokens": 3},  # more tokens than rows
    ],
)
def test_counts_that_do_not_fit_are_a_problem(counts: dict[str, int]) -> None:
    assert rows(**counts).problem


def test_no_draft_passes_the_longest_length() -> None:
    one = rows(num_scheduled=5, num_sampled=1, num_tokens=6)
    assert [one.num_drafts_wanted(3, length) for length in (100, 10, 9, 8, 7, 6)] == [3, 3, 2, 1, 0, 0]


def test_indices_skip_the_rejected() -> None:
    first = rows(num_scheduled=4, num_drafts=3, num_sampled=2, start=9, num_tokens=12)
    second = rows(first=4, num_scheduled=3, num_sampled=1, num_tokens=4)
    assert row_indices([first, second]) == [0, 1, 4, 5, 6]


# Features ------------------------------------------------------------------------------------------------------------


def test_layers_come_in_the_order_of_the_drafter() -> None:
    assert vllm_layer_ids((8, -1, 3)) == (0, 4, 9)
    states = [torch.full((3, 2), float(number)) + torch.arange(3.0)[:, None] / 10 for number in (0, 4, 9)]
    features = gather_features(states, [2, 0], (8, -1, 3))
    np.testing.assert_allclose(features, [[9.2, 9.2, 0.2, 0.2, 4.2, 4.2], [9.0, 9.0, 0.0, 0.0, 4.0, 4.0]], rtol=1e-6)


def test_bfloat16_leaves_as_its_bits() -> None:
    state = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    features = to_wire(gather_features([state], [1, 3], (5,)), "bfloat16")
    assert features.dtype == np.uint16
    back = torch.from_numpy(features.view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(back, state[[1, 3]].to(torch.bfloat16))


def test_a_missing_state_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 were asked for"):
        gather_features([torch.zeros(1, 2)], [0], (1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_projected_as_the_drafter_does(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fetched over the wire as in a server; float16 weights are packed on a CPU."""
    drafter = load_drafter(make_tiny_drafter(tmp_path), dtype=dtype)
    body = codec.decode(encode_projection(drafter.projection, drafter.fingerprint))
    source = ContextProjection(drafter.fingerprint, body.tensors["weight"], body.tensors["norm"], drafter.projection.eps)
    features = make_features(drafter, 5).to(drafter.dtype)
    rows = RowProjection(source, "cpu")(features)
    sessions = [TinySession(drafter, [1, 2]), TinySession(drafter, [3, 4])]
    sessions[0].write(features)
    sessions[1].write(rows, is_projected=True)
    raw, projected = (drafter.cache.pages(0)[session.page_ids[:1]] for session in sessions)
    torch.testing.assert_close(projected.float(), raw.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


# Draft probabilities -------------------------------------------------------------------------------------------------


def test_reported_distributions_are_spread_and_a_certain_draft_has_all() -> None:
    sampled = Drafts(
        token_ids=(4, 1),
        probs_ids=np.array([[4, 2, 0], [1, 0, 0]], dtype=np.int32),
        probs=np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=np.float32),
    )
    dense = dense_draft_probs([sampled, Drafts(token_ids=(3,)), Drafts()], 3, 6, "cpu")
    assert dense is not None
    wanted = torch.zeros(3, 3, 6)
    wanted[0, 0, 4] = wanted[0, 0, 2] = 0.5
    wanted[0, 1, 1] = 1.0
    wanted[1, 0, 3] = 1.0
    assert torch.equal(dense, wanted)


def test_padding_with_any_id_is_harmless() -> None:
    one = Drafts(
        token_ids=(5,), probs_ids=np.array([[5, -7, 99]], dtype=np.int32), probs=np.array([[1.0, 0.0, 0.0]], dtype=np.float32)
    )
    dense = dense_draft_probs([one], 1, 6, "cpu")
    assert dense is not None
    assert dense.tolist() == [[[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]]


def test_greedy_batches_have_no_distributions() -> None:
    assert dense_draft_probs([Drafts(token_ids=(3,)), Drafts()], 3, 6, "cpu") is None


# Ranks ---------------------------------------------------------------------------------------------------------------


class FakeGroup:
    """Ranks as threads. Like vLLM's group, a broadcast is a meeting of all ranks."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[object]) -> None:
        self.rank_in_group, self.world_size, self._barrier, self._box = rank, barrier.parties, barrier, box

    def broadcast_object(self, obj: object = None, src: int = 0) -> object:
        if self.rank_in_group == src:
            self._box[:] = [obj]
        self._barrier.wait(10)
        received = self._box[0]
        self._barrier.wait(10)
        return received


def test_one_rank_calls_and_all_get_the_same() -> None:
    barrier, box = threading.Barrier(4), list[object]()
    calls: list[int] = []
    results: dict[int, list[Drafts]] = {}

    def run(rank: int) -> None:
        def compute() -> list[Drafts]:
            calls.append(rank)
            return [Drafts(token_ids=(rank + 7, len(calls)))]

        group = FakeGroup(rank, barrier, box)
        for _ in range(3):
            results[rank] = on_first_rank(group, compute)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert calls == [0, 0, 0]
    assert all(results[rank] == [Drafts(token_ids=(7, 3))] for rank in range(4))


# The patch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc1"])
def test_supported_releases(version: str) -> None:
    check_release(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3", "1.0.0"])
def test_other_releases_are_refused_with_a_sentence(version: str) -> None:
    with pytest.raises(PairingError, match=rf"vLLM {version} is not supported; .* 0\.32 and 0\.33"):
        check_release(version)


class Runner:
    """The part of vLLM's runner that is patched."""

    drafter: Any = None
    aux_layers: Any = None
    updated = 0

    def __init__(self) -> None:
        self.use_aux_hidden_state_outputs = False
        self._draft_probs = self._draft_prob_req_ids = "stale"
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        self.aux_layers = self._get_eagle3_aux_layers_from_config() if self.use_aux_hidden_state_outputs else None

    def _get_eagle3_aux_layers_from_config(self) -> Any:
        return "default"

    def _update_states(self, scheduler_output: Any) -> str:
        self.updated += 1
        return "deferred"

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return False

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> None: ...

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        return "vLLM's own"


def patched_runner(drafter: Any) -> Any:
    runner_class = type("PatchedRunner", (Runner,), {})
    check_signatures(runner_class, RUNNER_SIGNATURES)
    patch_runner(runner_class)
    runner = runner_class()
    runner.drafter = drafter
    return runner


def test_another_proposer_sees_no_difference() -> None:
    runner = patched_runner(SimpleNamespace())
    runner._setup_eagle3_aux_hidden_state_outputs()
    assert runner.aux_layers is None
    assert runner.propose_draft_token_ids(*range(9)) == "vLLM's own"
    assert runner._input_fits_in_drafter(object()) is False
    assert runner._update_states(SimpleNamespace(finished_req_ids={"a"})) == "deferred"


@pytest.mark.parametrize("probs", [None, torch.zeros(2, 1, 3)])
def test_ours_captures_proposes_and_hears_of_finished_requests(probs: torch.Tensor | None) -> None:
    finished: list[Any] = []
    drafter = SimpleNamespace(
        is_draft_engine_proposer=True,
        vllm_layer_ids=(1, 4),
        propose_step=lambda runner, scheduler_output, sampled, states, attention: (
            [[scheduler_output, sampled, states, attention]],
            probs,
        ),
        finish=finished.append,
    )
    runner = patched_runner(drafter)
    runner._setup_eagle3_aux_hidden_state_outputs()
    assert runner.aux_layers == (1, 4)
    assert runner.propose_draft_token_ids(*range(9)) == [[0, 1, 5, 7]]
    assert runner._draft_probs is probs
    assert runner._draft_prob_req_ids == (None if probs is None else ["a", "b"])
    assert (runner._input_fits_in_drafter(object()), runner._input_fits_in_drafter(None)) == (True, False)
    runner._update_states(SimpleNamespace(finished_req_ids={"a"}))
    runner._update_states(SimpleNamespace(finished_req_ids=set()))
    assert (finished, runner.updated) == ([{"a"}], 2)


def test_a_changed_or_missing_method_is_refused_by_name() -> None:
    class Changed(Runner):
        def _update_states(self, scheduler_output: Any, more: Any) -> Any: ...  # type: ignore[override]

    with pytest.raises(PairingError, match=r"Changed._update_states takes \(self, scheduler_output, more\)"):
        check_signatures(Changed, RUNNER_SIGNATURES)
    with pytest.raises(PairingError, match=r"object\..* supports"):
        check_signatures(object, RUNNER_SIGNATURES)


# Sampling on CPUs ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5]), st.integers(0, 4)), min_size=1, max_size=6))
def test_values_are_repeated_and_one_is_replaced(pairs: list[tuple[float, int]]) -> None:
    values = torch.tensor([value for value, _ in pairs])
    ends = torch.tensor([count for _, count in pairs], dtype=torch.int32).cumsum(0).to(torch.int32)
    repeated = [value for value, count in pairs for _ in range(count)]
    assert cpu_defects.expand_batch_to_tokens(values, ends, len(repeated)).tolist() == repeated
    replaced = cpu_defects.expand_batch_to_tokens(values, ends, len(repeated), replace_from=0, replace_to=1)
    assert replaced.tolist() == [value or 1.0 for value in repeated]


def test_a_module_whose_functions_changed_is_not_mended() -> None:
    module = SimpleNamespace(expand_batch_to_tokens=lambda x: x, apply_sampling_constraints=lambda logits: logits)
    with pytest.raises(PairingError, match="expand_batch_to_tokens takes"):
        mend_cpu_sampling(module)


# Connecting ----------------------------------------------------------------------------------------------------------

TARGET = TargetFingerprint(vocab_size=1_000, hidden_size=4, num_layers=3, dtype="float32")


def settings_for(url: str, **more: Any) -> ProposerSettings:
    return ProposerSettings(url=url, startup_timeout_s=more.pop("startup_timeout_s", 10.0), **more)


def test_a_server_tells_its_layers_and_takes_the_target() -> None:
    with serving() as server:
        settings = settings_for(server.url)
        pairing, client = connect(settings, settings.client_settings(), TARGET)
        assert client is not None
        client.close()
    assert (pairing.problem, pairing.target_layer_ids) == (None, (0, 2))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size"])
def test_a_wrong_pair_is_refused_by_field(field: str) -> None:
    with serving() as server:
        settings = settings_for(server.url)
        pairing, client = connect(settings, settings.client_settings(), TARGET.model_copy(update={field: 77}))
    assert client is None
    assert pairing.problem is not None
    assert field in pairing.problem


def test_layers_that_the_drafter_does_not_read_are_refused() -> None:
    with serving() as server:
        settings = settings_for(server.url, target_layer_ids=(0, 1))
        pairing, _ = connect(settings, settings.client_settings(), TARGET)
    assert "target_layer_ids" in (pairing.problem or "")


def test_without_a_server_the_layers_have_to_be_given() -> None:
    settings = settings_for("http://127.0.0.1:1", startup_timeout_s=0.1)
    pairing, client = connect(settings, settings.client_settings(), TARGET)
    assert client is None
    assert "give target_layer_ids" in (pairing.problem or "")
    settings = settings_for("http://127.0.0.1:1", startup_timeout_s=0.1, target_layer_ids=(0, 2))
    pairing, client = connect(settings, settings.client_settings(), TARGET)
    assert client is not None
    client.close()
    assert (pairing.problem, pairing.target_layer_ids) == (None, (0, 2))


def test_a_key_that_is_refused_is_told_at_once() -> None:
    with serving(api_key="the-right-key", headers={"authorization": "Bearer the-right-key"}) as server:
        settings = settings_for(server.url)
        pairing, _ = connect(settings, settings.client_settings(), TARGET)
    assert "unauthorized" in (pairing.problem or "") or "invalid_api_key" in (pairing.problem or "")
