"""Redaction of live requests and feedback before they are stored."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from penstock.shared.config.base import OptionalCodeName, StrictModel
from penstock.shared.config.online.patterns import compile_pattern

__all__ = ["RedactionConfig"]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]{1,32}$")]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class RedactionConfig(StrictModel):
    """Patterns of text that must not be stored; each match is replaced by `[NAME]`."""

    patterns: dict[Name, Pattern] = Field(default_factory=dict, max_length=32)
    r"""Regular expressions by name, applied to live requests and to the texts in feedback. The syntax is that of
    [RE2](https://github.com/google/re2/wiki/Syntax), which matches in linear time and has no look-around, no
    back-references and no `\b`. `\w`, `\d` and `\s` match characters of all languages."""
    function: OptionalCodeName = None
    """Additional function, applied to live requests only: `package.module:function`, importable by the rollout
    service, with the signature `f(text) -> [(start, end, name), ...]`."""

    @model_validator(mode="after")
    def _finds_something(self) -> RedactionConfig:
        if not self.patterns and self.function is None:
            raise ValueError("give patterns or function, or leave the section out")
        for name, pattern in self.patterns.items():
            try:
                compiled = compile_pattern(pattern)
            except ValueError as error:
                raise ValueError(f"patterns.{name}: {error}") from None
            if compiled.search(""):
                raise ValueError(f"patterns.{name}: it matches an empty text, so it would match everywhere")
        return self
