"""The command line, and the composition root: it alone builds settings -> drafter -> engine -> application.

    draft-engine serve | target | demo | train | inspect | doctor | bench | verify-lossless | canary | calibrate
    draft-engine vllm-args | demo-vllm

What a command needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_model.errors import DraftModelError
from service.errors import ServiceError, StartupError
from service.settings import (
    EngineSettings,
    ServeSettings,
    add_flags,
    current_environment,
    given_flags,
    load_settings,
    unknown_environment,
)

if TYPE_CHECKING:
    from rich.console import Console

    from draft_model.drafter import Drafter
    from service.metrics import EngineMetrics
    from service.serving import LoadedDraft

logger = logging.getLogger("service.cli")

DISTRIBUTION = "draft-engine"
# Idle threads of GNU OpenMP spin before they sleep. Target and drafter take turns on the same cores, so a thread that spins
# for milliseconds takes a core from the process whose turn it is; one that sleeps at once pays a wake-up at every product.
_SPIN_COUNT = "20000"


@dataclass(frozen=True)
class Command:
    """One subcommand: what `--help` says, where its settings class is, and what runs it and returns the exit code."""

    name: str
    summary: str
    description: str
    settings: Callable[[], type[Any]]
    run: Callable[[Any], int]
    positional: str | None = None
    """A setting that may also be given without its flag."""


def version() -> str:
    """The version of the installed engine."""
    return importlib.metadata.version(DISTRIBUTION)


# Commands ------------------------------------------------------------------------------------------------------------


def _serve(settings: ServeSettings) -> int:
    import secrets

    from service.app import create_app
    from service.clients import ClientTable
    from service.engine import DraftEngine
    from service.launch import serve
    from service.metrics import EngineMetrics
    from service.serving import Reloader, Serving
    from service.tracing import open_tracing

    metrics = EngineMetrics()
    first = _load_draft(settings, metrics)
    engine = DraftEngine(
        first.model,
        first.sessions,
        first.limits,
        metrics,
        on_worker_start=lambda: _set_threads(settings.threads),
        problems=first.problems,
    )
    clients = ClientTable(
        server_id=f"server-{secrets.token_hex(8)}",
        lease_seconds=settings.lease_seconds,
        disconnect_grace_seconds=settings.disconnect_grace_seconds,
        max_clients=settings.max_sessions,
    )
    serving = Serving(first)
    reloader = Reloader(
        engine=engine,
        clients=clients,
        serving=serving,
        metrics=metrics,
        load=lambda path: _load_draft(settings if path is None else settings.model_copy(update={"model": path}), metrics),
        model_root=settings.model_root,
    )
    app = create_app(
        engine=engine,
        clients=clients,
        serving=serving,
        metrics=metrics,
        version=version(),
        api_key=settings.api_key.get_secret_value() if settings.api_key else None,
        reloader=reloader,
        tracing=open_tracing(settings.otlp_endpoint, version()),
    )
    serve(app, settings, on_drain=engine.drain, on_reload=reloader.reload_soon)
    return 0


def _load_draft(settings: ServeSettings, metrics: EngineMetrics) -> LoadedDraft:
    """Load the draft model with its pool and its session table, and run its canary."""
    from attention.cache import PageAllocator
    from service.canary import canary_problems
    from service.facts import model_facts
    from service.loading import model_folders
    from service.prefix_cache import PrefixCache
    from service.serving import LoadedDraft
    from service.sessions import SessionTable
    from service.settings import EngineLimits

    drafter, tokenizer_hash = _load_drafter(settings)
    limits = EngineLimits.resolve(settings, drafter.config.max_position)
    allocator = PageAllocator(drafter.cache.num_pages)
    prefix_cache = None
    if settings.prefix_cache:
        prefix_cache = PrefixCache(allocator, page_size=drafter.page_size, fingerprint=drafter.fingerprint)
    sessions = SessionTable(
        allocator,
        page_size=drafter.page_size,
        limits=limits,
        copy_page=drafter.copy_page,
        prefix_cache=prefix_cache,
        on_evicted=lambda reason, count: metrics.evictions.labels(reason).inc(count),
    )
    facts = model_facts(drafter, settings.served_model_name or _shipped_or_folder_name(settings.model))
    folder, _ = model_folders(settings)
    problems = canary_problems(drafter, folder)
    for problem in problems:
        logger.warning("%s", problem)
    return LoadedDraft(drafter, sessions, facts, limits, tokenizer_hash, problems)


def _load_drafter(settings: ServeSettings) -> tuple[Drafter, str | None]:
    """Load the draft model and, where its target's folder has one, the hash of the tokenizer."""
    from attention.selector import AttentionSelectionError
    from service.loading import load_drafter, model_folders, tokenizer_folder
    from service.target.text import TargetTokenizer

    _set_threads(settings.threads)
    path, target_path = model_folders(settings)
    try:
        drafter = load_drafter(settings, path, target_path)
    except AttentionSelectionError as error:
        raise StartupError(str(error)) from error
    for layer, selection in enumerate(drafter.selections):
        logger.info("layer %d: %s", layer, selection)
    drafter.warm_up()
    tokenizer = tokenizer_folder(target_path)
    return drafter, None if tokenizer is None else TargetTokenizer(tokenizer).hash


def _target(settings: Any) -> int:
    from service.target.launch import serve_target

    _set_threads(settings.threads)
    serve_target(settings)
    return 0


def _demo(settings: Any) -> int:
    from service.demo import run_demo

    return 0 if run_demo(settings, _console()) else 1


def _train(settings: Any) -> int:
    from draft_model.training.recipe import run
    from service.target.weights import default_cache_dir, ensure_target

    target_path = ensure_target(default_cache_dir(), print)
    acceptance = run(settings, target_path, print)
    print(f"held-out acceptance length {acceptance.acceptance_length:.3f}; checkpoint in {settings.output}")  # noqa: T201
    return 0


def _inspect(settings: Any) -> int:
    from service.inspect import print_report
    from service.shipped import shipped_drafter

    return 0 if print_report(settings.model or shipped_drafter(), settings, _console()) else 1


def _doctor(settings: Any) -> int:
    from service.doctor import run_doctor

    _set_threads(settings.threads)
    return run_doctor(settings, _console())


def _bench(settings: Any) -> int:
    from service.bench import run_bench

    return run_bench(settings, _console())


def _verify_lossless(settings: Any) -> int:
    from service.lossless import run_lossless

    return run_lossless(settings, _console())


def _canary(settings: Any) -> int:
    from service.canary import run_canary

    _set_threads(settings.threads)
    return run_canary(settings, _console())


def _calibrate(settings: Any) -> int:
    from service.calibrate import run_calibrate

    return run_calibrate(settings, _console())


def _vllm_args(settings: Any) -> int:
    from service.vllm_args import run_vllm_args

    run_vllm_args(settings, _console())
    return 0


def _demo_vllm(settings: Any) -> int:
    from service.demo_vllm import run_demo_vllm

    return 0 if run_demo_vllm(settings, _console()) else 1


def _train_settings() -> type[Any]:
    from pydantic import BaseModel, create_model

    from draft_model.training.recipe import TrainSettings

    bases: tuple[type[BaseModel], ...] = (EngineSettings, TrainSettings)
    return create_model("TrainCommand", __base__=bases)


def _target_settings() -> type[EngineSettings]:
    from service.target.settings import TargetSettings

    return TargetSettings


def _demo_settings() -> type[EngineSettings]:
    from service.demo import DemoSettings

    return DemoSettings


def _inspect_settings() -> type[EngineSettings]:
    from service.inspect import InspectSettings

    return InspectSettings


def _doctor_settings() -> type[EngineSettings]:
    from service.doctor import DoctorSettings

    return DoctorSettings


def _bench_settings() -> type[EngineSettings]:
    from service.bench import BenchSettings

    return BenchSettings


def _canary_settings() -> type[EngineSettings]:
    from service.canary import CanarySettings

    return CanarySettings


def _calibrate_settings() -> type[EngineSettings]:
    from service.calibrate import CalibrateSettings

    return CalibrateSettings


def _vllm_args_settings() -> type[EngineSettings]:
    from service.vllm_args import VllmArgsSettings

    return VllmArgsSettings


def _demo_vllm_settings() -> type[EngineSettings]:
    from service.demo_vllm import DemoVllmSettings

    return DemoVllmSettings


def _lossless_settings() -> type[EngineSettings]:
    from service.lossless import LosslessSettings

    return LosslessSettings


COMMANDS = (
    Command(
        "serve",
        "run the draft server",
        "Hold a draft model and serve proposals over HTTP. Without --model: the drafter that ships, for the embedded target.",
        lambda: ServeSettings,
        _serve,
    ),
    Command(
        "target",
        "run the embedded target server",
        "An OpenAI-compatible server of SmolLM2-135M-Instruct that takes drafts from a draft server, and runs without one too.",
        _target_settings,
        _target,
    ),
    Command(
        "demo",
        "run both and compare with plain decoding",
        "Start a draft server and a target server, answer twelve prompts with and without drafts, and print what it was worth.",
        _demo_settings,
        _demo,
    ),
    Command(
        "train",
        "train a drafter for the embedded target",
        "Self-play, features, training and export. Every stage is resumed where an earlier run stopped.",
        _train_settings,
        _train,
    ),
    Command(
        "inspect",
        "describe a draft checkpoint",
        "Print what a checkpoint is, whether it loads, and which attention backend would serve it, with the reasons.",
        _inspect_settings,
        _inspect,
        positional="model",
    ),
    Command(
        "doctor",
        "check a deployment, and say whether drafting pays",
        "Look at what `serve` would do with the same flags, call a draft server, and work out from which acceptance length "
        "drafting pays. Exit codes: 0 all is well, 1 a check failed, 3 drafting would not pay.",
        _doctor_settings,
        _doctor,
    ),
    Command(
        "bench",
        "measure a drafter in process and over HTTP",
        "Draft the same blocks in process and through a draft server, and print latencies and what HTTP adds.",
        _bench_settings,
        _bench,
    ),
    Command(
        "verify-lossless",
        "test that drafting does not change what the target says",
        "Compare the first tokens of many answers with the target's exact distribution, for hostile drafters and all settings.",
        _lossless_settings,
        _verify_lossless,
    ),
    Command(
        "canary",
        "record what a drafter should draft, for `serve` to check itself by",
        "Let the target continue a prompt and keep its rows and tokens beside the draft checkpoint. `serve` drafts them again "
        "before it is ready, and warns when fewer than half as many drafts agree.",
        _canary_settings,
        _canary,
    ),
    Command(
        "calibrate",
        "fit a drafter's confidence to recorded rounds",
        "Fit a temperature for each position of a block to rounds that a target recorded, and store them with the checkpoint.",
        _calibrate_settings,
        _calibrate,
    ),
    Command(
        "vllm-args",
        "print the flags that pair a vLLM server with a draft server",
        "Ask a running draft server what it serves, and print the flags for `vllm serve`. The key of the draft server is not "
        "among them: vLLM reads DRAFT_ENGINE_API_KEY.",
        _vllm_args_settings,
        _vllm_args,
    ),
    Command(
        "demo-vllm",
        "pair a real vLLM server on this machine, and compare with plain vLLM",
        "Answer the demo's prompts with vLLM alone and with vLLM and a draft server, and print acceptance as both sides count "
        "it. Needs the environment of `make vllm`; takes a few minutes.",
        _demo_vllm_settings,
        _demo_vllm,
    ),
)


def _console() -> Console:
    """The terminal, or 120 columns where there is none, as in a log."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _shipped_or_folder_name(model: Path | None) -> str:
    from service.shipped import SHIPPED_NAME

    return SHIPPED_NAME if model is None else model.resolve().name


# The command line ----------------------------------------------------------------------------------------------------


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser. Only the command that is asked for gets its flags, since a settings class may take long to import."""
    parser = argparse.ArgumentParser(
        prog="draft-engine",
        description="A draft engine for speculative decoding: DSpark drafters over HTTP, verified losslessly by the target.",
        epilog="Start with `draft-engine demo`. Every flag is also an environment variable DRAFT_ENGINE_<FLAG>.",
    )
    parser.add_argument("--version", action="version", version=f"draft-engine {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    asked = next((argument for argument in argv if not argument.startswith("-")), None)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            allow_abbrev=False,
        )
        sub.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML file with these settings; flags and environment win."
        )
        if command.name == asked:
            add_flags(sub, command.settings())
        if command.positional is not None:
            sub.add_argument(
                command.positional, nargs="?", metavar="PATH", default=argparse.SUPPRESS, help="the same as its flag"
            )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    namespace = build_parser(arguments).parse_args(arguments)
    command = next(command for command in COMMANDS if command.name == namespace.command)
    try:
        settings = _load(command, namespace, current_environment())
        return command.run(settings)
    except (ServiceError, DraftModelError) as error:
        print(f"draft-engine {command.name}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130


def _load(command: Command, namespace: argparse.Namespace, environment: Mapping[str, str]) -> Any:
    from service.launch import configure_logging

    settings_class = command.settings()
    settings = load_settings(settings_class, given_flags(namespace, settings_class), config=namespace.config)
    configure_logging(settings.log_level, settings.log_format)
    for name in unknown_environment([settings_class, ServeSettings], environment):
        logger.warning("the environment variable %s is not a setting", name)
    return settings


if __name__ == "__main__":
    sys.exit(main())
