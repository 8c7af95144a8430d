"""`draft-engine verify-lossless`: a statistical proof that drafting does not change what the target says.

On a vocabulary of four tokens the target's distribution over its first three tokens is known exactly. The same tokens are
drawn many times through the engine's own parts, and their joint counts are compared with it by chi-square:

    draft   -> draft_model.sampling.BlockSampler, with the filters of the request and the report that travels back
    cut     -> service.engine.cut_by_survival, draft_model.scheduler
    verify  -> draft_engine_client.verification, on rows of service.target.distribution

over temperature, top_k, top_p, what is told of the draft distribution, the confidence cut and drafters from perfect to hostile.
Greedy decoding is compared token by token.

A proof by statistics is worth what it would notice. So known defects are planted, one at a time, and each must be caught.

With `--target-url` the same question is put to a running server, see `service.lossless_server`.

Shape symbols: B sequences of a case, V vocabulary, S drafts of a block, L tokens compared.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, SecretStr
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draft_engine_client.verification import Verdict, verify_greedy, verify_sampled
from draft_model.drafter import DraftProposal
from draft_model.sampling import BlockSampler, SamplingParams, draft_uniforms
from draft_model.scheduler import DelayedScheduler, StepTimes, best_prefixes, schedule_prefixes, survival_of
from service.engine import cut_by_survival
from service.settings import EngineSettings
from service.target.distribution import TargetSampling, target_distribution

NUM_COMPARED = 3
BLOCK_SIZE = 3
# Sequences that share a target step, where the cut looks at a whole batch.
BATCH = 4
FALSE_ALARM_RATE = 1e-3
# A planted defect must be seen far beyond chance.
DEFECT_P_VALUE = 1e-9
_DEFECT_SAMPLES = 1500
_MIN_EXPECTED = 8.0
_START = 0

Form = Literal["greedy", "unreported", "full", "top2"]
Cut = Literal["none", "threshold", "hardware", "delayed"]
FORMS: tuple[Form, ...] = ("greedy", "unreported", "full", "top2")
CUTS: tuple[Cut, ...] = ("none", "threshold", "hardware", "delayed")


class LosslessSettings(EngineSettings):
    """Testing that drafting loses nothing."""

    samples: int = Field(1000, ge=100, le=1_000_000, description="Answers drawn for each case.")
    every: int = Field(1, ge=1, description="Run each n-th case only.")
    seed: int = Field(0, ge=0, description="Of all noise; the same seed gives the same report.")
    output: Path = Field(Path("build/lossless.json"), description="File for the report.")
    target_url: str | None = Field(
        None, description="Test this running target server instead: its answers with drafts against those without."
    )
    target_api_key: SecretStr | None = Field(None, description="Key of that server.")
    num_draft_tokens: int = Field(3, ge=1, le=32, description="Drafts to verify in a step of that server.")


# Statistics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChiSquare:
    """A statistic with its degrees of freedom. `inf` means that something impossible was seen."""

    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        """Chance of a statistic at least as large when nothing is wrong."""
        if math.isinf(self.statistic):
            return 0.0
        if self.degrees == 0:
            return 1.0
        halves = torch.tensor([self.degrees / 2.0, self.statistic / 2.0], dtype=torch.float64)
        return float(torch.special.gammaincc(halves[0], halves[1]))

    def __add__(self, other: ChiSquare) -> ChiSquare:
        """The statistic of two independent comparisons together."""
        return ChiSquare(self.statistic + other.statistic, self.degrees + other.degrees)


def compare_with_exact(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> ChiSquare:
    """Compare counts with exact probabilities, both of one shape. Cells too rare for the statistic are pooled."""
    seen, expected = counts.ravel(), probs.ravel() * counts.sum()
    if seen[expected == 0.0].any():
        return ChiSquare(math.inf, 1)
    order = np.argsort(expected, kind="stable")
    seen, expected = seen[order], expected[order]
    # The rarest cells go together until what they expect is enough.
    pooled = int(np.searchsorted(np.cumsum(expected), _MIN_EXPECTED)) + 1
    pooled = max(pooled, int(np.searchsorted(expected, _MIN_EXPECTED)))
    bounds = [0, *range(pooled, len(expected))]
    seen, expected = np.add.reduceat(seen, bounds), np.add.reduceat(expected, bounds)
    return ChiSquare(float(((seen - expected) ** 2 / expected).sum()), len(bounds) - 1)


# The pair ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A target and a drafter that look one token back: row t of each table is about what follows token t.

    target_logits, draft_logits: [V, V] float32; confidence: [V, S], what the drafter says of slot k after token t.
    """

    target_logits: Tensor
    draft_logits: Tensor
    confidence: NDArray[np.float64]

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return len(self.target_logits)


def make_target_logits(vocab_size: int = 4) -> Tensor:
    """Make a target that prefers some tokens, nearly ties others, and never says one after another."""
    logits = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(20))
    logits[1, 3] = -math.inf
    return logits


def make_pairs(target_logits: Tensor) -> dict[str, Pair]:
    """Make a pair of the target with each drafter."""
    vocab_size = len(target_logits)
    finite = target_logits.clamp(min=-8.0)
    noise = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(21))
    tables = {
        "random": 2.0 * noise,
        "always wrong": -4.0 * finite,
        "always right": target_logits,
        "repeated": 30.0 * torch.eye(vocab_size),
        "biased": 2.0 * finite + noise,
    }
    confidence = np.random.default_rng(22).uniform(0.3, 1.0, (vocab_size, BLOCK_SIZE))
    return {name: Pair(target_logits, table, confidence) for name, table in tables.items()}


def appendix_a_pair() -> Pair:
    """The counterexample of the DSpark paper: the second draft's confidence tells what the first one is."""
    target = torch.tensor([[0.7, 0.3]]).log().repeat(2, 1)
    return Pair(target, torch.zeros(2, 2), np.array([[0.8, 0.9], [0.8, 0.0]]))


# Step times that make the cut take different lengths.
STEP_TIMES = StepTimes((4, 6, 8, 12, 16), (1.0, 1.1, 1.6, 2.0, 3.4))
APPENDIX_A_TIMES = StepTimes((1, 2, 3), (1.0, 1.0 / 0.5, 1.0 / 0.45))


# Decoding ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One setting of everything that may matter. `form` is how drafts are drawn and what is told of it:

    greedy: the likeliest, verified as certain; unreported: drawn, verified as certain; full: drawn, with the distribution;
    top2: drawn from the two likeliest, with the distribution.
    """

    drafter: str
    form: Form
    cut: Cut
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    num_drafts: int = BLOCK_SIZE


class Decoder:
    """Draws first tokens as the engine does. The planted defects are subclasses that do one thing wrong."""

    threshold = 0.5
    step_times = STEP_TIMES
    batch = BATCH

    def __init__(self, pair: Pair, case: Case, seed: int) -> None:
        self._pair, self._case, self._seed = pair, case, seed
        sampling = TargetSampling(case.temperature, case.top_k, case.top_p)
        self._target_probs = target_distribution(pair.target_logits, sampling).numpy()
        self._noise = np.random.default_rng([seed, 1])

    def exact(self) -> NDArray[np.float64]:
        """The target's distribution over its first L tokens, [V] * L."""
        table = self._target_probs
        joint: NDArray[np.float64] = table[_START]
        for _ in range(NUM_COMPARED - 1):
            joint = joint[..., None] * table
        return joint

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Draw the first L tokens of so many answers; returns how often each sequence came, [V] * L."""
        answers: list[list[int]] = [[] for _ in range(samples)]
        schedulers = [DelayedScheduler(self.step_times.steps_per_second) for _ in range(0, samples, self.batch)]
        for counter in itertools.count():
            batches = [
                [index for index in range(first, min(first + self.batch, samples)) if len(answers[index]) < NUM_COMPARED]
                for first in range(0, samples, self.batch)
            ]
            live = [index for batch in batches for index in batch]
            if not live:
                break
            anchors = [answers[index][-1] if answers[index] else _START for index in live]
            proposals = dict(zip(live, self.draft(live, anchors, counter), strict=True))
            for batch, scheduler in zip(batches, schedulers, strict=True):
                kept = self.cut([proposals[index] for index in batch], scheduler)
                for index, proposal in zip(batch, kept, strict=True):
                    anchor = answers[index][-1] if answers[index] else _START
                    verdict = self.verify(proposal, self._target_probs[[anchor, *proposal.token_ids]], index, counter)
                    answers[index] += [*proposal.token_ids[: verdict.num_accepted], verdict.next_token_id]
        counts = np.zeros((self._pair.vocab_size,) * NUM_COMPARED, np.int64)
        np.add.at(counts, tuple(np.array([answer[:NUM_COMPARED] for answer in answers]).T), 1)
        return counts

    def draft(self, indices: Sequence[int], anchors: Sequence[int], counter: int) -> list[DraftProposal]:
        """Draft one block for each sequence."""
        case, size = self._case, self._case.num_drafts
        if not size:
            return [DraftProposal([], [], [])] * len(indices)
        told = {"full": self._pair.vocab_size, "top2": 2}.get(case.form, 0)
        sampler = BlockSampler(
            [self._sampling(index) for index in indices],
            [counter] * len(indices),
            [told] * len(indices),
            size,
            torch.device("cpu"),
        )
        tokens = [torch.tensor(anchors)]
        for slot in range(size):
            tokens.append(sampler.choose(slot, self._pair.draft_logits[tokens[-1]]))
        before = torch.stack(tokens[:-1], dim=1).numpy()
        token_ids = torch.stack(tokens[1:], dim=1)
        confidence = self._pair.confidence[before, np.arange(size)]
        reported = self.report(sampler, torch.from_numpy(before))
        proposals = []
        for row in range(len(indices)):
            chances = confidence[row].tolist()
            ids, probs = (None, None) if reported is None else (reported[0][row], reported[1][row])
            proposals.append(DraftProposal(token_ids[row].tolist(), chances, survival_of(chances), ids, probs))
        return proposals

    def report(self, sampler: BlockSampler, before: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """What is told of the distributions [B, S, K] that drafts were drawn from; `before` [B, S] are the tokens before."""
        return sampler.reported()

    def cut(self, proposals: list[DraftProposal], scheduler: DelayedScheduler) -> list[DraftProposal]:
        """Shorten the blocks of one batch."""
        survival = [proposal.survival for proposal in proposals]
        if self._case.cut == "threshold":
            return [cut_by_survival(proposal, self.threshold) for proposal in proposals]
        if self._case.cut == "hardware":
            return _shortened(proposals, schedule_prefixes(survival, self.step_times.steps_per_second).lengths)
        if self._case.cut == "delayed":
            return _shortened(proposals, scheduler.schedule(survival))
        return proposals

    def verify(self, proposal: DraftProposal, rows: NDArray[np.float64], index: int, counter: int) -> Verdict:  # noqa: ARG002
        """Judge one block against the target's rows."""
        return self._verify(proposal, rows, self._noise)

    def _verify(self, proposal: DraftProposal, rows: NDArray[np.float64], noise: np.random.Generator) -> Verdict:
        if proposal.probs_ids is None or proposal.probs is None:
            return verify_sampled(proposal.token_ids, rows, noise)
        ids, probs = proposal.probs_ids.numpy(), proposal.probs.numpy()
        return verify_sampled(proposal.token_ids, rows, noise, draft_probs_ids=ids, draft_probs=probs)

    def _sampling(self, index: int) -> SamplingParams:
        if self._case.form == "greedy":
            return SamplingParams()
        return SamplingParams(self._case.temperature, self._case.top_k, self._case.top_p, self._draft_seed(index))

    def _draft_seed(self, index: int) -> int:
        return self._seed * 1_000_003 + index


def _shortened(proposals: Sequence[DraftProposal], lengths: Sequence[int]) -> list[DraftProposal]:
    return [
        DraftProposal(
            proposal.token_ids[:length],
            proposal.confidence[:length],
            proposal.survival[:length],
            None if proposal.probs_ids is None else proposal.probs_ids[:length],
            None if proposal.probs is None else proposal.probs[:length],
        )
        for proposal, length in zip(proposals, lengths, strict=True)
    ]


# Defects -------------------------------------------------------------------------------------------------------------


class ReportsUnfiltered(Decoder):
    """Tells the distribution as it was before temperature, top-k and top-p."""

    def report(self, sampler: BlockSampler, before: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """See the class."""
        probs = self._pair.draft_logits.softmax(-1)[before]
        return torch.arange(self._pair.vocab_size).expand(probs.shape).contiguous(), probs


class SharesNoise(Decoder):
    """Verifies with the numbers that the drafts were drawn with."""

    def verify(self, proposal: DraftProposal, rows: NDArray[np.float64], index: int, counter: int) -> Verdict:
        """See the class."""
        return self._verify(proposal, rows, _Replay(draft_uniforms(self._draft_seed(index), counter, 2 * BLOCK_SIZE)))


class SchedulesInRetrospect(Decoder):
    """Searches globally over the survival of the very drafts that it then cuts."""

    step_times = APPENDIX_A_TIMES
    batch = 1

    def cut(self, proposals: list[DraftProposal], scheduler: DelayedScheduler) -> list[DraftProposal]:  # noqa: ARG002
        """See the class."""
        survival = [proposal.survival for proposal in proposals]
        return _shortened(proposals, best_prefixes(survival, self.step_times.steps_per_second).lengths)


class StopsInTime(Decoder):
    """The same pair and step times with the early stop: the control of `SchedulesInRetrospect`."""

    step_times = APPENDIX_A_TIMES
    batch = 1


class AcceptsAll(Decoder):
    """Keeps every draft."""

    def verify(self, proposal: DraftProposal, rows: NDArray[np.float64], index: int, counter: int) -> Verdict:  # noqa: ARG002
        """See the class."""
        bonus = verify_sampled([], rows[-1:], self._noise)
        return Verdict(len(proposal.token_ids), bonus.next_token_id)


class RecoversFromTarget(Decoder):
    """Draws the token after a rejection from the target's distribution, not from what of it exceeds the draft's."""

    def verify(self, proposal: DraftProposal, rows: NDArray[np.float64], index: int, counter: int) -> Verdict:  # noqa: ARG002
        """See the class."""
        verdict = self._verify(proposal, rows, self._noise)
        if verdict.num_accepted == len(proposal.token_ids):
            return verdict
        redrawn = verify_sampled([], rows[verdict.num_accepted : verdict.num_accepted + 1], self._noise)
        return Verdict(verdict.num_accepted, redrawn.next_token_id)


class _Replay(np.random.Generator):
    """A generator that gives the numbers it was made with."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        super().__init__(np.random.PCG64(0))
        self._uniforms = iter(uniforms)

    def random(self, *args: Any, **more: Any) -> Any:  # noqa: ARG002
        return next(self._uniforms)


_FILTERED = Case("biased", "full", "none", 0.7, top_k=2, top_p=0.8)
DEFECTS: Mapping[str, tuple[type[Decoder], Case]] = {
    "draft probabilities before temperature": (ReportsUnfiltered, Case("always right", "full", "none", 0.5)),
    "draft probabilities before top-k and top-p": (ReportsUnfiltered, _FILTERED),
    "noise shared with the drafter": (SharesNoise, Case("random", "full", "none", 1.0)),
    "schedule in retrospect": (SchedulesInRetrospect, Case("appendix A", "full", "hardware", 1.0, num_drafts=2)),
    "every draft kept": (AcceptsAll, Case("biased", "full", "none", 1.0)),
    "recovered token from the target": (RecoversFromTarget, Case("biased", "full", "none", 1.0)),
}


# The whole run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One case and what came of it."""

    case: Case
    samples: int
    result: ChiSquare

    def as_json(self) -> dict[str, Any]:
        """The entry in the report."""
        return {
            **vars(self.case),
            "samples": self.samples,
            "chi_square": _finite(self.result.statistic),
            "degrees": self.result.degrees,
            "p_value": self.result.p_value,
        }


@dataclass
class Report:
    """Everything that was compared. `false_alarm_rate` bounds the chance that a correct engine fails the sampled part."""

    outcomes: list[Outcome] = field(default_factory=list)
    greedy_blocks: int = 0
    greedy_differences: int = 0
    defects: dict[str, Outcome] = field(default_factory=dict)
    false_alarm_rate: float = FALSE_ALARM_RATE

    @property
    def case_limit(self) -> float:
        """p-value below which a case fails: half of the false alarms are spread over the cases (Bonferroni)."""
        return self.false_alarm_rate / 2.0 / max(len(self.outcomes), 1)

    @property
    def pooled(self) -> ChiSquare:
        """All cases together, which sees a bias too small for any one of them. The other half of the false alarms is its."""
        return sum((outcome.result for outcome in self.outcomes), ChiSquare(0.0, 0))

    @property
    def failures(self) -> list[Outcome]:
        """Cases that differ."""
        return [outcome for outcome in self.outcomes if outcome.result.p_value < self.case_limit]

    @property
    def missed_defects(self) -> list[str]:
        """Planted defects that went unseen."""
        return [name for name, outcome in self.defects.items() if outcome.result.p_value > DEFECT_P_VALUE]

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and the test would have seen it."""
        is_same = not self.failures and self.pooled.p_value >= self.false_alarm_rate / 2.0
        return is_same and not self.greedy_differences and not self.missed_defects

    def as_json(self) -> dict[str, Any]:
        """The report file."""
        return {
            "ok": self.ok,
            "false_alarm_rate": self.false_alarm_rate,
            "case_limit": self.case_limit,
            "pooled_p_value": self.pooled.p_value,
            "greedy": {"blocks": self.greedy_blocks, "differences": self.greedy_differences},
            "defects": {name: outcome.as_json() for name, outcome in self.defects.items()},
            "cases": [outcome.as_json() for outcome in self.outcomes],
        }


def all_cases() -> list[Case]:
    """The whole grid, and plain decoding under each sampling."""
    samplings = list(itertools.product((0.7, 1.0), (0, 2), (1.0, 0.8)))
    drafters = list(make_pairs(make_target_logits()))
    cases = [Case("random", "unreported", "none", *sampling, num_drafts=0) for sampling in samplings]
    for sampling, form, cut, drafter in itertools.product(samplings, FORMS, CUTS, drafters):
        cases.append(Case(drafter, form, cut, *sampling))
    return cases


def verify_pairs(cases: Sequence[Case], samples: int, seed: int) -> Report:
    """Run the sampled cases, the greedy comparison and the planted defects."""
    pairs = make_pairs(make_target_logits()) | {"appendix A": appendix_a_pair()}
    cases = [*cases]
    report = Report()
    for number, case in enumerate(cases):
        report.outcomes.append(_run(Decoder, pairs[case.drafter], case, samples, seed * 100_003 + number))
    control = DEFECTS["schedule in retrospect"][1]
    report.outcomes.append(_run(StopsInTime, pairs["appendix A"], control, samples, seed * 100_003 + len(cases)))
    for number, (name, (decoder, case)) in enumerate(DEFECTS.items()):
        report.defects[name] = _run(decoder, pairs[case.drafter], case, _DEFECT_SAMPLES, seed * 100_003 + 50_000 + number)
    report.greedy_blocks, report.greedy_differences = _compare_greedy(pairs, seed)
    return report


def _run(decoder: type[Decoder], pair: Pair, case: Case, samples: int, seed: int) -> Outcome:
    one = decoder(pair, case, seed)
    return Outcome(case, samples, compare_with_exact(one.counts(samples), one.exact()))


def _compare_greedy(pairs: Mapping[str, Pair], seed: int) -> tuple[int, int]:
    """Decode greedily with blocks of every width; returns blocks verified and answers that differ from plain decoding."""
    blocks = differences = 0
    forms: tuple[Form, ...] = ("greedy", "unreported")
    for (name, pair), width, form in itertools.product(pairs.items(), range(1, 8), forms):
        choice = pair.target_logits.argmax(-1).tolist()
        case = Case(name, form, "none", 1.0, num_drafts=width)
        wide = Pair(pair.target_logits, pair.draft_logits, np.ones((pair.vocab_size, width)))
        decoder = Decoder(wide, case, seed)
        for start in range(pair.vocab_size):
            answer = [start]
            for counter in range(6):
                (drafted,) = decoder.draft([start], answer[-1:], counter)
                verdict = verify_greedy(drafted.token_ids, [choice[token] for token in [answer[-1], *drafted.token_ids]])
                answer += [*drafted.token_ids[: verdict.num_accepted], verdict.next_token_id]
                blocks += 1
            differences += any(choice[before] != after for before, after in itertools.pairwise(answer))
    return blocks, differences


def run_lossless(settings: LosslessSettings, console: Console) -> int:
    """Run the test, print the tables and write the report; returns the exit code.

    Raises:
        StartupError: the server at `target_url` cannot be tested.
    """
    if settings.target_url is not None:
        return _run_against_server(settings, settings.target_url, console)
    report = verify_pairs(all_cases()[:: settings.every], settings.samples, settings.seed)
    print_report(report, console)
    return _write(settings.output, report.as_json(), console)


def _run_against_server(settings: LosslessSettings, url: str, console: Console) -> int:
    import httpx

    from service.lossless_server import verify_server

    key = settings.target_api_key
    headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    with httpx.Client(base_url=url, headers=headers, timeout=600.0) as http:
        report = verify_server(http, samples=settings.samples, num_draft_tokens=settings.num_draft_tokens, seed=settings.seed)
    table = Table(title=f"first tokens of {url} with drafts against those without")
    for title in ("temperature", "top_k", "top_p", "samples", "drafts", "p"):
        table.add_column(title, justify="right")
    for outcome in report.outcomes:
        numbers = (outcome.temperature, outcome.top_k, outcome.top_p, outcome.samples, outcome.proposed)
        table.add_row(*map(str, numbers), f"{outcome.result.p_value:.2g}")
    console.print(table)
    console.print(f"greedy answers are {'the same' if report.is_greedy_same else 'DIFFERENT'}")
    console.print(f"A lossless server fails this with probability {FALSE_ALARM_RATE:g} at most.")
    return _write(settings.output, report.as_json(), console)


def _write(path: Path, document: dict[str, Any], console: Console) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"report in {path}")
    return 0 if document["ok"] else 1


def print_report(report: Report, console: Console) -> None:
    """Print the outcomes by drafter, form and cut, over all samplings; then defects and verdict."""
    table = Table(title="first three tokens with drafting against the target's exact distribution")
    for title in ("drafter", "form", "cut"):
        table.add_column(title)
    for title in ("cases", "samples", "smallest p", "p of all"):
        table.add_column(title, justify="right")
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in report.outcomes:
        case = outcome.case
        drafter = case.drafter if case.num_drafts else "none (plain)"
        groups.setdefault((drafter, case.form if case.num_drafts else "-", case.cut), []).append(outcome)
    for key, outcomes in sorted(groups.items()):
        together = sum((outcome.result for outcome in outcomes), ChiSquare(0.0, 0)).p_value
        smallest = min(outcome.result.p_value for outcome in outcomes)
        samples = sum(outcome.samples for outcome in outcomes)
        table.add_row(*key, str(len(outcomes)), str(samples), f"{smallest:.2g}", f"{together:.2g}")
    console.print(table)
    caught = Table(title="planted defects")
    for title in ("defect", "p", "seen"):
        caught.add_column(title)
    for name, outcome in report.defects.items():
        caught.add_row(name, f"{outcome.result.p_value:.2g}", "no" if name in report.missed_defects else "yes")
    console.print(caught)
    console.print(f"greedy: {report.greedy_blocks} blocks, {report.greedy_differences} answers differ from plain decoding")
    console.print(
        f"{len(report.outcomes)} cases, {len(report.failures)} differ (p below {report.case_limit:.1g}); "
        f"all together p = {report.pooled.p_value:.2g}. "
        f"A correct engine fails this with probability {report.false_alarm_rate:g} at most."
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
