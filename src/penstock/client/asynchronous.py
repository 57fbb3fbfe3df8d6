"""The client for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import orjson

from penstock.client import calls, feedback, flows
from penstock.client.answers import base_url, body_of, default_headers, error_of, pause_s, unreachable
from penstock.client.calls import Call, Goal, JobFile, Order, Records, Row, Rows
from penstock.client.download import Download, plan_downloads
from penstock.client.feedback import Items, Value
from penstock.client.feedback_tokens import AsyncFeedbackTokens
from penstock.client.files import AsyncFiles, AsyncGraders
from penstock.client.keys import AsyncKeys
from penstock.client.letters import AsyncLetters
from penstock.client.patience import Patience
from penstock.client.quarantine import AsyncQuarantine
from penstock.client.sending import complete_async
from penstock.client.sse import EventReader
from penstock.client.users import AsyncUsers
from penstock.client.versions import AsyncVersions
from penstock.client.webhooks import AsyncWebhooks
from penstock.shared.errors import Unavailable
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.scaling import Pool

__all__ = ["AsyncClient"]

T = TypeVar("T")
_RECONNECT_S = 0.5


class AsyncClient:
    """The job API. Failed requests raise the errors of ``penstock.shared.errors``.

    Requests are repeated up to ``retries`` times when the server cannot be reached or asks for it; a POST carries an
    idempotency key, so it has one effect. Calls that wait put up with an absent server for ``patience_s``.
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
        self.keys = AsyncKeys(self._send)
        self.letters = AsyncLetters(self._send)
        self.webhooks = AsyncWebhooks(self._send)
        self.files, self.graders = AsyncFiles(self._send), AsyncGraders(self._send)
        self.versions = AsyncVersions(self._send)
        self.quarantine = AsyncQuarantine(self._send)
        self.feedback_tokens, self.users = AsyncFeedbackTokens(self._send), AsyncUsers(self._send)
        self._http = httpx.AsyncClient(base_url=self.url, headers=default_headers(api_key), timeout=timeout_s)

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
        """Submit a job; the same key submits it once. Raises ConfigError with one line per flaw."""
        return await self._send(calls.submit(job, idempotency_key))

    async def dry_run(self, job: JobFile) -> Row:
        """Validate a job and show what it would do."""
        return await self._send(calls.dry_run(job))

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

    # -- views -------------------------------------------------------------------------------------------------------

    async def events(self, job: str, *, after: int = 0, follow: bool = True) -> AsyncIterator[Row]:
        """Events past ``after``, each once, oldest first; ``follow`` goes on to the job's end across reconnects."""
        if follow:
            async for row in self._follow(job, after):
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
        names: str | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        max_points: int = 1000,
    ) -> Row:
        """Columns ``steps``, ``wall`` and ``series``; ``names`` is comma-separated."""
        params = {"names": names, "step_from": step_from, "step_to": step_to, "max_points": max_points}
        return await self._send(calls.view(job, "metrics", **params))

    async def samples(
        self, job: str, *, step: int | None = None, limit: int = 20, sort: str | None = None, after: str | None = None,
        env: str | None = None,
    ) -> Rows:  # fmt: skip
        """Completions with rewards, newest update first; ``env``: only those of the source of that name."""
        return await self._send(calls.rows(job, "samples", step=step, limit=limit, sort=sort, after=after, env=env))

    async def workers(self, job: str) -> Rows:
        """Who works for the job."""
        return await self._send(calls.rows(job, "workers"))

    async def why(self, job: str) -> Rows:
        """What the job waits for."""
        return await self._send(calls.rows(job, "why"))

    async def audit(self, job: str) -> Row:
        """The ledger equation and its checks."""
        return await self._send(calls.view(job, "audit"))

    async def logs(self, job: str, *, service: str | None = None, tail: int = 100, after: str | None = None) -> Row:
        """``lines`` of the services' logs, and ``next`` to go on from."""
        return await self._send(calls.view(job, "logs", service=service, tail=tail, after=after))

    async def replay(
        self, job: str, *, from_batch: int | None = None, to_batch: int | None = None
    ) -> AsyncIterator[Row]:
        """Train sealed batches again and compare; rows of progress, the last with ``done``, ``ok`` and ``summary``."""
        body = orjson.dumps({"from_batch": from_batch, "to_batch": to_batch})
        headers = {"Content-Type": "application/json"}
        timeout = httpx.Timeout(self._timeout_s, read=None)
        request = self._http.build_request(
            "POST", f"/v1/jobs/{job}/replay", content=body, headers=headers, timeout=timeout
        )
        try:
            response = await self._http.send(request, stream=True)
            try:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for line in response.aiter_lines():
                    yield orjson.loads(line)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None

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
        for download in plan_downloads(job, row, directory, names):
            patience = Patience(self._patience_s)
            while not download.is_done:
                try:
                    await self._download(download)
                except Unavailable as error:
                    await asyncio.sleep(patience.after(error))

    async def _download(self, download: Download) -> None:
        try:
            with download:
                async with self._http.stream("GET", download.url, headers=download.headers()) as response:
                    if not response.is_success:
                        await response.aread()
                        raise error_of(response)
                    download.begin(response.status_code)
                    async for chunk in response.aiter_bytes():
                        download.write(chunk)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None
        download.finish()

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
        """What the deployment allows and guarantees."""
        return await self._send(calls.about("limits"))

    async def version(self) -> Row:
        """What the server runs."""
        return await self._send(calls.about("version"))

    # -- feedback ----------------------------------------------------------------------------------------------------

    async def feedback(
        self,
        metric: str,
        value: Value,
        *,
        inference: str | None = None,
        episode: str | None = None,
        id: str | None = None,
        **more: object,
    ) -> Row:
        """Post one verdict and return once it is on disk; the same ``id`` has one effect. ``more``: as in the body."""
        return await self._send(feedback.send(metric, value, inference=inference, episode=episode, id=id, **more))

    async def feedback_batch(self, items: Items) -> Rows:
        """Post items of any kind; one row each, in order: ``id``, ``status`` (202: on disk), ``problem``."""
        return [row for call in feedback.batches(items) for row in await self._send(call)]

    async def feedback_status(self, id: str) -> Row:
        """What became of an item. Raises NotFound."""
        return await self._send(feedback.status(id))

    async def retract_feedback(self, id: str) -> Row:
        """Take an item back. Raises NotFound."""
        return await self._send(feedback.retract(id))

    # -- plumbing ----------------------------------------------------------------------------------------------------

    async def _send(self, call: Call[T]) -> T:
        headers, query = call.headers(), call.query()
        timeout = call.timeout_s or self._timeout_s
        for attempt in range(self._retries + 1):
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
            pause = pause_s(attempt, response)
            if pause is None or attempt == self._retries:
                break
            await asyncio.sleep(pause)
        if response is None:
            raise unreachable(self.url, failure)
        return call.read(body_of(response))

    async def _follow(self, job: str, after: int) -> AsyncIterator[Row]:
        reader = EventReader(after)
        patience = Patience(self._patience_s)
        while not reader.ended:
            reader = EventReader(reader.last_id)
            try:
                async with contextlib.aclosing(self._lines(job, reader.last_id)) as lines:
                    async for line in lines:
                        patience.renew()
                        event = reader.feed(line)
                        if event is not None:
                            yield event.row
                if not reader.ended:
                    await asyncio.sleep(_RECONNECT_S)
            except Unavailable as error:
                await asyncio.sleep(patience.after(error))

    async def _lines(self, job: str, after: int) -> AsyncGenerator[str, None]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(self._timeout_s, read=45)  # the server pings every 15 s
        try:
            async with self._http.stream("GET", f"/v1/jobs/{job}/events", headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None
