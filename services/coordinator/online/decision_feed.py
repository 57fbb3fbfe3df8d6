"""Publishes the decisions that the ledger records to the feed DECISIONS, and fills gaps in the feed from the ledger.

Each message names the ledger entry up to which the feed is complete once the message is stored. A new leader continues
from there, so a feed that was full, lost or incomplete after a crash catches up: every decision appears, in the order
of the ledger.

``Funnel`` counts interactions, feedback and their statuses, for the metrics row of an update and for Prometheus.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import xxhash

from penstock.services.coordinator.online.admission import NUMBER, is_far_off
from penstock.services.coordinator.online.statuses import feedback_statuses, interaction_statuses
from penstock.services.coordinator.training.journal import read_snapshots
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.snapshot import digest_of
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ArchiveError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import Admission, Event, decode_events
from penstock.shared.protocol.live.interaction import Feedback, FeedbackStatus, InteractionStatus, StatusBatch
from penstock.shared.runtime import metrics
from penstock.shared.runtime.ledger import LedgerArchive, LedgerEntry, scan_ledger
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["ENTRY_HEADER", "DecisionFeed", "Funnel"]

INTERACTIONS = metrics.counter("interactions_read", "Live interactions that leaders read.")
FEEDBACK = metrics.counter("feedback_decided", "Items of feedback, by what became of them.", ["status"])
DECIDED = metrics.counter(
    "interactions_decided", "Live interactions, by what became of them, and why they are not trained on.",
    ["status", "reason"],
)  # fmt: skip
REASONS = frozenset(
    {
        "stale", "no_feedback", "opted_out", "no_consent", "sampling_not_replayable", "other_temperature", "side_turn",
        "train_false", "split_val", "canary", "canary_not_compared", "redacted", "client_disconnected", "truncated",
        "episode_over", "too_many_turns", "too_many_waiting", "job_ended", "no_tokens", "prompt_too_long",
        "completion_too_long", "constrained", "lengths_differ", "not_finite", "rolled_back", "over_share",
    }
)  # fmt: skip
"""Values of the Prometheus label `reason`; any other reason counts as `other`, because each value is a permanent
series."""


class Funnel:
    """Counts of interactions, feedback and statuses since the last metrics row."""

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        self._counts: Counter[str] = Counter()
        self._metric_sums: dict[str, tuple[float, int]] = {}
        """Sum and number of the values of each metric."""
        self._waits_s: list[float] = []
        self._lags: list[int] = []
        self._trial_figures: dict[str, float] = {}

    def on_interaction(self) -> None:
        """Count an interaction."""
        INTERACTIONS.inc()
        self._counts["interactions"] += 1

    def on_feedback(self, items: Sequence[Feedback]) -> None:
        """Count items of feedback, and add their values to the means of their metrics (a boolean counts as 0 or 1)."""
        self._counts["feedback"] += len(items)
        online = self._job.online
        for name in {item.metric for item in items}:
            if (metric := online.metric(name)) is None:
                continue
            values = [item.value for item in items if item.metric == name and isinstance(item.value, NUMBER)]
            counted = [float(value) for value in values if not is_far_off(value, metric)]
            if counted:
                total, number = self._metric_sums.get(name, (0.0, 0))
                self._metric_sums[name] = sum(counted, total), number + len(counted)

    def on_feedback_statuses(self, statuses: Iterable[FeedbackStatus]) -> None:
        """Count statuses of feedback."""
        for status in statuses:
            FEEDBACK.labels(status.status).inc()
            self._counts[status.status] += 1
            if status.status == "rejected":
                self._counts[f"rejected/{status.reason}"] += 1

    def on_interaction_statuses(self, statuses: Iterable[InteractionStatus]) -> None:
        """Count statuses of interactions; the statuses of refused interactions are counted by reason."""
        for status in statuses:
            refused = status.status == "rejected"
            DECIDED.labels(
                status.status, (status.reason if status.reason in REASONS else "other") if refused else ""
            ).inc()
            if refused:
                self._counts["refused"] += 1
                self._counts[f"refused/{status.reason}"] += 1

    def on_admissions(self, admissions: Sequence[Admission], ended: Sequence[float]) -> None:
        """Count admissions; ``ended`` has, for each admission, the time at which its last answer ended."""
        self._counts["admissions"] += len(admissions)
        self._lags += [admission.lag for admission in admissions]
        self._waits_s += [admission.time - end for admission, end in zip(admissions, ended, strict=True)]

    def on_promotion_decision(self, figures: Mapping[str, float]) -> None:
        """Record the figures of both arms of a canary trial."""
        self._trial_figures |= {name: value for name, value in figures.items() if name.startswith("canary/")}

    def row(self) -> dict[str, float]:
        """Return the counts and means since the last call, and start counting again."""
        values = {f"online/{name}": float(count) for name, count in sorted(self._counts.items())}
        values |= {
            f"online/metric/{name}": total / number for name, (total, number) in sorted(self._metric_sums.items())
        }
        if self._waits_s:
            values["online/admitted_after_s"] = sum(self._waits_s) / len(self._waits_s)
            values["online/lag"] = sum(self._lags) / len(self._lags)
        values |= self._trial_figures
        for kept in (self._counts, self._metric_sums, self._waits_s, self._lags, self._trial_figures):
            kept.clear()
        return values


logger = logging.getLogger(__name__)
ENTRY_HEADER = "Penstock-Entry"
"""Header of a message: the stream sequence number of the entry of LEDGER up to which the feed is complete once the
message is stored."""
MAX_STATUSES = 1000
"""Maximum number of statuses in one message."""


class DecisionFeed:
    """Publishes the decisions of one job's leader.

    Args:
        retry: returns the leader's ``Retry``, which repeats writes and reports the wait while the bus is unavailable.
        archive: archive of the older entries of the ledger.
    """

    def __init__(
        self,
        bus: Bus,
        job: str,
        *,
        epoch: int,
        funnel: Funnel,
        retry: Callable[[], Retry],
        archive: LedgerArchive | None = None,
    ) -> None:
        self._bus, self._job, self._epoch, self._funnel, self._retry = bus, job, epoch, funnel, retry
        self._archive = archive
        self._position = 0
        """Stream sequence number of the ledger entry up to which the feed has every decision."""
        self._is_behind = False

    @property
    def is_behind(self) -> bool:
        """True if the feed lacks decisions of the ledger, because its stream was full or an earlier leader did not
        publish them."""
        return self._is_behind

    async def resume(self, last_seq: int) -> None:
        """Bring the feed up to entry ``last_seq`` of the ledger, after a takeover."""
        newest = await self._bus.last(subjects.DECISIONS, subjects.decisions(self._job))
        # Earlier versions named no entry, and lacked nothing but the decisions of the newest one.
        unnamed = max(0, last_seq - 1)
        found = 0 if newest is None else int(newest.headers.get(ENTRY_HEADER, unnamed))
        self._position = min(found, last_seq)
        self._is_behind = last_seq > self._position
        await self.catch_up()

    async def publish(self, seq: int, events: Sequence[Event], state: LedgerState) -> None:
        """Publish the decisions of entry ``seq`` of the ledger. Call before the leader decides anything else.

        Args:
            state: the fold of the ledger up to that entry.
        """
        statuses, interactions = feedback_statuses(events, state), interaction_statuses(events, state)
        self._funnel.on_feedback_statuses(statuses)
        self._funnel.on_interaction_statuses(interactions)
        if self._is_behind:
            return
        try:
            await self._store(seq, statuses, interactions)
        except StreamFull as error:
            self._is_behind = True
            logger.error("%s: the feed of decisions waits, the ledger has them: %s", self._job, error)

    async def notify(self, statuses: Sequence[FeedbackStatus], interactions: Sequence[InteractionStatus] = ()) -> None:
        """Publish statuses that the ledger does not record: non-final statuses, and all statuses after the end of the
        job.

        They are lost if the stream is full.
        """
        self._funnel.on_feedback_statuses(statuses)
        self._funnel.on_interaction_statuses(interactions)
        try:
            await self._store(self._position, statuses, interactions)
        except StreamFull as error:
            logger.error("%s: %d passing statuses are lost: %s", self._job, len(statuses) + len(interactions), error)

    async def catch_up(self) -> None:
        """Publish the decisions of the ledger that the feed lacks. After a failure, the next call tries again."""
        if not self._is_behind:
            return
        try:
            seq, statuses, interactions = self._position, list[FeedbackStatus](), list[InteractionStatus]()
            async for state, entry in self._folded():
                events = decode_events(entry.data)
                fold(events, state)
                await asyncio.sleep(0)  # the lease is renewed meanwhile
                if entry.seq <= self._position:
                    continue
                seq = entry.seq
                statuses += feedback_statuses(events, state)
                interactions += interaction_statuses(events, state)
                if max(len(statuses), len(interactions)) >= MAX_STATUSES:
                    await self._store(seq, statuses, interactions)
                    statuses, interactions = [], []
            await self._store(seq, statuses, interactions)
        except (Unavailable, ArchiveError) as error:
            logger.error("%s: the feed of decisions still lacks some: %s", self._job, error)
        else:
            self._is_behind = False

    async def _folded(self) -> AsyncIterator[tuple[LedgerState, LedgerEntry]]:
        """Start from the newest snapshot that the feed has already reached, and yield ``(state, entry)`` for each later
        ledger entry.

        ``state`` is the ledger state before ``entry``; the caller must fold the entry into it. If there is no such
        snapshot, start from the first entry of the ledger.
        """
        subject = subjects.ledger(self._job)
        for snapshot, state, _ in await read_snapshots(self._bus, self._job):
            if snapshot.seq > self._position:
                continue
            tail = await self._bus.read(subjects.LEDGER, subject, start_seq=snapshot.seq)
            if tail and tail[0].seq == snapshot.seq and digest_of(tail[0].data) == snapshot.entry:
                for message in tail[1:]:
                    yield state, LedgerEntry(message.seq, message.data)
                return
        state = LedgerState()
        async for entry in scan_ledger(self._bus, self._job, self._archive):
            yield state, entry

    async def _store(
        self, seq: int, statuses: Sequence[FeedbackStatus], interactions: Sequence[InteractionStatus]
    ) -> None:
        """Append statuses to the feed; the last message marks the feed as complete up to ledger entry ``seq``. Wait
        while the bus is unavailable.

        Raises:
            StreamFull: the stream is full; only some statuses may be stored.
        """
        subject, count = subjects.decisions(self._job), max(len(statuses), len(interactions))
        for start in range(0, count, MAX_STATUSES):
            window = slice(start, start + MAX_STATUSES)
            batch = StatusBatch(items=list(statuses[window]), interactions=list(interactions[window]))
            complete = self._position if start + MAX_STATUSES < count else seq
            msg_id = f"fates:{self._job}:{complete}:{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(batch))}"
            data = pack(batch, job=self._job, epoch=self._epoch)
            message = Outgoing(subject, data, {ENTRY_HEADER: str(complete)}, msg_id)
            what = f"{len(batch.items) + len(batch.interactions)} statuses of live answers"
            full = await self._retry().until_taken(what, subject, partial(self._append, message))
            if full is not None:
                raise full
        self._position = seq

    async def _append(self, message: Outgoing) -> StreamFull | None:
        """Append one message; return StreamFull instead of raising it, so that the caller does not retry."""
        try:
            await self._bus.publish_whole([message], deadline_s=5)
        except StreamFull as error:
            return error
        return None
