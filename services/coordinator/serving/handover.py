"""Answers that go on at another coordinator, because their client repeats its request there.

Each answer that a client may come back for is noted in the bucket `answers` under its key, where any replica finds it.
The coordinator that reads it hands it over on demand and is then, to the other one, what a worker is to a gateway
(``Relay``): it sends chunks and signs, and hears of cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from msgspec.structs import replace

from penstock.services.coordinator.serving.answer import Answer
from penstock.shared import errors
from penstock.shared.errors import Conflict, PenstockError, ProtocolError, Unavailable
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
"""Most time spent on forgetting a note, or on taking one over."""
FIND_S = 5.0
"""Most time spent on notes of other gateways; a retry for which none was found is a request of its own."""
CLAIM_S = 3.0
"""A coordinator that does not say within this time whether it hands an answer over is gone."""
ABSENT_S = 6 * SIGN_EVERY_S
"""A gateway that claimed an answer and gives no sign for this long is gone."""
TOGETHER = 64
"""Chunks in one message of a relay."""
RETRY_S = 0.1


class Notes:
    """Where the answers are that clients may come back for."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self._bus, self._gateway = bus, gateway
        self._kv = bus.kv(subjects.ANSWERS)
        self._mark = f"found.{gateway.encode().hex()}"
        self._dropping: set[asyncio.Task[None]] = set()

    async def write(self, answer: Answer) -> None:
        """Note that ``answer`` is read here, where its client may come back for it.

        Nobody waits until that is stored; but before a request that is sent later is carried out, the note is at the
        server, whatever happens to this process in between.
        """
        request = answer.request
        if answer.key and answer.noted != answer.id:
            note = Whereabouts(gateway=self._gateway, ids=request.ids, episode=request.episode)
            with contextlib.suppress(Unavailable):
                await self._kv.send(_name(answer.key, answer.id), pack(note, job=answer.served.job))
                answer.noted = answer.id

    def drop(self, key: str, id: str) -> None:
        """Give up the try ``id``; the caller does not wait until that is stored."""
        if not key:
            return

        async def delete() -> None:
            with contextlib.suppress(PenstockError):
                await self._kv.delete(_name(key, id), deadline_s=NOTE_S)

        task = asyncio.create_task(delete(), name=f"forget the note of {id}")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def find(self, key: str) -> list[tuple[Whereabouts, int]]:
        """Notes of other gateways about tries with this key, with their revisions, oldest first."""
        try:
            async with asyncio.timeout(FIND_S):
                await self._kv.put(self._mark, b"", deadline_s=FIND_S)  # what was sent before it is stored by then
                entries = await self._kv.entries(f"{PREFIX}.{key}")
        except (Unavailable, TimeoutError) as error:
            logger.info("earlier tries are not looked for: %s", error)
            return []
        found = [(_read(entry.value), entry.revision) for entry in entries if entry.value]
        return [(note, revision) for note, revision in found if note is not None and note.gateway != self._gateway]

    async def claim(self, key: str, note: Whereabouts) -> Claimed:
        """Ask the gateway of a note for its answer. Raises Unavailable: it is gone."""
        claim = Claim(key=key, request=note.ids[0], gateway=self._gateway)
        data = await self._bus.request(subjects.inference_claims(note.gateway), pack(claim), deadline_s=CLAIM_S)
        return unpack(data, Claimed)[0]

    async def inherit(self, key: str, note: Whereabouts, revision: int) -> bool:
        """Take over a note whose gateway is gone; False where somebody was faster."""
        mine = pack(replace(note, gateway=self._gateway))
        try:
            await self._kv.update(_name(key, note.ids[0]), mine, revision, deadline_s=NOTE_S)
        except (Conflict, Unavailable):
            return False
        return True


class Relay:
    """Sends an answer on to the gateway that claimed it. ``run`` until all is sent, or nobody wants it any more."""

    def __init__(self, bus: Bus, gateway: str, answer: Answer, claim: Claim) -> None:
        self.name = relay_name(gateway, answer.id)
        self._bus, self._answer, self._to = bus, answer, subjects.inference_chunks(claim.gateway)
        self._claimer = claim.gateway
        self._unwanted, self._heard = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Relay; the answer is left unfinished where the other gateway gave it up, or is gone."""
        async with await self._bus.subscribe(subjects.inference_worker(self.name), self._on_word):
            sending = asyncio.create_task(self._send_all())
            unwanted = asyncio.create_task(self._until_unwanted())
            try:
                await asyncio.wait({sending, unwanted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks([sending, unwanted])

    async def _until_unwanted(self) -> None:
        """Wait until the other gateway gives the answer up, or gives no sign any more."""
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
                failure = Failure(self._answer.id, name if name in errors.__all__ else "Unavailable", str(error))
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

    def _on_word(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            if unpack(data, Present)[0].gateway == self._claimer:
                self._heard.set()
            return
        with contextlib.suppress(ProtocolError):
            if unpack(data, Cancel)[0].request == self._answer.id:
                self._unwanted.set()
                self._heard.set()


def relay_name(gateway: str, request: str) -> str:
    """Name of the relay of an answer, as a worker of the gateway that claimed it."""
    return f"{gateway}.{request}"


def _name(key: str, id: str) -> str:
    return f"{PREFIX}.{key}.{id}"


def _read(data: bytes) -> Whereabouts | None:
    try:
        return unpack(data, Whereabouts)[0]
    except ProtocolError:  # of another version
        return None
