"""Writes the generated parts of the pages: `make docs`.

A page has them between `<!-- generated: NAME -->` and `<!-- end -->`; everything around is written by hand. Settings come from
the settings classes, messages and error codes from the wire schema, metrics from the registry, so that none of them can say
something else than the code. A test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from draft_engine_client.schema import json_schema
from draft_engine_client.settings import ClientSettings
from draft_engine_client.vllm_proposer.settings import ProposerSettings
from service.cli import COMMANDS
from service.errors import STATUS_OF_CODE
from service.metrics import EngineMetrics
from service.settings import EngineSettings, ServeSettings, flag_of

FOLDER = Path(__file__).parent
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIRST_MESSAGES = (
    "ClientHello",
    "TargetFingerprint",
    "ClientWelcome",
    "ModelFacts",
    "Limits",
    "ProposeRequest",
    "SessionUpdate",
    "Sampling",
    "ProposeReply",
    "SessionReply",
    "Timings",
)


def render(text: str) -> str:
    """A page with its generated parts made anew.

    Raises:
        KeyError: a part has no generator.
    """
    return _BLOCK.sub(lambda match: f"{match.group(1)}\n{PARTS[match['name']]().strip()}\n\n{match.group(3)}", text)


def pages() -> Iterable[Path]:
    """Every page that has a generated part."""
    return (page for page in sorted(FOLDER.glob("*.md")) if _BLOCK.search(page.read_text(encoding="utf-8")))


# Settings ------------------------------------------------------------------------------------------------------------


def command_settings() -> str:
    """One table of flags for each command; a command that takes those of `serve` lists its own alone."""
    parts = []
    for command in COMMANDS:
        settings_class = command.settings()
        own = dict(settings_class.model_fields)
        note = ""
        if issubclass(settings_class, ServeSettings) and settings_class is not ServeSettings:
            own = {name: field for name, field in own.items() if name not in ServeSettings.model_fields}
            note = "It takes every flag of `serve`, and:\n\n"
        else:
            own = {name: field for name, field in own.items() if name not in EngineSettings.model_fields}
        rows = [_setting_row(name, field) for name, field in own.items()]
        table = _table(("flag", "takes", "default", "meaning"), rows)
        parts.append(f"### `draft-engine {command.name}`\n\n{command.description}\n\n{note}{table}")
    common = [_setting_row(name, field) for name, field in EngineSettings.model_fields.items()]
    parts.append(f"### Every command\n\n{_table(('flag', 'takes', 'default', 'meaning'), common)}")
    return "\n\n".join(parts)


def _setting_row(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    return f"`{flag_of(name)}`", _takes(field), _default(field), field.description or ""


def _takes(field: FieldInfo) -> str:
    text = str(field.annotation).replace("typing.", "")
    if "Literal[" in text:
        return ", ".join(f"`{choice}`" for choice in re.findall(r"'([^']*)'", text))
    if any("parse_bytes" in repr(item) for item in field.metadata):
        return "size"
    for sign, word in (("tuple", "list `A,B,...`"), ("Path", "path"), ("SecretStr", "secret"), ("bool", "on or off")):
        if sign in text:
            return word
    return "whole number" if "int" in text else "number" if "float" in text else "text"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`~/.cache/draft-engine`" if "cache" in getattr(field.default_factory, "__name__", "") else ""
    value = field.default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value // 2**20}MiB`"
    return f"`{value}`"


def client_settings() -> str:
    """The settings of the client library, with what their docstring says."""
    described = _described_arguments(inspect.getdoc(ClientSettings) or "")
    rows = []
    for field in fields(ClientSettings):
        default = "" if field.default in (MISSING, None) else f"`{field.default}`"
        rows.append((f"`{field.name}`", default, described[field.name]))
    return _table(("setting", "default", "meaning"), rows)


def vllm_settings() -> str:
    """The settings of the vLLM proposer."""
    rows = []
    for name, field in ProposerSettings.model_fields.items():
        default = "required" if field.is_required() else _default(field)
        rows.append((f"`{name}`", default, field.description or ""))
    return _table(("setting", "default", "meaning"), rows)


def _described_arguments(docstring: str) -> dict[str, str]:
    """The lines of the section `Args:` by argument."""
    found: dict[str, str] = {}
    section = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        match = re.match(r"    (\w+): (.*)", line)
        if match is not None:
            name, found[match[1]] = match[1], match[2]
        else:
            found[name] += f" {line.strip()}"
    return found


# Protocol ------------------------------------------------------------------------------------------------------------


def messages() -> str:
    """One section for each message, those of the hot path first."""
    definitions = json_schema()["$defs"]
    names = [*_FIRST_MESSAGES, *(name for name in definitions if name not in _FIRST_MESSAGES)]
    return "\n\n".join(_message(name, definitions[name]) for name in names)


def _message(name: str, schema: Mapping[str, Any]) -> str:
    text = " ".join(schema.get("description", "").split())
    required = set(schema.get("required", ()))
    rows = [
        (f"`{field}`", _type(spec), "required" if field in required else _json_default(spec), spec.get("description", ""))
        for field, spec in schema.get("properties", {}).items()
    ]
    extra = "\n\nFurther fields are allowed." if schema.get("additionalProperties") is True else ""
    return f"### {name}\n\n{text}\n\n{_table(('field', 'type', 'default', 'meaning'), rows)}{extra}"


def _type(spec: Mapping[str, Any]) -> str:
    if "$ref" in spec:
        name = spec["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in spec:
        return " or ".join(_type(option) for option in spec["anyOf"])
    if "const" in spec:
        return f"`{spec['const']}`"
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    if spec.get("type") == "array":
        items = spec.get("items")
        return f"list of {_type(items)}" if isinstance(items, Mapping) and items else "list"
    return f"{spec.get('type', 'any')}{_range(spec)}"


def _range(spec: Mapping[str, Any]) -> str:
    parts = []
    for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")):
        if key in spec:
            value = spec[key]
            power = {2**31: "2^31", 2**63: "2^63"}.get(value, f"{value:g}")
            parts.append(f"{sign} {power}")
    if "maxLength" in spec:
        parts.append(f"{spec.get('minLength', 0)} to {spec['maxLength']} characters")
    return f" {', '.join(parts)}" if parts else ""


def _json_default(spec: Mapping[str, Any]) -> str:
    default = spec.get("default")
    if default is None:
        return "null"
    if isinstance(default, dict):
        return "its defaults"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def error_codes() -> str:
    """Every error code with its status."""
    return _table(("code", "status"), [(f"`{code}`", str(status)) for code, status in STATUS_OF_CODE.items()])


# Metrics -------------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Every metric that the engine declares."""
    rows = []
    for family in EngineMetrics().registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append((f"`{family.name}{suffix}`", family.type, family.documentation))
    return _table(("metric", "kind", "meaning"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PARTS: Mapping[str, Callable[[], str]] = {
    "settings": command_settings,
    "client-settings": client_settings,
    "vllm-settings": vllm_settings,
    "messages": messages,
    "error-codes": error_codes,
    "metrics": metrics,
}


def main() -> int:
    """Write every page that has changed; returns the exit code."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        rendered = render(text)
        if rendered != text:
            page.write_text(rendered, encoding="utf-8")
            sys.stdout.write(f"{page.name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
