"""The guarded example on a real bus: a flood of one key or user stays within its share of a batch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import Admitted, BatchSealed, Event, decode_events
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, Interaction, new_marked_id
from penstock.shared.protocol.messages import Report
from penstock.shared.transport.bus import Bus, Outgoing

EXAMPLE = Path(__file__).parents[2] / "examples" / "online-guarded.yaml"
DEADLINE_S = 40
KEYS, FLOOD, SIZE = 6, 60, 64


def answer(job: str, key: str, user: str) -> Interaction:
    name, now = new_marked_id(job), time.time()
    return Interaction(
        id=name, request=name, index=0, job=job, episode=new_marked_id(job), alone=True, key_id=key, user=user,
        split="train", untrainable="", prompt_ids=[4, 5], token_ids=[6, 7, 2], logprobs=[-0.1, -0.2, -0.3],
        spans=[Span(0, 0, 3)], sampling=Sampling(max_new_tokens=32), finish="stop", template="t", body_digest="b",
        text="ab", started=now, first_token=now, ended=now,
    )  # fmt: skip


def verdict(about: Interaction, key: str) -> Feedback:
    return Feedback(
        id=new_marked_id(about.job), job=about.job, kind="metric", key_id=key, received=time.time(),
        inference=about.id, metric="accepted", value=True,
    )  # fmt: skip


async def test_a_flood_stays_within_its_share(bus: Bus, tmp_path: Path) -> None:
    file = with_overrides(load_yaml(EXAMPLE), ["online.promotion=null"])  # the gate waits for a trainer's weights
    config = OnlineJob.parse(file)
    record = await JobStore(bus).create(config)
    job = record.id
    flood = [answer(job, "k0", "eve") for _ in range(FLOOD)]  # one user, who also judges answers to other users
    honest = [answer(job, f"k{n % KEYS}", f"user-{n}") for n in range(SIZE + KEYS)]
    feedback = [verdict(one, one.key_id) for one in flood + honest] + [verdict(one, "k-of-eve") for one in honest]
    records = [Outgoing(subjects.interaction(job, one.id), pack(one, job=job)) for one in flood + honest]
    await bus.publish_many(records)
    await bus.publish(subjects.feedback(job), pack(FeedbackBatch(items=feedback), job=job))
    supply = LiveSupply(bus, job, config, epoch=1)
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path, supply=supply)
    leading = asyncio.create_task(runner.lead())
    try:
        async with asyncio.timeout(DEADLINE_S):
            first = pack(Report(epoch=1, kind="checkpointed", batch=0, version=0, digest="w0", path="c"), job=job)
            while True:
                with suppress(Exception):  # the leader is not there yet
                    await bus.request(subjects.report(job), first, deadline_s=5)
                    break
            while not (sealed := [one for one in await events(bus, job) if isinstance(one, BatchSealed)]):
                await asyncio.sleep(0.05)
    finally:
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
    admitted = {a.ordinal: a for e in await events(bus, job) if isinstance(e, Admitted) for a in e.admissions}
    batch = [admitted[group.draw.ordinal] for group in sealed[0].groups]
    assert len(batch) == SIZE
    assert all(admission.judges in ([], admission.askers) for admission in batch), "only the asking key may judge"
    assert Counter(admission.user for admission in batch)["eve"] <= 0.02 * SIZE
    assert max(Counter(admission.key_id for admission in batch).values()) <= 0.2 * SIZE


async def events(bus: Bus, job: str) -> list[Event]:
    messages = await bus.read(subjects.LEDGER, subjects.ledger(job))
    return [event for message in messages for event in decode_events(message.data)]
