"""Answers that go on at another coordinator, because their client repeats its request there.

Each answer that a client may come back for is noted in the bucket `answers` under its key, where any replica finds it.
The coordinator that reads it hands it over on demand and is then, to the other one, what a worker is to a gateway
(``Relay``): it sends chunks and signs, and hears of cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from penstock.services.coordinator.serving.answer import Answer
from penstock.shared import errors
from penstock.shared.errors import Conflict, PenstockError, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.inference import (
    SIGN_EVERY_S,
    Cancel,
    Chunks,
    Claim,
    Claimed,
    Failure,
    Present,
    Whereabouts,
)
from penstock.shared.transport.bus import Bus

__all__ = ["Notes", "Relay", "relay_name"]

logger = logging.getLogger(__name__)

PREFIX = "try"
NOTE_S = 2.0
"""Most time spent on a note; without one, a retry elsewhere is a request of its own."""
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
        self._writing: dict[str, asyncio.Task[None]] = {}

    def write(self, answer: Answer) -> None:
        """Note that ``answer`` is read here; nobody waits for that."""
        request = answer.request
        note = Whereabouts(gateway=self._gateway, ids=request.ids, episode=request.episode)
        name, data = _name(answer), pack(note, job=answer.served.job)
        self._after(answer.id, lambda: self._kv.put(name, data, deadline_s=NOTE_S))

    def drop(self, answer: Answer, id: str = "") -> None:
        """Nobody will come back for ``answer``, or not under ``id``, which it had before."""
        if answer.key:
            id = id or answer.id
            name = f"{PREFIX}.{answer.key}.{id}"
            self._after(id, lambda: self._kv.delete(name, deadline_s=NOTE_S))

    async def find(self, key: str) -> list[tuple[Whereabouts, int]]:
        """Notes of other gateways about tries with this key, with their revisions, oldest first."""
        try:
            async with asyncio.timeout(NOTE_S):
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
        try:
            await self._kv.delete(f"{PREFIX}.{key}.{note.ids[0]}", revision=revision, deadline_s=NOTE_S)
        except (Conflict, Unavailable):
            return False
        return True

    def _after(self, id: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do ``work`` after what is under way for the same answer."""
        before = self._writing.get(id)

        async def do() -> None:
            if before is not None:
                await asyncio.wait({before})
            with contextlib.suppress(PenstockError):
                await work()

        task = self._writing[id] = asyncio.create_task(do(), name=f"note {id}")
        task.add_done_callback(lambda done: self._writing.pop(id) if self._writing.get(id) is done else None)


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
                for task in (sending, unwanted):
                    task.cancel()
                await asyncio.gather(sending, unwanted, return_exceptions=True)

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
    """What the relay of an answer is called, as a worker of the gateway that claimed it."""
    return f"{gateway}.{request}"


def _name(answer: Answer) -> str:
    return f"{PREFIX}.{answer.key}.{answer.id}"


def _read(data: bytes) -> Whereabouts | None:
    try:
        return unpack(data, Whereabouts)[0]
    except ProtocolError:  # of another version
        return None
