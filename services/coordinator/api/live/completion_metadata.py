"""`metadata` of a completion request: its episode, its user, and its tags."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from penstock.services.coordinator.feedback.posts import MAX_TAG_KEY, MAX_TAG_VALUE, MAX_TAGS, TagKey, TagValue
from penstock.shared.protocol.live.interaction import USER_TAG

__all__ = ["MAX_USER", "RequestMetadata"]

MAX_USER = 512
"""Longest name of a user, in characters."""
_FLAGS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
"""Booleans by their text: OpenAI's clients send metadata as strings, and Python writes `True` and `False`."""


def _as_text(value: Any) -> Any:
    """Convert numbers and booleans to their JSON text."""
    if isinstance(value, int | float):
        return orjson.dumps(value).decode()
    if not isinstance(value, str):
        raise ValueError("must be a string, a number or a boolean")
    return value


def _as_name(value: Any) -> Any:
    """Convert integers to text, since databases often use numeric ids as names."""
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise ValueError("must be a string or an integer")
    return str(value) if isinstance(value, int) else value


def _as_user(value: Any) -> Any:
    name = _as_name(value)
    if len(name or "") > MAX_USER:
        raise ValueError(f"at most {MAX_USER} characters")
    return name


def _as_flag(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str) or value not in _FLAGS:
        raise ValueError("must be true or false")
    return _FLAGS[value]


def _name_schema(**text: Any) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string", **text}, {"type": "integer"}, {"type": "null"}]})


Name = Annotated[str | None, BeforeValidator(_as_name), _name_schema()]
UserName = Annotated[str | None, BeforeValidator(_as_user), _name_schema(maxLength=MAX_USER)]
Flag = Annotated[bool | None, BeforeValidator(_as_flag), WithJsonSchema({"enum": [True, False, *_FLAGS, None]})]
TagText = Annotated[
    TagValue,
    BeforeValidator(_as_text),
    WithJsonSchema({"type": ["string", "number", "boolean"], "maxLength": MAX_TAG_VALUE}),
]


class RequestMetadata(BaseModel):
    """Metadata that a request carries. Every key without a field here is a tag; `user_id` is a field and also a tag.

    Numbers and booleans are stored as text; values of other types are refused.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        json_schema_extra={
            "maxProperties": MAX_TAGS + 3,
            "propertyNames": {"minLength": 1, "maxLength": MAX_TAG_KEY},
        },
    )
    __pydantic_extra__: dict[TagKey, TagText]

    episode_id: Name = Field(None, description="Episode of which the request is a turn")
    train: Flag = Field(None, description="false: record the request, but never train on it")
    split: Literal["train", "val"] | None = Field(None, description="`val`: recorded for evaluation, never trained on")
    user_id: UserName = Field(None, description="User of the request without `user`; stored as a pseudonym")

    @property
    def tags(self) -> dict[str, str]:
        """The tags, including the user's name as it was sent."""
        named = {USER_TAG: self.user_id} if self.user_id else {}
        return {**(self.__pydantic_extra__ or {}), **named}

    @model_validator(mode="after")
    def _has_few_tags(self) -> RequestMetadata:
        if len(self.tags) > MAX_TAGS:
            raise ValueError(f"at most {MAX_TAGS} tags (episode_id, train and split are none), found {len(self.tags)}")
        return self
