"""State machines of the clients: retries of a request, tolerance of an unreachable server, search for a job."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx

from penstock.client import calls
from penstock.client.answers import is_in_flight, pause_s
from penstock.client.calls import Call
from penstock.shared.errors import Conflict, NotFound, Unavailable
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["Attempts", "Patience", "Search"]

_FULL_ID = re.compile(r"job_[0-9a-f]{32}", re.ASCII)
_ID_PREFIX = re.compile(r"(job_)?[0-9a-f]{1,32}", re.ASCII)
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)


class Attempts:
    """Counter of the retries of one request.

    The server may reply that it still processes an earlier attempt. This reply is not a failure: ``retries`` does not
    bound the retries after it, which end ``patience_s`` seconds after the first such reply.
    """

    def __init__(self, retries: int, patience_s: float) -> None:
        self._retries, self._patience_s = retries, patience_s
        self._made = 0
        self._in_flight_until: float | None = None

    def pause_s(self, response: httpx.Response | None) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there should be no further attempt.

        ``response`` is the reply to the last attempt, or None if it got no reply.
        """
        if response is not None and self._retries and is_in_flight(response):
            now = time.monotonic()
            if self._in_flight_until is None:
                self._in_flight_until = now + self._patience_s
            return pause_s(0, response) if now < self._in_flight_until else None
        pause = pause_s(self._made, response)
        if self._made >= self._retries:
            return None
        self._made += 1
        return pause


class Patience:
    """Timer that measures the time since the server's last reply."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = time.monotonic()
        self._failures = 0

    def renew(self) -> None:
        """Restart the timer after a reply of the server."""
        self._since = time.monotonic()
        self._failures = 0

    def after(self, error: Unavailable) -> float:
        """Return the seconds to pause before the next attempt; raise ``error`` if the server has not replied for too
        long."""
        if time.monotonic() - self._since > self._seconds:
            raise error
        self._failures += 1
        return float(min(0.2 * 2 ** min(self._failures, 4), 2.0))


class Search:
    """Search for a job by id, by name (the newest), or by a unique id prefix; the caller sends its requests."""

    def __init__(self, ref: str) -> None:
        self._ref = ref
        self._prefix = ref if ref.startswith("job_") else f"job_{ref}"
        self._found: list[JobRecord] = []
        self._queue: list[Call[Any]] = []
        self._scanning = False
        if _FULL_ID.fullmatch(ref):
            self._queue.append(calls.get(ref))
        elif _NAME.fullmatch(ref) and not ref.startswith("job_"):
            self._queue.append(_page(name=ref, limit=1))
        elif _ID_PREFIX.fullmatch(ref):
            self._scan(None)

    def next_call(self) -> Call[Any] | None:
        """Return the next request, or None when ``result`` is available."""
        return self._queue.pop(0) if self._queue else None

    def take(self, reply: Any) -> None:
        """Process the reply to the last request."""
        records: list[JobRecord] = reply if isinstance(reply, list) else [reply]
        if not self._scanning:
            self._found += records
            if not records and _ID_PREFIX.fullmatch(self._ref):
                self._scan(None)
            return
        self._found += [record for record in records if record.id.startswith(self._prefix)]
        if len(records) == _PAGE:
            self._scan(records[-1].id)

    def result(self) -> JobRecord:
        """Return the job. Raises NotFound, or Conflict if several ids have this prefix."""
        if not self._found:
            raise NotFound(f"no job has the id, the id prefix or the name '{self._ref}'; see 'penstock ls'")
        if len(self._found) > 1:
            ids = ", ".join(record.id for record in self._found[:3])
            raise Conflict(f"{len(self._found)} jobs start with '{self._ref}' ({ids}, ...); give more of the id")
        return self._found[0]

    def _scan(self, after: str | None) -> None:
        self._scanning = True
        self._queue.append(_page(after=after, limit=_PAGE))


_PAGE = 100


def _page(*, after: str | None = None, limit: int, name: str | None = None) -> Call[Any]:
    return calls.page(after=after, limit=limit, order="desc", phase=None, name=name)
