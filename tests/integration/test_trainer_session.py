"""What a trainer's session survives, and what it lets go of."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from penstock.services.trainer.crew import Crew
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.ranks import Threads
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings
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
        session = TrainerSession(bus, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), JOB, CONFIG)
    assert not await session._is_wanted()
