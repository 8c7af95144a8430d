"""The same golden model in every format it could have been published in drafts the same tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_model.drafter import Drafter
from draft_model.errors import CheckpointError
from draft_model.formats import LAYER_ID_CONVENTIONS, load_config, resolve_config
from tests.support.draft_model import (
    TINY_CONFIG,
    TinySession,
    load_drafter,
    make_draft_to_target,
    make_features,
    make_tiny_drafter,
    read_checkpoint,
    write_checkpoint,
)
from tests.support.tiny_target import write_tiny_target

GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = [3, 1, 4, 15, 9, 2, 6]
DECODER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "vocab_size", "max_position_embeddings", "attention_bias",
    "layer_types",
)  # fmt: skip


def golden(case: str = "vanilla") -> tuple[dict[str, Any], dict[str, Tensor]]:
    return read_checkpoint(GOLDEN / f"draft_{case}")


def first_round(case: str = "vanilla") -> tuple[Tensor, int, list[int]]:
    """Context features, anchor and greedy drafts of the first recorded round."""
    recorded = load_file(GOLDEN / f"gen_{case}_greedy.safetensors")
    drafts = recorded["r00.draft_tokens_full_block"][0].tolist()
    return recorded["r00.ctx_features"][0], int(recorded["r00.draft_input_ids"][0, 0]), drafts


def draft_first_round(drafter: Drafter, case: str = "vanilla") -> Sequence[int]:
    features, anchor, _ = first_round(case)
    session = TinySession(drafter, PAGES)
    session.write(features)
    return drafter.draft([session.request(anchor)])[0].token_ids


def as_speculators(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The same model as the speculators library writes it."""
    rank = config["markov_rank"]
    outer: dict[str, Any] = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": config["block_size"]}]},
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config["target_layer_ids"]],
        "sample_from_anchor": True,
        "markov_rank": rank,
        "markov_head_type": config.get("markov_head_type", "vanilla"),
        "enable_confidence_head": config["enable_confidence_head"],
        "confidence_head_with_markov": rank > 0,
        "dtype": "float32",
        "transformer_layer_config": {key: config[key] for key in DECODER_KEYS},
    }
    return {**outer, **changes}


def as_dflash(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The same model with its draft fields nested, as z-lab publishes."""
    nested = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    flat = {key: value for key, value in config.items() if key not in nested}
    return {**flat, "architectures": ["DFlashDraftModel"], "dflash_config": nested, **changes}


@pytest.mark.parametrize("source_format", sorted(LAYER_ID_CONVENTIONS))
def test_each_format_counts_layers_its_own_way(source_format: str) -> None:
    """A target of 6 layers whose layer k outputs k: the ids a target captures, whatever the file says."""
    config, _ = golden()
    raw, stored = {
        "deepspec": ({**config, "target_layer_ids": [-1, 0, 4]}, (-1, 0, 4)),
        "dflash": (as_dflash({**config, "target_layer_ids": [-1, 0, 4]}, sample_from_anchor=True), (-1, 0, 4)),
        "speculators": (as_speculators(config, aux_hidden_state_layer_ids=[0, 1, 5]), (0, 1, 5)),
        "k3_dspark": ({**TINY_CONFIG, "target_layer_ids": [-1, 0, 4], "num_target_layers": 3, "target_num_hidden_layers": 6},
                      (-1, 0, 4)),
    }[source_format]  # fmt: skip
    resolved = resolve_config(raw, "there")
    assert resolved.source_format == source_format
    assert resolved.stored_layer_ids == stored
    assert resolved.target_layer_ids == (-1, 0, 4)


@pytest.mark.parametrize("case", ["vanilla", "rnn", "dflash"])
def test_every_format_drafts_the_recorded_tokens(tmp_path: Path, case: str) -> None:
    config, tensors = golden(case)
    expected = first_round(case)[2]
    for name, raw in {
        "deepspec": config,
        "speculators": as_speculators(config),
        "dflash": as_dflash(config, sample_from_anchor=True),
        "dflash_bonus": as_dflash(config, dspark_bonus_anchor=False),
    }.items():
        assert draft_first_round(load_drafter(write_checkpoint(tmp_path / name, raw, tensors)), case) == expected, name


def test_dflash_leaves_the_anchor_slot_out(tmp_path: Path) -> None:
    """Masks predict their own position: drafts of slots 1.. are those of the same slots of a block that predicts everywhere."""
    config, tensors = golden("dflash")
    folder = write_checkpoint(tmp_path, as_dflash(config), tensors)
    drafter = load_drafter(folder)
    assert drafter.config.max_draft_tokens == 6
    assert draft_first_round(drafter, "dflash") == first_round("dflash")[2][1:]


# --- speculators


def test_the_anchor_rule_follows_what_a_checkpoint_proposes() -> None:
    config, _ = golden()
    for proposed, is_anchor in ((7, True), (6, False)):
        raw = as_speculators(config, sample_from_anchor=None)
        raw["speculators_config"]["proposal_methods"] = [{"speculative_tokens": proposed}]
        assert resolve_config(raw, "there").sample_from_anchor is is_anchor
    for left in ({"speculators_config": None}, {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}):
        with pytest.raises(CheckpointError, match="there: sample_from_anchor is missing"):
            resolve_config(as_speculators(config, sample_from_anchor=None, **left), "there")


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "mask_token_id", "block_size", "transformer_layer_config"])
def test_a_missing_key_around_the_decoder_is_named(key: str) -> None:
    raw = as_speculators(golden()[0])
    del raw[key]
    with pytest.raises(CheckpointError, match=f"there: {key} is missing"):
        resolve_config(raw, "there")


@pytest.mark.parametrize("key", sorted(set(DECODER_KEYS) - {"attention_bias", "layer_types"}))
def test_a_missing_key_of_the_decoder_is_named(key: str) -> None:
    raw = as_speculators(golden()[0])
    del raw["transformer_layer_config"][key]
    expected = r"transformer_layer_config: rope_theta" if key == "rope_parameters" else rf"transformer_layer_config\.{key}"
    with pytest.raises(CheckpointError, match=f"there: {expected} is"):
        resolve_config(raw, "there")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; supported: dspark, dflash"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"shift_label": True}, "shift_label is set"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"markov_head_type": "rnn", "sample_from_anchor": False}, "markov_head_type is rnn"),
        ({"d2t_format": "delta"}, "d2t_format is 'delta'; supported: offset, index"),
    ],
)
def test_variants_that_compute_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_config(as_speculators(golden()[0], **changes), "there")


def test_sliding_layers_have_to_be_declared_non_causal() -> None:
    raw = as_speculators(golden()[0])
    raw["transformer_layer_config"] |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    with pytest.raises(CheckpointError, match="sliding_window_non_causal is not true"):
        resolve_config(raw, "there")
    assert resolve_config({**raw, "sliding_window_non_causal": True}, "there").layer_windows == (None, 5)

    nested = as_dflash(
        golden()[0], layer_types=["full_attention", "sliding_attention"], sliding_window=5, sample_from_anchor=True
    )
    with pytest.raises(CheckpointError, match="is_causal is missing"):
        resolve_config(nested, "there")
    nested["dflash_config"]["causal"] = False
    assert resolve_config(nested, "there").layer_windows == (None, 5)
    with pytest.raises(CheckpointError, match="is_causal is true"):
        resolve_config({**nested, "is_causal": True}, "there")


@pytest.mark.parametrize("backend", ["torch_cpu", "reference"])
def test_a_sliding_layer_sees_the_last_rows_before_the_block(tmp_path: Path, backend: str) -> None:
    """One sliding layer alone: rows before the window change nothing. Beside a full layer they do."""
    config, tensors = golden()
    for types, num_layers, is_blind in ((["sliding_attention"], 1, True), (["sliding_attention", "full_attention"], 2, False)):
        raw = as_speculators(config, sliding_window_non_causal=True)
        decoder = raw["transformer_layer_config"]
        raw["transformer_layer_config"] = {
            **decoder, "layer_types": types, "sliding_window": 5, "num_hidden_layers": num_layers,
        }  # fmt: skip
        kept = {name: tensor for name, tensor in tensors.items() if num_layers == 2 or not name.startswith("layers.1.")}
        drafter = load_drafter(write_checkpoint(tmp_path / str(num_layers), raw, kept), attention_backend=backend)
        confidences = []
        for seed in (1, 2):
            session = TinySession(drafter, PAGES)
            session.write(make_features(drafter, 9, seed=seed))
            session.write(make_features(drafter, 5, seed=3))
            (proposal,) = drafter.draft([session.request(7)])
            confidences.append(proposal.confidence)
        assert (confidences[0] == pytest.approx(confidences[1], abs=1e-6)) is is_blind


# --- dflash_config


def test_nested_and_flat_fields_have_to_agree() -> None:
    config, _ = golden()
    raw = as_dflash(config, sample_from_anchor=True)
    assert resolve_config({**raw, "mask_token_id": 311, "target_layer_ids": [0, 2, 4]}, "there").mask_token_id == 311
    with pytest.raises(CheckpointError, match=r"dflash_config\.mask_token_id is 311, but the one at the top is 12"):
        resolve_config({**raw, "mask_token_id": 12}, "there")
    with pytest.raises(CheckpointError, match=r"dflash_config\.target_layer_ids is \[0, 2, 4\]"):
        resolve_config({**raw, "target_layer_ids": [1, 3, 5]}, "there")
    resolve_config({**raw, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "there")
    with pytest.raises(CheckpointError, match=r"eagle_aux_hidden_state_layer_ids must be target_layer_ids \+ 1"):
        resolve_config({**raw, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "there")


def test_a_mask_token_may_be_flat_and_never_falls_back() -> None:
    raw = as_dflash(golden("dflash")[0])
    del raw["dflash_config"]["mask_token_id"]
    raw |= {"pad_token_id": 1, "eos_token_id": 2}
    with pytest.raises(CheckpointError, match="mask_token_id is missing"):
        resolve_config(raw, "there")
    assert resolve_config({**raw, "mask_token_id": 9}, "there").mask_token_id == 9


def test_a_dspark_draft_with_nested_fields_has_to_say_where_it_samples() -> None:
    config, _ = golden("vanilla")
    with pytest.raises(CheckpointError, match="sample_from_anchor is missing"):
        resolve_config(as_dflash(config), "there")
    with pytest.raises(CheckpointError, match="sample_from_anchor contradicts"):
        resolve_config(as_dflash(config, sample_from_anchor=True, dspark_bonus_anchor=True), "there")
    assert resolve_config(as_dflash(config, dspark_bonus_anchor=True), "there").max_draft_tokens == 6
    raw = as_dflash(config, sample_from_anchor=True)
    raw["dflash_config"]["use_swa"] = True
    with pytest.raises(CheckpointError, match=r"dflash_config\.use_swa is set"):
        resolve_config(raw, "there")


# --- reduced vocabularies


def restricted(drafter: Drafter, ids: Tensor) -> list[int]:
    """What the full model drafts when only `ids` may be chosen: a second way to run the head."""
    features, anchor, _ = first_round()
    session = TinySession(drafter, PAGES)
    session.write(features)
    hidden = drafter._block_states([session.request(anchor)])
    base, markov = drafter._lm_head(hidden), drafter._markov
    assert markov is not None
    previous, drafted = torch.tensor([anchor]), []
    for slot in range(len(hidden)):
        bias, _ = markov.step(markov.embed(previous), hidden[slot : slot + 1], None)
        previous = ids[(base[slot] + bias[0])[ids].argmax()][None]
        drafted.append(int(previous))
    return drafted


def reduce_vocabulary(tensors: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    names = ("lm_head.weight", "markov_head.markov_w2.weight")
    return {name: tensor[ids].contiguous() if name in names else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("layout", ["offset", "index", "offset and mask", "index and inverse"])
def test_reduced_vocabularies_map_to_target_ids(tmp_path: Path, layout: str) -> None:
    config, tensors = golden()
    ids = make_draft_to_target(320, 120)
    reduced = reduce_vocabulary(tensors, ids)
    reduced["d2t"] = ids - torch.arange(120) if layout.startswith("offset") else ids
    if layout == "offset and mask":
        reduced["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill(0, ids, True)
    if layout == "index and inverse":
        reduced["t2d"] = torch.full((320,), -1).scatter(0, ids, torch.arange(120))
    drafter = load_drafter(write_checkpoint(tmp_path, as_speculators(config, draft_vocab_size=120), reduced))
    full = load_drafter(GOLDEN / "draft_vanilla")
    assert draft_first_round(drafter) == restricted(full, ids)


def test_an_ambiguous_map_has_to_say_what_it_is(tmp_path: Path) -> None:
    """Ascending target ids could be indices, or offsets of larger ids."""
    config, tensors = golden()
    ids = torch.arange(0, 200, 2)
    reduced = {**reduce_vocabulary(tensors, ids), "d2t": ids}
    raw = as_speculators(config, draft_vocab_size=100)
    with pytest.raises(CheckpointError, match="say which with d2t_format"):
        load_drafter(write_checkpoint(tmp_path, raw, reduced))
    full = load_drafter(GOLDEN / "draft_vanilla")
    for layout, meant in (("index", ids), ("offset", ids + torch.arange(100))):
        folder = write_checkpoint(tmp_path, {**raw, "d2t_format": layout}, {**reduce_vocabulary(tensors, meant), "d2t": ids})
        assert draft_first_round(load_drafter(folder)) == restricted(full, meant)
    marked = {**reduced, "t2d": torch.zeros(320, dtype=torch.bool).index_fill(0, ids, True)}
    assert draft_first_round(load_drafter(write_checkpoint(tmp_path, raw, marked))) == restricted(full, ids)


def test_trained_drafts_hold_offsets_unless_they_say_otherwise(tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path, draft_vocab_size=60)
    config, tensors = read_checkpoint(folder)
    ids = make_draft_to_target(260, 60)
    assert torch.equal(tensors["d2t"], ids - torch.arange(60))
    (expected,) = load_drafter(folder).draft([TinySession(load_drafter(folder), PAGES).request(9)])
    tensors["d2t"] = ids
    with pytest.raises(CheckpointError, match=r"\(read as offset; d2t_format in config\.json says how\)"):
        load_drafter(write_checkpoint(tmp_path, config, tensors))
    drafter = load_drafter(write_checkpoint(tmp_path, {**config, "d2t_format": "index"}, tensors))
    assert drafter.draft([TinySession(drafter, PAGES).request(9)]) == [expected]


def test_maps_that_are_no_maps_are_refused(tmp_path: Path) -> None:
    config, tensors = golden()
    ids = make_draft_to_target(320, 120)
    raw, reduced = as_speculators(config, draft_vocab_size=120), reduce_vocabulary(tensors, ids)
    cases = {
        "tensor d2t is missing": {},
        "does not map 120 draft ids to distinct": {
            "d2t": torch.zeros(120, dtype=torch.int64).index_fill(0, torch.tensor([3]), -9)
        },
        "distinct token ids below 320": {"d2t": ids.clone().index_fill(0, torch.tensor([3]), 999)},
        "or not to those that t2d marks": {"d2t": ids, "t2d": torch.ones(320, dtype=torch.bool)},
        "tensor d2t has dtype float32, expected integers": {"d2t": ids.float()},
        r"tensor d2t has shape \[119\], expected \[120\]": {"d2t": ids[:119].contiguous()},
    }
    for message, extra in cases.items():
        with pytest.raises(CheckpointError, match=message):
            load_drafter(write_checkpoint(tmp_path, raw, {**reduced, **extra}))


# --- embedding and LM head


def test_the_targets_tensors_serve_a_draft_without_its_own(tmp_path: Path) -> None:
    """The golden drafts carry frozen copies of the golden target's; without them, the target's own give the same drafts."""
    config, tensors = golden()
    borrowed = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    folder = write_checkpoint(tmp_path, config, borrowed)
    assert draft_first_round(load_drafter(folder, target_path=GOLDEN / "target")) == first_round()[2]
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing and no target path"):
        load_drafter(folder)
    with_embedding = {**borrowed, "embed_tokens.weight": tensors["embed_tokens.weight"]}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing and no target path"):
        load_drafter(write_checkpoint(tmp_path, config, with_embedding))


def test_own_tensors_win_over_the_targets(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target")
    folder = make_tiny_drafter(tmp_path / "draft")
    (one,), (other,) = (
        drafter.draft([TinySession(drafter, PAGES).request(9)])
        for drafter in (load_drafter(folder), load_drafter(folder, target_path=target))
    )
    assert one == other


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""])
def test_targets_are_read_by_every_name_they_use(tmp_path: Path, prefix: str) -> None:
    config, tensors = golden()
    borrowed = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    target = {f"{prefix}embed_tokens.weight": tensors["embed_tokens.weight"], "lm_head.weight": tensors["lm_head.weight"]}
    write_checkpoint(tmp_path / "target", {"tie_word_embeddings": False}, target)
    folder = write_checkpoint(tmp_path / "draft", config, borrowed)
    assert draft_first_round(load_drafter(folder, target_path=tmp_path / "target")) == first_round()[2]


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_tied_targets_lend_their_embedding_as_head(tmp_path: Path, config: dict[str, Any]) -> None:
    raw, tensors = golden()
    embedding = tensors["embed_tokens.weight"]
    borrowed = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    write_checkpoint(tmp_path / "target", config, {"model.embed_tokens.weight": embedding})
    lent = load_drafter(write_checkpoint(tmp_path / "lent", raw, borrowed), target_path=tmp_path / "target")
    own = load_drafter(write_checkpoint(tmp_path / "own", raw, {**tensors, "lm_head.weight": embedding.clone()}))
    tied_raw = {**raw, "tie_word_embeddings": True}
    tied = load_drafter(write_checkpoint(tmp_path / "tied", tied_raw, {**borrowed, "embed_tokens.weight": embedding}))
    assert draft_first_round(lent) == draft_first_round(own) == draft_first_round(tied)


def test_targets_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config, tensors = golden()
    borrowed = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    folder = write_checkpoint(tmp_path / "draft", config, borrowed)
    embedding = tensors["embed_tokens.weight"]
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="no target model at"):
        load_drafter(folder, target_path=target)
    for lent, message in [
        ({"wte.weight": embedding}, r"the target has none of model\.embed_tokens\.weight"),
        ({"model.embed_tokens.weight": embedding[:-1].clone()}, r"model\.embed_tokens\.weight has shape \[319, 48\]"),
        ({"model.embed_tokens.weight": embedding}, r"the target has none of lm_head\.weight"),
    ]:
        write_checkpoint(target, {"tie_word_embeddings": False}, lent)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(folder, target_path=target)


def test_a_reduced_vocabulary_takes_its_rows_of_the_targets_head(tmp_path: Path) -> None:
    config, tensors = golden()
    ids = make_draft_to_target(320, 120)
    reduced = {**reduce_vocabulary(tensors, ids), "d2t": ids}
    del reduced["embed_tokens.weight"], reduced["lm_head.weight"]
    folder = write_checkpoint(tmp_path, {**config, "draft_vocab_size": 120}, reduced)
    drafter = load_drafter(folder, target_path=GOLDEN / "target")
    assert draft_first_round(drafter) == restricted(load_drafter(GOLDEN / "draft_vanilla"), ids)


# --- shards


def write_shards(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], count: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    weight_map: dict[str, str] = {}
    for index in range(count):
        name = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[index::count]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    config, tensors = golden()
    drafter = load_drafter(write_shards(tmp_path, config, tensors))
    assert draft_first_round(drafter) == first_round()[2]
    assert drafter.fingerprint != load_drafter(GOLDEN / "draft_vanilla").fingerprint


def test_a_target_needs_only_the_shards_with_its_embedding_and_head(tmp_path: Path) -> None:
    config, tensors = golden()
    names = ("embed_tokens.weight", "lm_head.weight")
    folder = write_checkpoint(tmp_path / "draft", config, {name: t for name, t in tensors.items() if name not in names})
    lent = {
        "model.embed_tokens.weight": tensors[names[0]],
        "lm_head.weight": tensors[names[1]],
        "model.norm.weight": torch.ones(48),
    }
    target = write_shards(tmp_path / "target", {"tie_word_embeddings": False}, lent)
    (target / "model-00003-of-00003.safetensors").unlink()
    assert draft_first_round(load_drafter(folder, target_path=target)) == first_round()[2]
    (target / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors does not exist"):
        load_drafter(folder, target_path=target)


def test_broken_shards_are_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, *golden())
    shard, other = folder / "model-00002-of-00003.safetensors", folder / "model-00001-of-00003.safetensors"
    name = sorted(load_file(other))[0]
    save_file({**load_file(shard), name: load_file(other)[name]}, shard)
    with pytest.raises(CheckpointError, match=f"{other.name}: tensor {name} is in {shard.name} too"):
        load_drafter(folder)
    shard.unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00003\.safetensors does not exist, but model\.safetensors\.index"
    ):
        load_drafter(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map is missing"):
        load_drafter(folder)


def test_a_fingerprint_changes_with_config_and_weights(tmp_path: Path) -> None:
    config, tensors = golden()
    prints = {load_drafter(write_checkpoint(tmp_path, config, tensors)).fingerprint}
    prints.add(load_drafter(write_checkpoint(tmp_path, {**config, "max_position_embeddings": 999}, tensors)).fingerprint)
    changed = {**tensors, "norm.weight": tensors["norm.weight"] + 1e-3}
    prints.add(load_drafter(write_checkpoint(tmp_path, config, changed)).fingerprint)
    assert len(prints) == 3
    assert load_config(tmp_path).max_position == config["max_position_embeddings"]
