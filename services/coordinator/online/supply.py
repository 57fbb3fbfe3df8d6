"""Makes the groups of an online job out of its live interactions. Runs on the job's leader; the bus side of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from penstock.services.coordinator.feedback.ids import purge_feedback
from penstock.services.coordinator.feedback.made import erase_groups, is_made_of
from penstock.services.coordinator.feedback.privacy import Consents, objection
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.fates import fates_of, interaction_fates_of
from penstock.services.coordinator.online.funnel import Funnel
from penstock.services.coordinator.online.groups import gone_group, group_of
from penstock.services.coordinator.online.letters import put_back
from penstock.services.coordinator.online.lookups import Lookups
from penstock.services.coordinator.online.making import Maker
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.names import canonical
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.restored import Restored
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.online.telling import Telling
from penstock.services.coordinator.online.told import told_of, undecided_since
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.restart import earliest_start
from penstock.services.coordinator.retry import Retry
from penstock.services.coordinator.run import JobRun
from penstock.services.coordinator.supply import Fact, LiveLetter, Unreadable
from penstock.services.coordinator.why import wait_row
from penstock.shared.config.amendable import TEMPERATURE
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.errors import NotFound, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import (
    Admitted,
    BatchTrained,
    Checkpointed,
    Dropped,
    Event,
    Finished,
    Promoted,
    PromotionRefused,
    decode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import (
    Erasure,
    Fate,
    Feedback,
    FeedbackBatch,
    Interaction,
    bare_id,
)
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus, Message, Outgoing, StreamState

__all__ = ["LiveSupply"]

logger = logging.getLogger(__name__)

SWEEP_S = 0.5
"""Defaults, ends of episodes and expiries are looked at this often."""
SETTLED_AT_ONCE = 500
"""Episodes, and items of material, that a new leader settles before anything else may run."""
UNTOLD = 10_000
"""Fates that a new leader holds before it tells them."""
UNTAKEN = 64
"""Messages of a subject that wait to be taken: what else the leader is told, and what it decides, waits behind them."""
FULL_SHARE = 0.5
"""Above this share of INTERACTIONS or FEEDBACK what is decided there is given up."""
CROWDED_SHARE, MAX_USED = 0.75, 50_000
"""Above this share of FEEDBACK, or with so many items that the ledger must name, what is held back gives way."""
FLOODED_SHARE = 0.9
"""Above this share of FEEDBACK what waits gives way whoever posted it; before, the material of whoever has the most."""
ROOM_EVERY_S = 5.0
GROUPS_AT_ONCE = 64
"""Groups of one durable write."""
HISTORY = 20_000
"""So many messages before the undecided ones tell a new leader what each source of feedback usually says."""
FEEDBACK_FULL = "feedback_full"

Post = Callable[[Fact], Awaitable[None]]


class LiveSupply:
    """See ``coordinator.supply.Supply``."""

    def __init__(
        self, bus: Bus, job: str, config: OnlineJob, *, epoch: int, archive: LedgerArchive | None = None
    ) -> None:
        self.bus, self.job, self.config, self.epoch = bus, job, config, epoch
        self._archive = archive
        self.retry = Retry(job)
        self._consents = Consents(bus)
        self.matching = Matching(config, opted_out=self._objects)
        self.quarantine = Quarantine(config, self.matching.on_feedback)
        self.source = LiveSource(config, self.matching, self.quarantine)
        self._maker = Maker(bus, job, config, epoch=epoch, publish=lambda group: self._publish([group]))
        self._funnel, self._lookups = Funnel(config), Lookups(bus, job, lambda: self.retry)
        self._telling = Telling(bus, job, epoch=epoch, funnel=self._funnel, retry=lambda: self.retry)
        self._restored = Restored(bus, job, archive)
        self._state = LedgerState()
        self._unerased: set[int] = set()
        """Ordinals whose groups are deleted once no trainer can ask for them."""
        self._untold: list[Fate] = []
        self._unreadable: list[Unreadable] = []
        self._idle_since = bus_time()
        """When nothing was left to train, as far as this leader saw it."""
        self._next = {subjects.interactions(job): 1, subjects.feedback(job): 1, subjects.erasures(job): 1}
        """Sequence from which each subject is read on; each for itself, for they are not read in one go."""

    def _objects(self, user: str) -> bool:
        """Whether a user (HMAC) must not be trained on."""
        return bool(objection(self._consents.of(user), self.config.online.consent))

    # -- what earlier leaders left -----------------------------------------------------------------------------------

    async def recover(self, state: LedgerState) -> None:
        """Both streams from where the ledger says that something is undecided; fates of the last decision once more."""
        self._state = state
        told = await told_of(self.bus, self.job, since=await undecided_since(self.bus, self.job, *state.read_from))
        self.matching.recall(state, told)
        self.quarantine.recall(state, told)
        last = await self.bus.last(subjects.LEDGER, subjects.ledger(self.job))
        if last is not None:
            events = decode_events(last.data)
            await self._telling.tell(fates_of(events, state), interaction_fates_of(events, state))
        await self._consents.read()
        starts = dict(zip((subjects.INTERACTIONS, subjects.FEEDBACK), state.read_from, strict=True))
        self.matching.offers.holdings.max_bytes = (await self.bus.stream_state(subjects.FEEDBACK)).max_bytes
        await self._learn_before(starts[subjects.FEEDBACK])
        for subject in self._next:
            stream = self._stream(subject)
            # What was deleted stays deleted: its record may still stand above the mark of its own stream.
            start = 1 if subject == subjects.erasures(self.job) else max(1, starts[stream])
            self._next[subject] = start
            await self._take_all(subject)
        if not state.finished:  # else all of it has one end, see ``close``
            while self.matching.num_touched:
                await self._sweep(everything=False, most=SETTLED_AT_ONCE)
                await asyncio.sleep(0)
            await self._sweep(everything=True)

    async def _take_all(self, subject: str) -> None:
        """Take in what a subject holds by now, a message at a time: only what is undecided stays in memory."""
        stream = self._stream(subject)
        async with contextlib.aclosing(self.bus.scan(stream, subject, start_seq=self._next[subject])) as messages:
            async for message in messages:
                await self._take(subject, message)
                if len(self._untold) >= UNTOLD:
                    await self.flush()
                await asyncio.sleep(0)  # the lease is renewed meanwhile

    async def _learn_before(self, seq: int) -> None:
        """What the sources of feedback said before everything that is undecided."""
        first = max(1, seq - HISTORY)
        if not self.quarantine.is_used or first >= seq:
            return
        subject = subjects.feedback(self.job)
        async with contextlib.aclosing(self.bus.scan(subjects.FEEDBACK, subject, start_seq=first)) as messages:
            async for message in messages:
                if message.seq >= seq:
                    break
                await asyncio.sleep(0)  # the lease is renewed meanwhile
                with contextlib.suppress(ProtocolError, NotFound):  # said when it was read first
                    for item in (await whole_of(self.bus, subjects.FEEDBACK, message, FeedbackBatch)).items:
                        self.quarantine.learn(item)

    def _stream(self, subject: str) -> str:
        return subjects.INTERACTIONS if subject == subjects.interactions(self.job) else subjects.FEEDBACK

    # -- facts -------------------------------------------------------------------------------------------------------

    async def follow(self, post: Post) -> None:
        """Interactions, feedback, erasures, consents, and the passing of time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._consents.run())
            tasks.create_task(self._maker.run())
            for subject, start in self._next.items():
                tasks.create_task(self._read(subject, start, post))
            looked = time.monotonic()
            while True:
                await asyncio.sleep(SWEEP_S)
                await post(lambda: self._sweep(everything=True))
                if time.monotonic() - looked >= ROOM_EVERY_S:
                    looked = time.monotonic()
                    await post(self._make_room)

    async def _read(self, subject: str, start: int, post: Post) -> None:
        room = asyncio.Semaphore(UNTAKEN)
        async with contextlib.aclosing(self.bus.follow(self._stream(subject), subject, start_seq=start)) as messages:
            async for message in messages:
                await room.acquire()

                async def fact(message: Message = message) -> None:
                    room.release()
                    await self._take(subject, message)
                    await self._sweep(everything=False)

                await post(fact)

    async def _take(self, subject: str, message: Message) -> None:
        """One message of one of the subjects; what cannot be read is passed over, and is a dead letter."""
        self._next[subject] = max(self._next[subject], message.seq + 1)
        now, stream = bus_time(), self._stream(subject)
        try:
            if subject == subjects.erasures(self.job):
                erasure = unpack(message.data, Erasure)[0]
                self.quarantine.on_erasure(erasure)
                self._untold += self.matching.on_erasure(erasure, now)
                await self._erase(erasure)
            elif stream == subjects.INTERACTIONS:
                interaction = await whole_of(self.bus, stream, message, Interaction)
                self._funnel.on_interaction()
                self._lookups.heard(canonical(interaction.id))
                self._untold += self.matching.on_interaction(message.seq, interaction)
            else:
                batch = await whole_of(self.bus, stream, message, FeedbackBatch)
                items = await self._restored.left(message, batch.items, self.matching.knows)
                await self._find_records(items)
                for item in items:
                    self._funnel.on_feedback(item)
                    self._untold += self.quarantine.on_feedback(message.seq, item, now)
        except NotFound as error:  # its user wanted to be forgotten, or it made room
            logger.info("%s: message %d of %s is gone: %s", self.job, message.seq, stream, error)
        except ProtocolError as error:
            logger.error("%s: message %d of %s is passed over: %s", self.job, message.seq, stream, error)
            self._unreadable.append(Unreadable(stream, message.seq, f"undecodable: {error}"))

    async def _erase(self, erasure: Erasure) -> None:
        """Give up what was admitted while its user was being deleted: its groups, and the draws that wait for one."""
        interactions, feedback = ({bare_id(id) or id for id in ids} for ids in (erasure.interactions, erasure.feedback))
        admissions = self._state.admissions.values()
        mine = {one.ordinal for one in admissions if is_made_of(one, interactions, feedback)}
        self.source.erased |= mine
        self._unerased |= mine
        await self._erase_released()

    async def _erase_released(self) -> None:
        """Delete the groups of deleted users that no trainer can ask for any more."""
        state = self._state
        newest = -1 if state.checkpoint is None else state.checkpoint.number
        held = {draw.ordinal for draw in state.open}
        held |= {draw.ordinal for number, batch in state.batches.items() if number > newest for draw in batch.draws}
        if released := self._unerased - held:
            what, subject = "the deletion of groups of a deleted user", subjects.experience(self.job)
            await self.retry.until_taken(what, subject, lambda: erase_groups(self.bus, self.job, released))
            self._unerased -= released

    def unreadable(self) -> list[Unreadable]:
        """See ``Supply.unreadable``."""
        found, self._unreadable = self._unreadable, []
        return found

    async def put_back(self, letter: LiveLetter) -> int:
        """See ``Supply.put_back``."""
        await self.flush()
        return await put_back(self.bus, self.job, letter, self.matching, self.quarantine, archive=self._archive)

    async def _sweep(self, *, everything: bool, most: int | None = None) -> None:
        state = self._state
        self.matching.offers.distrusted = state.distrusted
        self.matching.trials.forget(state)
        self.matching.offers.temperature = self._temperature(state.settings.get(TEMPERATURE))
        self._untold += self.matching.sweep(
            version=state.start_version(state.next_number),
            newest=state.version,
            now=bus_time(),
            everything=everything,
            most=most,
        )
        self._untold += self.quarantine.sweep(bus_time()) if everything else []

    # -- decisions ---------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Fates that follow from facts alone: told before a decision moves the mark from which they would follow."""
        fates, self._untold = self._untold, []
        await self._telling.tell(fates, self.matching.refusals.drain(), self.matching.offers.over.drain())

    async def committed(self, run: JobRun, events: Sequence[Event]) -> None:
        """Tell what a decision means for feedback; forget what is decided."""
        self._state = run.state
        await self._telling.tell(fates_of(events, run.state), interaction_fates_of(events, run.state))
        for event in events:
            match event:
                case Admitted():
                    self._funnel.on_admissions(event.admissions, self.matching.ended(event.admissions))
                    self.matching.take(event.admissions)
                case Promoted() | PromotionRefused():
                    self._funnel.on_decision(event.figures)
                case BatchTrained():
                    self.source.learnt(event.number, run.state)
                    self._idle_since = event.time
                case Checkpointed() | Dropped() if self._unerased:
                    await self._erase_released()
                case Finished():
                    await self._erase_released()
                    self._untold += [*self.matching.end(event.time), *self.quarantine.end(event.time)]
                    await self.flush()
                case _:
                    pass

    async def close(self) -> None:
        """See ``Supply.close``."""
        for subject in self._next:
            await self._take_all(subject)
        now = bus_time()
        self._untold += [*self.matching.end(now), *self.quarantine.end(now)]
        await self.flush()

    async def _make_room(self) -> None:
        """Give up what nothing can ask for again, once a stream fills.

        Of FEEDBACK that is what is decided; of INTERACTIONS what is decided and no batch needs again that a trainer may
        have to repeat or a fork to open. Fates of what goes are told first: a later leader cannot derive them.
        """
        if self.bus.held:
            return
        await self.flush()
        state = self._state
        newest = -1 if state.checkpoint is None else earliest_start(state, state.checkpoint.number)
        later = {draw.ordinal for number, batch in state.batches.items() if number > newest for draw in batch.draws}
        later |= {draw.ordinal for draw in state.open}
        kept = [state.admissions[ordinal] for ordinal in later if ordinal in state.admissions]
        read, said = (max(lows) for lows in zip(state.read_from, self.matching.lowest(), strict=True))
        needed = (seq for one in kept for seq in (*one.interactions.values(), *one.context.values()))
        bodies = (seq for one in kept if not one.interactions for seq in one.feedback.values())
        read = min([read, self.matching.offers.lowest, *needed])
        said = min([said, self.quarantine.lowest, *bodies])
        try:
            for subject, low in ((subjects.interactions(self.job), read), (subjects.feedback(self.job), said)):
                stream = await self.bus.stream_state(self._stream(subject))
                if stream.bytes <= FULL_SHARE * stream.max_bytes:
                    continue
                if subject == subjects.feedback(self.job):
                    await purge_feedback(self.bus, self.job, below_seq=low)
                else:
                    await self.bus.purge(self._stream(subject), subject, below_seq=low)
            self._untold += self._give_way(stream, bus_time())  # gone at the next look
        except Unavailable as error:  # the next look tries again
            logger.info("%s: no room is made among its interactions and feedback: %s", self.job, error)

    def _give_way(self, feedback: StreamState, now: float) -> list[Fate]:
        """Reject some of what keeps everything after it in FEEDBACK, or in the ledger, where there is no room."""
        is_crowded, undecided = feedback.bytes > CROWDED_SHARE * feedback.max_bytes, self.matching.lowest()[1]
        if self.quarantine.lowest < undecided:
            return self.quarantine.give_way(now) if is_crowded or len(self._state.used) > MAX_USED else []
        if not is_crowded:
            return []
        names = self.matching.offers.holdings.older_half()
        if feedback.bytes > FLOODED_SHARE * feedback.max_bytes:
            names = self.matching.undecided((undecided + feedback.last_seq) // 2)
        return self.matching.reject(names, FEEDBACK_FULL, now)

    async def order(self, run: JobRun, draws: Sequence[Draw]) -> None:
        """Make and publish the groups of admitted draws; waits while the bus is away."""
        admissions = {d: run.state.admissions[d.ordinal] for d in draws if not self.source.refusal(d)}
        seqs = {seq for admission in admissions.values() for seq in admission.interactions.values()}
        records = await self._lookups.by_seq(seqs)
        groups: list[Group] = []
        for draw, admission in admissions.items():
            temperature = self._temperature(run.state.open[draw].temperature)
            turns = [records.get(seq) for seq in admission.interactions.values()]
            if not turns:
                self._maker.ask(draw, admission, temperature)
                continue
            known = [turn for turn in turns if turn is not None]
            if len(known) < len(turns):
                groups.append(gone_group(self.job, draw, epoch=self.epoch, reason="interaction_gone"))
            else:
                groups.append(
                    group_of(
                        self.job, draw, known, reward=admission.reward, epoch=self.epoch, objective=admission.objective,
                        temperature=None if admission.objective == "policy" else temperature,
                    )
                )  # fmt: skip
        await self._publish(groups)

    def _temperature(self, settings: float | None) -> float:
        """What the settings say; ledgers of earlier versions leave it to the job file."""
        return self.config.sampling.temperature if settings is None else settings

    async def _find_records(self, items: Sequence[Feedback]) -> None:
        """The interactions that items of material are about, where they were read long ago."""
        offers = self.matching.offers
        names = [name for item in items if offers.takes(item) for name in offers.missing(item)]
        for name, record in (await self._lookups.by_name(names)).items():
            offers.know(name, record)

    async def _publish(self, groups: Sequence[Group]) -> None:
        subject = subjects.experience(self.job)
        for start in range(0, len(groups), GROUPS_AT_ONCE):
            encoded = [(group, *encode_group(group)) for group in groups[start : start + GROUPS_AT_ONCE]]
            messages = [
                Outgoing(subject, data, group_headers(header), f"{self.job}:{group.draw}:{group.attempt}")
                for group, data, header in encoded
            ]
            publish = partial(self.bus.publish_whole, messages, deadline_s=5)
            await self.retry.until_taken(f"{len(messages)} groups of live answers", subject, publish)

    # -- what people see ---------------------------------------------------------------------------------------------

    def measures(self) -> dict[str, float]:
        """The funnel since the last update."""
        waiting = {
            "online/waiting": float(self.matching.num_waiting),
            "online/parked": float(len(self.matching.parked)),
            "online/quarantined": float(self.quarantine.num_held),
            "online/material": float(len(self.matching.offers.items) + self._maker.num_waiting),
        }
        return self._funnel.row() | waiting

    def waits(self, run: JobRun, now: float) -> list[dict[str, Any]]:
        """Feedback, while no batch is in training."""
        state = run.state
        if state.sealed or state.finished or state.checkpoint is None or run.desired == "paused":
            return []
        if state.canary is not None:  # more feedback makes no batch now
            return []
        unsealed = [state.admissions[draw.ordinal].time for draw, info in state.open.items() if not info.batch]
        age_s = now - min(unsealed, default=self._idle_since)
        what = f"feedback (WaitingForFeedback): {self.source.waiting(state)}"
        return [wait_row(what, subjects.feedback(self.job), self.job, age_s=age_s)]
