"""Leads one evaluation job: publishes a ticket per held-out prompt, counts the groups, and aggregates the rewards.

There is no ledger: the groups themselves are durable. Another leader counts the stored groups and requests the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.evaluation import Scores, evaluation_tickets
from penstock.services.coordinator.leader.ledgerless_runner import LedgerlessRunner
from penstock.services.coordinator.leader.pace import Pace
from penstock.services.coordinator.leader.why import blocked_waits, recovery_waits, wait_row, worker_waits
from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.data.check import SourceSummary, check_data
from penstock.shared.errors import DataError, NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobFailure, JobRecord, Phase
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.parts import count_of
from penstock.shared.protocol.trajectory import GroupHeader, parse_group_header
from penstock.shared.runtime.tasks import WorkSlice
from penstock.shared.transport.bus import Bus

__all__ = ["EvaluationRunner"]

IDLE_S = 2.0
"""Interval at which the deadline is checked when nothing else happens (seconds)."""
LONGEST_S = 7 * 86400.0
"""Deadline of tickets if the job sets none (seconds)."""


class EvaluationRunner(LedgerlessRunner):
    """The leader's task for one evaluation job; ends when the job does."""

    def __init__(self, bus: Bus, store: JobStore, members: Members, record: JobRecord, *, epoch: int) -> None:
        super().__init__(bus, store, members, record, epoch=epoch)
        self.config = EvaluationJob.parse(record.spec)
        self.scores = Scores()
        self._pace = Pace()
        self.expected: set[int] = set()
        self.ready = False
        self._leads_since = bus_time()
        self._num_prompts = 0
        self._held_out: tuple[SourceSummary, ...] = ()
        self._next_seq = 1
        self._error = ""

    async def lead(self) -> None:
        """Count the stored groups, request the missing ones, and end the job when every prompt is answered."""
        try:
            summary = await asyncio.to_thread(check_data, self.config.data_config)
        except DataError as error:
            await self.outbox.fail(JobFailure(code="invalid_data", message=str(error)))
            return
        self._num_prompts = min(self.config.evaluation.num_prompts, summary.num_eval)
        self._held_out = summary.eval
        self.expected = set(range(self._num_prompts))
        slice_ = WorkSlice()
        messages = self.bus.scan(subjects.EXPERIENCE, subjects.experience(self.job), headers_only=True)
        async with contextlib.aclosing(messages):
            async for message in messages:
                await self._take(message.seq, message.headers)
                await slice_.end()
        deadline = self.record.created_at.timestamp() + (self.config.limits.timeout_s or LONGEST_S)
        tickets = evaluation_tickets(self.expected, 0, deadline=deadline, epoch=self.epoch)
        async with self._running(self._follow()):
            if tickets:
                await self.publisher.publish_tickets(tickets)
            self.ready = True
            await self._until_over(deadline)

    async def _until_over(self, deadline: float) -> None:
        while (phase := self._end(deadline)) is None:
            self._report("running", "")
            await self._until_changed(max(0.0, min(IDLE_S, deadline - bus_time())))
        values = self.scores.values(self.config.evaluation, self._held_out)
        values["eval/missing"] = float(len(self.expected))
        shown = ", ".join(f"{name} {values[name]:.4g}" for name in self.config.evaluation.metrics if name in values)
        if shown:
            self.outbox.metrics("eval", 0, 0, values, batch=0)
            self.outbox.event("info", "evaluation", shown)
        self._report(phase, shown if self._failure is None else self._failure.message)

    def _end(self, deadline: float) -> Phase | None:
        """Return the terminal phase, or None while the job must wait."""
        if self.record.desired_state == "cancelled":
            return "cancelled"
        if not self._failure and self.expected and bus_time() > deadline:
            unanswered = f"{len(self.expected)} of {self._num_prompts} prompts were not answered"
            longest = f"the {LONGEST_S / 86400:g} days that an evaluation may take without limits.timeout_s are over"
            text = f"{'limits.timeout_s' if self.config.limits.timeout_s else longest}: {unanswered}"
            self._failure = JobFailure(code="timeout", message=text)
        if not self._failure and not self.expected and not (self.scores.greedy or any(self.scores.sampled.values())):
            text = f"nothing could be scored: {self._error or 'every prompt was left out'}"
            self._failure = JobFailure(code="not_scored", message=text)
        if self._failure:
            return "failed"
        return None if self.expected else "succeeded"

    # -- facts -------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        subject = subjects.experience(self.job)
        reader = self.bus.follow(subjects.EXPERIENCE, subject, start_seq=self._next_seq, headers_only=True)
        async with contextlib.aclosing(reader) as messages:
            async for message in messages:
                await self._take(message.seq, message.headers)

    async def _take(self, seq: int, headers: Mapping[str, str]) -> None:
        self._next_seq = seq + 1
        try:
            header = parse_group_header(headers)
            if (count := count_of(headers)) != header.num_messages:  # or deleting it would delete foreign messages
                raise ProtocolError(f"{header.nbytes} bytes in {count} messages")
        except ProtocolError as error:
            await self.on_dead_message(subjects.EXPERIENCE, seq, None, reason=f"undecodable: {error}", attempts=1)
            return
        if header.draw.ordinal not in self.expected:
            await self.publisher.delete(range(seq, seq + header.num_messages))
            return
        self.expected.discard(header.draw.ordinal)
        self._count(header)
        self._changed.set()

    def _count(self, header: GroupHeader) -> None:
        if not header.lengths:
            self.scores.failed += self.config.completions_per_group
            self._error = self._error or header.skipped or header.error
            return
        greedy = header.greedy or [False] * len(header.rewards)
        self.scores.take(header.draw.ordinal, header.rewards, header.failed, greedy)
        self._error = self._error or header.error

    async def on_dead_message(self, stream: str, seq: int, draw: Draw | None, *, reason: str, attempts: int) -> None:
        """Copy a dead message of a work queue to DEAD, count its prompt as failed, and delete the message."""
        if draw is None and stream == subjects.TICKETS:
            draw = await self._draw_of(seq)
        count = await self.publisher.copy_to_dead(stream, seq, reason=reason, attempts=attempts)
        if draw is not None and draw.ordinal in self.expected:
            self.expected.discard(draw.ordinal)
            self.scores.failed += self.config.completions_per_group
            self._error = self._error or reason
            self._changed.set()
        self.outbox.event("warning", "dead_letter", f"message {seq} of {stream}: {reason} ({attempts} attempts)")
        await self.publisher.delete(range(seq, seq + count), stream=stream)

    async def _draw_of(self, seq: int) -> Draw | None:
        try:
            return unpack((await self.bus.get(subjects.TICKETS, seq)).data, Ticket)[0].draw
        except (NotFound, ProtocolError):
            return None

    # -- what people see ---------------------------------------------------------------------------------------------

    def _report(self, phase: Phase, message: str) -> None:
        done = self._num_prompts - len(self.expected)
        rewards = [*self.scores.greedy.values(), *(r for found in self.scores.sampled.values() for r in found)]
        self._write_status(
            phase,
            message,
            step=done,
            total_steps=self._num_prompts,
            expected_end=self._pace.end(done, self._num_prompts, bus_time(), running=phase == "running"),
            reward=sum(rewards) / len(rewards) if rewards else None,
            started_at=self.record.status.started_at or bus_datetime(),
        )

    def status(self) -> dict[str, Any]:
        """Return policy version 0 and the number of unanswered prompts, for the heartbeat."""
        return {"version": 0, "running": len(self.expected)}

    def why(self) -> list[dict[str, Any]]:
        """Return a row for each thing that the job waits for."""
        now = bus_time()
        if not self.ready:
            return recovery_waits(self.job, self.retry.blocked, now, self._leads_since)
        rows = blocked_waits(self.job, self.retry.blocked, now)
        rows += worker_waits(self.job, self.members, time.monotonic(), now, services=("rollout", "reward"))
        if self.expected:
            started = self.record.status.started_at or self.record.created_at
            what = f"{len(self.expected)} of {self._num_prompts} prompts"
            rows.append(wait_row(what, subjects.tickets(self.job), self.job, age_s=now - started.timestamp()))
        return rows
