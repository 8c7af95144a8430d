"""The committed JSON Schema is current, and says what the models say."""

from __future__ import annotations

import json

import jsonschema
import pytest

from draft_engine_client import wire
from draft_engine_client.schema import SCHEMA_PATH, json_schema, schema_text


def test_the_committed_file_is_current() -> None:
    assert SCHEMA_PATH.read_text(encoding="utf-8") == schema_text(), "run python -m draft_engine_client.schema"


def test_it_is_a_schema_and_knows_every_message() -> None:
    document = json_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    messages = {name for name, value in vars(wire).items() if isinstance(value, type) and issubclass(value, wire.Message)}
    assert messages - {"Message"} <= set(document["$defs"])


def test_it_accepts_a_message_and_refuses_an_unknown_field() -> None:
    document = json_schema()
    schema = {"$ref": "#/$defs/ProposeRequest", "$defs": document["$defs"]}
    update = wire.SessionUpdate(session_id="a", seq=0, start=0, anchor_token_id=1)
    body = json.loads(wire.ProposeRequest(client_id="c", sessions=(update,)).model_dump_json())
    jsonschema.validate(body, schema)
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        jsonschema.validate({**body, "surprise": 1}, schema)
