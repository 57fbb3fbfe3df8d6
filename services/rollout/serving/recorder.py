"""Durable records of interactions: those that end at the same time are written in one publish."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from penstock.services.rollout.serving.redaction import RecordRedactor
from penstock.shared.errors import Conflict, DataError, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, pack
from penstock.shared.protocol.live.interaction import EPISODE_HEADER, Interaction
from penstock.shared.runtime import metrics
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 64
BYTES_AT_ONCE = 4 << 20
MAX_RECORD_BYTES = 8 << 20
"""Size limit of a record, which is split if it exceeds one message; records that clients post have the same limit."""
DEADLINE_S = 5.0
"""Longest time that the last token of a completion is delayed for its record."""

RECORDED = metrics.counter("interactions", "Interactions of live requests, durable or not.", ("recorded",))


class Recorder:
    """Batches the interactions of one job. ``redactor`` removes data that must not be stored."""

    def __init__(self, bus: Bus, job: str, redactor: RecordRedactor | None = None) -> None:
        self._bus, self._job, self._redactor = bus, job, redactor
        self._queue: asyncio.Queue[tuple[Outgoing, asyncio.Future[bool]]] = asyncio.Queue(maxsize=4096)

    async def record(self, interaction: Interaction) -> bool:
        """Record an interaction; return True once it is durable. Failures are counted and logged; serving continues."""
        outgoing = await self._outgoing(interaction, interaction.id)
        if outgoing is None:
            return _counted(False)
        if len(outgoing.data) > MAX_INLINE_BYTES:
            return _counted(await self._send_parts(outgoing))
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._queue.put((outgoing, done))
        return _counted(await done)

    async def record_cut(self, interaction: Interaction) -> bool:
        """Record an answer that is cut off because its gateway seems lost; return True if a record of it is durable.

        If the gateway is alive, another worker completes the answer and records it. The stream does not discard the
        complete record as a duplicate of the cut one. If the complete record comes first, the cut one is not written.
        """
        outgoing = await self._outgoing(interaction, f"{interaction.id}/cut")
        if outgoing is not None and len(outgoing.data) > MAX_INLINE_BYTES:  # parts cannot yield to an existing record
            logger.error("interaction %s was broken off with %d bytes", interaction.id, len(outgoing.data))
            outgoing = None
        if outgoing is None:
            return _counted(False)
        try:
            await self._bus.publish(
                outgoing.subject, outgoing.data, headers=outgoing.headers, msg_id=outgoing.msg_id,
                expect_last_subject_seq=0, deadline_s=DEADLINE_S,
            )  # fmt: skip
        except Conflict:  # completed, or cut off by another worker
            return _counted(True)
        except PenstockError as error:
            logger.error("interaction %s is not recorded: %s", interaction.id, error)
            return _counted(False)
        return _counted(True)

    async def _outgoing(self, interaction: Interaction, msg_id: str) -> Outgoing | None:
        """Return the message of a record; None if it is too long or its redaction fails."""
        if self._redactor is not None:
            try:
                interaction = await asyncio.to_thread(self._redactor.redact, interaction)
            except DataError as error:
                logger.error("interaction %s is not recorded: %s", interaction.id, error)
                return None
        data = pack(interaction, job=self._job, id=interaction.id)
        if len(data) > MAX_INLINE_BYTES and interaction.prompt:  # tokens suffice for learning
            data = pack(replace(interaction, prompt=""), job=self._job, id=interaction.id)
        if len(data) > MAX_RECORD_BYTES:
            logger.error("interaction %s has %d bytes, too many for a record", interaction.id, len(data))
            return None
        subject = subjects.interaction(self._job, interaction.id)
        return Outgoing(subject, data, {EPISODE_HEADER: interaction.episode}, msg_id)

    async def run(self) -> None:
        """Write queued records until cancelled."""
        while True:
            batch = [await self._queue.get()]
            nbytes = len(batch[0][0].data)
            while not self._queue.empty() and len(batch) < MAX_AT_ONCE and nbytes < BYTES_AT_ONCE:
                batch.append(self._queue.get_nowait())
                nbytes += len(batch[-1][0].data)
            recorded = await self._send([outgoing for outgoing, _ in batch])
            for _, done in batch:
                if not done.done():
                    done.set_result(recorded)

    async def _send_parts(self, message: Outgoing) -> bool:
        try:
            await self._bus.publish_whole([message], deadline_s=DEADLINE_S)
        except PenstockError as error:
            logger.error("an interaction of %s with %d bytes is not recorded: %s", self._job, len(message.data), error)
            return False
        return True

    async def _send(self, messages: list[Outgoing]) -> bool:
        try:
            await self._bus.publish_many(messages, deadline_s=DEADLINE_S)
        except PenstockError as error:
            logger.error("%d interactions of %s are not recorded: %s", len(messages), self._job, error)
            return False
        return True


def _counted(recorded: bool) -> bool:
    RECORDED.labels(str(recorded).lower()).inc()
    return recorded
