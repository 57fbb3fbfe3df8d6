"""What is blanked in the texts of live requests and feedback before they are stored."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["RedactionConfig"]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]{1,32}$")]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class RedactionConfig(StrictModel):
    """What must not reach a disk; whatever is found stands there as `[NAME]`."""

    patterns: dict[Name, Pattern] = Field(default_factory=dict, max_length=32)
    """Regular expressions of Python by name, for live requests and for the texts in feedback."""
    function: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, importable by the rollout service: `f(text) -> [(start, end, name), ...]`; for live
    requests only."""

    @model_validator(mode="after")
    def _finds_something(self) -> RedactionConfig:
        if not self.patterns and self.function is None:
            raise ValueError("give patterns or function, or leave the section out")
        for name, pattern in self.patterns.items():
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"patterns.{name}: not a regular expression: {error}") from None
            if compiled.search(""):
                raise ValueError(f"patterns.{name}: it matches an empty text, so it would match everywhere")
        return self
