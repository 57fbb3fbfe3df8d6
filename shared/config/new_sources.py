"""How much what a new source of feedback says counts until it is known to agree with those that are trusted."""

from __future__ import annotations

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["NewSourcesConfig"]


class NewSourcesConfig(StrictModel):
    """A source is an API key. It is new until it has judged enough of the answers that reference keys judged, too."""

    reference_keys: list[str] = Field(min_length=1, max_length=64)
    """Ids of the API keys that are believed from the start: an automatic judge, people who audit."""
    weight: float = Field(0.2, gt=0, le=1)
    """Factor of the advantages of what a new source judged."""
    items: int = Field(30, ge=10)
    """So many values of a source about which a reference key said something are needed to know it."""
    agreement: float = Field(0.4, gt=0, le=1)
    """Smallest concordance of a source with the reference keys; for yes and no that is Cohen's kappa."""
