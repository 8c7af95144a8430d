"""`draft-engine vllm-args`: the flags that pair a vLLM server with a running draft server."""

from __future__ import annotations

import json
import shlex
from typing import Any

import httpx
from pydantic import Field, SecretStr, ValidationError
from rich.console import Console

from draft_engine_client.vllm_proposer.settings import CONFIG_KEY, ProposerSettings
from draft_engine_client.wire import ModelEntry, ModelList
from service.errors import StartupError
from service.settings import EngineSettings

PROPOSER = "draft_engine_client.vllm_proposer.DraftEngineProposer"


class VllmArgsSettings(EngineSettings):
    """The flags for vLLM."""

    url: str = Field("http://127.0.0.1:8100", description="Base of the draft server, as vLLM will reach it.")
    api_key: SecretStr | None = Field(None, min_length=8, description="Key of the draft server; it is not printed.")
    num_draft_tokens: int | None = Field(None, ge=1, description="Drafts to verify in a step. Default: all that a block has.")
    step_deadline_ms: float | None = Field(None, gt=0, description="Longest that a step of vLLM may wait for its drafts.")


def run_vllm_args(settings: VllmArgsSettings, console: Console) -> None:
    """Print the flags, on one line that a shell understands.

    Raises:
        StartupError: the draft server does not answer, or has no such block.
    """
    entry = fetch_model(settings)
    flags = vllm_flags(entry, settings.url, settings.num_draft_tokens, step_deadline_ms=settings.step_deadline_ms)
    console.print(shlex.join(flags), markup=False, soft_wrap=True)


def fetch_model(settings: VllmArgsSettings) -> ModelEntry:
    """Ask a draft server what it serves.

    Raises:
        StartupError: it does not say.
    """
    headers = {"authorization": f"Bearer {settings.api_key.get_secret_value()}"} if settings.api_key else {}
    try:
        reply = httpx.get(f"{settings.url.rstrip('/')}/v1/models", headers=headers, timeout=10.0).raise_for_status()
        return ModelList.model_validate_json(reply.content).data[0]
    except (httpx.HTTPError, httpx.InvalidURL, ValidationError, IndexError) as error:
        raise StartupError(f"no draft server answers at {settings.url}: {error}") from error


def vllm_flags(entry: ModelEntry, url: str, num_draft_tokens: int | None, **settings: Any) -> list[str]:
    """The flags that pair vLLM with a draft server.

    Args:
        entry: what the draft server says of its model
        url: of the draft server, as vLLM will reach it
        num_draft_tokens: drafts to verify in a step; None takes all that a block has
        settings: more of ProposerSettings; None leaves one at its default

    Raises:
        StartupError: a block has fewer drafts, or a setting is wrong.
    """
    most = entry.draft.max_draft_tokens
    if num_draft_tokens is not None and num_draft_tokens > most:
        raise StartupError(f"{num_draft_tokens} draft tokens were asked for; a block of {entry.draft.model_id} has {most}")
    given = {name: value for name, value in settings.items() if value is not None}
    config = {"url": url, "target_layer_ids": list(entry.draft.target_layer_ids), **given}
    try:
        ProposerSettings.model_validate(config)
    except ValidationError as error:
        raise StartupError(str(error)) from error
    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_draft_tokens or most}
    return ["--speculative-config", json.dumps(speculative), "--additional-config", json.dumps({CONFIG_KEY: config})]
