"""Leads one job: feeds events from the bus to the decision core (``JobRun``), which does no I/O, and publishes the
core's decisions.

Everything that follows from a committed decision (tickets, batch manifests, the policy clock, deletions) is derived
from the ledger and repeated by the next leader, so it may be lost or happen twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.coordinator.jobs.environments import describe_environment
from penstock.services.coordinator.jobs.members import Members, PresenceWatch, ProblemWatch
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader import summary
from penstock.services.coordinator.leader.conditions import conditions
from penstock.services.coordinator.leader.dead_letters import DeadLetterQueue
from penstock.services.coordinator.leader.desired_state import DesiredState
from penstock.services.coordinator.leader.effects import EffectPublisher, TrainerCommands
from penstock.services.coordinator.leader.measures import Measures
from penstock.services.coordinator.leader.outbox import Outbox, announce
from penstock.services.coordinator.leader.served_version import ServedVersionPublisher
from penstock.services.coordinator.leader.tracking import Tracking
from penstock.services.coordinator.leader.weight_routes import WeightRouter
from penstock.services.coordinator.leader.why import Onsets, explain_waits, recovery_waits
from penstock.services.coordinator.trackers import Run
from penstock.services.coordinator.training.gate import Verdict
from penstock.services.coordinator.training.health import health_warnings
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.reports import Refusal
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.run import Effects, JobRun
from penstock.services.coordinator.training.supply import Supply
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.data.check import DataSummary, data_of
from penstock.shared.errors import ConfigError, Conflict, DataError, NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Event, Finished, LineageForked, decode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import Condition, JobFailure, JobRecord
from penstock.shared.protocol.messages import Ack, EvalResult, Report, Ticket
from penstock.shared.protocol.parts import count_of
from penstock.shared.protocol.trajectory import parse_group_header
from penstock.shared.runtime.ledger import ledger_archive
from penstock.shared.runtime.tasks import Inbox, WorkSlice
from penstock.shared.transport.bus import Bus

__all__ = ["JobRunner"]

logger = logging.getLogger(__name__)

TICK_S, IDLE_S = 0.25, 2.0
"""Shortest and longest interval between checks of deadlines (seconds). An idle job is checked ever less often, because
one coordinator leads hundreds of jobs; messages and user requests wake it at once."""
MAKE_S = 120.0
"""Time for an env worker to load a simulator's libraries (seconds). After this time plus the step limit, the leader
repeats its request to describe the simulator."""


class JobRunner:
    """The leader's task for one job; ends when the job does. Raises Fenced when another coordinator leads."""

    def __init__(
        self, bus: Bus, store: JobStore, members: Members, record: JobRecord, *, epoch: int, data_dir: Path,
        supply: Supply | None = None,
    ) -> None:  # fmt: skip
        self.bus, self.store, self.members = bus, store, members
        self.job, self.record, self.epoch = record.id, record, epoch
        self.config, self._data_dir = parse_training(record.spec), data_dir
        self.outbox = Outbox(bus, store, self.job, attempt=record.status.attempt + 1)
        self.retry = Retry(self.job, report=lambda text: self.outbox.event("warning", "blocked", text))
        self.supply = supply
        if supply is not None:
            supply.retry = self.retry
        self.journal = Journal(bus, self.job, self.retry, archive=ledger_archive(data_dir))
        self.publisher = EffectPublisher(bus, self.job, epoch, self.retry)
        self.commands = TrainerCommands(bus, self.outbox, self.job, epoch)
        self.run: JobRun
        self._inputs = Inputs(now=0.0)
        """Facts for decisions, without the time and the newest evaluation, which ``inputs`` adds."""
        self.measures = Measures(self.config, self.outbox)
        run = Run(self.job, record.name, record.spec, data_dir / "tracking" / self.job)
        self.tracking = Tracking(bus, self.outbox, self.config.tracking, run)
        self.inbox = Inbox()
        self.desired_state = DesiredState(record)
        self._known: list[Condition] = list(record.status.conditions)
        self._warnings = record.status.warnings
        self._presence, self._problems, self._onsets = PresenceWatch(), ProblemWatch(self.job), Onsets()
        self._leads_since = bus_time()
        self._next_seq = self._unread = 1
        """Stream sequence number in EXPERIENCE from which the leader reads on. ``_unread``: stream sequence number at
        which recovery began to read; earlier messages are checked in the background."""
        self.ready = False
        self._reported = 0.0
        self._decided = False
        """True if a decision was made since the last check."""

    # -- life --------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Restore the run from the ledger and the stream EXPERIENCE, then make the run's decisions until the job is
        finished."""
        try:
            await self._recover()
        except DataError as error:
            await self.outbox.fail(JobFailure(code="invalid_data", message=str(error)))
            return
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.outbox.run()),
                tasks.create_task(self._follow_experience()),
                tasks.create_task(
                    self.retry.until_taken(
                        "a look at what is stored", subjects.experience(self.job), self._check_stored
                    )
                ),
                tasks.create_task(self._serve()),
                tasks.create_task(self.tracking.follow()),
            ]
            if self.supply is not None:
                running.append(tasks.create_task(self.supply.follow(self.inbox.put)))
            if self.run.lacks_environment(self.inputs):
                running.append(tasks.create_task(self._describe_environment()))
            running.append(tasks.create_task(WeightRouter(self.bus, self.job, self.members).follow()))
            if self.measures.gate is not None:
                served_version = ServedVersionPublisher(
                    self.bus, self.job, lambda: self.run.state.promoted, self._on_announced
                )
                running.append(tasks.create_task(served_version.follow()))
            self.ready = True
            await self._decide_until_finished()
            await self.outbox.flush()
            await self._close_supply()  # again: the API accepted feedback until it saw the end
            await self.tracking.finish()
            for task in running:
                task.cancel()

    async def _recover(self) -> None:
        state = await self.journal.load()
        found = await asyncio.to_thread(data_of, self.config)
        epochs = self.config.data_epochs
        self.run = JobRun(
            self.config,
            state,
            num_ordinals=None if epochs is None else epochs * found.rows_per_epoch,
            row_bytes=found.row_bytes,
            writer_epoch=self.epoch,
            hold=lambda point: self.measures.holds(self.run.state, point),
            source=None if self.supply is None else self.supply.source,
            promotion=self.measures.gate,
            failure=self.journal.failure(),
            data_dir=self._data_dir,
        )
        await self._resume_measures(found)
        await self._read_groups()
        if self.supply is not None:
            await self.supply.recover(state)
        waiting = [draw for draw in state.in_flight if draw not in self.run.candidates]
        purged = max((checkpoint.low_seq for checkpoint in state.checkpoints.values()), default=0)
        await self._carry_out(Effects(tickets=waiting, announce=sorted(state.sealed), purge_below=purged))
        self.outbox.clock(state.version, state.digest, self.epoch)

    async def _resume_measures(self, found: DataSummary) -> None:
        slice_, state, subject = WorkSlice(), self.run.state, subjects.metrics(self.job)
        self.measures.begin(state, held_out=found.eval, now=bus_time())
        async with contextlib.aclosing(self.bus.scan(subjects.METRICS, subject)) as rows:
            async for row in rows:
                self.measures.resume([msgspec.json.decode(row.data)], state)
                await slice_.end()
        if self.measures.lacks_rows(state):
            await self._restore_rows()

    async def _restore_rows(self) -> None:
        """Write the metrics rows of updates that an earlier leader committed but did not write before it died."""
        slice_, start = WorkSlice(), self.measures.newest_row[1] + 1
        entries = self.bus.scan(subjects.LEDGER, subjects.ledger(self.job), start_seq=start)
        async with contextlib.aclosing(entries) as messages:
            async for message in messages:
                for event in decode_events(message.data):
                    if isinstance(event, BatchTrained):
                        self.measures.restore(event, message.seq, self.run.state)
                await slice_.end()

    async def _describe_environment(self) -> None:
        """Have an env worker describe the job's simulator; end the job if the simulator cannot be created."""
        config = self.config
        assert isinstance(config, EmbodiedJob)
        limit_s = MAKE_S + config.environment.step_limit_s
        describe = partial(describe_environment, self.bus, config, deadline_s=limit_s)
        what = f"an env worker to describe {config.environment.backend} '{config.environment.task}'"
        try:
            spec = await self.retry.until_taken(what, subjects.ENV_DESCRIBE, describe)
        except ConfigError as error:
            self.run.fail(JobFailure(code="environment_failed", message=str(error), service="env"))
        else:
            self._inputs = replace(self._inputs, environment=msgspec.to_builtins(spec))
        self.inbox.wake()

    async def _read_groups(self) -> None:
        """Judge the stored groups that the next decisions may need; ``_check_stored`` reads the other groups later."""
        subject = subjects.experience(self.job)
        self._next_seq = self.run.take_up()
        stream = await self.bus.stream_state(subjects.EXPERIENCE)
        if stream.last_seq < self._next_seq - 1:
            logger.error("%s: EXPERIENCE ends before what the ledger knows of it: all of it is read", self.job)
            self.run.forget_stored(list(self.run.stored))
            self._next_seq = 1
        self._unread = self._next_seq
        slice_ = WorkSlice()
        messages = self.bus.scan(subjects.EXPERIENCE, subject, start_seq=self._next_seq, headers_only=True)
        async with contextlib.aclosing(messages):
            async for message in messages:
                await self._take_group(message.seq, message.headers)
                self._next_seq = message.seq + 1
                await slice_.end()

    async def _check_stored(self) -> None:
        """Check, in the background, the messages of EXPERIENCE that ``_read_groups`` did not read.

        An earlier leader may have died before it deleted groups that it had dropped, and groups that the ledger counts
        as stored may be gone.
        """
        subject, stop = subjects.experience(self.job), self._unread
        gone = {seq for seq in self.run.stored if seq < stop}
        slice_ = WorkSlice(rest_s=0.01)
        messages = self.bus.scan(subjects.EXPERIENCE, subject, headers_only=True)
        async with contextlib.aclosing(messages):
            async for message in messages:
                if (seq := message.seq) >= stop:
                    break
                if seq in gone:
                    gone.discard(seq)
                elif seq not in self.run.stored:
                    await self.inbox.put(partial(self._take_group, seq, message.headers))
                await slice_.end()
        self.run.forget_stored(gone)
        self.inbox.wake()  # the byte budget has more room

    async def _decide_until_finished(self) -> None:
        rest_s = TICK_S
        await self._commit(self.run.extend(self.record.extensions, bus_time()))
        while not self.run.state.finished:
            self._inputs = self.desired_state.inputs(self.run, self._inputs)
            await self._commit(self.desired_state.amend(self.run, bus_time()))
            self._check_limits()
            decided = self.run.decide(self.inputs)
            await self._commit(decided)
            if self.run.state.finished:
                break
            if any(isinstance(event, BatchSealed) for event in decided):
                self.inbox.wake()  # one entry holds a limited number of groups: more may be ready to seal
            await self._evaluate()
            await self._follow_best()
            await self._settle_operations()
            is_asking, was_reported = self.commands.follow(self.run, self.inputs), self._report_status()
            if self._may_finish():
                await self._commit(self.run.finish(self.inputs, summary.summary_of(self.run.state)))
                break
            is_idle = not (self._decided or is_asking or self.desired_state.pending)
            self._decided, rest_s = False, min(2 * rest_s, IDLE_S) if is_idle else TICK_S
            spread_s = random.uniform(0.5, 1.0) * rest_s  # spreads jobs that were woken together
            await self.inbox.take(TICK_S, rest_s=spread_s if was_reported else TICK_S)
        await self._close_supply()
        await self._settle_operations()
        self._report_status(force=True)

    async def _close_supply(self) -> None:
        """Stop the supply of live items. Messages that the supply could not read are still copied to DEAD."""
        if self.supply is not None:
            await self.supply.close()
            await self._commit([])

    def _check_limits(self) -> None:
        limit, started = self.run.config.limits.timeout_s, self.record.created_at.timestamp()
        if limit is not None and bus_time() - started > limit:
            text = f"limits.timeout_s: {limit:g} s are over"
            self.run.fail(JobFailure(code="timeout", message=text))
        self._inputs = replace(self._inputs, stop_early=self.measures.goals.stop_reason)

    def _may_finish(self) -> bool:
        run, state = self.run, self.run.state
        if (
            state.finished
            or state.checkpoint is None
            or not run.training_done(self.inputs)
            or self.desired_state.desired == "paused"
        ):
            return False
        if self.measures.pending(state):
            return False
        return state.checkpoint.number >= state.last_trained

    def update_record(self, record: JobRecord) -> None:
        """Apply a changed record of the job."""
        self.desired_state.update(record)
        self.wake()

    def wake(self) -> None:
        """Check the job now, because its record changed or workers joined."""
        self.inbox.wake()

    # -- decisions ---------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> Inputs:
        """The inputs of a decision that is made now."""
        return replace(self._inputs, now=bus_time(), evaluated=self.measures.evaluated)

    def _on_announced(self, version: int) -> None:
        self._inputs = replace(self._inputs, announced=version)

    async def _commit(self, events: list[Event]) -> None:
        """Append the decisions of the live supply and ``events`` to the ledger, apply them to the core (``JobRun``),
        and publish their effects."""
        if self.supply is not None:
            await self.supply.flush()
            for one in await self.publisher.copy_unreadable(self.supply.unreadable()):
                self.outbox.event("warning", "dead_letter", f"message {one.seq} of {one.stream}: {one.reason}")
            ends = any(isinstance(event, Finished) for event in events)
            for decided in self.supply.decided(self.run.state, ends=ends):
                await self._append([decided])
        if events:
            await self._append(events)

    async def _append(self, events: list[Event]) -> None:
        """Append one ledger entry, apply it to the core (``JobRun``), and publish its effects."""
        self._decided = True
        seq = await self.journal.append(events)
        self.measures.on_events(events, self.run.candidates)
        effects = self.run.commit(events)
        if any(isinstance(event, LineageForked) for event in events):
            self.measures.roll_back(self.run.state)
        if (write := self.journal.snapshot(self.run.state)) is not None:
            self.outbox.later(write, keep=False)
        if (upkeep := self.journal.upkeep()) is not None:
            self.outbox.later(upkeep, keep=False)
        announce(self.outbox, events)
        if self.supply is not None:
            await self.supply.committed(self.run.state, events, seq)
        await self._carry_out(effects)

    async def _carry_out(self, effects: Effects) -> None:
        await self.publisher.publish(self.run, effects, order=None if self.supply is None else self.supply.order)

    # -- facts -------------------------------------------------------------------------------------------------------

    async def _follow_experience(self) -> None:
        stream = self.bus.follow(
            subjects.EXPERIENCE, subjects.experience(self.job), start_seq=self._next_seq, headers_only=True
        )
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                take = partial(self._take_group, message.seq, message.headers)
                await self.inbox.put(take)

    async def _take_group(self, seq: int, headers: Any) -> None:
        try:
            header = parse_group_header(headers)
            if count_of(headers) != header.num_messages:
                raise ProtocolError(f"{header.nbytes} bytes in {count_of(headers)} messages")
        except ProtocolError as error:
            await self._drop_dead_message(subjects.EXPERIENCE, seq, None, f"undecodable: {error}", 1)
            return
        is_new = seq not in self.run.stored
        is_duplicate = self.run.on_group(seq, header) is Verdict.DUPLICATE
        if is_new and self.ready:
            self.measures.on_group(header, duplicate=is_duplicate)
        if is_duplicate:
            self.run.forget_stored([seq])
            await self.publisher.delete(range(seq, seq + header.num_messages))

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
        take = self._publish_again if report.kind == "handed_over" else self._take_report
        ack = await self.inbox.ask(lambda: take(report))
        return pack(ack, job=self.job, epoch=self.epoch)

    async def _publish_again(self, report: Report) -> Ack:
        await self.publisher.publish_again(self.run, report.bad, report.seq)
        return Ack(ok=True)

    async def _take_report(self, report: Report) -> Ack:
        if report.kind == "hello":
            described = not self.run.lacks_environment(self.inputs)
            reason = "" if described else "no env worker has described the simulator of this job yet"
            return Ack(ok=described, reason=reason, data=summary.start_of(self.run, self.inputs))
        inputs = self.inputs
        try:
            events = self.run.on_report(report, inputs)
        except Refusal as refusal:
            return Ack(ok=False, reason=str(refusal))
        if report.kind == "failed":
            error = JobFailure(code="trainer_failed", message=f"trainer: {report.reason}", service="trainer")
            self.run.fail(error)
            while events := self.run.decide(self.inputs):  # end the job in the ledger before acknowledging
                await self._commit(events)
            return Ack(ok=True)
        if report.kind in ("not_rolled_back", "fell_back"):
            self._take_unreadable(report)
            return Ack(ok=True)
        if report.kind == "halted":
            return await self._halt(f"batch {report.batch} is not trained: {report.reason}")
        if events:
            await self._record(report, events, inputs.now)
        return Ack(ok=True, data=summary.retention_of(self.run) if report.kind == "checkpointed" else {})

    async def _record(self, report: Report, events: list[Event], now: float) -> None:
        """Commit the events of a trainer's report together with the decision that they make possible. The event of an
        update gets the update's metrics."""
        if report.kind == "refused":
            await self.publisher.copy_refused(self.run, events)
        batch, state = self.run.state.sealed.get(report.batch), self.run.state
        if report.kind == "trained" and batch is not None:
            if why := self.measures.disproof(report):
                await self._halt(why)
            live = self.supply.measures() if self.supply is not None else {}
            values = self.measures.values_of(report, batch, self.run.candidates, now, live)
            events = [msgspec.structs.replace(one, metrics=values) if isinstance(one, BatchTrained) else one
                      for one in events]  # fmt: skip
        await self._commit(events + self.run.decide(replace(self.inputs, now=now), after=events))
        for event in events:
            if isinstance(event, BatchTrained):
                self.measures.after_update(event, self.journal.last_seq, state)
                self.outbox.clock(event.version, event.digest, self.epoch)

    def _take_unreadable(self, report: Report) -> None:
        """Handle a trainer's report that a checkpoint is unreadable: the trainer fell back to an older checkpoint, or
        gave up a rollback."""
        if report.kind == "fell_back":
            self.outbox.event("error", "checkpoint_damaged", report.reason, number=report.batch)
        else:
            self.run.give_up_rollback(self.inputs, report.reason)

    async def _halt(self, reason: str) -> Ack:
        """Pause the job for ``reason``. A batch that is not trained stays sealed; resuming the job retries it."""
        self.outbox.event("error", "halted", reason)
        with contextlib.suppress(Conflict):  # the job is being cancelled or has ended
            self.update_record(await self.store.set_desired(self.job, "paused"))
        self._inputs = replace(self._inputs, desired=self.desired_state.desired)
        if self._inputs.desired != "running":
            await self._commit(self.run.halt(reason, bus_time()))
        return Ack(ok=True)

    async def _on_eval(self, data: bytes) -> bytes:
        result, _ = unpack(data, EvalResult)

        async def fact() -> None:
            if self.measures.plan.current is not None:
                self.measures.plan.current.take(result)

        await self.inbox.put(fact)
        return pack(Ack(ok=True), job=self.job, epoch=self.epoch)

    async def on_dead_message(self, stream: str, seq: int, draw: Draw | None, *, reason: str, attempts: int) -> None:
        """Have the decision loop copy a dead message to DEAD and drop its draw; only then delete the message."""
        await self.inbox.put(lambda: self._drop_dead_message(stream, seq, draw, reason, attempts))

    async def _drop_dead_message(self, stream: str, seq: int, draw: Draw | None, reason: str, attempts: int) -> None:
        if stream == subjects.TICKETS and await self._is_over(seq, draw):
            await self.publisher.delete([seq], stream=stream)
            return
        count = await self.publisher.copy_to_dead(stream, seq, reason=reason, attempts=attempts)
        if draw is not None:
            await self._commit(self.run.on_dead_letter(draw, self.inputs))
        self.outbox.event("warning", "dead_letter", f"message {seq} of {stream}: {reason} ({attempts} attempts)")
        await self.publisher.delete(range(seq, seq + count), stream=stream)

    async def _is_over(self, seq: int, draw: Draw | None) -> bool:
        """Return True if the ticket ``seq`` is no longer needed, because its draw or its evaluation has ended."""
        if draw is not None:
            return draw not in self.run.state.open
        with contextlib.suppress(NotFound, ProtocolError):
            ticket, current = (
                unpack((await self.bus.get(subjects.TICKETS, seq)).data, Ticket)[0],
                self.measures.plan.current,
            )
            return ticket.purpose == "eval" and (current is None or current.version != ticket.version)
        return False

    # -- evaluation and checkpoints ----------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        state, measures, now = self.run.state, self.measures, bus_time()
        if state.checkpoint is None or state.finished:
            return
        if measures.plan.waits(now, batch_ready=self.run.batch_ready):
            return
        if measures.end_evaluation(state, now):
            self._decided = True  # the run may have reached its goal
            await self._commit(self.run.decide(replace(self.inputs, now=now)))
        if self.run.rollback(self.inputs) is not None:  # this version will be abandoned
            return
        tickets = measures.begin_evaluation(state, final=self.run.training_done(self.inputs), now=now, epoch=self.epoch)
        if tickets:
            await self.publisher.publish_tickets(tickets)

    async def _follow_best(self) -> None:
        """Commit the event that names the best checkpoint once that checkpoint exists; until then, have the trainer
        write it."""
        goals, state = self.measures.goals, self.run.state
        await self._commit([*goals.mark(state, writer_epoch=self.epoch, now=bus_time())])
        self._inputs = replace(self._inputs, new_best=goals.wanted(state))

    async def _settle_operations(self) -> None:
        dead_letters = DeadLetterQueue(self.bus)
        replayed = await self.desired_state.replay(self.run, self.inputs, dead_letters, self._commit, self.supply)
        for done in [*self.desired_state.settle(self.run), *replayed]:
            self.outbox.later(partial(self.store.finish_operation, self.job, done))

    # -- what people see ---------------------------------------------------------------------------------------------

    def _report_status(self, *, force: bool = False) -> bool:
        """Queue the job's status and return True. Without ``force``, do so at most once every TICK_S seconds, because
        counting open draws takes time; return False if it is too early."""
        if not force and time.monotonic() - self._reported < TICK_S:
            return False
        self._reported = time.monotonic()
        inputs = self.inputs
        self._onsets.look(self.job, self.run, inputs, self.measures.plan)
        state, seen = self.run.state, summary.status_of(self.run, inputs, self.desired_state.desired)
        self.measures.look(ended=bool(state.finished))
        self._warnings = health_warnings(self.measures.health, self._warnings, bus_datetime())
        fields = {
            **seen,
            "observed_generation": self.desired_state.followed,
            "applies_at_step": self.desired_state.applies_at_step(state),
            "expected_end": self.measures.pace.end(
                state.updates, self.run.max_batches, bus_time(), running=seen["phase"] == "running"
            ),
            "reward": self.measures.reward if self.measures.reward is not None else self.record.status.reward,
            "conditions": self._conditions(),
            "warnings": self._warnings,
            "started_at": self.record.status.started_at or self.record.created_at,
            "finished_at": bus_datetime() if state.finished else None,
        }
        self.outbox.status(fields, force=force)
        return True

    def _conditions(self) -> list[Condition]:
        clock, now = time.monotonic(), bus_datetime()
        for change in self._presence.changes(self.members, self.run.config.services, clock):
            self.outbox.event(change.level, change.type, change.text, worker=change.worker, service=change.service)
        for service, worker, text in self._problems.new(self.members, self.run.config.services, clock):
            message = f"{service} worker '{worker}': {text}"
            self.outbox.event("warning", "worker_problem", message, worker=worker, service=service)
        before, self._known = (
            self._known,
            conditions(self.run, self.inputs, self.job, self.members, self._known, clock=clock, now=now),
        )
        self._report_clocks(before)
        return self._known

    def _report_clocks(self, before: list[Condition]) -> None:
        was, now = ({one.type: one for one in found}.get("ClocksAgree") for found in (before, self._known))
        if now is not None and now.status == "False" and (was is None or was.status != "False"):
            self.outbox.event("warning", "clock_skew", now.message)
        elif now is not None and now.status == "True" and was is not None and was.status == "False":
            self.outbox.event("info", "clock_skew", "the clocks of all hosts agree again")

    def status(self) -> dict[str, Any]:
        """Return the newest policy version and the number of open draws, for the heartbeat."""
        return {"version": self.run.state.version, "running": len(self.run.state.open)}

    def why(self) -> list[dict[str, Any]]:
        """Return a row for each thing that the job waits for."""
        inputs, blocked = self.inputs, self.retry.blocked
        if not self.ready:
            return recovery_waits(self.job, blocked, inputs.now, self._leads_since)
        rows = explain_waits(
            self.job, self.run, inputs, self.measures.plan, self.members,
            clock=time.monotonic(), onsets=self._onsets, blocked=blocked,
        )  # fmt: skip
        return rows + (self.supply.waits(self.run, inputs) if self.supply is not None else [])
