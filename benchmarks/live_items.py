"""Live items that wait: how fast they find each other, and how long a new leader takes to have read them all.

``matching`` is pure: pairs of a correction and its answer that are read, matched and settled while many others wait.
``takeover`` is on a real server with fsync: items whose answers have not come yet, in messages of 256 as ingest stores
them; ``LiveSupply.recover`` is what a leader runs before its first decision.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["Pairs", "Takeover", "matching", "takeover"]

JOB, KEYS, TOGETHER, NOW = "bench", 50, 256, 1e6
LAG_EVERY_S = 0.005


@dataclass(frozen=True)
class Pairs:
    """Pairs a second, of wall clock and of CPU, and what one question takes (seconds) while ``waiting`` wait."""

    waiting: int
    per_s: float
    per_cpu_s: float
    lowest_s: float
    sweep_s: float


@dataclass(frozen=True)
class Takeover:
    """Seconds until all was read and settled, the longest time for which the event loop did nothing else, and what
    the process grew by."""

    items: int
    seconds: float
    cpu_s: float
    lag_s: float
    grown_mib: float


def job() -> OnlineJob:
    """One that takes corrections and a metric."""
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "bench", "model": {"config": {}, "tokenizer": "char"},
            "sampling": {"max_new_tokens": 8}, "train": {"batch_size": 64, "max_lag": 1},
            "online": {"metrics": {"rating": {"type": "float"}}, "off_policy": {"supervised": {}}},
        }
    )  # fmt: skip


def _answer(name: str, now: float) -> Interaction:
    return Interaction(
        id=name, request=name, index=0, job=JOB, episode=f"own-{name}", alone=True, key_id="asker", user="u",
        split="train", untrainable="", prompt_ids=[1, 2, 3], token_ids=[2, 3], logprobs=[-0.1, -0.1],
        spans=[Span(0, 0, 2)], sampling=Sampling(max_new_tokens=8), finish="stop", template="", body_digest="",
        text="", started=now, first_token=now, ended=now,
    )  # fmt: skip


def _said(about: str, number: int, now: float, *, correction: bool) -> Feedback:
    said: dict[str, Any] = {"kind": "metric", "metric": "rating", "value": 1.0}
    if correction:
        said = {"kind": "correction", "body": {"corrected": {"role": "assistant", "content": "better"}}}
    return Feedback(
        id=str(uuid.uuid4()), job=JOB, key_id=f"key-{number % KEYS}", received=now, inference=about, **said
    )  # fmt: skip


def matching(waiting: int, pairs: int) -> Pairs:
    """Match ``pairs`` corrections with their answers, one message each, while ``waiting`` others have none."""
    core = Matching(job())
    for number in range(waiting):
        core.on_feedback(number + 1, _said(str(uuid.uuid4()), number, NOW, correction=True), NOW)
    core.sweep(version=0, now=NOW)
    names = [str(uuid.uuid4()) for _ in range(pairs)]
    facts = [(_said(name, number, NOW, correction=True), _answer(name, NOW)) for number, name in enumerate(names)]
    began, used = time.perf_counter(), time.process_time()
    for number, (item, answer) in enumerate(facts):
        core.on_feedback(waiting + number + 1, item, NOW)
        core.sweep(version=0, now=NOW, everything=False)
        core.on_interaction(number + 1, answer)
        core.sweep(version=0, now=NOW, everything=False)
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    began = time.perf_counter()
    core.low_water()
    lowest = time.perf_counter() - began
    core.sweep(version=0, now=NOW)  # gives way where too much is ready
    began = time.perf_counter()
    core.sweep(version=0, now=NOW)
    return Pairs(waiting, pairs / wall, pairs / cpu, lowest, time.perf_counter() - began)


def _messages(items: int, now: float) -> Iterator[bytes]:
    for start in range(0, items, TOGETHER):
        some = range(start, min(items, start + TOGETHER))
        batch = [_said(str(uuid.uuid4()), number, now, correction=False) for number in some]
        yield pack(FeedbackBatch(items=batch), job=JOB)


async def takeover(bus: Bus, items: int) -> Takeover:
    """Store ``items`` that wait, then lead."""
    for data in _messages(items, time.time()):
        await bus.publish(subjects.feedback(JOB), data)
    gc.freeze()  # as ``run_service`` does: else a full collection goes through all that was imported
    before, longest = _rss_mib(), 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            at = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            longest = max(longest, time.perf_counter() - at - LAG_EVERY_S)

    watching = asyncio.create_task(watch())
    supply = LiveSupply(bus, JOB, job(), epoch=1)
    began, used = time.perf_counter(), time.process_time()
    await supply.recover(LedgerState())
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    watching.cancel()
    assert len(supply.matching.unmatched) == items
    return Takeover(items, wall, cpu, longest, _rss_mib() - before)


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
