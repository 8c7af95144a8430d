"""Settings of the embedded target server; see `service.settings` for where values come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator

from service.settings import ENV_PREFIX, EngineSettings, is_loopback
from service.target.weights import default_cache_dir


class TargetSettings(EngineSettings):
    """The embedded target server."""

    model: Path | None = Field(None, description="Folder of the target (a Llama in HF layout). Default: the embedded target.")
    served_model_name: str | None = Field(None, min_length=1, description="Name in /v1/models. Default: the folder name.")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="Folder for the embedded target's weights.")
    weight_dtype: Literal["float16", "float32"] = Field(
        "float16", description="Type that weights are kept in; sums are float32 either way."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the model. Default: torch's own choice.")

    host: str = Field("127.0.0.1", description="Address to listen on. Any but loopback needs --api-key.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: SecretStr | None = Field(None, min_length=8, description="Key that callers send as `Authorization: Bearer`.")

    draft_url: str | None = Field("http://127.0.0.1:8100", description="Draft server; `none` decodes plainly.")
    draft_api_key: SecretStr | None = Field(None, description="Key of the draft server.")
    num_draft_tokens: int = Field(3, ge=0, le=32, description="Drafts to verify in a step, unless a request says otherwise.")
    draft_deadline_ms: float = Field(50.0, gt=0, le=60_000, description="A step waits for drafts no longer than this.")
    target_layer_ids: tuple[int, ...] = Field(
        (5, 13, 21, 28),
        min_length=1,
        description="Layers whose output the drafter reads, 0-based; as JSON, such as [5,13,21,28].",
    )

    max_batch: int = Field(8, ge=1, le=256, description="Requests that decode together.")
    max_waiting: int = Field(64, ge=0, description="Requests that may wait; more are answered 429.")
    max_context: int = Field(2048, ge=16, description="Tokens of prompt and answer together.")
    prefill_chunk: int = Field(256, ge=1, description="Prompt tokens fed between two decode steps.")
    max_body_bytes: int = Field(2**20, ge=1, description="Bytes in one request body.")

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: dict[str, object]) -> dict[str, object]:
        if values.get("draft_url") == "none":
            values["draft_url"] = None
        return values

    @model_validator(mode="after")
    def _refuse_unsafe_bind(self) -> TargetSettings:
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from other machines: set api_key (--api-key or {ENV_PREFIX}API_KEY), "
                "or listen on 127.0.0.1"
            )
        return self
