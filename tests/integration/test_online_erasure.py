"""Deletion of a user's data while a leader admits the data, on a real bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.feedback.erasure import Eraser
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    Checkpointed,
    Drawn,
    Dropped,
    JobStarted,
    decode_events,
)
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Erasure, Feedback, FeedbackBatch, Interaction, new_marked_id
from penstock.shared.protocol.messages import Report
from penstock.shared.transport.bus import Bus

DEADLINE_S = 40
BASE: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 2, "max_lag": 1}, "online": {"max_wait_s": 3600},
    }
)  # fmt: skip


async def serve(bus: Bus, job: str) -> str:
    """Publish the record of one answer; return its id."""
    name, now = new_marked_id(job), time.time()
    record = Interaction(
        id=name, request=name, index=0, job=job, episode=new_marked_id(job), alone=True, key_id="k", user="u",
        split="train", untrainable="", prompt_ids=[4, 5], token_ids=[6, 7, 2], logprobs=[-0.1, -0.2, -0.3],
        spans=[Span(0, 0, 3)], sampling=Sampling(max_new_tokens=4), finish="stop", template="t", body_digest="b",
        text="ab", started=now, first_token=now, ended=now,
    )  # fmt: skip
    await bus.publish(subjects.interaction(job, name), pack(record, job=job), msg_id=name)
    return name


async def post_feedback(bus: Bus, job: str, about: str) -> None:
    item = Feedback(
        id=new_marked_id(job), job=job, kind="metric", key_id="k", received=time.time(), inference=about,
        metric="reward", value=1.0,
    )  # fmt: skip
    await bus.publish(subjects.feedback(job), pack(FeedbackBatch(items=[item]), job=job))


async def dropped(bus: Bus, job: str) -> list[Dropped]:
    entries = await bus.read(subjects.LEDGER, subjects.ledger(job))
    return [event for entry in entries for event in decode_events(entry.data) if isinstance(event, Dropped)]


async def test_data_admitted_during_its_deletion_is_not_trained(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader reads the records before their deletion, and publishes the groups after it."""
    record = await JobStore(bus).create(CONFIG)
    job, supply = record.id, LiveSupply(bus, record.id, CONFIG, epoch=1)
    read, has_read, may_publish = supply._reader.by_seq, asyncio.Event(), asyncio.Event()

    async def slowly(seqs: Iterable[int]) -> dict[int, Interaction]:
        found = await read(seqs)
        if found:
            has_read.set()
            await may_publish.wait()
        return found

    monkeypatch.setattr(supply._reader, "by_seq", slowly)
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path, supply=supply)
    leading = asyncio.create_task(runner.lead())
    try:
        async with asyncio.timeout(DEADLINE_S):
            first = pack(Report(epoch=1, kind="checkpointed", batch=0, version=0, digest="w0", path="c"), job=job)
            while True:
                with suppress(Unavailable):  # the leader is not there yet
                    await bus.request(subjects.report(job), first, deadline_s=5)
                    break
            await post_feedback(bus, job, await serve(bus, job))
            await has_read.wait()
            eraser = Eraser(bus, str, released_s=DEADLINE_S)
            deletion = await eraser.begin("u")
            deleting = asyncio.create_task(eraser.run(deletion))
            while not await bus.read(subjects.FEEDBACK, subjects.erasures(job)):
                await asyncio.sleep(0.05)
            may_publish.set()
            await deleting
            assert (deletion.status, deletion.interactions) == ("done", 1)
            while not (found := await dropped(bus, job)):
                await asyncio.sleep(0.05)
            while await bus.read(subjects.EXPERIENCE, subjects.experience(job)):
                await asyncio.sleep(0.05)
    finally:
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
    assert [(one.reason, one.draws, one.redraw) for one in found] == [("erased", [Draw(0)], False)]


async def test_a_new_leader_reads_deletions_below_its_start_position(bus: Bus) -> None:
    """The records still exist; one is undecided, and the other was admitted."""
    job = "job_x"
    waits, admitted = await serve(bus, job), await serve(bus, job)
    erasure = Erasure(user="u", interactions=[waits, admitted], feedback=[], time=0.0)
    mark = await bus.publish(subjects.erasures(job), pack(erasure, job=job)) + 1
    state = LedgerState()
    for event in (
        JobStarted(**BASE, config_digest="c", settings={}),
        Checkpointed(**BASE, number=0, version=0, digest="w0", path="c", trainer_epoch=1, low_seq=0),
        Drawn(**BASE, start=0, stop=1, min_version=0, deadline=time.time() + 60),
        Admitted(
            **BASE, low_interactions=1, low_feedback=mark,
            admissions=[Admission(0, {admitted: 2}, {}, 1.0, 0, "k", "u", "default", 0.0)],
        ),
    ):  # fmt: skip
        state.apply(event)
    supply = LiveSupply(bus, job, CONFIG, epoch=1)
    run = JobRun(CONFIG, state, num_ordinals=None, writer_epoch=1, source=supply.source)
    await supply.recover(state)
    assert supply.matching.num_waiting == 0
    await supply.order(run, [Draw(0)])
    assert await bus.read(subjects.EXPERIENCE, subjects.experience(job)) == []
    (drop,) = [event for event in run.decide(Inputs(time.time())) if isinstance(event, Dropped)]
    assert (drop.reason, drop.draws) == ("erased", [Draw(0)])
