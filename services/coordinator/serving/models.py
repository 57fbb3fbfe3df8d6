"""Jobs that clients can address as models: active training jobs and deployments."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from penstock.services.coordinator.jobs.job_index import entry_of
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.errors import ConfigError, NotFound, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import JobRecord, ModelOrigin
from penstock.shared.transport.bus import Bus, Entry

__all__ = ["ModelTable", "Served"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A running job, which clients address by the name of its model. ``version``: policy version that serves all
    conversations except those of the canary version.

    ``temperature`` applies to requests that name none, and with ``forced_sampling`` to all; ``generation`` is the
    generation of the job record that has these settings; ``created``: Unix seconds.
    """

    name: str
    job: str
    online: bool
    version: int
    created: int
    hold_s: float
    temperature: float = 1.0
    generation: int = 1
    forced_sampling: bool = False
    canary: tuple[int, float] | None = None
    """Canary version, and the share of the conversations that it serves; None without a canary."""
    consent: Literal["opt_out", "opt_in"] = "opt_out"
    """Consent that the job requires of a user before it trains on the user's conversations."""
    strict_recording: bool = False
    """True if an answer that could not be recorded must be refused."""
    found_episodes_s: float = 0.0
    """For requests that name no episode: a chat that continues an answer joins the answer's episode for this time after
    the answer (seconds). 0: the job credits each answer alone."""
    promoted_at: int | None = None
    """Time of the served version's promotion (Unix seconds), for a job with a promotion gate."""
    trains: bool = True
    """False for a deployment, whose policy never changes."""
    origin: ModelOrigin | None = None
    """Checkpoint that a deployment serves."""

    def at(self, version: int, canary: tuple[int, float] | None, promoted_at: int | None) -> Served:
        """Return a copy with another served version, canary version and promotion time."""
        return replace(self, version=version, canary=canary, promoted_at=promoted_at)


class ModelTable:
    """Cache of the job records, so that a request needs no look-up on the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._served: dict[str, Served] = {}
        self.current = False

    async def run(self) -> None:
        """Follow the job records until cancelled."""
        for entry in await self._bus.kv(subjects.JOBS).entries():
            self._change(entry)
        self.current = True
        async for entry in self._bus.kv(subjects.JOBS).watch(""):
            self._change(entry)

    def _change(self, entry: Entry) -> None:
        try:
            job = entry_of(entry.key, entry.value, entry.revision) if entry.value is not None else None
            if job is None or job.finished:
                self._served.pop(entry.key, None)
            else:
                self._take(job.record())
        except ProtocolError as error:
            logger.error("%s", error)

    def _take(self, record: JobRecord) -> None:
        known = self._served.get(record.id)
        if known is not None and known.generation == record.generation:
            self._served[record.id] = known.at(_served_version(record), _canary(record), _promoted_at(record))
            return
        try:
            config = parse_job(record.spec)
        except ConfigError as error:
            logger.error("job record '%s' is unreadable: %s", record.id, error)
            return
        if isinstance(config, ServingJob):
            self._served[record.id] = Served(
                name=record.name, job=record.id, online=False, version=0, created=int(record.created_at.timestamp()),
                hold_s=config.serving.hold_s, temperature=config.sampling.temperature, generation=record.generation,
                trains=False, origin=record.origin,
            )  # fmt: skip
        elif isinstance(config, JobConfig):
            online = config.online if isinstance(config, OnlineJob) else None
            self._served[record.id] = Served(
                name=record.name, job=record.id, online=online is not None, version=_served_version(record),
                created=int(record.created_at.timestamp()), hold_s=(online or OnlineConfig()).hold_s,
                temperature=config.sampling.temperature, generation=record.generation, canary=_canary(record),
                forced_sampling=(online or OnlineConfig()).forced_sampling,
                consent=(online or OnlineConfig()).consent,
                strict_recording=(online or OnlineConfig()).strict_recording,
                found_episodes_s=_found_episodes_s(online), promoted_at=_promoted_at(record),
            )  # fmt: skip

    def rows(self) -> list[Served]:
        """Return one model for each name. Online jobs and deployments take precedence over other jobs, then newer jobs
        over older ones."""
        best: dict[str, Served] = {}
        for served in sorted(self._served.values(), key=lambda one: (one.online or not one.trains, one.job)):
            best[served.name] = served
        return sorted(best.values(), key=lambda served: served.name)

    def find(self, name: str) -> Served:
        """Return the model with the name ``name``, or the model of the job with the id ``name``.

        Raises:
            NotFound: no running job has that name.
            Unavailable: the job records are not loaded.
        """
        if not self.current:
            raise Unavailable("the jobs are not read yet; retry in a moment")
        found = self._served.get(name) or next((served for served in self.rows() if served.name == name), None)
        if found is None:
            raise NotFound(f"no running job serves a model '{name[:80]}'")
        return found


def _found_episodes_s(online: OnlineConfig | None) -> float:
    """Return ``Served.found_episodes_s``: a chat that continues an earlier answer joins the episode of that answer if
    it arrives within this time (seconds). Return 0 if the job does not find episodes in chats.

    The time is half of the idle time that ends an episode, so that an answer that starts in time also ends in time.
    """
    return online.idle_ttl_s / 2 if online is not None and online.episodes == "found" else 0.0


def _promoted_at(record: JobRecord) -> int | None:
    since = record.status.promoted_at
    return None if since is None else int(since.timestamp())


def _served_version(record: JobRecord) -> int:
    """Return the version that serves requests: the last promoted one if the job promotes versions, else the newest."""
    served = record.status.served_version
    return record.status.policy_version if served is None else served


def _canary(record: JobRecord) -> tuple[int, float] | None:
    """Return the canary version and its share of the conversations, or None."""
    row = record.status.canary
    return None if row is None else (int(row["version"]), float(row["share"]))
