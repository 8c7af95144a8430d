"""The status page in a real browser: it is laid out, its style is let through by its own policy, and nothing is fetched."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.browser import find_chromium, render, take_screenshot
from tests.support.service import make_harness, serving

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def test_a_browser_shows_the_page_and_complains_of_nothing(tmp_path: Path) -> None:
    harness = make_harness()
    for accepted in (0, 1, 2, 3, 4, 4):
        harness.metrics.saw_acceptance(accepted, 2_000, 1.0)
    harness.metrics.publish_acceptance()
    with serving(harness) as server:
        rendered = render(str(CHROMIUM), server.url)
        take_screenshot(str(CHROMIUM), server.url, tmp_path / "page.png", width=800, height=600)
    assert "fake-drafter" in rendered.document
    assert rendered.document.count("<meter") == 4
    assert "Refused to" not in rendered.complaints
    assert "CONSOLE" not in rendered.complaints
    picture = (tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (800, 600)
    assert len(picture) > 10_000, "a page without its style is smaller"
