"""Settings of the draft server: flags, environment, file, defaults, in that order.

One field here is one flag (`--kv-cache-memory`), one environment variable (`DRAFT_ENGINE_KV_CACHE_MEMORY`) and one key of
a `--config` TOML file (`kv_cache_memory`). An unknown key is an error. Nothing is read at import, and nothing changes a
settings object after it was made: what depends on the machine is resolved once into a `ServePlan`.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from service.errors import StartupError

ENV_PREFIX = "DRAFT_ENGINE_"
DEFAULT_CONTEXT_BIAS = (2.0, 4.0, 8.0, 12.0)
SettingsT = TypeVar("SettingsT", bound=BaseSettings)

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: object) -> object:
    """Turn "512MiB", "2GB" or a number into bytes; leave anything else for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 512MiB, 2GB or 1048576")
    unit = (match.group(2) or "").lower()
    return int(float(match.group(1)) * _UNITS[unit.removesuffix("b")])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


class _TomlSource(PydanticBaseSettingsSource):
    """The keys of one TOML file, already parsed."""

    def __init__(self, settings_class: type[BaseSettings], values: Mapping[str, Any]) -> None:
        super().__init__(settings_class)
        self._values = dict(values)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


class EngineSettings(BaseSettings):
    """Base of the settings of every command: where values come from, and what an unknown one means."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True, protected_namespaces=()
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much to log.")
    log_format: Literal["text", "json"] = Field("text", description="Log lines for people, or one JSON object a line.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment. `load_settings` puts the file below both."""
        return init_settings, env_settings


class ListenSettings(EngineSettings):
    """Where a server listens, and who may call it."""

    host: str = Field("127.0.0.1", description="Address to listen on. Any but loopback needs --api-key.")
    uds: Path | None = Field(None, description="Listen on this unix socket instead of host and port.")
    api_key: SecretStr | None = Field(None, min_length=8, description="Key that callers send as `Authorization: Bearer`.")
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain (PEM).")
    ssl_keyfile: Path | None = Field(None, description="TLS private key (PEM).")
    drain_seconds: float = Field(1.0, ge=0, description="After SIGTERM, answer 503 draining for so long, then exit.")

    @model_validator(mode="after")
    def _refuse_unsafe_bind(self) -> Self:
        if self.uds is None and self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from other machines: set api_key (--api-key or {ENV_PREFIX}API_KEY), "
                "or listen on 127.0.0.1"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together")
        return self


class ServeSettings(ListenSettings):
    """The draft server."""

    model: Path | None = Field(
        None, description="Folder of the draft checkpoint. Default: the drafter shipped for the embedded target."
    )
    target_model: Path | None = Field(
        None,
        description="Folder of the target checkpoint, for a draft that shares its embedding and head. "
        "Default with the shipped drafter: the embedded target.",
    )
    model_root: Path | None = Field(
        None, description="Folder of the draft checkpoints that POST /v1/reload may name. Default: it reloads --model alone."
    )
    served_model_name: str | None = Field(None, min_length=1, description="Name in /v1/models. Default: the folder name.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Type of the draft weights.")
    attention_backend: str | None = Field(None, description="Force one attention backend. Default: best that fits.")
    context_bias: tuple[float, ...] = Field(
        DEFAULT_CONTEXT_BIAS,
        description="Bonus on the logit of a token that continues an earlier match of 1, 2, ... tokens; 0 for none.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the model. Default: torch's own choice.")

    port: int = Field(8100, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")

    kv_cache_memory: Bytes = Field(512 * 2**20, description="Memory of the context pool, for example 512MiB.")
    page_size: int = Field(64, ge=1, le=1024, description="Context rows in a page.")
    prefix_cache: bool = Field(True, description="Keep full pages of context for sessions with the same prefix.")

    max_sessions: int = Field(512, ge=1, description="Sessions held at once.")
    max_sessions_per_call: int = Field(128, ge=1, description="Sessions in one propose call.")
    max_rows_per_call: int = Field(16_384, ge=1, description="Context rows in one propose call.")
    max_body_bytes: Bytes = Field(128 * 2**20, description="Bytes in one request body.")
    max_context: int | None = Field(None, ge=1, description="Positions in a session. Default: the draft model's own limit.")
    max_queue: int = Field(256, ge=1, description="Calls that may wait; more are answered 429.")
    rows_per_chunk: int = Field(512, ge=1, description="Context rows written between two draft forwards.")

    otlp_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="OTLP/HTTP address of a collector for spans of propose calls, such as http://127.0.0.1:4318/v1/traces.",
    )

    lease_seconds: float = Field(60.0, gt=0, description="A client silent for so long loses its sessions.")
    disconnect_grace_seconds: float = Field(
        0.5, ge=0, description="A client that kept a connection and has lost its last one leaves after so long."
    )
    session_ttl_seconds: float = Field(600.0, gt=0, description="A session unused for so long is freed.")
    idle_seconds: float = Field(5.0, ge=0, description="A session unused for so long may be evicted for another one.")
    acceptance_floor: float = Field(
        0.05, ge=0, description="Accepted drafts of a block below which /readyz says degraded; 0 to not look."
    )


@dataclass(frozen=True)
class EngineLimits:
    """The numbers the engine, the routes and the handshake share. Rows and positions are counts, times are seconds."""

    max_sessions: int
    max_sessions_per_call: int
    max_rows_per_call: int
    max_body_bytes: int
    max_context: int
    max_queue: int
    rows_per_chunk: int
    lease_seconds: float
    session_ttl_seconds: float
    idle_seconds: float
    acceptance_floor: float = 0.05

    @classmethod
    def resolve(cls, settings: ServeSettings, model_max_context: int) -> EngineLimits:
        """Put the model's own context limit where the settings name none, and under it where they name a larger one."""
        return cls(
            max_sessions=settings.max_sessions,
            max_sessions_per_call=settings.max_sessions_per_call,
            max_rows_per_call=settings.max_rows_per_call,
            max_body_bytes=settings.max_body_bytes,
            max_context=min(settings.max_context or model_max_context, model_max_context),
            max_queue=settings.max_queue,
            rows_per_chunk=settings.rows_per_chunk,
            lease_seconds=settings.lease_seconds,
            session_ttl_seconds=settings.session_ttl_seconds,
            idle_seconds=settings.idle_seconds,
            acceptance_floor=settings.acceptance_floor,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Loading -------------------------------------------------------------------------------------------------------------


def load_settings(settings_class: type[SettingsT], flags: Mapping[str, Any], *, config: Path | None = None) -> SettingsT:
    """Build settings from flags over environment over one TOML file over defaults.

    Raises:
        StartupError: the file cannot be read, a key is unknown or a value is not allowed; the message names each.
    """
    layers: dict[str, Any] = {}
    if config is not None:
        layers.update(_read_toml(settings_class, config))
    # pydantic-settings puts what is passed in above the environment, so the file has to give way here.
    from_environment = EnvSettingsSource(settings_class)()
    layers.update(from_environment)
    layers.update(flags)
    try:
        return settings_class(**layers)
    except ValidationError as error:
        raise StartupError(_explain(error)) from error


def _read_toml(settings_class: type[BaseSettings], path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path}: not a TOML file: {error}") from error
    unknown = [_with_hint(key, settings_class.model_fields) for key in values if key not in settings_class.model_fields]
    if unknown:
        raise StartupError(f"--config {path}: unknown key {', '.join(unknown)}")
    return values


def _with_hint(key: str, known: Mapping[str, FieldInfo]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"{key!r} (did you mean {close[0]!r}?)" if close else repr(key)


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{flag_of(place)}: {message}" if place else message)
    return "; ".join(lines)


def unknown_environment(settings_classes: Sequence[type[BaseSettings]], environ: Mapping[str, str]) -> list[str]:
    """Name the DRAFT_ENGINE_* variables that no command reads, each with the nearest known one.

    They are worth a warning, not a refusal: orchestrators inject variables named after a service.
    """
    known = {env_of(name) for cls in settings_classes for name in cls.model_fields}
    found = []
    for name in sorted(environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            found.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return found


# Flags ---------------------------------------------------------------------------------------------------------------


def flag_of(field_name: str) -> str:
    """`kv_cache_memory` -> `--kv-cache-memory`; `json_`, whose name is taken, -> `--json`."""
    return "--" + field_name.rstrip("_").replace("_", "-")


def env_of(field_name: str) -> str:
    """`kv_cache_memory` -> `DRAFT_ENGINE_KV_CACHE_MEMORY`."""
    return ENV_PREFIX + field_name.upper()


def add_flags(parser: argparse.ArgumentParser, settings_class: type[BaseSettings]) -> None:
    """Give `parser` one flag for each field; values stay text, so that pydantic alone decides what is allowed."""
    for name, field in settings_class.model_fields.items():
        help_text = f"{field.description or ''}{_default_text(field)} [env: {env_of(name)}]".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=help_text)
            continue
        parser.add_argument(flag_of(name), dest=name, metavar=_metavar(field), default=None, help=help_text)


def given_flags(namespace: argparse.Namespace, settings_class: type[BaseSettings]) -> dict[str, Any]:
    """The flags that were on the command line, by field name."""
    values = vars(namespace)
    return {
        name: _split_list(values[name]) if get_origin(field.annotation) is tuple else values[name]
        for name, field in settings_class.model_fields.items()
        if values.get(name) is not None
    }


def _split_list(text: str) -> list[str]:
    """`5,13,21` or `[5, 13, 21]` -> its items, as text."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [item.strip().strip("\"'") for item in inner.split(",") if item.strip()]


def _default_text(field: FieldInfo) -> str:
    if field.default is None or field.is_required():
        return ""
    default = field.default
    if isinstance(default, bool):
        return f" Default: {'on' if default else 'off'}."
    if isinstance(default, int) and default >= 2**20 and default % 2**20 == 0:
        return f" Default: {default // 2**20}MiB."
    return f" Default: {default}."


def _metavar(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not NoneType)
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    if get_origin(annotation) is tuple:
        return "A,B,..."
    names = {int: "N", float: "NUMBER", Path: "PATH", SecretStr: "KEY"}
    if annotation is int and any(isinstance(item, BeforeValidator) for item in field.metadata):
        return "SIZE"
    return names.get(annotation, "TEXT") if isinstance(annotation, type) else "TEXT"


def current_environment() -> Mapping[str, str]:
    """The process environment; a function so that the composition root reads it once."""
    return os.environ
