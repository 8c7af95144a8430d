from __future__ import annotations

import types

import draft_engine_client


def test_all_names_are_exported_and_sorted() -> None:
    exported = draft_engine_client.__all__
    public = {
        name
        for name, value in vars(draft_engine_client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(exported) == public
    assert exported == sorted(exported, key=lambda name: (not name.isupper(), name))
