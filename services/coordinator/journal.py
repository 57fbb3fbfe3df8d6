"""The ledger on the bus: read it, and append to it as its one writer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.services.coordinator.ledger import LedgerState, fold
from penstock.shared.errors import Conflict, Fenced, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Event, decode_events, encode_events
from penstock.shared.transport.bus import Bus

__all__ = ["Journal"]


class Journal:
    """Append-only event log of one job with a single writer.

    An append names the last sequence it knows. A refused or timed-out append is resolved by reading back the tail: the
    own entry there means success, a foreign one means that somebody else leads (Fenced).
    """

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._subject = subjects.ledger(job)
        self._last_seq = 0

    async def load(self) -> LedgerState:
        """Fold everything that was ever appended."""
        state = LedgerState()
        for message in await self._bus.read(subjects.LEDGER, self._subject):
            fold(decode_events(message.data), state)
            self._last_seq = message.seq
        return state

    async def append(self, events: Sequence[Event]) -> int:
        """Commit one decision; returns its sequence. Retries for as long as the bus is away (the caller is cancelled
        when it loses its lease).

        Raises:
            Fenced: another writer appended.
        """
        data = encode_events(events)
        while True:
            try:
                seq = await self._bus.publish(self._subject, data, expect_last_subject_seq=self._last_seq, deadline_s=5)
            except Conflict:
                seq = await self._resolve(data)
            except Unavailable:
                await asyncio.sleep(0.2)
                continue
            if seq:
                self._last_seq = seq
                return seq

    async def _resolve(self, data: bytes) -> int:
        """Sequence of the own entry if it is the next one in the tail, 0 if there is none yet."""
        tail = await self._bus.read(subjects.LEDGER, self._subject, start_seq=self._last_seq + 1)
        if not tail:
            return 0
        if tail[0].data == data:
            return tail[0].seq
        raise Fenced(f"{self._subject}: entry {tail[0].seq} was written by somebody else; stepping down")
