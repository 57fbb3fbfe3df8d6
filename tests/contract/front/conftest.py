"""The real application over a real bus, with jobs and no leader: tests check the HTTP API and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np
import pytest
import uvicorn

from penstock.services.coordinator.access import AuditLog, KeyStore
from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.effects import ATTEMPTS, REASON, SEQUENCE, STREAM
from penstock.services.coordinator.services import Services, build_services
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.webserver import KEEP_ALIVE_S, server_of
from penstock.services.reward import worker as reward_worker
from penstock.services.reward.channel import Open, Score
from penstock.shared.config.jobs.kinds import parse_job, parse_training
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.audit_log import AuditRecord
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    JobStarted,
    SealedGroup,
)
from penstock.shared.protocol.grading import GradeReply, GradeRequest
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.keys import StoredKey
from penstock.shared.protocol.messages import DRAW_HEADER, Ack, Heartbeat, ReplayRequest, ReplayRow
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.runtime.ledger import ledger_archive
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.jetstream import call
from penstock.shared.transport.server import NatsServer

T = TypeVar("T")

DEADLINE_S = 60.0
SHM, SHM_ROOM_BYTES = Path("/dev/shm"), 2 << 30
BASE = {"writer_epoch": 1}
JOB: dict[str, Any] = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "train": {"batch_size": 8, "max_updates": 3},
}


@contextlib.asynccontextmanager
async def listening(app: Any, settings: ServiceSettings) -> AsyncIterator[int]:
    """Run an application in the server that coordinators use, in the caller's loop; yield its port."""
    server = server_of(app, settings)
    task = asyncio.create_task(server._serve())
    async with asyncio.timeout(DEADLINE_S):
        while not server.started:
            await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


class Deployment:
    """A NATS server, fronts of coordinators over it, and methods that write what a leader and workers would write.

    No leader runs: a job stays pending until a test moves it with ``advance``. Methods that are no coroutines may be
    called from any thread and block until the bus has what they wrote: a loop of its own, in a thread, owns the bus
    with which they write.
    """

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.data_dir = Path()
        self.members = Members()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.bus = self.run(Bus.connect(server.url, name="test"))
        self.store = JobStore(self.bus)
        self._serving = contextlib.AsyncExitStack()
        self._outcomes: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self.run(self.bus.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of ``bus`` and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def empty(self, data_dir: Path) -> None:
        """Empty all streams, so that sequences and revisions start at 1, and begin with no files."""
        self.data_dir, self.members = data_dir, Members()
        self._outcomes.clear()
        self.server.start()
        self.run(self._empty())

    async def _empty(self) -> None:
        await self.bus.wait_connected(DEADLINE_S)
        await self._serving.aclose()
        if await self.bus.missing_streams():
            await self.bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=16 << 20)
        listed = await self._ask("STREAM.LIST", {})
        await asyncio.gather(*(self._again(s["config"]) for s in listed["streams"] if s["state"]["last_seq"]))
        self.store = JobStore(self.bus)

    async def _again(self, config: dict[str, Any]) -> None:
        await self._ask(f"STREAM.DELETE.{config['name']}")
        await self._ask(f"STREAM.CREATE.{config['name']}", config)

    async def _ask(self, endpoint: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await call(self.bus._connection, endpoint, body, deadline_s=DEADLINE_S, what=endpoint)

    # -- fronts ------------------------------------------------------------------------------------------------------

    def settings(self, **more: Any) -> ServiceSettings:
        """Return settings of a front with room for any number of jobs and no rate limit that tests would reach."""
        own = {
            "data_dir": self.data_dir, "rate_limit": "100000/minute", "experience_bytes": 1 << 50,
            "nats_monitor_url": self.server.monitor_url,
        }  # fmt: skip
        return ServiceSettings(**{**own, **more})

    @contextlib.asynccontextmanager
    async def services(self, **more: Any) -> AsyncIterator[Services]:
        """Yield the services of a front, with their own connection, in the caller's loop; ``more`` are settings."""
        async with await Bus.connect(self.server.url, name="api") as bus:
            yield build_services(bus, JobStore(bus), self.members, {}, self.settings(**more))

    @contextlib.asynccontextmanager
    async def listening(self, **more: Any) -> AsyncIterator[int]:
        """Run a front in the server that coordinators use, in the caller's loop; yield its port."""
        async with (
            self.services(http_port=0, **more) as services,
            listening(create_app(services), services.settings) as port,
        ):
            yield port

    # -- what is stored ----------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> dict[str, JobRecord]:
        """All jobs by id, oldest first."""
        return self.run(self._jobs())

    async def _jobs(self) -> dict[str, JobRecord]:
        return {entry.id: entry.record() for entry in (await self.store.index()).all()}

    @property
    def submitted(self) -> int:
        """Number of jobs."""
        return len(self.jobs)

    def events(self, job: str) -> list[dict[str, Any]]:
        """Return the rows of a job's events."""
        found = self.run(self.bus.read(subjects.EVENTS, subjects.events(job)))
        return [msgspec.json.decode(message.data) for message in found]

    @property
    def keys(self) -> dict[str, StoredKey]:
        """Every API key by its id."""
        return {key.id: key for key in self.run(KeyStore(self.bus).list_all())}

    @property
    def audit_log(self) -> list[AuditRecord]:
        """Every record of the audit log, oldest first."""
        page = AuditLog(self.bus).page(key="", job="", since=None, after=None, limit=1000, newest_first=False)
        return [record for _, record in self.run(page)]

    # -- what a leader and workers do --------------------------------------------------------------------------------

    def submit(self, job: dict[str, Any], **more: Any) -> str:
        """Store a job without the checks of the API; return its id."""
        return self.run(self.store.create(parse_job(job), **more)).id

    def advance(self, job: str, phase: str, **status: Any) -> None:
        """Move a job, as its leader does: first the event, then the record."""
        message = f"{phase}: {status.get('message', '')}".rstrip(": ")
        self.emit(job, "phase", message, level="error" if phase == "failed" else "info")
        self.run(self.store.set_status(job, phase=phase, **status))

    def emit(self, job: str, type: str, message: str, *, level: str = "info", **data: Any) -> None:
        """Publish an event of a job."""
        row = {"time": time.time(), "level": level, "type": type, "message": message, "data": data}
        self.run(self.bus.publish(subjects.events(job), msgspec.json.encode(row)))

    def record(self, job: str, *events: Event) -> None:
        """Append an entry to the ledger of a job."""
        self.run(self._record(job, events))

    async def _record(self, job: str, events: tuple[Event, ...]) -> None:
        journal = Journal(self.bus, job, archive=ledger_archive(self.data_dir))
        await journal.resume()
        await journal.append(events)

    def save(self, job: str, number: int, files: dict[str, bytes]) -> Path:
        """Write a checkpoint as the trainer does, and append it to the ledger; return its folder."""
        folder = self.data_dir / "checkpoints" / job / str(number)
        write_checkpoint(folder, files)
        saved = {"number": number, "version": number, "digest": "d", "path": str(folder)}
        self.record(job, Checkpointed(**BASE, time=1000.0, trainer_epoch=1, low_seq=0, **saved))
        return folder

    def measure(self, job: str) -> None:
        """Publish five rows of metrics; one reward is not finite."""
        rewards, losses = [0.1, 0.2, float("nan"), 0.5, 0.9], [5.0, 4.0, 3.0, 2.0, 1.0]
        for step, (reward, loss) in enumerate(zip(rewards, losses, strict=True)):
            row = {"kind": "train", "step": step, "time": float(step), "values": {"reward": reward, "loss": loss}}
            self.run(self.bus.publish(subjects.metrics(job), msgspec.json.encode(row)))

    def beat(self, job: str, **of_job: Any) -> None:
        """Receive a heartbeat of a rollout worker, with ``of_job`` in its row of the job."""
        beat = Heartbeat(
            service="rollout", worker="rollout-0", host="h", pid=7, started=0.0, interval_s=600.0, health_port=1,
            ready=True, jobs={job: {"version": 2, "running": 1, "waiting_for": "version 3", **of_job}},
        )  # fmt: skip
        self.members.on_heartbeat(beat, time.monotonic())

    def serve(self, subject: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer requests on ``subject`` until the end of the test."""

        async def begin() -> None:
            await self._serving.enter_async_context(await self.bus.serve(subject, answer))

        self.run(begin())

    def stop_serving(self) -> None:
        """Answer no more requests, and finish no more operations."""
        self._outcomes.clear()
        self.run(self._serving.aclose())

    def explain(self, job: str) -> None:
        """Answer in place of the leader what a job waits for."""
        row = {"waiting_for": "2 groups of 2 per batch", "subject": subjects.tickets(job), "id": "4.0",
               "holder": "rollout-0", "age_s": 1.5}  # fmt: skip
        self.serve(subjects.LEADER, lambda _: asyncio.sleep(0, msgspec.json.encode([row])))

    def train(self, job: str) -> None:
        """Store the streams of a job after two updates of two groups: 6 draws, of which 4 trained, 1 failed, 1 open."""
        self.run(self._train(job))

    async def _train(self, job: str) -> None:
        sources = parse_training((await self.store.get(job)).spec).train_sources
        due = {"min_version": 0, "deadline": 9.0}
        await self._record(
            job, (JobStarted(**BASE, time=0.0, config_digest="c"), Drawn(**BASE, time=1.0, start=0, stop=6, **due))
        )
        for number in (1, 2):
            groups = []
            for draw in (Draw(2 * number - 2), Draw(2 * number - 1)):
                data, header = encode_group(group_of(job, draw, sources[draw.ordinal % len(sources)], number - 1))
                seq = await self.bus.publish(subjects.experience(job), data, headers=group_headers(header))
                versions = number - 1, number - 1
                groups.append(SealedGroup(draw, header.attempt, seq, header.digest, *versions, header.rewards, 8, "w"))
            place = {"number": number, "revision": 1}
            begun = {"start_version": number - 1, "update_index": number - 1}
            sealed = BatchSealed(**BASE, time=2.0 * number, **place, **begun, groups=groups)
            result = {"version": number, "digest": "w", "trainer_epoch": 1}
            await self._record(job, (sealed, BatchTrained(**BASE, time=2.0 * number + 1, **place, **result)))
        failed = Dropped(**BASE, time=6.0, draws=[Draw(4)], reason="failed", lengths=[0], redraw=False, **due)
        await self._record(job, (failed,))

    def repeat(self) -> None:
        """Answer replay requests as a trainer that repeats the batches 0 to 2 of any job that has begun."""
        self.serve(subjects.REPLAY, self._repeat)

    async def _repeat(self, data: bytes) -> bytes:
        request, envelope = unpack(data, ReplayRequest)
        if (await self.store.get(envelope.job)).status.phase == "pending":
            return pack(Ack(ok=False, reason="nothing was trained yet"))
        last = 2 if request.to_batch is None else min(request.to_batch, 2)
        batches = range(request.from_batch or 0, last + 1)
        rows = [ReplayRow(batch=batch, total=3, match=True, detail="identical") for batch in batches]
        for row in [*rows, ReplayRow(done=True, ok=True, summary="3 of 3 batches are bit-identical")]:
            await self.bus.notify(subjects.replay_progress(request.id), pack(row, job=envelope.job))
        return pack(Ack(ok=True))

    def grade(self) -> None:
        """Answer requests to grade as a reward worker does; the scorers run in this process."""
        self.serve(subjects.GRADE, lambda data: asyncio.to_thread(graded, data))

    def bury(self, job: str) -> None:
        """Store two dead letters of a job; the second one belongs to no draw."""
        for draw in ({DRAW_HEADER: "4.0"}, {}):
            headers = {STREAM: subjects.TICKETS, SEQUENCE: "9", ATTEMPTS: "3", REASON: "max deliveries", "a": "b"}
            self.run(self.bus.publish(subjects.dead(job), b"abc", headers={**headers, **draw}))

    def finish(self, job: str, **outcome: Any) -> None:
        """End the pending and later operations of a job with ``outcome``; a later call replaces the outcome."""
        begun = bool(self._outcomes)
        self._outcomes[job] = outcome
        self.run(self._finish(job) if begun else self._begin_finishing())

    async def _begin_finishing(self) -> None:
        async def finish() -> None:
            async for entry in self.store.watch():
                await self._finish(entry.id)

        self._serving.push_async_callback(end_tasks, [asyncio.create_task(finish())])

    async def _finish(self, job: str) -> None:
        for operation in (await self.store.get(job)).operations:
            if operation.state == "pending" and job in self._outcomes:
                await self.store.finish_operation(job, operation.model_copy(update=self._outcomes[job]))

    def write_log(self, job: str) -> Path:
        """Write three lines about a job and one about no job to the log of a trainer; return the file."""
        folder = self.data_dir / "logs"
        folder.mkdir(exist_ok=True)
        lines = ["about no job", *(f"line {i} of {job}" for i in range(3))]
        file = folder / "trainer.log"
        file.write_text("\n".join(lines) + "\n")
        return file

    def remove(self, stream: str) -> None:
        """Delete a stream, until the end of the test."""
        self.run(self._ask(f"STREAM.DELETE.{stream}"))

    def forget_event(self, seq: int) -> None:
        """Delete an event from the stream."""
        self.run(self.bus.delete_message(subjects.EVENTS, seq))


def write_checkpoint(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a checkpoint, its manifest, and its commit."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    listed = {n: {"nbytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()}
    manifest = msgspec.json.encode({"files": listed})
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMMIT").write_text(hashlib.sha256(manifest).hexdigest())


def group_of(job: str, draw: Draw, source: str, version: int) -> Group:
    """Return a group of four completions of two tokens; the policy chose the first token of each.

    The first and the third completion are right.
    """
    rewards = np.asarray([1, 0, 1, 0], np.float32)
    wanted = str(draw.ordinal + 1)
    meta = {
        "source": source, "prompt": f"{draw.ordinal}+1=", "answer": wanted, "worker": "rollout-0",
        "completions": [wanted, "?", wanted, "?"],
    }  # fmt: skip
    return Group(
        job=job, draw=draw, attempt=f"a{draw.ordinal}", epoch=1, prompt_ids=np.ones(1, np.int32),
        token_ids=np.asarray([2, 3] * 4, np.int32), cu_seqlens=np.arange(0, 9, 2, dtype=np.int32),
        logprobs=np.asarray([-0.5, -1.0] * 4, np.float32), mask=np.asarray([1, 0] * 4, np.uint8), rewards=rewards,
        failed=np.zeros(4, np.bool_), finish=np.zeros(4, np.uint8), parts={"exact": rewards},
        spans=np.asarray([[index, version, 0, 2] for index in range(4)], np.int32), meta=meta,
    )  # fmt: skip


def graded(data: bytes) -> bytes:
    """Return the reply to a request to grade, with 0.25 s as the reported time."""
    request, _ = unpack(data, GradeRequest)
    scorers, flaw = reward_worker._open(Open(request.scorers))
    if flaw or request.sample is None:
        return pack(GradeReply(error=flaw, seconds=0.25, opened=not flaw))
    asked = Score(request.prompt, [request.sample], request.answer, request.item)
    (result,) = reward_worker._results(scorers, asked)
    return pack(GradeReply(scores=result.scores, error=result.error, seconds=0.25, opened=True))


@pytest.fixture(scope="session")
def commit() -> Callable[[Path, dict[str, bytes]], None]:
    """Return ``commit(folder, files)``, which writes a checkpoint as the trainer does."""
    return write_checkpoint


@pytest.fixture(scope="session")
def deployed() -> Iterator[Deployment]:
    """Run one server for all tests of a process, with its data in memory if there is room: an fsync is free there."""
    has_room = SHM.is_dir() and shutil.disk_usage(SHM).free >= SHM_ROOM_BYTES
    with (
        tempfile.TemporaryDirectory(prefix="penstock-test-", dir=SHM if has_room else None) as directory,
        NatsServer(Path(directory)) as server,
    ):
        deployment = Deployment(server)
        yield deployment
        deployment.close()


@pytest.fixture
def deployment(deployed: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return the deployment, emptied."""
    deployed.empty(tmp_path_factory.mktemp("data"))
    return deployed


@pytest.fixture
async def services(deployment: Deployment) -> AsyncIterator[Services]:
    """Yield the services of a front, in the test's loop."""
    async with deployment.services() as services:
        yield services


@pytest.fixture
def listen() -> Callable[[Any, ServiceSettings], contextlib.AbstractAsyncContextManager[int]]:
    """Return ``listening``: ``async with listen(app, settings) as port``."""
    return listening


@pytest.fixture
def job() -> dict[str, Any]:
    """Return a valid job file."""
    return copy.deepcopy(JOB)


@pytest.fixture
def connect(deployment: Deployment) -> Callable[..., contextlib.AbstractAsyncContextManager[httpx.AsyncClient]]:
    """Return a function that runs a front in this process and yields its client; keyword arguments are settings."""

    @contextlib.asynccontextmanager
    async def build(**more: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with deployment.services(**more) as services:
            app = create_app(services)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
            async with app.router.lifespan_context(app), client:
                yield client

    return build


class Served:
    """A front behind a real server on a free port, in a thread of its own."""

    def __init__(self, deployment: Deployment, **more: Any) -> None:
        self.deployment = deployment
        self.stopping: asyncio.Event | None = None
        self._more = more
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while self._server is None or not self._server.started:
            assert time.monotonic() < deadline, f"the server did not start in {DEADLINE_S:g} s"
            time.sleep(0.01)

    async def _serve(self) -> None:
        self.stopping = asyncio.Event()
        async with self.deployment.services(**self._more) as services:
            app = create_app(services, stopping=self.stopping)
            config = uvicorn.Config(
                app, port=self.port, log_level="error", timeout_graceful_shutdown=2, timeout_keep_alive=KEEP_ALIVE_S
            )
            self._server = uvicorn.Server(config)
            self._loop = asyncio.get_running_loop()
            await self._server.serve()

    def stop(self) -> None:
        thread, server, stopping = self._thread, self._server, self.stopping
        if thread is None or server is None or stopping is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(stopping.set)
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"
        self._server = None


@pytest.fixture
def serve(deployment: Deployment) -> Iterator[Callable[..., Served]]:
    """Return a function that starts a server; keyword arguments are settings."""
    servers: list[Served] = []

    def start(**more: Any) -> Served:
        servers.append(Served(deployment, **more))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """Return a running server with default settings."""
    return serve()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
