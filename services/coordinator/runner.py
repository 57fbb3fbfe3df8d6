"""Leads one job: carries facts from the bus to the pure core and its decisions back.

Everything that follows from a committed decision (tickets, batch manifests, the policy clock, deletions) is derived
from the ledger and repeated by the next leader, so it may be lost or happen twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.services.coordinator.carrier import Carrier
from penstock.services.coordinator.conditions import conditions
from penstock.services.coordinator.evaluation import EvaluationPlan
from penstock.services.coordinator.gate import Verdict
from penstock.services.coordinator.journal import Journal
from penstock.services.coordinator.members import Members
from penstock.services.coordinator.outbox import Outbox
from penstock.services.coordinator.reports import Refusal
from penstock.services.coordinator.run import Effects, JobRun
from penstock.services.coordinator.store import JobStore
from penstock.services.coordinator.why import explain_waits
from penstock.shared.config.job import JobConfig
from penstock.shared.data.check import check_data
from penstock.shared.errors import DataError, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchTrained, Checkpointed, Dropped, Event, LineageForked
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import Condition, JobRecord
from penstock.shared.protocol.messages import Ack, Command, EvalResult, Report
from penstock.shared.protocol.trajectory import parse_group_header
from penstock.shared.transport.bus import Bus

__all__ = ["JobRunner"]

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""Deadlines and desires are looked at this often when nothing else happens."""
COMMAND_RETRY_S = 2.0
CANCEL_GRACE_S = 15.0
"""A cancelled job has this long to train what is sealed and to write a last checkpoint."""


class JobRunner:
    """The leader's task for one job; ends when the job does. Raises Fenced when somebody else leads."""

    def __init__(self, bus: Bus, store: JobStore, members: Members, record: JobRecord, *, epoch: int) -> None:
        self.bus, self.store, self.members = bus, store, members
        self.job, self.record, self.epoch = record.id, record, epoch
        self.config = JobConfig.parse(record.spec)
        self.journal = Journal(bus, self.job)
        self.outbox = Outbox(bus, store, self.job)
        self.carrier = Carrier(bus, self.job, epoch)
        self.run: JobRun
        self.plan = EvaluationPlan(self.config.evaluation, 0)
        self._inbox: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue(maxsize=4096)
        self._desired = record.desired_state
        self._cancelled_at = time.monotonic() if self._desired == "cancelled" else 0.0
        self._force = record.force
        self._asked_checkpoint = 0.0
        self._asked_after: Checkpointed | None = None
        self._rewards: list[float] = []
        self._known: list[Condition] = list(record.status.conditions)
        self.ready = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Recover from the ledger and the stream, then decide until the job is finished."""
        try:
            await self._recover()
        except DataError as error:
            await self.outbox.fail(str(error))
            return
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.outbox.run()),
                tasks.create_task(self._follow_experience()),
                tasks.create_task(self._serve()),
            ]
            self.ready = True
            await self._decide_until_finished()
            await self.outbox.flush()
            for task in running:
                task.cancel()

    async def _recover(self) -> None:
        state = await self.journal.load()
        summary = await asyncio.to_thread(check_data, self.config.data)
        epochs = self.config.train.data_epochs
        self.plan = EvaluationPlan(self.config.evaluation, summary.num_eval)
        self.run = JobRun(
            self.config,
            state,
            num_ordinals=None if epochs is None else epochs * summary.rows_per_epoch,
            writer_epoch=self.epoch,
            hold=lambda number: self.plan.due(number - 1),
        )
        for message in await self.bus.read(subjects.METRICS, subjects.metrics(self.job)):
            row = msgspec.json.decode(message.data)
            if row.get("kind") == "eval":
                self.plan.done.add(int(row["step"]))
        self._next_seq = 1
        for message in await self.bus.read(subjects.EXPERIENCE, subjects.experience(self.job), headers_only=True):
            await self._take_group(message.seq, message.headers)
            self._next_seq = message.seq + 1
        waiting = [draw for draw in state.in_flight if draw not in self.run.candidates]
        await self.carrier.carry_out(self.run, Effects(tickets=waiting, announce=sorted(state.sealed)))
        self.outbox.clock(state.version, state.digest, self.epoch)

    async def _decide_until_finished(self) -> None:
        while not self.run.state.finished:
            self.run.desired = self._desired
            waited = time.monotonic() - self._cancelled_at if self._cancelled_at else 0.0
            self.run.cancel_now = self._force or waited > CANCEL_GRACE_S
            self._check_limits()
            await self._commit(self.run.decide(time.time()))
            if self.run.state.finished:
                break
            await self._evaluate()
            await self._ask_for_checkpoint()
            self._report_status()
            if self._may_finish():
                await self._commit(self.run.finish(time.time(), self._summary()))
                break
            await self._take_facts()
        self._report_status(force=True)

    async def _take_facts(self) -> None:
        """Wait for a fact, then take all that are there: one decision for many groups."""
        try:
            async with asyncio.timeout(TICK_S):
                fact = await self._inbox.get()
        except TimeoutError:
            return
        await fact()
        while not self._inbox.empty():
            await self._inbox.get_nowait()()

    def _check_limits(self) -> None:
        limit, started = self.config.limits.timeout_s, self.record.created_at.timestamp()
        if limit is not None and time.time() - started > limit:
            self.run.failure = self.run.failure or f"limits.timeout_s: {limit:g} s are over"
        goal = self.config.train.stop_at_reward
        if goal is not None and len(self._rewards) >= 10 and sum(self._rewards[-10:]) / 10 >= goal:
            self.run.stop_early = f"reward reached {goal:g}"

    def _may_finish(self) -> bool:
        run, state = self.run, self.run.state
        if state.finished or state.checkpoint is None or not run.training_done or self._desired == "paused":
            return False
        if self.plan.current is not None or self.plan.due(state.updates, final=True):
            return False
        return state.checkpoint.number >= state.last_trained

    def want(self, record: JobRecord) -> None:
        """The job's record changed."""
        self._desired = record.desired_state
        if self._desired == "cancelled" and not self._cancelled_at:
            self._cancelled_at = time.monotonic()
        self._force = record.force
        self._post(self._nothing)

    async def _nothing(self) -> None:
        return

    def _post(self, fact: Callable[[], Awaitable[None]]) -> None:
        self._inbox.put_nowait(fact)

    # -- decisions ---------------------------------------------------------------------------------------------------

    async def _commit(self, events: list[Event]) -> None:
        """Append a decision, take it into the core, and do what follows."""
        if not events:
            return
        await self.journal.append(events)
        effects = self.run.commit(events)
        self._tell(events)
        await self.carrier.carry_out(self.run, effects)

    # -- facts -------------------------------------------------------------------------------------------------------

    async def _follow_experience(self) -> None:
        stream = self.bus.follow(
            subjects.EXPERIENCE, subjects.experience(self.job), start_seq=self._next_seq, headers_only=True
        )
        async for message in stream:
            seq, headers = message.seq, message.headers
            await self._inbox.put(lambda seq=seq, headers=headers: self._take_group(seq, headers))  # type: ignore[misc]

    async def _take_group(self, seq: int, headers: Any) -> None:
        try:
            header = parse_group_header(headers)
        except ProtocolError as error:
            self.outbox.event("warning", "dead_letter", f"group {seq} is unreadable: {error}")
            await self.carrier.delete(seq)
            return
        if self.run.on_group(seq, header) is Verdict.DUPLICATE:
            self.run.forget_stored([seq])
            await self.carrier.delete(seq)

    async def _serve(self) -> None:
        servers = [
            await self.bus.serve(subjects.report(self.job), self._on_report),
            await self.bus.serve(subjects.evaluation(self.job), self._on_eval, max_concurrent=256),
        ]
        try:
            await asyncio.Event().wait()
        finally:
            for server in servers:
                await server.close(0.5)

    async def _on_report(self, data: bytes) -> bytes:
        report, _ = unpack(data, Report)
        done: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()

        async def fact() -> None:
            ack = await self._take_report(report)
            if not done.done():
                done.set_result(ack)

        await self._inbox.put(fact)
        return pack(await done, job=self.job, epoch=self.epoch)

    async def _take_report(self, report: Report) -> Ack:
        if report.kind == "hello":
            return Ack(ok=True, data=self._where_to_start())
        if report.kind == "failed":
            self.run.failure = self.run.failure or f"trainer: {report.reason}"
            return Ack(ok=True)
        now = time.time()
        try:
            events = self.run.on_report(report, now)
        except Refusal as refusal:
            return Ack(ok=False, reason=str(refusal))
        if events:
            await self._commit(events + self.run.decide(now, after=events))
            if report.kind == "trained":
                self._after_update(report)
        return Ack(ok=True)

    def _where_to_start(self) -> dict[str, Any]:
        state = self.run.state
        checkpoint = state.checkpoint
        after = checkpoint.number if checkpoint else 0
        return {
            "checkpoint": None if checkpoint is None else {"number": checkpoint.number, "path": checkpoint.path},
            "version": state.version,
            "digest": state.digest,
            "last_trained": state.last_trained,
            "batches": [[n, b.revision, b.version, b.digest] for n, b in sorted(state.batches.items()) if n > after],
        }

    async def _on_eval(self, data: bytes) -> bytes:
        result, _ = unpack(data, EvalResult)

        async def fact() -> None:
            if self.plan.current is not None:
                self.plan.current.take(result)

        await self._inbox.put(fact)
        return pack(Ack(ok=True), job=self.job, epoch=self.epoch)

    async def on_dead_ticket(self, draw: Draw) -> None:
        """A ticket used up its deliveries."""

        async def fact() -> None:
            await self._commit(self.run.on_dead_ticket(draw, time.time()))

        await self._inbox.put(fact)

    # -- evaluation and checkpoints ----------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        state, plan = self.run.state, self.plan
        if state.checkpoint is None or state.finished:
            return
        now = time.time()
        if plan.current is not None:
            if plan.current.expected and now < plan.current.deadline:
                return
            point = plan.current.point
            values = plan.finish()
            self.outbox.metrics("eval", point, state.version, values)
            shown = [f"{name} {x:.3f}" for name, x in values.items() if not name.endswith(("failed", "missing"))]
            self.outbox.event("info", "evaluation", f"update {point}: {', '.join(shown)}")
            await self._commit(self.run.decide(now))
        if not state.sealed and plan.due(state.updates, final=self.run.training_done):
            tickets = plan.start(
                state.updates, state.version, deadline=now + self.config.train.draw_timeout_s, epoch=self.epoch
            )
            await self.carrier.publish_tickets(tickets)

    async def _ask_for_checkpoint(self) -> None:
        reason, newest = self.run.wants_checkpoint, self.run.state.checkpoint
        if not reason or (newest is self._asked_after and time.monotonic() - self._asked_checkpoint < COMMAND_RETRY_S):
            return
        self._asked_checkpoint, self._asked_after = time.monotonic(), newest
        request = Command(kind="checkpoint", epoch=self.epoch, args={"reason": reason})
        command = pack(request, job=self.job, epoch=self.epoch)
        self.outbox.later(lambda: self._command(command), keep=False)

    async def _command(self, command: bytes) -> None:
        try:
            await self.bus.request(subjects.command(self.job), command, deadline_s=COMMAND_RETRY_S)
        except Unavailable as error:
            logger.info("the trainer of %s did not take the command yet: %s", self.job, error)

    # -- what people see ---------------------------------------------------------------------------------------------

    def _after_update(self, report: Report) -> None:
        state = self.run.state
        reward = report.metrics.get("reward/mean")
        if reward is not None:
            self._rewards.append(reward)
        values = dict(report.metrics)
        values["draws/in_flight"] = float(len(state.open))
        values["draws/dropped"] = float(state.dropped.total())
        self.outbox.metrics("train", report.batch, report.version, values)
        self.outbox.clock(report.version, report.digest, self.epoch)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Checkpointed():
                    self.outbox.event("info", "checkpoint", f"checkpoint after update {event.number} at {event.path}")
                case Dropped() if event.reason not in ("run_ended", "cancelled"):
                    self.outbox.event("warning", "dropped", f"{len(event.draws)} draws dropped: {event.reason}")
                case LineageForked():
                    self.outbox.event(
                        "warning", "lineage_forked", f"rolled back from batch {event.from_batch}: {event.reason}"
                    )
                case BatchTrained() if event.number == 1:
                    self.outbox.event("info", "step", "first policy update done")
                case _:
                    pass

    def draws(self) -> dict[str, Any]:
        """The ledger equation, for people."""
        state = self.run.state
        return {
            "drawn": state.drawn,
            "trained": state.trained,
            "dropped": dict(state.dropped),
            "in_flight": len(state.open),
        }

    def _summary(self) -> dict[str, Any]:
        state = self.run.state
        return {"updates": state.updates, "version": state.version, "digest": state.digest, "draws": self.draws()}

    def phase(self) -> str:
        """Phase as users see it."""
        state = self.run.state
        if state.finished:
            return state.finished
        if self._desired == "cancelled":
            return "cancelling"
        if self._desired == "paused":
            settled = not state.sealed and not self.run.wants_checkpoint
            return "paused" if settled else "pausing"
        return "running" if state.checkpoint is not None or state.started else "pending"

    def _report_status(self, *, force: bool = False) -> None:
        state = self.run.state
        checkpoint = state.checkpoint
        fields = {
            "phase": self.phase(),
            "message": self.run.failure or self.run.stop_early,
            "step": state.updates,
            "policy_version": state.version,
            "reward": self._rewards[-1] if self._rewards else self.record.status.reward,
            "draws": self.draws(),
            "checkpoint": checkpoint.path if checkpoint else None,
            "conditions": self._conditions(),
            "started_at": self.record.status.started_at or self.record.created_at,
            "finished_at": datetime.now(UTC) if state.finished else None,
        }
        self.outbox.status(fields, force=force)

    def _conditions(self) -> list[Condition]:
        clock, now = time.monotonic(), datetime.now(UTC)
        self._known = conditions(self.run, self.job, self.members, self._known, clock=clock, now=now)
        return self._known

    def why(self) -> list[dict[str, Any]]:
        """What the job waits for."""
        return explain_waits(
            self.job, self.run, self.plan, self.members,
            clock=time.monotonic(), now=time.time(), sealed_at=self.carrier.sealed_at,
        )  # fmt: skip
