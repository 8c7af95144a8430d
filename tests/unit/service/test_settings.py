from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from service.errors import StartupError
from service.settings import (
    EngineLimits,
    ServeSettings,
    add_flags,
    flag_of,
    given_flags,
    is_loopback,
    load_settings,
    unknown_environment,
)

CONFIGS = Path(__file__).parents[3] / "configs"


def write_config(folder: Path, text: str) -> Path:
    path = folder / "engine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, "port = 1001\nmax_queue = 11\nmax_sessions = 21\n")
    monkeypatch.setenv("DRAFT_ENGINE_PORT", "1002")
    monkeypatch.setenv("DRAFT_ENGINE_MAX_QUEUE", "12")
    settings = load_settings(ServeSettings, {"port": "1003"}, config=config)
    assert (settings.port, settings.max_queue, settings.max_sessions, settings.page_size) == (1003, 12, 21, 64)


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    config = write_config(tmp_path, "max_sesions = 4\n")
    with pytest.raises(StartupError, match=r"unknown key 'max_sesions' \(did you mean 'max_sessions'\?\)"):
        load_settings(ServeSettings, {}, config=config)


@pytest.mark.parametrize(("text", "reason"), [("port = = 3", "not a TOML file"), (None, "No such file")])
def test_an_unreadable_file_is_one_clear_line(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "missing.toml" if text is None else write_config(tmp_path, text)
    with pytest.raises(StartupError, match=reason):
        load_settings(ServeSettings, {}, config=path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": "70000"}, "--port"),
        ({"port": "tcp://10.0.0.1:80"}, "--port"),
        ({"kv_cache_memory": "lots"}, "--kv-cache-memory"),
        ({"max_queue": "0"}, "--max-queue"),
        ({"api_key": "short"}, "--api-key"),
        ({"lease_seconds": "-1"}, "--lease-seconds"),
    ],
)
def test_a_bad_value_names_its_flag(flags: dict[str, str], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        load_settings(ServeSettings, flags)


def test_every_bad_value_is_reported_at_once() -> None:
    with pytest.raises(StartupError, match=r"--port.*--max-queue"):
        load_settings(ServeSettings, {"port": "-1", "max_queue": "none"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1048576", 2**20), ("1.5 GiB", 3 * 2**29), ("64k", 64_000)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert load_settings(ServeSettings, {"kv_cache_memory": text}).kv_cache_memory == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "example.org"])
def test_a_bind_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(StartupError, match="api_key"):
        load_settings(ServeSettings, {"host": host})
    assert load_settings(ServeSettings, {"host": host, "api_key": "a-long-secret"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert load_settings(ServeSettings, {"host": host}).api_key is None


def test_the_key_does_not_show_in_a_printed_settings_object() -> None:
    assert "a-long-secret" not in repr(load_settings(ServeSettings, {"api_key": "a-long-secret"}))


def test_settings_never_change() -> None:
    settings = load_settings(ServeSettings, {})
    with pytest.raises(Exception, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_limits_are_resolved_into_a_new_value_under_the_models_own() -> None:
    assert EngineLimits.resolve(load_settings(ServeSettings, {}), 2048).max_context == 2048
    assert EngineLimits.resolve(load_settings(ServeSettings, {"max_context": "100"}), 2048).max_context == 100
    assert EngineLimits.resolve(load_settings(ServeSettings, {"max_context": "9999"}), 2048).max_context == 2048


def test_every_field_is_a_kebab_flag_that_shows_its_variable() -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, ServeSettings)
    text = " ".join(parser.format_help().split())
    for name, field in ServeSettings.model_fields.items():
        assert flag_of(name) in text
        assert f"[env: DRAFT_ENGINE_{name.upper()}]" in text.replace("- ", "-")
        assert field.description, f"{name} has no help"


def test_flags_not_given_are_left_to_the_other_sources() -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, ServeSettings)
    given = given_flags(parser.parse_args(["--port", "5", "--no-prefix-cache"]), ServeSettings)
    assert given == {"port": "5", "prefix_cache": False}


def test_a_mistyped_variable_is_named_with_the_nearest() -> None:
    found = unknown_environment([ServeSettings], {"DRAFT_ENGINE_PROT": "1", "DRAFT_ENGINE_PORT": "1", "HOME": "/"})
    assert found == ["DRAFT_ENGINE_PROT (did you mean DRAFT_ENGINE_PORT?)"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_loads(path: Path) -> None:
    load_settings(ServeSettings, {}, config=path)


def test_there_are_shipped_configurations() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} >= {"embedded-cpu", "qwen3-4b", "kimi-k3"}
