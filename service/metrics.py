"""Prometheus metrics of the draft server, all under `draft_engine_`.

Nothing here holds a prompt, a token or a session id. Each engine has its own registry, so two engines in one process
(tests, a reload) never share a counter.

Acceptance is learnt, not reported: the rows of the next update tell which of the drafts the target kept.
"""

from __future__ import annotations

from collections import Counter as TallyCounter
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from draft_engine_client.wire import ModelFacts

MEDIA_TYPE = CONTENT_TYPE_LATEST
# Namespace, subsystem and unit, which come before the collector that a metric is filed in.
_PREFIX = ("draft_engine", "", "")
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_CONTEXT_BUCKETS = ((1_024, "<1k"), (4_096, "1k-4k"), (16_384, "4k-16k"), (65_536, "16k-64k"))


def context_bucket(position: int) -> str:
    """The context-length label of a draft made at `position`."""
    for limit, label in _CONTEXT_BUCKETS:
        if position < limit:
            return label
    return ">=64k"


def coverage_bucket(coverage: float) -> str:
    """The coverage label of a draft: did the drafter see the whole context?"""
    return "full" if coverage >= 1.0 else "half" if coverage >= 0.5 else "low"


class EngineMetrics:
    """The counters of one engine. Methods are called from the worker thread and the event loop; each is thread-safe."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._accepted: TallyCounter[tuple[str, str, int]] = TallyCounter()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, *_PREFIX, registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"{name}_seconds", text, (), *_PREFIX, registry, buckets=_SECONDS)

        self.calls = counter("calls", "Propose calls answered, by code (ok or an error code).", ("code",))
        self.session_errors = counter("session_errors", "Sessions refused inside a call that was answered.", ("code",))
        self.drafts = counter("drafts", "Draft blocks proposed.")
        self.draft_tokens = counter("draft_tokens", "Draft tokens proposed.")
        self.verified_drafts = counter(
            "verified_drafts", "Draft blocks whose fate a later update told.", ("context", "coverage")
        )
        self.accepted_tokens = counter("accepted_tokens", "Draft tokens that the target kept.", ("context", "coverage"))
        self.accepted_tokens_per_position = counter(
            "accepted_tokens_per_position", "Draft tokens that the target kept, by place in the block.", ("position",)
        )
        self.rows_received = counter("rows_received", "Context rows written.")
        self.rows_restored = counter("rows_restored", "Context rows attached from the prefix cache.")
        self.rows_missing = counter("rows_missing", "Context rows that sessions started without.")
        self.prefix_queried_rows = counter("prefix_cache_queried_rows", "Prefix rows looked up.")
        self.evictions = counter("evictions", "Sessions freed unasked.", ("reason",))
        self.cancelled_calls = counter("cancelled_calls", "Calls whose caller went away first.")
        self.forward_failures = counter("forward_failures", "Model calls that raised.", ("stage",))
        self.reloads = counter("reloads", "Drafters loaded while serving, by outcome (ok or failed).", ("outcome",))
        self.steps = counter("steps", "Engine steps that served something.")
        self.batch_sessions = Histogram(
            "batch_sessions",
            "Sessions in one draft forward.",
            (),
            *_PREFIX,
            registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )
        self.queue_seconds = seconds("queue", "From arrival to admission.")
        self.context_seconds = seconds("context", "Writing the context rows of a step.")
        self.forward_seconds = seconds("forward", "Draft forward of a step.")
        self.head_seconds = seconds("head", "Sequential head of a step.")
        self.call_seconds = seconds("call", "From arrival to reply.")
        self._attention_layers = Gauge(
            "attention_layers",
            "Draft layers served by an attention backend through a decode path (fused or flattened).",
            ("backend", "path"),
            *_PREFIX,
            registry,
        )
        self._server_version = ""
        self._version = Info("version", "Version of the engine and its draft model.", (), *_PREFIX, registry)

    def describe(self, version: str) -> None:
        """Publish the version of the server, before `describe_draft`."""
        self._server_version = version

    def describe_draft(self, facts: ModelFacts, draft_version: str) -> None:
        """Publish which drafter is served and what serves each of its layers.

        Layers whose path is `flattened` read every context row once per slot.
        """
        self._version.info(
            {
                "version": self._server_version,
                "model": facts.model_id,
                "fingerprint": facts.fingerprint,
                "draft_version": draft_version,
            }
        )
        self._attention_layers.clear()
        backends, paths = facts.attention_backends, facts.decode_paths
        for backend, path in zip(backends, paths, strict=True):
            self._attention_layers.labels(backend, path).inc()

    def track(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Publish a gauge that is read when it is scraped."""
        Gauge(name, text, (), *_PREFIX, self.registry).set_function(read)

    def saw_acceptance(self, accepted: int, position: int, coverage: float) -> None:
        """Take note of one verified draft: the target kept its first `accepted` tokens. For the worker thread."""
        self._accepted[context_bucket(position), coverage_bucket(coverage), accepted] += 1

    def publish_acceptance(self) -> None:
        """Count what was noted. A counter is too slow for every token of every session, so a step counts them together."""
        for (context, coverage, accepted), count in self._accepted.items():
            self.verified_drafts.labels(context, coverage).inc(count)
            self.accepted_tokens.labels(context, coverage).inc(accepted * count)
            for place in range(accepted):
                self.accepted_tokens_per_position.labels(str(place)).inc(count)
        self._accepted.clear()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
