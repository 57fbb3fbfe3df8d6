"""Messages that cannot be used go to DEAD with the reason, and their draws are dropped, also without an advisory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.dead_letters import DeadLetterQueue, DeadLetterScanner
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.run import REPLAYED
from penstock.shared.errors import NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import SCHEMA, pack, unpack
from penstock.shared.protocol.events import Dropped, decode_events
from penstock.shared.protocol.frame import encode_frame
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobFailure, JobRecord, Operation
from penstock.shared.protocol.messages import DRAW_HEADER, Ack, Heartbeat, Report, Ticket
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.transport.bus import Bus, Message, Outgoing, Puller

JOB = "job_dead"
SPEC: dict[str, Any] = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "sampling": {"max_new_tokens": 4},
    "train": {"batch_size": 8, "max_updates": 3},
}
ACK_WAIT_S, MAX_DELIVER = 0.3, 2
DEAD_TICKET = {"Penstock-Stream": subjects.TICKETS, "Penstock-Attempts": "2", DRAW_HEADER: "0.0"}


class Led:
    """A job whose leader runs here; the test plays its workers."""

    def __init__(self, bus: Bus, train: dict[str, Any]) -> None:
        self.bus, self.members = bus, Members()
        spec = {**SPEC, "train": SPEC["train"] | train}
        record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=spec)
        self.runner = JobRunner(bus, JobStore(bus), self.members, record, epoch=1, data_dir=Path("/nonexistent"))
        self.dead_letters = DeadLetterScanner(bus, self.members, {JOB: self.runner})

    async def report(self, report: Report) -> None:
        reply = await self.bus.request(subjects.report(JOB), pack(report, job=JOB), deadline_s=10)
        assert unpack(reply, Ack)[0].ok

    async def puller(self, stream: str) -> Puller:
        service, subject = ("rollout", subjects.tickets) if stream == subjects.TICKETS else ("reward", subjects.raw)
        return await self.bus.pull(
            stream, subject(JOB), f"{service}-{JOB}", ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER
        )

    async def use_up(self, stream: str, count: int) -> None:
        """Fetch ``count`` messages until all their deliveries are used up, and acknowledge none of them."""
        seen = 0
        async with await self.puller(stream) as puller, asyncio.timeout(30):
            while seen < count * MAX_DELIVER:
                seen += len(await puller.fetch(count, 0.2))
            service = "rollout" if stream == subjects.TICKETS else "reward"
            while (await self.bus.consumer_state(stream, f"{service}-{JOB}")).ack_pending:
                await puller.fetch(1, 0.2)

    async def scan_until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(30):
            while not await holds():
                await self.dead_letters.scan()
                await asyncio.sleep(0.05)

    async def dead(self) -> list[Message]:
        return await self.bus.read(subjects.DEAD, subjects.dead(JOB))

    async def dropped(self) -> dict[Draw, str]:
        """Return every dropped draw with its reason."""
        entries = await self.bus.read(subjects.LEDGER, subjects.ledger(JOB))
        events = [event for entry in entries for event in decode_events(entry.data)]
        return {draw: event.reason for event in events if isinstance(event, Dropped) for draw in event.draws}

    async def waiting(self) -> list[Draw]:
        """Return the draws whose tickets are in the queue."""
        state = await self.bus.stream_state(subjects.TICKETS)
        found = await self.bus.walk(subjects.TICKETS, subjects.tickets(JOB), last_seq=state.last_seq)
        return [unpack(message.data, Ticket)[0].draw for message in found]


@asynccontextmanager
async def led(bus: Bus, **train: Any) -> AsyncIterator[Led]:
    job = Led(bus, train)
    await bus.kv(subjects.JOBS).put(JOB, job.runner.record.model_dump_json().encode())
    leading = asyncio.create_task(job.runner.lead())
    try:
        async with asyncio.timeout(30):
            while not job.runner.ready:
                await asyncio.sleep(0.02)
                assert not leading.done(), leading.exception()
        await job.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="p"))
        async with asyncio.timeout(30):
            while len(await job.waiting()) < 2:
                await asyncio.sleep(0.02)
        yield job
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


@pytest.mark.long
async def test_a_scan_finds_dead_messages_without_an_advisory(bus: Bus) -> None:
    """No coordinator subscribed to advisories while the deliveries were used up."""
    async with led(bus) as job:
        await job.use_up(subjects.TICKETS, 2)

        async def redrawn() -> bool:
            return sorted(await job.waiting()) == [Draw(0, 1), Draw(1, 1)]

        await job.scan_until(redrawn)
        assert await job.dropped() == {Draw(0): "dead_letter", Draw(1): "dead_letter"}
        dead_letters = await job.dead()
        assert [unpack(dead_letter.data, Ticket)[0].draw for dead_letter in dead_letters] == [Draw(0), Draw(1)]
        for dead_letter in dead_letters:
            assert dead_letter.headers["Penstock-Reason"] == "max deliveries"
            assert dead_letter.headers["Penstock-Attempts"] == str(MAX_DELIVER)
            assert dead_letter.headers["Penstock-Stream"] == subjects.TICKETS
        await job.dead_letters.scan()
        assert len(await job.dead()) == 2, "an undelivered message without a lease is not dead"


async def test_a_ticket_that_leaving_workers_give_back_is_no_dead_letter(bus: Bus) -> None:
    """A ticket that is given back is published again with all its deliveries; the draw and its saved tokens stay."""
    taken = bus.pull(
        subjects.TICKETS, subjects.tickets(JOB), f"rollout-{JOB}", ack_wait_s=60.0, max_deliver=MAX_DELIVER
    )
    async with led(bus) as job, await taken as puller, asyncio.timeout(60):
        deadline = job.runner.run.state.open[Draw(0)].deadline
        for number in range(2 * MAX_DELIVER):
            held = []
            while not held:
                held = [one for one in await puller.fetch(10, 0.2) if unpack(one.data, Ticket)[0].draw == Draw(0)]
            [delivery] = held
            ticket, _ = unpack(delivery.data, Ticket)
            assert (delivery.deliveries, ticket.begun) == (1, number > 0)
            assert delivery.headers[DRAW_HEADER] == "0.0"
            assert ticket.left_s(delivery.time) == pytest.approx(deadline - time.time(), abs=5)
            given_back = Report(kind="handed_over", epoch=1, bad=[Draw(0)], seq=delivery.seq)
            for _ in range(2):  # as if the first answer was lost
                await job.report(given_back)
            await delivery.ack()
            while (await job.waiting()).count(Draw(0)) != 1:
                await asyncio.sleep(0.02)
        assert not await job.dropped()


async def test_a_returned_ticket_of_an_answered_or_unknown_draw_is_not_published_again(bus: Bus) -> None:
    async with led(bus) as job:
        data, header = encode_group(group(Draw(0)))
        await bus.publish(subjects.experience(JOB), data, headers=group_headers(header))
        async with asyncio.timeout(30):
            while Draw(0) not in job.runner.run.candidates:
                await asyncio.sleep(0.02)
        for draw in (Draw(0), Draw(7)):
            await job.report(Report(kind="handed_over", epoch=1, bad=[draw], seq=1000))
        assert sorted(await job.waiting()) == [Draw(0), Draw(1)], "the initial tickets"


@pytest.mark.long
async def test_a_late_ticket_of_a_dropped_draw_is_no_dead_letter(bus: Bus) -> None:
    """Workers give back a late ticket until its deliveries are used up; its draw was dropped and requested anew."""
    async with led(bus, draw_timeout_s=1.0) as job:
        tickets = await bus.walk(subjects.TICKETS, subjects.tickets(JOB), last_seq=2)
        async with asyncio.timeout(30):
            while Draw(0) not in await job.dropped():
                await asyncio.sleep(0.05)
        assert (await job.dropped())[Draw(0)] == "deadline"
        await job.runner.on_dead_message(subjects.TICKETS, tickets[0].seq, Draw(0), reason="max deliveries", attempts=5)
        async with asyncio.timeout(30):
            while Draw(0) in await job.waiting():
                await asyncio.sleep(0.05)
        assert not await job.dead()


async def test_an_advisory_is_faster_than_the_scan(bus: Bus) -> None:
    async with led(bus) as job:
        listening = asyncio.create_task(job.dead_letters.run())
        await bus.rtt()
        puller = await job.puller(subjects.TICKETS)
        async with puller, asyncio.timeout(30):
            while len(await job.dead()) < 2:
                await puller.fetch(2, 0.1)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_a_ticket_under_an_extended_lease_is_no_dead_letter(bus: Bus) -> None:
    """One ticket is dead, while a worker extends the lease of another."""
    async with led(bus) as job:
        puller = await job.puller(subjects.TICKETS)
        first, held = await puller.fetch(2, 5.0)
        kept = unpack(held.data, Ticket)[0].draw
        beat = Heartbeat(
            service="rollout", worker="w", host="h", pid=1, started=0.0, interval_s=60.0, health_port=0, ready=True,
            jobs={JOB: {"holds": [str(kept)]}},
        )  # fmt: skip
        job.members.on_heartbeat(beat, time.monotonic())
        async with asyncio.timeout(30):
            while not await job.dead():
                await held.in_progress()
                await puller.fetch(1, 0.05)
                await job.dead_letters.scan()
        assert await job.dropped() == {unpack(first.data, Ticket)[0].draw: "dead_letter"}
        assert kept in await job.waiting()
        await puller.close()


async def test_an_advisory_about_a_held_draw_does_not_drop_it(bus: Bus) -> None:
    """A worker extended a lease too late; the draw is not dropped while heartbeats report that the worker holds it."""
    async with led(bus) as job:
        await job.use_up(subjects.TICKETS, 2)
        state = await bus.stream_state(subjects.TICKETS)
        first, second = await bus.walk(subjects.TICKETS, subjects.tickets(JOB), last_seq=state.last_seq)
        kept = unpack(first.data, Ticket)[0].draw
        beat = Heartbeat(
            service="rollout", worker="w", host="h", pid=1, started=0.0, interval_s=60.0, health_port=0, ready=True,
            jobs={JOB: {"holds": [str(kept)]}},
        )  # fmt: skip
        job.members.on_heartbeat(beat, time.monotonic())
        for message in (first, second):
            await job.dead_letters._take(subjects.TICKETS, message.seq)
        async with asyncio.timeout(30):
            while not await job.dropped():
                await asyncio.sleep(0.02)
        assert await job.dropped() == {unpack(second.data, Ticket)[0].draw: "dead_letter"}


async def test_an_undecodable_ticket_becomes_a_dead_letter(bus: Bus) -> None:
    """The header of the ticket still names its draw."""
    async with led(bus) as job:
        await bus.purge(subjects.TICKETS, subjects.tickets(JOB))
        await bus.publish(subjects.tickets(JOB), b"rubbish", headers={DRAW_HEADER: "1.0"})
        await job.use_up(subjects.TICKETS, 1)

        async def buried() -> bool:
            return bool(await job.dead())

        await job.scan_until(buried)
        assert await job.dropped() == {Draw(1): "dead_letter"}
        assert "undecodable: not an envelope" in (await job.dead())[0].headers["Penstock-Reason"]


def group(draw: Draw, *, nbytes: int = 0) -> Group:
    """Return a group of four completions of one token, with a note of ``nbytes`` in its metadata."""
    ones = np.ones(4, np.int32)
    return Group(
        job=JOB, draw=draw, attempt="a", epoch=1, prompt_ids=ones, token_ids=ones,
        cu_seqlens=np.arange(5, dtype=np.int32), logprobs=np.zeros(4, np.float32), mask=np.ones(4, np.uint8),
        rewards=np.asarray([0, 1, 0, 1], np.float32), failed=np.zeros(4, np.bool_), finish=np.zeros(4, np.uint8),
        spans=np.asarray([[i, 0, 0, 1] for i in range(4)], np.int32), meta={"note": "x" * nbytes},
    )  # fmt: skip


@pytest.mark.long
async def test_a_raw_group_that_nobody_scores_becomes_a_dead_letter(bus: Bus) -> None:
    async with led(bus) as job:
        data, header = encode_group(group(Draw(1), nbytes=3 << 20))
        await bus.publish_whole([Outgoing(subjects.raw(JOB), data, group_headers(header))])
        await job.use_up(subjects.RAW, 1)

        async def buried() -> bool:
            return not (await bus.stream_state(subjects.RAW)).messages

        await job.scan_until(buried)
        assert await job.dropped() == {Draw(1): "dead_letter"}
        dead_letters = await job.dead()
        assert dead_letters[0].headers["Penstock-Reason"] == "max deliveries"
        assert b"".join(dead_letter.data for dead_letter in dead_letters) == data, "all of its parts are kept"


async def test_undecodable_and_refused_groups_become_dead_letters(bus: Bus) -> None:
    """An undecodable group, and a group that the trainer refuses, are copied to DEAD before they are deleted."""
    async with led(bus) as job:
        unreadable = await bus.publish(subjects.experience(JOB), b"x", headers={"Penstock-Group": "[1"})
        torn, good = (encode_group(group(draw, nbytes=n)) for draw, n in ((Draw(0), 3 << 20), (Draw(1), 0)))
        for data, header in (torn, good):
            await bus.publish_whole([Outgoing(subjects.experience(JOB), data, group_headers(header))])
        async with asyncio.timeout(30):
            while not job.runner.run.state.sealed:
                await asyncio.sleep(0.02)
        await job.report(Report(kind="refused", epoch=1, batch=1, revision=1, bad=[Draw(0)], reason="it is torn"))
        first, *second = await job.dead()
        assert first.headers["Penstock-Sequence"] == str(unreadable)
        assert first.headers["Penstock-Reason"].startswith("undecodable: Penstock-Group header does not decode")
        assert {dead_letter.headers["Penstock-Reason"] for dead_letter in second} == {"refused: it is torn"}
        assert b"".join(dead_letter.data for dead_letter in second) == torn[0], "all of its parts are kept"
        assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 1, "the other group stays"
        assert Draw(0, 1) in await job.waiting()


@pytest.mark.long
async def test_a_header_with_too_many_parts_deletes_no_other_messages(bus: Bus) -> None:
    """The header claims more messages than the group has; the messages of another job in that range stay."""
    async with led(bus) as job:
        data, header = encode_group(group(Draw(1)))
        liar = group_headers(header) | {"Penstock-Parts": "3"}
        await bus.publish(subjects.raw(JOB), data, headers=liar)
        others = [await bus.publish(subjects.raw("job_other"), data, headers=group_headers(header)) for _ in range(2)]
        assert await job.runner.publisher.copy_to_dead(subjects.RAW, 1, reason="r", attempts=1) == 1
        assert len(await job.dead()) == 1
        await job.use_up(subjects.RAW, 1)

        async def buried() -> bool:
            return (await bus.stream_state(subjects.RAW)).messages == 2

        await job.scan_until(buried)
        assert [(await bus.get(subjects.RAW, seq)).seq for seq in others] == others


@pytest.mark.long
@pytest.mark.parametrize("parts", ["none", None])
async def test_a_malformed_raw_group_becomes_a_dead_letter(bus: Bus, parts: str | None) -> None:
    async with led(bus) as job:
        tree = {"schema": SCHEMA, "kind": "Group", "draw": [1, 0], "experts": [1]}
        data, header = b"".join(encode_frame(tree)), encode_group(group(Draw(1)))[1]
        headers = group_headers(header) | ({} if parts is None else {"Penstock-Parts": parts})
        await bus.publish(subjects.raw(JOB), data, headers=headers)
        await job.use_up(subjects.RAW, 1)

        async def buried() -> bool:
            return not (await bus.stream_state(subjects.RAW)).messages

        await job.scan_until(buried)
        assert (await job.dead())[0].headers["Penstock-Reason"].startswith("max deliveries, undecodable: ")
        assert await job.dropped() == {Draw(1): "dead_letter"}


async def test_reports_of_a_fenced_trainer_are_refused(bus: Bus) -> None:
    async with led(bus) as job:
        await job.report(Report(kind="forked", epoch=3, batch=1, version=5, digest="w5", reason="elsewhere"))
        for kind in ("failed", "halted"):
            report = pack(Report(kind=kind, epoch=2, reason="mine is broken"), job=JOB)  # type: ignore[arg-type]
            reply = unpack(await bus.request(subjects.report(JOB), report, deadline_s=10), Ack)[0]
            assert (reply.ok, reply.reason) == (False, "fenced: trainer epoch 2 < 3")
        assert (job.runner.run.failure, job.runner.run.halted(job.runner.inputs)) == (None, "")
        await job.report(Report(kind="failed", epoch=3, reason="no room"))
        assert job.runner.run.failure == JobFailure(
            code="trainer_failed", message="trainer: no room", service="trainer"
        )


async def test_a_batch_refused_while_the_job_fails_leaves_no_open_draw(bus: Bus) -> None:
    """One decision redraws the refused draw and ends all draws, so no new ticket follows."""
    async with led(bus) as job:
        for draw in (Draw(0), Draw(1)):
            data, header = encode_group(group(draw))
            await bus.publish(subjects.experience(JOB), data, headers=group_headers(header))
        async with asyncio.timeout(30):
            while not job.runner.run.state.sealed:
                await asyncio.sleep(0.02)

        async def both() -> Ack:  # the leader decides nothing between the two
            job.runner.run.fail(JobFailure(code="timeout", message="elsewhere"))
            refused = Report(kind="refused", epoch=1, batch=1, revision=1, bad=[Draw(0)], reason="it is torn")
            return await job.runner._take_report(refused)

        assert (await job.runner.inbox.ask(both)).ok
        assert job.runner.run.state.finished == "failed"
        assert not job.runner.run.state.open


async def test_a_dead_letter_is_shown_replayed_once_and_dropped(bus: Bus) -> None:
    async with led(bus, max_lag=1, max_updates=1) as job:  # there is room for more draws than the last batch needs
        await job.use_up(subjects.TICKETS, 2)

        async def both() -> bool:
            return len(await job.dead()) == 2

        await job.scan_until(both)
        box, store = DeadLetterQueue(bus), JobStore(bus)
        first, second = await box.page(JOB, after=0, limit=10)
        assert (first["draw"], first["stream"], first["attempts"]) == ("0.0", subjects.TICKETS, MAX_DELIVER)
        assert [row["id"] for row in await box.page(JOB, after=first["id"], limit=10)] == [second["id"]]
        assert (await box.show(JOB, first["id"]))["content"]["draw"] == [0, 0]
        with pytest.raises(NotFound):
            await box.show("job_other", first["id"])

        asked = Operation(id="op_1", kind="replay_dead_letter", created_at=datetime.now(UTC), args={"id": first["id"]})
        job.runner.update_record(await store.begin_operation(JOB, asked))
        async with asyncio.timeout(30):
            while (done := (await store.get(JOB)).operations[0]).state == "pending":
                await asyncio.sleep(0.02)
        again = Draw(0, first["id"] * REPLAYED)
        assert (done.state, done.result) == ("succeeded", {"draw": str(again)})
        assert again in await job.waiting()
        assert job.runner.run.state.balanced()
        assert job.runner.run.replay_dead_letter(first["id"], Draw(0), Inputs(0.0)) == [], (
            "it was replayed already, even if a crash left the dead letter"
        )
        assert [row["id"] for row in await box.page(JOB, after=0, limit=10)] == [second["id"]]
        unaware = asked.model_copy(update={"id": "op_0"})  # a leader crashed before it reported the replay
        job.runner.update_record(await store.begin_operation(JOB, unaware))
        async with asyncio.timeout(30):
            while (repeated := (await store.get(JOB)).operations[1]).state == "pending":
                await asyncio.sleep(0.02)
        assert repeated.state == "succeeded", repeated.message

        await box.drop(JOB, second["id"])
        assert await box.page(JOB, after=0, limit=10) == []
        job.runner.update_record(await store.set_desired(JOB, "paused"))
        lost = Operation(id="op_2", kind="replay_dead_letter", created_at=datetime.now(UTC), args={"id": second["id"]})
        job.runner.update_record(await store.begin_operation(JOB, lost))
        async with asyncio.timeout(30):
            while (failed := (await store.get(JOB)).operations[2]).state == "pending":
                await asyncio.sleep(0.02)
        assert (failed.state, failed.message) == ("failed", f"job '{JOB}' has no dead letter {second['id']}")


async def test_two_dead_letters_of_one_draw_become_two_draws_that_wait_for_room(bus: Bus) -> None:
    async with led(bus) as job:
        run, store = job.runner.run, JobStore(bus)
        for seq in (1, 2):  # a ticket that was delivered twice, say
            await bus.publish(subjects.dead(JOB), b"", headers=DEAD_TICKET | {"Penstock-Sequence": str(seq)})
        dead_letters = [row["id"] for row in await DeadLetterQueue(bus).page(JOB, after=0, limit=9)]
        for id in dead_letters:
            asked = Operation(id=f"op_{id}", kind="replay_dead_letter", created_at=datetime.now(UTC), args={"id": id})
            job.runner.update_record(await store.begin_operation(JOB, asked))
        async with asyncio.timeout(30):
            while job.runner.inputs.replays < len(dead_letters):
                await asyncio.sleep(0.02)
        assert len(run.state.open) == run.config.max_draws
        for draw in (Draw(0), Draw(1)):
            data, header = encode_group(group(draw))
            await bus.publish(subjects.experience(JOB), data, headers=group_headers(header))
        async with asyncio.timeout(30):
            while not run.state.sealed:
                await asyncio.sleep(0.02)
        await job.report(Report(kind="trained", epoch=1, batch=1, revision=1, version=1, digest="w1"))
        async with asyncio.timeout(30):
            while any(one.state == "pending" for one in (await store.get(JOB)).operations):
                await asyncio.sleep(0.02)
        assert {Draw(0, id * REPLAYED) for id in dead_letters} == set(run.state.open)
        assert run.state.balanced()
