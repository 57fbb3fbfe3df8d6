"""Errors that contain their HTTP reply: a status, a machine-readable code, and the invalid fields."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, Field

from penstock.shared.errors import PenstockError

__all__ = ["Flaw", "HttpProblem"]


class Flaw(BaseModel):
    """One invalid part of a request: its place (``pointer``), and what is wrong with it (``detail``)."""

    pointer: str = Field(description="JSON pointer into the body, or the parameter as /query/NAME, /path/NAME")
    detail: str


class HttpProblem(PenstockError):  # noqa: N818
    """A refused request, with its HTTP response."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: list[Flaw] | None = None,
        max_bytes: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, code, detail)
        self.status, self.code, self.detail = status, code, detail
        self.errors = errors or []
        self.max_bytes = max_bytes
        self.headers = dict(headers or {})
