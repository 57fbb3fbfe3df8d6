"""Tags: what senders say of requests, episodes and feedback in names and values of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictStr, StringConstraints

__all__ = ["MAX_TAGS", "MAX_TAG_KEY", "MAX_TAG_VALUE", "TagKey", "TagValue", "Tags"]

MAX_TAGS, MAX_TAG_KEY, MAX_TAG_VALUE = 16, 64, 512
"""Tags of one request, episode or item of feedback; characters of their keys and values."""

TagKey = Annotated[StrictStr, StringConstraints(min_length=1, max_length=MAX_TAG_KEY)]
TagValue = Annotated[StrictStr, StringConstraints(max_length=MAX_TAG_VALUE)]
Tags = Annotated[dict[TagKey, TagValue], Field(max_length=MAX_TAGS)]
