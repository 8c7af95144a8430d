"""The target's engine never lets a drafter change its output, whatever the drafter is."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.state import ClientStats
from draft_model.target_model import TargetModel
from service.errors import CapacityError, UnavailableError
from service.target.distribution import TargetSampling, target_distribution
from service.target.engine import TargetEngine, TargetEngineLimits
from service.target.sequences import Chunk, GenerationRequest
from service.target.text import TargetTokenizer
from tests.support.tiny_target import END_TOKEN_ID, VOCAB_SIZE, write_tiny_target

LAYERS = (0, 2)
GREEDY = TargetSampling(temperature=0.0)
PROMPTS = [[5, 9, 200, 31], list(range(60, 100)), [7] * 11, list(range(20, 150)), [250, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> TargetModel:
    return TargetModel.load(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TargetTokenizer:
    return TargetTokenizer(folder)


def decode_plainly(model: TargetModel, prompt: Sequence[int], count: int) -> list[int]:
    """The oracle: one token at a time, no engine."""
    cache = model.new_cache(1, 512)
    output = model.forward(torch.tensor([prompt]), torch.tensor([0]), cache)
    tokens = [*prompt, int(model.logits(output.hidden[0, -1:]).argmax())]
    while len(tokens) < len(prompt) + count:
        output = model.forward(torch.tensor([tokens[-1:]]), torch.tensor([len(tokens) - 1]), cache)
        tokens.append(int(model.logits(output.hidden[0]).argmax()))
    return tokens[len(prompt) :]


@dataclass
class Source:
    """A drafter that the test decides. `draft(step, tokens so far)` gives the drafts of one session."""

    stats: ClientStats = field(default_factory=ClientStats)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)

    def propose(self, steps: Sequence[SessionStep]) -> list[Drafts]:
        answers = []
        for step in steps:
            known = self.tokens.setdefault(step.session_id, [])
            assert step.start == len(known), "rows must follow each other"
            assert len(step.token_ids) == len(step.features)
            known.extend(step.token_ids)
            answers.append(self.draft(step, [*known, step.anchor_token_id]))
        return answers

    def draft(self, step: SessionStep, tokens: list[int]) -> Drafts:
        return Drafts()

    def finish(self, session_ids: Sequence[str]) -> None:
        self.finished.extend(session_ids)


@dataclass
class Oracle(Source):
    """Drafts what the target will say, spoilt from the n-th draft on."""

    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    right: int = 99

    def draft(self, step: SessionStep, tokens: list[int]) -> Drafts:
        for prompt, answer in self.answers.items():
            whole = [*prompt, *answer]
            if whole[: len(tokens)] == tokens:
                drafts = whole[len(tokens) : len(tokens) + step.num_draft_tokens]
                return Drafts(tuple(token if k < self.right else (token + 1) % VOCAB_SIZE for k, token in enumerate(drafts)))
        return Drafts()


@dataclass
class Gambler(Source):
    """Random tokens, random counts, sometimes nothing."""

    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def draft(self, step: SessionStep, tokens: list[int]) -> Drafts:
        return Drafts(tuple(self.dice.randrange(VOCAB_SIZE) for _ in range(self.dice.randint(0, step.num_draft_tokens))))


@dataclass
class Parrot(Source):
    """The anchor again and again."""

    def draft(self, step: SessionStep, tokens: list[int]) -> Drafts:
        return Drafts((step.anchor_token_id,) * step.num_draft_tokens)


class Collector:
    """The chunks of one request, waited for."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._queue: queue.Queue[Chunk] = queue.Queue()

    def emit(self, chunk: Chunk) -> None:
        self._queue.put(chunk)

    def wait(self) -> Chunk:
        while True:
            self.chunks.append(self._queue.get(timeout=60))
            if self.chunks[-1].finish_reason is not None:
                return self.chunks[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


@pytest.fixture
def start(model: TargetModel, tokenizer: TargetTokenizer):
    engines = []

    def make(source: Source | None, **limits: int) -> TargetEngine:
        chosen = TargetEngineLimits(**({"max_batch": 4, "max_context": 400, "prefill_chunk": 32} | limits))
        engine = TargetEngine(model, tokenizer, source, target_layer_ids=LAYERS, limits=chosen)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
        assert not engine.is_alive


def submit(engine: TargetEngine, name: str, prompt: Sequence[int], **fields: Any) -> Collector:
    collector = Collector()
    plain = GenerationRequest(name, tuple(prompt), max_tokens=40, sampling=GREEDY, num_draft_tokens=4)
    request = replace(plain, **fields)
    engine.submit(request, collector.emit)
    return collector


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("right", [0, 1, 2, 99])
def test_one_request_gives_the_plain_tokens_at_every_width(start, model: TargetModel, width: int, right: int) -> None:
    prompt = PROMPTS[1]
    expected = decode_plainly(model, prompt, 40)
    engine = start(Oracle(answers={tuple(prompt): expected}, right=right))
    answer = submit(engine, "a", prompt, num_draft_tokens=width)
    counts = answer.wait().counts
    assert answer.token_ids == expected
    assert counts is not None
    if right == 99:
        assert counts.acceptance_length > 0.7 * (1 + width)
    assert max(counts.accepted_at, default=0) <= counts.drafted


@pytest.mark.parametrize("source", [Gambler, Parrot, Source, lambda: None], ids=["gambler", "parrot", "silent", "none"])
def test_a_batch_gives_the_plain_tokens_whatever_is_drafted(start, model: TargetModel, source) -> None:
    engine = start(source(), max_batch=3)
    answers = [submit(engine, f"r{index}", prompt, max_tokens=25 + 5 * index) for index, prompt in enumerate(PROMPTS)]
    for index, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert answer.wait().finish_reason == "length"
        assert answer.token_ids == decode_plainly(model, prompt, 25 + 5 * index)


def test_the_rows_sent_are_the_layers_outputs_of_the_committed_tokens(start, model: TargetModel) -> None:
    @dataclass
    class Recorder(Gambler):
        rows: list[np.ndarray] = field(default_factory=list)

        def propose(self, steps: Sequence[SessionStep]) -> list[Drafts]:
            self.rows.extend(step.features for step in steps)
            return super().propose(steps)

    recorder = Recorder()
    answer = submit(start(recorder), "a", PROMPTS[3])
    answer.wait()
    tokens = recorder.tokens["a"]
    assert tokens == [*PROMPTS[3], *answer.token_ids][: len(tokens)]
    assert len(tokens) > len(PROMPTS[3]) + 20
    expected = model.forward(torch.tensor([tokens]), torch.tensor([0]), model.new_cache(1, 512), LAYERS).features[0]
    np.testing.assert_allclose(np.concatenate(recorder.rows), expected.numpy(), atol=0.02, rtol=0.01)
    assert recorder.finished == ["a"]


def test_no_draft_reaches_past_the_last_token(start, model: TargetModel) -> None:
    expected = decode_plainly(model, PROMPTS[0], 6)
    source = Oracle(answers={tuple(PROMPTS[0]): decode_plainly(model, PROMPTS[0], 20)})
    answer = submit(start(source), "a", PROMPTS[0], max_tokens=6, num_draft_tokens=8)
    assert answer.wait().finish_reason == "length"
    assert answer.token_ids == expected


def test_a_stop_token_inside_a_block_ends_the_answer_there(start, model: TargetModel) -> None:
    plain = decode_plainly(model, PROMPTS[2], 30)
    stop = plain[9]
    engine = start(Oracle(answers={tuple(PROMPTS[2]): plain}))
    answer = submit(engine, "a", PROMPTS[2], stop_token_ids=frozenset({stop, END_TOKEN_ID}))
    last = answer.wait()
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert answer.token_ids == plain[: plain.index(stop)]


def test_a_stop_string_is_found_across_tokens_and_is_not_shown(start, model: TargetModel, tokenizer: TargetTokenizer) -> None:
    plain = decode_plainly(model, PROMPTS[4], 30)
    text = tokenizer.decode(plain)
    stop = text[12:15]
    answer = submit(start(Oracle(answers={tuple(PROMPTS[4]): plain})), "a", PROMPTS[4], stop=(stop,))
    last = answer.wait()
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert answer.text == text[: text.index(stop)]


def test_a_cancelled_request_frees_its_slot_and_leaves_the_others_alone(start, model: TargetModel) -> None:
    engine = start(Parrot(), max_batch=2)
    stays = submit(engine, "stays", PROMPTS[0], max_tokens=120)
    leaves = Collector()
    sequence = engine.submit(GenerationRequest("leaves", tuple(PROMPTS[1]), 300, GREEDY, num_draft_tokens=2), leaves.emit)
    waits = submit(engine, "waits", PROMPTS[2], max_tokens=10)
    engine.cancel(sequence)
    waits.wait()
    stays.wait()
    assert waits.token_ids == decode_plainly(model, PROMPTS[2], 10)
    assert stays.token_ids == decode_plainly(model, PROMPTS[0], 120)
    assert engine.num_running == 0


def test_prompts_are_fed_in_the_order_they_came(start) -> None:
    """More requests than slots: the first to come is the first to get its first token, so nobody starves."""
    engine = start(Parrot(), max_batch=4, max_waiting=64)
    order: list[int] = []

    def collect(number: int, collector: Collector) -> None:
        def emit(chunk: Chunk) -> None:
            if not collector.chunks:
                order.append(number)
            collector.chunks.append(chunk)
            collector.emit(chunk)

        request = GenerationRequest(f"o{number}", tuple(PROMPTS[1]), 3 + number % 5, GREEDY, num_draft_tokens=2)
        engine.submit(request, emit)

    collectors = [Collector() for _ in range(40)]
    for number, collector in enumerate(collectors):
        collect(number, collector)
    for collector in collectors:
        collector.wait()
    assert order == sorted(order)


def test_random_arrivals_and_departures_keep_every_answer_plain(start, model: TargetModel) -> None:
    dice = random.Random(7)
    source = Gambler()
    engine = start(source, max_batch=3, max_waiting=64)
    expected = {index: decode_plainly(model, prompt, 60) for index, prompt in enumerate(PROMPTS)}
    kept, cancelled = [], 0
    for number in range(30):
        which, count = dice.randrange(len(PROMPTS)), dice.randint(1, 60)
        collector = Collector()
        request = GenerationRequest(f"q{number}", tuple(PROMPTS[which]), count, GREEDY, num_draft_tokens=dice.randint(0, 5))
        sequence = engine.submit(request, collector.emit)
        if dice.random() < 0.25:
            threading.Timer(dice.random() * 0.2, engine.cancel, (sequence,)).start()
            cancelled += 1
        else:
            kept.append((which, count, collector))
    for which, count, collector in kept:
        collector.wait()
        assert collector.token_ids == expected[which][:count]
    assert cancelled
    assert len(set(source.finished)) == len(source.finished)


def test_a_full_queue_refuses_and_a_stopped_engine_aborts(start) -> None:
    gate = threading.Event()

    class Slow(Source):
        def propose(self, steps: Sequence[SessionStep]) -> list[Drafts]:
            gate.wait(20)
            return super().propose(steps)

    engine = start(Slow(), max_batch=1, max_waiting=1)
    running = submit(engine, "running", PROMPTS[0], max_tokens=300)
    while engine.num_running == 0 or engine.num_waiting:
        pass
    waiting = submit(engine, "waiting", PROMPTS[0])
    with pytest.raises(CapacityError, match="limit"):
        submit(engine, "refused", PROMPTS[0])
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    gate.set()
    assert running.wait().finish_reason == "abort"
    assert waiting.wait().finish_reason == "abort"
    stopper.join()
    with pytest.raises(UnavailableError):
        submit(engine, "late", PROMPTS[0])


@pytest.mark.parametrize("source", [Gambler, Parrot], ids=["gambler", "parrot"])
def test_sampled_tokens_follow_the_targets_distribution_whatever_is_drafted(start, model: TargetModel, source) -> None:
    """Chi-square over pairs of tokens; the bound is passed by chance once in 10,000 runs, and the seeds are fixed."""
    sampling = TargetSampling(temperature=1.2, top_k=4)
    prompt = PROMPTS[0]
    output = model.forward(torch.tensor([prompt]), torch.tensor([0]), model.new_cache(1, 64))
    first = target_distribution(model.logits(output.hidden[0, -1:]), sampling)[0]
    expected: dict[tuple[int, int], float] = {}
    for token in first.nonzero()[:, 0].tolist():
        output = model.forward(torch.tensor([[*prompt, token]]), torch.tensor([0]), model.new_cache(1, 64))
        second = target_distribution(model.logits(output.hidden[0, -1:]), sampling)[0]
        for follower in second.nonzero()[:, 0].tolist():
            expected[token, follower] = float(first[token] * second[follower])
    runs = 1200
    engine = start(source(), max_batch=32, max_waiting=runs)
    answers = [
        submit(engine, f"s{seed}", prompt, max_tokens=3, sampling=TargetSampling(1.2, 4, seed=seed)) for seed in range(runs)
    ]
    seen: dict[tuple[int, int], int] = {}
    for answer in answers:
        answer.wait()
        pair = (answer.token_ids[0], answer.token_ids[1])
        seen[pair] = seen.get(pair, 0) + 1
    assert seen.keys() <= expected.keys()
    statistic = sum((seen.get(pair, 0) - runs * share) ** 2 / (runs * share) for pair, share in expected.items())
    degrees = len(expected) - 1
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
