"""The status page at `/` of the draft server: what it serves, whether its drafts are kept, how busy it is, what is wrong.

One HTML document, made anew for each look: no script, no asset, nothing from elsewhere. It shows what `/metrics`, `/health`
and `/v1/models` tell, for a person with a browser. Nothing on it holds a prompt, a token or a session id.

Rates are taken between two looks of the last minute, and over the whole run at the first one.
"""

from __future__ import annotations

import html
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from draft_engine_client.wire import Limits, ModelFacts
from service.metrics import EngineMetrics

REFRESH_SECONDS = 5
WINDOW_SECONDS = 60.0
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_SHORTEST_WINDOW = 1.0
_LOOKS_KEPT = 64

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .2rem 0; } table { border-collapse: collapse; width: 100%; }
td, th { padding: .25rem .6rem .25rem 0; text-align: left; border-bottom: 1px solid #dde2e9; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.state { padding: .1rem .6rem; border-radius: .6rem; color: #fff; background: #23794a; }
.draining { background: #9a6700; } .failed { background: #b3261e; }
.warning { background: #fff4d6; border-left: 4px solid #9a6700; padding: .4rem .8rem; margin: .4rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.tile { border: 1px solid #dde2e9; border-radius: .4rem; padding: .5rem .7rem; }
.tile b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
meter { width: 12rem; height: .8rem; } footer { margin: 2rem 0; color: #566273; font-size: .85rem; }
@media (prefers-color-scheme: dark) {
  body { background: #12161c; color: #dfe5ee; } td, th, .tile { border-color: #2c3541; } .warning { background: #3a2f10; }
}
"""


@dataclass(frozen=True)
class ServerState:
    """What the page is told of the engine besides its metrics."""

    status: str
    warnings: Sequence[str]
    version: str
    server_id: str
    started_at: float


class Numbers:
    """The values of all metrics at one time, summed over labels on request."""

    def __init__(self, metrics: EngineMetrics, at: float) -> None:
        self.at = at
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in metrics.registry.collect():
            for sample in family.samples:
                self._samples.setdefault(sample.name.removeprefix("draft_engine_"), []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name whose labels have these values."""
        found = self._samples.get(name, ())
        return sum(value for own, value in found if all(own.get(key) == wanted for key, wanted in labels.items()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label, those that are not zero."""
        sums: dict[str, float] = {}
        for labels, value in self._samples.get(name, ()):
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return {key: value for key, value in sums.items() if value}


class StatusPage:
    """Renders the page, and remembers earlier looks for the rates.

    Args:
        metrics: of the engine
        facts: of the draft model
        limits: that clients are told
        read_state: gives the engine's state when a page is made
        clock: seconds since the epoch
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        facts: ModelFacts,
        limits: Limits,
        read_state: Callable[[], ServerState],
        clock: Callable[[], float],
    ) -> None:
        self._metrics, self._facts, self._limits = metrics, facts, limits
        self._read_state, self._clock = read_state, clock
        self._looks: deque[Numbers] = deque(maxlen=_LOOKS_KEPT)

    def describe(self, facts: ModelFacts, limits: Limits) -> None:
        """Show another drafter from now on."""
        self._facts, self._limits = facts, limits

    def render(self) -> str:
        """The document as it is now."""
        state, now = self._read_state(), Numbers(self._metrics, self._clock())
        while self._looks and now.at - self._looks[0].at > WINDOW_SECONDS:
            self._looks.popleft()
        before = self._looks[0] if self._looks and now.at - self._looks[0].at >= _SHORTEST_WINDOW else None
        if not self._looks or now.at - self._looks[-1].at >= _SHORTEST_WINDOW:
            self._looks.append(now)
        facts = self._facts
        parts = [
            f"<h1>{_text(facts.model_id)} <span class='state {_text(state.status)}'>{_text(state.status)}</span></h1>",
            f"<p>draft-engine {_text(state.version)}, up {_duration(now.at - state.started_at)}</p>",
            *(f"<p class='warning'>{_text(warning)}</p>" for warning in state.warnings),
            _tiles(now, before, state.started_at),
            _acceptance(now, facts.max_draft_tokens),
            _times(now),
            _table("Draft model", _model_rows(facts)),
            _table("Faults", _fault_rows(now)),
            _table("Limits", [(name.replace("_", " "), f"{value:,}") for name, value in self._limits]),
            "<footer><a href='/docs'>API</a> · <a href='/metrics'>metrics</a> · <a href='/health'>health</a> · "
            f"process {_text(state.server_id)} · the page renews itself every {REFRESH_SECONDS} s</footer>",
        ]
        return (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
            f"<meta http-equiv='refresh' content='{REFRESH_SECONDS}'>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<title>{_text(facts.model_id)}: {_text(state.status)}</title><style>{_STYLE}</style></head>"
            f"<body>{''.join(parts)}</body></html>\n"
        )


def acceptance_length(numbers: Numbers, **labels: str) -> float | None:
    """Tokens that a verified block commits, or None before there is one."""
    verified = numbers.total("verified_drafts_total", **labels)
    return 1.0 + numbers.total("accepted_tokens_total", **labels) / verified if verified else None


def _tiles(now: Numbers, before: Numbers | None, started_at: float) -> str:
    seconds = max(_SHORTEST_WINDOW, now.at - (before.at if before else started_at))

    def rate(name: str) -> str:
        return f"{(now.total(name) - (before.total(name) if before else 0.0)) / seconds:,.1f}"

    length = acceptance_length(now)
    tiles = (
        ("acceptance length", "-" if length is None else f"{length:.2f}"),
        ("blocks a second", rate("drafts_total")),
        ("draft tokens a second", rate("draft_tokens_total")),
        ("context rows a second", rate("rows_received_total")),
        ("targets", f"{now.total('clients'):,.0f}"),
        ("sessions", f"{now.total('sessions'):,.0f}"),
        ("waiting calls", f"{now.total('waiting_calls'):,.0f}"),
        ("free pages", f"{now.total('free_pages'):,.0f}"),
    )
    over = f"the last {seconds:.0f} s" if before else "the whole run"
    boxes = "".join(f"<div class='tile'>{name}<b>{value}</b></div>" for name, value in tiles)
    return f"<div class='tiles'>{boxes}</div><p>Rates are over {over}.</p>"


def _acceptance(now: Numbers, max_draft_tokens: int) -> str:
    verified = now.total("verified_drafts_total")
    if not verified:
        return "<h2>Acceptance</h2><p>No target has told yet what became of a draft.</p>"
    rows = []
    for place in range(max_draft_tokens):
        share = now.total("accepted_tokens_per_position_total", position=str(place)) / verified
        rows.append((str(place), f"<meter min='0' max='1' value='{share:.4f}'></meter>", f"{share:.1%}"))
    parts = [_raw_table(f"Acceptance by position, of {verified:,.0f} verified blocks", ("position", "", "kept"), rows)]
    for label in ("context", "coverage"):
        shown = [
            (_text(value), f"{count:,.0f}", f"{acceptance_length(now, **{label: value}) or 1.0:.2f}")
            for value, count in sorted(now.by("verified_drafts_total", label).items(), key=_bucket_order)
        ]
        parts.append(_raw_table(f"Acceptance length by {label}", (label, "blocks", "acceptance length"), shown))
    return "".join(parts)


def _bucket_order(item: tuple[str, float]) -> tuple[int, float]:
    """Buckets of context from short to long; those of coverage have no numbers and keep their order."""
    name = item[0]
    number = re.search(r"\d+", name)
    return (0 if name.startswith("<") else 1, float(number.group()) if number else 0.0)


def _times(now: Numbers) -> str:
    rows = []
    for name, meaning in (
        ("queue", "from arrival to admission"),
        ("context", "writing the context rows of a step"),
        ("forward", "draft forward of a step"),
        ("call", "from arrival to reply"),
    ):
        count = now.total(f"{name}_seconds_count")
        mean = f"{now.total(f'{name}_seconds_sum') / count * 1000.0:.2f}" if count else "-"
        rows.append((meaning, f"{count:,.0f}", mean))
    count = now.total("batch_sessions_count")
    mean = f"{now.total('batch_sessions_sum') / count:.2f}" if count else "-"
    batching = _raw_table("Batching", ("", "forwards", "mean"), [("sessions in a draft forward", f"{count:,.0f}", mean)])
    return _raw_table("Time of the whole run", ("", "count", "mean, ms"), rows) + batching


def _model_rows(facts: ModelFacts) -> list[tuple[str, str]]:
    layers = [
        f"layer {index}: {backend}, {path}"
        for index, (backend, path) in enumerate(zip(facts.attention_backends, facts.decode_paths, strict=True))
    ]
    return [
        ("format", facts.source_format),
        ("fingerprint", facts.fingerprint),
        ("block", f"{facts.draft_block_size} slots, {facts.max_draft_tokens} drafts"),
        ("vocabulary", f"{facts.draft_vocab_size:,} draft tokens of {facts.vocab_size:,}"),
        (
            "target",
            f"hidden {facts.target_hidden_size}, {facts.target_num_layers or '?'} layers, "
            f"rows of layers {', '.join(map(str, facts.target_layer_ids))}",
        ),
        ("runs on", f"{facts.device}, {facts.dtype}"),
        ("attention", "; ".join(layers)),
    ]


def _fault_rows(now: Numbers) -> list[tuple[str, str]]:
    calls = {code: count for code, count in now.by("calls_total", "code").items() if code != "ok"}
    faults = (
        ("calls refused", calls),
        ("sessions refused", now.by("session_errors_total", "code")),
        ("sessions freed unasked", now.by("evictions_total", "reason")),
        ("model calls that failed", now.by("forward_failures_total", "stage")),
    )
    rows = [
        (name, ", ".join(f"{key} {count:,.0f}" for key, count in sorted(counts.items())) or "none") for name, counts in faults
    ]
    return [*rows, ("calls whose caller went away", f"{now.total('cancelled_calls_total'):,.0f}")]


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th scope='row'>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<h2>{_text(title)}</h2><table>{body}</table>"


def _raw_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already; the columns after the first hold numbers."""
    head = "".join(f"<th{_number_class(index)}>{name}</th>" for index, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_number_class(index)}>{cell}</td>" for index, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>"


def _number_class(column: int) -> str:
    return " class='number'" if column else ""


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
