"""HTTP problems: the refusals of the HTTP layer, and the one table that maps errors of the core to HTTP problems.

The core raises ``shared/errors`` and knows no status; only the HTTP layer imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from penstock.shared.errors import (
    ConfigError,
    Conflict,
    DataError,
    DeadlineError,
    Fenced,
    Flaw,
    Forbidden,
    Gone,
    Invalid,
    NoRoom,
    NotFound,
    OutOfReach,
    PenstockError,
    QuotaUsed,
    RateLimited,
    Refused,
    RetryLater,
    StreamFull,
    TooLarge,
    Unauthenticated,
    Unavailable,
)

__all__ = ["Flaw", "HttpProblem", "from_error"]

PRECISE_S = 10.0
"""Waits below this time (seconds) are also given in milliseconds, in the header that OpenAI's SDKs prefer."""


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


class _Rule(NamedTuple):
    """The response to the errors of one class. ``code`` is '' for a class whose errors have codes of their own."""

    error: type[PenstockError]
    status: int
    code: str = ""
    headers: Mapping[str, str] = {}


_LATER = {"Retry-After": "1"}
_RULES = (  # the first one that fits counts: subclasses come before their base
    _Rule(Invalid, 422),
    _Rule(Unauthenticated, 401, headers={"WWW-Authenticate": 'Bearer realm="penstock"'}),
    _Rule(Forbidden, 403),
    _Rule(OutOfReach, 404),
    _Rule(Gone, 410),
    _Rule(TooLarge, 413),
    _Rule(RateLimited, 429),
    _Rule(RetryLater, 503),
    _Rule(QuotaUsed, 507, headers={"x-should-retry": "false"}),
    _Rule(NoRoom, 507),
    _Rule(NotFound, 404, "not_found"),
    _Rule(Conflict, 409, "conflict"),
    _Rule(ConfigError, 422, "invalid_job"),
    _Rule(DataError, 422, "invalid_data"),
    _Rule(StreamFull, 503, "backlog_full", _LATER),
    _Rule(Unavailable, 503, "unavailable", _LATER),
    _Rule(Fenced, 503, "not_leader", _LATER),
    _Rule(DeadlineError, 504, "timeout"),
)


def from_error(error: PenstockError) -> HttpProblem:
    """Return the HTTP problem for an error. An error class that is not in ``_RULES`` becomes a 500 with the error's
    text."""
    if isinstance(error, HttpProblem):
        return error
    rule = next((rule for rule in _RULES if isinstance(error, rule.error)), None)
    if rule is None:
        return HttpProblem(500, "internal", f"{type(error).__name__}: {error}")
    if not isinstance(error, Refused):
        return HttpProblem(rule.status, rule.code, str(error), headers=rule.headers)
    headers = {**rule.headers, **(_wait(error.retry_after_s) if isinstance(error, RetryLater) else {})}
    return HttpProblem(rule.status, error.code, error.detail, errors=list(error.flaws), headers=headers)


def _wait(time_s: float) -> dict[str, str]:
    precise = {"retry-after-ms": f"{1000 * time_s:.0f}"} if time_s < PRECISE_S else {}
    return {"Retry-After": str(math.ceil(time_s)), **precise}
