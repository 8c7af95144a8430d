"""The drafter that is served, and its exchange for another one while calls come in.

    load      in the background: checkpoint, pool, canary; the old drafter serves on
    exchange  on the worker, between two steps: its sessions and their rows go, its unfinished calls hear `epoch_mismatch`
    tell      every client must shake hands again, learns the facts of the new drafter, and sends its rows again

Each reply carries one `draft_version`, and no drafter ever reads what another one wrote: each has a pool of its own. While a
drafter is loaded there are two of them, so the device needs room for both. Whatever goes wrong before the exchange leaves the
old one as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draft_engine_client.wire import ModelFacts
from draft_model.backbone.base import ProjectionWeights
from service.clients import ClientTable
from service.engine import DraftEngine, DraftModel
from service.errors import RequestError, StateError
from service.metrics import EngineMetrics
from service.sessions import SessionTable
from service.settings import EngineLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDraft:
    """A drafter with everything that is made for it. `problems` is what its canary found."""

    model: DraftModel
    sessions: SessionTable
    facts: ModelFacts
    limits: EngineLimits
    tokenizer_hash: str | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServedDraft:
    """What the routes tell of the drafter that is served, and hold calls to."""

    facts: ModelFacts
    limits: EngineLimits
    projection: ProjectionWeights
    tokenizer_hash: str | None
    version: str
    loaded_at: float


class Serving:
    """The drafter that is served now. Belongs to the event loop; read `draft` once for each request.

    Args:
        first: the first drafter.
    """

    def __init__(self, first: LoadedDraft) -> None:
        self._generation = 1
        self.draft = _served(first, version_of(1, first.facts))

    def next_version(self, facts: ModelFacts) -> str:
        """The version that the next drafter will have."""
        return version_of(self._generation + 1, facts)

    def exchange(self, loaded: LoadedDraft) -> None:
        """Serve another drafter from now on."""
        version = self.next_version(loaded.facts)
        self._generation += 1
        self.draft = _served(loaded, version)


def _served(loaded: LoadedDraft, version: str) -> ServedDraft:
    return ServedDraft(loaded.facts, loaded.limits, loaded.model.projection, loaded.tokenizer_hash, version, time.time())


def version_of(generation: int, facts: ModelFacts) -> str:
    """Name a drafter of this process: two that are loaded after one another differ even with the same weights."""
    return f"{generation}-{facts.fingerprint[:12]}"


class Reloader:
    """Loads a drafter and exchanges the one that is served for it.

    Args:
        load: loads a folder, or with None the one the server was started with; runs in a thread of its own.
        model_root: folder that holds the drafters a caller may name; None for none.
    """

    def __init__(
        self,
        *,
        engine: DraftEngine,
        clients: ClientTable,
        serving: Serving,
        metrics: EngineMetrics,
        load: Callable[[Path | None], LoadedDraft],
        model_root: Path | None = None,
    ) -> None:
        self._engine, self._clients, self._serving, self._metrics = engine, clients, serving, metrics
        self._load, self._model_root = load, model_root
        self._is_loading = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self, name: str | None = None) -> ServedDraft:
        """Serve the drafter of that name under the model root; without a name load the same folder again.

        Raises:
            StateError: reload_in_progress.
            RequestError: bad_request, the name is not allowed; reload_failed, and the old drafter is served on.
            UnavailableError: the worker does not run.
        """
        path = self._allowed(name)
        if self._is_loading:
            raise StateError("reload_in_progress", "another drafter is being loaded; try again when that is done")
        self._is_loading = True
        try:
            loaded = await self._loaded(path)
            await self._engine.replace(loaded.model, loaded.sessions, loaded.limits, self._serving.next_version(loaded.facts))
            self._serving.exchange(loaded)
            self._clients.forget_all()
        finally:
            self._is_loading = False
        draft = self._serving.draft
        self._metrics.reloads.labels("ok").inc()
        self._metrics.describe_draft(draft.facts, draft.version)
        logger.info("drafter %s is served as version %s", draft.facts.model_id, draft.version)
        return draft

    def reload_soon(self) -> None:
        """Load the same folder again, as a signal asks for; the log says what became of it. For the event loop's thread."""
        task = asyncio.get_running_loop().create_task(self._reload_logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_logged(self) -> None:
        try:
            await self.reload()
        except (RequestError, StateError) as error:
            logger.warning("not reloaded: %s", error.message)

    def _allowed(self, name: str | None) -> Path | None:
        if name is None:
            return None
        if self._model_root is None:
            raise RequestError(
                "bad_request", "this server has no --model-root to take models from; leave model out", param="model"
            )
        root = self._model_root.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root) or not (path / "config.json").is_file():
            raise RequestError("bad_request", "there is no drafter of that name under --model-root", param="model")
        return path

    async def _loaded(self, path: Path | None) -> LoadedDraft:
        try:
            loaded = await asyncio.to_thread(self._load, path)
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        if loaded.problems:
            raise self._failed("; ".join(loaded.problems))
        return loaded

    def _failed(self, why: str) -> RequestError:
        self._metrics.reloads.labels("failed").inc()
        version = self._serving.draft.version
        logger.error("a drafter was not loaded, version %s is served on: %s", version, why)
        return RequestError(
            "reload_failed",
            f"the drafter was not loaded, and version {version} is served on: {why}",
            param="model",
            numbers={"draft_version": version},
        )
