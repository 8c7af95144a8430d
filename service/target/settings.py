"""Settings of the embedded target server; see `service.settings` for where values come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from service.settings import Bytes, ListenSettings
from service.target.weights import default_cache_dir


class TargetSettings(ListenSettings):
    """The embedded target server."""

    model: Path | None = Field(None, description="Folder of the target (a Llama in HF layout). Default: the embedded target.")
    served_model_name: str | None = Field(None, min_length=1, description="Name in /v1/models. Default: the folder name.")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="Folder for the embedded target's weights.")
    weight_dtype: Literal["float16", "float32"] = Field(
        "float16", description="Type that weights are kept in; sums are float32 either way."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the model. Default: torch's own choice.")

    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    drain_seconds: float = Field(0.0, ge=0, description="After SIGTERM, answer 503 for so long, then exit.")

    draft_url: str | None = Field("http://127.0.0.1:8100", description="Draft server; `none` decodes plainly.")
    draft_api_key: SecretStr | None = Field(None, description="Key of the draft server.")
    num_draft_tokens: int = Field(3, ge=0, le=32, description="Drafts to verify in a step, unless a request says otherwise.")
    draft_probs_topk: int = Field(
        0,
        ge=0,
        le=4096,
        description="Support of the distributions that sampled drafts are drawn from; the drafter is then trusted with them. "
        "0 verifies the likeliest drafts as certain ones, which is lossless whatever the drafter does.",
    )
    draft_when: Literal["pays", "always"] = Field(
        "pays", description="Ask for drafts only where measured step times say that they pay, or in each step."
    )
    schedule: Literal["fixed", "threshold", "hardware"] = Field(
        "fixed",
        description="Drafts that the draft server sends back: all, those whose survival reaches --schedule-threshold, or as "
        "many as step times measured at the start say are worth it.",
    )
    schedule_threshold: float = Field(0.3, ge=0.0, le=1.0, description="Bound on survival with --schedule threshold.")
    record_rounds: Path | None = Field(
        None, description="Append confidence and outcome of each verified block to this file, for `draft-engine calibrate`."
    )
    draft_deadline_ms: float = Field(50.0, gt=0, le=60_000, description="A step waits for drafts no longer than this.")
    target_layer_ids: tuple[int, ...] = Field(
        (5, 13, 21, 28),
        min_length=1,
        description="Layers whose output the drafter reads, 0-based, in order.",
    )

    max_batch: int = Field(8, ge=1, le=256, description="Requests that decode together.")
    max_waiting: int = Field(64, ge=0, description="Requests that may wait; more are answered 429.")
    max_context: int = Field(2048, ge=16, description="Tokens of prompt and answer together.")
    prefill_chunk: int = Field(256, ge=1, description="Prompt tokens fed between two decode steps.")
    max_body_bytes: Bytes = Field(2**20, description="Bytes in one request body.")

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: dict[str, object]) -> dict[str, object]:
        if values.get("draft_url") == "none":
            values["draft_url"] = None
        return values

    @model_validator(mode="after")
    def _record_whole_blocks(self) -> Self:
        if self.record_rounds is not None and self.schedule != "fixed":
            raise ValueError("record_rounds needs whole blocks, so it goes with schedule fixed only")
        return self
