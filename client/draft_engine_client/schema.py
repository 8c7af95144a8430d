"""The wire schema as one JSON Schema document, for readers and clients that do not run Python.

`wire_schema.json` beside this file is its committed copy; `python -m draft_engine_client.schema` writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from draft_engine_client import wire

SCHEMA_PATH = Path(__file__).with_name("wire_schema.json")

_MESSAGES: tuple[type[wire.Message], ...] = (
    wire.ClientHello,
    wire.ClientWelcome,
    wire.ProposeRequest,
    wire.JsonProposeRequest,
    wire.ProposeReply,
    wire.JsonProposeReply,
    wire.ErrorReply,
    wire.SessionList,
    wire.ModelList,
    wire.ProjectionInfo,
    wire.VersionInfo,
)


def json_schema() -> dict[str, Any]:
    """All messages under `$defs`, by the names they have in `wire`."""
    _, document = models_json_schema(
        [(message, "validation") for message in _MESSAGES],
        title=f"Draft engine protocol, version {wire.PROTOCOL_VERSION}",
        description="Bodies between a target server and a draft server.",
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def schema_text() -> str:
    """The text of `wire_schema.json`."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
