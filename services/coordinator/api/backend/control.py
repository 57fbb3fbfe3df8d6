"""Coordinator as the HTTP API uses it. The API imports nothing else of it, so each can be replaced alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock.services.coordinator.api.backend.files import Files
from penstock.services.coordinator.api.fine_tuning_models import (
    CheckpointPage,
    EventPage,
    FineTuningJob,
    FineTuningRequest,
    JobPage,
)
from penstock.services.coordinator.api.serving import Deployments
from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.shared.config.jobs.kinds import AnyJob
from penstock.shared.config.rewards.graders import AnyGrader
from penstock.shared.protocol.audit_log import AuditRecord
from penstock.shared.protocol.grading import GradeReply
from penstock.shared.protocol.jobs import DesiredState, JobRecord, Operation
from penstock.shared.protocol.keys import Scope, StoredKey
from penstock.shared.protocol.scaling import Pool, ScaleReply
from penstock.shared.protocol.webhooks import DeliveryState, StoredWebhook

__all__ = [
    "MAX_WEBHOOKS",
    "AuditLog",
    "Control",
    "FineTuning",
    "Graders",
    "Keys",
    "Letters",
    "Order",
    "Row",
    "Scaling",
    "Webhooks",
]


class FineTuning(Protocol):
    """Jobs that came from fine-tuning requests; every method that takes one raises NotFound for any other."""

    async def create(self, wanted: FineTuningRequest, *, key: str) -> FineTuningJob:
        """Submit a job.

        Raises:
            HttpProblem: 422, with pointers into the request, or into its files by line.
            ConfigError: it cannot run here.
        """
        ...

    async def get(self, job: str) -> JobRecord:
        """The record of a job. Raises NotFound."""
        ...

    def shown(self, record: JobRecord) -> FineTuningJob:
        """A record as OpenAI's clients read it."""
        ...

    async def page(
        self, *, after: str | None, limit: int, labels: dict[str, str], models: frozenset[str] | None
    ) -> JobPage:
        """Newest first; ``labels`` of the metadata, ``models`` as of ``Control.list_jobs``."""
        ...

    async def events(self, job: str, *, after: str | None, limit: int) -> EventPage:
        """Newest first."""
        ...

    async def checkpoints(self, job: str, *, after: str | None, limit: int) -> CheckpointPage:
        """Newest first."""
        ...


MAX_WEBHOOKS = 100
"""Of a deployment."""


class Webhooks(Protocol):
    """Webhooks, the same on every replica. Whatever takes an id raises NotFound for an unknown one."""

    async def create(
        self, url: str, types: list[str], *, job: str | None, description: str, key: str = ""
    ) -> StoredWebhook:
        """Store a new one, from the next event on; with a ``key`` that came before, the one that it made.

        Raises:
            Conflict: there are too many.
            ConfigError: the address.
        """
        ...

    async def find(self, id: str) -> StoredWebhook:
        """One of them."""
        ...

    async def list_all(self) -> list[StoredWebhook]:
        """Every one, oldest first."""
        ...

    async def change(self, id: str, changes: dict[str, Any]) -> StoredWebhook:
        """Write new values of fields. Raises ConfigError: the address."""
        ...

    async def delete(self, id: str) -> None:
        """Forget it."""
        ...

    async def state(self, id: str) -> DeliveryState:
        """How far it is."""
        ...

    async def test(self, id: str) -> str:
        """Post an event of no job once, now; empty, or why it was not taken."""
        ...


class Scaling(Protocol):
    """The workers of the deployment."""

    async def pool(self, pool: Pool) -> ScaleReply:
        """The workers there are. Raises Unavailable where nobody starts processes by request."""
        ...


class Graders(Protocol):
    """Runs graders outside of jobs."""

    async def grade(self, grader: AnyGrader, sample: str | None, item: dict[str, Any]) -> GradeReply:
        """One score for each part of ``grader``, in their order; without a sample its parts are only opened.

        Raises:
            ConfigError: the deployment has no model for it.
            Unavailable: no reward worker answers.
        """
        ...


class AuditLog(Protocol):
    """Records are added and read, never changed. Every method may raise Unavailable."""

    async def append(self, record: AuditRecord) -> None:
        """Store a record; on disk when this returns."""
        ...

    async def page(
        self, *, key: str, job: str, since: float | None, after: int, limit: int
    ) -> list[tuple[int, AuditRecord]]:
        """At most ``limit`` records with a sequence above ``after``, oldest first, each with its sequence.

        ``key`` and ``job`` ('': any) filter by equality; ``since`` (Unix seconds): only those stored from then on.
        """
        ...


Order = Literal["asc", "desc"]
Row = dict[str, Any]
"""A JSON object: str keys; values are JSON values (non-finite floats are sent as null)."""


class Keys(Protocol):
    """API keys, the same on every replica. Every method may raise Unavailable."""

    async def create(
        self, name: str, scopes: list[Scope], *, expires_at: datetime | None, rate_limit: str | None,
        models: list[str] | None = None, max_weight: float = 1.0, code_modules: list[str] | None = None,
    ) -> tuple[StoredKey, str]:  # fmt: skip
        """Store a new key durably; the key and its text, which nobody will ever see again."""
        ...

    async def find(self, id: str) -> StoredKey | None:
        """A key, None where there is none."""
        ...

    async def list_all(self) -> list[StoredKey]:
        """Every key, oldest first."""
        ...

    async def delete(self, id: str) -> None:
        """Revoke a key. Raises NotFound."""
        ...

    async def secret(self) -> bytes:
        """Secret that signs the keys of episodes: 32 bytes, made once for the deployment."""
        ...


class Letters(Protocol):
    """Dead letters, oldest first. Every method but ``page`` raises NotFound for one that the job does not have."""

    async def page(self, job: str, *, after: int, limit: int) -> list[Row]:
        """``id``, ``time``, ``stream``, ``sequence``, ``attempts``, ``reason``, ``draw`` (None: it stood for none)."""
        ...

    async def show(self, job: str, id: int) -> Row:
        """The same with ``nbytes``, ``headers`` and ``content``."""
        ...

    async def drop(self, job: str, id: int) -> None:
        """Forget it."""
        ...

    async def check_replayable(self, job: str, id: int) -> None:
        """Raises NotFound where it stood for no draw, and is neither an interaction nor feedback."""
        ...


class Control(Protocol):
    """The coordinator, as seen from HTTP.

    Every method that takes ``job`` (a full job id) raises NotFound for an unknown one. Every method may raise
    Unavailable (the bus does not answer: HTTP 503) or DeadlineError (HTTP 504). Replies are plain values: the API
    never keeps or changes them.
    """

    @property
    def keys(self) -> Keys:
        """The API keys of the deployment."""
        ...

    @property
    def audit_log(self) -> AuditLog:
        """Audit log."""
        ...

    @property
    def letters(self) -> Letters:
        """The dead letters of all jobs."""
        ...

    @property
    def webhooks(self) -> Webhooks:
        """Where events are posted."""
        ...

    @property
    def scaling(self) -> Scaling:
        """The workers of the deployment."""
        ...

    @property
    def files(self) -> Files:
        """Uploaded data sets."""
        ...

    @property
    def graders(self) -> Graders:
        """Graders outside of jobs."""
        ...

    @property
    def deployments(self) -> Deployments:
        """Checkpoints of jobs as models."""
        ...

    @property
    def fine_tuning(self) -> FineTuning:
        """Jobs in the shape of OpenAI's."""
        ...

    async def submit(self, spec: AnyJob, raw: Row, *, key: str = "", fine_tuning: Row | None = None) -> JobRecord:
        """Store a new job durably and return its record; ``raw`` is the job file as the user wrote it.

        With the same ``key`` (of its sender and request) it is the same job, on every replica. ``fine_tuning``: the
        request that the job file was made from.

        Raises:
            ConfigError: the job is valid as a file but cannot run here (data missing, memory, budgets).
            HttpProblem: 507, the ledger has no room for another job.
            StreamFull: no room; the client may retry.
        """
        ...

    async def dry_run(self, spec: AnyJob) -> Row:
        """Effects of ``submit``, without it: resolved batch algebra, data summary, memory.

        Raises:
            ConfigError: as for ``submit``.
        """
        ...

    async def get(self, job: str) -> JobRecord:
        """The newest record (from memory or the bucket; called up to four times a second by each long poll)."""
        ...

    async def job_entries(self, models: frozenset[str] | None = None) -> list[JobEntry]:
        """Every job in short, oldest first, or those with one of these names or ids; costs no read of the records."""
        ...

    async def list_jobs(
        self,
        *,
        after: str | None,
        limit: int,
        order: Order,
        phase: str | None,
        name: str | None,
        kind: str | None,
        labels: Mapping[str, str],
        models: frozenset[str] | None = None,
    ) -> list[JobRecord]:
        """At most ``limit`` records in id order (id = creation time), strictly past ``after`` in that order.

        ``phase``, ``name``, ``kind`` and each of ``labels`` (of ``metadata``) filter by equality; of ``models`` are
        jobs with one of these names or ids. An
        ``after`` that does not exist is still a place in the order.
        The API asks for one more than a page holds to learn whether there is a next one.
        """
        ...

    async def set_desired(
        self, job: str, state: DesiredState, *, by: str, force: bool = False, checkpoint: bool = True
    ) -> JobRecord:
        """Write what the user wants and return the record after the write; the same state twice changes nothing.

        ``by``: id of the key that asks, for the events of the job.

        With ``cancelled``: ``force``, do not drain, do not checkpoint; without ``checkpoint``, drain only.

        Raises:
            Conflict: the job is terminal, or is being cancelled and something else is asked.
        """
        ...

    async def amend(self, job: str, edit: Callable[[JobRecord], AnyJob], *, by: str) -> JobRecord:
        """Write the job file that ``edit`` makes of the record, in one atomic step; ``edit`` may be called again.

        ``by``: as for ``set_desired``.

        Raises:
            Conflict: the job is terminal.
            ConfigError: the job has no room here any more (byte budget).
        """
        ...

    async def delete(self, job: str, *, checkpoints: bool) -> None:
        """Remove a finished job with its ledger, groups, metrics, events and feedback; safe to repeat.

        ``checkpoints``: their files on the coordinator's host, too.

        Raises:
            Conflict: it has not ended, or a job that runs began with one of these checkpoints.
        """
        ...

    async def extend(self, job: str, max_updates: int, *, by: str) -> tuple[JobRecord, list[str]]:
        """Let a job that has ended go on until ``max_updates`` are done; and what changes by that, for people.

        Raises:
            Conflict: it has not ended, or cannot go on; says why.
        """
        ...

    async def begin_operation(self, job: str, operation: Operation) -> JobRecord:
        """Have something done; the record's ``operations`` tell when it was. Raises Conflict: the job is terminal."""
        ...

    async def events(self, job: str, *, after: int, limit: int) -> list[tuple[int, Row]]:
        """At most ``limit`` events with a sequence above ``after``, oldest first, each with its sequence.

        A row has at least ``time`` (Unix seconds), ``level`` (info|warning|error), ``type`` (such as ``phase``,
        ``step``, ``checkpoint``, ``worker``) and ``message``.
        """
        ...

    def follow_events(self, job: str, *, after: int) -> AsyncIterator[tuple[int, Row]]:
        """As ``events``, without a limit: waits for new ones. Ends after the last event of a terminal job.

        An async generator; the API closes it when the client goes away. Sequences rise strictly.
        """
        ...

    async def newest_event(self, job: str) -> int:
        """Sequence of the newest event of a job; 0: it has none."""
        ...

    async def keeps_event(self, seq: int) -> bool:
        """True if an event with this sequence is there; where it is not, those after it may be gone, too."""
        ...

    async def metrics(
        self,
        job: str,
        *,
        names: list[str] | None,
        step_from: int | None,
        step_to: int | None,
        max_points: int,
    ) -> Row:
        """``{"steps": [int], "wall": [Unix seconds], "series": {name: [float | None]}}``: all lists equally long.

        ``names`` None: all of them. Bounds are inclusive. At most ``max_points`` columns (first and last kept).
        """
        ...

    async def workers(self, job: str) -> list[Row]:
        """One row per live or recently lost worker of the job.

        ``service``, ``worker``, ``host``, ``pid``, ``ready``, ``age_s`` (of the last heartbeat), ``alive``, and the
        heartbeat's entry for this job (``version``, ``running``, ``waiting_for``, ``since``, ...).
        """
        ...

    async def samples(
        self, job: str, *, step: int | None, limit: int, sort: str | None, after: str | None,
        min_reward: float | None, env: str | None,
    ) -> list[Row]:  # fmt: skip
        """Groups and their completions, newest step first unless ``step`` is given; an evaluation job has step 0.

        ``sort``: ``reward``, ``-reward``, ``length``, ``-length`` or None (order in the batch). ``after``: id of the
        last row of the page before. ``env``: only those whose prompts are from the source of that name. A row has
        ``id``, ``step``, ``draw``, ``index``, ``env``, ``prompt``, ``completion``, ``answer``, ``reward``,
        ``advantage``, ``tokens``, ``min_version``, ``max_version``, ``worker``.

        Raises:
            NotFound: there is no such job, or it has no source of that name.
        """
        ...

    async def sample(self, job: str, row_id: str) -> Row:
        """One of these rows, with its tokens, their texts, log-probs, mask, versions; siblings. Raises NotFound."""
        ...

    async def videos(self, job: str) -> list[Row]:
        """Films of held-out episodes, by version and reset id.

        ``name``, ``version``, ``reset_id``, ``task``, ``success``, ``reward`` (return), ``steps``, ``error`` (why there
        is none) and ``href``.
        """
        ...

    async def video(self, job: str, name: str) -> bytes:
        """An MP4 file. Raises NotFound."""
        ...

    async def timeline(self, job: str, *, step: int | None, limit: int) -> list[Row]:
        """Spans (``step``, ``stage``, ``start``, ``end``) of update ``step``, or of the newest ``limit``."""
        ...

    async def metric_names(self, job: str) -> list[Row]:
        """``name``, ``count``, ``first_step``, ``last_step`` and ``last`` value of every metric."""
        ...

    async def checkpoints(self, job: str) -> list[Row]:
        """The checkpoints of a job, oldest first.

        ``number``, ``version``, ``digest``, ``path``, ``time``, ``reason``, ``nbytes``, ``files`` (``name``,
        ``nbytes``, ``sha256``), ``available`` (the files are on the coordinator's host) and the flags ``initial``,
        ``best``, ``newest``, ``final``.
        """
        ...

    async def checkpoint(self, job: str, number: int) -> Row:
        """One of them. Raises NotFound."""
        ...

    async def checkpoint_file(self, job: str, number: int, name: str) -> tuple[Path, str]:
        """Path and sha256 of a file of a committed checkpoint.

        Raises:
            NotFound: no such checkpoint, or its manifest does not name such a file.
            Conflict: the files are not on the coordinator's host.
        """
        ...

    async def delete_checkpoint(self, job: str, number: int) -> None:
        """Remove the files of a checkpoint. Raises NotFound, or Conflict: the run needs it, or they are not here."""
        ...

    async def artifact(self, sha256: str) -> Path:
        """A file of some committed checkpoint with this content. Raises NotFound."""
        ...

    async def why(self, job: str) -> list[Row]:
        """Waits of the job now, most important first; empty when it waits for nothing.

        ``waiting_for`` (a phrase), ``subject``, ``id``, ``holder`` (worker or None), ``age_s``.
        """
        ...

    async def audit(self, job: str) -> Row:
        """Check the ledger against itself and the streams.

        ``{"ok": bool, "equation": {...}, "checks": [{"name", "ok", "detail"}], "violations": [str]}``.
        """
        ...

    async def logs(self, job: str, *, service: str | None, tail: int, after: str | None, unnamed: bool) -> Row:
        """``{"lines": [{"service", "worker", "text"}], "next": cursor}``: the last ``tail`` lines, or those after a
        cursor that an earlier reply gave. The cursor is opaque to the API."""
        ...

    def replay(
        self, job: str, *, from_batch: int | None, to_batch: int | None, feedback: bool = False
    ) -> AsyncIterator[Row]:
        """Have the trainer repeat sealed batches from a retained checkpoint and compare; rows of progress.

        An async generator. Rows: ``{"batch", "total", "match", "detail"}``; the last one has ``"done": true``,
        ``"ok": bool`` and ``"summary": str``. With ``feedback`` each has ``"told"``: see ``told_by_batch``.

        Raises:
            Conflict: nothing can be replayed now (before the first row).
        """
        ...

    async def limits(self) -> Row:
        """Facts for ``GET /v1/limits`` beside the API's own: ``durability`` (fsync|page-cache|unverified), bytes."""
        ...

    async def health(self) -> tuple[bool, Row]:
        """Ready to serve, and ``{check: {"ok": bool, "detail": str}}``. Bounded by 1 s; never raises."""
        ...
