"""Liveness of the other ranks of this trainer, and the stage that each of them is in.

Every rank above 0 keeps a connection to rank 0, besides those that carry tensors, and both ends send a heartbeat once
per interval. The event loop sends them, so a long step in the compute thread does not delay them. A process that is
stopped, or whose host is lost, falls silent long before a collective times out. A rank counts silence in its own
intervals, so that a process that was itself stopped accuses no other rank when it resumes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from penstock.services.trainer.ranks.process_group import World
from penstock.shared.errors import RankLost

__all__ = ["Liveness", "Sign"]

logger = logging.getLogger(__name__)

KEY = "liveness"
"""Store key of rank 0's port and of the secret word that identifies connections of ranks."""
LONGEST_ERROR = 2000
Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
LOOPBACK = ("127.0.0.1", "localhost")


class Sign(msgspec.Struct, frozen=True, array_like=True):
    """Heartbeat of a rank: the rank's number, its stage, and its own failure ('' if none).

    ``word``: secret word by which the receiver knows that the sender is a rank; ``stage``: '' outside all stages.
    """

    word: str
    rank: int
    stage: str
    entered: int
    """Stages entered so far: an equal number in a later heartbeat means that the rank is still in the same stage."""
    failure: str


class Liveness:
    """Heartbeats of one rank. Rank 0 exchanges heartbeats with all other ranks; a rank above 0 exchanges them with rank
    0 only.

    Args:
        silence_s: time without a heartbeat after which a rank is lost.
        interval_s: time between two heartbeats.
    """

    def __init__(self, world: World, word: str, *, silence_s: float, interval_s: float) -> None:
        self._world, self._word = world, word
        self._silence_s, self._interval_s = silence_s, min(interval_s, silence_s / 4)
        place = world.place
        self._silence = dict.fromkeys(range(1, place.size) if place.rank == 0 else [0], 0.0)
        self._heartbeats: dict[int, Sign] = {}
        self._links: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, world: World, compute: Compute, *, silence_s: float, interval_s: float) -> Liveness:
        """On rank 0, listen for the other ranks. On any other rank, connect to rank 0.

        Args:
            compute: runs blocking calls in a thread.

        Raises:
            RankLost: rank 0 cannot be reached.
        """
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if world.place.rank == 0:
            found = cls(world, secrets.token_hex(16), silence_s=silence_s, interval_s=interval_s)
            own_port = await found._listen(host)
            await compute(partial(world.store.set, KEY, f"{own_port} {found._word}"))
            return found
        try:
            stored: bytes = await compute(partial(world.store.get, KEY))
            port, word = stored.decode().split()
            found = cls(world, word, silence_s=silence_s, interval_s=interval_s)
            reader, writer = await asyncio.open_connection(host, int(port))
        except (RuntimeError, OSError) as error:
            raise RankLost(f"rank {world.place.rank} does not reach rank 0 at {host}: {error}") from error
        found._links.add(writer)
        found._send()  # identifies this connection at once
        found._reading = asyncio.create_task(found._receive(reader), name="signs of rank 0")
        return found

    async def run(self) -> None:
        """Send heartbeats and count silence until cancelled.

        Raises:
            RankLost: a rank was silent for too long; names it and its last stage.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._send()
                began = loop.time()
                await asyncio.sleep(self._interval_s)
                passed_s = min(loop.time() - began, 2 * self._interval_s)
                for rank in self._silence:
                    self._silence[rank] += passed_s
                self._check()
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._server is not None:
            self._server.close()
        if self._reading is not None:
            self._reading.cancel()
        for writer in self._links:
            writer.close()

    @property
    def failure(self) -> str:
        """Error of a rank in a joint operation on which the ranks have not yet voted; '' if there is none."""
        for sign in (self._own(), *self._heartbeats.values()):
            if sign.failure:
                return f"rank {sign.rank}: {sign.failure}"
        return ""

    def describe(self) -> str:
        """Return the last known stage of every rank as text."""
        known = {sign.rank: sign for sign in (self._own(), *self._heartbeats.values())}
        ranks = sorted({*known, *self._silence})
        return "; ".join(f"rank {rank} {_where(known.get(rank))}{self._since(rank)}" for rank in ranks)

    def _since(self, rank: int) -> str:
        silent_s = self._silence.get(rank, 0.0)
        return f", silent for {silent_s:.0f} s" if silent_s > 2 * self._interval_s else ""

    def _check(self) -> None:
        lost = [rank for rank, silent_s in self._silence.items() if silent_s >= self._silence_s]
        if lost:
            named = " and ".join(f"rank {rank}" for rank in lost)
            raise RankLost(
                f"{named} of {self._world.place.size} gave no sign for {self._silence_s:g} s "
                f"(PENSTOCK_RANK_SILENCE_S): stopped, or the host is gone. All ranks start over from the last "
                f"checkpoint. When heard last: {self.describe()}"
            )

    def _own(self) -> Sign:
        world, stages = self._world, self._world.stages
        return Sign(self._word, world.place.rank, str(stages), stages.entered, world.failure[:LONGEST_ERROR])

    def _send(self) -> None:
        line = msgspec.json.encode(self._own()) + b"\n"
        for writer in self._links:
            if not writer.is_closing():
                writer.write(line)

    async def _listen(self, host: str) -> int:
        """Listen on the loopback interface if all ranks share the host, else on all interfaces; return the port."""
        if host in LOOPBACK:
            listener = socket.create_server(("127.0.0.1", 0))
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", 0))
        self._server = await asyncio.start_server(self._take, sock=listener)
        return int(listener.getsockname()[1])

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await asyncio.wait_for(reader.readline(), self._silence_s)
            if self._record(first):
                self._links.add(writer)
                await self._receive(reader)
        except (OSError, ValueError, msgspec.DecodeError) as error:  # a TimeoutError is an OSError
            logger.info("a connection that does not show itself to be a rank's was closed: %s", error)
        finally:
            self._links.discard(writer)
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Read a rank's heartbeats until its connection closes. That is no error here: a lost rank sends no more
        heartbeats, and is found by its silence."""
        try:
            while line := await reader.readline():
                if not self._record(line):
                    return
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.info("no more signs of a rank: %s", error)

    def _record(self, line: bytes) -> bool:
        """Record a heartbeat; return False if its secret word or its rank is unknown. Raises DecodeError."""
        sign = msgspec.json.decode(line, type=Sign)
        if sign.word != self._word or sign.rank not in self._silence:
            logger.warning("a connection that is no rank's was closed")
            return False
        self._heartbeats[sign.rank], self._silence[sign.rank] = sign, 0.0
        return True


def _where(sign: Sign | None) -> str:
    if sign is None:
        return "was never heard"
    if not sign.stage:
        return f"in no stage with the others (after {sign.entered})"
    return f"in '{sign.stage}' (stage {sign.entered})"
