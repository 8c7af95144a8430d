"""The demo: one target server and one draft server, real processes speaking HTTP, measured against plain decoding.

Both ways of decoding use the same target server: a request with `num_draft_tokens` 0 decodes plainly. Each prompt is answered
both ways, one right after the other, and which way comes first alternates, so that a noisy machine disturbs both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field
from rich.console import Console
from rich.table import Table

from service.errors import StartupError
from service.figures import Figure, write_figures
from service.prompts import DEMO_PROMPTS, Prompt
from service.settings import EngineSettings
from service.subprocesses import server_process
from service.target.weights import default_cache_dir, ensure_target

GOAL_ACCEPTANCE_LENGTH = 1.8
GOAL_SPEEDUP = 1.2


class DemoSettings(EngineSettings):
    """The demo."""

    model: Path | None = Field(None, description="Folder of the draft checkpoint. Default: the drafter that ships.")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="Folder for the embedded target's weights.")
    max_tokens: int = Field(128, ge=2, le=1024, description="New tokens for each prompt.")
    num_draft_tokens: int = Field(3, ge=1, le=32, description="Drafts to verify in a step.")
    num_prompts: int = Field(len(DEMO_PROMPTS), ge=1, le=len(DEMO_PROMPTS), description="Prompts to run.")
    output: Path = Field(Path("build/demo.json"), description="File for the figures.")


@dataclass(frozen=True)
class Run:
    """One answer, as its caller saw it. `draft` is the server's report on drafting."""

    text: str
    token_ids: tuple[int, ...]
    seconds: float
    draft: dict[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time of the request."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class Comparison:
    """One prompt, both ways."""

    prompt: Prompt
    plain: Run
    drafted: Run

    @property
    def is_identical(self) -> bool:
        """Whether both ways gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Run the demo, print its tables and write its figures; returns whether every output was identical.

    Raises:
        StartupError: a server does not start or a file is missing.
    """
    target_folder = ensure_target(settings.cache_dir, console.print)
    logs = settings.output.parent / "logs"
    draft_arguments = ["serve", "--port", "0", "--target-model", str(target_folder)]
    if settings.model is not None:
        draft_arguments += ["--model", str(settings.model)]
    console.print("starting the draft server and the target server")
    with server_process(draft_arguments, logs / "draft.log") as draft:
        target_arguments = ["target", "--port", "0", "--draft-url", draft.url, "--draft-when", "always"]
        target_arguments += ["--cache-dir", str(settings.cache_dir)]
        with server_process(target_arguments, logs / "target.log") as target, httpx.Client(timeout=600.0) as http:
            console.print(f"draft server  {draft.url}    target server  {target.url}")
            entry = http.get(f"{draft.url}/v1/models").raise_for_status().json()["data"][0]
            wait_for_drafts(http, target.url)
            prompts = DEMO_PROMPTS[: settings.num_prompts]
            comparisons = compare_prompts(http, target.url, prompts, settings, console.print)
    figures = make_figures(comparisons, entry["draft"])
    print_tables(comparisons, figures, console)
    write_figures(settings.output, figures, {"prompts": [describe(one) for one in comparisons], "draft": entry})
    console.print(f"figures in {settings.output}, logs in {logs}")
    return all(one.is_identical for one in comparisons)


def wait_for_drafts(http: httpx.Client, url: str, timeout_s: float = 30.0) -> None:
    """Generate a few tokens until the target has drafts to verify; this warms up both servers too.

    Raises:
        StartupError: the target got no drafts in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if ask(http, url, "Hello", max_tokens=16, num_draft_tokens=3).draft["proposed"]:
            ask(http, url, "Hello", max_tokens=16, num_draft_tokens=0)
            return
        time.sleep(0.2)
    raise StartupError(f"the target got no drafts within {timeout_s:.0f} s; see the logs")


def compare_prompts(
    http: httpx.Client, url: str, prompts: Sequence[Prompt], settings: DemoSettings, report: Callable[[str], None]
) -> list[Comparison]:
    """Answer every prompt both ways, in alternating order."""
    comparisons = []
    for index, prompt in enumerate(prompts):
        order = (0, settings.num_draft_tokens) if index % 2 == 0 else (settings.num_draft_tokens, 0)
        runs = {count: ask(http, url, prompt.text, max_tokens=settings.max_tokens, num_draft_tokens=count) for count in order}
        comparison = Comparison(prompt, plain=runs[0], drafted=runs[settings.num_draft_tokens])
        comparisons.append(comparison)
        same = "identical" if comparison.is_identical else "[red]DIFFERENT[/red]"
        rates = f"{comparison.plain.tokens_per_second:5.1f} -> {comparison.drafted.tokens_per_second:5.1f} tokens/s"
        report(f"  {index + 1:2}/{len(prompts)} {prompt.kind:8} {rates}  {same}")
    return comparisons


def ask(http: httpx.Client, url: str, text: str, *, max_tokens: int, num_draft_tokens: int) -> Run:
    """Answer one user turn greedily."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_completion_tokens": max_tokens,
        "num_draft_tokens": num_draft_tokens,
    }
    began = time.perf_counter()
    reply = http.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    seconds = time.perf_counter() - began
    choice = reply["choices"][0]
    return Run(choice["message"]["content"], tuple(choice["token_ids"]), seconds, reply["draft"])


def make_figures(comparisons: Sequence[Comparison], draft: dict[str, Any]) -> list[Figure]:
    """Sum up all prompts."""
    reports = [one.drafted.draft for one in comparisons]
    rounds = sum(report["rounds"] for report in reports)
    width = max(len(report["accepted_by_position"]) for report in reports)
    accepted = [
        sum(report["accepted_by_position"][place] for report in reports if place < len(report["accepted_by_position"]))
        for place in range(width)
    ]
    plain = rate(one.plain for one in comparisons)
    drafted = rate(one.drafted for one in comparisons)
    figures = [
        Figure("identical", all(one.is_identical for one in comparisons), "", True),
        Figure("acceptance_length", 1.0 + sum(accepted) / rounds, "tokens/round", GOAL_ACCEPTANCE_LENGTH),
        *(Figure(f"position_acceptance_{place + 1}", count / rounds, "share") for place, count in enumerate(accepted)),
        Figure("tokens_per_second_plain", plain, "tokens/s"),
        Figure("tokens_per_second_draft", drafted, "tokens/s"),
        Figure("speedup", drafted / plain, "x", GOAL_SPEEDUP),
        Figure("prompts", len(comparisons), ""),
        Figure("tokens", sum(len(one.plain.token_ids) for one in comparisons), "tokens"),
    ]
    plain_step = sum(one.plain.draft["milliseconds"]["decode"] for one in comparisons)
    plain_step /= sum(one.plain.draft["rounds"] for one in comparisons)
    figures.append(Figure("plain_step", plain_step, "ms"))
    for name, label in (("verify", "target_verify"), ("draft", "draft_forward"), ("http", "http"), ("other", "other")):
        total = sum(report["milliseconds"][name] for report in reports)
        figures.append(Figure(f"time_{label}", total / rounds, "ms/round"))
    figures.append(Figure("attention_backend", ", ".join(sorted(set(draft["attention_backends"]))), ""))
    figures.append(Figure("decode_path", ", ".join(sorted(set(draft["decode_paths"]))), ""))
    return figures


def rate(runs: Iterable[Run]) -> float:
    """Tokens per second over several runs."""
    listed = list(runs)
    return sum(len(run.token_ids) for run in listed) / sum(run.seconds for run in listed)


def print_tables(comparisons: Sequence[Comparison], figures: Sequence[Figure], console: Console) -> None:
    """Print one line for each prompt, then the figures."""
    by_prompt = Table(title="plain decoding against drafting, the same target server")
    for title in ("prompt", "tokens", "plain tok/s", "draft tok/s", "speedup", "acceptance", "output"):
        by_prompt.add_column(title, justify="left" if title in ("prompt", "output") else "right")
    for one in comparisons:
        by_prompt.add_row(
            f"{one.prompt.kind}: {one.prompt.text[:32]}",
            str(len(one.drafted.token_ids)),
            f"{one.plain.tokens_per_second:.1f}",
            f"{one.drafted.tokens_per_second:.1f}",
            f"{one.drafted.tokens_per_second / one.plain.tokens_per_second:.2f}x",
            f"{one.drafted.draft['acceptance_length']:.2f}",
            "identical" if one.is_identical else "DIFFERENT",
        )
    console.print(by_prompt)
    summary = Table()
    for title in ("figure", "value", "to reach", ""):
        summary.add_column(title, justify="left" if title == "figure" else "right")
    for figure in figures:
        value = f"{figure.value:.3f}" if isinstance(figure.value, float) else str(figure.value)
        goal = "" if figure.to_reach is None else str(figure.to_reach)
        summary.add_row(
            figure.name, f"{value} {figure.unit}", goal, "" if figure.to_reach is None else "ok" if figure.ok else "short"
        )
    console.print(summary)


def describe(comparison: Comparison) -> dict[str, Any]:
    """One prompt in the figures file."""
    return {
        "kind": comparison.prompt.kind,
        "prompt": comparison.prompt.text,
        "text": comparison.drafted.text,
        "tokens": len(comparison.drafted.token_ids),
        "identical": comparison.is_identical,
        "tokens_per_second_plain": round(comparison.plain.tokens_per_second, 2),
        "tokens_per_second_draft": round(comparison.drafted.tokens_per_second, 2),
        "draft": comparison.drafted.draft,
    }
