"""Deletes a finished job: its record last, so that an interrupted deletion can be repeated."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.services.coordinator.jobs.retention import GIVEN_UP
from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.errors import Conflict, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import TERMINAL_PHASES
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus

__all__ = ["delete_job"]

logger = logging.getLogger(__name__)

STREAMS: tuple[tuple[str, Callable[[str], str]], ...] = (
    *GIVEN_UP.items(),
    (subjects.FEEDBACK, subjects.erasures),
    (subjects.FEEDBACK, subjects.feedback_ids),
    (subjects.SNAPSHOTS, subjects.snapshots),
    (subjects.TICKETS, subjects.tickets),
    (subjects.RAW, subjects.raw),
    (subjects.VIDEOS, subjects.videos),
    (subjects.PARTIAL, subjects.partials),
    (subjects.DEAD, subjects.dead),
    (subjects.LEDGER, subjects.ledger),
)
"""Streams that hold messages of a job, each with the function that returns the job's subject there."""
KEYS: Mapping[str, tuple[Callable[[str], str], ...]] = {
    subjects.POLICY: (str,),
    subjects.MANIFESTS: (str, subjects.candidate_manifest, subjects.base_manifest),
}


async def delete_job(bus: Bus, store: JobStore, job: str, *, checkpoints: Path | None, archive: LedgerArchive) -> None:
    """Delete a finished job with all its data in streams and buckets.

    Args:
        checkpoints: directory of all jobs' checkpoints, to also delete those of the job; None keeps them.
        archive: archive of older ledger entries, from which the job's entries are deleted, too.

    Raises:
        NotFound: there is no such job.
        Conflict: it has not ended, or a running job started from one of its checkpoints.
        Unavailable: the bus or the disk refuses; some data may be gone, and the call can be repeated.
    """
    if bus.held:
        raise Unavailable("a backup is being taken: nothing is deleted meanwhile; try again in a minute")
    record = await store.get(job)
    if record.status.phase not in TERMINAL_PHASES:
        raise Conflict(f"job '{job}' is {record.status.phase}: only what has ended is deleted; cancel it first")
    if checkpoints is not None:
        _check_unused(checkpoints / job, (await store.index()).unfinished())
        await asyncio.to_thread(_delete_files, checkpoints / job)
    for stream, subject in STREAMS:
        await bus.purge(stream, subject(job))
    try:
        await asyncio.to_thread(archive.delete, job)
    except OSError as error:
        raise Unavailable(
            f"the archived ledger of job '{job}' cannot be deleted: {error}; the job is still there"
        ) from None
    for bucket, keys in KEYS.items():
        kv = bus.kv(bucket)
        for key in keys:
            if await kv.get(key(job)) is not None:
                await kv.delete(key(job))
    await store.delete(job)
    logger.info("job %s (%s) is deleted%s", job, record.name, "" if checkpoints is None else ", with its checkpoints")


def _check_unused(folder: Path, running: Iterable[JobEntry]) -> None:
    for job in running:
        path = (job.record().spec.get("model") or {}).get("path")
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise Conflict(f"job '{job.id}', which runs, began with the checkpoint {path}; wait for its end")


def _delete_files(folder: Path) -> None:
    try:
        for commit in folder.glob("*/COMMIT"):  # first: an interrupted removal leaves no complete checkpoint
            commit.unlink(missing_ok=True)
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # they were never on this host
    except OSError as error:
        raise Unavailable(f"the checkpoints in {folder} cannot be deleted: {error}; the job is still there") from None
