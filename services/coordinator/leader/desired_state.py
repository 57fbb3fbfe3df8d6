"""Desired state of a running job, read from the job's record: the requested state, the job file, and the operations."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from penstock.services.coordinator.leader.dead_letters import DeadLetterQueue
from penstock.services.coordinator.training.inputs import Inputs, Rollback
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.promotion import flaw_of_rollback
from penstock.services.coordinator.training.run import JobRun
from penstock.services.coordinator.training.supply import LiveDeadLetter, Supply
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.errors import ConfigError, Conflict, NotFound, ProtocolError, Unavailable
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.events import Event, Redrawn
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord, Operation

__all__ = ["CANCEL_GRACE_S", "DesiredState"]

logger = logging.getLogger(__name__)
CANCEL_GRACE_S = 15.0
"""Time for a cancelled job to train its sealed batches and to write a last checkpoint (seconds)."""


class DesiredState:
    """The newest record of a job, and the requests in it that the run has not carried out yet."""

    def __init__(self, record: JobRecord) -> None:
        self._cancelled_at = 0.0
        self._goals: dict[str, int] = {}
        self._settled: set[str] = set()
        self.followed = 0
        """Generation of the record that the run has applied."""
        self._unreadable = 0
        """Generation of the record whose job file this release cannot parse."""
        self.update(record)

    def update(self, record: JobRecord) -> None:
        """Store a changed record. The first record that cancels the job starts the grace period."""
        self.record = record
        if record.desired_state == "cancelled" and not self._cancelled_at:
            self._cancelled_at = time.monotonic()

    @property
    def desired(self) -> str:
        """The state that the user requested."""
        return self.record.desired_state

    @property
    def cancel_now(self) -> bool:
        """True if the job must end at once: a user forces it, or the grace period of a cancellation has passed."""
        late = bool(self._cancelled_at) and time.monotonic() - self._cancelled_at > CANCEL_GRACE_S
        return self.record.force or late

    def amend(self, run: JobRun, now: float) -> list[Event]:
        """Apply the current job file to ``run``; return the event that records it, or [] if nothing changed."""
        generation = self.record.generation
        if generation in (self.followed, self._unreadable) or not run.state.started:
            return []
        try:
            config = parse_training(self.record.spec)
        except ConfigError as error:  # another version of the API wrote it
            self._unreadable = generation
            logger.error("%s: the changed job file is not followed: %s", self.record.id, error)
            return []
        self.followed = generation
        return run.amend(config, generation, now)

    def applies_at_step(self, state: LedgerState) -> int | None:
        """Return the first update (from 1) that uses the current job file, or None if this file changed no setting."""
        if state.applies_at is None or state.generation != self.followed:
            return None
        return state.applies_at + 1

    @property
    def pending(self) -> bool:
        """True while the job is being cancelled, or an operation that the user requested is pending."""
        return self.desired == "cancelled" or any(
            one.state == "pending" and one.id not in self._settled for one in self.record.operations
        )

    @property
    def wants_checkpoint(self) -> bool:
        """True if an operation waits for a checkpoint."""
        return bool(self._pending("checkpoint"))

    @property
    def replays(self) -> int:
        """Number of dead letters that wait for a replay."""
        return len(self._pending("replay_dead_letter"))

    async def replay(
        self,
        run: JobRun,
        inputs: Inputs,
        dead_letters: DeadLetterQueue,
        commit: Callable[[list[Event]], Awaitable[None]],
        supply: Supply | None = None,
    ) -> list[Operation]:
        """Replay the dead letters whose replay the user requested; return the finished operations.

        Interactions and feedback return to their stream through ``supply``. For any other dead letter the run draws the
        prompt again once a slot for a draw in flight is free; the run reserves the next free slot.
        """
        done = []
        for operation in self._pending("replay_dead_letter"):
            id, now = int(operation.args["id"]), bus_datetime()
            try:
                live = await dead_letters.live(self.record.id, id)
                if live is not None:
                    result = {"stream": live.stream, "stored": await _requeue(run, supply, live)}
                else:
                    draw = await dead_letters.draw(self.record.id, id)
                    drawn = await self._redraw(run, inputs, draw, id, commit)
                    if drawn is None:
                        continue
                    result = drawn
                await dead_letters.drop(self.record.id, id)
                over = {"state": "succeeded", "result": result, "finished_at": now}
            except (Conflict, NotFound, ProtocolError) as error:
                over = {"state": "failed", "message": str(error), "finished_at": now}
                if isinstance(error, NotFound) and id in run.state.replayed:  # an earlier leader replayed it
                    over = {"state": "succeeded", "result": {}, "finished_at": now}
            except Unavailable as error:
                logger.info("%s: dead letter %d waits: %s", self.record.id, id, error)
                continue
            self._settled.add(operation.id)
            done.append(operation.model_copy(update=over))
        return done

    async def _redraw(
        self,
        run: JobRun,
        inputs: Inputs,
        draw: Draw,
        dead_letter: int,
        commit: Callable[[list[Event]], Awaitable[None]],
    ) -> dict[str, Any] | None:
        """Draw the prompt of a dead letter again; return the operation's result, or None while no slot is free.

        Raises:
            Conflict: the prompt cannot be drawn.
        """
        if self._may_wait(run, inputs, dead_letter):
            return None
        events = run.replay_dead_letter(dead_letter, draw, replace(inputs, now=bus_time()))
        await commit(events)
        drawn = [str(event.draw) for event in events if isinstance(event, Redrawn)]
        return {"draw": drawn[0]} if drawn else {}

    @staticmethod
    def _may_wait(run: JobRun, inputs: Inputs, dead_letter: int) -> bool:
        ends = run.training_done(inputs) or inputs.desired != "running" or bool(run.state.finished)
        return not run.has_room and run.source.redraws and not ends and dead_letter not in run.state.replayed

    def inputs(self, run: JobRun, before: Inputs) -> Inputs:
        """Return ``before``, the inputs of the run's next decision, with the user's current requests filled in. Leave
        out a rollback that ``run`` cannot carry out."""
        asked = [one for one in self._pending("rollback") if one.id not in run.failed_rollbacks][:1]
        found = [Rollback(int(one.args["checkpoint"]), "by request", one.id) for one in asked]
        possible = [one for one in found if not flaw_of_rollback(run.state, one.number)]
        return replace(
            before,
            desired=self.desired,
            cancel_now=self.cancel_now,
            last_checkpoint=self.record.last_checkpoint,
            checkpoint_requested=self.wants_checkpoint,
            replays=self.replays,
            rollback=possible[0] if possible else None,
            forced=max((int(one.args["version"]) for one in self._pending("promote")), default=-1),
        )

    def settle(self, run: JobRun) -> list[Operation]:
        """Return the operations that have succeeded or failed since the last call."""
        done = []
        for kind, outcome in (("checkpoint", self._saved), ("promote", _promoted), ("rollback", _rolled_back)):
            for operation in self._pending(kind):
                over = outcome(operation, run)
                if over is None and run.state.finished:
                    over = _failed(f"the job {run.state.finished} before")
                if over is not None:
                    self._settled.add(operation.id)
                    done.append(operation.model_copy(update=over | {"finished_at": bus_datetime()}))
        return done

    def _saved(self, operation: Operation, run: JobRun) -> dict[str, Any] | None:
        state = run.state
        goal = self._goals.setdefault(operation.id, state.last_trained)
        if state.checkpoint is None or state.checkpoint.number < goal:
            return None
        return _succeeded({"number": state.checkpoint.number, "path": str(run.path_of(state.checkpoint))})

    def _pending(self, kind: str) -> list[Operation]:
        asked = (one for one in self.record.operations if one.kind == kind and one.state == "pending")
        return [one for one in asked if one.id not in self._settled]


async def _requeue(run: JobRun, supply: Supply | None, dead_letter: LiveDeadLetter) -> int:
    """Store an interaction or an item of feedback again; see ``Supply.requeue``. Raises Conflict if the job has
    finished, or does not read live items."""
    if supply is None or run.state.finished:
        ended = run.state.finished or "not fed by feedback"
        raise Conflict(f"the job is {ended}: it would not read what is stored anew in {dead_letter.stream}")
    return await supply.requeue(dead_letter)


def _promoted(operation: Operation, run: JobRun) -> dict[str, Any] | None:
    state, version = run.state, int(operation.args["version"])
    if run.promotion is None:
        return _failed("the job has no online.promotion: its newest version is served anyway")
    if state.promoted is not None and state.promoted.version == version:
        return _succeeded({"version": version})
    if version != state.version:
        return _failed(f"only the newest version can be promoted, which is {state.version} by now")
    return None


def _rolled_back(operation: Operation, run: JobRun) -> dict[str, Any] | None:
    state = run.state
    if state.fork_request == operation.id:
        return _succeeded({"version": state.forked})
    flaw = run.failed_rollbacks.get(operation.id) or flaw_of_rollback(state, int(operation.args["checkpoint"]))
    return _failed(flaw) if flaw else None


def _succeeded(result: dict[str, Any]) -> dict[str, Any]:
    return {"state": "succeeded", "result": result}


def _failed(message: str) -> dict[str, Any]:
    return {"state": "failed", "message": message}
