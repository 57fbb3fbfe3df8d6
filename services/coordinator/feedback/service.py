"""Feedback of live agents: converts posts to items, stores them durably, and answers queries from the index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uuid6

from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.erasure import Eraser, Report
from penstock.services.coordinator.feedback.held import HeldFeedback
from penstock.services.coordinator.feedback.index import FeedbackIndex
from penstock.services.coordinator.feedback.ingest import Ingest, Stored
from penstock.services.coordinator.feedback.items import (
    Identity,
    Posted,
    derived_id,
    item_of,
    retraction_of,
    target_of,
)
from penstock.services.coordinator.feedback.jobs import LiveJobs, no_job
from penstock.services.coordinator.feedback.posts import Metric, PostedInteraction, PostedPreference
from penstock.services.coordinator.feedback.privacy import Consents, Pseudonyms
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.shares import FeedbackShares
from penstock.shared.errors import (
    Conflict,
    Flaw,
    Gone,
    Invalid,
    NotFound,
    PenstockError,
    ProtocolError,
    Refused,
    RetryLater,
    StreamFull,
    Unavailable,
)
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.live.interaction import UNDECIDED, Feedback, Interaction, bare_id, marked_id, time_of_id
from penstock.shared.runtime.ledger import ledger_archive
from penstock.shared.transport.bus import Bus, Message

__all__ = ["FeedbackService"]

log = logging.getLogger(__name__)

RETRY_S = 1.0
FOLDER = "feedback"
PROMPT_S = 2.0
"""Time that a request for a deletion waits, so that its response can report a quick deletion as done (seconds)."""
REACH_S = 30.0
RELEASED_S = 600.0
"""Longest time that a deletion waits until no trainer can request groups made of the data (seconds)."""
ABANDONED_S = 20.0
"""Time without a heartbeat after which another process takes a deletion over (seconds)."""
LEARNT = frozenset({"admitted", "trained"})
"""Statuses after which a retraction comes too late."""
ENDED = {"status": "rejected", "reason": "job_ended"}
"""Status of items that arrive after their job's end: no leader decides on them."""
Row = dict[str, Any]


class FeedbackService:
    """Receives feedback and answers queries about it. Every method may raise Unavailable."""

    def __init__(
        self, bus: Bus, store: JobStore, data_dir: Path, *, ids_keep_s: float | None = None, share: float = 1.0,
        worker: str = "",
    ) -> None:  # fmt: skip
        """Create the service; nothing is read before ``run``.

        Args:
            share: share of FEEDBACK that one job may use of the space that other jobs leave
                (``ServiceSettings.tenant_share``).
            worker: id of this process.
        """
        self._ids_keep_s = ids_keep_s
        self.pseudonyms, self.consents = Pseudonyms(bus), Consents(bus)
        self.jobs = LiveJobs(store)
        self.index = FeedbackIndex(bus, data_dir / FOLDER)
        self.shares = FeedbackShares(bus, share)
        self.ingest = Ingest(bus, self.index)
        self.ingest.has_room = self.shares.has_room
        self.index.on_projected = self.ingest.projected
        self.held = HeldFeedback(bus, self.index, self.ingest, self.pseudonyms)
        self._bus, archive = bus, ledger_archive(data_dir)
        self._eraser = Eraser(
            bus, self.pseudonyms.of, forgotten=self._forget, released_s=RELEASED_S, archive=archive,
            holder=worker or str(uuid6.uuid7()),
        )  # fmt: skip
        self._erasing: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Keep up to date, until cancelled: the index, the known jobs, the users' consents, and the space in FEEDBACK
        that each job and key uses."""
        await self._load()
        async with asyncio.TaskGroup() as tasks:
            for part in (self.jobs, self.index, self.consents, self.shares):
                tasks.create_task(part.run())

    async def _load(self) -> None:
        while True:
            try:
                # Consents first: requests of users are served only once pseudonyms are loaded, so consents are known by
                # then. A record with `no_consent` would stay so forever.
                await self.consents.read()
                await self.pseudonyms.load()
                return
            except Unavailable as error:
                log.info("users cannot be named yet: %s", error)
                await asyncio.sleep(RETRY_S)

    # -- posts -------------------------------------------------------------------------------------------------------

    def pseudonym(self, user: str) -> str:
        """Return the pseudonym of a user for stored records; '' for no user. Raises Unavailable before the secret key
        is loaded."""
        return self.pseudonyms.of(user)

    async def post(self, posts: Sequence[Any], *, caller: Caller, key: str | None) -> list[Row | PenstockError]:
        """Store validated posts (``FeedbackPost``); return for each a ``FeedbackReply`` once on disk, or its refusal.

        ``key`` is the request's Idempotency-Key: a post without an id gets one from the key and its position, so that a
        repeated request never has a second effect. If validation refused a post, ``posts`` has its error in that
        place, which is returned unchanged; so the other posts keep their positions.
        """
        prepared = [await self._prepare(post, caller, key, place) for place, post in enumerate(posts)]
        items = [
            (found[0], found[1])
            for post, found in zip(posts, prepared, strict=True)
            if not isinstance(found, PenstockError) and not _is_dry(post)
        ]
        stored = iter(await self.ingest.add(items))
        known = await self.index.targets([item.inference or item.episode for item, _ in items])
        replies: list[Row | PenstockError] = []
        for post, found in zip(posts, prepared, strict=True):
            if isinstance(found, PenstockError):
                replies.append(found)
            elif _is_dry(post):
                replies.append(_reply(found[0], None, known))
            else:
                result = next(stored)
                replies.append(_reply(found[0], result, known) if isinstance(result, Stored) else _refusal(result))
        return replies

    async def _prepare(
        self, post: Posted | PenstockError, caller: Caller, key: str | None, place: int
    ) -> tuple[Feedback, bool] | PenstockError:
        """Convert a post to ``(item, True if its sender chose its id)``, or return the error that refuses the post."""
        if isinstance(post, PenstockError):
            return post
        try:
            if isinstance(post, PostedInteraction | PostedPreference):
                job = await self.jobs.of_model(post.model)
            else:
                job = await self.jobs.of_target(*target_of(post))
            if not caller.may_use(job.name, job.id):
                raise no_job("/model", "the feedback is about no online job that is known here")
            who = _identity(post, caller, key, place, self.pseudonyms.digest)
            if job.redactor is None:
                item = item_of(post, job, who, self.pseudonyms.of)
            else:
                item = await asyncio.to_thread(item_of, post, job, who, self.pseudonyms.of)
            self._refuse_erased(item)
            self._refuse_old(item, who.chosen)
            return item, who.chosen
        except Refused as refusal:
            return refusal
        except Unavailable as error:
            return _refusal(error)

    def _refuse_erased(self, item: Feedback) -> None:
        for id in (item.id, item.inference, item.body.get("rejected")):
            if id and id in self.index.erased:
                raise Gone("erased", f"'{id}' was deleted together with the data of its user")

    def _refuse_old(self, item: Feedback, chosen: bool) -> None:
        """Refuse an item whose chosen id, or whose target, is so old that a replica may have forgotten earlier feedback
        with the same id or target."""
        if self._ids_keep_s is None:
            return
        oldest = bus_time() - self._ids_keep_s
        for pointer, id in (("/feedback_id", item.id if chosen else ""), ("/inference_id", item.inference)):
            made = time_of_id(id) if id else None
            if made is not None and made < oldest:
                days = self._ids_keep_s / 86400
                detail = (
                    f"'{id}' was made more than {days:g} days ago, and what came before that is not known any more "
                    "(PENSTOCK_LIVE_KEEP_S): it may have been taken already"
                )
                raise Invalid("beyond_horizon", detail, [Flaw(pointer=pointer, detail=detail)])

    async def retract(self, feedback: str, *, caller: Caller) -> Row:
        """Retract an item, and return a ``RetractReply``. Raises NotFound."""
        row = await self.status_of(feedback)
        id = derived_id(self.pseudonyms.digest, "", f"retract {row['feedback_id']}", 0)
        item = retraction_of(row["feedback_id"], row["job"], Identity(id, caller.id, chosen=True))
        result = (await self.ingest.add([(item, True)]))[0]
        if not isinstance(result, Stored):
            raise _refusal(result)
        return {
            "feedback_id": row["feedback_id"], "retraction_id": id, "status": "accepted",
            "duplicate": result.duplicate, "too_late": row["status"] in LEARNT,
        }  # fmt: skip

    # -- questions ---------------------------------------------------------------------------------------------------

    async def status_of(self, feedback: str) -> Row:
        """Return the status of an item (``FeedbackStatusReply``). Raises NotFound."""
        id = bare_id(feedback)
        if id is None:
            raise NotFound(f"'{feedback[:80]}' is not the id of an item of feedback")
        item = self.ingest.recent(id)
        row = await self.index.status_of(id)
        if row is None and item is None:  # another replica may have stored it a moment ago
            await self.index.catch_up(subjects.FEEDBACK)
            row = await self.index.status_of(id)
        if item is not None and (row is None or row["revision"] < item.revision):
            return _fresh(item) | (ENDED if self.jobs.was_over(item.job, item.received) else {})
        if row is None:
            raise NotFound(f"no feedback '{id}' was accepted here")
        if row["status"] in UNDECIDED and self.jobs.was_over(row["job"], row["received"]):
            row |= ENDED
        trained = {"step": row["batch"], "version": row["version"]} if row["status"] == "trained" else None
        shown = {name: row[name] for name in ("job", "kind", "metric", "status", "reason", "interactions", "revision")}
        return {
            "object": "feedback", "feedback_id": id, **shown,
            "ordinal": row["ordinal"] if row["ordinal"] >= 0 else None, "trained": trained,
            "late_revision": row["late"] or None, "retraction_requested": bool(row["retracted"]),
            "received": row["received"], "time": row["time"],
        }  # fmt: skip

    async def episodes_of(self, interactions: Sequence[str]) -> dict[str, str]:
        """Return the episode of each interaction that is recorded in an episode. All ids are canonical UUIDs. An
        interaction is left out if the id of its episode is not a UUID."""
        found = await self.index.episodes(interactions)
        if len(found) < len(interactions):
            await self.index.catch_up(subjects.INTERACTIONS)
            found = await self.index.episodes(interactions)
        return found

    async def _record(self, message: Message) -> Interaction | None:
        """Return the interaction in a message; None if it cannot be read, as after the deletion of its user's data."""
        try:
            return await whole_of(self._bus, subjects.INTERACTIONS, message, Interaction)
        except (ProtocolError, NotFound):
            return None

    async def turns(self, episode: str, *, after: str | None, limit: int) -> list[Row]:
        """Return the recorded interactions of an episode (canonical UUID) past ``after``, oldest first."""
        await self.index.catch_up(subjects.INTERACTIONS)
        marked = marked_id(episode)
        job = self.jobs.of_mark(marked[1]) if marked is not None else None
        if marked is None or job is None:
            return []
        ids = await self.index.turns(marked[0], bare_id(after or "") or "", limit)
        found = [await self._bus.last(subjects.INTERACTIONS, subjects.interaction(job, id)) for id in ids]
        records = [await self._record(message) for message in found if message is not None]
        decisions = await self.decisions(ids)
        return [
            {
                **record.row(),
                "decision": decisions.get(bare_id(record.id) or "") or self.after_end(record),
            }
            for record in records
            if record is not None
        ]

    async def decisions(self, interactions: Sequence[str]) -> dict[str, Row]:
        """Return the decision (``InteractionDecision``) on each decided interaction among ``interactions`` (canonical
        UUIDs)."""
        await self.index.catch_up(subjects.DECISIONS)
        return {name: _decision(row) for name, row in (await self.index.decided(interactions)).items()}

    def after_end(self, record: Interaction) -> Row | None:
        """Return the rejection (``InteractionDecision``) of an undecided response that ended after its job had ended;
        None if the response ended earlier."""
        if not self.jobs.was_over(record.job, record.ended):
            return None
        return {**ENDED, "ordinal": None, "trained": None, "time": record.ended}

    async def funnel(self, job: str) -> Row:
        """Return the feedback of a job, counted by metric, source and status (``Funnel``)."""
        rows = await self.index.funnel(job)
        by_status: Counter[str] = Counter()
        for _, _, status, count in rows:
            by_status[status] += count
        data = [dict(zip(("metric", "source", "status", "items"), row, strict=True)) for row in rows]
        decided = await self.index.outcomes(job)
        return {
            "object": "feedback.funnel", "job": job, "items": by_status.total(), "by_status": dict(by_status),
            "data": data,
            "interactions": [dict(zip(("status", "reason", "interactions"), row, strict=True)) for row in decided],
        }  # fmt: skip

    # -- users -------------------------------------------------------------------------------------------------------

    async def consent(self, user: str, *, train: bool) -> Row:
        """Store a user's consent, and return a ``ConsentReply``."""
        pseudonym = self.pseudonyms.of(user)
        await self.consents.say(pseudonym, train=train)
        return {"user": pseudonym, "train": train}

    async def erase(self, user: str) -> Row:
        """Begin to delete a user's data, and return the progress (``ErasureReply``)."""
        pseudonym = self.pseudonyms.of(user)
        report = await self._eraser.begin(pseudonym)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROMPT_S):
                while report.status != "done" and (deleting := await self._take_up(pseudonym)) is not None:
                    await asyncio.wait({deleting})
                    report = await self._eraser.find(pseudonym) or report
        return _shown(await self._eraser.find(pseudonym) or report)

    async def erasure(self, user: str) -> Row:
        """Return the progress of the deletion of a user's data (``ErasureReply``). Raises NotFound."""
        report = await self._eraser.find(self.pseudonyms.of(user))
        if report is None:
            raise NotFound("nobody asked for the deletion of this user's data")
        return _shown(report)

    async def finish_deletions(self) -> None:
        """Take over the deletions of processes that have died, until cancelled. Only the leading coordinator runs
        this."""
        while True:
            with contextlib.suppress(Unavailable):
                for report in await self._eraser.unfinished():
                    await self._take_up(report.user)
            await asyncio.sleep(ABANDONED_S / 2)

    async def _take_up(self, user: str) -> asyncio.Task[None] | None:
        """Start the deletion of the data of ``user`` (a pseudonym) unless this process runs it already; return its
        task.

        Return None if another process carries out the deletion, or if it is done.
        """
        report = None if user in self._erasing else await self._eraser.claim(user, abandoned_s=ABANDONED_S)
        if user not in self._erasing and report is not None:
            self._erasing[user] = asyncio.create_task(self._delete_all(report))
        return self._erasing.get(user)

    async def _delete_all(self, report: Report) -> None:
        """Delete the data of ``report``'s user; try again until it is done or another process takes the deletion
        over."""
        keeping = asyncio.create_task(self._eraser.keep(report.user, every_s=ABANDONED_S / 4))
        try:
            while True:
                try:
                    await self._eraser.run(report)
                    return
                except Unavailable as error:
                    log.warning("deleting the data of user %s goes on: %s", report.user, error)
                except Conflict as error:
                    log.info("deleting the data of user %s: %s", report.user, error)
                    return
                await asyncio.sleep(RETRY_S)
        finally:
            keeping.cancel()
            del self._erasing[report.user]

    async def _forget(self, seq: int) -> None:
        """Delete the indexes of processes that are gone; wait until the index of this process has read FEEDBACK up to
        ``seq``.

        Raises:
            Unavailable: the index did not reach ``seq`` in time.
        """
        await self.index.forget_abandoned()
        await self.index.reach(seq, REACH_S)


def _identity(post: Posted, caller: Caller, key: str | None, place: int, digest: Callable[[str], bytes]) -> Identity:
    """Return sender and id of a post.

    The sender of a post with an episode key is the key that created the episode key. Ids that holders of episode keys
    choose are unique only within their episode, so the stored id also depends on the episode.
    """
    sender = caller.sender
    if post.feedback_id is not None:
        chosen = bare_id(post.feedback_id) or ""
        id = derived_id(digest, sender, f"feedback_id {chosen}", 0) if caller.episode else chosen
        return Identity(id, caller.id, True, caller.max_weight)
    if key is not None:
        return Identity(derived_id(digest, sender, key, place), caller.id, True, caller.max_weight)
    return Identity(str(uuid6.uuid7()), caller.id, False, caller.max_weight)


def _is_dry(post: Posted | PenstockError) -> bool:
    return isinstance(post, Metric) and bool(post.dryrun)


def _reply(item: Feedback, stored: Stored | None, known: set[str]) -> Row:
    target = item.inference or item.episode
    return {
        "feedback_id": item.id,
        "status": "accepted" if stored is not None else "valid",
        "duplicate": stored is not None and stored.duplicate,
        "target": "none" if not target else "known" if target in known else "unknown_yet",
        "job": item.job,
        "stream_seq": stored.seq if stored is not None else None,
        "href": f"/v1/feedback/{item.id}",
    }


def _refusal(error: PenstockError) -> Refused:
    """Return the refusal of an item that was not stored because of ``error``: RetryLater unless ``error`` is a refusal
    already. The sender may send the item again with the same id."""
    if isinstance(error, Refused):
        return error
    code = "ingest_backlog_full" if isinstance(error, StreamFull) else "ingest_unavailable"
    return RetryLater(code, str(error))


def _fresh(item: Feedback) -> Row:
    """Return the status of an item that is on disk and not indexed yet."""
    return {
        "object": "feedback", "feedback_id": item.id, "job": item.job, "kind": item.kind, "metric": item.metric,
        "status": "received", "reason": "", "interactions": [], "ordinal": None, "trained": None,
        "revision": item.revision, "late_revision": None, "retraction_requested": False,
        "received": item.received, "time": item.received,
    }  # fmt: skip


def _decision(row: Row) -> Row:
    """Return a decision on an interaction in the form of the API."""
    trained = {"step": row["batch"], "version": row["version"]} if row["status"] == "trained" else None
    ordinal = row["ordinal"] if row["ordinal"] >= 0 else None
    return {
        "status": row["status"], "reason": row["reason"], "ordinal": ordinal, "trained": trained, "time": row["time"],
    }  # fmt: skip


def _shown(report: Report) -> Row:
    return {name: value for name, value in msgspec.to_builtins(report).items() if name not in ("holder", "alive")}
