"""How long an example takes is not one of the laws tested here: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("laws", deadline=None)
settings.load_profile("laws")
