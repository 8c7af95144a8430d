"""`draft-engine doctor`: is everything in place, and would drafting pay?

    settings -> versions -> draft model, loaded and tried -> target -> attention, proven -> server, called and timed -> benefit

It takes the flags, the environment and the `--config` file of `serve`, and looks at what `serve` would do with them. Every
check is made whatever the ones before it found. Exit codes: 0 all is well, 1 a check failed, 3 all is well and drafting would
not pay with the numbers given.

What drafting is worth follows from four numbers: T a plain step of the target, V a step that verifies a block, D a draft call,
A the tokens that a block commits. Plain decoding takes T for a token and drafting (V + D) / A, so it pays where
A > (V + D) / T.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, ValidationError
from rich.console import Console
from rich.table import Table

from attention.selector import AttentionSelectionError
from draft_engine_client import codec
from draft_engine_client.codec import TensorView
from draft_engine_client.wire import PROTOCOL_VERSION, ClientWelcome, ModelList, ProposeReply, ProposeRequest, SessionUpdate
from draft_model.config import DraftConfig
from draft_model.drafter import ContextWrite, Drafter, DraftRequest
from draft_model.errors import DraftModelError
from draft_model.formats import load_config
from draft_model.pairing import target_differences
from service.errors import ServiceError, StartupError
from service.inspect import describe
from service.loading import load_drafter, model_folders, tokenizer_folder
from service.settings import Bytes, ServeSettings, unknown_environment
from service.target.settings import TargetSettings
from service.target.text import TargetTokenizer

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_DOES_NOT_PAY = 0, 1, 3

_PACKAGES = ("draft-engine", "draft-engine-client", "torch", "numpy", "pydantic", "uvicorn", "httpx", "safetensors")
_ROUNDS = 20
_CONTEXT_ROWS = 64
_SHOWN_ACCEPTANCE = (1.5, 2.0, 3.0)
_ENOUGH_BLOCKS = 100


class DoctorSettings(ServeSettings):
    """Looking at a deployment. The settings of `serve`, and what to try with them."""

    load_model: bool = Field(True, description="Load the draft model and draft a block; without, only its files are read.")
    draft_url: str | None = Field(
        None, description="Draft server to call. Default: the one at --host and --port, where one answers."
    )
    upload_size: Bytes = Field(4 * 2**20, description="Size of the upload that measures the bandwidth to the server.")
    target_step_ms: float | None = Field(None, gt=0, description="A plain decoding step of your target, in milliseconds.")
    verify_step_ms: float | None = Field(
        None, gt=0, description="A step of your target that verifies a block. Default: as long as a plain one."
    )
    acceptance_length: float | None = Field(
        None, ge=1, description="Tokens that a block commits, 1 + accepted drafts. Default: what the server has seen."
    )


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIP = "skipped"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class DraftCost:
    """Milliseconds of one draft call, and where the number is from."""

    milliseconds: float
    source: str


@dataclass(frozen=True)
class Benefit:
    """What drafting is worth: T, V and D in milliseconds; see the module docstring."""

    plain_ms: float
    verify_ms: float
    draft_ms: float

    @property
    def break_even(self) -> float:
        """The acceptance length from which drafting pays."""
        return (self.verify_ms + self.draft_ms) / self.plain_ms

    def speedup(self, acceptance_length: float) -> float:
        """How many times faster than plain decoding."""
        return acceptance_length * self.plain_ms / (self.verify_ms + self.draft_ms)


def run_doctor(settings: DoctorSettings, console: Console) -> int:
    """Make every check, print the report and return the exit code."""
    doctor = Doctor(settings)
    table = Table(show_header=True)
    for title in ("check", "verdict", "found"):
        table.add_column(title, overflow="fold")
    checks = list(doctor.checks())
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red", Verdict.SKIP: "dim"}
    for check in checks:
        table.add_row(check.name, f"[{colours[check.verdict]}]{check.verdict}[/]", _plain(check.text))
    console.print(table)
    does_pay = print_benefit(settings, doctor.draft_cost, doctor.seen_acceptance, console)
    failed = [check.name for check in checks if check.verdict is Verdict.FAIL]
    if failed:
        console.print(f"failed: {', '.join(failed)}")
        return EXIT_FAILED
    return EXIT_OK if does_pay else EXIT_DOES_NOT_PAY


def print_benefit(settings: DoctorSettings, cost: DraftCost | None, seen_acceptance: float | None, console: Console) -> bool:
    """Print what drafting would be worth; returns whether it pays, or True where the numbers do not say."""
    if cost is None:
        console.print("benefit: unknown, since no draft call could be timed")
        return True
    console.print(f"a draft call takes {cost.milliseconds:.2f} ms ({cost.source})")
    if settings.target_step_ms is None:
        pays = ", ".join(f"{cost.milliseconds / (a - 1):.1f} ms at acceptance length {a:g}" for a in _SHOWN_ACCEPTANCE)
        console.print(f"it pays for targets whose plain step takes longer than {pays}; --target-step-ms names yours")
        return True
    benefit = Benefit(settings.target_step_ms, settings.verify_step_ms or settings.target_step_ms, cost.milliseconds)
    console.print(
        f"break-even: acceptance length {benefit.break_even:.2f} "
        f"(plain step {benefit.plain_ms:g} ms, verifying step {benefit.verify_ms:g} ms)"
    )
    acceptance = settings.acceptance_length or seen_acceptance
    if acceptance is None:
        shown = ", ".join(f"{benefit.speedup(a):.2f}x at {a:g}" for a in _SHOWN_ACCEPTANCE)
        console.print(f"expected: {shown}; --acceptance-length names yours")
        return True
    source = "given" if settings.acceptance_length else "seen by the server"
    speedup = benefit.speedup(acceptance)
    verdict = "drafting pays" if speedup > 1 else "drafting does not pay"
    console.print(f"expected: {speedup:.2f}x at acceptance length {acceptance:.2f} ({source}); {verdict}")
    return speedup > 1


class Doctor:
    """The checks, and what they learn.

    Attributes:
        draft_cost: of one call, from the server where one answers, else from the model in this process
        seen_acceptance: acceptance length that the server has learnt from its targets
    """

    def __init__(self, settings: DoctorSettings) -> None:
        self._settings = settings
        self._config: DraftConfig | None = None
        self._fingerprint: str | None = None
        self._target_path: Path | None = None
        self.draft_cost: DraftCost | None = None
        self.seen_acceptance: float | None = None

    def checks(self) -> Iterator[Check]:
        """Make the checks, one after the other."""
        parts: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
            ("settings", self._check_settings),
            ("versions", self._check_versions),
            ("draft model", self._check_model),
            ("target", self._check_target),
            ("server", self._check_server),
        )
        for name, part in parts:
            try:
                yield from part()
            except (ServiceError, DraftModelError, OSError) as error:
                yield Check(name, Verdict.FAIL, str(error))

    def _check_settings(self) -> Iterator[Check]:
        settings = self._settings
        given = sorted(settings.model_fields_set - {"target_step_ms", "verify_step_ms", "acceptance_length"})
        shown = (f"{name}={getattr(settings, name)}" for name in given)
        yield Check("settings", Verdict.OK, ", ".join(shown) or "all at their defaults")
        unknown = unknown_environment([DoctorSettings, TargetSettings], os.environ)
        if unknown:
            yield Check("environment", Verdict.WARN, f"not a setting: {', '.join(unknown)}")
        if settings.api_key is not None and settings.ssl_certfile is None and settings.host not in ("127.0.0.1", "localhost"):
            text = f"host {settings.host} without a certificate: key and hidden states travel in the clear"
            yield Check("encryption", Verdict.WARN, text)

    def _check_versions(self) -> Iterator[Check]:
        versions = (f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
        yield Check("versions", Verdict.OK, f"Python {platform.python_version()}, {', '.join(versions)}")
        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
            yield Check("devices", Verdict.OK, f"CUDA {torch.version.cuda}: {', '.join(names)}")
        else:
            yield Check("devices", Verdict.OK, f"CPU, {torch.get_num_threads()} threads; no CUDA device")

    def _check_model(self) -> Iterator[Check]:
        settings = self._settings
        path, self._target_path = model_folders(settings)
        self._config = config = load_config(path)
        facts = describe(config)
        yield Check("draft model", Verdict.OK, f"{path}: {facts['format']}; {facts['backbone']}; {facts['block']}")
        if not settings.load_model:
            yield Check("attention", Verdict.SKIP, "--no-load-model")
            return
        row_bytes = config.num_layers * config.kv_row_width * 4
        pages = 3 + (_CONTEXT_ROWS + config.draft_block_size) // settings.page_size
        try:
            drafter = load_drafter(settings, path, self._target_path, kv_cache_memory=pages * settings.page_size * row_bytes)
        except AttentionSelectionError as error:
            yield Check("attention", Verdict.FAIL, str(error))
            return
        yield from self._check_drafter(drafter)

    def _check_drafter(self, drafter: Drafter) -> Iterator[Check]:
        settings, config = self._settings, drafter.config
        self._fingerprint = drafter.fingerprint
        row_bytes = config.num_layers * config.kv_row_width * drafter.dtype.itemsize
        rows = settings.kv_cache_memory // (row_bytes * settings.page_size) * settings.page_size
        yield Check("fingerprint", Verdict.OK, drafter.fingerprint)
        yield Check(
            "context pool",
            Verdict.OK if rows >= settings.page_size * 2 else Verdict.FAIL,
            f"{settings.kv_cache_memory / 2**20:.0f} MiB hold {rows:,} context rows of {row_bytes:,} bytes",
        )
        for selection in dict.fromkeys(drafter.selections):
            rejected = " | ".join(map(str, selection.rejected)) or "none"
            verdict = Verdict.WARN if selection.fused_reasons else Verdict.OK
            yield Check("attention", verdict, f"{selection}, proven against the reference; rejected: {rejected}")
        milliseconds = _time_drafter(drafter)
        self.draft_cost = DraftCost(milliseconds, "in this process, without HTTP")
        yield Check("draft", Verdict.OK, f"one block in {milliseconds:.2f} ms on {drafter.device}, {drafter.dtype}")

    def _check_target(self) -> Iterator[Check]:
        if self._config is None or self._target_path is None:
            yield Check("target", Verdict.SKIP, "no --target-model to compare the drafter with")
            return
        try:
            config = json.loads((self._target_path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise StartupError(f"{self._target_path}/config.json: {error}") from error
        differences = target_differences(self._config, config)
        if differences:
            yield Check("target", Verdict.FAIL, f"{self._target_path}: {'; '.join(differences)}")
            return
        folder = tokenizer_folder(self._target_path)
        tokenizer = "no tokenizer.json" if folder is None else f"tokenizer {TargetTokenizer(folder).hash[:16]}"
        yield Check("target", Verdict.OK, f"{self._target_path}: fits the drafter; {tokenizer}")

    def _check_server(self) -> Iterator[Check]:
        settings = self._settings
        url = settings.draft_url or _own_url(settings)
        headers = {"authorization": f"Bearer {settings.api_key.get_secret_value()}"} if settings.api_key else {}
        # A server's own certificate is fine on its own machine; one that was named is verified.
        verify = settings.draft_url is not None
        with httpx.Client(base_url=url, headers=headers, timeout=30.0, verify=verify) as http:
            try:
                health = http.get("/health")
            except httpx.TransportError as error:
                if settings.draft_url is None:
                    yield Check("server", Verdict.SKIP, f"none answers at {url}; --draft-url names one")
                else:
                    yield Check("server", Verdict.FAIL, f"{url}: {error}")
                return
            try:
                yield _health_check(url, health)
                yield from self._check_protocol(http)
            except (httpx.HTTPError, ValidationError, codec.CodecError, KeyError, ValueError) as error:
                yield Check("server", Verdict.FAIL, f"{url}: {_reason(error)}")

    def _check_protocol(self, http: httpx.Client) -> Iterator[Check]:
        version = _get(http, "/version").json()
        if version["protocol_version"] != PROTOCOL_VERSION:
            text = f"it speaks version {version['protocol_version']}, this is {PROTOCOL_VERSION}"
            yield Check("protocol", Verdict.FAIL, text)
            return
        entry = ModelList.model_validate_json(_get(http, "/v1/models").content).data[0]
        served = f"{entry.id}, engine {version['version']}, {', '.join(sorted(set(entry.draft.decode_paths)))} decode"
        is_other = self._fingerprint is not None and entry.draft.fingerprint != self._fingerprint
        verdict = Verdict.WARN if is_other else Verdict.OK
        other = f"; its model {entry.draft.fingerprint[:16]} is not the one above" if is_other else ""
        yield Check("served model", verdict, served + other)
        probe = ServerProbe(http)
        timing = probe.time_calls()
        self.draft_cost = DraftCost(timing.call_ms, "over HTTP, one session with one new row")
        self.seen_acceptance = acceptance_of(_get(http, "/metrics").text)
        yield Check("round trip", Verdict.OK, f"{timing.round_trip_ms:.2f} ms for an empty request")
        yield Check("draft call", Verdict.OK, f"{timing.call_ms:.2f} ms, of it {timing.server_ms:.2f} ms in the server")
        try:
            rate, size = probe.measure_bandwidth(self._settings.upload_size)
        except SessionRefusedError as error:
            yield Check("bandwidth", Verdict.WARN, f"not measured, since the server refused the rows: {error}")
        else:
            yield Check("bandwidth", Verdict.OK, f"{rate / 2**20:.0f} MiB/s with {size / 2**20:.1f} MiB of context rows")
        finally:
            probe.close()


@dataclass(frozen=True)
class CallTiming:
    """Median milliseconds: an empty request, a draft call, and what of that the server spent."""

    round_trip_ms: float
    call_ms: float
    server_ms: float


class SessionRefusedError(ValueError):
    """The server refused a session of the probe, as a full one does."""


class ServerProbe:
    """Calls a draft server as a target would. Every update rewinds, so that the server learns no acceptance from it."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        entry = ModelList.model_validate_json(_get(http, "/v1/models").content).data[0]
        facts = self._facts = entry.draft
        target = {
            "vocab_size": facts.vocab_size,
            "hidden_size": facts.target_hidden_size,
            "num_layers": facts.target_num_layers or max(facts.target_layer_ids) + 2,
            "target_layer_ids": facts.target_layer_ids,
        }
        hello = http.post("/v1/clients", json={"client_name": "draft-engine doctor", "target": target})
        self._welcome = ClientWelcome.model_validate_json(_good(hello).content)
        self._seq = 0
        self._noise = np.random.default_rng(0)

    def time_calls(self) -> CallTiming:
        """Time empty requests, and draft calls of one session."""
        trips, calls, inside = [], [], []
        limits = self._welcome.limits
        context = max(1, min(_CONTEXT_ROWS, limits.max_rows_per_call, limits.max_context - self._facts.draft_block_size))
        self._propose("doctor-steps", 0, context, self._facts.max_draft_tokens)
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            _get(self._http, "/version")
            trips.append((time.perf_counter() - began) * 1000.0)
            call_ms, server_ms, _ = self._propose("doctor-steps", context - 1, 1, self._facts.max_draft_tokens)
            calls.append(call_ms)
            inside.append(server_ms)
        return CallTiming(statistics.median(trips), statistics.median(calls), statistics.median(inside))

    def measure_bandwidth(self, size: int) -> tuple[float, int]:
        """Upload context rows of about `size` bytes; returns bytes per second and the size.

        Raises:
            SessionRefusedError: the server has no room for them.
        """
        limits, row_bytes = self._welcome.limits, self._facts.feature_width * 2
        rows = max(1, min(size, limits.max_body_bytes // 2) // row_bytes)
        rows = min(rows, limits.max_rows_per_call, limits.max_context - 1)
        call_ms, server_ms, sent = self._propose("doctor-upload", 0, rows, 0)
        return sent / max(1e-6, (call_ms - server_ms) / 1000.0), sent

    def close(self) -> None:
        """Close what was opened."""
        for session_id in ("doctor-steps", "doctor-upload"):
            self._http.delete(f"/v1/sessions/{session_id}", params={"client_id": self._welcome.client_id})

    def _propose(self, session_id: str, start: int, num_rows: int, num_draft_tokens: int) -> tuple[float, float, int]:
        """One call with rows of noise; returns its milliseconds, those inside the server, and the bytes sent."""
        self._seq += 1
        update = SessionUpdate(
            session_id=session_id,
            seq=self._seq,
            start=start,
            num_rows=num_rows,
            anchor_token_id=1,
            num_draft_tokens=num_draft_tokens,
        )
        request = ProposeRequest(client_id=self._welcome.client_id, sessions=(update,))
        rows = self._noise.standard_normal((num_rows, self._facts.feature_width), np.float32).astype(np.float16)
        tensors = {
            "token_ids": TensorView.from_array(np.ones(num_rows, np.int32)),
            "features": TensorView.from_array(rows),
        }
        body = codec.encode(request.model_dump_json().encode(), tensors)
        began = time.perf_counter()
        answer = _good(self._http.post("/v1/propose", content=body, headers={"content-type": codec.MEDIA_TYPE}))
        took_ms = (time.perf_counter() - began) * 1000.0
        reply = ProposeReply.model_validate_json(bytes(codec.decode(answer.content).message))
        error = reply.sessions[0].error
        if error is not None:
            raise SessionRefusedError(f"{error.code}: {error.message}")
        return took_ms, reply.timings.total_ms, len(body)


def acceptance_of(metrics: str) -> float | None:
    """The acceptance length in a draft server's metrics, or None while too few blocks were verified."""
    totals = {"draft_engine_verified_drafts_total": 0.0, "draft_engine_accepted_tokens_total": 0.0}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    verified, accepted = totals.values()
    return 1.0 + accepted / verified if verified >= _ENOUGH_BLOCKS else None


def _time_drafter(drafter: Drafter) -> float:
    """Median milliseconds of a block after one new row."""
    config, size = drafter.config, drafter.page_size
    pages = list(range(1, 2 + (_CONTEXT_ROWS + config.draft_block_size) // size))
    rows = torch.zeros(_CONTEXT_ROWS, config.feature_width, dtype=drafter.dtype, device=drafter.device)
    drafter.write_context([ContextWrite(pages, 0, 0, rows)])
    times = []
    for _ in range(_ROUNDS // 2):
        began = time.perf_counter()
        drafter.write_context([ContextWrite(pages, _CONTEXT_ROWS - 1, _CONTEXT_ROWS - 1, rows[:1])])
        drafter.draft([DraftRequest(pages, _CONTEXT_ROWS, _CONTEXT_ROWS, 1, config.max_draft_tokens)])
        times.append((time.perf_counter() - began) * 1000.0)
    return statistics.median(times[1:])


def _own_url(settings: ServeSettings) -> str:
    """Where `serve` listens with these settings, seen from this machine."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"{'https' if settings.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _health_check(url: str, health: httpx.Response) -> Check:
    state = health.json()
    text = f"{url}: {state.get('status', health.status_code)}"
    if health.status_code != 200:
        return Check("server", Verdict.FAIL, text)
    warnings = state.get("warnings", ())
    return Check("server", Verdict.WARN, f"{text}; {'; '.join(warnings)}") if warnings else Check("server", Verdict.OK, text)


def _get(http: httpx.Client, path: str) -> httpx.Response:
    return _good(http.get(path))


def _good(answer: httpx.Response) -> httpx.Response:
    """Raises ValueError with the server's own words for an answer that is none."""
    if answer.is_success:
        return answer
    try:
        error = answer.json()["error"]
        raise ValueError(f"{answer.request.url.path}: {answer.status_code} {error['code']}: {error['message']}")
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{answer.request.url.path}: {answer.status_code}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"an answer does not fit protocol version {PROTOCOL_VERSION}"
    return str(error) or type(error).__name__


def _plain(text: str) -> str:
    """Text for a table of rich, in which square brackets would be markup."""
    return text.replace("[", r"\[")
