"""What all tests share: no example of a property has a deadline, since machines are loaded."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("loaded", deadline=None)
settings.load_profile("loaded")
