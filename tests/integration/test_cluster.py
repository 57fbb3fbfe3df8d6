"""Three NATS nodes: streams keep their replicas, and acknowledged messages survive the loss of any one node."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from penstock.local.ports import free_ports
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError, Conflict, NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import decode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import Ack, Report
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.runtime.lease import Lease
from penstock.shared.transport import streams
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.jetstream import call
from penstock.shared.transport.server import NatsServer

T = TypeVar("T")

JOB = "job_cluster"
SIZES = {"experience_bytes": 16 << 20, "stream_bytes": 8 << 20}
DEADLINE_S = 90.0
"""Deadline of all waits: an election takes 2 to 10 s, more on a busy machine."""


class Node(NatsServer):
    """NATS node whose routes pass through proxies of the test, so that its links can be cut."""

    def __init__(self, directory: Path, number: int, listen: int, routes: list[int], *, sync: bool) -> None:
        super().__init__(directory, sync=sync)
        self.number, self.listen, self.routes = number, listen, routes

    def _config(self) -> str:
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        return super()._config().replace('server_name: "penstock"', f'server_name: "node-{self.number}"') + (
            f'cluster {{\n  name: "test"\n  listen: "127.0.0.1:{self.listen}"\n  no_advertise: true\n'
            f"  pool_size: -1\n  routes: [{routes}]\n}}\n"
        )


class Link:
    """Route from one node to another that the test can cut."""

    def __init__(self, source: int, target: int, port: int, target_port: int) -> None:
        self.ends = {source, target}
        self.port, self._target_port = port, target_port
        self.is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def close(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        self.is_cut = False

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers |= {writer, back}
            if self.is_cut:  # the link was cut meanwhile
                self.cut()
            try:
                await asyncio.gather(_pump(reader, back), _pump(there, writer))
            finally:
                self._writers -= {writer, back}
        writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


class Cluster:
    """Cluster of three nodes on the loopback interface."""

    def __init__(self, directory: Path, *, sync: bool = True) -> None:
        listens, proxies = free_ports(3), iter(free_ports(6))
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        self.links = [Link(a, b, next(proxies), listens[b]) for a, b in pairs]
        self.nodes = [
            Node(
                directory / f"node-{a}", a, listens[a],
                [link.port for link, (source, _) in zip(self.links, pairs, strict=True) if source == a], sync=sync,
            )
            for a in range(3)
        ]  # fmt: skip

    async def __aenter__(self) -> Cluster:
        for link in self.links:
            await link.open()
        for node in self.nodes:
            await asyncio.to_thread(node.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            with suppress(ProcessLookupError):
                if node.pid:
                    os.kill(node.pid, signal.SIGCONT)
            node.kill()
        for link in self.links:
            await link.close()

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    def isolate(self, node: Node) -> None:
        for link in self.links:
            if node.number in link.ends:
                link.cut()

    def heal(self) -> None:
        for link in self.links:
            link.heal()

    def named(self, name: str) -> Node:
        return next(node for node in self.nodes if f"node-{node.number}" == name)

    async def leader_of(self, bus: Bus, stream: str) -> Node:
        info = await call(bus._connection, f"STREAM.INFO.{stream}", None, deadline_s=DEADLINE_S, what="its leader")
        return self.named(info["cluster"]["leader"])

    async def whole(self, bus: Bus, stream: str) -> None:
        """Wait until every replica of a stream is current."""

        async def current() -> bool:
            info = await call(bus._connection, f"STREAM.INFO.{stream}", None, deadline_s=DEADLINE_S, what="replicas")
            replicas = info["cluster"].get("replicas") or []
            return len(replicas) == 2 and all(one["current"] and not one.get("lag") for one in replicas)

        await until(current)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(Unavailable):
                if await holds():
                    return
            await asyncio.sleep(0.05)


async def tried(work: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until a node answers, because an election takes longer than one deadline; return the result."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await work()
        except Unavailable:
            if time.monotonic() > end:
                raise


@pytest.fixture
async def cluster(store_dir: Path) -> AsyncIterator[Cluster]:
    async with Cluster(store_dir, sync=False) as running:  # the tests are about replication, not about the disk
        yield running


@asynccontextmanager
async def connected(cluster: Cluster, name: str = "test") -> AsyncIterator[Bus]:
    async with await Bus.connect(cluster.url, name=name, deadline_s=DEADLINE_S) as bus:
        yield bus


async def ensured(bus: Bus, replicas: int) -> None:
    """Create the streams as a coordinator does at its start: repeat until the cluster is available."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(Unavailable):
                await bus.ensure_streams(**SIZES, replicas=replicas)
                return


async def replicas(bus: Bus) -> set[int]:
    names = [*streams.STREAMS, *(f"KV_{bucket}" for bucket in streams.BUCKETS)]
    infos = [
        await call(bus._connection, f"STREAM.INFO.{name}", None, deadline_s=DEADLINE_S, what=name) for name in names
    ]
    return {info["config"]["num_replicas"] for info in infos}


async def append(bus: Bus, count: int, *, start: int = 0) -> list[int]:
    """Append ``count`` entries to a ledger, each after the one before is acknowledged; return their sequences."""
    last = await tried(lambda: bus.last(subjects.LEDGER, subjects.ledger(JOB)))
    seq, seqs = last.seq if last is not None else 0, []
    for number in range(start, start + count):
        data, id = b"%d" % number, f"{JOB}.{number}"
        seq = await bus.publish(
            subjects.ledger(JOB), data, msg_id=id, expect_last_subject_seq=seq, deadline_s=DEADLINE_S
        )
        seqs.append(seq)
    return seqs


async def holds(bus: Bus, count: int) -> bool:
    """Return True if this client sees entries 0 to ``count - 1``; a node may serve them a moment after it caught up."""
    return await stored(bus) == list(range(count))


async def stored(bus: Bus) -> list[int]:
    messages = await tried(lambda: bus.read(subjects.LEDGER, subjects.ledger(JOB)))
    return [int(message.data) for message in messages]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_number_of_replicas_is_odd() -> None:
    assert load_settings({}).stream_replicas == 1
    assert load_settings({"PENSTOCK_STREAM_REPLICAS": "3"}).stream_replicas == 3
    for wrong in ("2", "0", "7", "three"):
        with pytest.raises(ConfigError, match="PENSTOCK_STREAM_REPLICAS"):
            load_settings({"PENSTOCK_STREAM_REPLICAS": wrong})


async def test_replicas_on_a_single_server_are_a_clear_error(nats_server: NatsServer) -> None:
    async with await Bus.connect(nats_server.url, name="test") as bus:
        with pytest.raises(ConfigError, match=r"no cluster.*PENSTOCK_STREAM_REPLICAS"):
            await bus.ensure_streams(**SIZES, replicas=3)


async def test_settings_of_an_operator_survive_the_start_of_a_coordinator(bus: Bus) -> None:
    """A coordinator changes the sizes of streams at its start, but no other settings of an operator."""
    connection = bus._connection
    info = await call(connection, "STREAM.INFO.LEDGER", None, deadline_s=5, what="LEDGER")
    changed = info["config"] | {"compression": "s2", "metadata": {"owner": "ops"}}
    await call(connection, "STREAM.UPDATE.LEDGER", changed, deadline_s=5, what="compress LEDGER")
    await bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=17 << 20)
    found = (await call(connection, "STREAM.INFO.LEDGER", None, deadline_s=5, what="LEDGER"))["config"]
    assert (found["compression"], found["metadata"]["owner"], found["max_bytes"]) == ("s2", "ops", 17 << 20)


async def test_the_audit_log_is_not_cut_by_a_smaller_size(bus: Bus) -> None:
    await bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=16 << 20)
    for number in range(300):
        await bus.publish(f"{subjects.AUDIT.lower()}.{number}", b"x" * 4096)
    before = await bus.stream_state(subjects.AUDIT)
    await bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=2 << 20)
    after = await bus.stream_state(subjects.AUDIT)
    assert (after.messages, after.max_bytes) == (before.messages, before.max_bytes)


@pytest.mark.long
async def test_a_start_raises_replicas_and_never_lowers_them(cluster: Cluster) -> None:
    """Earlier, a coordinator's start could reduce streams of three replicas to one replica."""
    async with connected(cluster) as bus:
        await ensured(bus, 1)
        assert await replicas(bus) == {1}
        await append(bus, 3)
        await ensured(bus, 3)
        assert await replicas(bus) == {3}
        await ensured(bus, 1)
        assert await replicas(bus) == {3}
        assert await stored(bus) == [0, 1, 2]


# -- drills ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_acknowledged_appends_survive_the_end_of_a_leader(cluster: Cluster) -> None:
    async with connected(cluster) as bus:
        await ensured(bus, 3)
        await append(bus, 20)
        leader = await cluster.leader_of(bus, subjects.LEDGER)
        leader.kill()
        await append(bus, 20, start=20)
        assert await stored(bus) == list(range(40))
        assert (await cluster.leader_of(bus, subjects.LEDGER)).number != leader.number


@pytest.mark.long
async def test_a_node_that_is_cut_off_acknowledges_nothing_and_catches_up(cluster: Cluster) -> None:
    """The ledger's leader is cut off together with a client that knows no other node."""
    async with connected(cluster) as bus:
        await ensured(bus, 3)
        before = await append(bus, 20)
        leader = await cluster.leader_of(bus, subjects.LEDGER)
        async with await Bus.connect(leader.url, name="alone") as alone:
            cluster.isolate(leader)
            with pytest.raises((Unavailable, Conflict)):
                await alone.publish(
                    subjects.ledger(JOB), b"999", expect_last_subject_seq=before[-1], msg_id="lost", deadline_s=3
                )
        others = ",".join(node.url for node in cluster.nodes if node is not leader)
        async with await Bus.connect(others, name="majority") as majority:
            await append(majority, 20, start=20)
            cluster.heal()
            await cluster.whole(majority, subjects.LEDGER)
        for node in cluster.nodes:
            async with await Bus.connect(node.url, name="each") as each:
                await until(partial(holds, each, 40))


@pytest.mark.long
async def test_reads_through_a_lagging_replica_are_complete(cluster: Cluster) -> None:
    """A replica is stopped while a thousand messages are stored, and serves reads as soon as it runs again."""
    async with connected(cluster) as bus:
        await ensured(bus, 3)
        await append(bus, 5)
        leader = await cluster.leader_of(bus, subjects.LEDGER)
        slow = next(node for node in cluster.nodes if node is not leader)
        os.kill(slow.pid, signal.SIGSTOP)
        others = ",".join(node.url for node in cluster.nodes if node is not slow)
        async with await Bus.connect(others, name="majority") as majority:
            seqs = await append(majority, 1000, start=5)
        os.kill(slow.pid, signal.SIGCONT)
        async with await Bus.connect(slow.url, name="at the slow one", deadline_s=DEADLINE_S) as here:
            for _ in range(10):
                assert await stored(here) == list(range(1005)), "a scan ends where the leader ends"
                assert (await tried(lambda: here.get(subjects.LEDGER, seqs[-1]))).data == b"1004"
            with pytest.raises(NotFound):
                await tried(lambda: here.get(subjects.LEDGER, seqs[-1] + 1))


@pytest.mark.long
async def test_a_node_whose_disk_was_wiped_is_filled_again(cluster: Cluster) -> None:
    async with connected(cluster) as bus:
        await ensured(bus, 3)
        await append(bus, 200)
        await cluster.whole(bus, subjects.LEDGER)
        wiped = await cluster.leader_of(bus, subjects.LEDGER)
        wiped.kill()
        shutil.rmtree(wiped.store)
        await append(bus, 50, start=200)
        await asyncio.to_thread(wiped.start)
        await cluster.whole(bus, subjects.LEDGER)
        other = next(node for node in cluster.nodes if node is not wiped)
        other.kill()
        assert await stored(bus) == list(range(250)), "two of three have all of it"
        await append(bus, 5, start=250)


# -- a job -------------------------------------------------------------------------------------------------------------

SPEC: dict[str, Any] = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "sampling": {"max_new_tokens": 4},
    "train": {"batch_size": 8, "max_updates": 1000, "draw_timeout_s": 600},
}


def group(draw: Draw, version: int) -> Group:
    ones = np.ones(4, np.int32)
    return Group(
        job=JOB, draw=draw, attempt=f"of {draw}", epoch=1, prompt_ids=ones, token_ids=ones,
        cu_seqlens=np.arange(5, dtype=np.int32), logprobs=np.zeros(4, np.float32), mask=np.ones(4, np.uint8),
        rewards=np.asarray([0, 1, 0, 1], np.float32), failed=np.zeros(4, np.bool_), finish=np.zeros(4, np.uint8),
        spans=np.asarray([[i, version, 0, 1] for i in range(4)], np.int32), meta={},
    )  # fmt: skip


class Played:
    """A job whose leader runs here; the test plays its workers."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
        self.record = record
        self.runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=Path("/nonexistent"))
        self._sent: set[Draw] = set()

    async def report(self, **fields: Any) -> None:
        data = pack(Report(epoch=1, **fields), job=JOB)
        reply = await tried(lambda: self.bus.request(subjects.report(JOB), data, deadline_s=10))
        assert unpack(reply, Ack)[0].ok

    async def update(self) -> None:
        """Publish a group for each open draw until the next batch is sealed, and report that batch as trained."""
        state = self.runner.run.state
        number = state.last_trained + 1

        async def sealed() -> bool:
            for draw in [draw for draw in state.open if draw not in self._sent]:
                data, header = encode_group(group(draw, state.version))
                await self.bus.publish_whole(
                    [Outgoing(subjects.experience(JOB), data, group_headers(header), f"group:{draw}")], deadline_s=10
                )
                self._sent.add(draw)
            return number in state.sealed

        await until(sealed)
        revision = state.sealed[number].revision
        await self.report(
            kind="trained", batch=number, revision=revision, version=state.version + 1, digest=f"w{number}"
        )


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
async def test_a_job_goes_on_without_one_node(cluster: Cluster, fault: str) -> None:
    """The fault kills or stops the leader of the ledger, or cuts off the node to which the coordinator is connected."""
    async with connected(cluster) as bus:
        await ensured(bus, 3)
        job = Played(bus)
        await bus.kv(subjects.JOBS).put(JOB, job.record.model_dump_json().encode())
        lease = Lease(bus, "coordinator", holder="a", lease_s=30.0)
        epoch = await lease.acquire(deadline_s=DEADLINE_S)
        tasks = [asyncio.create_task(job.runner.lead()), asyncio.create_task(lease.keep())]
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not job.runner.ready:
                    await asyncio.sleep(0.05)
            await job.report(kind="checkpointed", batch=0, version=0, digest="w0", path="p")
            for _ in range(3):
                await job.update()
            gone = await cluster.leader_of(bus, subjects.LEDGER)
            if fault == "kill":
                gone.kill()
            elif fault == "stop":
                os.kill(gone.pid, signal.SIGSTOP)
            else:
                port = bus._connection._client.connected_url.port
                cluster.isolate(next(node for node in cluster.nodes if node.port == port))
            for _ in range(3):
                await job.update()
            assert not any(task.done() for task in tasks), "the leader leads, and holds its lease"
            assert (lease.held, lease.epoch) == (True, epoch)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        messages = await tried(lambda: bus.read(subjects.LEDGER, subjects.ledger(JOB)))
        audit = audit_ledger([decode_events(message.data) for message in messages], JobConfig.parse(SPEC))
        assert not audit.violations
