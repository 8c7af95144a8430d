"""Settings of every test: no time limits in property tests, since machines are shared, and examples that repeat."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
