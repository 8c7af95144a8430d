"""The recipe from end to end on a tiny target: it writes, trains, exports, and goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draft_model.drafter import ContextWrite, Drafter, DraftRequest
from draft_model.errors import TrainingError
from draft_model.target_model import TargetModel
from draft_model.training.dataset import load_cached
from draft_model.training.recipe import TrainSettings, run
from draft_model.training.sequences import Sequence, load_sequences, save_sequences
from tests.support.tiny_target import END_TOKEN_ID, write_tiny_target

STEPS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), seed=3)


def make_settings(folder: Path, **changes: object) -> TrainSettings:
    values = {
        "work_dir": folder / "work",
        "output": folder / "drafter",
        "num_tokens": 30_000,
        "target_layer_ids": (0, 2),
        "intermediate_size": 64,
        "num_heads": 2,
        "draft_vocab_size": 200,
        "markov_rank": 8,
        "steps": STEPS,
        "sequences_per_step": 2,
        "anchors_per_sequence": 8,
        "held_out": 2,
        "threads": 1,
    }
    return TrainSettings.model_validate(values | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target: Path) -> TrainSettings:
    settings = make_settings(tmp_path_factory.mktemp("train"))
    lines: list[str] = []
    acceptance = run(settings, target, lines.append)
    assert 1.0 <= acceptance.acceptance_length <= 1 + settings.block_size
    assert any("draft vocabulary of 200 tokens" in line for line in lines)
    return settings


def test_self_play_caches_what_the_target_says_of_its_own_chats(trained: TrainSettings, target: Path) -> None:
    model = TargetModel.load(target)
    chats = load_cached(sorted((trained.work_dir / "selfplay").glob("*.safetensors")))
    assert sum(len(chat.token_ids) for chat in chats) >= trained.num_tokens
    greedy = next(chat for chat in chats if chat.temperature == 0 and len(chat.token_ids) - chat.prompt_length > 20)
    ids = greedy.token_ids
    output = model.forward(ids[None], torch.tensor([0]), model.new_cache(1, len(ids)), trained.target_layer_ids)
    logits = model.logits(output.hidden[0])
    answer = slice(greedy.prompt_length - 1, len(ids) - 1)
    # Batches sum in another order, so a near tie may fall the other way; almost every token must be the argmax.
    agreement = (logits[answer].argmax(-1) == ids[greedy.prompt_length :]).float().mean()
    assert agreement > 0.95
    torch.testing.assert_close(greedy.features[:-1].float(), output.features[0, :-1], atol=0.05, rtol=0.05)
    assert END_TOKEN_ID not in ids[greedy.prompt_length : -1].tolist()


def test_the_export_loads_strictly_and_drafts_target_tokens(trained: TrainSettings, target: Path) -> None:
    drafter = Drafter.load(trained.output, target_path=target, kv_cache_memory=1 << 22, page_size=16)
    drafter.write_context([ContextWrite([1, 2], 0, 0, torch.randn(10, 96))])
    (proposal,) = drafter.draft([DraftRequest([1, 2], 10, 10, 7, trained.block_size)])
    assert len(proposal.token_ids) == trained.block_size
    assert all(0 <= token_id < 260 for token_id in proposal.token_ids)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(trained: TrainSettings, target: Path, tmp_path: Path) -> None:
    """Same checkpoint, bit for bit: the stages are kept, the optimizer's state is restored, the batches go on."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "selfplay").symlink_to(trained.work_dir / "selfplay")
    settings = make_settings(tmp_path)

    class StoppedError(Exception):
        pass

    from draft_model.training.trainer import Trainer

    step, count = Trainer._train_step, 0

    def failing(self: Trainer, batch: object) -> dict[str, float]:
        nonlocal count
        count += 1
        if count == 4:
            self.save()
            raise StoppedError
        return step(self, batch)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", failing)
        with pytest.raises(StoppedError):
            run(settings, target, lambda line: None)
    lines: list[str] = []
    run(settings, target, lines.append)
    assert "going on from step 3" in lines
    assert (settings.output / "model.safetensors").read_bytes() == (trained.output / "model.safetensors").read_bytes()


def test_given_sequences_are_trained_on_too(trained: TrainSettings, target: Path, tmp_path: Path) -> None:
    given = [Sequence(torch.randint(0, 256, (40,)), 10, heat) for heat in (0.0, 0.0, 0.6, 0.0, 0.0)]
    save_sequences(tmp_path / "given.safetensors", given)
    loaded = load_sequences([tmp_path / "given.safetensors"])
    assert all(torch.equal(ours.token_ids, theirs.token_ids) for ours, theirs in zip(given, loaded, strict=True))
    lines: list[str] = []
    run(make_settings(tmp_path, num_tokens=0, sequence_files=(tmp_path / "given.safetensors",)), target, lines.append)
    assert "features of 5 given sequences" in lines
    assert "120 tokens to train on, 2 held-out answers" in lines


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"target_layer_ids": (0, 3)}, "target_layer_ids"),
        ({"draft_vocab_size": 999}, "draft_vocab_size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(target: Path, tmp_path: Path, changes: dict[str, object], named: str) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(TrainingError, match=named):
        run(make_settings(tmp_path, **changes), target, lambda line: None)
