"""HTTP load generator in a separate process. It opens plain TCP connections, without an HTTP library; each of them has
one request in flight at all times.

    python -m penstock.local.load < plan.json

Prints the results as one JSON object. A broken connection is reopened until the time is over, and its request in
flight counts as an error. SIGTERM ends the load early. With ``acked`` the ids in the replies are appended to a file,
one write for each reply, before the next request.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

__all__ = ["Plan", "Result", "run"]

AGAIN_S = 0.05
LONGEST_REPLY_S = 30.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_IDS = re.compile(rb'"(?:feedback_id|id)":"([0-9a-f-]{36})"')


class Plan(msgspec.Struct, kw_only=True):
    """The requests to send, the address to send them to, and the duration of the load.

    ``items``: number of items in one request, to compute the rate; ``good``: HTTP statuses of success; ``acked``:
    file for the ids in the replies, or ''.
    """

    host: str
    port: int
    path: str
    body: str
    connections: int
    seconds: float
    items: int = 1
    good: tuple[int, ...] = (200, 202, 207)
    acked: str = ""


class Result(msgspec.Struct, kw_only=True):
    """Results of a load. Latencies are those of whole requests whose reply has a status of success (``Plan.good``)."""

    requests: int
    items_per_s: float
    p50_ms: float
    p99_ms: float
    statuses: dict[str, int]
    errors: int
    seconds: float


class _Link(asyncio.Protocol):
    """One connection with one request in flight at a time."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._sent = 0.0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        self._send()

    def data_received(self, data: bytes) -> None:
        """Collect the data; once a reply is complete, count it and send the next request."""
        self._data += data
        head = self._data.find(b"\r\n\r\n")
        if head < 0:
            return
        found = _LENGTH.search(self._data, 0, head)
        end = head + 4 + (int(found[1]) if found else 0)
        if len(self._data) < end:
            return
        self._load.take(int(self._data[9:12]), time.perf_counter() - self._sent, bytes(self._data[head:end]))
        del self._data[:end]
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end, so that the load opens another connection."""
        if not self.over.done():
            self.over.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        if self._load.is_over:
            self._transport.close()
            return
        self._sent = time.perf_counter()
        self._transport.write(self._load.request)


class _Load:
    """Load of one run: the request, the results so far, and the end time, shared by all connections."""

    def __init__(self, plan: Plan, acked: BinaryIO | None) -> None:
        self.plan = plan
        body = plan.body.encode()
        head = f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\nContent-Type: application/json\r\n"
        self.request = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.latencies: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.errors = 0
        self._end = time.perf_counter() + plan.seconds
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        self._acked = acked

    def stop(self) -> None:
        """End the load now, before its time is over."""
        self._end = 0.0

    @property
    def is_over(self) -> bool:
        """True once the run time has passed."""
        return time.perf_counter() >= self._end

    def take(self, status: int, seconds: float, body: bytes) -> None:
        """Count one reply."""
        self.statuses[str(status)] += 1
        if status not in self.plan.good:
            return
        self.latencies.append(seconds)
        if self._acked is not None:
            self._acked.write(b"".join(id + b"\n" for id in _IDS.findall(body)))

    async def keep_open(self) -> None:
        """Keep one connection open until the run time has passed; replace the connection when it ends."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            try:
                _, link = await loop.create_connection(lambda: _Link(self), self.plan.host, self.plan.port)
                await link.over
            except OSError:
                await asyncio.sleep(AGAIN_S)
            if not self.is_over:
                self.errors += 1


@contextmanager
def _acked(plan: Plan) -> Iterator[BinaryIO | None]:
    """Open the file for acknowledged ids, unbuffered, so that ids survive a kill; yield None if ``plan`` names none."""
    if not plan.acked:
        yield None
        return
    with Path(plan.acked).open("ab", buffering=0) as file:
        yield cast(BinaryIO, file)


async def run(plan: Plan) -> Result:
    """Send requests until the time is over, and return the results."""
    with _acked(plan) as acked:
        load = _Load(plan, acked)
        began = time.perf_counter()
        async with asyncio.timeout(plan.seconds + LONGEST_REPLY_S):
            await asyncio.gather(*(load.keep_open() for _ in range(plan.connections)))
        elapsed = time.perf_counter() - began
    times = sorted(load.latencies) or [0.0]
    return Result(
        requests=len(load.latencies),
        items_per_s=len(load.latencies) * plan.items / elapsed,
        p50_ms=times[len(times) // 2] * 1e3,
        p99_ms=times[int(len(times) * 0.99)] * 1e3,
        statuses=dict(load.statuses),
        errors=load.errors,
        seconds=elapsed,
    )


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
