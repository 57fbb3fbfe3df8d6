"""Supply of an online job: turns live interactions and feedback into groups, and publishes statuses of the feedback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from penstock.services.coordinator.feedback.ids import purge_feedback
from penstock.services.coordinator.feedback.lineage import erase_groups, is_made_of, is_of_user
from penstock.services.coordinator.feedback.privacy import Consents, objection
from penstock.services.coordinator.leader.why import wait_row
from penstock.services.coordinator.online.decision_feed import DecisionFeed, Funnel
from penstock.services.coordinator.online.groups import GroupMaker, empty_group, group_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.record_lookup import InteractionReader, RestoredCopies, requeue_dead_letter
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.online.statuses import UnrecordedDecisions
from penstock.services.coordinator.online.turns import canonical_id
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.restart import earliest_start
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.run import JobRun
from penstock.services.coordinator.training.supply import Fact, LiveDeadLetter, Unreadable
from penstock.shared.config.jobs.amendable import TEMPERATURE
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import NotFound, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchTrained,
    Checkpointed,
    Decided,
    Dropped,
    Event,
    Finished,
    Promoted,
    PromotionRefused,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import (
    Erasure,
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    bare_id,
)
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus, Message, Outgoing, StreamState

__all__ = ["LiveSupply"]

logger = logging.getLogger(__name__)
SWEEP_S = 0.5
"""Seconds between sweeps, which apply the defaults of metrics, end episodes and let feedback expire."""
SETTLED_AT_ONCE = 500
"""Number of episodes and examples that a new leader settles before it yields to other tasks."""
MAX_UNPUBLISHED = 10_000
"""Number of non-final statuses that a new leader collects before it publishes them."""
MAX_UNTAKEN = 64
"""Maximum number of messages of one subject that are queued for the leader, whose decisions wait behind the
messages."""
FULL_SHARE = 0.5
"""Share of the size of INTERACTIONS or FEEDBACK above which the leader purges decided messages from the stream."""
CROWDED_SHARE, MAX_USED = 0.75, 50_000
"""Share of the size of FEEDBACK, and number of items that the ledger must name, above which the leader rejects
undecided items."""
FLOODED_SHARE = 0.9
"""Share of the size of FEEDBACK above which the leader rejects old items of all API keys, not only examples of one
key."""
ROOM_EVERY_S = 5.0
GROUPS_AT_ONCE = 64
"""Number of groups in one durable write."""
HISTORY = 20_000
"""Number of messages before the first undecided one from which a new leader learns each source's usual values."""
FEEDBACK_FULL = "feedback_full"
Post = Callable[[Fact], Awaitable[None]]


class LiveSupply:
    """Supply of an online job: makes groups from interactions and feedback (implements ``training.supply.Supply``)."""

    def __init__(
        self, bus: Bus, job: str, config: OnlineJob, *, epoch: int, archive: LedgerArchive | None = None
    ) -> None:
        self.bus, self.job, self.config, self.epoch = bus, job, config, epoch
        self._archive = archive
        self.retry = Retry(job)
        self._consents = Consents(bus)
        self.matching = Matching(config, opted_out=self._has_opted_out)
        self.quarantine = Quarantine(config, self.matching.on_feedback)
        self.source = LiveSource(config, self.matching, self.quarantine)
        self._group_maker = GroupMaker(bus, job, config, epoch=epoch, publish=lambda group: self._publish([group]))
        self._funnel, self._reader = Funnel(config), InteractionReader(bus, job, lambda: self.retry)
        self._feed = DecisionFeed(bus, job, epoch=epoch, funnel=self._funnel, retry=lambda: self.retry, archive=archive)
        self._copies = RestoredCopies(bus, job, archive)
        self._state = LedgerState()
        self._deleted: dict[str, float] = {}
        """Users (HMAC) whose data was deleted, each with the time of the newest deletion; later data is kept."""
        self._unerased: set[int] = set()
        """Ordinals of draws of deleted users; their groups are deleted once no trainer can request them."""
        self._unrecorded = UnrecordedDecisions()
        self._passing: dict[str, FeedbackStatus] = {}
        """Unpublished non-final statuses by item; the ledger does not record them."""
        self._wants_purge = False
        """True while a purge of decided messages waits until the ledger records all decisions."""
        self._unreadable: list[Unreadable] = []
        self._idle_since = bus_time()
        """Time of the last trained batch, or of the start of this leader."""
        self._next = {subjects.interactions(job): 1, subjects.feedback(job): 1, subjects.erasures(job): 1}
        """Subject -> stream sequence number from which to read on; the subjects are read independently."""

    def _has_opted_out(self, user: str) -> bool:
        """Return True if the job must not train on the data of ``user`` (an HMAC)."""
        return bool(objection(self._consents.of(user), self.config.online.consent))

    # -- recovery ------------------------------------------------------------------------------------------------------

    async def recover(self, state: LedgerState) -> None:
        """Restore the decisions of the ledger, complete the decision feed, and read both streams from the ledger's
        low-water marks."""
        self._state = state
        await asyncio.to_thread(self.matching.restore, state)  # a state may name a million items
        await asyncio.to_thread(self.quarantine.restore, state)
        last = await self.bus.last(subjects.LEDGER, subjects.ledger(self.job))
        await self._feed.resume(0 if last is None else last.seq)
        await self._consents.read()
        starts = dict(zip((subjects.INTERACTIONS, subjects.FEEDBACK), state.read_from, strict=True))
        self.matching.examples.quota.max_bytes = (await self.bus.stream_state(subjects.FEEDBACK)).max_bytes
        await self._learn_usual_values(starts[subjects.FEEDBACK])
        for subject in self._next:
            stream = self._stream(subject)
            # Deletions have no low-water mark: a deleted record may still lie above the mark of its own stream.
            start = 1 if subject == subjects.erasures(self.job) else max(1, starts[stream])
            self._next[subject] = start
            await self._take_all(subject)
        if not state.finished:  # otherwise ``close`` ends everything
            while self.matching.num_changed:
                await self._sweep(everything=False, most=SETTLED_AT_ONCE)
                await asyncio.sleep(0)
            await self._sweep(everything=True)

    async def _take_all(self, subject: str) -> None:
        """Process all stored messages of a subject, one at a time; only those without a decision stay in memory."""
        stream = self._stream(subject)
        async with contextlib.aclosing(self.bus.scan(stream, subject, start_seq=self._next[subject])) as messages:
            async for message in messages:
                await self._take_message(subject, message)
                if len(self._passing) >= MAX_UNPUBLISHED:
                    await self.flush()
                await asyncio.sleep(0)  # the lease is renewed meanwhile

    async def _learn_usual_values(self, seq: int) -> None:
        """Learn the usual values of each source from the feedback before ``seq``, the ledger's low-water mark."""
        first = max(1, seq - HISTORY)
        if not self.quarantine.is_enabled or first >= seq:
            return
        subject = subjects.feedback(self.job)
        async with contextlib.aclosing(self.bus.scan(subjects.FEEDBACK, subject, start_seq=first)) as messages:
            async for message in messages:
                if message.seq >= seq:
                    break
                await asyncio.sleep(0)  # the lease is renewed meanwhile
                with contextlib.suppress(ProtocolError, NotFound):  # an earlier leader has reported it
                    for item in (await whole_of(self.bus, subjects.FEEDBACK, message, FeedbackBatch)).items:
                        self.quarantine.learn(item)

    def _stream(self, subject: str) -> str:
        return subjects.INTERACTIONS if subject == subjects.interactions(self.job) else subjects.FEEDBACK

    # -- facts ---------------------------------------------------------------------------------------------------------

    async def follow(self, post: Post) -> None:
        """Pass new interactions, feedback, deletions and periodic sweeps to ``post``, as work for the leader, until
        cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._consents.run())
            tasks.create_task(self._group_maker.run())
            for subject, start in self._next.items():
                tasks.create_task(self._read(subject, start, post))
            looked = time.monotonic()
            while True:
                await asyncio.sleep(SWEEP_S)
                await post(lambda: self._sweep(everything=True))
                if time.monotonic() - looked >= ROOM_EVERY_S:
                    looked = time.monotonic()
                    await post(self._free_stream_space)

    async def _read(self, subject: str, start: int, post: Post) -> None:
        room = asyncio.Semaphore(MAX_UNTAKEN)
        async with contextlib.aclosing(self.bus.follow(self._stream(subject), subject, start_seq=start)) as messages:
            async for message in messages:
                await room.acquire()

                async def fact(message: Message = message) -> None:
                    room.release()
                    await self._take_message(subject, message)
                    await self._sweep(everything=False)

                await post(fact)

    async def _take_message(self, subject: str, message: Message) -> None:
        """Process one message. Skip an unreadable message, which becomes a dead letter."""
        self._next[subject] = max(self._next[subject], message.seq + 1)
        now, stream = bus_time(), self._stream(subject)
        try:
            if subject == subjects.erasures(self.job):
                erasure = unpack(message.data, Erasure)[0]
                self.quarantine.on_erasure(erasure)
                self._note(self.matching.on_erasure(erasure, now))
                await self._erase(erasure)
            elif stream == subjects.INTERACTIONS:
                interaction = await whole_of(self.bus, stream, message, Interaction)
                self._funnel.on_interaction()
                self._reader.on_interaction(canonical_id(interaction.id))
                self._note(self.matching.on_interaction(message.seq, interaction))
            else:
                batch = await whole_of(self.bus, stream, message, FeedbackBatch)
                items = await self._copies.undecided(message, batch.items, self.matching.has_feedback)
                await self._find_records(items)
                self._funnel.on_feedback(items)
                self._note([one for item in items for one in self.quarantine.on_feedback(message.seq, item, now)])
        except NotFound as error:  # its user was deleted, or it was purged
            logger.info("%s: message %d of %s is gone: %s", self.job, message.seq, stream, error)
        except ProtocolError as error:
            logger.error("%s: message %d of %s is passed over: %s", self.job, message.seq, stream, error)
            self._unreadable.append(Unreadable(stream, message.seq, f"undecodable: {error}"))

    async def _erase(self, erasure: Erasure) -> None:
        """Mark the admissions of a deleted user, so that their draws are refused; delete groups no longer needed."""
        self._deleted[erasure.user] = max(erasure.time, self._deleted.get(erasure.user, 0.0))
        interactions, feedback = ({bare_id(id) or id for id in ids} for ids in (erasure.interactions, erasure.feedback))
        admissions = self._state.admissions.values()
        self._mark_erased(
            one for one in admissions if is_made_of(one, interactions, feedback) or self._is_of_deleted_user(one)
        )
        await self._erase_released()

    def _is_of_deleted_user(self, admission: Admission) -> bool:
        users = {admission.user, *admission.users} & self._deleted.keys()
        return any(is_of_user(admission, user, self._deleted[user]) for user in users)

    def _mark_erased(self, admissions: Iterable[Admission]) -> None:
        ordinals = {one.ordinal for one in admissions}
        self.source.erased |= ordinals
        self._unerased |= ordinals

    async def _erase_released(self) -> None:
        """Delete the groups that contain data of deleted users, once no trainer can request these groups any more."""
        state = self._state
        newest = -1 if state.checkpoint is None else earliest_start(state, state.checkpoint.number)
        held = {draw.ordinal for draw in state.open}
        held |= {draw.ordinal for number, batch in state.batches.items() if number > newest for draw in batch.draws}
        if released := self._unerased - held:
            what, subject = "the deletion of groups of a deleted user", subjects.experience(self.job)
            await self.retry.until_taken(what, subject, lambda: erase_groups(self.bus, self.job, released))
            self._unerased -= released

    def unreadable(self) -> list[Unreadable]:
        """Return the messages that could not be decoded since the last call; see ``Supply.unreadable``."""
        found, self._unreadable = self._unreadable, []
        return found

    async def requeue(self, dead_letter: LiveDeadLetter) -> int:
        """Store the message of a dead letter in its stream again; return how many of its interactions or items are
        new."""
        return await requeue_dead_letter(
            self.bus, self.job, dead_letter, self.matching, self.quarantine, archive=self._archive
        )

    async def _sweep(self, *, everything: bool, most: int | None = None) -> None:
        state = self._state
        self.matching.examples.distrusted = state.distrusted
        self.matching.trials.discard_recorded(state)
        self.matching.examples.temperature = self._temperature(state.settings.get(TEMPERATURE))
        statuses = self.matching.sweep(
            version=state.start_version(state.next_number),
            newest=state.version,
            now=bus_time(),
            everything=everything,
            most=most,
        )
        self._note(statuses + (self.quarantine.sweep(bus_time()) if everything else []))

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _note(self, statuses: Iterable[FeedbackStatus]) -> None:
        """Collect new statuses: final ones for the ledger, others for the feed."""
        for name, status in self._unrecorded.add(statuses).items():
            self._passing.pop(name, None)  # the newest one comes last
            if status is not None:
                self._passing[name] = status

    def decided(self, state: LedgerState, *, ends: bool) -> list[Decided]:
        """Return events with the decisions since the last call; if the job ``ends``, reject all undecided data
        first."""
        now = bus_time()
        if ends:
            self._note([*self.matching.on_job_end(now), *self.quarantine.on_job_end(now)])
        self._unrecorded.add_interactions(self.matching.refused_interactions.drain())
        self._unrecorded.close_episodes(self.matching.examples.closed.drain())
        if not state.started or state.finished or not self._unrecorded:
            return []
        read_to = self._next[subjects.interactions(self.job)], self._next[subjects.feedback(self.job)]
        return self._unrecorded.drain(epoch=self.epoch, now=now, read_to=read_to)

    async def flush(self) -> None:
        """Publish the non-final statuses, except those of items whose final status the ledger does not record yet."""
        ready = [status for name, status in self._passing.items() if name not in self._unrecorded]
        if ready:
            for status in ready:
                del self._passing[status.feedback]
            await self._feed.notify(ready)

    async def committed(self, state: LedgerState, events: Sequence[Event], seq: int) -> None:
        """Publish the statuses that follow from committed events, and discard the data that the events decided."""
        self._state = state
        if self._unerased and any(isinstance(event, Checkpointed | Dropped | Promoted) for event in events):
            await self._erase_released()
        await self._feed.publish(seq, events, state)
        for event in events:
            match event:
                case Admitted():
                    self._mark_erased(one for one in event.admissions if self._is_of_deleted_user(one))
                    for name in (name for one in event.admissions for name in one.feedback):
                        self._passing.pop(name, None)
                    self._funnel.on_admissions(event.admissions, self.matching.end_times(event.admissions))
                    self.matching.on_admitted(event.admissions)
                case Promoted() | PromotionRefused():
                    self._funnel.on_promotion_decision(event.figures)
                case BatchTrained():
                    self.source.on_trained(event.number, state)
                    self._idle_since = event.time
                case Finished():
                    await self._erase_released()
                    await self._reject_undecided(event.time)
                case _:
                    pass
        if self._wants_purge and not self._unrecorded:
            await self._purge_decided()

    async def close(self) -> None:
        """Reject all undecided data after the end of the job, the newest arrivals included; see ``Supply.close``."""
        for subject in self._next:
            await self._take_all(subject)
        await self._reject_undecided(bus_time())
        await self._feed.catch_up()

    async def _reject_undecided(self, now: float) -> None:
        """Reject data that arrived after the last ledger entry, and publish its statuses directly to the decision
        feed."""
        self._note([*self.matching.on_job_end(now), *self.quarantine.on_job_end(now)])
        self._unrecorded.add_interactions(self.matching.refused_interactions.drain())
        await self.flush()
        await self._feed.notify(*self._unrecorded.drain_statuses())

    async def _free_stream_space(self) -> None:
        """Purge unneeded messages from streams that fill up; reject old feedback whose message prevents the purge."""
        await self._feed.catch_up()
        if self._unrecorded:
            self._wants_purge = True
        else:
            await self._purge_decided()
        if not self.bus.held:
            with contextlib.suppress(Unavailable):  # the next call tries again, and purges what is rejected now
                self._note(self._relieve_feedback(await self.bus.stream_state(subjects.FEEDBACK), bus_time()))

    async def _purge_decided(self) -> None:
        """Purge decided messages from streams that are half full.

        Keeps messages that are needed for batches which a trainer may repeat or a fork may reopen. The ledger must have
        all decisions, because a later leader cannot derive them from purged messages.
        """
        self._wants_purge = False
        if self.bus.held:
            return
        state = self._state
        newest = -1 if state.checkpoint is None else earliest_start(state, state.checkpoint.number)
        later = {draw.ordinal for number, batch in state.batches.items() if number > newest for draw in batch.draws}
        later |= {draw.ordinal for draw in state.open}
        kept = [state.admissions[ordinal] for ordinal in later if ordinal in state.admissions]
        low_interactions, low_feedback = (
            max(lows) for lows in zip(state.read_from, self.matching.low_water(), strict=True)
        )
        needed = (seq for one in kept for seq in (*one.interactions.values(), *one.context.values()))
        bodies = (seq for one in kept if not one.interactions for seq in one.feedback.values())
        low_interactions = min([low_interactions, self.matching.examples.lowest_seq, *needed])
        low_feedback = min([low_feedback, self.quarantine.lowest_seq, *bodies])
        try:
            for subject, low in (
                (subjects.interactions(self.job), low_interactions),
                (subjects.feedback(self.job), low_feedback),
            ):
                stream = await self.bus.stream_state(self._stream(subject))
                if stream.bytes <= FULL_SHARE * stream.max_bytes:
                    continue
                if subject == subjects.feedback(self.job):
                    await purge_feedback(self.bus, self.job, below_seq=low)
                else:
                    await self.bus.purge(self._stream(subject), subject, below_seq=low)
        except Unavailable as error:  # the next call tries again
            logger.info("%s: no room is made among its interactions and feedback: %s", self.job, error)

    def _relieve_feedback(self, feedback: StreamState, now: float) -> list[FeedbackStatus]:
        """Reject old items of feedback if FEEDBACK or the ledger's state grows too large; return the statuses of these
        items.

        FEEDBACK and the ledger's state must keep everything that is newer than the oldest undecided item.
        """
        is_crowded, undecided = feedback.bytes > CROWDED_SHARE * feedback.max_bytes, self.matching.low_water()[1]
        if self.quarantine.lowest_seq < undecided:
            return self.quarantine.reject_older_half(now) if is_crowded or len(self._state.used) > MAX_USED else []
        if not is_crowded:
            return []
        names = self.matching.examples.quota.older_half()
        if feedback.bytes > FLOODED_SHARE * feedback.max_bytes:
            names = self.matching.undecided_feedback((undecided + feedback.last_seq) // 2)
        return self.matching.reject(names, FEEDBACK_FULL, now)

    async def order(self, run: JobRun, draws: Sequence[Draw]) -> None:
        """Make and publish the groups of admitted draws; waits while the bus is unavailable."""
        admissions = {d: run.state.admissions[d.ordinal] for d in draws if not self.source.refusal(d)}
        seqs = {seq for admission in admissions.values() for seq in admission.interactions.values()}
        records = await self._reader.by_seq(seqs)
        groups: list[Group] = []
        for draw, admission in admissions.items():
            temperature = self._temperature(run.state.open[draw].temperature)
            turns = [records.get(seq) for seq in admission.interactions.values()]
            if not turns:
                self._group_maker.request(draw, admission, temperature)
                continue
            known = [turn for turn in turns if turn is not None]
            if len(known) < len(turns):
                groups.append(empty_group(self.job, draw, epoch=self.epoch, reason="interaction_gone"))
            else:
                groups.append(
                    group_of(
                        self.job, draw, known, reward=admission.reward, epoch=self.epoch, objective=admission.objective,
                        temperature=None if admission.objective == "policy" else temperature,
                    )
                )  # fmt: skip
        await self._publish(groups)

    def _temperature(self, settings: float | None) -> float:
        """Return the sampling temperature. ``settings`` is its value in the ledger; if that is None, the job file's
        value holds."""
        return self.config.sampling.temperature if settings is None else settings

    async def _find_records(self, items: Sequence[Feedback]) -> None:
        """Look up the missing records of interactions that new examples refer to."""
        examples = self.matching.examples
        names = [name for item in items if examples.accepts(item) for name in examples.missing_records(item)]
        for name, record in (await self._reader.by_name(names)).items():
            examples.add_record(name, record)

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

    # -- reports -------------------------------------------------------------------------------------------------------

    def measures(self) -> dict[str, float]:
        """Return the counts since the last update, and the numbers of waiting items."""
        waiting = {
            "online/waiting": float(self.matching.num_waiting),
            "online/unmatched": float(len(self.matching.unmatched)),
            "online/quarantined": float(self.quarantine.num_held),
            "online/examples": float(len(self.matching.examples.items) + self._group_maker.num_pending),
        }
        return self._funnel.row() | waiting

    def waits(self, run: JobRun, inputs: Inputs) -> list[dict[str, Any]]:
        """Return a row about the wait for feedback, or [] while a batch is in training or the job waits for something
        else."""
        state = run.state
        if state.trainable or state.finished or state.checkpoint is None or inputs.desired == "paused":
            return []
        if state.canary is not None:  # feedback makes no batch during a trial
            return []
        unsealed = [state.admissions[draw.ordinal].time for draw, info in state.open.items() if not info.batch]
        age_s = inputs.now - min(unsealed, default=self._idle_since)
        what = f"feedback (WaitingForFeedback): {self.source.waiting(state)}"
        return [wait_row(what, subjects.feedback(self.job), self.job, age_s=age_s)]
