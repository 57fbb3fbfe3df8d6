"""Deletes a user's data: recorded interactions, feedback on them, training groups made of both, and opened episodes.

A deletion has three steps. It records the request, publishes the ids of the data, and overwrites the messages in the
streams. Every replica reads the published ids, and refuses them from then on. An interrupted deletion starts anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain

import msgspec

from penstock.services.coordinator.feedback.ids import keep_ids
from penstock.services.coordinator.feedback.lineage import UserDataLineage, erase_groups
from penstock.services.coordinator.feedback.pieces import erase_dead_letter, erase_message
from penstock.services.coordinator.feedback.search import Found, Place, Search
from penstock.shared.errors import Conflict, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import decode_events
from penstock.shared.protocol.live.episode import KEEP_S, EpisodeRecord
from penstock.shared.protocol.live.interaction import (
    RESTORED_HEADER,
    SENDERS_HEADER,
    Erasure,
    Feedback,
    FeedbackBatch,
    bare_id,
    named_users,
    senders_header,
)
from penstock.shared.protocol.parts import PARTS
from penstock.shared.runtime.ledger import LedgerArchive, scan_ledger, segment_of
from penstock.shared.runtime.tasks import together
from penstock.shared.transport.bus import MSG_ID, Bus, Message, Outgoing
from penstock.shared.transport.kv import Entry

__all__ = ["Eraser", "Report", "target_of"]

logger = logging.getLogger(__name__)

PREFIX = "erasure"
Forgotten = Callable[[int], Awaitable[None]]
NAMED = 10_000
"""Maximum number of ids of each kind (interactions, feedback) in one published ``Erasure``."""


class Report(msgspec.Struct, kw_only=True):
    """State of the deletion of a user's data, in the `privacy` bucket under the user's pseudonym.

    ``requested``: time of the newest request. Counts and versions cover everything ever deleted for the user.
    ``holder`` is the process that carries the deletion out, with its last heartbeat at ``alive`` (Unix seconds).
    """

    user: str
    status: str
    requested: float
    holder: str = ""
    alive: float = 0.0
    finished: float | None = None
    interactions: int = 0
    feedback: int = 0
    groups: int = 0
    episodes: int = 0
    trained_versions: dict[str, list[int]] = {}


class Eraser:
    """Deletes a user's data from the streams.

    Args:
        forgotten: called before a deletion counts as done, with a stream sequence number of FEEDBACK; it must wait
            until indexes have read FEEDBACK up to that number.
        archive: archive of older ledger entries.
        released_s: longest time that a deletion waits until its job no longer needs the groups made of the data
            (seconds).
        holder: name of this process.
    """

    def __init__(
        self, bus: Bus, pseudonym: Callable[[str], str], *, forgotten: Forgotten | None = None,
        archive: LedgerArchive | None = None, released_s: float = 0.0, holder: str = "",
    ) -> None:  # fmt: skip
        self._archive, self._released_s, self._holder = archive, released_s, holder
        self._bus, self._pseudonym, self._forgotten = bus, pseudonym, forgotten
        self._kv, self._opened = bus.kv(subjects.PRIVACY), bus.kv(subjects.EPISODES)

    async def begin(self, user: str) -> Report:
        """Record the request to delete the data of a user (a pseudonym). Raises Unavailable.

        A deletion that is under way continues, and also deletes data that arrived since it began.
        """

        def edit(known: Report | None) -> Report:
            if known is None:
                return Report(user=user, status="running", requested=bus_time())
            again = msgspec.structs.replace(known, status="running", requested=bus_time(), finished=None)
            return again if known.status != "done" else msgspec.structs.replace(again, holder="", alive=0.0)

        return await self._change(user, edit)

    async def claim(self, user: str, *, abandoned_s: float) -> Report | None:
        """Take over a deletion and return its report. Return None if the deletion is done, or if another holder sent a
        heartbeat in the last ``abandoned_s`` seconds.

        Raises:
            Unavailable: the bus does not answer.
        """
        now = bus_time()

        def edit(known: Report | None) -> Report:
            is_held = known is not None and known.holder != self._holder and known.alive > now - abandoned_s
            if known is None or known.status == "done" or is_held:
                raise Conflict(f"the deletion of the data of user {user} is done, or in other hands")
            return msgspec.structs.replace(known, holder=self._holder, alive=now)

        try:
            return await self._change(user, edit)
        except Conflict:
            return None

    async def keep(self, user: str, *, every_s: float) -> None:
        """Send heartbeats for a deletion, until cancelled or until another process has taken it over."""
        with contextlib.suppress(Conflict):
            while True:
                await asyncio.sleep(every_s)
                with contextlib.suppress(Unavailable):
                    await self._change(user, self._with_heartbeat)

    def _with_heartbeat(self, known: Report | None) -> Report:
        """Return ``known``, the stored report, with a new heartbeat. Raises Conflict if this process no longer carries
        out the deletion."""
        if known is None or known.holder != self._holder:
            raise Conflict("another process took the deletion up")
        return msgspec.structs.replace(known, alive=bus_time())

    async def _change(self, user: str, edit: Callable[[Report | None], Report]) -> Report:
        """Replace the stored report of ``user`` by ``edit``'s result; try again after concurrent writes.

        Raises what ``edit`` raises.
        """
        while True:
            entry = await self._kv.get(f"{PREFIX}.{user}")
            value = entry.value if entry is not None else None
            changed = edit(msgspec.json.decode(value, type=Report) if value else None)
            with contextlib.suppress(Conflict):
                revision = entry.revision if entry is not None else 0
                await self._kv.update(f"{PREFIX}.{user}", msgspec.json.encode(changed), revision)
                return changed

    async def find(self, user: str) -> Report | None:
        """Return the progress of the deletion of a user's data, or None if none was requested."""
        entry = await self._kv.get(f"{PREFIX}.{user}")
        return msgspec.json.decode(entry.value, type=Report) if entry is not None and entry.value else None

    async def unfinished(self) -> list[Report]:
        """Return all deletions that are not done, whichever process carries them out."""
        entries = await self._kv.entries(PREFIX)
        reports = [msgspec.json.decode(entry.value, type=Report) for entry in entries if entry.value]
        return [report for report in reports if report.status != "done"]

    async def run(self, report: Report) -> None:
        """Delete the data of ``report``'s user; begin again if another request arrived meanwhile. Safe to repeat.

        Raises:
            Conflict: another process has taken the deletion over.
            Unavailable: the bus does not answer, or an index is too slow; the next run deletes what is left.
        """

        def edit(known: Report | None) -> Report:
            held = self._merged(report, known)
            if held.requested > report.requested:
                return held
            return msgspec.structs.replace(held, status="done", finished=bus_time())

        while True:
            await self._delete(report)
            stored = await self._change(report.user, edit)
            report.status, report.finished, report.requested = stored.status, stored.finished, stored.requested
            if report.status == "done":
                return

    async def _delete(self, report: Report) -> None:
        found = await Search(self._bus, report.user, self._pseudonym).run()
        report.episodes += await self._end_episodes(report.user, found)
        until = bus_time()
        announced = {job: await self._announce(report.user, job, mine, until) for job, mine in found.items()}
        # Groups that a leader admits after this search are dropped by the leader, which reads the announcement.
        lineages = await self._lineages(report.user, found, until)
        for job, lineage in lineages.items():
            if lineage.held and not announced.get(job):  # its records are gone: user and time suffice
                announced[job] = await self._publish_erasure(
                    Erasure(user=report.user, interactions=[], feedback=[], time=until), job
                )
        for job, lineage in lineages.items():
            mine = found.get(job, Found())
            for dead_letter in mine.dead_letters:
                await erase_dead_letter(self._bus, dead_letter)
            for place, rest in mine.mixed:
                is_below = isinstance(place, Message) and place.seq < lineage.low_feedback
                over = {target_of(item) for item in rest} if is_below else lineage.decided
                needed = lineage.needed if isinstance(place, Message) else frozenset[str]()
                left = [item for item in rest if item.id in needed or target_of(item) not in over]
                if isinstance(place, Message):  # ids of decided items outlive the message
                    stays = {item.id for item in left}
                    await keep_ids(self._bus, job, [(place.seq, item) for item in rest if item.id not in stays])
                await self._rewrite(job, place, left)
            for message in chain.from_iterable(mine.interactions.values()):
                await erase_message(self._bus, subjects.INTERACTIONS, message)
            report.interactions += len(mine.interactions)
            report.feedback += len(mine.feedback)
            _add_versions(report, job, lineage.versions)
            await self._save(report)
        # Jobs are independent: one without a trainer delays the groups of no other.
        await together(
            self._erase_groups(report, job, lineage) for job, lineage in lineages.items() if lineage.ordinals
        )
        if self._forgotten is not None:
            await self._forgotten(max([0, *announced.values()]))

    async def _save(self, report: Report) -> None:
        """Store ``report``, the progress of a deletion. Raises Conflict if another process has taken the deletion
        over."""
        await self._change(report.user, lambda known: self._merged(report, known))

    def _merged(self, report: Report, known: Report | None) -> Report:
        """Return ``report`` with the status, times and holder of the stored report (``known``) and a new heartbeat.

        Raises Conflict if this process no longer carries out the deletion.
        """
        held = self._with_heartbeat(known)
        stands = {name: getattr(held, name) for name in ("status", "requested", "finished", "holder", "alive")}
        return msgspec.structs.replace(report, **stands)

    async def _lineages(self, user: str, found: Mapping[str, Found], until: float) -> dict[str, UserDataLineage]:
        """Return, by job, the lineage of the user's data: groups made of it, and versions trained on it, from the job's
        ledger.

        Covers the jobs whose streams hold data of the user (``found``), and the jobs that admitted data of the user up
        to ``until`` (Unix seconds).
        """
        lineages = {job: _lineage_of(user, mine, until) for job, mine in found.items()}
        archived = set[str]()
        async for message in self._bus.scan(subjects.LEDGER, subjects.ledger("*")):
            job = message.subject.rpartition(".")[2]
            if segment_of(message.headers, job) is not None:
                archived.add(job)
            elif job not in archived:
                _take_entry(lineages.setdefault(job, _lineage_of(user, Found(), until)), message.seq, message.data)
        for job in archived:  # their ledgers do not begin in the stream
            lineages[job] = _lineage_of(user, found.get(job, Found()), until)
            async for entry in scan_ledger(self._bus, job, self._archive):
                _take_entry(lineages[job], entry.seq, entry.data)
        return {job: one for job, one in lineages.items() if job in found or one.ordinals}

    async def _erase_groups(self, report: Report, job: str, lineage: UserDataLineage) -> None:
        """Delete the groups that a job made of the user's data, once the job no longer needs the groups."""
        await self._until_released(job, lineage)
        count = await erase_groups(self._bus, job, lineage.ordinals)
        report.groups += count
        _add_versions(report, job, lineage.versions)

    async def _until_released(self, job: str, lineage: UserDataLineage) -> None:
        """Follow the ledger until the job no longer needs the groups that it made of the user's data.

        Meanwhile the job's leader drops the draws in flight (`erased`), has the trainer refuse sealed batches that it
        has not begun, and requests a checkpoint after the trained batches. If the job has no leader or no trainer for
        too long, this method returns anyway, and the groups are deleted. The trainer then refuses a batch, or forks
        when it restarts, and the ledger records the reason.
        """
        if not (lineage.held and self._released_s):
            return
        try:
            async with (
                asyncio.timeout(self._released_s),
                contextlib.aclosing(
                    self._bus.follow(subjects.LEDGER, subjects.ledger(job), start_seq=lineage.seq + 1)
                ) as entries,
            ):
                async for message in entries:
                    if segment_of(message.headers, job) is None:
                        _take_entry(lineage, message.seq, message.data)
                    if not lineage.held:
                        return
        except TimeoutError:
            draws = ", ".join(map(str, sorted(lineage.held)[:10]))
            logger.error("%s did not let go of draws %s within %g s: they are deleted", job, draws, self._released_s)

    # -- deletion ----------------------------------------------------------------------------------------------------

    async def _announce(self, user: str, job: str, mine: Found, time: float) -> int:
        """Publish the ids of the user's interactions and feedback in ``mine``, so that all readers of the job's
        feedback know them as deleted. Return the stream sequence number of the last message, or 0 without ids."""
        last, interactions, feedback = 0, sorted(mine.interactions), sorted(mine.feedback)
        for start in range(0, max(len(interactions), len(feedback)), NAMED):
            some = slice(start, start + NAMED)
            last = await self._publish_erasure(
                Erasure(user=user, interactions=interactions[some], feedback=feedback[some], time=time), job
            )
        return last

    async def _publish_erasure(self, erasure: Erasure, job: str) -> int:
        """Publish a deletion to all readers of the job's feedback; return the stream sequence number of the message."""
        return await self._bus.publish(subjects.erasures(job), pack(erasure, job=job))

    async def _end_episodes(self, user: str, found: Mapping[str, Found]) -> int:
        """End the user's opened episodes, remove user and tags from their records, and return the number of episodes.

        An episode is the user's if it was opened for the user, or if it was opened without a user and contains the
        user's data. The gateway refuses further requests of a blanked episode. Its record stays: a request that names
        an unknown episode is served, and its job would train on it even if the episode was set aside for evaluation.
        """
        ended = 0
        for found_entry in await self._opened.entries():
            entry: Entry | None = found_entry
            while entry is not None:
                try:
                    record = EpisodeRecord.model_validate_json(entry.value or b"")
                except ValueError:
                    logger.error("the record of episode '%s' cannot be read: nothing in it is deleted", entry.key)
                    break
                names = named_users(record.user, record.tags, self._pseudonym)
                spoke = not names and record.job in found and bare_id(record.id) in found[record.job].episodes
                over = record.ended_at or bus_datetime()
                blank = record.model_copy(update={"user": "", "tags": {}, "group_id": None, "ended_at": over})
                if blank == record or not (spoke or user in names):
                    break
                with contextlib.suppress(Conflict):  # another process ended it meanwhile
                    data = blank.model_dump_json().encode()
                    await self._opened.overwrite(entry.key, data, entry.revision, keep_s=KEEP_S)
                    ended += 1
                entry = await self._opened.get(entry.key)
        return ended

    async def _rewrite(self, job: str, place: Place, rest: list[Feedback]) -> None:
        """Publish again the items of other users (``rest``) that the message or dead letter at ``place`` contains; then
        delete the original."""
        if isinstance(place, Message):  # keeps the order of revisions
            rest = [msgspec.structs.replace(item, seq=item.seq or place.seq) for item in rest]
        data = pack(FeedbackBatch(items=rest), job=job)
        if isinstance(place, Message):
            if rest:
                places = [*place.headers.get(RESTORED_HEADER, "").split(), str(place.seq)]
                senders = senders_header((item.key_id, len(msgspec.msgpack.encode(item))) for item in rest)
                headers = {RESTORED_HEADER: " ".join(places), SENDERS_HEADER: senders}
                copy = Outgoing(subjects.feedback(job), data, headers)
                await self._bus.publish_whole([copy])
            await erase_message(self._bus, subjects.FEEDBACK, place)
            return
        if rest:  # several items always fit into one message
            headers = {name: value for name, value in place.first.headers.items() if name not in (PARTS, MSG_ID)}
            with contextlib.suppress(StreamFull):  # a full stream must not block the deletion
                await self._bus.publish(subjects.dead(job), data, headers=headers)
        await erase_dead_letter(self._bus, place)


def _add_versions(report: Report, job: str, versions: Iterable[int]) -> None:
    """Extend the list of a job's versions in ``report`` by ``versions``, which the job trained on the user's data."""
    if known := {*versions, *report.trained_versions.get(job, ())}:
        report.trained_versions = {**report.trained_versions, job: sorted(known)}


def _take_entry(lineage: UserDataLineage, seq: int, data: bytes) -> None:
    lineage.seq = seq
    try:
        events = decode_events(data)
    except ProtocolError as error:
        logger.error("entry %d of %s cannot be read: %s", seq, subjects.LEDGER, error)
        return
    for event in events:
        lineage.take(event)


def _lineage_of(user: str, mine: Found, until: float) -> UserDataLineage:
    others = {target_of(item) for _, rest in mine.mixed for item in rest}
    return UserDataLineage(user, mine.interactions.keys() | mine.gone, mine.feedback | mine.gone, others, until)


def target_of(item: Feedback) -> str:
    """Return the id of the item to which ``item`` belongs: for a retraction the retracted item, else ``item``
    itself."""
    name = str(item.body.get("feedback", "")) if item.kind == "retraction" else item.id
    return bare_id(name) or name
