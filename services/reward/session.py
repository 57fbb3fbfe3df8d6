"""One job in one reward service. A session answers score requests. If the job's scorers are slow, it also takes
generated groups from the stream RAW, scores them and publishes them to the stream EXPERIENCE."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from penstock.services.reward.pool import ScorerPool
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import ScoreReply, ScoreRequest
from penstock.shared.protocol.parts import count_of
from penstock.shared.protocol.trajectory import Group, decode_group, encode_group, group_headers
from penstock.shared.runtime import metrics
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bus import Bus, Delivery, Outgoing

__all__ = ["RewardSession", "num_processes", "request_of"]

logger = logging.getLogger(__name__)

GROUP_SECONDS = metrics.histogram("reward_group_seconds", "Scoring one group, waiting for a process included.")
COMPLETIONS = metrics.counter("reward_completions", "Completions scored, failed ones included.")
FAILED = metrics.counter("reward_completions_failed", "Completions whose scorer failed, hung or crashed.")

QUEUE = "reward"
ACK_WAIT_S = 5.0
"""Lease of a group in seconds: if its lease is not extended for this long, the group goes to another reward service."""
MAX_DELIVER = 5
FETCH_WAIT_S = 1.0
PUBLISH_DEADLINE_S = 5.0
SLOWEST_BYTES_PER_S = 4 << 20
"""Upload rate that is assumed in the worst case (bytes per second), so that large groups have longer deadlines."""
UNREADABLE_PAUSE_S = 0.5
CLOSE_S = 0.5
MAX_PROCESSES = 4
REMEMBER_S = 15.0
"""Seconds for which a reply is kept for a requester that did not receive it."""


def num_processes(config: RewardConfig) -> int:
    """Return the number of scorer processes of one job: as configured, else one per usable core, at most four."""
    return config.processes or max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0))))


class RewardSession:
    """Scores completions of one job until cancelled."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: TextJob) -> None:
        self._bus, self._settings, self.job, self.config = bus, settings, job, config
        self._pool = ScorerPool(config.reward, num_processes(config.reward))
        self.ended = asyncio.Event()
        """Set by the owner when ``run`` has ended."""
        self._draining = asyncio.Event()
        self._blocked: tuple[float, str, str] | None = None
        self._holds: dict[str, int] = {}
        self._counts = {"groups": 0, "completions": 0, "failed": 0}
        self._asked: dict[str, asyncio.Task[ScoreReply]] = {}
        self._busy = 0
        self._score_s = 0.0

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until drained or cancelled. While the scorers cannot be opened, every reply carries the error."""
        try:
            await self._pool.start()
            if self._pool.refused is not None:
                logger.error("job %s: %s", self.job, self._pool.refused.error)
            server = await self._bus.serve(subjects.score(self.job), self._on_request, queue=QUEUE)
            try:
                async with asyncio.TaskGroup() as tasks:
                    if self.config.reward.slow:
                        tasks.create_task(self._take_groups())
                    await self._draining.wait()
            finally:
                await server.close(self._settings.drain_s if self._draining.is_set() else CLOSE_S)
        finally:
            await end_tasks(list(self._asked.values()))  # no requester waits any more, and each task holds a process
            await self._pool.close()

    def drain(self) -> None:
        """Accept no more requests and groups; ``run`` ends once those in progress are done."""
        self._draining.set()

    # -- fast: request and reply -------------------------------------------------------------------------------------

    async def _on_request(self, data: bytes) -> bytes:
        """Score the completions of a request. A request repeated after a timeout gets the result of the first
        scoring."""
        request, envelope = unpack(data, ScoreRequest)
        if not envelope.id:
            return pack(await self._score(request), job=self.job)
        task = self._asked.get(envelope.id)
        if task is None:
            task = self._asked[envelope.id] = asyncio.create_task(self._score(request))
            loop = asyncio.get_running_loop()
            task.add_done_callback(lambda _: loop.call_later(REMEMBER_S, self._forget, envelope.id))
        return pack(await asyncio.shield(task), job=self.job, id=envelope.id, trace=envelope.trace)

    def _forget(self, request: str) -> None:
        self._asked.pop(request, None)

    async def _score(self, request: ScoreRequest) -> ScoreReply:
        started = time.perf_counter()
        self._busy += 1
        try:
            reply = await self._pool.score(request)
        finally:
            self._busy -= 1
        elapsed_s = time.perf_counter() - started
        GROUP_SECONDS.observe(elapsed_s)
        COMPLETIONS.inc(len(reply.failed))
        FAILED.inc(sum(reply.failed))
        self._score_s += elapsed_s
        self._counts["groups"] += 1
        self._counts["completions"] += len(reply.failed)
        self._counts["failed"] += sum(reply.failed)
        if reply.errors:
            logger.warning(
                "job %s: %d of %d completions failed; first: %s",
                *(self.job, len(reply.errors), len(reply.failed), reply.errors[0]),
            )
        return reply

    # -- slow: from RAW to EXPERIENCE --------------------------------------------------------------------------------

    async def _take_groups(self) -> None:
        slots = asyncio.Semaphore(num_processes(self.config.reward))
        puller = await self._bus.pull(
            subjects.RAW, subjects.raw(self.job), f"reward-{self.job}", ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER
        )
        async with puller, asyncio.TaskGroup() as working:
            while not self._draining.is_set():
                await slots.acquire()
                deliveries = await puller.fetch(1, FETCH_WAIT_S)
                if not deliveries:
                    slots.release()
                for delivery in deliveries:
                    task = working.create_task(self._work(delivery))
                    task.add_done_callback(lambda _: slots.release())

    async def _work(self, delivery: Delivery) -> None:
        """Score one group and move it to EXPERIENCE; the lease is extended meanwhile.

        A group that cannot be read is rejected (nak); after its last delivery it becomes a dead letter.
        """
        try:
            parts = count_of(delivery.headers)
            payload = await self._payload(delivery, parts)
            group = decode_group(payload, temperature=self.config.sampling.temperature)
            request = request_of(group)
        except ProtocolError as error:
            logger.error("group %d of %s cannot be scored: %s", delivery.seq, self.job, error)
            await delivery.nak(UNREADABLE_PAUSE_S)
            return
        key = str(group.draw)
        self._holds[key] = delivery.seq
        try:
            async with _kept(delivery):
                await self._publish(group.scored(await self._score(request)))
                await delivery.ack()
                await self._delete(range(delivery.seq + 1, delivery.seq + parts))
        finally:
            self._holds.pop(key, None)

    async def _payload(self, delivery: Delivery, parts: int) -> bytes:
        """Return the data of the delivered message and of the parts that follow it.

        Raises:
            ProtocolError: parts are missing.
        """
        if parts == 1:
            return delivery.data
        found = await self._bus.get_whole(subjects.RAW, [delivery.seq], direct=False)
        if delivery.seq not in found:
            raise ProtocolError(f"of its {parts} parts some are missing")
        return found[delivery.seq].data

    async def _delete(self, seqs: Iterable[int]) -> None:
        """Delete the parts of a finished group; parts that remain are deleted with the job."""
        with contextlib.suppress(Unavailable):
            for seq in seqs:
                await self._bus.delete_message(subjects.RAW, seq)

    async def _publish(self, group: Group) -> None:
        """Publish a group and return once it is durable. Retries while the stream is full or the bus is unavailable."""
        data, header = encode_group(group)
        subject = subjects.experience(self.job)
        msg_id = f"{self.job}:{group.draw}:{group.attempt}:scored"
        message = Outgoing(subject, data, group_headers(header), msg_id)
        deadline_s = PUBLISH_DEADLINE_S + len(data) / SLOWEST_BYTES_PER_S
        while True:
            try:
                await self._bus.publish_whole([message], deadline_s=deadline_s)
            except Unavailable as error:
                since = self._blocked[0] if self._blocked else bus_time()
                self._blocked = (since, str(error), subject)
                await asyncio.sleep(UNREADABLE_PAUSE_S)
            else:
                self._blocked = None
                return

    # -- what others see ---------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the job's entry in the heartbeat of this process."""
        row: dict[str, Any] = {
            **self._counts,
            "running": self._busy,
            "score_s": self._score_s,
            "holds": list(self._holds),
        }
        if self._pool.about:
            row["scorers"] = self._pool.about
        refused = self._pool.refused
        if refused is not None:
            row |= {"waiting_for": refused.error, "since": refused.since, "subject": subjects.score(self.job)}
        elif self._blocked is not None:
            since, why, subject = self._blocked
            row |= {"waiting_for": why, "since": since, "subject": subject}
        return row


def request_of(group: Group) -> ScoreRequest:
    """Return the score request of an unscored group.

    Raises:
        ProtocolError: its metadata lacks the texts.
    """
    meta = group.meta
    try:
        request = ScoreRequest(
            prompt=meta["prompt"], completions=list(meta["completions"]), answer=meta["answer"], row=dict(meta["row"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"group {group.draw} does not carry what scoring needs: {error!r}") from None
    if len(request.completions) != group.num_trajectories:
        raise ProtocolError(
            f"group {group.draw}: {len(request.completions)} texts of {group.num_trajectories} trajectories"
        )
    return request


@contextlib.asynccontextmanager
async def _kept(delivery: Delivery) -> AsyncIterator[None]:
    """Extend the lease of a delivery while the block runs."""

    async def extend() -> None:
        while True:
            await asyncio.sleep(ACK_WAIT_S / 4)
            await delivery.in_progress()

    keeper = asyncio.create_task(extend())
    try:
        yield
    finally:
        keeper.cancel()
