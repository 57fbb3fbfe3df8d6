"""Protocol of the task that leads a job, whatever its kind."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["Leader"]


class Leader(Protocol):
    """Leads one job from ``lead`` to its end."""

    ready: bool
    """True once it has recovered and decides."""

    async def lead(self) -> None:
        """Lead until the job is over. Raises Fenced when somebody else leads."""
        ...

    def want(self, record: JobRecord) -> None:
        """The job's record changed."""
        ...

    def wake(self) -> None:
        """Look at the job now: workers came."""
        ...

    def why(self) -> list[dict[str, Any]]:
        """Waits of the job, also before it is ready."""
        ...

    def status(self) -> dict[str, Any]:
        """This leader's view of the job, for the heartbeat."""
        ...

    async def bury(self, stream: str, seq: int, draw: Draw | None, *, reason: str, attempts: int) -> None:
        """A message of a work queue is dead: keep it in DEAD, and end what it stood for."""
        ...
