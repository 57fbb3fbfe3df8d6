"""Blocking client, for scripts, notebooks and the command line."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from penstock.client import calls, flows
from penstock.client import feedback as said
from penstock.client.answers import authorities, base_url, body_of, default_headers, unreachable
from penstock.client.audit_log import AuditLog
from penstock.client.calls import Call, Goal, JobFile, Order, Records, Row, Rows
from penstock.client.dead_letters import DeadLetters
from penstock.client.download import archive, artifact, film, plan_downloads
from penstock.client.episodes import Episodes
from penstock.client.feedback_tokens import FeedbackTokens
from penstock.client.files import Files, Graders
from penstock.client.keys import Keys
from penstock.client.models import Models
from penstock.client.patience import Attempts
from penstock.client.quarantine import Quarantine
from penstock.client.results import LogLine
from penstock.client.results.reading import one
from penstock.client.sending import complete, runs, sends
from penstock.client.streams import Streams
from penstock.client.users import Users
from penstock.client.versions import Versions
from penstock.client.webhooks import Webhooks
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.scaling import Pool

__all__ = ["Client"]

T = TypeVar("T")


class Client:
    """Blocking client of the job API. Failed requests raise the errors of ``penstock.shared.errors``.

    The client retries a request up to ``retries`` times if the server is unreachable or asks for a retry. A POST
    carries an idempotency key, so that retries have no second effect. If the server is still processing an earlier
    attempt of a POST, its repetition waits for that attempt, at most ``patience_s`` seconds. ``wait``, downloads,
    and followed events and logs tolerate an unreachable server for ``patience_s`` seconds. Methods that wait for an
    operation, like ``scale``, tolerate it until their time-out.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 3,
        patience_s: float = 60.0,
    ) -> None:
        self.url = base_url(url)
        self._retries, self._timeout_s, self._patience_s = retries, timeout_s, patience_s
        self.keys, self.audit_log = Keys(self._send), AuditLog(self._send)
        self.dead_letters = DeadLetters(self._send)
        self.webhooks = Webhooks(self._send)
        self.files, self.graders = Files(self._send), Graders(self._send)
        self.versions = Versions(self._send)
        self.quarantine = Quarantine(self._send)
        self.feedback_tokens, self.users = FeedbackTokens(self._send), Users(self._send)
        self.episodes, self.models = Episodes(self._send), Models(self._send)
        self._http = httpx.Client(
            base_url=self.url, headers=default_headers(api_key, self.url), timeout=timeout_s,
            verify=authorities(self.url),
        )  # fmt: skip
        self._streams = Streams(self._http, self.url, timeout_s, patience_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, job: JobFile, *, idempotency_key: str | None = None) -> JobRecord:
        """Submit a job; first upload the code and data that its file names by relative paths.

        Repeated calls with the same ``idempotency_key`` submit the job once. Raises ConfigError with one line per flaw.
        """
        return complete(flows.submit(job, idempotency_key), self._send)

    def dry_run(self, job: JobFile) -> Row:
        """Validate a job and return its plan; code and data are uploaded, and a reward worker tries the code."""
        return complete(flows.dry_run(job), self._send)

    def get(self, job: str) -> JobRecord:
        """Show a job by its id. Raises NotFound."""
        return self._send(calls.get(job))

    def find(self, ref: str) -> JobRecord:
        """Show a job by id, unique prefix of an id, or name (the newest). Raises NotFound, Conflict if ambiguous."""
        return complete(flows.find(ref), self._send)

    def list(
        self,
        *,
        limit: int = 20,
        after: str | None = None,
        order: Order = "desc",
        phase: str | None = None,
        name: str | None = None,
        kind: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Records:
        """List up to ``limit`` jobs, newest first unless ``order`` is ``asc``; ``metadata``: required labels."""
        wanted = {"order": order, "phase": phase, "name": name, "kind": kind, "metadata": metadata}
        return complete(flows.pages(limit, after, **wanted), self._send)

    def wait(self, job: str, *, goal: Goal = "terminal", timeout_s: float | None = None) -> JobRecord:
        """Wait until a job ends, or reaches the phase ``goal``, and return its record.

        Raises:
            DeadlineError: the job did not reach ``goal`` within ``timeout_s`` seconds.
            Unavailable: the server was unreachable for longer than ``patience_s``.
        """
        return complete(flows.wait(job, goal, timeout_s, self._patience_s), self._send)

    def cancel(self, job: str, *, force: bool = False, checkpoint: bool = True) -> JobRecord:
        """Request that a job ends; ``force`` skips its drain and checkpoint, ``checkpoint=False`` only the checkpoint.

        Raises:
            Conflict: the job has ended.
        """
        return self._send(calls.steer(job, "cancel", force=force, checkpoint=checkpoint))

    def delete(self, job: str, *, checkpoints: bool = False) -> None:
        """Delete a job that has ended, with all its records; ``checkpoints`` deletes the checkpoint files, too.

        Raises:
            Conflict: the job has not ended, or a running job started from one of its checkpoints.
        """
        self._send(Call("DELETE", f"/v1/jobs/{job}", calls.nothing, {"checkpoints": checkpoints or None}))

    def pause(self, job: str) -> JobRecord:
        """Request that a job stops after its current update."""
        return self._send(calls.steer(job, "pause"))

    def resume(self, job: str) -> JobRecord:
        """Resume a paused job."""
        return self._send(calls.steer(job, "resume"))

    def amend(self, job: str, patch: Mapping[str, Any], *, revision: int | None = None, wait_s: float = 5.0) -> Row:
        """Change a job file while the job runs, and return the changed job.

        ``applies_at_step`` in the result is the first update with the change, or None.

        Args:
            patch: part of a job file, as a JSON merge patch; None resets a key to its default.
            revision: fail if the job was changed since it had this revision.
            wait_s: seconds to wait until the job applies the change.

        Raises:
            ConfigError: the job would not be valid, or the key is not amendable.
            Conflict: the job has ended, or was changed since ``revision``.
        """
        return self._send(calls.amend(job, patch, revision, wait_s))

    def extend(self, job: str, max_updates: int) -> Row:
        """Continue an ended job until it has made ``max_updates`` updates in total, including its earlier updates.

        ``notes`` in the result describes side effects.

        Optimizer state, schedule position, data order, numbering and ledger continue.

        Raises:
            Conflict: the job has not ended, or cannot continue; the message has the reason.
        """
        return self._send(calls.extend(job, max_updates))

    # -- views -------------------------------------------------------------------------------------------------------

    def events(self, job: str, *, after: int = 0, follow: bool = True) -> Iterator[Row]:
        """Yield each event after number ``after`` once, oldest first; with ``follow`` also new events until the end."""
        if follow:
            yield from self._streams.follow(f"/v1/jobs/{job}/events", after)
            return
        more = True
        while more:
            rows, more = self._send(calls.events_page(job, after, 1000))
            for row in rows:
                after = row["id"]
                yield row

    def metrics(
        self,
        job: str,
        *,
        names: str | Sequence[str] | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        max_points: int = 1000,
    ) -> Row:
        """Return ``steps``, ``wall`` (Unix seconds) and ``series`` (metric name -> values).

        ``names``: metrics to return, as a list or comma-separated; None for all.
        """
        params = {"names": names, "step_from": step_from, "step_to": step_to, "max_points": max_points}
        return self._send(calls.view(job, "metrics", **params))

    metric_names = sends(calls.metric_names)
    samples = sends(calls.samples)
    sample = sends(calls.sample)
    timeline = sends(calls.timeline)

    def workers(self, job: str, *, history: bool = False) -> Rows:
        """List the workers of the job; ``history`` adds ``spans``, the states of a worker in the last five minutes."""
        return self._send(calls.rows(job, "workers", history=history or None))

    def amendable(self, job: str) -> Rows:
        """List the numeric settings that ``amend`` may change, with their values and ranges.

        Fields: key, value, type, minimum (inclusive) or above (exclusive), optional (None is valid), description.
        """
        return self._send(calls.rows(job, "amendable"))

    def videos(self, job: str) -> Rows:
        """List videos of held-out episodes: name, version, reset_id, success, reward (return), steps, error."""
        return self._send(calls.rows(job, "videos"))

    def why(self, job: str) -> Rows:
        """List what the job waits for now, most important first. Each row has ``waiting_for``, ``subject``, ``id``,
        ``holder`` and ``age_s``."""
        return self._send(calls.rows(job, "why"))

    def audit(self, job: str) -> Row:
        """Check the ledger; return ``ok``, ``equation`` (the counts in drawn = trained + dropped + in flight),
        ``checks`` and ``violations``."""
        return self._send(calls.view(job, "audit"))

    def logs(self, job: str, *, service: str | None = None, tail: int = 100, after: str | None = None) -> Row:
        """Return ``lines`` of the services' logs, and ``next``, which a later call passes as ``after`` to continue."""
        return self._send(calls.view(job, "logs", service=service, tail=tail, after=after))

    def follow_logs(
        self, job: str, *, service: str | None = None, tail: int = 100, after: str | None = None
    ) -> Iterator[LogLine]:
        """Yield the lines of the services' logs until the job ends, starting with the last ``tail`` of each log.

        ``after``: ``next`` of an earlier reply of ``logs``: start after its lines, and ignore ``tail``.

        Raises NotFound: no such job, or no log of ``service``.
        """
        read, wanted = one(LogLine), {"follow": True, "service": service, "tail": tail}
        for row in self._streams.follow(f"/v1/jobs/{job}/logs", after or "", **wanted):
            for line in row["lines"]:
                yield read(line)

    def replay(
        self, job: str, *, from_batch: int | None = None, to_batch: int | None = None, feedback: bool = False
    ) -> Iterator[Row]:
        """Train sealed batches again and compare the results with the recorded ones; yield progress rows.

        The last row has ``done``, ``ok`` and ``summary``. ``feedback``: add ``admissions`` to each row: one object
        for each group of the batch from live agents, with the ids of its answers and of the feedback on them.
        """
        body = calls.replay_of(from_batch, to_batch, feedback=feedback)
        yield from self._streams.rows(f"/v1/jobs/{job}/replay", body)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self, job: str) -> Rows:
        """List the checkpoints of the job, oldest first. Each row has the number, version, reason, size, files with
        their SHA-256, and flags."""
        return self._send(calls.rows(job, "checkpoints"))

    def checkpoint(self, job: str, number: int) -> Row:
        """Return one checkpoint. Raises NotFound."""
        return self._send(calls.view(job, f"checkpoints/{number}"))

    def delete_checkpoint(self, job: str, number: int) -> None:
        """Delete a checkpoint's files. Raises NotFound, or Conflict if the job needs them or another host has them."""
        self._send(Call("DELETE", f"/v1/jobs/{job}/checkpoints/{number}", calls.nothing))

    def download_checkpoint(
        self, job: str, number: int, directory: Path, *, names: Collection[str] | None = None
    ) -> None:
        """Download a checkpoint (or some of its files) into ``directory``; every file is verified by its sha256.

        Files that exist unchanged are skipped, and interrupted downloads are resumed.

        Raises:
            Conflict: the files are not on the coordinator's host.
            CheckpointError: a received file has another size or hash than the committed file.
            Unavailable: the server was unreachable for longer than ``patience_s``.
        """
        row = self.checkpoint(job, number)
        self._streams.fetch(plan_downloads(job, row, directory, names))

    def download_archive(self, job: str, number: int, path: Path) -> None:
        """Download a checkpoint as one tar to ``path``; an interrupted download starts over.

        Raises:
            NotFound: no such checkpoint.
            Conflict: its files are not on the coordinator's host.
            Unavailable: the server was unreachable for longer than ``patience_s``.
        """
        self._streams.fetch([archive(job, number, path)])

    def download_video(self, job: str, name: str, path: Path) -> None:
        """Download a video of a held-out episode to ``path``; ``videos`` lists the names of videos.

        Raises:
            NotFound: no such video, or it was dropped.
            Unavailable: the server was unreachable for longer than ``patience_s``.
        """
        self._streams.fetch([film(job, name, path)])

    def download_artifact(self, sha256: str, path: Path) -> None:
        """Download the file with this SHA-256 from any checkpoint to ``path``, and verify it.

        An interrupted download is resumed.

        Raises:
            NotFound: no checkpoint on the coordinator's host has the file.
            CheckpointError: the received bytes have another hash.
            Unavailable: the server was unreachable for longer than ``patience_s``.
        """
        self._streams.fetch([artifact(sha256, path)])

    def checkpoint_now(self, job: str, *, timeout_s: float = 120.0) -> Row:
        """Take a checkpoint and wait for it; return its ``number`` and ``path``.

        Raises:
            Conflict: the job has ended, or ends before the checkpoint.
            DeadlineError: the checkpoint did not exist within ``timeout_s``.
        """
        return complete(flows.checkpoint_now(job, timeout_s), self._send)

    def scale(self, job: str, pool: Pool, replicas: int, *, timeout_s: float = 180.0) -> Row:
        """Set the number of workers of a service (`rollout`, `reward`, `env`) and wait until they are ready.

        Raises:
            Conflict: no supervisor can start processes, the job has ended, or a newer request replaced this one.
            DeadlineError: the workers were not ready within ``timeout_s``.
        """
        return complete(flows.scale(job, pool, replicas, timeout_s), self._send)

    def limits(self) -> Row:
        """Return limits and guarantees of the deployment."""
        return self._send(calls.about("limits"))

    def version(self) -> Row:
        """Return the versions that the server runs."""
        return self._send(calls.about("version"))

    # -- live agents -------------------------------------------------------------------------------------------------

    feedback = sends(said.send)
    prefer = sends(said.prefer)
    correct = sends(said.correct)
    post_interaction = sends(said.post_interaction)
    feedback_batch = runs(said.batch)
    feedback_status = sends(said.status)
    retract = sends(said.retract)
    funnel = sends(calls.funnel)
    interaction = sends(calls.interaction)

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def _send(self, call: Call[T]) -> T:
        headers, query = call.headers(), call.query()
        timeout = call.timeout_s or self._timeout_s
        attempts = Attempts(self._retries, self._patience_s)
        while True:
            response: httpx.Response | None = None
            failure: httpx.TransportError | None = None
            try:
                response = self._http.request(
                    call.method, call.path, params=query, content=call.body, headers=headers, timeout=timeout
                )
                if response.is_success:
                    break
            except httpx.TransportError as error:
                failure = error
            pause = attempts.pause_s(response)
            if pause is None:
                break
            time.sleep(pause)
        if response is None:
            raise unreachable(self.url, failure)
        return call.read(body_of(response))
