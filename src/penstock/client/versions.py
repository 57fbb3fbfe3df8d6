"""Which version of a policy is served, for both clients: ``client.versions``."""

from __future__ import annotations

import time

from penstock.client.calls import Call, Row, operation, post, result_of
from penstock.client.sending import AsyncSend, Send
from penstock.shared.errors import DeadlineError

__all__ = ["AsyncVersions", "Versions"]

_HOLD_S = 10.0


class Versions:
    """Override the promotion gate of a job, or take it back to a checkpoint."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def promote(self, job: str, version: int, *, timeout_s: float = 120.0) -> Row:
        """Have the newest version served whatever was measured of it; needs the scope ``admin``.

        Raises:
            Conflict: it is not the newest one, or the job has no gate, or has ended.
            DeadlineError: the ledger does not say so within ``timeout_s``.
        """
        return self._wait(job, self._send(_promote(job, version)), timeout_s)

    def roll_back(self, job: str, checkpoint: int, *, timeout_s: float = 120.0) -> Row:
        """Give up the updates after a checkpoint; the ``version`` under which its weights go on.

        Raises:
            Conflict: there is no such checkpoint, nothing was trained after it, or the log does not reach back to it.
            DeadlineError: the trainer is not there within ``timeout_s``; it goes back when it can.
        """
        return self._wait(job, self._send(_roll_back(job, checkpoint)), timeout_s)

    def _wait(self, job: str, asked: Row, timeout_s: float) -> Row:
        deadline = time.monotonic() + timeout_s
        while asked["state"] == "pending":
            asked = self._send(operation(job, asked["id"], _left(asked, job, deadline)))
        return result_of(asked)


class AsyncVersions:
    """Override the promotion gate of a job, or take it back to a checkpoint."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    async def promote(self, job: str, version: int, *, timeout_s: float = 120.0) -> Row:
        """See ``Versions.promote``."""
        return await self._wait(job, await self._send(_promote(job, version)), timeout_s)

    async def roll_back(self, job: str, checkpoint: int, *, timeout_s: float = 120.0) -> Row:
        """See ``Versions.roll_back``."""
        return await self._wait(job, await self._send(_roll_back(job, checkpoint)), timeout_s)

    async def _wait(self, job: str, asked: Row, timeout_s: float) -> Row:
        deadline = time.monotonic() + timeout_s
        while asked["state"] == "pending":
            asked = await self._send(operation(job, asked["id"], _left(asked, job, deadline)))
        return result_of(asked)


def _left(asked: Row, job: str, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(f"operation {asked['id']} ({asked['kind']}) of job '{job}' is not done yet")
    return min(_HOLD_S, left)


def _promote(job: str, version: int) -> Call[Row]:
    return post(f"/v1/jobs/{job}/promote", {"version": version})


def _roll_back(job: str, checkpoint: int) -> Call[Row]:
    return post(f"/v1/jobs/{job}/rollback", {"checkpoint": checkpoint})
