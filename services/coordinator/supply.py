"""Protocol of a job's own source of groups, where tickets to workers do not make them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.services.coordinator.decision import DrawSource
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.retry import Retry
from penstock.services.coordinator.run import JobRun
from penstock.shared.protocol.events import Event
from penstock.shared.protocol.ids import Draw

__all__ = ["Fact", "LiveDeadLetter", "Supply", "Unreadable"]

Fact = Callable[[], Awaitable[None]]
"""Runs in turn with the decisions of its job."""


class Unreadable(NamedTuple):
    """A message that does not decode."""

    stream: str
    seq: int
    reason: str


class LiveDeadLetter(NamedTuple):
    """A dead letter of INTERACTIONS or FEEDBACK as it was there, its parts put together."""

    stream: str
    seq: int
    headers: Mapping[str, str]
    data: bytes


class Supply(Protocol):
    """Makes the groups of one job on its leader."""

    retry: Retry
    """Its leader's: says what is waited for."""

    @property
    def source(self) -> DrawSource:
        """Its part of each decision."""
        ...

    async def recover(self, state: LedgerState) -> None:
        """Take up what earlier leaders left, before the first decision."""
        ...

    async def follow(self, post: Callable[[Fact], Awaitable[None]]) -> None:
        """Bring facts, until cancelled."""
        ...

    async def order(self, run: JobRun, draws: Sequence[Draw]) -> None:
        """Publish the groups of these draws. Safe to repeat."""
        ...

    async def flush(self) -> None:
        """Make durable what facts brought: a decision follows that may rest on it."""
        ...

    def unreadable(self) -> list[Unreadable]:
        """Messages since the last call that cannot be read: they are kept before a decision passes them."""
        ...

    async def requeue(self, letter: LiveDeadLetter) -> int:
        """Take in again what nobody could read; how many interactions or items that are neither over nor known here.

        Raises ProtocolError where it still does not decode, and Unavailable. Safe to repeat.
        """
        ...

    async def committed(self, run: JobRun, events: Sequence[Event]) -> None:
        """A decision stands in the ledger, and ``run`` has taken it in."""
        ...

    async def close(self) -> None:
        """The job is over: refuse what is undecided, also what came since facts were taken last. Safe to repeat."""
        ...

    def measures(self) -> dict[str, float]:
        """Values of the row of an update, of what happened since the last one."""
        ...

    def waits(self, run: JobRun, now: float) -> list[dict[str, Any]]:
        """Waits of the missing groups."""
        ...
