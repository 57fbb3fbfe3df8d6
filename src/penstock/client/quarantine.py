"""Feedback that is held back, for both clients: ``client.quarantine``. Needs the scope ``feedback:admin``."""

from __future__ import annotations

from typing import Literal

from penstock.client.calls import Call, Row, Rows, post, show
from penstock.client.sending import AsyncSend, Send

__all__ = ["AsyncQuarantine", "Quarantine"]

_PAGE = 100


class Quarantine:
    """List, show, release and drop the feedback of a job that is held back."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def list(self, job: str, *, limit: int = 100) -> Rows:
        """Up to ``limit`` items, in the order of their ids."""
        found: Rows = []
        while len(found) < limit:
            page = self._send(_page(job, found, limit))
            found += page["data"]
            if not page["has_more"]:
                break
        return found

    def show(self, job: str, item: str) -> Row:
        """One of them, with what it says. Raises NotFound, Conflict: it is not held any more."""
        return self._send(show(_path(job, item), dict))

    def release(self, job: str, item: str) -> Row:
        """Let it count. Raises NotFound, Conflict: it is not held any more."""
        return self._send(_decide(job, item, "release"))

    def drop(self, job: str, item: str) -> Row:
        """Reject it for good. Raises NotFound, Conflict: it is not held any more."""
        return self._send(_decide(job, item, "drop"))


class AsyncQuarantine:
    """List, show, release and drop the feedback of a job that is held back."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    async def list(self, job: str, *, limit: int = 100) -> Rows:
        """Up to ``limit`` items, in the order of their ids."""
        found: Rows = []
        while len(found) < limit:
            page = await self._send(_page(job, found, limit))
            found += page["data"]
            if not page["has_more"]:
                break
        return found

    async def show(self, job: str, item: str) -> Row:
        """One of them, with what it says. Raises NotFound, Conflict: it is not held any more."""
        return await self._send(show(_path(job, item), dict))

    async def release(self, job: str, item: str) -> Row:
        """Let it count. Raises NotFound, Conflict: it is not held any more."""
        return await self._send(_decide(job, item, "release"))

    async def drop(self, job: str, item: str) -> Row:
        """Reject it for good. Raises NotFound, Conflict: it is not held any more."""
        return await self._send(_decide(job, item, "drop"))


def _path(job: str, item: str) -> str:
    return f"/v1/jobs/{job}/quarantine/{item}"


def _page(job: str, found: Rows, limit: int) -> Call[Row]:
    after = found[-1]["feedback_id"] if found else None
    return show(f"/v1/jobs/{job}/quarantine", dict, after=after, limit=min(_PAGE, limit - len(found)))


def _decide(job: str, item: str, verb: Literal["release", "drop"]) -> Call[Row]:
    return post(f"{_path(job, item)}/{verb}")
