"""Protocol of a component that creates a job's groups without tickets, such as groups of live data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.services.coordinator.training.decision import DrawSource
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.protocol.events import Event
from penstock.shared.protocol.ids import Draw

__all__ = ["Fact", "LiveDeadLetter", "Supply", "Unreadable"]

Fact = Callable[[], Awaitable[None]]
"""Work that a leader runs in sequence with the decisions of its job."""


class Unreadable(NamedTuple):
    """A message that cannot be decoded."""

    stream: str
    seq: int
    reason: str


class LiveDeadLetter(NamedTuple):
    """A dead letter of INTERACTIONS or FEEDBACK in its original form, with its parts joined."""

    stream: str
    seq: int
    headers: Mapping[str, str]
    data: bytes


class Supply(Protocol):
    """Creates the groups of one job on its leader."""

    retry: Retry
    """The leader's ``Retry``, which repeats refused writes and reports the waits for the bus."""

    @property
    def source(self) -> DrawSource:
        """Source of the draws and batches, which takes part in each decision of the job."""
        ...

    async def recover(self, state: LedgerState) -> None:
        """Restore the state that earlier leaders left, before the first decision."""
        ...

    async def follow(self, post: Callable[[Fact], Awaitable[None]]) -> None:
        """Pass work for the leader to ``post`` until cancelled."""
        ...

    async def order(self, run: JobRun, draws: Sequence[Draw]) -> None:
        """Publish the groups of ``draws``. Safe to repeat."""
        ...

    def decided(self, state: LedgerState, *, ends: bool) -> Sequence[Event]:
        """Return the decisions on live items since the last call, each small enough for an entry of the ledger.

        The leader records them before the next decision, which may depend on them. If that decision ``ends`` the job,
        everything undecided is refused.
        """
        ...

    async def flush(self) -> None:
        """Publish results that the ledger does not record, such as the status of an item that is not decided yet."""
        ...

    def unreadable(self) -> list[Unreadable]:
        """Return the messages that could not be decoded since the last call. The leader copies them to DEAD, the stream
        of dead letters, before its next decision."""
        ...

    async def requeue(self, dead_letter: LiveDeadLetter) -> int:
        """Accept a message that was unreadable before; return how many of its interactions or items are new to the
        leader.

        Raises ProtocolError if it still cannot be decoded, and Unavailable. Safe to repeat.
        """
        ...

    async def committed(self, state: LedgerState, events: Sequence[Event], seq: int) -> None:
        """Apply a decision that was committed as ledger entry ``seq``; ``state`` includes it."""
        ...

    async def close(self) -> None:
        """Refuse all undecided items, including the newest arrivals, because the job has ended. Safe to repeat."""
        ...

    def measures(self) -> dict[str, float]:
        """Return metrics of the time since the previous update, for the metrics row of the newest update."""
        ...

    def waits(self, run: JobRun, inputs: Inputs) -> list[dict[str, Any]]:
        """Return a row for each wait for missing groups."""
        ...
