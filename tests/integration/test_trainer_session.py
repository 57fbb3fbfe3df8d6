"""What a trainer's session survives, and what it lets go of."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.services.trainer.crew import Crew
from penstock.services.trainer.fence import Fence
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.ranks import Threads
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.reports import Reporter
from penstock.services.trainer.session import TrainerSession
from penstock.services.trainer.wanted import is_wanted
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, Command, Report
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

JOB = "job_1"
CONFIG = JobConfig.parse(
    {
        "name": "tiny",
        "model": {"config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "algorithm": {"group_size": 4},
        "train": {"batch_size": 4, "max_updates": 20},
    }
)


async def test_the_models_of_an_earlier_start_are_freed(bus: Bus, tmp_path: Path) -> None:
    threads = Threads()
    replica = Replica(bus, JOB, CONFIG, world=None, threads=threads, checkpoints=tmp_path)
    crew = Crew(replica, None)
    publishing = Publishing(bus, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), JOB)
    await crew.open()
    first = weakref.ref(replica.learner)
    await publishing.publish(crew, version=0, epoch=1)
    await crew.close()
    gc.collect()
    assert first() is None
    await crew.open()
    assert (await publishing.publish(crew, version=0, epoch=2)).base == ""
    publishing.close()
    threads.close()


async def test_a_halted_job_waits_for_a_bus_that_is_away(nats_server: NatsServer, tmp_path: Path) -> None:
    async with await Bus.connect(nats_server.url, name="test") as bus:
        await bus.wait_connected(5)
    assert not await is_wanted(bus, JOB)


def session_of(bus: Bus, directory: Path) -> TrainerSession:
    return TrainerSession(bus, ServiceSettings(data_dir=directory, shm_dir=directory), JOB, CONFIG)


async def test_commands_of_a_fenced_coordinator_are_refused(bus: Bus, tmp_path: Path) -> None:
    session = session_of(bus, tmp_path)

    async def asked(epoch: int) -> Ack:
        command = Command(kind="rollback", epoch=epoch, args={"version": 0, "reason": f"epoch {epoch}"})
        return unpack(await session._on_command(pack(command, job=JOB, epoch=epoch)), Ack)[0]

    assert (await asked(4)).ok
    assert session._going_back == "epoch 4"
    session._going_back = ""
    refused = await asked(3)
    assert not refused.ok
    assert "epoch 3 is over" in refused.reason
    assert not session._going_back, "nobody goes back for a leader that lost its lease"
    assert (await asked(4)).ok
    assert (await asked(5)).ok
    assert session._going_back == "epoch 5"


@asynccontextmanager
async def coordinator(bus: Bus, *epochs: int) -> AsyncIterator[None]:
    """Answers reports, each time as the leader with the next of ``epochs``, at last always with the last one."""
    left = list(epochs)

    async def answer(data: bytes) -> bytes:
        epoch = left.pop(0) if len(left) > 1 else left[0]
        return pack(Ack(ok=True, data={"epoch": epoch}), job=JOB, epoch=epoch)

    async with await bus.serve(subjects.report(JOB), answer):
        yield


async def test_what_a_fenced_coordinator_answers_is_asked_of_its_successor(bus: Bus) -> None:
    reporter = Reporter(bus, JOB, Fence())
    async with coordinator(bus, 2, 1, 1, 3), asyncio.timeout(30):
        assert (await reporter.ask(Report(kind="hello", epoch=1)))["epoch"] == 2
        assert (await reporter.ask(Report(kind="hello", epoch=1)))["epoch"] == 3


async def test_the_age_of_an_unanswered_report_grows(bus: Bus, tmp_path: Path) -> None:
    session = session_of(bus, tmp_path)
    began = time.time()
    asking = asyncio.create_task(session._reporter.ask(Report(kind="hello", epoch=1)))
    seen = []
    async with asyncio.timeout(30):
        while len(seen) < 2:
            row = session.status()
            if "waiting_for" in row:
                seen.append(row["since"])
            await asyncio.sleep(0.4)  # as between two heartbeats
    assert seen[0] == seen[1] == pytest.approx(began, abs=0.3)
    asking.cancel()


async def test_a_trainer_whose_start_failed_says_what_it_waits_for(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(self: Crew) -> None:
        raise ConfigError("model.path: no such model")

    monkeypatch.setattr(Crew, "open", no_room)
    session = session_of(bus, tmp_path)

    async def answer(data: bytes) -> bytes:
        return pack(Ack(ok=True, data={"checkpoint": None, "last_trained": 0}), job=JOB, epoch=1)

    async with await bus.serve(subjects.report(JOB), answer):
        running = asyncio.create_task(session.run())
        async with asyncio.timeout(30):
            while "end this job" not in (row := session.status()).get("waiting_for", ""):
                await asyncio.sleep(0.02)
        assert "model.path: no such model" in row["waiting_for"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
