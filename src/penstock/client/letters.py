"""Dead letters of jobs, for both clients: ``client.letters``."""

from __future__ import annotations

from penstock.client.calls import Call, Row, Rows, nothing, operation, post, result_of, show
from penstock.client.sending import AsyncSend, Send

__all__ = ["AsyncLetters", "Letters"]

_PAGE = 100
_HOLD_S = 10.0


class Letters:
    """List, show, replay and drop the dead letters of a job."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def list(self, job: str, *, limit: int = 100) -> Rows:
        """Up to ``limit`` dead letters, oldest first."""
        found: Rows = []
        while len(found) < limit:
            page = self._send(_page(job, found, limit))
            found += page["data"]
            if not page["has_more"]:
                break
        return found

    def show(self, job: str, id: int) -> Row:
        """One of them, with headers and content. Raises NotFound."""
        return self._send(show(_path(job, id), dict))

    def replay(self, job: str, id: int) -> Row:
        """Have its prompt asked for again; the new ``draw``. Raises NotFound, Conflict: the job draws nothing now."""
        asked = self._send(post(f"{_path(job, id)}/replay"))
        while asked["state"] == "pending":
            asked = self._send(operation(job, asked["id"], _HOLD_S))
        return result_of(asked)

    def drop(self, job: str, id: int) -> None:
        """Forget it. Raises NotFound."""
        self._send(Call("DELETE", _path(job, id), nothing))


class AsyncLetters:
    """List, show, replay and drop the dead letters of a job."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    async def list(self, job: str, *, limit: int = 100) -> Rows:
        """Up to ``limit`` dead letters, oldest first."""
        found: Rows = []
        while len(found) < limit:
            page = await self._send(_page(job, found, limit))
            found += page["data"]
            if not page["has_more"]:
                break
        return found

    async def show(self, job: str, id: int) -> Row:
        """One of them, with headers and content. Raises NotFound."""
        return await self._send(show(_path(job, id), dict))

    async def replay(self, job: str, id: int) -> Row:
        """Have its prompt asked for again; the new ``draw``. Raises NotFound, Conflict: the job draws nothing now."""
        asked = await self._send(post(f"{_path(job, id)}/replay"))
        while asked["state"] == "pending":
            asked = await self._send(operation(job, asked["id"], _HOLD_S))
        return result_of(asked)

    async def drop(self, job: str, id: int) -> None:
        """Forget it. Raises NotFound."""
        await self._send(Call("DELETE", _path(job, id), nothing))


def _path(job: str, id: int) -> str:
    return f"/v1/jobs/{job}/dead-letters/{id}"


def _page(job: str, found: Rows, limit: int) -> Call[Row]:
    after = found[-1]["id"] if found else None
    return show(f"/v1/jobs/{job}/dead-letters", dict, after=after, limit=min(_PAGE, limit - len(found)))
