"""The whole recipe of a drafter: self-play -> features -> draft vocabulary -> training -> checkpoint.

Every stage leaves its result in the work folder and is skipped when that is there, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from draft_model.backbone.mla_dense import MlaShape
from draft_model.errors import CheckpointError, TrainingError
from draft_model.target_model import TargetModel
from draft_model.training.dataset import BatchStream, CachedSequence, load_cached
from draft_model.training.evaluation import Acceptance
from draft_model.training.export import export_checkpoint
from draft_model.training.features import cache_features
from draft_model.training.initialisation import build_draft, start_from_bigram
from draft_model.training.losses import LossWeights
from draft_model.training.selfplay import ChatFormat, SelfPlaySettings, write_chats
from draft_model.training.sequences import load_sequences
from draft_model.training.trainer import Trainer, TrainerSettings
from draft_model.training.vocabulary import choose_draft_vocabulary, token_mass

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class TrainSettings(BaseModel):
    """Settings of `draft-engine train`. The defaults are those of the drafter that ships with the engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    work_dir: Path = Field(
        Path("build/train"), description="folder for sequences, features and checkpoints; resumed if it exists"
    )
    output: Path = Field(Path("build/drafter"), description="folder that receives config.json and model.safetensors")
    num_tokens: int = Field(400_000, ge=0, description="tokens of self-play to write")
    sequence_files: tuple[Path, ...] = Field((), description="more token sequences (safetensors) to train on")
    device: str = Field("cpu", description="device of the draft while training: cpu or cuda")
    threads: int = Field(0, ge=0, description="CPU threads; 0 = as many as there are cores")
    seed: int = Field(1, description="seed of self-play, initialisation and batches")
    target_layer_ids: tuple[int, ...] = Field((5, 13, 21, 28), description="target layers whose output the draft sees, from 0")
    num_layers: int = Field(2, gt=0, description="draft layers")
    intermediate_size: int = Field(1536, gt=0, description="width of the draft's MLP")
    num_heads: int = Field(9, gt=0, le=128, description="query heads of the draft")
    block_size: int = Field(3, gt=0, le=32, description="drafts per forward")
    draft_vocab_size: int = Field(8192, gt=0, description="tokens that the draft can propose")
    markov_rank: int = Field(64, gt=0, description="rank of the Markov head")
    rope_theta: float = Field(1000.0, gt=0, description="base of the draft's rotary embedding")
    steps: int = Field(4200, gt=0, description="training steps")
    learning_rate: float = Field(1.5e-3, gt=0, description="peak learning rate")
    sequences_per_step: int = Field(3, gt=0, description="sequences per step")
    anchors_per_sequence: int = Field(85, gt=0, description="blocks per sequence and step")
    user_turn_share: float = Field(0.0, ge=0, le=1, description="share of the blocks that lie in user turns")
    cross_entropy: float = Field(0.5, ge=0, description="weight of the cross-entropy loss")
    total_variation: float = Field(0.5, ge=0, description="weight of the total variation loss")
    confidence: float = Field(0.1, ge=0, description="weight of the confidence loss")
    slot_decay: float = Field(2.0, gt=0, description="slot k weighs exp(-k / slot_decay) in every loss")
    held_out: int = Field(64, gt=0, description="greedy answers kept for measuring acceptance")


def run(settings: TrainSettings, target_path: Path, report: Callable[[str], None]) -> Acceptance:
    """Run every stage that is still to do and write the checkpoint to `settings.output`.

    Args:
        settings: see TrainSettings
        target_path: HF folder of the target, with tokenizer.json
        report: receives one line per event
    Raises:
        CheckpointError: the target or a sequence file cannot be read.
        TrainingError: the device is not there, or a setting does not fit the target.
    """
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise TrainingError(f"device {settings.device!r} was asked for, but no CUDA device is available")
    target = TargetModel.load(target_path)
    if max(settings.target_layer_ids) >= target.config.num_layers - 1:
        last = target.config.num_layers - 1
        raise TrainingError(f"target_layer_ids {list(settings.target_layer_ids)}: the last layer, {last}, cannot be captured")
    if settings.draft_vocab_size > target.config.vocab_size:
        raise TrainingError(f"draft_vocab_size {settings.draft_vocab_size} exceeds the target's {target.config.vocab_size}")
    sequences = _cached_sequences(settings, target, target_path, report)
    train, held_out = _split(sequences, settings)
    report(f"{sum(len(one.token_ids) for one in train):,} tokens to train on, {len(held_out)} held-out answers")

    mass = token_mass(train, target.config.vocab_size)
    draft_to_target, target_to_draft, share = choose_draft_vocabulary(mass, settings.draft_vocab_size)
    report(f"draft vocabulary of {settings.draft_vocab_size:,} tokens holds {share:.2%} of the target's probability")
    shape = MlaShape(
        hidden_size=target.config.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        q_lora_rank=384,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        feature_width=len(settings.target_layer_ids) * target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=settings.draft_vocab_size,
        markov_rank=settings.markov_rank,
        rms_norm_eps=target.config.rms_norm_eps,
        rope_theta=settings.rope_theta,
    )
    # Token 0 is <|endoftext|> in SmolLM2 and never appears inside a chat.
    model = build_draft(shape, target, draft_to_target, mask_token_id=0, seed=settings.seed)
    report(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    trainer = Trainer(
        model.to(settings.device),
        BatchStream(
            train,
            block_size=settings.block_size,
            sequences_per_batch=settings.sequences_per_step,
            anchors_per_sequence=settings.anchors_per_sequence,
            user_turn_share=settings.user_turn_share,
            seed=settings.seed,
        ),
        held_out,
        target_to_draft=target_to_draft,
        draft_to_target=draft_to_target,
        block_size=settings.block_size,
        loss_weights=LossWeights(settings.cross_entropy, settings.total_variation, settings.confidence, settings.slot_decay),
        settings=TrainerSettings(settings.steps, settings.learning_rate),
        checkpoint=settings.work_dir / "trainer.pt",
    )
    if trainer.resume():
        report(f"going on from step {trainer.step}")
    else:
        start_from_bigram(model, target, draft_to_target, mass)
    acceptance = trainer.run(report)
    export_checkpoint(
        model,
        draft_to_target,
        settings.output,
        block_size=settings.block_size,
        target_layer_ids=settings.target_layer_ids,
        target_hidden_size=target.config.hidden_size,
        target_num_layers=target.config.num_layers,
        max_position_embeddings=target.config.max_position_embeddings,
    )
    (settings.work_dir / "history.json").write_text(json.dumps(trainer.history, indent=1))
    return acceptance


def _cached_sequences(
    settings: TrainSettings, target: TargetModel, target_path: Path, report: Callable[[str], None]
) -> list[CachedSequence]:
    try:
        tokenizer = Tokenizer.from_file(str(target_path / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 (the tokenizers package raises bare Exception)
        raise CheckpointError(f"{target_path / 'tokenizer.json'} cannot be read: {error}") from None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    report(f"self-play into {settings.work_dir / 'selfplay'}")
    shards = write_chats(
        target,
        ChatFormat(encode, SYSTEM_PROMPT),
        settings.work_dir / "selfplay",
        num_tokens=settings.num_tokens,
        target_layer_ids=settings.target_layer_ids,
        topk=32,
        settings=SelfPlaySettings(seed=settings.seed),
    )
    if settings.sequence_files:
        given = load_sequences(settings.sequence_files)
        report(f"features of {len(given)} given sequences")
        # Hundreds of rows at once multiply faster with float32 weights; the values are the same.
        wide = TargetModel.load(target_path, "float32")
        shards += cache_features(
            wide, given, settings.work_dir / "features", target_layer_ids=settings.target_layer_ids, topk=32
        )
    return load_cached(shards)


def _split(sequences: list[CachedSequence], settings: TrainSettings) -> tuple[list[CachedSequence], list[CachedSequence]]:
    """Hold out greedy answers; which ones depends on the seed alone."""
    order = list(range(len(sequences)))
    random.Random(settings.seed).shuffle(order)
    greedy = [index for index in order if sequences[index].temperature == 0]
    held_out = set(greedy[: settings.held_out])
    train = [sequences[index] for index in order if index not in held_out]
    return train, [sequences[index] for index in sorted(held_out)]
