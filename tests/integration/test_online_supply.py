"""Live data on a real bus becomes batches; each item counts once, also after a crash of the leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.coordinator.feedback.privacy import Consents
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online import supply as supply_module
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.queries.admission_audit import audit_admissions
from penstock.services.coordinator.queries.audit import audit_group, audit_ledger, sealed_by_seq
from penstock.services.coordinator.training.draws import TrainedBatch
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    Checkpointed,
    Drawn,
    Finished,
    Promoted,
    Quarantined,
    decode_events,
)
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.live.interaction import (
    Erasure,
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    StatusBatch,
    new_marked_id,
)
from penstock.shared.protocol.messages import Ack, Report
from penstock.shared.protocol.parts import PARTS
from penstock.shared.protocol.trajectory import decode_group
from penstock.shared.transport.bus import Bus, Outgoing
from tests.live_leader import Recorder

DEADLINE_S = 40
ALONE = "a batch has at least 2: one has nothing to be compared with"
CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 2, "max_lag": 1}, "online": {"max_wait_s": 3600},
    }
)  # fmt: skip


@asynccontextmanager
async def leader(
    bus: Bus, record: JobRecord, epoch: int, data_dir: Path, config: OnlineJob = CONFIG
) -> AsyncIterator[JobRunner]:
    """Lead the job; leaving the block kills the leader."""
    supply = LiveSupply(bus, record.id, config, epoch=epoch)
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=epoch, data_dir=data_dir, supply=supply)
    task = asyncio.create_task(runner.lead())
    try:
        yield runner
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def serve(bus: Bus, job: str, *, version: int = 0, prompt: str = "") -> str:
    """Publish the record of one answer; return its id."""
    name, now = new_marked_id(job), time.time()
    record = Interaction(
        id=name, request=name, index=0, job=job, episode=new_marked_id(job), alone=True, key_id="k", user="u",
        split="train", untrainable="", prompt_ids=[4, 5], token_ids=[6, 7, 2], logprobs=[-0.1, -0.2, -0.3],
        spans=[Span(version, 0, 3)], sampling=Sampling(max_new_tokens=4), finish="stop", template="t", body_digest="b",
        text="ab", prompt=prompt, started=now, first_token=now, ended=now,
    )  # fmt: skip
    await bus.publish_whole([Outgoing(subjects.interaction(job, name), pack(record, job=job), msg_id=name)])
    return name


async def post_feedback(bus: Bus, job: str, *items: tuple[str, str, float]) -> None:
    """Publish one message with items of (feedback id, interaction, reward)."""
    now = time.time()
    batch = FeedbackBatch(
        items=[
            Feedback(
                id=name, job=job, kind="metric", key_id="k", received=now, inference=about, metric="reward", value=value
            )
            for name, about, value in items
        ]
    )  # fmt: skip
    await bus.publish(subjects.feedback(job), pack(batch, job=job))


async def report(bus: Bus, job: str, **fields: Any) -> None:
    """Report like the trainer: repeat until the leader acknowledges."""
    data = pack(Report(epoch=1, **fields), job=job)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(Unavailable):
                ack, _ = unpack(await bus.request(subjects.report(job), data, deadline_s=5), Ack)
                assert ack.ok, ack.reason
                return


async def statuses(bus: Bus, job: str) -> dict[str, FeedbackStatus]:
    """Return the newest status of each item."""
    messages = await bus.read(subjects.DECISIONS, subjects.decisions(job))
    return {status.feedback: status for message in messages for status in unpack(message.data, StatusBatch)[0].items}


async def until_statuses(bus: Bus, job: str, **wanted: str) -> dict[str, FeedbackStatus]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await statuses(bus, job)
            if {name: found[name].status for name in wanted if name in found} == wanted:
                return found
            await asyncio.sleep(0.05)


async def until_sealed(bus: Bus, job: str, number: int) -> BatchSealed:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for entry in await ledger(bus, job):
                for event in entry:
                    if isinstance(event, BatchSealed) and event.number == number:
                        return event
            await asyncio.sleep(0.05)


async def ledger(bus: Bus, job: str) -> list[list[Any]]:
    return [decode_events(message.data) for message in await bus.read(subjects.LEDGER, subjects.ledger(job))]


async def test_feedback_becomes_batches_across_the_crash_of_a_leader(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await JobStore(bus).create(CONFIG)
    job = record.id
    async with leader(bus, record, 1, tmp_path) as runner:
        await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        early = new_marked_id(job)
        await post_feedback(bus, job, ("lost", early, 1.0))
        first, second = await serve(bus, job), await serve(bus, job)
        await post_feedback(bus, job, ("a", first, 1.0), ("b", second, -1.0), ("a", first, 1.0))
        sealed = await until_sealed(bus, job, 1)
        assert sorted(group.rewards for group in sealed.groups) == [[-1.0], [1.0]]
        assert {name: status.status for name, status in (await statuses(bus, job)).items()} == {
            "a": "admitted",
            "b": "admitted",
        }
        third = await serve(bus, job)
        assert not [row for row in runner.why() if "WaitingForFeedback" in row["waiting_for"]], "a batch is in training"

    async with leader(bus, record, 2, tmp_path) as runner:
        await report(bus, job, kind="trained", batch=1, revision=1, version=1, digest="w1")
        found = await until_statuses(bus, job, a="trained", b="trained")
        assert (found["a"].batch, found["a"].version, found["a"].interactions) == (1, 1, [first])
        young = age_of_feedback(runner)
        await asyncio.sleep(0.1)
        assert age_of_feedback(runner) >= young + 0.05
        fourth = await serve(bus, job, version=1)
        await post_feedback(bus, job, ("c", third, 0.5), ("d", fourth, 0.25), ("late", first, -1.0))
        sealed = await until_sealed(bus, job, 2)
        found = await until_statuses(bus, job, c="admitted", d="admitted", late="rejected")
        assert found["late"].reason == "late_after_training"
        assert "lost" not in found, "its interaction may still arrive"
        messages = await bus.read(subjects.DECISIONS, subjects.decisions(job))
        interactions = [one for message in messages for one in unpack(message.data, StatusBatch)[0].interactions]
        ends = {one.interaction: (one.status, one.batch, one.version) for one in interactions}
        assert ends == {
            first: ("trained", 1, 1), second: ("trained", 1, 1),
            third: ("admitted", 0, 0), fourth: ("admitted", 0, 0),
        }  # fmt: skip
        await report(bus, job, kind="checkpointed", batch=1, version=1, digest="w1", path="ckpt-1")
        monkeypatch.setattr(supply_module, "FULL_SHARE", -1.0)
        monkeypatch.setattr(supply_module, "ROOM_EVERY_S", 0.0)
        async with asyncio.timeout(DEADLINE_S):
            while await bus.last(subjects.INTERACTIONS, subjects.interaction(job, second)) is not None:
                await asyncio.sleep(0.05)
        assert await bus.last(subjects.INTERACTIONS, subjects.interaction(job, third)) is not None, "not trained yet"
        left_messages = await bus.read(subjects.FEEDBACK, subjects.feedback(job))
        assert next(item.id for m in left_messages for item in unpack(m.data, FeedbackBatch)[0].items) == "lost", (
            "undecided"
        )

    entries = await ledger(bus, job)
    audit = audit_ledger(entries, CONFIG)
    groups = {group.seq: group for group in sealed.groups} | {
        seq: one for seq, (_, one) in sealed_by_seq(audit).items()
    }
    messages = await bus.get_whole(subjects.EXPERIENCE, groups)
    for seq, (number, one) in sealed_by_seq(audit).items():
        audit_group(audit, number, one, decode_group(messages[seq].data), one.digest)
    assert not audit.violations
    assert (audit.admissions_checked, audit.groups_checked) == (4, 2)
    assert await audit_admissions(bus, job, CONFIG, entries) == (2, []), "the records of the others were purged"
    group = decode_group(messages[sealed.groups[0].seq].data)
    assert group.token_ids.tolist() == [6, 7, 2]
    assert np.allclose(group.logprobs, [-0.1, -0.2, -0.3])


async def test_an_undeclared_reward_is_trained_and_audited(bus: Bus, tmp_path: Path) -> None:
    online = {"max_wait_s": 3600, "metrics": {"liked": {"type": "boolean"}}}
    config = CONFIG.model_copy(update={"online": CONFIG.online.model_validate(online)})
    record = await JobStore(bus).create(config)
    job = record.id
    async with leader(bus, record, 1, tmp_path, config):
        await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        for name, liked, reward in (("a", True, -0.5), ("b", False, 0.25)):
            about, now = await serve(bus, job), time.time()
            await post_feedback(bus, job, (f"{name}-reward", about, reward))
            verdict = Feedback(
                id=name, job=job, kind="metric", key_id="k", received=now, inference=about, metric="liked", value=liked
            )
            await bus.publish(subjects.feedback(job), pack(FeedbackBatch(items=[verdict]), job=job))
        sealed = await until_sealed(bus, job, 1)
        await until_statuses(bus, job, **{"a": "admitted", "a-reward": "admitted", "b-reward": "admitted"})
    assert sorted(group.rewards for group in sealed.groups) == [[-0.75], [0.5]]
    entries = await ledger(bus, job)
    assert await audit_admissions(bus, job, config, entries) == (2, [])


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_wrong_clock_of_the_coordinator_decides_nothing(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Earlier, a clock one hour ahead made all feedback late and every draw overdue, without a message."""
    online = {"max_wait_s": 3600, "idle_ttl_s": 1800, "match_ttl_s": 1800}
    config = CONFIG.model_copy(update={"online": CONFIG.online.model_validate(online)})
    record = await JobStore(bus).create(config)
    job = record.id
    unmatched = new_marked_id(job)
    first, second = await serve(bus, job), await serve(bus, job)
    await post_feedback(bus, job, ("a", first, 1.0), ("b", second, 0.5), ("early", unmatched, 1.0))
    right = time.time()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert await bus.measure_clock() == pytest.approx(ahead_s, abs=5)
    async with leader(bus, record, 1, tmp_path, config) as runner:
        await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        found = await until_statuses(bus, job, a="admitted", b="admitted")
        await until_sealed(bus, job, 1)
        assert "early" not in found, "its interaction may still arrive"
        assert all(info.deadline > right for info in runner.run.state.open.values())
    times = [event.time for entry in await ledger(bus, job) for event in entry]
    assert all(abs(one - right) < 600 for one in times), "in bus time"


async def test_a_record_in_parts_is_admitted(bus: Bus, tmp_path: Path) -> None:
    record = await JobStore(bus).create(CONFIG)
    job = record.id
    async with leader(bus, record, 1, tmp_path):
        await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        long = await serve(bus, job, prompt="once upon a time " * 100_000)
        await post_feedback(bus, job, ("f-long", long, 0.5))
        await until_statuses(bus, job, **{"f-long": "admitted"})
    messages = await bus.read(subjects.INTERACTIONS, "interactions.>")
    assert [int(message.headers.get(PARTS, 0)) for message in messages] == [2, 0]


async def test_a_lone_example_is_reported_as_waiting_for_another(bus: Bus, tmp_path: Path) -> None:
    record = await JobStore(bus).create(CONFIG)
    async with leader(bus, record, 1, tmp_path) as runner:
        await report(bus, record.id, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        await post_feedback(bus, record.id, ("alone", await serve(bus, record.id), 1.0))
        await until_statuses(bus, record.id, alone="admitted")
        async with asyncio.timeout(DEADLINE_S):
            while not any(ALONE in row["waiting_for"] for row in runner.why()):
                await asyncio.sleep(0.02)


async def test_an_outlier_is_held_across_the_crash_of_a_leader_until_it_is_released(bus: Bus, tmp_path: Path) -> None:
    quarantine = {"quarantine": {"min_items": 10, "window": 50}}
    config = CONFIG.model_copy(update={"online": CONFIG.online.model_validate({"max_wait_s": 3600, **quarantine})})
    record = await JobStore(bus).create(config)
    job, odd, reward = record.id, new_marked_id(record.id), 0.01
    async with leader(bus, record, 1, tmp_path, config):
        await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        for _ in range(12):
            reward = -reward
            await post_feedback(bus, job, (new_marked_id(job), new_marked_id(job), reward))
        about, first, second = [await serve(bus, job) for _ in range(3)]
        await post_feedback(bus, job, (odd, about, 1.0))
        assert (await until_statuses(bus, job, **{odd: "quarantined"}))[odd].reason.startswith("outlier: 1 is ")
        await post_feedback(bus, job, (new_marked_id(job), first, 0.02), (new_marked_id(job), second, -0.02))
        await until_sealed(bus, job, 1)

    async with leader(bus, record, 2, tmp_path, config) as runner:
        async with asyncio.timeout(DEADLINE_S):
            while not runner.ready:
                await asyncio.sleep(0.02)
        assert runner.supply is not None
        assert runner.supply.measures()["online/quarantined"] == 1
        release = Feedback(
            id=new_marked_id(job), job=job, kind="release", key_id="k", received=time.time(), body={"feedback": odd}
        )
        await bus.publish(subjects.feedback(job), pack(FeedbackBatch(items=[release]), job=job))
        await until_statuses(bus, job, **{odd: "admitted"})
    events = [event for entry in await ledger(bus, job) for event in entry]
    held = next(event for event in events if isinstance(event, Quarantined))
    assert list(held.items) == [odd]
    admitted = [event for event in events if isinstance(event, Admitted)]
    assert events.index(held) < events.index(admitted[0])
    assert admitted[0].low_feedback <= held.items[odd], "another leader reads it again"


async def test_a_finished_job_has_nothing_undecided(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that no leader has read, and statuses that no leader has published, are settled at the end, too."""
    store = JobStore(bus)
    record = await store.create(CONFIG)
    job, names = record.id, [new_marked_id(record.id) for _ in range(3)]
    unread = asyncio.Event()

    async def nothing_read(self: LiveSupply, subject: str, start: int, post: Any) -> None:
        unread.set()
        await asyncio.Event().wait()

    async def dies(self: LiveSupply) -> None:
        raise asyncio.CancelledError

    await post_feedback(bus, job, (names[0], new_marked_id(job), 1.0))
    with monkeypatch.context() as deaf:
        deaf.setattr(LiveSupply, "_read", nothing_read)
        deaf.setattr(LiveSupply, "close", dies)
        async with leader(bus, record, 1, tmp_path) as runner:
            await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
            await unread.wait()
            answer = await serve(bus, job)
            await post_feedback(bus, job, (names[1], answer, 1.0))
            runner.update_record(await store.set_desired(job, "cancelled"))
            async with asyncio.timeout(DEADLINE_S):
                while not any(isinstance(event, Finished) for entry in await ledger(bus, job) for event in entry):
                    await asyncio.sleep(0.05)
    await post_feedback(bus, job, (names[2], answer, -1.0))
    async with leader(bus, await store.get(job), 2, tmp_path):
        found = await until_statuses(bus, job, **dict.fromkeys(names, "rejected"))
        assert {found[name].reason for name in names} == {"job_ended"}
        async with asyncio.timeout(DEADLINE_S):
            while (await store.get(job)).status.phase != "cancelled":
                await asyncio.sleep(0.05)
    messages = await bus.read(subjects.DECISIONS, subjects.decisions(job))
    interactions = [one for message in messages for one in unpack(message.data, StatusBatch)[0].interactions]
    assert {(one.interaction, one.status, one.reason) for one in interactions} == {(answer, "rejected", "job_ended")}


async def test_decided_feedback_is_purged_without_a_checkpoint(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply_module, "FULL_SHARE", -1.0)
    supply = LiveSupply(bus, "job_x", CONFIG, epoch=1)
    about = await serve(bus, "job_x")
    await post_feedback(bus, "job_x", ("far", about, 999.0))
    await post_feedback(bus, "job_x", ("open", new_marked_id("job_x"), 1.0))
    recorder = Recorder(bus, supply)
    await recorder.lead()
    await supply._free_stream_space()
    assert len(await bus.read(subjects.FEEDBACK, subjects.feedback("job_x"))) == 2, "the ledger has no decision yet"
    await recorder.record()
    (left,) = await bus.read(subjects.FEEDBACK, subjects.feedback("job_x"))
    assert [item.id for item in unpack(left.data, FeedbackBatch)[0].items] == ["open"]
    assert (await statuses(bus, "job_x"))["far"].status == "rejected", "recorded before it was purged"
    assert len(await bus.read(subjects.INTERACTIONS, subjects.interactions("job_x"))) == 1, "undecided"


async def test_admitted_examples_stay_until_their_draw_ends(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only FEEDBACK contains the body of an example, and a later leader may have to create its group."""
    monkeypatch.setattr(supply_module, "FULL_SHARE", -1.0)
    for name in ("done", "material"):
        await post_feedback(bus, "job_x", (name, new_marked_id("job_x"), 1.0))
    state, material = (
        LedgerState(),
        Admission(0, {}, {"material": 2}, 1.0, 0, "k", "u", "correction", 0.0, "supervised"),
    )
    state.apply(Drawn(writer_epoch=1, time=0.0, start=0, stop=1, min_version=0, deadline=0.0))
    state.apply(Admitted(writer_epoch=1, time=0.0, admissions=[material], low_interactions=1, low_feedback=3))
    supply = LiveSupply(bus, "job_x", CONFIG, epoch=1)
    await supply.recover(state)
    await supply._free_stream_space()
    left = await bus.read(subjects.FEEDBACK, subjects.feedback("job_x"))
    assert [item.id for message in left for item in unpack(message.data, FeedbackBatch)[0].items] == ["material"]


async def test_interactions_of_repeatable_batches_stay(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """While versions after the served one are refused, a trainer may start from a checkpoint before the newest one."""
    monkeypatch.setattr(supply_module, "FULL_SHARE", -1.0)
    names = [await serve(bus, "job_x") for _ in range(3)]
    checkpoints = {
        number: Checkpointed(
            writer_epoch=1, time=0.0, number=number, version=number, digest="d", path="p", trainer_epoch=1, low_seq=0
        )
        for number in (1, 2)
    }
    state = LedgerState(
        checkpoints=checkpoints, checkpoint=checkpoints[2], last_trained=2, read_from=(3, 1),
        batches={number: TrainedBatch((Draw(number - 1),), (number,), 1, number, "d") for number in (1, 2)},
        admissions={n: Admission(n, {names[n]: n + 1}, {}, 1.0, 0, "k", "u", "default", 0.0) for n in range(2)},
        promoted=Promoted(writer_epoch=1, time=0.0, version=1, number=1, digest="d", reason="passed"),
    )  # fmt: skip
    supply = LiveSupply(bus, "job_x", CONFIG, epoch=1)
    await supply.recover(state)
    for served, left in ((state.promoted, names[1:]), (None, names[2:])):
        state.promoted = served
        await supply._free_stream_space()
        messages = await bus.read(subjects.INTERACTIONS, subjects.interactions("job_x"))
        assert [unpack(message.data, Interaction)[0].id for message in messages] == left


async def test_messages_that_arrive_during_recovery_are_read(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feedback and deletions share a stream; the leader reads first one subject and then the other."""
    supply = LiveSupply(bus, "job_x", CONFIG, epoch=1)
    await post_feedback(bus, "job_x", ("early", new_marked_id("job_x"), 1.0))
    take_all = supply._take_all

    async def slow(subject: str) -> None:
        await take_all(subject)
        if subject == subjects.feedback("job_x"):
            await post_feedback(bus, "job_x", ("between", new_marked_id("job_x"), 1.0))
            erasure = Erasure(user="u", interactions=[], feedback=[], time=0.0)
            await bus.publish(subjects.erasures("job_x"), pack(erasure, job="job_x"))

    monkeypatch.setattr(supply, "_take_all", slow)
    await supply.recover(LedgerState())
    tasks: asyncio.Queue[Any] = asyncio.Queue()
    following = asyncio.create_task(supply.follow(tasks.put))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(supply.matching.unmatched) < 2:
                await (await tasks.get())()
    finally:
        following.cancel()


async def test_the_lease_is_renewed_during_recovery(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run between any two messages, even if the bus delivers many at once."""
    quarantine = {"max_wait_s": 3600, "quarantine": {}}
    config = CONFIG.model_copy(update={"online": CONFIG.online.model_validate(quarantine)})
    for _ in range(60):
        await post_feedback(bus, "job_x", (new_marked_id("job_x"), new_marked_id("job_x"), 0.1))
    supply, turns = LiveSupply(bus, "job_x", config, epoch=1), 0
    seen: list[int] = []

    async def renew() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    renewing = asyncio.create_task(renew())
    for name in ("learn", "on_feedback"):
        do = getattr(supply.quarantine, name)
        monkeypatch.setattr(supply.quarantine, name, lambda *args, do=do: seen.append(turns) or do(*args))
    try:
        await supply.recover(LedgerState(read_from=(1, 31)))
    finally:
        renewing.cancel()
    assert len(seen) == 60
    assert len(set(seen)) >= 59, "the last learned and the first undecided item are two reads"


async def test_held_items_are_rejected_for_space(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.model_copy(
        update={"online": CONFIG.online.model_validate({"quarantine": {"min_items": 10, "window": 50}})}
    )
    job, odd = "job_x", new_marked_id("job_x")
    for reward in [0.01, -0.01] * 6:
        await post_feedback(bus, job, (new_marked_id(job), new_marked_id(job), reward))
    await post_feedback(bus, job, (odd, new_marked_id(job), 1.0))
    await post_feedback(bus, job, (new_marked_id(job), new_marked_id(job), 0.01))
    supply = LiveSupply(bus, job, config, epoch=1)
    recorder = Recorder(bus, supply)
    await recorder.lead(read_from=(1, 13))
    await supply._free_stream_space()
    assert (supply.quarantine.num_held, supply.quarantine.lowest_seq) == (1, 13), "there is space"
    monkeypatch.setattr(supply_module, "MAX_USED", -1)
    await supply._free_stream_space()
    await recorder.record()
    assert supply.quarantine.num_held == 0
    status = (await statuses(bus, job))[odd]
    assert (status.status, status.reason) == ("rejected", "quarantine_full")


@pytest.mark.parametrize(("consent", "reason"), [("opt_out", "opted_out"), ("opt_in", "no_consent")])
async def test_consent_is_read_before_the_first_decision(bus: Bus, consent: Any, reason: str) -> None:
    if consent == "opt_out":
        await Consents(bus).say("u", train=False)
    config = CONFIG.model_copy(update={"online": CONFIG.online.model_copy(update={"consent": consent})})
    about = await serve(bus, "job_x")
    await post_feedback(bus, "job_x", ("f", about, 1.0))
    recorder = Recorder(bus, LiveSupply(bus, "job_x", config, epoch=1))
    await recorder.lead()
    await recorder.record()
    assert (await statuses(bus, "job_x"))["f"].reason == reason


def age_of_feedback(runner: JobRunner) -> float:
    """Return how long the job has waited for feedback."""
    (age_s,) = [row["age_s"] for row in runner.why() if "WaitingForFeedback" in row["waiting_for"]]
    return float(age_s)
