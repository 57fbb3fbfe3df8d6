"""Turn off the deadline of Hypothesis: a busy machine must not fail a test by the time of an example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("laws", deadline=None)
settings.load_profile("laws")
