"""The documentation: generated parts are up to date, links lead somewhere, and what is named (flags, metrics) exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from service.cli import COMMANDS
from service.settings import env_of, flag_of
from tests.support.compose import ROOT, image_environment, load_compose
from tests.support.service import make_app, make_harness, serving

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = CODE.sub("", page.read_text())
    titles = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert load_generator().render(text) == text, "run `make docs`"


def test_the_references_have_their_generated_parts() -> None:
    generator = load_generator()
    assert {page.name for page in generator.pages()} == {"configuration.md", "protocol.md", "operators.md", "vllm.md"}
    found = {match["name"] for page in PAGES for match in generator._BLOCK.finditer(page.read_text())}
    assert found == set(generator.PARTS)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        there = (page.parent / place).resolve() if place else page
        if "pretrained" not in place:  # put in place by training
            assert there.exists(), link
        if anchor:
            assert anchor in anchors(there), link


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((DOCS / "README.md").read_text()))
    assert {page.name for page in PAGES} - {"README.md"} <= listed


def known_flags() -> dict[str, set[str]]:
    """Flags by command."""
    flags = {}
    for command in COMMANDS:
        fields = command.settings().model_fields
        flags[command.name] = {"--config", "--help", *(flag_of(name) for name in fields)}
        flags[command.name] |= {f"--no-{flag_of(name)[2:]}" for name, field in fields.items() if field.annotation is bool}
    return flags


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_and_flags_that_are_named_exist(page: Path) -> None:
    flags, text = known_flags(), page.read_text().replace("\\\n", " ")
    all_flags = set().union(*flags.values())
    for name, rest in re.findall(r"(?:^|`|bin/)draft-engine ([a-z][\w-]*)([^\n`#|]*)", text, re.MULTILINE):
        assert name in flags, f"draft-engine {name}"
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
            assert flag in flags[name], f"draft-engine {name} {flag}"
    for flag in re.findall(r"`(--[a-z][\w-]*)", text):
        assert flag in all_flags, flag


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_verbs_of_make_that_are_named_exist(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= verbs


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_variables_that_are_named_exist(page: Path) -> None:
    known = {env_of(name) for command in COMMANDS for name in command.settings().model_fields}
    known |= {"DRAFT_ENGINE_API_KEY_FILE", "DRAFT_ENGINE_DRAFT_API_KEY_FILE", "DRAFT_ENGINE_"}
    assert set(re.findall(r"DRAFT_ENGINE_\w*", page.read_text())) <= known


def test_variables_of_the_compose_file_are_in_the_guide() -> None:
    compose, guide = (ROOT / "docker/compose.yaml").read_text(), (DOCS / "operators.md").read_text()
    optional = {"DRAFT_ENGINE_VERSION", "PROMETHEUS_RETENTION"}
    assert set(re.findall(r"\$\{(\w+)", compose)) - optional <= set(re.findall(r"\b[A-Z][A-Z_]+\b", guide))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_are_named_exist(page: Path) -> None:
    harness = make_harness()
    make_app(harness)
    exported = set(re.findall(r"^# TYPE (\w+)", harness.metrics.exposition().decode(), re.MULTILINE))
    named = {
        name for name in re.findall(r"`(draft_engine_\w+)`", page.read_text()) if not name.startswith("draft_engine_client.")
    }
    assert named - {"draft_engine_client"} <= exported


def test_the_protocol_page_has_every_route_and_no_other() -> None:
    with serving(make_harness()) as server:
        document: dict[str, Any] = server.http.get("/openapi.json").json()
    routes = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    page = (DOCS / "protocol.md").read_text()
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", page)) == routes


def test_the_page_on_security_says_that_hidden_states_reveal_prompts() -> None:
    assert "Hidden states can reveal prompts" in (DOCS / "security.md").read_text()


def test_the_guide_names_the_ports_that_are_published() -> None:
    guide = (DOCS / "operators.md").read_text()
    for name, service in load_compose({})["services"].items():
        address, port, _ = service["ports"][0].rsplit(":", 2)
        assert f"`{address}:{port}`" in guide, name
    assert image_environment()["XDG_CACHE_HOME"] == "/cache"
