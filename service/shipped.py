"""The drafter that ships with the engine: it belongs to the embedded target."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from service.errors import StartupError

SHIPPED_NAME = "smollm2-135m-instruct"


def shipped_drafter() -> Path:
    """Return its folder.

    Raises:
        StartupError: the installation lacks it.
    """
    folder = Path(str(files("draft_model"))) / "pretrained" / SHIPPED_NAME
    if not (folder / "config.json").is_file():
        raise StartupError(f"the drafter that ships with the engine is missing at {folder}; name another one with --model")
    return folder
