"""What the draft server wants, asked before the target is loaded: the layers to capture must be known by then."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pydantic import ValidationError

from draft_engine_client.client import DraftClient
from draft_engine_client.errors import ClientError, RefusedError
from draft_engine_client.replies import require_ok
from draft_engine_client.settings import ClientSettings
from draft_engine_client.transport import Channel
from draft_engine_client.vllm_proposer.errors import PairingError
from draft_engine_client.vllm_proposer.settings import ProposerSettings
from draft_engine_client.wire import ModelFacts, ModelList, TargetFingerprint

_JSON = "application/json"
_PAUSE_S = 0.5
_GLANCE_S = 0.05


@dataclass(frozen=True)
class Pairing:
    """What every rank has to know. `problem` says why vLLM must not start; `client` is rank 0's."""

    target_layer_ids: tuple[int, ...] = ()
    problem: str | None = None


def connect(
    settings: ProposerSettings, client_settings: ClientSettings, target: TargetFingerprint
) -> tuple[Pairing, DraftClient | None]:
    """Ask the draft server what it wants, and shake hands. Never raises: what went wrong is in the pairing.

    A draft server that cannot be reached is no problem where the settings have the layers: the client goes on trying.

    Args:
        target: without layers
    """
    try:
        facts = _wait_for_facts(client_settings, settings.startup_timeout_s)
    except PairingError as error:
        return Pairing(problem=str(error)), None
    layers = settings.target_layer_ids or (facts.target_layer_ids if facts is not None else None)
    if layers is None:
        return Pairing(
            problem=f"the draft server at {settings.url} did not answer within {settings.startup_timeout_s:.0f} s; start it "
            "first, or give target_layer_ids, and vLLM starts without it"
        ), None
    target = target.model_copy(update={"target_layer_ids": tuple(layers)})
    client = DraftClient(client_settings, target, is_projecting=settings.rows == "projected")
    client.start()
    if facts is not None and not _shakes_hands(client, settings.startup_timeout_s):
        problem = f"the draft server at {settings.url} refuses this target: {client.refusal or 'no answer'}"
        client.close()
        return Pairing(problem=problem), None
    return Pairing(target_layer_ids=tuple(layers)), client


def _shakes_hands(client: DraftClient, timeout_s: float) -> bool:
    """Whether a server that is known to answer takes this target; it is not asked twice."""
    deadline_at = time.monotonic() + timeout_s
    while not client.wait_connected(_GLANCE_S):
        if client.refusal is not None or time.monotonic() > deadline_at:
            return False
    return True


def _wait_for_facts(settings: ClientSettings, timeout_s: float) -> ModelFacts | None:
    """What the server says of its model; None if nobody answers in time.

    Raises:
        PairingError: somebody answers, but not what a draft server would.
    """
    deadline_at = time.monotonic() + timeout_s
    while True:
        try:
            return fetch_facts(settings)
        except RefusedError as error:
            if not error.is_passing:
                raise PairingError(f"the draft server at {settings.url} answers: {error}") from error
        except ClientError:
            pass
        if time.monotonic() + _PAUSE_S > deadline_at:
            return None
        time.sleep(_PAUSE_S)


def fetch_facts(settings: ClientSettings) -> ModelFacts:
    """Read what the server says of its model.

    Raises:
        ClientError: there is no usable reply.
        PairingError: the reply is not a draft server's.
    """
    channel = Channel(settings)
    try:
        http = channel.request(
            "GET", "/v1/models", body=b"", media_type=_JSON, deadline_at=time.monotonic() + settings.request_timeout_s
        )
    finally:
        channel.close()
    require_ok(http, _JSON)
    try:
        return ModelList.model_validate_json(http.body).data[0].draft
    except (ValidationError, IndexError) as error:
        raise PairingError(f"{settings.url} is not a draft server of this protocol") from error
