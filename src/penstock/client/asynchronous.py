"""The client for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from penstock.client import calls, flows
from penstock.client import feedback as said
from penstock.client.answers import base_url, body_of, default_headers, unreachable
from penstock.client.audit_log import AsyncAuditLog
from penstock.client.calls import Call, Goal, JobFile, Order, Records, Row, Rows
from penstock.client.dead_letters import AsyncDeadLetters
from penstock.client.download import archive, artifact, film, plan_downloads
from penstock.client.episodes import AsyncEpisodes
from penstock.client.feedback_tokens import AsyncFeedbackTokens
from penstock.client.files import AsyncFiles, AsyncGraders
from penstock.client.keys import AsyncKeys
from penstock.client.models import AsyncModels
from penstock.client.patience import Attempts
from penstock.client.quarantine import AsyncQuarantine
from penstock.client.results import LogLine
from penstock.client.results.reading import one
from penstock.client.sending import awaits, awaits_all, complete_async
from penstock.client.streams import AsyncStreams
from penstock.client.users import AsyncUsers
from penstock.client.versions import AsyncVersions
from penstock.client.webhooks import AsyncWebhooks
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.scaling import Pool

__all__ = ["AsyncClient"]

T = TypeVar("T")


class AsyncClient:
    """The job API. Failed requests raise the errors of ``penstock.shared.errors``.

    Requests are repeated up to ``retries`` times when the server cannot be reached or asks for it; a POST carries an
    idempotency key, so it has one effect. While the server still works on an earlier attempt of a POST, its repetition
    waits for that one, for ``patience_s`` at most. Calls that wait put up with an absent server for ``patience_s``.
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
        self.keys, self.audit_log = AsyncKeys(self._send), AsyncAuditLog(self._send)
        self.dead_letters = AsyncDeadLetters(self._send)
        self.webhooks = AsyncWebhooks(self._send)
        self.files, self.graders = AsyncFiles(self._send), AsyncGraders(self._send)
        self.versions = AsyncVersions(self._send)
        self.quarantine = AsyncQuarantine(self._send)
        self.feedback_tokens, self.users = AsyncFeedbackTokens(self._send), AsyncUsers(self._send)
        self.episodes, self.models = AsyncEpisodes(self._send), AsyncModels(self._send)
        self._http = httpx.AsyncClient(base_url=self.url, headers=default_headers(api_key, self.url), timeout=timeout_s)
        self._streams = AsyncStreams(self._http, self.url, timeout_s, patience_s)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    # -- jobs --------------------------------------------------------------------------------------------------------

    async def submit(self, job: JobFile, *, idempotency_key: str | None = None) -> JobRecord:
        """Submit a job, and before it the code that its file names by ``./FILE.py:FUNCTION``.

        The same key submits it once. Raises ConfigError with one line per flaw.
        """
        return await complete_async(flows.submit(job, idempotency_key), self._send)

    async def dry_run(self, job: JobFile) -> Row:
        """Validate a job and show what it would do; its code is uploaded, and tried by a reward worker."""
        return await complete_async(flows.dry_run(job), self._send)

    async def get(self, job: str) -> JobRecord:
        """Show a job by its id. Raises NotFound."""
        return await self._send(calls.get(job))

    async def find(self, ref: str) -> JobRecord:
        """Show a job by id, unique prefix of an id, or name (the newest). Raises NotFound, Conflict if ambiguous."""
        return await complete_async(flows.find(ref), self._send)

    async def list(
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
        """Up to ``limit`` jobs, newest first; as many requests as that takes. ``metadata``: labels that they carry."""
        wanted = {"order": order, "phase": phase, "name": name, "kind": kind, "metadata": metadata}
        return await complete_async(flows.pages(limit, after, **wanted), self._send)

    async def wait(self, job: str, *, goal: Goal = "terminal", timeout_s: float | None = None) -> JobRecord:
        """Wait until a job is terminal (or reaches another ``goal``) and show it.

        Raises:
            DeadlineError: it did not within ``timeout_s``.
            Unavailable: the server was away for longer than ``patience_s``.
        """
        return await complete_async(flows.wait(job, goal, timeout_s, self._patience_s), self._send)

    async def cancel(self, job: str, *, force: bool = False, checkpoint: bool = True) -> JobRecord:
        """Ask a job to end; ``force`` skips draining and the last checkpoint, ``checkpoint=False`` only that.

        Raises:
            Conflict: it has ended.
        """
        return await self._send(calls.steer(job, "cancel", force=force, checkpoint=checkpoint))

    async def delete(self, job: str, *, checkpoints: bool = False) -> None:
        """Delete a job that has ended, with all that is known of it; ``checkpoints``: their files, too.

        Raises:
            Conflict: it has not ended, or a job that runs began with one of its checkpoints.
        """
        await self._send(Call("DELETE", f"/v1/jobs/{job}", calls.nothing, {"checkpoints": checkpoints or None}))

    async def pause(self, job: str) -> JobRecord:
        """Ask a job to stop after its present update."""
        return await self._send(calls.steer(job, "pause"))

    async def resume(self, job: str) -> JobRecord:
        """Let a paused job go on."""
        return await self._send(calls.steer(job, "resume"))

    async def amend(
        self, job: str, patch: Mapping[str, Any], *, revision: int | None = None, wait_s: float = 5.0
    ) -> Row:
        """Change a job file while the job runs; ``applies_at_step`` says from which update on, None if not yet known.

        Args:
            patch: part of a job file, as a JSON merge patch; None takes a key back to its default.
            revision: fail if the job was changed since it had this revision.

        Raises:
            ConfigError: the job would not be valid, or the key cannot change any more.
            Conflict: the job has ended, or was changed since ``revision``.
        """
        return await self._send(calls.amend(job, patch, revision, wait_s))

    async def extend(self, job: str, max_updates: int) -> Row:
        """Let a job that has ended go on until ``max_updates`` are done in all; ``notes`` says what that changes.

        Optimizer, place in the schedule, data order, numbering and ledger go on where they were.

        Raises:
            Conflict: it has not ended, or cannot go on; says why.
        """
        return await self._send(calls.extend(job, max_updates))

    # -- views -------------------------------------------------------------------------------------------------------

    async def events(self, job: str, *, after: int = 0, follow: bool = True) -> AsyncIterator[Row]:
        """Events past ``after``, each once, oldest first; ``follow`` goes on to the job's end across reconnects."""
        if follow:
            async with aclosing(self._streams.follow(f"/v1/jobs/{job}/events", after)) as events:
                async for row in events:
                    yield row
            return
        more = True
        while more:
            rows, more = await self._send(calls.events_page(job, after, 1000))
            for row in rows:
                after = row["id"]
                yield row

    async def metrics(
        self,
        job: str,
        *,
        names: str | Sequence[str] | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        max_points: int = 1000,
    ) -> Row:
        """Columns ``steps``, ``wall`` and ``series``; ``names``: which metrics, also comma-separated; None: all."""
        params = {"names": names, "step_from": step_from, "step_to": step_to, "max_points": max_points}
        return await self._send(calls.view(job, "metrics", **params))

    metric_names = awaits(calls.metric_names)
    samples = awaits(calls.samples)
    sample = awaits(calls.sample)
    timeline = awaits(calls.timeline)

    async def workers(self, job: str) -> Rows:
        """Workers of the job."""
        return await self._send(calls.rows(job, "workers"))

    async def videos(self, job: str) -> Rows:
        """Films of held-out episodes: name, version, reset_id, success, reward (return), steps, error (why none)."""
        return await self._send(calls.rows(job, "videos"))

    async def why(self, job: str) -> Rows:
        """Waits of the job."""
        return await self._send(calls.rows(job, "why"))

    async def audit(self, job: str) -> Row:
        """The ledger equation and its checks."""
        return await self._send(calls.view(job, "audit"))

    async def logs(self, job: str, *, service: str | None = None, tail: int = 100, after: str | None = None) -> Row:
        """``lines`` of the services' logs, and ``next`` to go on from."""
        return await self._send(calls.view(job, "logs", service=service, tail=tail, after=after))

    async def follow_logs(
        self, job: str, *, service: str | None = None, tail: int = 100, after: str | None = None
    ) -> AsyncIterator[LogLine]:
        """Follow the services' logs to the end of the job, from the last ``tail`` lines on, or from ``after`` on.

        Raises NotFound: there is no such job, or no log of ``service``.
        """
        read, wanted = one(LogLine), {"follow": True, "service": service, "tail": tail}
        async with aclosing(self._streams.follow(f"/v1/jobs/{job}/logs", after or "", **wanted)) as events:
            async for row in events:
                for line in row["lines"]:
                    yield read(line)

    async def replay(
        self, job: str, *, from_batch: int | None = None, to_batch: int | None = None, feedback: bool = False
    ) -> AsyncIterator[Row]:
        """Train sealed batches again and compare; rows of progress, the last with ``done``, ``ok`` and ``summary``.

        ``feedback``: rows say by ``told`` which answers of live agents a batch trained, and by which feedback.
        """
        body = calls.replay_of(from_batch, to_batch, feedback=feedback)
        async with aclosing(self._streams.rows(f"/v1/jobs/{job}/replay", body)) as rows:
            async for row in rows:
                yield row

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def checkpoints(self, job: str) -> Rows:
        """The checkpoints of the job, oldest first: number, version, reason, size, files with sha256, flags."""
        return await self._send(calls.rows(job, "checkpoints"))

    async def checkpoint(self, job: str, number: int) -> Row:
        """One of them. Raises NotFound."""
        return await self._send(calls.view(job, f"checkpoints/{number}"))

    async def delete_checkpoint(self, job: str, number: int) -> None:
        """Delete the files of a checkpoint. Raises NotFound, or Conflict: the run needs it, or they are not here."""
        await self._send(Call("DELETE", f"/v1/jobs/{job}/checkpoints/{number}", calls.nothing))

    async def download_checkpoint(
        self, job: str, number: int, directory: Path, *, names: Collection[str] | None = None
    ) -> None:
        """Download a checkpoint (or some of its files) into ``directory``; every file is verified by its sha256.

        Files that are there already are left alone, broken downloads go on where they stopped.

        Raises:
            Conflict: the files are not on the coordinator's host.
            CheckpointError: what arrived is not what was committed.
            Unavailable: the server was away for longer than ``patience_s``.
        """
        row = await self.checkpoint(job, number)
        await self._streams.fetch(plan_downloads(job, row, directory, names))

    async def download_archive(self, job: str, number: int, path: Path) -> None:
        """Download a checkpoint as one tar, to ``path``; where it breaks off it begins anew.

        Raises:
            NotFound: there is no such checkpoint.
            Conflict: its files are not on the coordinator's host.
            Unavailable: the server was away for longer than ``patience_s``.
        """
        await self._streams.fetch([archive(job, number, path)])

    async def download_video(self, job: str, name: str, path: Path) -> None:
        """Download a film of a held-out episode, as ``videos`` names it, to ``path``.

        Raises:
            NotFound: there is no such video (any more).
            Unavailable: the server was away for longer than ``patience_s``.
        """
        await self._streams.fetch([film(job, name, path)])

    async def download_artifact(self, sha256: str, path: Path) -> None:
        """Download a file of any checkpoint by the sha256 of its content, to ``path``; as ``download_checkpoint`` does.

        Raises:
            NotFound: no checkpoint on the coordinator's host holds it.
            CheckpointError: what arrived is something else.
            Unavailable: the server was away for longer than ``patience_s``.
        """
        await self._streams.fetch([artifact(sha256, path)])

    async def checkpoint_now(self, job: str, *, timeout_s: float = 120.0) -> Row:
        """Have a checkpoint taken and wait for it; its ``number`` and ``path``.

        Raises:
            Conflict: the job has ended, or ends before.
            DeadlineError: it was not there within ``timeout_s``.
        """
        return await complete_async(flows.checkpoint_now(job, timeout_s), self._send)

    async def scale(self, job: str, pool: Pool, replicas: int, *, timeout_s: float = 180.0) -> Row:
        """Have that many workers of a service (`rollout`, `reward`, `env`) and wait until they are there.

        Raises:
            Conflict: nobody there starts processes by request, the job has ended, or a newer wish replaced this one.
            DeadlineError: they were not ready within ``timeout_s``.
        """
        return await complete_async(flows.scale(job, pool, replicas, timeout_s), self._send)

    async def limits(self) -> Row:
        """Limits and guarantees of the deployment."""
        return await self._send(calls.about("limits"))

    async def version(self) -> Row:
        """Versions that the server runs."""
        return await self._send(calls.about("version"))

    # -- live agents -------------------------------------------------------------------------------------------------

    feedback = awaits(said.send)
    prefer = awaits(said.prefer)
    correct = awaits(said.correct)
    post_interaction = awaits(said.post_interaction)
    feedback_batch = awaits_all(said.batch)
    feedback_status = awaits(said.status)
    retract = awaits(said.retract)
    funnel = awaits(calls.funnel)
    interaction = awaits(calls.interaction)

    # -- plumbing ----------------------------------------------------------------------------------------------------

    async def _send(self, call: Call[T]) -> T:
        headers, query = call.headers(), call.query()
        timeout = call.timeout_s or self._timeout_s
        attempts = Attempts(self._retries, self._patience_s)
        while True:
            response: httpx.Response | None = None
            failure: httpx.TransportError | None = None
            try:
                response = await self._http.request(
                    call.method, call.path, params=query, content=call.body, headers=headers, timeout=timeout
                )
                if response.is_success:
                    break
            except httpx.TransportError as error:
                failure = error
            pause = attempts.pause_s(response)
            if pause is None:
                break
            await asyncio.sleep(pause)
        if response is None:
            raise unreachable(self.url, failure)
        return call.read(body_of(response))
