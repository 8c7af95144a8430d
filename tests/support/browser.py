"""A headless Chromium, where there is one: what it makes of a page, and what it looks like. CHROMIUM names the binary."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Rendered:
    """The document after it was laid out, and what the browser complained of."""

    document: str
    complaints: str


def find_chromium() -> str | None:
    """The browser's binary, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def render(binary: str, url: str) -> Rendered:
    """Load a page and return its document."""
    result = _run(binary, "--dump-dom", "--enable-logging=stderr", "--v=0", url)
    return Rendered(result.stdout, result.stderr)


def take_screenshot(binary: str, url: str, file: Path, *, width: int = 1000, height: int = 1500) -> None:
    """Write a picture of a page."""
    _run(binary, f"--screenshot={file}", f"--window-size={width},{height}", "--hide-scrollbars", url)


def _run(binary: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as profile:
        fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}")
        return subprocess.run([binary, *fixed, *arguments], capture_output=True, text=True, timeout=120, check=True)
