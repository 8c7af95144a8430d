"""What stands under `draft_engine` in vLLM's `--additional-config`. An unknown key is an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draft_engine_client.settings import ClientSettings
from draft_engine_client.vllm_proposer.errors import PairingError
from draft_engine_client.wire import FeatureDtype

CONFIG_KEY = "draft_engine"
API_KEY_VARIABLE = "DRAFT_ENGINE_API_KEY"


class ProposerSettings(BaseModel):
    """Settings of the proposer. An API key is read from the environment, since vLLM logs its command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    url: str = Field(description="Base of the draft server, such as http://127.0.0.1:8100.")
    client_name: str = Field("vllm", min_length=1, max_length=200, description="Name of this vLLM server, for people.")
    target_layer_ids: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="Layers whose output the drafter reads, 0-based. Default: what the draft server says. Where they are "
        "given, vLLM starts without a draft server too, and drafts as soon as there is one.",
    )
    rows: Literal["projected", "raw"] = Field(
        "projected",
        description="What is sent: projected rows are as wide as the drafter, raw ones as the captured layers side by side. "
        "The projection is fetched from the draft server, and takes its place on the device of the first rank.",
    )
    row_dtype: FeatureDtype = Field("bfloat16", description="Type of the rows that are sent.")
    draft_probs_topk: int = Field(
        64,
        ge=0,
        le=4096,
        description="Support of the draft distributions at temperature > 0. 0 sends none: lossless too, fewer drafts are kept.",
    )
    startup_timeout_s: float = Field(30.0, gt=0.0, le=3600.0, description="How long to wait for the draft server at start.")
    step_deadline_ms: float = Field(50.0, gt=0.0, le=600_000.0, description="Longest that one step may wait for its drafts.")
    connect_timeout_s: float = Field(1.0, gt=0.0, le=600.0, description="Longest that connecting may take, in the background.")
    request_timeout_s: float = Field(5.0, gt=0.0, le=600.0, description="Longest that a background request may take.")
    breaker_failures: int = Field(3, ge=1, description="Failed calls in a row after which steps go on without drafts.")
    breaker_min_s: float = Field(0.5, gt=0.0, description="First pause after that; it doubles with each failed trial.")
    breaker_max_s: float = Field(5.0, gt=0.0, description="Longest pause.")
    max_history_rows: int = Field(8_192, ge=1, description="Rows kept of a request to feed a restarted draft server.")
    max_rows_per_step: int = Field(256, ge=1, description="Rows that one step sends at most; more are fed in the background.")
    log_interval_s: float = Field(60.0, gt=0.0, description="Seconds between two lines about drafting in the log.")

    def client_settings(self, rank_name: str = "") -> ClientSettings:
        """The client's part of it.

        Args:
            rank_name: added to `client_name`, to tell the replicas of a data parallel server apart.

        Raises:
            PairingError: a value is refused by the client; the message names it.
        """
        try:
            return ClientSettings(
                url=self.url,
                client_name=f"{self.client_name}{rank_name}",
                step_deadline_ms=self.step_deadline_ms,
                connect_timeout_s=self.connect_timeout_s,
                request_timeout_s=self.request_timeout_s,
                api_key=os.environ.get(API_KEY_VARIABLE) or None,
                breaker_failures=self.breaker_failures,
                breaker_min_s=self.breaker_min_s,
                breaker_max_s=self.breaker_max_s,
                max_history_rows=self.max_history_rows,
                max_rows_per_step=self.max_rows_per_step,
            )
        except ValueError as error:
            raise PairingError(f"additional-config, {CONFIG_KEY}: {error}") from error


def read_settings(additional_config: object) -> ProposerSettings:
    """Read the settings out of vLLM's `additional_config`.

    Raises:
        PairingError: they are missing or wrong; the message names every key that is.
    """
    given: Any = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        raise PairingError(f"""vLLM needs --additional-config '{{"{CONFIG_KEY}": {{"url": "http://HOST:PORT"}}}}'""")
    try:
        settings = ProposerSettings.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc'])) or CONFIG_KEY}: {one['msg']}" for one in error.errors())
        raise PairingError(f"additional-config, {CONFIG_KEY}: {problems}") from error
    settings.client_settings()
    return settings
