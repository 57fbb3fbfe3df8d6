"""Records interactions durably: those that end at the same moment go out in one write."""

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
"""Longest record, in parts where it is longer than a message; what agents post has the same bound."""
DEADLINE_S = 5.0
"""Longest that the last token of a completion is held back for its record."""

RECORDED = metrics.counter("interactions", "Interactions of live requests, durable or not.", ("recorded",))


class Recorder:
    """Coalesces interactions of one job. ``run`` sends until cancelled. ``redactor``: what must not be stored."""

    def __init__(self, bus: Bus, job: str, redactor: RecordRedactor | None = None) -> None:
        self._bus, self._job, self._redactor = bus, job, redactor
        self._queue: asyncio.Queue[tuple[Outgoing, asyncio.Future[bool]]] = asyncio.Queue(maxsize=4096)

    async def record(self, interaction: Interaction) -> bool:
        """True if the interaction is durable now. Serving goes on without a record; it is counted and logged."""
        outgoing = await self._outgoing(interaction, interaction.id)
        if outgoing is None:
            return _counted(False)
        if len(outgoing.data) > MAX_INLINE_BYTES:
            return _counted(await self._send_parts(outgoing))
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._queue.put((outgoing, done))
        return _counted(await done)

    async def record_cut(self, interaction: Interaction) -> bool:
        """As ``record``, for an answer that is broken off here because its gateway seems to be gone.

        Where it is not, another worker completes the answer: that record is no repetition of this one, and this one
        never follows it.
        """
        outgoing = await self._outgoing(interaction, f"{interaction.id}/cut")
        if outgoing is not None and len(outgoing.data) > MAX_INLINE_BYTES:  # parts cannot give way to what is there
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
        """The message of a record; None where it is too long for one, or nobody can tell what must not be in it."""
        if self._redactor is not None:
            try:
                interaction = await asyncio.to_thread(self._redactor.redact, interaction)
            except DataError as error:
                logger.error("interaction %s is not recorded: %s", interaction.id, error)
                return None
        data = pack(interaction, job=self._job, id=interaction.id)
        if len(data) > MAX_INLINE_BYTES and interaction.prompt:  # people can do without, learning cannot without tokens
            data = pack(replace(interaction, prompt=""), job=self._job, id=interaction.id)
        if len(data) > MAX_RECORD_BYTES:
            logger.error("interaction %s has %d bytes, too many for a record", interaction.id, len(data))
            return None
        subject = subjects.interaction(self._job, interaction.id)
        return Outgoing(subject, data, {EPISODE_HEADER: interaction.episode}, msg_id)

    async def run(self) -> None:
        """Send until cancelled."""
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
