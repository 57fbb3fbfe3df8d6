"""Transfers answers between the gateways of several coordinators, so that a client's retry may reach any of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from penstock.services.coordinator.serving.answer import Answer
from penstock.services.coordinator.serving.handover import Notes, Relay, relay_name
from penstock.services.coordinator.serving.retries import Retries
from penstock.shared.errors import ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.live.inference import SIGN_EVERY_S, Chunks, Claim, Claimed, InferenceReply, Whereabouts
from penstock.shared.protocol.live.interaction import Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["Holder", "Replicas"]

LISTEN_S = 1.5 * SIGN_EVERY_S
"""Seconds within which a worker reports the requests that it serves."""


class Holder(Protocol):
    """The part of the gateway that ``Replicas`` uses."""

    def enter(self, answer: Answer) -> None:
        """Accept chunks of the answer from now on."""
        ...

    def withdraw(self, answer: Answer) -> None:
        """Accept no more chunks of the answer."""
        ...

    def accepted(self, answer: Answer, reply: InferenceReply) -> None:
        """Record in the answer which worker writes it. The worker may be another gateway, which relays the answer."""
        ...

    def recover(self, answer: Answer) -> None:
        """Continue an answer whose worker is gone, in the task ``answer.recovering``."""
        ...

    def give_up(self, answer: Answer) -> None:
        """Cancel the answer at its worker, because its client is gone."""
        ...

    async def interaction(self, job: str, id: str) -> Interaction | None:
        """Return the recorded interaction, or None."""
        ...


class Replicas:
    """Takes over answers from other gateways, and transfers answers to them."""

    def __init__(self, bus: Bus, gateway: str, notes: Notes, retries: Retries, holder: Holder) -> None:
        self._bus, self._gateway, self._notes, self._retries, self._holder = bus, gateway, notes, retries, holder
        self._relays: dict[str, tuple[asyncio.Task[None], Answer]] = {}
        """Answers of this gateway that other gateways read, by request."""

    async def earlier(self, key: str, prepare: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """Take over from another gateway the unread answer to an earlier attempt of the client, and return this answer;
        return None if there is none.

        ``prepare`` returns a new answer to the same request, with ids of its own.
        """
        for note, revision in await self._notes.find(key):
            answer = None
            self._retries.read(key)  # another gateway's claim waits for the outcome of this one
            try:
                if note.ids[0] in self._relays:
                    answer = await self._taken_back(key, note, revision)
                else:
                    answer = await self._taken_over(await prepare(), key, note, revision)
            finally:
                if answer is None:
                    self._retries.left(key)
            if answer is not None:
                answer.key = key
                await self._notes.write(answer)
                if answer.id != note.ids[0]:
                    self._notes.drop(key, note.ids[0])
                return answer
        return None

    async def _taken_back(self, key: str, note: Whereabouts, revision: int) -> Answer | None:
        """Take back an answer that this gateway relays to another gateway: the client has now retried here. Return the
        answer, or None if it is not available any more."""
        relay, answer = self._relays[note.ids[0]]
        try:
            claimed = await self._notes.claim(key, note)
        except Unavailable:
            if not await self._notes.inherit(key, note, revision):
                return None
        else:
            if not claimed.given:
                return None
        relay.cancel()
        await asyncio.wait({relay})
        return None if answer.given_up or answer.error is not None else answer

    async def _taken_over(self, answer: Answer, key: str, note: Whereabouts, revision: int) -> Answer | None:
        answer.request = replace(answer.request, ids=note.ids, episode=note.episode)
        self._holder.enter(answer)  # chunks may arrive before the reply to the claim
        taken = False
        try:
            taken = await self._taken(answer, key, note, revision)
        finally:
            if not taken:
                self._holder.withdraw(answer)
        return answer if taken else None

    async def _taken(self, answer: Answer, key: str, note: Whereabouts, revision: int) -> bool:
        try:
            claimed = await self._notes.claim(key, note)
        except Unavailable:
            if not await self._notes.inherit(key, note, revision):
                return False
            inherited = await self._inherited(answer, note)
            if not inherited:
                self._notes.drop(key, note.ids[0])
            return inherited
        if claimed.given and not claimed.worker:  # the relay to here has ended meanwhile
            return await self._inherited(answer, note)
        if claimed.given:
            reply = InferenceReply(
                worker=claimed.worker, accepted=True, version=claimed.version, prompt_ids=claimed.prompt_ids
            )
            self._holder.accepted(answer, reply)
        return claimed.given

    async def _inherited(self, answer: Answer, note: Whereabouts) -> bool:
        """Take over an answer from a gateway that is gone; return True if that succeeds.

        Completes the answer from its records, and dispatches the request again for choices without a record.
        """
        request = answer.request
        records = [await self._holder.interaction(answer.served.job, id) for id in request.ids]
        found = [record for record in records if record is not None]
        cut_off = any(record.finish == "client_disconnected" for record in found)  # its worker cancelled it, too
        if cut_off or (found and (request.echo or request.logprobs >= 0)):
            return False  # a record lacks data that the client requested
        answer.worker = await self._writer(answer.id, note.gateway) if len(found) < len(records) else ""
        self._holder.recover(answer)
        if answer.recovering is not None:
            await asyncio.wait({answer.recovering})
        return answer.error is None

    async def _writer(self, request: str, gateway: str) -> str:
        """Return the worker that still serves ``request``, or ''. Listens to the chunks that workers still send to the
        lost ``gateway``."""
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def hear(subject: str, data: bytes) -> None:
            with contextlib.suppress(ProtocolError):
                chunks, _ = unpack(data, Chunks)
                named = {*(chunks.in_hand or ()), *(chunk.request for chunk in chunks.chunks)}
                if request in named and not heard.done():
                    heard.set_result(chunks.worker)

        async with await self._bus.subscribe(subjects.inference_chunks(gateway), hear):
            try:
                async with asyncio.timeout(LISTEN_S):
                    return await heard
            except TimeoutError:
                return ""

    async def hand_over(self, data: bytes) -> bytes:
        """Handle the packed ``Claim`` of another gateway: transfer an unread answer; return the packed ``Claimed``."""
        claim, _ = unpack(data, Claim)
        answer = await self._retries.earlier(claim.key, claim.request)
        if answer is None:
            return pack(Claimed(given=False))
        if answer.worker == relay_name(claim.gateway, answer.id) and not answer.done:  # back at its origin
            self._retries.left(answer.key)
            self._holder.withdraw(answer)
            return pack(Claimed(given=True))
        relay = Relay(self._bus, self._gateway, answer, claim)
        task = asyncio.create_task(self._relayed(relay, answer), name=f"relay {answer.id}")
        self._relays[answer.id] = task, answer
        return pack(Claimed(given=True, worker=relay.name, version=answer.version, prompt_ids=answer.prompt_ids))

    async def _relayed(self, relay: Relay, answer: Answer) -> None:
        key, answer.key, answer.noted = answer.key, "", ""  # the note belongs to the other gateway now
        taken_back = False
        try:
            with contextlib.suppress(Unavailable):
                await relay.run()
        except asyncio.CancelledError:
            taken_back = True
            raise
        finally:
            del self._relays[answer.id]
            self._retries.left(key)
            if not (taken_back or answer.done):
                self._holder.give_up(answer)
