"""The services of the coordinator that the HTTP API calls, and how they are wired to one bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.services.coordinator.access import AuditLog, KeyStore
from penstock.services.coordinator.deployments import Deployments
from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.finetuning.service import FineTuningService
from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.events import JobEvents
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.scaling import Scaler
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.dead_letters import DeadLetterQueue
from penstock.services.coordinator.leader.leader_rpc import Leader, LeaderRpc
from penstock.services.coordinator.origins import Origins
from penstock.services.coordinator.queries.browse import SampleBrowser, VideoBrowser
from penstock.services.coordinator.queries.charts import Charts
from penstock.services.coordinator.queries.diagnosis import Diagnosis
from penstock.services.coordinator.queries.health import Health
from penstock.services.coordinator.steering import Steering
from penstock.services.coordinator.submission import Submissions
from penstock.services.coordinator.training.checkpoints import Artifacts, Checkpoints
from penstock.services.coordinator.training.ledger_cache import LedgerCache
from penstock.services.coordinator.webhooks.store import WebhookStore
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.files import FILES
from penstock.shared.runtime.ledger import LedgerArchive, ledger_archive
from penstock.shared.transport.bus import Bus

__all__ = ["Services", "build_services"]


@dataclass(frozen=True, kw_only=True)
class Services:
    """All services that the HTTP API calls, one attribute for each.

    A method that takes ``job`` (a full job id) raises NotFound for an unknown one. Every method that reads the bus may
    raise Unavailable (HTTP 503) or DeadlineError (HTTP 504). Return values are plain data, which the API neither keeps
    nor changes.
    """

    settings: ServiceSettings
    jobs: JobStore
    submissions: Submissions
    steering: Steering
    scaling: Scaler
    events: JobEvents
    charts: Charts
    samples: SampleBrowser
    videos: VideoBrowser
    checkpoints: Checkpoints
    artifacts: Artifacts
    diagnosis: Diagnosis
    dead_letters: DeadLetterQueue
    leader: LeaderRpc
    archive: LedgerArchive
    health: Health
    keys: KeyStore
    audit_log: AuditLog
    webhooks: WebhookStore
    files: FileStore
    graders: GraderBench
    origins: Origins
    deployments: Deployments
    fine_tuning: FineTuningService


def build_services(
    bus: Bus, jobs: JobStore, members: Members, runners: Mapping[str, Leader], settings: ServiceSettings
) -> Services:
    """Return the services of one coordinator. Does no I/O.

    Args:
        runners: the leaders of jobs in this process, by job id; empty on a replica that does not lead.
    """
    archive, folder = ledger_archive(settings.data_dir), settings.data_dir / "checkpoints"
    ledgers = LedgerCache(bus, jobs.get, archive)
    leader, events, graders = LeaderRpc(bus, runners), JobEvents(bus, jobs), GraderBench(bus, settings)
    checkpoints = Checkpoints(ledgers, settings.data_dir)
    files = FileStore(settings.data_dir / FILES, max_bytes=settings.files_bytes, max_files=settings.max_files)
    origins = Origins(jobs, ledgers, files.model, settings.data_dir)
    submissions = Submissions(bus, jobs, members, settings, origins=origins, graders=graders)
    return Services(
        settings=settings,
        jobs=jobs,
        submissions=submissions,
        steering=Steering(bus, jobs, ledgers, archive, settings),
        scaling=Scaler(bus, jobs),
        events=events,
        charts=Charts(bus, jobs, archive),
        samples=SampleBrowser(bus, jobs, checkpoints, archive),
        videos=VideoBrowser(bus, jobs),
        checkpoints=checkpoints,
        artifacts=Artifacts(folder),
        diagnosis=Diagnosis(bus, jobs, members, leader=leader, archive=archive, logs=settings.data_dir / "logs"),
        dead_letters=DeadLetterQueue(bus),
        leader=leader,
        archive=archive,
        health=Health(bus, leader, settings),
        keys=KeyStore(bus),
        audit_log=AuditLog(bus),
        webhooks=WebhookStore(bus, private=settings.webhook_private),
        files=files,
        graders=graders,
        origins=origins,
        deployments=Deployments(jobs, origins, submissions, settings),
        fine_tuning=FineTuningService(
            submissions, files, settings, jobs=jobs, events=events, checkpoints=checkpoints, origins=origins
        ),
    )
