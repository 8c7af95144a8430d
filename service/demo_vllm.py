"""The demo with vLLM: the same prompts from plain vLLM and from vLLM paired with a draft server, and acceptance counted twice.

vLLM counts what it verified. The draft server works out the same from the rows that come back to it. Both must agree.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import Field
from rich.console import Console
from rich.table import Table

from draft_engine_client.wire import ModelList
from service.figures import Figure, write_figures
from service.prompts import DEMO_PROMPTS
from service.settings import EngineSettings
from service.subprocesses import server_process
from service.target.weights import default_cache_dir, ensure_target
from service.vllm_args import vllm_flags
from service.vllm_process import SERVED_NAME, vllm_process

GOAL_ACCEPTANCE_LENGTH = 1.3
# On a CPU the servers share cores; a late draft would only make the comparison smaller.
_PATIENT = {"step_deadline_ms": 5_000.0}


class DemoVllmSettings(EngineSettings):
    """The demo with vLLM."""

    vllm_python: Path = Field(Path(".venv-vllm/bin/python"), description="Interpreter that has vLLM; `make vllm` installs one.")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="Folder for the embedded target's weights.")
    max_tokens: int = Field(96, ge=2, le=1024, description="New tokens for each prompt.")
    num_prompts: int = Field(len(DEMO_PROMPTS), ge=1, le=len(DEMO_PROMPTS), description="Prompts to run.")
    output: Path = Field(Path("build/demo_vllm.json"), description="File for the figures.")


@dataclass(frozen=True)
class Acceptance:
    """What one side counted.

    Args:
        blocks: verified
        accepted: tokens kept
        by_position: tokens kept at each place of the block
    """

    blocks: int
    accepted: int
    by_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens of a step: the accepted, and one more."""
        return 1.0 + self.accepted / max(self.blocks, 1)


def run_demo_vllm(settings: DemoVllmSettings, console: Console) -> bool:
    """Run the demo, print its table and write its figures; returns whether all is as it should be.

    Raises:
        StartupError: a server does not start.
    """
    target = ensure_target(settings.cache_dir, console.print)
    logs = settings.output.parent / "logs"
    base = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4"]
    console.print("starting plain vLLM (most of a minute)")
    with vllm_process(settings.vllm_python, target, base, logs / "demo-vllm-plain.log") as vllm:
        plain, plain_seconds = ask_all(vllm.url, settings)
    console.print("starting the draft server, and vLLM paired with it")
    with server_process(["serve", "--port", "0", "--target-model", str(target)], logs / "demo-vllm-draft.log") as draft:
        models = ModelList.model_validate_json(httpx.get(f"{draft.url}/v1/models", timeout=30.0).raise_for_status().content)
        flags = vllm_flags(models.data[0], draft.url, None, **_PATIENT)
        with vllm_process(settings.vllm_python, target, [*base, *flags], logs / "demo-vllm-drafted.log") as vllm:
            drafted, drafted_seconds = ask_all(vllm.url, settings)
            theirs = vllm_acceptance(read_metrics(vllm.url))
            ours_metrics = read_metrics(draft.url)
    ours = draft_engine_acceptance(ours_metrics)
    full = total(ours_metrics, "draft_engine_verified_drafts_total", 'coverage="full"') / max(ours.blocks, 1)
    figures = [
        Figure("identical", drafted == plain, "", True),
        Figure("sides_agree", theirs == ours, "", True),
        Figure("acceptance_length_vllm", theirs.length, "tokens/step", GOAL_ACCEPTANCE_LENGTH),
        Figure("acceptance_length_draft_engine", ours.length, "tokens/step", GOAL_ACCEPTANCE_LENGTH),
        Figure("full_coverage", full, "share", 1.0),
        Figure("prompts", len(plain), ""),
        Figure("seconds_plain", plain_seconds, "s"),
        Figure("seconds_draft", drafted_seconds, "s"),
    ]
    print_acceptance(theirs, ours, console)
    for figure in figures:
        goal = "" if figure.to_reach is None else f"  (to reach {figure.to_reach}: {'ok' if figure.ok else 'short'})"
        value = f"{figure.value:.3f}" if isinstance(figure.value, float) else figure.value
        console.print(f"  {figure.name:32} {value} {figure.unit}{goal}")
    write_figures(settings.output, figures, {"draft": models.data[0].model_dump(mode="json")})
    console.print(f"figures in {settings.output}, logs in {logs}. On a CPU the times say nothing about a GPU.")
    return all(figure.ok for figure in figures)


def ask_all(url: str, settings: DemoVllmSettings) -> tuple[list[tuple[int, ...]], float]:
    """Answer the prompts greedily, one after the other; returns the tokens of each, and the seconds of all."""
    answers = []
    began = time.perf_counter()
    for prompt in DEMO_PROMPTS[: settings.num_prompts]:
        body = {
            "model": SERVED_NAME,
            "messages": [{"role": "user", "content": prompt.text}],
            "temperature": 0.0,
            "max_tokens": settings.max_tokens,
            "return_token_ids": True,
        }
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600.0).raise_for_status().json()
        answers.append(tuple(reply["choices"][0]["token_ids"]))
    return answers, time.perf_counter() - began


def read_metrics(url: str) -> dict[str, float]:
    """A server's metrics, by name with labels."""
    lines = httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status().text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(metrics: Mapping[str, float], counter: str, label: str = "") -> int:
    """Sum of a counter over its labels, or over those that have `label`."""
    return int(sum(value for name, value in metrics.items() if name.partition("{")[0] == counter and label in name))


def vllm_acceptance(metrics: Mapping[str, float]) -> Acceptance:
    """What vLLM counted."""
    prefix = "vllm:spec_decode_num"
    return Acceptance(
        total(metrics, f"{prefix}_drafts_total"),
        total(metrics, f"{prefix}_accepted_tokens_total"),
        by_position(metrics, f"{prefix}_accepted_tokens_per_pos_total"),
    )


def draft_engine_acceptance(metrics: Mapping[str, float]) -> Acceptance:
    """What the draft server counted."""
    return Acceptance(
        total(metrics, "draft_engine_verified_drafts_total"),
        total(metrics, "draft_engine_accepted_tokens_total"),
        by_position(metrics, "draft_engine_accepted_tokens_per_position_total"),
    )


def by_position(metrics: Mapping[str, float], counter: str) -> tuple[int, ...]:
    """A counter with the label `position`, in order; places where nothing was ever kept are left out."""
    counts: dict[int, int] = {}
    for name, value in metrics.items():
        match = re.search(r'position="(\d+)"', name)
        if match is not None and name.partition("{")[0] == counter and value:
            counts[int(match.group(1))] = counts.get(int(match.group(1)), 0) + int(value)
    return tuple(counts[place] for place in sorted(counts))


def print_acceptance(theirs: Acceptance, ours: Acceptance, console: Console) -> None:
    """Print what both sides counted."""
    table = Table(title="acceptance, counted by both sides")
    for title in ("", "vLLM", "draft engine", ""):
        table.add_column(title, justify="left" if not title else "right")
    rows: list[tuple[str, Sequence[float]]] = [
        ("blocks verified", (theirs.blocks, ours.blocks)),
        ("tokens accepted", (theirs.accepted, ours.accepted)),
        ("acceptance length", (round(theirs.length, 3), round(ours.length, 3))),
    ]
    width = max(len(theirs.by_position), len(ours.by_position))
    for place in range(width):
        pair = [side.by_position[place] if place < len(side.by_position) else 0 for side in (theirs, ours)]
        rows.append((f"accepted at position {place + 1}", pair))
    for name, (left, right) in rows:
        table.add_row(name, str(left), str(right), "agree" if left == right else "DIFFER")
    console.print(table)
