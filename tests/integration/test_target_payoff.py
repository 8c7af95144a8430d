"""The target's engine with drafting that comes and goes: it changes the speed, never the tokens."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from draft_engine_client.payoff import Payoff, PayoffSettings
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.state import ClientStats
from draft_model.target_model import TargetModel
from service.rounds import RoundLog, read_rounds
from service.target.distribution import TargetSampling
from service.target.engine import DraftSource, TargetEngine, TargetEngineLimits
from service.target.sequences import Chunk, GenerationRequest
from service.target.text import TargetTokenizer
from tests.support.tiny_target import VOCAB_SIZE, write_tiny_target

PROMPT = tuple(range(60, 100))
COUNT = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), seed=3)


@dataclass
class Useless:
    """Wrong drafts, late."""

    delay_s: float = 0.0
    stats: ClientStats = field(default_factory=ClientStats)
    rows: list[int] = field(default_factory=list)
    calls: int = 0

    def propose(self, steps: Sequence[SessionStep]) -> list[Drafts]:
        self.calls += 1
        time.sleep(self.delay_s)
        for step in steps:
            assert step.start == len(self.rows), "rows must follow each other"
            self.rows.extend(step.token_ids)
            assert len(step.features) == len(step.token_ids)
        wrong = [(step.anchor_token_id + 1) % VOCAB_SIZE for step in steps]
        return [Drafts((token,) * 3, (0.9, 0.5, 0.25), (0.9, 0.45, 0.1125)) for token in wrong]

    def finish(self, session_ids: Sequence[str]) -> None:
        pass


def generate(
    folder: Path, source: DraftSource | None, payoff: Payoff | None = None, rounds: RoundLog | None = None
) -> tuple[list[int], TargetEngine]:
    engine = TargetEngine(
        TargetModel.load(folder),
        TargetTokenizer(folder),
        source,
        target_layer_ids=(0, 2),
        limits=TargetEngineLimits(max_batch=2, max_context=400),
        payoff=payoff,
        rounds=rounds,
    )
    chunks: queue.Queue[Chunk] = queue.Queue()
    engine.start()
    try:
        engine.submit(GenerationRequest("a", PROMPT, COUNT, TargetSampling(temperature=0.0), num_draft_tokens=3), chunks.put)
        token_ids: list[int] = []
        while True:
            chunk = chunks.get(timeout=60)
            token_ids += chunk.token_ids
            if chunk.finish_reason is not None:
                return token_ids, engine
    finally:
        engine.stop()


class Toggling(Payoff):
    """On for three steps, off for four."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def wants_drafts(self, num_sequences: int, context: int) -> bool:
        self.asked += 1
        return self.asked % 7 < 3


def test_drafting_that_comes_and_goes_changes_no_token(folder: Path) -> None:
    plain, _ = generate(folder, None)
    source = Useless()
    drafted, engine = generate(folder, source, Toggling())
    assert drafted == plain
    assert 0 < source.calls < COUNT / 2
    assert source.rows == [*PROMPT, *plain][: len(source.rows)]
    assert len(source.rows) > COUNT
    assert engine.payoff is not None
    assert engine.payoff.drafted_steps == source.calls


def test_a_useless_drafter_is_dropped(folder: Path) -> None:
    source = Useless(delay_s=0.2)
    payoff = Payoff(PayoffSettings(plain_steps=2))
    drafted, engine = generate(folder, source, payoff)
    assert drafted == generate(folder, None)[0]
    stats = engine.payoff
    assert stats is not None
    assert source.calls == stats.drafted_steps <= 12
    assert stats.net_saved_seconds < 0.0
    assert stats.buckets_on == 0


def test_rounds_are_recorded_and_read_back(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rounds.jsonl"
    log = RoundLog(path)
    generate(folder, Useless(), rounds=log)
    log.close()
    rounds = read_rounds(path)
    assert len(rounds) > COUNT / 2
    assert {one.confidence for one in rounds} == {(0.9, 0.5, 0.25)}
    assert all(0 <= one.accepted <= 3 for one in rounds)
    assert json.loads(path.read_text().splitlines()[0]).keys() == {"confidence", "accepted"}
