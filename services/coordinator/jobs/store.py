"""Job records in the `jobs` bucket. A change is one atomic write, which also notifies the watchers of the bucket."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from penstock.services.coordinator.jobs.job_index import JobEntry, JobIndex, decode_stored, entry_of
from penstock.shared.config.jobs.kinds import AnyJob, AnyTraining, trains
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.errors import Conflict, NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import TERMINAL_PHASES, DesiredState, JobRecord, JobStatus, ModelOrigin, Operation
from penstock.shared.protocol.trace import current_trace
from penstock.shared.transport.bus import Bus, Entry

__all__ = ["JobStore"]

logger = logging.getLogger(__name__)

CAS_TRIES = 20
MAX_OPERATIONS = 16
"""Maximum number of operations in a record."""


class JobStore:
    """Creates, reads and changes (by compare-and-set) job records."""

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.JOBS)
        self._index = JobIndex(self._kv)

    async def create(
        self, config: AnyJob, id: str = "", *, fine_tuning: dict[str, Any] | None = None,
        origin: ModelOrigin | None = None,
    ) -> JobRecord:  # fmt: skip
        """Store a new job durably and return its record. If a job with the id ``id`` exists already, store nothing and
        return that job's record.

        Raises:
            Conflict: the job with this ``id`` was deleted.
        """
        record = JobRecord(
            id=id or new_job_id(),
            name=config.name,
            created_at=bus_datetime(),
            spec=config.model_dump(mode="json", exclude_unset=True),
            status=JobStatus(total_steps=_total_steps(config)),
            fine_tuning=fine_tuning,
            origin=origin,
            trace=current_trace(),
        )
        try:
            revision = await self._kv.update(record.id, record.stored(), 0)
        except Conflict:
            return await self._known(record.id)
        return record.model_copy(update={"revision": revision})

    async def _known(self, job: str) -> JobRecord:
        """Return the job that has this id.

        Raises:
            Conflict: the job was deleted; ids are never reused, since messages of the old job may be in flight.
        """
        record = await self.find(job)
        if record is None:
            raise Conflict(f"job '{job}', which this request made before, was deleted; use a new Idempotency-Key")
        return record

    async def get(self, job: str) -> JobRecord:
        """Return the record of a job. Raises NotFound."""
        record = await self.find(job)
        if record is None:
            raise NotFound(f"no job '{job}'")
        return record

    async def find(self, job: str) -> JobRecord | None:
        """Return the record of a job, or None."""
        entry = await self._kv.get(job)
        return decode_record(entry) if entry is not None else None

    async def delete(self, job: str) -> None:
        """Replace the record of a job by a deletion marker; concurrent changes then raise NotFound."""
        await self._kv.delete(job)

    async def index(self) -> JobIndex:
        """Return the index of all jobs, with every change stored by now. Raises Unavailable."""
        return await self._index.current()

    async def change(self, job: str, edit: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Store ``edit(record)`` by compare-and-set, repeated on conflicts, and return the stored record.

        An edit that changes nothing writes nothing.
        """
        for _ in range(CAS_TRIES):
            record = await self.get(job)
            changed = edit(record)
            if changed == record:
                return record
            try:
                revision = await self._kv.update(job, changed.stored(), record.revision)
            except Conflict:
                continue
            return changed.model_copy(update={"revision": revision})
        raise Conflict(f"job '{job}' changes too often; try again")

    async def set_desired(
        self, job: str, state: DesiredState, *, force: bool = False, checkpoint: bool = True
    ) -> JobRecord:
        """Write the desired state. Raises Conflict if the job is terminal, is being cancelled, or cannot be paused."""

        def edit(record: JobRecord) -> JobRecord:
            if record.status.phase in TERMINAL_PHASES:
                raise Conflict(f"job '{job}' is {record.status.phase}; it cannot become {state}")
            if state == "paused" and not trains(record.spec):
                raise Conflict(f"job '{job}' is of kind '{record.kind}': it can be cancelled, not paused")
            if record.desired_state == "cancelled" and state != "cancelled":
                raise Conflict(f"job '{job}' is being cancelled")
            wanted = {
                "desired_state": state,
                "force": record.force or force,
                "last_checkpoint": record.last_checkpoint and checkpoint,
            }
            if wanted.items() <= record.model_dump().items():
                return record
            return _wanted(record, wanted)

        return await self.change(job, edit)

    async def amend(self, job: str, edit: Callable[[JobRecord], AnyJob]) -> JobRecord:
        """Store the job file that ``edit`` returns for the record. Raises Conflict when the job is terminal."""

        def change(record: JobRecord) -> JobRecord:
            if record.status.phase in TERMINAL_PHASES:
                raise Conflict(
                    f"job '{job}' is {record.status.phase}; its file cannot change any more: extend or clone it"
                )
            config = edit(record)
            spec = config.model_dump(mode="json", exclude_unset=True)
            if spec == record.spec:
                return record
            status = record.status.model_copy(update={"total_steps": _total_steps(config)})
            return _wanted(record, {"spec": spec, "status": status})

        return await self.change(job, change)

    async def extend(self, job: str, edit: Callable[[JobRecord], AnyJob]) -> JobRecord:
        """Continue a finished job with the job file that ``edit`` returns for its record.

        Raises:
            Conflict: the job has not ended.
        """

        def change(record: JobRecord) -> JobRecord:
            if record.status.phase not in TERMINAL_PHASES:
                raise Conflict(f"job '{job}' is {record.status.phase}: amend train.max_updates instead")
            config = edit(record)
            seen = {"phase": "pending", "message": "", "error": None, "finished_at": None, "expected_end": None}
            status = record.status.model_copy(update={**seen, "total_steps": _total_steps(config)})
            return _wanted(
                record,
                {
                    "spec": config.model_dump(mode="json", exclude_unset=True), "status": status,
                    "desired_state": "running", "force": False, "last_checkpoint": True,
                    "extensions": record.extensions + 1, "extended_at": bus_datetime(),
                },
            )  # fmt: skip

        return await self.change(job, change)

    async def begin_operation(self, job: str, operation: Operation) -> JobRecord:
        """Add a pending operation. Raises Conflict when the job is terminal, or has too many pending operations."""

        def edit(record: JobRecord) -> JobRecord:
            if record.status.phase in TERMINAL_PHASES:
                raise Conflict(f"job '{job}' is {record.status.phase}: nothing can be asked of it")
            if not trains(record.spec) and operation.kind != "scale":
                raise Conflict(f"job '{job}' is of kind '{record.kind}': it has no checkpoints")
            pending = [one for one in record.operations if one.state == "pending"]
            if len(pending) >= MAX_OPERATIONS:
                raise Conflict(f"{len(pending)} operations of job '{job}' are not done yet; wait for them")
            over = [one.id for one in record.operations if one.state != "pending"]
            forgotten = over[: max(0, len(record.operations) + 1 - MAX_OPERATIONS)]
            kept = [one for one in record.operations if one.id not in forgotten]
            return record.model_copy(update={"operations": [*kept, operation]})

        return await self.change(job, edit)

    async def finish_operation(self, job: str, done: Operation) -> None:
        """Write the result of a pending operation; do nothing if the operation has ended already."""

        def edit(record: JobRecord) -> JobRecord:
            operations = [done if one.id == done.id and one.state == "pending" else one for one in record.operations]
            return record.model_copy(update={"operations": operations})

        await self.change(job, edit)

    async def set_status(self, job: str, **fields: Any) -> JobRecord:
        """Merge fields into the observed status, which only the job's leader writes."""

        def edit(record: JobRecord) -> JobRecord:
            seen = {**fields, "heartbeat_at": bus_datetime()}
            return record.model_copy(update={"status": record.status.model_copy(update=seen)})

        return await self.change(job, edit)

    async def watch(self) -> AsyncIterator[JobEntry]:
        """Yield every job now and on each change; a record that does not decode is logged and skipped."""
        async for entry in self._kv.watch(""):
            if entry.value is None:
                continue
            try:
                found = entry_of(entry.key, entry.value, entry.revision)
            except ProtocolError as error:
                logger.error("%s", error)
                continue
            yield found


def _total_steps(config: AnyJob) -> int | None:
    if isinstance(config, ServingJob):
        return None
    return config.train.max_updates if isinstance(config, AnyTraining) else config.evaluation.num_prompts


def _wanted(record: JobRecord, changes: dict[str, Any]) -> JobRecord:
    """Return the record with the ``changes`` that a user requested, and with the next generation number."""
    return record.model_copy(update={**changes, "generation": record.generation + 1, "changed_from": record.revision})


def decode_record(entry: Entry) -> JobRecord:
    """Decode a record, with the store's revision. Raises ProtocolError."""
    return decode_stored(entry.key, entry.value or b"", entry.revision)
