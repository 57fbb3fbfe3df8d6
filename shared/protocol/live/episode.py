"""Episodes opened by request, as stored and as returned by the API."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.shared.protocol.bus_clock import bus_datetime

__all__ = ["KEEP_S", "EpisodeRecord"]

KEEP_S = 7 * 86400.0
"""Retention of an episode after its end (seconds)."""


class EpisodeRecord(BaseModel):
    """Session of an agent with a model. Requests after ``expires_at`` or ``ended_at`` are refused."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(description="ep_ and a UUIDv7")
    object: Literal["rl.episode"] = "rl.episode"
    job: str
    model: str
    key_id: str
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    split: Literal["train", "val"] = "train"
    group_id: str | None = None
    user: str = Field("", description="Pseudonym of the user who speaks where a request names nobody")
    tags: dict[str, str] = {}

    @property
    def over(self) -> bool:
        """True if the episode accepts no more requests."""
        return self.ended_at is not None or self.expires_at < bus_datetime()
