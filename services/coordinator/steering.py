"""Requests of users about existing jobs. Each request is stored in the job's record, and reported as an event that
names the API key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.coordinator.jobs.removal import delete_job
from penstock.services.coordinator.jobs.retention import check_room
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.ledger_room import reserve_ledger
from penstock.services.coordinator.submission import check_budget
from penstock.services.coordinator.training.checkpoints import read_stored
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.ledger_cache import LedgerCache
from penstock.shared.config.jobs.amendable import changed_keys
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, AnyTraining, parse_job, parse_training, trains
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.service import ServiceSettings, checkpoint_path
from penstock.shared.errors import Conflict, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.jobs import TERMINAL_PHASES, DesiredState, JobRecord, Operation
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus

__all__ = ["Steering"]

log = logging.getLogger(__name__)

VERBS: dict[DesiredState, str] = {"running": "resume", "paused": "pause", "cancelled": "cancel"}


class Steering:
    """Applies requests to job records. Methods raise NotFound (unknown job) or Conflict (job in a wrong phase)."""

    def __init__(
        self, bus: Bus, store: JobStore, ledgers: LedgerCache, archive: LedgerArchive, settings: ServiceSettings
    ) -> None:
        self._bus, self._store, self._settings = bus, store, settings
        self._ledgers, self._archive = ledgers, archive

    async def set_desired(
        self, job: str, state: DesiredState, *, by: str, force: bool = False, checkpoint: bool = True
    ) -> JobRecord:
        """Write the desired state and return the record after the write; a repeat of the same state changes nothing.

        ``by``: id of the requesting key, for the events of the job.

        For ``cancelled``: with ``force`` the job neither drains nor checkpoints; without ``checkpoint`` it only drains.

        Raises:
            Conflict: the job is terminal, or is being cancelled and another state is requested.
        """
        before = await self._store.get(job)
        record = await self._store.set_desired(job, state, force=force, checkpoint=checkpoint)
        if record.generation != before.generation:
            how = {"force": True} if force else {} if checkpoint else {"checkpoint": False}
            await self._publish_event(job, VERBS[state], by, how)
        return record

    async def amend(self, job: str, edit: Callable[[JobRecord], AnyJob], *, by: str) -> JobRecord:
        """Replace the job file by the result of ``edit(record)``, atomically; ``edit`` may be called more than once.

        ``by``: as for ``set_desired``.

        Raises:
            Conflict: the job is terminal.
            ConfigError: the job no longer fits here (byte budget).
        """
        others = [entry for entry in (await self._store.index()).unfinished() if entry.id != job]
        before = await self._store.get(job)
        await self._check_smaller_budget(before, edit)

        def checked(record: JobRecord) -> AnyJob:
            config = edit(record)
            if not isinstance(config, ServingJob):  # serving jobs store no groups
                check_room(others, config.limits.byte_budget, experience_bytes=self._settings.experience_bytes)
            return config

        record = await self._store.amend(job, checked)
        if record.generation != before.generation:
            keys = changed_keys(parse_job(before.spec), parse_job(record.spec))
            sections = {key.rpartition(".")[0] for key in keys}  # an empty value has its own key
            await self._publish_event(job, "amend", by, {"keys": [key for key in keys if key not in sections]})
        return record

    async def extend(self, job: str, max_updates: int, *, by: str) -> tuple[JobRecord, list[str]]:
        """Continue a finished job until ``max_updates``; return its record and messages about side effects.

        ``by``: as for ``set_desired``.

        Raises:
            Conflict: the job has not ended, or cannot continue (the message says why).
            ConfigError: the job no longer fits here (byte budget).
            NoRoom: the ledger has no room.
        """
        before = await self._store.get(job)
        if before.status.phase not in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' is {before.status.phase}: amend train.max_updates instead")
        state = await self._ledgers.state(job)
        await asyncio.to_thread(_check_extension, before, state, max_updates, self._settings.data_dir)
        await reserve_ledger(self._bus)
        others = (await self._store.index()).unfinished()

        def longer(record: JobRecord) -> AnyJob:
            spec = {**record.spec, "train": {**record.spec.get("train", {}), "max_updates": max_updates}}
            config = parse_training(spec)
            check_room(others, config.limits.byte_budget, experience_bytes=self._settings.experience_bytes)
            return config

        record = await self._store.extend(job, longer)
        await self._publish_event(job, "extend", by, {"max_updates": max_updates})
        return record, _extension_notes(parse_training(before.spec), state, max_updates)

    async def delete(self, job: str, *, checkpoints: bool) -> None:
        """Delete a finished job with its ledger, groups, metrics, events and feedback; safe to repeat.

        ``checkpoints``: also delete its checkpoint files on the coordinator's host.

        Raises:
            Conflict: the job has not ended, or a running job started from one of these checkpoints.
        """
        folder = self._settings.data_dir / "checkpoints" if checkpoints else None
        await delete_job(self._bus, self._store, job, checkpoints=folder, archive=self._archive)
        self._ledgers.forget(job)

    async def _check_smaller_budget(self, record: JobRecord, edit: Callable[[JobRecord], AnyJob]) -> None:
        """Refuse an edit that lowers the job's byte budget so far that its groups no longer fit. An edit that keeps or
        raises the budget needs no check, because no edit makes groups larger."""
        if record.status.phase in TERMINAL_PHASES:
            return
        config, known = edit(record), parse_job(record.spec)
        if isinstance(config, ServingJob) or isinstance(known, ServingJob):
            return
        if config.limits.byte_budget < known.limits.byte_budget:
            parts = (await self._bus.stream_state(subjects.EXPERIENCE)).atomic
            await check_budget(config, stores_parts=parts)

    async def begin_operation(self, job: str, operation: Operation) -> JobRecord:
        """Store a pending operation and return the record, whose ``operations`` later show how it ended.

        Raises:
            Conflict: the job is terminal, or has too many pending operations.
        """
        record = await self._store.begin_operation(job, operation)
        await self._publish_event(job, operation.kind, operation.by, {**operation.args, "operation": operation.id})
        return record

    async def _publish_event(self, job: str, action: str, by: str, details: dict[str, Any]) -> None:
        """Publish the event about a user's request, which is already stored in the job's record; log an error if the
        bus refuses the event."""
        shown = ", ".join(f"{name} {value}" for name, value in details.items() if name not in ("keys", "operation"))
        what = " ".join((action.replace("_", " "), *details.get("keys", ()))) + (f" ({shown})" if shown else "")
        row = {
            "time": bus_time(), "level": "info", "type": "asked", "message": f"{what}, by key {by}",
            "data": {"action": action, "by": by, **details},
        }  # fmt: skip
        try:
            await self._bus.publish(subjects.events(job), msgspec.json.encode(row))
        except (Unavailable, StreamFull) as error:
            log.error("%s: the event that key %s asked for '%s' is lost: %s", job, by, action, error)


def _check_extension(record: JobRecord, state: LedgerState, max_updates: int, data_dir: Path) -> None:
    """Check that a finished job can continue until ``max_updates``. Reads the disk.

    Raises:
        Conflict: the job cannot continue; the message says why, and what to do instead.
    """
    what = f"job '{record.id}'"
    anew = f"submit another one that begins with model.path: job:{record.name}@latest"
    if not trains(record.spec):
        raise Conflict(f"{what} is of kind '{record.kind}': it trains nothing that could go on")
    config = parse_training(record.spec)
    if isinstance(config, OnlineJob):
        raise Conflict(f"{what} is an online job, whose conversations ended with it: {anew}")
    if record.status.phase == "failed":
        raise Conflict(f"{what} failed ({record.status.message}): {anew}")
    if max_updates <= state.updates:
        raise Conflict(f"{what} has done {state.updates} updates: max_updates must be more")
    if reason := _ended_early(record, config, state):
        raise Conflict(f"{what} would end at once: {reason}; {anew}")
    newest = state.checkpoint
    if newest is None or newest.number != state.newest_batch:
        raise Conflict(f"{what} ended without a last checkpoint: {anew}")
    if read_stored(checkpoint_path(data_dir, newest.path)) is None:
        raise Conflict(f"the files of the last checkpoint of {what} are not on the coordinator's host any more")


def _ended_early(record: JobRecord, config: AnyTraining, state: LedgerState) -> str:
    """Return the reason why a job would end again as soon as it is extended. Return '' for a job that ended only
    because it had reached its maximum number of updates or a user had cancelled it: such a job continues."""
    limit_s, begun = config.limits.timeout_s, record.created_at.timestamp()
    if limit_s is not None and bus_time() - begun > limit_s:
        return f"limits.timeout_s ({limit_s:g}) is over"
    most = config.train.max_updates
    if state.finished == "cancelled" or (most is not None and state.updates >= most):
        return ""
    return record.status.message or "its data were at their end (train.data_epochs)"


def _extension_notes(config: AnyTraining, state: LedgerState, max_updates: int) -> list[str]:
    """Return messages for the user about settings whose effect changes with the larger ``max_updates``.

    Args:
        config: the job file before the extension.
        state: the ledger state at the job's end.
    """
    notes = []
    sections = {"optimizer": config.optimizer} if isinstance(config, JobConfig) else {}
    if isinstance(config, JobConfig) and config.algorithm.critic is not None:
        sections["algorithm.critic.optimizer"] = config.algorithm.critic.optimizer
    for key, section in sections.items():
        if section.schedule != "constant":
            notes.append(
                f"{key}.schedule: '{section.schedule}' had decayed over the run; it is now one over {max_updates} "
                f"updates, {state.updates / max_updates:.0%} of the way along, so that the learning rate rises again: "
                "amend optimizer.learning_rate to lower it"
            )
    if config.early_stop is not None:
        notes.append(f"early_stop: '{config.early_stop.metric}' is followed on, and may end the job before")
    return notes
