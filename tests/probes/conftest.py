"""Models that several tests of probes share: those of the engine's tests."""

from __future__ import annotations

from tests.engine.conftest import family_dir, one_thread, smollm2  # noqa: F401
