"""Tokens per second and time to the first token through the gateway, beside those of the bare engine.

    python benchmarks/serving.py [--out results.json] [--streams 64] [--seconds 20] [--rounds 3] [--no-training]

One run, one machine, one thread of torch each: the engine alone in a process of its own and the whole stack (NATS with
fsync, coordinator, rollout worker) with a client that reads raw sockets take turns. In both a third process trains a
model of the same size all the time, unless ``--no-training``. Each stream asks again as soon as it was answered. The
first request of each is shorter by another length, in both: else all streams of the engine alone would begin and end in
the same step for ever, which makes it a fifth faster than an engine whose users come when they like. Requests that
begin or end outside of the window count by the share of their tokens inside. The ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.jobs.kinds import parse_job

MODEL: dict[str, Any] = {
    "config": {
        "hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4,
        "max_position_embeddings": 1024,
    },
    "tokenizer": "char",
}  # fmt: skip
PROMPT, NEW_TOKENS, WARM_S = "1+2=", 128, 10.0
TARGET = 0.9


def train(stop: Event, ready: Event) -> None:
    """A trainer's work: forward, backward and AdamW over a model of the same size."""
    import torch

    from penstock.shared.config.model import ModelConfig
    from penstock.shared.models import build_model, build_tokenizer, pack, selected_logprobs

    torch.set_num_threads(1)
    config = ModelConfig.parse(MODEL)
    model = build_model(config, len(build_tokenizer(config)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = pack([[5] * 128 for _ in range(4)])
    select = torch.arange(tokens.num_tokens - 1)
    while not stop.is_set():
        logprobs, _ = selected_logprobs(
            model, tokens, select, tokens.token_ids_T[1:], temperature=1.0, entropy=False
        )  # fmt: skip
        (-logprobs.mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        ready.set()


def first_tokens(stream: int, streams: int) -> int:
    """Length of the first answer of a stream."""
    return max(1, NEW_TOKENS * (stream + 1) // streams)


def bare(streams: int, seconds: float, results: Any) -> None:
    """The engine alone, asked by ``streams`` tasks; sends tokens per second."""
    import torch

    from penstock.services.rollout.engines import open_engine
    from penstock.shared.config.model import ModelConfig
    from penstock.shared.models import build_tokenizer
    from penstock.shared.protocol.generation import GenRequest, Sampling

    torch.set_num_threads(1)

    async def run() -> float:
        config = ModelConfig.parse(MODEL)
        tokenizer = build_tokenizer(config)
        engine = open_engine(config, tokenizer, max_running=streams, seed=0)
        await engine.start()
        prompt_ids = tokenizer.encode(PROMPT, add_special_tokens=False)

        async def ask(stream: int) -> None:
            for turn in range(1_000_000):
                wanted = NEW_TOKENS if turn else first_tokens(stream, streams)
                sampling = Sampling(max_new_tokens=wanted, ignore_eos=True, seed=turn)
                request = GenRequest(request_id=f"{stream}.{turn}", prompt_ids=prompt_ids, sampling=sampling)
                await engine.generate(request)

        tasks = [asyncio.create_task(ask(stream)) for stream in range(streams)]
        await asyncio.sleep(WARM_S)
        before, start = engine.generated_tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (engine.generated_tokens - before) / (time.perf_counter() - start)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
        return rate

    results.put(asyncio.run(run()))


@dataclass
class Reader:
    """One connection: a request, its answer as bytes, again. ``tokens`` are (moment, number) pairs."""

    address: tuple[str, int]
    request: bytes
    begin: bytes
    """The first request."""
    sock: socket.socket = field(init=False)
    asked: float = 0.0
    first: list[float] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    tail: bytes = b""
    waiting: bool = False

    def __post_init__(self) -> None:
        self.sock = socket.create_connection(self.address)
        self.ask(self.begin)

    def ask(self, request: bytes) -> None:
        """Send a request."""
        self.sock.sendall(request)
        self.asked, self.waiting, self.tail = time.perf_counter(), True, b""

    def read(self) -> None:
        """Take what is there. Raises SystemExit for anything but a good answer."""
        data, now = self.sock.recv(1 << 16), time.perf_counter()
        if not data or b" 503 " in data[:40] or b'"error"' in data:
            raise SystemExit(f"the answer broke off: {data[:300]!r}")
        number = data.count(b'"token_ids":[')
        if number and self.waiting:
            self.first.append(now - self.asked)
            self.waiting = False
        self.tokens.append((now, number))
        self.tail = (self.tail + data)[-32:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            self.ask(self.request)


def request_for(num_tokens: int) -> bytes:
    """An HTTP request for a streamed completion."""
    body = {
        "model": "bench", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    data = json.dumps(body).encode()
    names = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(data))}
    head = "POST /v1/completions HTTP/1.1" + "".join(f"\r\n{name}: {value}" for name, value in names.items())
    return head.encode() + b"\r\n\r\n" + data


def read_all(port: int, streams: int, seconds: float, results: Any) -> None:
    """The client: ``streams`` sockets, one thread; sends tokens per second and the times to first tokens."""
    address, whole = ("127.0.0.1", port), request_for(NEW_TOKENS)
    readers = [Reader(address, whole, request_for(first_tokens(stream, streams))) for stream in range(streams)]
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.sock, selectors.EVENT_READ, reader)
        start = time.perf_counter() + WARM_S
        while time.perf_counter() < start + seconds:
            for key, _ in selector.select(0.1):
                key.data.read()
    inside = sum(n for reader in readers for now, n in reader.tokens if start <= now < start + seconds)
    results.put((inside / seconds, sorted(t for reader in readers for t in reader.first)))


@contextmanager
def training(wanted: bool) -> Iterator[None]:
    """Training in another process."""
    if not wanted:
        yield
        return
    context = multiprocessing.get_context("spawn")
    stop, ready = context.Event(), context.Event()
    process = context.Process(target=train, args=(stop, ready))
    process.start()
    ready.wait(120)
    try:
        yield
    finally:
        stop.set()
        process.join()


def measured(function: Any, *args: Any) -> Any:
    """Results that ``function`` sends from a process of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=function, args=(*args, results))
    process.start()
    while process.is_alive() and results.empty():
        time.sleep(0.1)
    if results.empty():
        raise SystemExit(f"{function.__name__} failed with {process.exitcode}")
    found = results.get()
    process.join()
    return found


async def through_gateway(streams: int, seconds: float, folder: Path, train_too: bool) -> tuple[float, list[float]]:
    """Tokens per second and times to the first token with the whole stack."""
    job = {
        "kind": "online_rl", "name": "bench", "model": MODEL, "placement": {"max_running": streams, "device": "cpu"},
        "limits": {"byte_budget": 1 << 30}, "train": {"batch_size": 2}, "sampling": {"max_new_tokens": NEW_TOKENS},
    }  # fmt: skip
    environment = {
        "PENSTOCK_API_KEYS": "",
        "PENSTOCK_OPEN_LOOPBACK": "true",
        "PENSTOCK_LIVE_RATE_LIMIT": "1000000/minute",
        "OMP_NUM_THREADS": "1",
    }
    async with Stack(StackOptions(data_dir=folder, environment=environment)) as stack:
        await stack.ready(deadline_s=120)
        async with AsyncClient(stack.url) as client:
            submitted = (await client.submit(parse_job(job))).id
            async with asyncio.timeout(120):
                while not any(row.get("version") == 0 for row in await client.workers(submitted)):
                    await asyncio.sleep(0.2)
            with training(train_too):
                port = int(stack.url.rpartition(":")[2])
                found: tuple[float, list[float]] = await asyncio.to_thread(measured, read_all, port, streams, seconds)
            await client.cancel(submitted, force=True)
    return found


def main() -> int:
    """Command line; the exit status is 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-training", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    title = f"{options.streams} streams; training beside it: {not options.no_training}"
    columns = ["round", "bare tokens/s", "gateway tokens/s", "ratio", "first token p50 ms", "p99 ms"]
    report, rows = Report(title, columns), []
    for number in range(1, options.rounds + 1):
        with training(not options.no_training):
            alone = measured(bare, options.streams, options.seconds)
        with tempfile.TemporaryDirectory() as folder:
            run = through_gateway(options.streams, options.seconds, Path(folder), not options.no_training)
            served, first = asyncio.run(run)
        p50, p99 = statistics.median(first), first[int(0.99 * len(first))]
        rows.append({"bare": alone, "gateway": served, "ratio": served / alone, "p50_s": p50, "p99_s": p99})
        cells = (f"{alone:.0f}", f"{served:.0f}", f"{served / alone:.2f}", f"{p50 * 1e3:.0f}", f"{p99 * 1e3:.0f}")
        report.row(str(number), *cells)
    ratio = statistics.median(row["ratio"] for row in rows)
    report.results = {"rounds": rows, "ratio": ratio}
    report.check(f"tokens/s: {ratio:.2f} of the bare engine, target {TARGET}", ratio >= TARGET)
    return report.finish(options.out)


if __name__ == "__main__":
    raise SystemExit(main())
