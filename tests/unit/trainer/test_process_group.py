"""Ranks exchange messages, and end when one of them is gone."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from penstock.services.trainer.ranks.orders import Leave, Load, Orders, Publish, Train
from penstock.services.trainer.ranks.process_group import Place, World, place_from_environment, store_of_this_start
from penstock.services.trainer.ranks.row_shards import own_rows
from penstock.shared.errors import ConfigError, RankLost
from penstock.shared.protocol.messages import BatchManifest

MANIFEST = BatchManifest(number=3, revision=1, start_version=2, update_index=2, groups=[])
RANK_OF_TORCHRUN = """
from penstock.services.trainer.ranks.process_group import join, place_from_environment
world = join(place_from_environment(), deadline_s=50)
print(world.everybody.sum({"ranks": 1.0})["ranks"], flush=True)
world.leave()
"""
TOGETHER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def talk(world: World) -> dict[str, Any]:
    """Run each collective once; return its results on this rank."""
    everybody = world.everybody
    rank, size = everybody.rank, everybody.size
    own = {"ids": np.arange(rank * 3), "flags": np.array([rank == 0]), "loss": np.full(2, rank / 7, np.float32)}
    gathered = everybody.gather(own)
    torch.from_numpy(gathered[0]["loss"])  # writable, or torch warns
    return {
        "gather": [{name: array.tolist() for name, array in part.items()} for part in gathered],
        "dtypes": [{name: str(array.dtype) for name, array in part.items()} for part in gathered],
        "sum": everybody.sum({"a": 0.1 * (rank + 1), "inf": float("inf") if rank else 1.0}),
        "max": everybody.max({"a": float(rank)}),
        "agree": [everybody.agree(True), everybody.agree(rank == 0)],
        "broadcast": everybody.broadcast(b"word" * 1000 if rank == 0 else None),
        "empty": everybody.broadcast(b"" if rank == 0 else None),
        "pairs": world.data_parallel(size).size,
        "alone": world.data_parallel(1).size,
    }


def follow(world: World) -> list[str]:
    """Give orders on rank 0; return the orders that another rank takes."""
    orders = Orders(world.store, rank=world.place.rank, size=world.place.size)
    if world.place.rank == 0:
        for order in (Load("/x"), Train(MANIFEST), Publish(), Leave()):
            orders.give(order)  # faster than they are taken
        world.everybody.agree(True)
        return []
    taken = [repr(orders.take()) for _ in range(4)]
    world.everybody.agree(True)
    orders.stop()
    assert orders.take() is None
    return taken


def be_left(world: World) -> str:
    """End rank 1 while rank 0 waits for it; return the error of rank 0."""
    if world.place.rank == 1:
        return ""
    with pytest.raises(RankLost) as caught:
        world.everybody.gather({})
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_receives_the_same(ranks: Any, size: int) -> None:
    results = ranks.run(size, talk)
    assert all(result == results[0] for result in results)
    result = results[0]
    assert [part["ids"] for part in result["gather"]] == [list(range(3 * rank)) for rank in range(size)]
    assert result["dtypes"][-1] == {"ids": "int64", "flags": "bool", "loss": "float32"}
    assert result["sum"]["a"] == pytest.approx(sum(0.1 * (rank + 1) for rank in range(size)), rel=1e-15)
    assert result["sum"]["inf"] == (float("inf") if size > 1 else 1.0)
    assert (result["max"], result["agree"]) == ({"a": size - 1.0}, [True, size == 1])
    assert (result["broadcast"], result["empty"]) == (b"word" * 1000, b"")
    assert (result["pairs"], result["alone"]) == (1, size)


def test_followers_take_orders_in_turn(ranks: Any) -> None:
    _, *taken = ranks.run(3, follow)
    assert taken[0] == taken[1] == [repr(order) for order in (Load("/x"), Train(MANIFEST), Publish(), Leave())]


def test_a_lost_rank_is_named(ranks: Any) -> None:
    message, _ = ranks.run(2, be_left)
    assert "rank 0 of 2 waited for the others (facts of the batch)" in message
    assert "died, or did not respond for 60 s" in message


@pytest.mark.long
def test_ranks_of_torchrun_meet_at_the_store_of_its_agent_at_every_start(nursery: Any, tmp_path: Path) -> None:
    """torchrun's agent hosts one store at MASTER_PORT for all starts, so rank 0 cannot listen there.

    Ranks must not find entries that an earlier start left in the store. Each agent counts its own restarts only: to it,
    the failure of another agent's rank is a change of membership, which it does not count.
    """
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = tmp_path / "rank.py"
    program.write_text(RANK_OF_TORCHRUN)
    for start, failures in enumerate([(0, 0), (1, 0), (1, 1)]):
        paths = [tmp_path / f"start{start}rank{rank}" for rank in range(2)]
        processes = []
        for rank, path in enumerate(paths):
            environment = {
                **os.environ, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(failures[rank]),
            }  # fmt: skip
            with path.open("wb") as output:
                processes.append(nursery.run(str(program), environment=environment, output=output.fileno()))
        codes = [process.wait(60) for process in processes]
        assert [path.read_text().split()[-1:] for path in paths] == [["2.0"]] * 2, [path.read_text() for path in paths]
        assert codes == [0, 0]


class Agent:
    """torchrun's store, and ranks in threads that meet there, each over a connection of its own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pool = pool

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self._store.port, is_master=False)

    def start(self, rank: int, size: int, deadline_s: float = 20) -> Future[str]:
        """Start a rank in a thread; the future is the value that rank 0 set under `word`, once all ranks have met."""

        def run() -> str:
            store = store_of_this_start(self.connect(), Place(rank, size), deadline_s=deadline_s)
            if rank == 0:
                assert not store.check(["word"]), "the store holds the word of an earlier start"
                store.set("word", word)
            return store.get("word").decode()

        word = str(time.monotonic_ns())
        return self._pool.submit(run)

    def met(self, ranks: list[Future[str]]) -> None:
        assert len({rank.result(30) for rank in ranks}) == 1


@pytest.fixture
def agent() -> Any:
    with ThreadPoolExecutor(16) as pool:
        yield Agent(pool)


def test_ranks_that_come_before_rank_0_wait_for_its_new_start(agent: Agent) -> None:
    agent.met([agent.start(rank, 3) for rank in range(3)])
    early = [agent.start(rank, 3) for rank in (2, 1)]  # they find the earlier start, for which all three are registered
    time.sleep(0.3)
    assert not any(rank.done() for rank in early)
    agent.met([agent.start(0, 3), *early])
    agent.met([agent.start(rank, 2) for rank in (1, 0)])  # fewer hosts than before


def test_an_abandoned_start_does_not_disturb_the_next_one(agent: Agent) -> None:
    left_over = [agent.start(rank, 3, deadline_s=0.3) for rank in (0, 1)]
    for rank in left_over:
        with pytest.raises(TimeoutError, match="rank 2 of the newest start did not come"):
            rank.result(30)
    late = agent.start(2, 3)  # completes the list of the abandoned start
    time.sleep(0.3)
    assert not late.done()
    agent.met([late, agent.start(1, 3), agent.start(0, 3)])


def test_ranks_that_did_not_come_to_the_meeting_are_named(agent: Agent) -> None:
    with pytest.raises(TimeoutError, match="rank 0 has not started"):
        agent.start(1, 2, deadline_s=0.2).result(30)
    with pytest.raises(TimeoutError, match="rank 1, 2 of the newest start did not come"):
        agent.start(0, 3, deadline_s=0.2).result(30)
    left_over = agent.start(0, 2)
    time.sleep(0.3)
    agent.met([agent.start(0, 1)])
    with pytest.raises(ConnectionAbortedError, match="another rank 0"):
        left_over.result(30)


def test_rank_and_size_come_from_the_environment() -> None:
    assert place_from_environment({}) == Place()
    assert place_from_environment(TOGETHER) == Place(1, 2, 1)
    assert place_from_environment({**TOGETHER, "LOCAL_RANK": "0"}) == Place(1, 2, 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"MASTER_PORT": ""}, "but not MASTER_PORT"),
        ({"RANK": "2"}, "RANK 2 is not one of WORLD_SIZE 2"),
        ({"RANK": "one"}, "must be numbers"),
    ],
)
def test_an_incomplete_environment_is_refused(change: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        place_from_environment({**TOGETHER, **change})


@pytest.mark.parametrize("ranks_", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 7])
def test_every_row_has_one_rank(num_rows: int, ranks_: int) -> None:
    owned = [row for rank in range(ranks_) for row in range(num_rows)[own_rows(num_rows, rank, ranks_)]]
    assert owned == list(range(num_rows))
    whole = torch.arange(num_rows)
    for rank, chunk in enumerate(torch.chunk(whole, ranks_) if num_rows else ()):
        assert whole[own_rows(num_rows, rank, ranks_)].equal(chunk), "as torch cuts"
