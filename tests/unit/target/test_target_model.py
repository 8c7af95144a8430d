"""The target's forward equals transformers, and a row's numbers do not depend on the rows beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_model.errors import CheckpointError
from draft_model.linear import has_packed_float16, padded_rows
from draft_model.target_model import TargetModel
from tests.support.tiny_target import VOCAB_SIZE, write_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


def feed(model: TargetModel, token_ids: list[int], cuts: list[int], capture: tuple[int, ...] = ()):
    """Feed a sequence in pieces; returns logits and features of every row."""
    cache = model.new_cache(1, 256)
    logits, features = [], []
    for first, last in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        output = model.forward(torch.tensor([token_ids[first:last]]), torch.tensor([first]), cache, capture)
        logits.append(model.logits(output.hidden[0]))
        features.append(output.features[0])
    return torch.cat(logits), torch.cat(features)


def test_logits_and_layer_outputs_equal_transformers(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    oracle = LlamaForCausalLM(LlamaConfig(**raw)).eval()
    oracle.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}, strict=False
    )
    oracle.tie_weights()
    token_ids = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids]), output_hidden_states=True)
    logits, features = feed(TargetModel.load(folder, "float32"), token_ids, [17], (0, 2))
    torch.testing.assert_close(logits, expected.logits[0], atol=2e-4, rtol=1e-4)
    # hidden_states[0] is the embedding's output, so the output of layer k is entry k + 1.
    layers = torch.cat([expected.hidden_states[1][0], expected.hidden_states[3][0]], dim=-1)
    torch.testing.assert_close(features, layers, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
def test_a_row_is_bitwise_the_same_alone_and_inside_a_block(folder: Path, width: int) -> None:
    """The load-bearing claim of greedy identity: verifying a block computes what decoding token by token computes."""
    model = TargetModel.load(folder)
    generator = torch.Generator().manual_seed(width)
    token_ids = torch.randint(0, VOCAB_SIZE, (60,), generator=generator).tolist()
    one_by_one, _ = feed(model, token_ids, list(range(20, 60)))
    in_blocks, _ = feed(model, token_ids, list(range(20, 60, width)))
    assert torch.equal(one_by_one[20:], in_blocks[20:])


def test_rejected_rows_leave_no_trace(folder: Path) -> None:
    model = TargetModel.load(folder)
    cache = model.new_cache(1, 256)
    token_ids = list(range(30))
    model.forward(torch.tensor([token_ids[:20]]), torch.tensor([0]), cache)
    model.forward(torch.tensor([[20, 99, 98, 97]]), torch.tensor([20]), cache)  # three drafts, all rejected
    after = model.forward(torch.tensor([token_ids[21:25]]), torch.tensor([21]), cache)
    expected, _ = feed(model, token_ids[:25], [20, 21])
    assert torch.equal(model.logits(after.hidden[0]), expected[21:])


def test_requests_of_a_batch_do_not_see_each_other(folder: Path) -> None:
    model = TargetModel.load(folder, "float32")
    prompts = [list(range(5)), list(range(50, 85)), list(range(100, 112))]
    cache = model.new_cache(3, 256)
    for slot, prompt in enumerate(prompts):
        model.forward(torch.tensor([prompt]), torch.tensor([0]), cache, slot=slot)
    together = model.forward(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([len(p) for p in prompts]), cache)
    for slot, (prompt, more) in enumerate(zip(prompts, [[1, 2], [3, 4], [5, 6]], strict=True)):
        alone, _ = feed(model, [*prompt, *more], [len(prompt)])
        torch.testing.assert_close(model.logits(together.hidden[slot]), alone[-2:], atol=1e-4, rtol=1e-4)


def test_a_moved_slot_goes_on_where_it_was(folder: Path) -> None:
    model = TargetModel.load(folder)
    cache = model.new_cache(3, 256)
    prompt = list(range(40, 70))
    model.forward(torch.tensor([prompt]), torch.tensor([0]), cache, slot=2)
    cache.move(2, 0, len(prompt))
    moved = model.forward(torch.tensor([[7]]), torch.tensor([len(prompt)]), cache, slot=0)
    expected, _ = feed(model, [*prompt, 7], [len(prompt)])
    assert torch.equal(model.logits(moved.hidden[0]), expected[-1:])


@pytest.mark.skipif(not has_packed_float16(), reason="this build of torch lacks FBGEMM's float16 linear")
def test_packed_weights_are_the_stored_float16_values(folder: Path) -> None:
    token_ids = list(range(30))
    packed, _ = feed(TargetModel.load(folder, "float16"), token_ids, [])
    plain, _ = feed(TargetModel.load(folder, "float32"), token_ids, [])
    torch.testing.assert_close(packed, plain, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", range(1, 40))
def test_padding_never_leaves_a_small_tile(rows: int) -> None:
    padded = padded_rows(rows)
    assert rows <= padded <= rows + 2
    assert padded % 6 not in (1, 2)


def write_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_it_cannot_run_is_refused_by_name(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    write_tiny_target(tmp_path)
    write_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=named):
        TargetModel.load(tmp_path)


def test_a_missing_tensor_or_file_is_named(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        TargetModel.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TargetModel.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        TargetModel.load(tmp_path)
