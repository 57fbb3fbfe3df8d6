"""Ranks that are stopped, or fail alone, while others wait for them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.services.trainer.ranks import heartbeats as module
from penstock.services.trainer.ranks.heartbeats import Ranks, Threads
from penstock.services.trainer.ranks.liveness import KEY, Liveness
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.replica import Replica
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import CheckpointError, DataError, RankLost

SILENCE_S = 3.0
DONE = "done"


def watch(world: World, victim: int) -> str:
    """Stop ``victim`` from the other rank; return the error of that rank, and '' on ``victim``."""
    return asyncio.run(_watch(world, victim))


async def _watch(world: World, victim: int) -> str:
    pids = [int(part["pid"][0]) for part in world.everybody.gather({"pid": np.array([os.getpid()])})]
    threads = Threads()
    liveness = await Liveness.open(world, threads.compute, silence_s=SILENCE_S, interval_s=0.1)
    running = asyncio.create_task(liveness.run())
    with world.everybody.during("update 7"):
        if world.place.rank == victim:
            await threads.compute(partial(world.store.wait, [DONE]))
            await asyncio.sleep(0.3)  # pending heartbeats are read
            assert not running.done(), "the stopped rank reports no other rank"
            running.cancel()
            return ""
        while f"rank {victim} in 'update 7'" not in liveness.describe():
            await asyncio.sleep(0.01)
        os.kill(pids[victim], signal.SIGSTOP)
        try:
            await running
        except RankLost as error:
            return str(error)
        finally:
            os.kill(pids[victim], signal.SIGCONT)
            await threads.compute(partial(world.store.set, DONE, "1"))
    return "nothing"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.long
def test_a_stopped_rank_is_noticed(ranks: Any, victim: int) -> None:
    message = ranks.run(2, watch, victim)[1 - victim]
    assert f"rank {victim} of 2 gave no sign for {SILENCE_S:g} s" in message
    assert f"rank {victim} in 'update 7' (stage 2), silent for 3 s" in message, "where it was"
    assert f"rank {1 - victim} in 'update 7' (stage 2)" in message


def compute(world: World, seconds: float) -> str:
    """Compute on rank 1 longer than the allowed silence while rank 0 waits in a collective; return the error, or ''."""
    return asyncio.run(_compute(world, seconds))


async def _compute(world: World, seconds: float) -> str:
    threads = Threads()
    liveness = await Liveness.open(world, threads.compute, silence_s=1.0, interval_s=0.05)
    running = asyncio.create_task(liveness.run())

    def step() -> None:
        end = time.monotonic() + seconds
        while world.place.rank and time.monotonic() < end:
            sum(range(1000))
        world.everybody.agree(True)

    await threads.compute(step)
    lost = running.done()
    running.cancel()
    await threads.compute(partial(world.everybody.agree, True))
    return str(running.exception()) if lost else ""


@pytest.mark.long
def test_a_long_step_is_no_silence(ranks: Any) -> None:
    assert ranks.run(2, compute, 2.5) == ["", ""]


class Rank(NamedTuple):
    """This rank of a trainer, without a bus."""

    threads: Threads
    liveness: Liveness
    ranks: Ranks
    replica: Replica


@asynccontextmanager
async def rank_of(world: World, config: JobConfig, directory: Path) -> AsyncIterator[Rank]:
    threads = Threads()
    liveness = await Liveness.open(world, threads.compute, silence_s=30, interval_s=0.02)
    running = asyncio.create_task(liveness.run())
    replica = Replica(None, "job", config, world=world, threads=threads, checkpoints=directory)  # type: ignore[arg-type]
    try:
        yield Rank(threads, liveness, Ranks(world, threads, liveness), replica)
    finally:
        running.cancel()


def fail_alone(world: World, config: JobConfig, directory: Path) -> tuple[str, str]:
    """Fail on rank 1 while rank 0 waits in a collective of the same work; return the errors of this rank."""
    module.FAILED_GRACE_S = 1.0
    return asyncio.run(_fail_alone(world, config, directory))


async def _fail_alone(world: World, config: JobConfig, directory: Path) -> tuple[str, str]:
    def work() -> bool:
        if world.place.rank:
            raise DataError("rows.jsonl: no such file")
        return world.everybody.agree(True)

    async with rank_of(world, config, directory) as own:
        warm_start = own.replica.together("the warm start", work)
        if world.place.rank:
            failing = asyncio.create_task(warm_start)
            await asyncio.to_thread(world.store.wait, [DONE])
            world.everybody.agree(True)  # only to let rank 0 go
            with pytest.raises(DataError) as failed:
                await failing
            return str(failed.value), ""
        with pytest.raises(CheckpointError) as caught:
            await own.ranks.unless_failed(warm_start)
        with pytest.raises(RankLost) as stranded:
            await own.ranks.unless_failed(own.replica.copy())
        await asyncio.to_thread(world.store.set, DONE, "1")
        await own.threads.compute(lambda: None)  # after the vote
        return str(caught.value), str(stranded.value)


def test_an_error_of_one_rank_ends_the_wait_of_the_others(ranks: Any, make_config: Any, tmp_path: Path) -> None:
    (message, again), (own, _) = ranks.run(2, fail_alone, make_config(backend={"type": "fsdp"}), tmp_path)
    assert message == "rank 1: the warm start: rows.jsonl: no such file"
    assert again == f"the ranks wait for one that failed: {message}"
    assert own == "rows.jsonl: no such file"


def test_an_error_on_which_all_vote_strands_nobody(ranks: Any, make_config: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, vote, make_config(backend={"type": "fsdp"}), tmp_path)
    assert first == ("rank 1: rows.jsonl: no such file", "", "")
    assert second == ("rows.jsonl: no such file", "", "")


def vote(world: World, config: JobConfig, directory: Path) -> tuple[str, str, str]:
    """Fail on rank 1 before a vote; return this rank's error, its failure afterwards, and why it is stranded, or ''."""
    return asyncio.run(_vote(world, config, directory))


async def _vote(world: World, config: JobConfig, directory: Path) -> tuple[str, str, str]:
    def work() -> None:
        if world.place.rank:
            raise DataError("rows.jsonl: no such file")

    async with rank_of(world, config, directory) as own:
        with pytest.raises((CheckpointError, DataError)) as caught:
            await own.ranks.unless_failed(own.replica.together("the warm start", work))
        async with asyncio.timeout(30):
            while own.liveness.failure:  # the last sign of another rank may be older than the vote
                await asyncio.sleep(0.02)
        await own.threads.compute(partial(world.everybody.agree, True))
    return str(caught.value), own.liveness.failure, own.ranks.stranded


def fail_apart(world: World, config: JobConfig, directory: Path) -> tuple[str, str]:
    """Fail on rank 1 in work without collectives, while rank 0 works on; return its error and why it is stranded."""
    grace_s, look_s, module.FAILED_GRACE_S, module.POLL_S = module.FAILED_GRACE_S, module.POLL_S, 0.1, 0.02
    try:
        return asyncio.run(_fail_apart(world, config, directory))
    finally:
        module.FAILED_GRACE_S, module.POLL_S = grace_s, look_s


async def _fail_apart(world: World, config: JobConfig, directory: Path) -> tuple[str, str]:
    def work() -> None:
        if world.place.rank:
            raise CheckpointError("a file is torn")
        time.sleep(0.6)

    async with rank_of(world, config, directory) as own:
        with pytest.raises(CheckpointError) as caught:
            await own.ranks.unless_failed(own.replica.together("a checkpoint to be verified", work, meets=False))
        await own.threads.compute(partial(world.everybody.agree, True))
    return str(caught.value), own.ranks.stranded


def test_work_in_which_ranks_do_not_meet_strands_nobody(ranks: Any, make_config: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, fail_apart, make_config(backend={"type": "fsdp"}), tmp_path)
    assert first == ("rank 1: a file is torn", "")
    assert second == ("a file is torn", "")


def intrude(world: World) -> bytes:
    """Open a silent connection from rank 1 to rank 0; return what rank 1 receives until rank 0 closes it."""
    return asyncio.run(_intrude(world))


async def _intrude(world: World) -> bytes:
    threads, received = Threads(), b""
    liveness = await Liveness.open(world, threads.compute, silence_s=0.4, interval_s=0.02)
    running = asyncio.create_task(liveness.run())
    if world.place.rank:
        port = int(world.store.get(KEY).split()[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(30):
            received = await reader.read()
        writer.close()
    await threads.compute(partial(world.everybody.agree, True))
    running.cancel()
    return received


@pytest.mark.long
def test_a_silent_connection_receives_nothing_and_is_closed(ranks: Any) -> None:
    assert ranks.run(2, intrude) == [b"", b""]
