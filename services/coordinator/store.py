"""Job records in the `jobs` bucket: one atomic write is both the state and the notification."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from penstock.shared.config.job import JobConfig
from penstock.shared.config.kinds import AnyJob, job_model
from penstock.shared.errors import Conflict, NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import TERMINAL_PHASES, DesiredState, JobRecord, JobStatus
from penstock.shared.transport.bus import Bus, Entry

__all__ = ["JobStore"]

CAS_TRIES = 20


class JobStore:
    """Create, read and compare-and-set job records."""

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.JOBS)

    async def create(self, config: AnyJob) -> JobRecord:
        """Store a new job durably."""
        steps = config.train.max_updates if isinstance(config, JobConfig) else config.evaluation.num_prompts
        record = JobRecord(
            id=new_job_id(),
            name=config.name,
            created_at=datetime.now(UTC),
            spec=config.model_dump(mode="json", exclude_unset=True),
            status=JobStatus(total_steps=steps),
        )
        revision = await self._kv.create(record.id, record.model_dump_json().encode())
        return record.model_copy(update={"revision": revision})

    async def get(self, job: str) -> JobRecord:
        """Raises NotFound for an unknown job."""
        entry = await self._kv.get(job)
        if entry is None:
            raise NotFound(f"no job '{job}'")
        return decode_record(entry)

    async def list_all(self) -> list[JobRecord]:
        """Every job, oldest first."""
        entries = await self._kv.entries()
        return sorted((decode_record(e) for e in entries if e.value is not None), key=lambda record: record.id)

    async def change(self, job: str, edit: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Compare-and-set ``edit(record)``, again on a conflict; an edit that changes nothing writes nothing."""
        for _ in range(CAS_TRIES):
            record = await self.get(job)
            changed = edit(record)
            if changed == record:
                return record
            try:
                revision = await self._kv.update(job, changed.model_dump_json().encode(), record.revision)
            except Conflict:
                continue
            return changed.model_copy(update={"revision": revision})
        raise Conflict(f"job '{job}' changes too often; try again")

    async def set_desired(self, job: str, state: DesiredState, *, force: bool = False) -> JobRecord:
        """Write what the user wants. Raises Conflict when the job is terminal or being cancelled."""

        def edit(record: JobRecord) -> JobRecord:
            if record.status.phase in TERMINAL_PHASES:
                raise Conflict(f"job '{job}' is {record.status.phase}; it cannot become {state}")
            if state == "paused" and job_model(record.spec) is not JobConfig:
                raise Conflict(f"job '{job}' is an evaluation: it can be cancelled, not paused")
            if record.desired_state == "cancelled" and state != "cancelled":
                raise Conflict(f"job '{job}' is being cancelled")
            wanted = {"desired_state": state, "force": record.force or force}
            if wanted.items() <= record.model_dump().items():
                return record
            return record.model_copy(update={**wanted, "generation": record.generation + 1})

        return await self.change(job, edit)

    async def set_status(self, job: str, **fields: Any) -> JobRecord:
        """Merge fields into the observed status."""

        def edit(record: JobRecord) -> JobRecord:
            return record.model_copy(update={"status": record.status.model_copy(update=fields)})

        return await self.change(job, edit)

    async def watch(self) -> AsyncIterator[JobRecord]:
        """Every record now and on each change."""
        async for entry in self._kv.watch(""):
            if entry.value is not None:
                yield decode_record(entry)


def decode_record(entry: Entry) -> JobRecord:
    """A record with the store's revision. Raises ProtocolError for bytes that are none."""
    try:
        record = JobRecord.model_validate_json(entry.value or b"")
    except ValueError as error:
        raise ProtocolError(f"job record '{entry.key}' does not decode: {error}") from None
    return record.model_copy(update={"revision": entry.revision})
