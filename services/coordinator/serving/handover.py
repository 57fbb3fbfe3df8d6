"""Transfers an answer to the coordinator that received the client's retry.

Each answer that a client may retry for is noted in the bucket `answers` under its key, where every replica finds it.
The coordinator that holds the answer transfers it on request, and then acts towards the other coordinator as a worker
does towards a gateway (``Relay``): it sends chunks and heartbeats, and receives cancellations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from msgspec.structs import replace

from penstock.services.coordinator.serving.answer import Answer
from penstock.shared.errors import Conflict, PenstockError, ProtocolError, Unavailable, class_named
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.live.inference import (
    SIGN_EVERY_S,
    Cancel,
    Chunks,
    Claim,
    Claimed,
    Failure,
    Present,
    Whereabouts,
)
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bus import Bus

__all__ = ["Notes", "Relay", "relay_name"]

logger = logging.getLogger(__name__)

PREFIX = "try"
NOTE_S = 2.0
"""Longest time for deleting a note or taking it over, in seconds."""
FIND_S = 5.0
"""Longest search for notes of other gateways, in seconds; a retry without a note is handled as a new request."""
CLAIM_S = 3.0
"""Seconds after which a coordinator that does not reply to a claim counts as gone."""
ABSENT_S = 6 * SIGN_EVERY_S
"""Seconds without heartbeat after which a gateway that took over an answer counts as gone."""
TOGETHER = 64
"""Maximum number of chunks per message of a relay."""
RETRY_S = 0.1


class Notes:
    """Notes in the bucket `answers`. Each note names the gateway that holds the answer to a request that may be
    retried."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self._bus, self._gateway = bus, gateway
        self._kv = bus.kv(subjects.ANSWERS)
        self._mark = f"found.{gateway.encode().hex()}"
        self._dropping: set[asyncio.Task[None]] = set()

    async def write(self, answer: Answer) -> None:
        """Write a note that this gateway holds ``answer``, because the answer's client may retry.

        The call does not wait for the write. Yet the server orders the note before requests that are sent later, even
        if this process dies in between.
        """
        request = answer.request
        if answer.key and answer.noted != answer.id:
            note = Whereabouts(gateway=self._gateway, ids=request.ids, episode=request.episode)
            with contextlib.suppress(Unavailable):
                await self._kv.send(_name(answer.key, answer.id), pack(note, job=answer.served.job))
                answer.noted = answer.id

    def drop(self, key: str, id: str) -> None:
        """Delete the note of the attempt ``id``; the call does not wait for the deletion."""
        if not key:
            return

        async def delete() -> None:
            with contextlib.suppress(PenstockError):
                await self._kv.delete(_name(key, id), deadline_s=NOTE_S)

        task = asyncio.create_task(delete(), name=f"forget the note of {id}")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def find(self, key: str) -> list[tuple[Whereabouts, int]]:
        """Return the notes of other gateways about earlier attempts with this key, each with its revision, oldest
        first."""
        try:
            async with asyncio.timeout(FIND_S):
                await self._kv.put(self._mark, b"", deadline_s=FIND_S)  # earlier notes are stored once this is
                entries = await self._kv.entries(f"{PREFIX}.{key}")
        except (Unavailable, TimeoutError) as error:
            logger.info("earlier tries are not looked for: %s", error)
            return []
        found = [(_read(entry.value), entry.revision) for entry in entries if entry.value]
        return [(note, revision) for note, revision in found if note is not None and note.gateway != self._gateway]

    async def claim(self, key: str, note: Whereabouts) -> Claimed:
        """Ask the gateway in a note to transfer its answer; return the reply. Raises Unavailable if that gateway is
        gone."""
        claim = Claim(key=key, request=note.ids[0], gateway=self._gateway)
        data = await self._bus.request(subjects.inference_claims(note.gateway), pack(claim), deadline_s=CLAIM_S)
        return unpack(data, Claimed)[0]

    async def inherit(self, key: str, note: Whereabouts, revision: int) -> bool:
        """Take over a note whose gateway is gone. Return False if another gateway was faster, or the bus is
        unavailable."""
        mine = pack(replace(note, gateway=self._gateway))
        try:
            await self._kv.update(_name(key, note.ids[0]), mine, revision, deadline_s=NOTE_S)
        except (Conflict, Unavailable):
            return False
        return True


class Relay:
    """Sends an answer to the gateway that took it over, and acts as a worker towards that gateway."""

    def __init__(self, bus: Bus, gateway: str, answer: Answer, claim: Claim) -> None:
        self.name = relay_name(gateway, answer.id)
        self._bus, self._answer, self._to = bus, answer, subjects.inference_chunks(claim.gateway)
        self._claimer = claim.gateway
        self._unwanted, self._heard = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Send all chunks; stop early if the other gateway cancels the answer or is gone."""
        async with await self._bus.subscribe(subjects.inference_worker(self.name), self._on_message):
            sending = asyncio.create_task(self._send_all())
            unwanted = asyncio.create_task(self._until_unwanted())
            try:
                await asyncio.wait({sending, unwanted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks([sending, unwanted])

    async def _until_unwanted(self) -> None:
        """Wait until the other gateway cancels the answer, or its heartbeats stop."""
        with contextlib.suppress(TimeoutError):
            while not self._unwanted.is_set():
                self._heard.clear()
                async with asyncio.timeout(ABSENT_S):
                    await self._heard.wait()

    async def _send_all(self) -> None:
        cursor = 0
        while True:
            try:
                async with asyncio.timeout(SIGN_EVERY_S):
                    chunks = (await self._answer.read(cursor))[:TOGETHER]
            except TimeoutError:
                await self._send(Chunks(self.name))
                continue
            except PenstockError as error:
                name = type(error).__name__
                is_known = class_named(name) is not PenstockError
                failure = Failure(self._answer.id, name if is_known else "Unavailable", str(error))
                await self._send(Chunks(self.name, failures=[failure]))
                return
            if not chunks:
                return
            await self._send(Chunks(self.name, list(chunks)))
            cursor += len(chunks)

    async def _send(self, chunks: Chunks) -> None:
        while True:
            try:
                await self._bus.notify(self._to, pack(chunks))
                return
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    def _on_message(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            if unpack(data, Present)[0].gateway == self._claimer:
                self._heard.set()
            return
        with contextlib.suppress(ProtocolError):
            if unpack(data, Cancel)[0].request == self._answer.id:
                self._unwanted.set()
                self._heard.set()


def relay_name(gateway: str, request: str) -> str:
    """Return the worker name under which ``gateway`` relays an answer to another gateway; ``request`` is the id of the
    answered request."""
    return f"{gateway}.{request}"


def _name(key: str, id: str) -> str:
    return f"{PREFIX}.{key}.{id}"


def _read(data: bytes) -> Whereabouts | None:
    try:
        return unpack(data, Whereabouts)[0]
    except ProtocolError:  # of another version
        return None
