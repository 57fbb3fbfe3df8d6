"""One consumer and one producer process for each way to move messages; started by bus.py, one role per process.

A consumer prints ``READY <address>``, touches one byte of every page of every message (a mapping alone is no delivery),
and prints the seconds from its first message to its last. The two libraries that Penstock is compared with are imported
only in their own roles, so these may run in another environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
SUBJECT = "bench.claims"
NOTIFY_EVERY = 128


class Meter:
    """Counts messages on the consumer's side."""

    def __init__(self, expected: int) -> None:
        self.left, self.count, self.start = expected, expected, 0.0

    def message(self, data: Any) -> bool:
        """Read one byte per page; True after the last message."""
        if self.left == self.count:
            self.start = time.perf_counter()
        int(np.frombuffer(data, np.uint8)[::PAGE].sum())
        self.left -= 1
        return self.left == 0

    def report(self) -> None:
        seconds = time.perf_counter() - self.start
        print(json.dumps({"rate": (self.count - 1) / seconds}), flush=True)


def payload(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def ready(address: str) -> None:
    print(f"READY {address}", flush=True)


# Raw TCP over the loopback interface, blocking: what the kernel can do for a Python program.


def tcp_consumer(size: int, count: int, _: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready(str(listener.getsockname()[1]))
    peer, _address = listener.accept()
    meter, buffer = Meter(count), memoryview(bytearray(size))
    stream: Any = peer.makefile("rb", 1 << 18) if size < PAGE else None
    while True:
        if stream is not None:
            struct.unpack("<I", stream.read(4))
            stream.readinto(buffer)
        else:
            peer.recv(4, socket.MSG_WAITALL)
            filled = 0
            while filled < size:
                filled += peer.recv_into(buffer[filled:])
        if meter.message(buffer):
            break
    meter.report()


def tcp_producer(size: int, count: int, address: str) -> None:
    peer = socket.create_connection(("127.0.0.1", int(address)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, head = payload(size).tobytes(), struct.pack("<I", size)
    stream = peer.makefile("wb", 1 << 18 if size < PAGE else 0)
    for _ in range(count):
        stream.write(head)
        if size < PAGE:
            stream.write(data)
        else:
            peer.sendall(data)
    stream.flush()
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)


# Penstock: requests over NATS; above 1 MiB the request carries a claim check and the bytes lie in shared memory.


def penstock_consumer(size: int, count: int, url: str) -> None:
    import msgspec

    from penstock.shared.config import ServiceSettings
    from penstock.shared.protocol.claim import Claim
    from penstock.shared.transport.bulk import BulkReader
    from penstock.shared.transport.bus import Bus

    async def main() -> None:
        meter, done, reader = Meter(count), asyncio.Event(), BulkReader(ServiceSettings(host_id="bench"))
        claims = msgspec.msgpack.Decoder(Claim)

        async def handle(data: bytes) -> bytes:
            if size < PAGE:
                last = meter.message(data)
            else:
                with reader.fetch(claims.decode(data)) as blob:
                    last = meter.message(blob.data)
            if last:
                done.set()
            return b""

        async with await Bus.connect(url, name="consumer") as bus:
            await bus.serve(SUBJECT, handle)
            await bus.rtt()
            ready(url)
            await done.wait()
            meter.report()

    run(main)


def penstock_producer(size: int, count: int, url: str) -> None:
    import msgspec

    from penstock.shared.config import ServiceSettings
    from penstock.shared.transport.bulk import BulkStore
    from penstock.shared.transport.bus import Bus

    async def main() -> None:
        data = payload(size)
        small = data.tobytes()
        window = asyncio.Semaphore(64 if size < PAGE else 8 if size < 8 << 20 else 2)
        settings = ServiceSettings(host_id="bench", bulk_bytes=256 << 20)
        with BulkStore(settings) as store:
            if size >= PAGE:
                store.reserve(size, 3 if size >= 8 << 20 else 8)

            async def one() -> None:
                try:
                    if size < PAGE:
                        await bus.request(SUBJECT, small, deadline_s=20)
                        return
                    claim = store.put([data.data])
                    await bus.request(SUBJECT, msgspec.msgpack.encode(claim), deadline_s=20)
                    store.release(claim)
                finally:
                    window.release()

            async with await Bus.connect(url, name="producer") as bus, asyncio.TaskGroup() as group:
                for _ in range(count):
                    await window.acquire()
                    group.create_task(one())

    run(main)


def notify_consumer(size: int, count: int, url: str) -> None:
    """Messages without an answer; every 128th is confirmed, so that the producer cannot run away."""
    from penstock.shared.transport.bus import Bus

    async def main() -> None:
        meter, done = Meter(count), asyncio.Event()
        confirmed: asyncio.Queue[None] = asyncio.Queue()

        def on_message(_: str, data: bytes) -> None:
            if meter.message(data):
                done.set()
            if meter.left % NOTIFY_EVERY == 0:
                confirmed.put_nowait(None)

        async with await Bus.connect(url, name="consumer") as bus, asyncio.TaskGroup() as group:

            async def confirm() -> None:
                for _ in range(count // NOTIFY_EVERY):
                    await confirmed.get()
                    await bus.notify(f"{SUBJECT}.confirmed", b"")

            await bus.subscribe(SUBJECT, on_message)
            await bus.rtt()
            ready(url)
            group.create_task(confirm())
            await done.wait()
            meter.report()

    run(main)


def notify_producer(size: int, count: int, url: str) -> None:
    from penstock.shared.transport.bus import Bus

    async def main() -> None:
        data, credit = payload(size).tobytes(), asyncio.Semaphore(8)
        async with await Bus.connect(url, name="producer") as bus:
            await bus.subscribe(f"{SUBJECT}.confirmed", lambda _subject, _data: credit.release())
            await bus.rtt()
            for number in range(count):
                if number % NOTIFY_EVERY == 0:
                    await credit.acquire()
                await bus.notify(SUBJECT, data)

    run(main)


def penstock_latency(size: int, count: int, url: str) -> None:
    """Producer only: sequential requests to ``penstock_consumer``; prints quantiles in seconds."""
    import msgspec

    from penstock.shared.config import ServiceSettings
    from penstock.shared.transport.bulk import BulkStore
    from penstock.shared.transport.bus import Bus

    async def main() -> None:
        data, times = payload(size), []
        small = data.tobytes()
        async with await Bus.connect(url, name="producer") as bus:
            with BulkStore(ServiceSettings(host_id="bench")) as store:
                for _ in range(count):
                    start = time.perf_counter()
                    if size < PAGE:
                        await bus.request(SUBJECT, small, deadline_s=20)
                    else:
                        claim = store.put([data.data])
                        await bus.request(SUBJECT, msgspec.msgpack.encode(claim), deadline_s=20)
                        store.release(claim)
                    times.append(time.perf_counter() - start)
        warm = np.array(times[count // 10 :])
        print(json.dumps({"p50": float(np.median(warm)), "p99": float(np.quantile(warm, 0.99))}), flush=True)

    run(main)


def run(main: Callable[[], Any]) -> None:
    import uvloop

    uvloop.run(main())


# ZeroMQ PUSH/PULL.


def zmq_consumer(size: int, count: int, _: str) -> None:
    import zmq

    pull = zmq.Context().socket(zmq.PULL)
    pull.setsockopt(zmq.RCVHWM, 1000 if size < PAGE else 4)
    pull.bind("tcp://127.0.0.1:*")
    ready(pull.getsockopt_string(zmq.LAST_ENDPOINT))
    meter = Meter(count)
    while True:
        frame = pull.recv(copy=size < PAGE)
        if meter.message(frame if size < PAGE else frame.buffer):
            break
    meter.report()


def zmq_producer(size: int, count: int, address: str) -> None:
    import zmq

    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 1000 if size < PAGE else 4)
    push.connect(address)
    data = payload(size).tobytes()
    for _ in range(count):
        push.send(data, copy=size < PAGE)
    push.close(linger=60_000)
    context.term()


# Ray: calls of an actor; large arguments through the object store. One process drives both ends.


def ray_driver(size: int, count: int, __: str) -> None:
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    with tempfile.TemporaryDirectory() as directory:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, _temp_dir=directory)

        @ray.remote(num_cpus=0)
        class Consumer:
            def take(self, data: Any) -> None:
                int(np.frombuffer(data, np.uint8)[::PAGE].sum())

        consumer, data = Consumer.remote(), payload(size)  # type: ignore[attr-defined]
        message = data.tobytes() if size < PAGE else data
        ray.get([consumer.take.remote(message) for _ in range(3)])
        start, flying = time.perf_counter(), list[Any]()
        for _ in range(count):
            flying.append(consumer.take.remote(message if size < PAGE else ray.put(message)))
            if len(flying) >= (256 if size < PAGE else 4):
                _, flying = ray.wait(flying, num_returns=len(flying) // 2)
        ray.get(flying)
        print(json.dumps({"rate": count / (time.perf_counter() - start)}), flush=True)
        ray.shutdown()


ROLES: dict[str, Callable[[int, int, str], None]] = {
    name: value
    for name, value in list(globals().items())
    if name.endswith(("_consumer", "_producer", "_latency", "_driver"))
}

if __name__ == "__main__":
    # The script's directory would hide installed packages behind files of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    ROLES[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
