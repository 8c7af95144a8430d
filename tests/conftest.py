"""Settings of every test: no time limits in property tests, since machines are shared, and examples that repeat."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

settings.register_profile("project", deadline=None, derandomize=True)
# For tests that are meant to fail: nobody reads the example, so it need not be a small one.
settings.register_profile("unshrunk", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("project")


@pytest.fixture(autouse=True)
def _end_the_log_of_a_command() -> Iterator[None]:
    """A command run inside a test logs to the stream that pytest captures, which is closed when the test ends."""
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
