"""A coordinator that keeps its books in memory, behind the real application: what is tested here is HTTP and above."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.deployments import Deployments
from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.finetuning.service import FineTuningService
from penstock.services.coordinator.jobs.job_index import JobEntry, JobIndex, entry_of
from penstock.services.coordinator.origins import Origins
from penstock.services.coordinator.queries.samples import check_env
from penstock.services.coordinator.training.checkpoints import (
    Artifacts,
    checkpoint_row,
    checkpoint_rows,
    delete_checkpoint,
    find_file,
)
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.webserver import KEEP_ALIVE_S
from penstock.shared.config.data import source_names
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Conflict, NotFound, Unavailable
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord, JobStatus, Operation
from penstock.shared.protocol.keys import Scope, StoredKey, new_key
from penstock.shared.transport.bus import Entry

_spec = importlib.util.spec_from_file_location("front_desks", Path(__file__).with_name("desks.py"))
assert _spec is not None
assert _spec.loader is not None
desks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(desks)

JOB: dict[str, Any] = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "train": {"batch_size": 8, "max_updates": 3},
}


class KeysInMemory:
    """``KeyStore`` without a bus."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredKey] = {}

    async def create(
        self, name: str, scopes: list[Scope], *, expires_at: datetime | None, rate_limit: str | None,
        models: list[str] | None = None, max_weight: float = 1.0, code_modules: list[str] | None = None,
    ) -> tuple[StoredKey, str]:  # fmt: skip
        id, text, digest = new_key()
        self.stored[id] = StoredKey(
            id=id, name=name, scopes=scopes, created_at=datetime.now(UTC), expires_at=expires_at,
            rate_limit=rate_limit, models=models, max_weight=max_weight, code_modules=code_modules, digest=digest,
        )  # fmt: skip
        return self.stored[id], text

    async def find(self, id: str) -> StoredKey | None:
        return self.stored.get(id)

    async def list_all(self) -> list[StoredKey]:
        return list(self.stored.values())

    async def delete(self, id: str) -> None:
        if self.stored.pop(id, None) is None:
            raise NotFound(f"no key '{id}'")

    async def secret(self) -> bytes:
        return b"s" * 32


class LettersInMemory:
    """``DeadLetterQueue`` without a bus: two of every job, of which the second stood for no draw."""

    def __init__(self) -> None:
        rows = {"time": 1.0, "stream": "TICKETS", "sequence": 9, "attempts": 3, "reason": "max deliveries"}
        self.stored = {7: {**rows, "id": 7, "draw": "4.0"}, 8: {**rows, "id": 8, "draw": None}}

    async def page(self, job: str, *, after: int, limit: int) -> list[dict[str, Any]]:
        return [row for id, row in sorted(self.stored.items()) if id > after][:limit]

    async def show(self, job: str, id: int) -> dict[str, Any]:
        if id not in self.stored:
            raise NotFound(f"no dead letter {id}")
        return {**self.stored[id], "nbytes": 3, "headers": {"a": "b"}, "content": "abc"}

    async def drop(self, job: str, id: int) -> None:
        await self.show(job, id)
        del self.stored[id]

    async def check_replayable(self, job: str, id: int) -> None:
        if (await self.show(job, id))["draw"] is None:
            raise NotFound(f"dead letter {id} stood for no draw")


class Books:
    """``CoordinatorControl`` without a bus. Jobs stay pending until a test moves them with ``advance``."""

    def __init__(self) -> None:
        self.keys = KeysInMemory()
        self.dead_letters = LettersInMemory()
        self.audit_log = desks.AuditLogInMemory()
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-test-")
        self.files = FileStore(Path(self._directory.name), max_bytes=1 << 20, max_files=20)
        self.graders, self.webhooks, self.scaling = (
            desks.GradersInMemory(),
            desks.WebhooksInMemory(),
            desks.ScalingInMemory(),
        )
        self.jobs: dict[str, JobRecord] = {}
        self.origins = Origins(self.index, self._state, Path())
        self.steering = self
        self.deployments = Deployments(self, self.origins, self.submit, settings())
        self.fine_tuning = FineTuningService(self, self.files, settings())
        self.feed: dict[str, list[dict[str, Any]]] = {}
        self.warnings: list[str] = []
        self.submitted = 0
        self.deleted: dict[str, bool] = {}
        """Deleted jobs, and whether with their checkpoints."""
        self.submit_delay_s = 0.0
        self.down = False
        self.audit_ok = True
        self.ledger = LedgerState()
        """Where every job's checkpoints are recorded."""
        self.artifacts = Artifacts(Path("/nowhere"))
        self.broken_after: int | None = None
        """follow_events fails after an event with this sequence, once."""
        self.purged: set[int] = set()
        """Events that are not kept any more."""

    def advance(self, job: str, phase: str, **status: Any) -> None:
        record = self.jobs[job]
        new = record.status.model_copy(update={"phase": phase, **status})
        self.jobs[job] = record.model_copy(update={"status": new, "revision": record.revision + 1})
        self.emit(job, "phase", f"now {phase}", phase=phase)

    def emit(self, job: str, type: str, message: str, **more: Any) -> None:
        row = {"time": time.time(), "level": "info", "type": type, "message": message, **more}
        self.feed[job].append(row)

    def _known(self, job: str) -> JobRecord:
        if self.down:
            raise Unavailable("the bus does not answer")
        if job not in self.jobs:
            raise NotFound(f"no job '{job}'")
        return self.jobs[job]

    def close(self) -> None:
        self._directory.cleanup()

    async def index(self) -> JobIndex:
        """As of a ``JobStore``."""
        index = JobIndex(None)
        for id, record in sorted(self.jobs.items()):
            index.take(Entry(id, record.stored(), record.revision, 0.0))
        return index

    async def _state(self, job: str) -> LedgerState:
        self._known(job)
        return self.ledger

    async def submit(
        self, spec: JobConfig, raw: dict[str, Any], *, key: str = "", fine_tuning: dict[str, Any] | None = None
    ) -> JobRecord:
        if self.down:
            raise Unavailable("the bus does not answer")
        await asyncio.sleep(self.submit_delay_s)
        if spec.name == "too-big":
            raise ConfigError("limits.byte_budget: the streams have no room for this job")
        self.submitted += 1
        record = JobRecord(
            id=new_job_id(), name=spec.name, created_at=datetime.now(UTC), revision=1, fine_tuning=fine_tuning,
            spec=raw if fine_tuning is None else spec.model_dump(mode="json", exclude_unset=True),
            status=JobStatus(total_steps=spec.train.max_updates),
        )  # fmt: skip
        self.jobs[record.id] = record
        self.feed[record.id] = []
        for text in self.warnings:
            self.feed[record.id].append(
                {"time": 0.0, "level": "warning", "type": "submitted", "message": text, "data": {}}
            )
        self.emit(record.id, "phase", "now pending", phase="pending")
        return record

    async def dry_run(self, spec: JobConfig) -> dict[str, Any]:
        return {"groups_per_batch": spec.groups_per_batch, "max_draws": spec.max_draws}

    async def get(self, job: str) -> JobRecord:
        return self._known(job)

    async def job_entries(self, models: frozenset[str] | None = None) -> list[JobEntry]:
        found = [entry_of(id, record.stored(), record.revision) for id, record in sorted(self.jobs.items())]
        return [e for e in found if models is None or not models.isdisjoint((e.name, e.id))]

    async def list_jobs(
        self, *, after: str | None, limit: int, order: str, phase: str | None, name: str | None, kind: str | None,
        labels: Mapping[str, str], models: frozenset[str] | None = None,
    ) -> list[JobRecord]:  # fmt: skip
        ids = sorted(self.jobs, reverse=order == "desc")
        if after is not None:
            ids = [i for i in ids if (i < after if order == "desc" else i > after)]
        found = [self.jobs[i] for i in ids]
        found = [r for r in found if models is None or not models.isdisjoint((r.name, r.id))]
        found = [r for r in found if phase in (None, r.status.phase) and name in (None, r.name)]
        found = [r for r in found if kind in (None, r.spec.get("kind", "rl"))]
        return [r for r in found if labels.items() <= r.spec.get("metadata", {}).items()][:limit]

    async def amend(self, job: str, edit: Callable[[JobRecord], Any], *, by: str) -> JobRecord:
        record = self._known(job)
        if record.status.phase in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' is {record.status.phase}")
        spec = edit(record).model_dump(mode="json", exclude_unset=True)
        changes = {"spec": spec, "generation": record.generation + 1, "changed_from": record.revision}
        self.jobs[job] = record.model_copy(update={**changes, "revision": record.revision + 1})
        return self.jobs[job]

    async def extend(self, job: str, max_updates: int, *, by: str) -> tuple[JobRecord, list[str]]:
        record = self._known(job)
        if record.status.phase not in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' is {record.status.phase}")
        spec = {**record.spec, "train": {**record.spec["train"], "max_updates": max_updates}}
        status = record.status.model_copy(update={"phase": "pending"})
        changes = {"spec": spec, "status": status, "extensions": record.extensions + 1}
        self.jobs[job] = record.model_copy(update={**changes, "revision": record.revision + 1})
        return self.jobs[job], ["optimizer.schedule: it rises again"]

    async def begin_operation(self, job: str, operation: Operation) -> JobRecord:
        record = self._known(job)
        if record.status.phase in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' is {record.status.phase}")
        self.jobs[job] = record.model_copy(update={"operations": [*record.operations, operation]})
        return self.jobs[job]

    async def set_desired(
        self, job: str, state: Any, *, by: str, force: bool = False, checkpoint: bool = True
    ) -> JobRecord:
        record = self._known(job)
        if record.status.phase in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' is {record.status.phase}; it cannot become {state}")
        if record.desired_state != state:
            self.jobs[job] = record.model_copy(update={"desired_state": state, "revision": record.revision + 1})
        return self.jobs[job]

    async def events(self, job: str, *, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        self._known(job)
        return list(enumerate(self.feed[job], 1))[after : after + limit]

    async def follow_events(self, job: str, *, after: int) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        while True:
            for seq, row in await self.events(job, after=after, limit=1000):
                yield seq, row
                after = seq
                if self.broken_after == seq:
                    self.broken_after = None
                    raise Unavailable("the bus went away")
            if self._known(job).status.phase in TERMINAL_PHASES and after == len(self.feed[job]):
                return
            await asyncio.sleep(0.02)

    async def newest_event(self, job: str) -> int:
        self._known(job)
        return len(self.feed[job])

    async def keeps_event(self, seq: int) -> bool:
        return seq not in self.purged

    async def metrics(self, job: str, **query: Any) -> dict[str, Any]:
        self._known(job)
        steps = list(range(5))[: query["max_points"]]
        series = {"reward": [0.1, 0.2, float("nan"), 0.5, 0.9], "loss": [5.0, 4.0, 3.0, 2.0, 1.0]}
        wanted = [name for name in query["names"] or series if name in series]
        return {"steps": steps, "wall": [float(s) for s in steps], "series": {n: series[n] for n in wanted}}

    async def workers(self, job: str, *, history: bool = False) -> list[dict[str, Any]]:
        self._known(job)
        spans = {"spans": [{"kind": "busy", "wait": "", "start_age_s": 9.0, "end_age_s": 0.3}]} if history else {}
        return [
            {"service": "rollout", "worker": "rollout-0", "host": "h", "pid": 7, "ready": True, "alive": True,
             "age_s": 0.3, "version": 2, "waiting_for": "version 3", **spans}
        ]  # fmt: skip

    async def samples(self, job: str, **query: Any) -> list[dict[str, Any]]:
        spec = self._known(job).spec
        if query["env"] is not None:
            check_env(spec, query["env"])
        names = source_names(JobConfig.parse(spec).data.train)
        rows = [
            desks.sample_row(f"s{i}", names[i % len(names)], i)
            for i in range(30)
            if query["env"] in (None, names[i % len(names)])
        ]
        start = next((i + 1 for i, row in enumerate(rows) if row["id"] == query["after"]), 0)
        return rows[start : start + query["limit"]]

    async def videos(self, job: str) -> list[dict[str, Any]]:
        self._known(job)
        return []

    async def video(self, job: str, name: str) -> bytes:
        self._known(job)
        raise NotFound(f"no video '{name}'")

    async def sample(self, job: str, row_id: str) -> dict[str, Any]:
        self._known(job)
        if row_id != "4-3.0-1":
            raise NotFound(f"no sample '{row_id}'")
        return {**desks.sample_row(row_id, "addition", 3), "job": job, "attempt": "a", "prompt_token_ids": [1],
                "token_ids": [2, 3], "logprobs": [-0.5, -1.0], "mask": [1, 0], "versions": [3, 4],
                "siblings": []}  # fmt: skip

    async def timeline(self, job: str, *, step: int | None, limit: int) -> list[dict[str, Any]]:
        self._known(job)
        return [{"step": step or 1, "stage": "train", "start": 1.0, "end": 2.0}][:limit]

    async def metric_names(self, job: str) -> list[dict[str, Any]]:
        self._known(job)
        return [{"name": "reward", "count": 5, "first_step": 0, "last_step": 4, "last": 0.9}]

    async def delete(self, job: str, *, checkpoints: bool) -> None:
        if self._known(job).status.phase not in TERMINAL_PHASES:
            raise Conflict(f"job '{job}' has not ended")
        del self.jobs[job]
        self.deleted[job] = checkpoints

    async def delete_checkpoint(self, job: str, number: int) -> None:
        self._known(job)
        delete_checkpoint(self.ledger, Path(), number)

    async def artifact(self, sha256: str) -> Path:
        return self.artifacts.find(sha256)

    async def checkpoints(self, job: str) -> list[dict[str, Any]]:
        self._known(job)
        return checkpoint_rows(self.ledger, Path())

    async def checkpoint(self, job: str, number: int) -> dict[str, Any]:
        self._known(job)
        return checkpoint_row(self.ledger, Path(), number)

    async def checkpoint_file(self, job: str, number: int, name: str) -> tuple[Path, str]:
        self._known(job)
        path, file = find_file(self.ledger, Path(), number, name)
        return path, file.sha256

    async def why(self, job: str) -> list[dict[str, Any]]:
        self._known(job)
        return [{"waiting_for": "2 groups of 2 per batch", "subject": f"tickets.{job}", "id": "4.0",
                 "holder": "rollout-0", "age_s": 1.5}]  # fmt: skip

    async def audit(self, job: str) -> dict[str, Any]:
        self._known(job)
        check = {"name": "equation", "ok": self.audit_ok, "detail": "6 = 4 + 1 + 1"}
        violations = [] if self.audit_ok else ["equation: 6 = 4 + 1 + 0"]
        equation = {"drawn": 6, "trained": 4, "dropped": {"failed": 1}, "in_flight": 1}
        return {"ok": self.audit_ok, "equation": equation, "checks": [check], "violations": violations}

    async def logs(
        self, job: str, *, service: str | None, tail: int, after: str | None, unnamed: bool
    ) -> dict[str, Any]:
        self._known(job)
        lines = [{"service": service or "trainer", "text": f"line {i}"} for i in range(3)] if after is None else []
        if unnamed and lines:
            lines.insert(0, {"service": "nats", "text": "about no job"})
        return {"lines": lines[-tail:], "next": "trainer:3"}

    async def replay(
        self, job: str, *, from_batch: int | None, to_batch: int | None, feedback: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        if self._known(job).status.phase == "pending":
            raise Conflict("nothing was trained yet")
        for batch in range(from_batch or 0, min(to_batch or 2, 2) + 1):  # three were trained
            row = {"batch": batch, "total": 3, "match": True, "detail": "identical"}
            told = {
                "draw": f"{batch}.0", "objective": "policy", "reward": 1.0, "reason": "feedback", "lag": 0,
                "interactions": ["itx"], "context": [], "feedback": ["fb"],
            }  # fmt: skip
            yield {**row, "told": [told]} if feedback else row
        yield {"done": True, "ok": True, "summary": "3 of 3 batches are bit-identical"}

    async def limits(self) -> dict[str, Any]:
        return {"durability": "fsync"}

    async def health(self) -> tuple[bool, dict[str, Any]]:
        return not self.down, {"bus": {"ok": not self.down, "detail": "connected" if not self.down else "away"}}


def settings(**more: Any) -> ServiceSettings:
    return ServiceSettings(**{"rate_limit": "100000/minute", **more})


@pytest.fixture
def books() -> Iterator[Books]:
    books = Books()
    yield books
    books.close()


@pytest.fixture
def job() -> dict[str, Any]:
    """A job file that is valid."""
    return copy.deepcopy(JOB)


@pytest.fixture
def connect(books: Books) -> Callable[..., contextlib.AbstractAsyncContextManager[httpx.AsyncClient]]:
    """A client of the application, in process; keyword arguments are settings."""

    @contextlib.asynccontextmanager
    async def build(**more: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(books, settings(**more))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        async with app.router.lifespan_context(app), client:
            yield client

    return build


class Served:
    """The application behind a real server on a free port, in a thread of its own."""

    def __init__(self, books: Books, **more: Any) -> None:
        self.books = books
        self.stopping: asyncio.Event | None = None
        self._more = more
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while self._server is None or not self._server.started:
            assert time.monotonic() < deadline, "the server did not start in 10 s"
            time.sleep(0.01)

    def _run(self) -> None:
        async def serve() -> None:
            self.stopping = asyncio.Event()
            app = create_app(self.books, settings(**self._more), stopping=self.stopping)
            config = uvicorn.Config(
                app, port=self.port, log_level="error", timeout_graceful_shutdown=2, timeout_keep_alive=KEEP_ALIVE_S
            )
            self._server = uvicorn.Server(config)
            self._loop = asyncio.get_running_loop()
            await self._server.serve()

        asyncio.run(serve())

    def stop(self) -> None:
        thread, server, stopping = self._thread, self._server, self.stopping
        if thread is None or server is None or stopping is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(stopping.set)
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
        self._server = None


@pytest.fixture
def serve(books: Books) -> Iterator[Callable[..., Served]]:
    """Start servers; keyword arguments are settings."""
    servers: list[Served] = []

    def start(**more: Any) -> Served:
        servers.append(Served(books, **more))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """A server with default settings."""
    return serve()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
