"""Publishing to and reading from streams, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from typing import Any

import pytest

from penstock.shared.errors import ConfigError, Conflict, NotFound, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.transport import follow as follow_module
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.jetstream import call, create_consumer
from penstock.shared.transport.server import NatsServer

JOB = "job_1"
LEDGER, EXPERIENCE = subjects.ledger(JOB), subjects.experience(JOB)


async def test_streams_can_be_ensured_again_and_resized(bus: Bus) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=2 << 20, update=False)
    assert (await bus.stream_state(subjects.EXPERIENCE)).max_bytes == 64 << 20
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=2 << 20)
    assert (await bus.stream_state(subjects.EXPERIENCE)).max_bytes == 1 << 20
    assert (await bus.stream_state(subjects.LEDGER)).max_bytes == 2 << 20
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=2 << 20, ledger_bytes=3 << 20)
    sizes = [(await bus.stream_state(name)).max_bytes for name in (subjects.LEDGER, subjects.BATCHES)]
    assert sizes == [3 << 20, 2 << 20]


async def test_feedback_and_interactions_expire_and_the_ledger_stays(bus: Bus) -> None:
    live = (subjects.INTERACTIONS, subjects.FEEDBACK)
    await bus.ensure_streams(experience_bytes=8 << 20, stream_bytes=8 << 20, live_keep_s=0.5)
    for subject in (subjects.interaction(JOB, "i"), subjects.feedback(JOB), LEDGER):
        await bus.publish(subject, b"x")
    async with asyncio.timeout(30):
        while any([(await bus.stream_state(name)).messages for name in live]):
            await asyncio.sleep(0.05)
    assert (await bus.stream_state(subjects.LEDGER)).messages == 1
    await bus.ensure_streams(experience_bytes=8 << 20, stream_bytes=8 << 20)
    info = await call(bus._connection, "STREAM.INFO.FEEDBACK", {}, deadline_s=5, what="look at FEEDBACK")
    assert info["config"]["max_age"] == 0, "without the setting, messages do not expire"


async def test_many_services_may_ensure_at_once(nats_server: NatsServer) -> None:
    async with await Bus.connect(nats_server.url, name="a") as one, await Bus.connect(nats_server.url, name="b") as two:
        ensure = [b.ensure_streams(experience_bytes=8 << 20, stream_bytes=8 << 20) for b in (one, two, one, two)]
        await asyncio.gather(*ensure)
        assert (await two.stream_state(subjects.LEDGER)).messages == 0


async def test_a_server_without_room_is_a_configuration_error(nats_server: NatsServer) -> None:
    async with await Bus.connect(nats_server.url, name="greedy") as bus:
        with pytest.raises(ConfigError, match="PENSTOCK_STREAM_BYTES"):
            await bus.ensure_streams(experience_bytes=1 << 60, stream_bytes=1 << 20)


async def test_a_service_that_only_uses_the_streams_need_not_have_room_for_them(bus: Bus) -> None:
    """The coordinator alone sets the sizes of streams, whatever the settings of other services are."""
    await bus.ensure_streams(experience_bytes=1 << 60, stream_bytes=1 << 20, update=False)
    state = await bus.stream_state(subjects.EXPERIENCE)
    with pytest.raises(ConfigError, match="PENSTOCK_STREAM_BYTES"):
        await bus.ensure_streams(experience_bytes=1 << 60, stream_bytes=1 << 20)
    assert state.max_bytes == (await bus.stream_state(subjects.EXPERIENCE)).max_bytes < 1 << 60


async def test_a_message_is_read_with_its_body_headers_and_time(bus: Bus) -> None:
    before = time.time()
    seq = await bus.publish(EXPERIENCE, b"body", headers={"Penstock-Group": "ü: x"}, msg_id="m")
    for message in (
        await bus.get(subjects.EXPERIENCE, seq),
        await bus.last(subjects.EXPERIENCE, EXPERIENCE),
        (await bus.read(subjects.EXPERIENCE, EXPERIENCE))[0],
        (await bus.get_many(subjects.EXPERIENCE, [seq, seq + 7]))[seq],
    ):
        assert message is not None
        assert (message.subject, message.data, message.seq) == (EXPERIENCE, b"body", seq)
        assert message.headers == {"Penstock-Group": "ü: x", "Nats-Msg-Id": "m"}
        assert before - 1 < message.time < time.time() + 1


async def test_a_read_ends_where_the_leader_of_the_stream_ends(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica that serves the read lags, and reports that nothing is left."""
    for number in range(5):
        await bus.publish(LEDGER, b"%d" % number)
    lies = [0, 0]

    async def lagging(*args: Any, **named: Any) -> dict[str, Any]:
        info = await create_consumer(*args, **named) | {"cluster": {"name": "c", "leader": "n"}}
        return info | ({"num_pending": lies.pop()} if lies else {})

    monkeypatch.setattr(follow_module, "create_consumer", lagging)
    assert [message.data for message in await bus.read(subjects.LEDGER, LEDGER)] == [b"0", b"1", b"2", b"3", b"4"]
    assert not lies


async def test_a_repeated_id_is_stored_once(bus: Bus) -> None:
    seqs = [await bus.publish(EXPERIENCE, b"x", msg_id="same") for _ in range(3)]
    assert seqs == [seqs[0]] * 3
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 1


async def test_appends_conflict_unless_they_are_ours(bus: Bus) -> None:
    first = await bus.publish(LEDGER, b"1", expect_last_subject_seq=0)
    second = await bus.publish(LEDGER, b"2", expect_last_subject_seq=first, msg_id="mine")
    with pytest.raises(Conflict, match=LEDGER):
        await bus.publish(LEDGER, b"3", expect_last_subject_seq=first)
    with pytest.raises(Conflict):
        await bus.publish(LEDGER, b"3", expect_last_subject_seq=0)
    # An append whose answer was lost is repeated, even after a later append:
    await bus.publish(LEDGER, b"3", expect_last_subject_seq=second)
    assert await bus.publish(LEDGER, b"2", expect_last_subject_seq=first, msg_id="mine") == second
    assert [m.data for m in await bus.read(subjects.LEDGER, LEDGER)] == [b"1", b"2", b"3"]


async def test_one_of_many_concurrent_writers_appends(bus: Bus) -> None:
    tries = [bus.publish(LEDGER, b"%d" % i, expect_last_subject_seq=0) for i in range(16)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(r, int) for r in results) == 1
    assert sum(isinstance(r, Conflict) for r in results) == 15


async def test_a_full_stream_refuses_at_once_and_recovers(bus: Bus) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=1 << 20)
    payload = os.urandom(300_000)
    stored = [await bus.publish(EXPERIENCE, payload) for _ in range(3)]
    start = time.monotonic()
    with pytest.raises(StreamFull, match="EXPERIENCE"):
        await bus.publish(EXPERIENCE, payload)
    with pytest.raises(StreamFull):
        await bus.publish_many([Outgoing(EXPERIENCE, payload) for _ in range(2)])
    assert time.monotonic() - start < 10
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 3, "no old message was discarded"
    assert await bus.purge(subjects.EXPERIENCE, EXPERIENCE, below_seq=0) == 0
    assert await bus.purge(subjects.EXPERIENCE, EXPERIENCE, below_seq=stored[1]) == 1
    await bus.publish(EXPERIENCE, payload)


async def test_payloads_are_limited(bus: Bus) -> None:
    with pytest.raises(ProtocolError, match="bulk plane"):
        await bus.publish(EXPERIENCE, bytes((1 << 20) + 1))
    assert await bus.publish(EXPERIENCE, bytes(1 << 20))
    with pytest.raises(ProtocolError, match="max_payload"):  # with its headers it is too large
        await bus.notify("anybody", bytes(8 << 20))
    assert bus.reconnects == 0
    with pytest.raises(ProtocolError):
        await bus.publish("two words", b"")


async def test_a_subject_without_a_stream_is_named(bus: Bus) -> None:
    with pytest.raises(Unavailable, match=r"no stream takes 'nowhere\.x'"):
        await bus.publish("nowhere.x", b"", deadline_s=0.2)


async def test_a_batch_is_stored_whole_or_not_at_all(bus: Bus) -> None:
    parts = [Outgoing(EXPERIENCE, b"%d" % i, {"part": str(i)}, f"g.{i}") for i in range(5)]
    seqs = await bus.publish_many(parts)
    assert seqs == list(range(seqs[0], seqs[0] + 5)), "consecutive: no other message came in between"
    assert await bus.publish_many(parts) == seqs, "a repeated batch returns the stored sequence numbers"
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 5
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=16 << 20)
    with pytest.raises(StreamFull):
        await bus.publish_many([Outgoing(EXPERIENCE, os.urandom(400_000)) for _ in range(3)])
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 5, "no part of a batch that did not fit"


async def test_batches_do_not_interleave(bus: Bus) -> None:
    batches = [[Outgoing(EXPERIENCE, b"x", {}, f"{b}.{i}") for i in range(7)] for b in range(20)]
    for seqs in await asyncio.gather(*(bus.publish_many(batch) for batch in batches)):
        assert seqs == list(range(seqs[0], seqs[0] + 7))


async def test_a_batch_above_the_servers_limit_is_stored_singly(bus: Bus) -> None:
    seqs = await bus.publish_many([Outgoing(subjects.metrics(JOB), b"x", {}, str(i)) for i in range(1001)])
    assert len(set(seqs)) == 1001


async def test_reading_ends_at_the_present_end(bus: Bus) -> None:
    assert await bus.read(subjects.EXPERIENCE, EXPERIENCE) == []
    seqs = await bus.publish_many([Outgoing(EXPERIENCE, b"%d" % i) for i in range(700)])
    await bus.publish(subjects.experience("other"), b"not ours")
    messages = await bus.read(subjects.EXPERIENCE, EXPERIENCE)
    assert [m.data for m in messages] == [b"%d" % i for i in range(700)]
    part = await bus.read(subjects.EXPERIENCE, EXPERIENCE, start_seq=seqs[10], end_seq=seqs[19])
    assert [m.seq for m in part] == seqs[10:20]
    assert await bus.read(subjects.EXPERIENCE, EXPERIENCE, start_seq=seqs[-1] + 1) == []
    assert len(await bus.read(subjects.EXPERIENCE, "experience.*")) == 701


@pytest.mark.long
@pytest.mark.parametrize("kept", [0, 2])
async def test_reading_ends_when_the_awaited_message_is_deleted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    seqs = [await bus.publish(EXPERIENCE, b"x") for _ in range(kept + 1)]
    reader = bus.scan(subjects.EXPERIENCE, EXPERIENCE)
    ask = reader._ask

    async def ask_late() -> bool:
        with contextlib.suppress(NotFound):
            await bus.delete_message(subjects.EXPERIENCE, seqs[-1])
        return await ask()

    monkeypatch.setattr(reader, "_ask", ask_late)
    async with asyncio.timeout(30):
        assert [message.seq async for message in reader] == seqs[:kept]


async def test_headers_can_be_read_without_bodies(bus: Bus) -> None:
    await bus.publish_many([Outgoing(EXPERIENCE, bytes(100_000), {"n": str(i)}) for i in range(20)])
    heads = await bus.read(subjects.EXPERIENCE, EXPERIENCE, headers_only=True)
    assert [m.headers["n"] for m in heads] == [str(i) for i in range(20)]
    assert {m.data for m in heads} == {b""}


async def test_large_messages_are_all_read(bus: Bus) -> None:
    sizes = [1 << 20] * 40
    for size in sizes:
        await bus.publish(EXPERIENCE, bytes(size))
    assert [len(m.data) for m in await bus.read(subjects.EXPERIENCE, EXPERIENCE)] == sizes


async def test_following_sees_old_and_new_messages_in_order(bus: Bus) -> None:
    await bus.publish(EXPERIENCE, b"0")
    async with contextlib.aclosing(bus.follow(subjects.EXPERIENCE, EXPERIENCE)) as feed:
        consumers = set()
        for i in range(600):
            await bus.publish_many([Outgoing(EXPERIENCE, b"%d" % i)]) if i else None
            assert (await asyncio.wait_for(anext(feed), 2)).data == b"%d" % i
            consumers.add(feed._consumer)
        assert len(consumers) == 1, "the consumer was created anew without need"


async def test_a_wait_for_a_message_can_be_given_up_and_taken_up_again(bus: Bus) -> None:
    async with contextlib.aclosing(bus.follow(subjects.EXPERIENCE, EXPERIENCE)) as feed:
        for i in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(feed), 0.1)
            await bus.publish(EXPERIENCE, b"%d" % i)
            assert (await asyncio.wait_for(anext(feed), 2)).data == b"%d" % i


@pytest.mark.long
async def test_a_slow_follower_loses_nothing(bus: Bus) -> None:
    await bus.publish_many([Outgoing(EXPERIENCE, bytes(60_000), {"n": str(i)}) for i in range(600)])
    feed = bus.follow(subjects.EXPERIENCE, EXPERIENCE)
    seen = []
    async with contextlib.aclosing(feed):
        async for message in feed:
            seen.append(int(message.headers["n"]))
            if len(seen) % 200 == 1:
                time.sleep(0.2)  # noqa: ASYNC251  a handler that blocks the loop
            if len(seen) == 600:
                break
    assert seen == list(range(600))


async def test_a_forgotten_follower_leaves_nothing_behind(bus: Bus, nats_server: NatsServer) -> None:
    subscriptions = len(bus._connection._subscriptions)
    feed = bus.follow(subjects.EXPERIENCE, EXPERIENCE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(feed), 0.05)
    del feed
    gc.collect()
    await bus.publish(EXPERIENCE, b"wakes the inbox")
    await asyncio.sleep(0.1)
    assert len(bus._connection._subscriptions) == subscriptions


async def test_missing_things_are_not_found(bus: Bus) -> None:
    with pytest.raises(NotFound):
        await bus.get(subjects.LEDGER, 99)
    with pytest.raises(NotFound):
        await bus.stream_state("NOPE")
    with pytest.raises(NotFound):
        await bus.read("NOPE", "nope.x")
    assert await bus.last(subjects.LEDGER, LEDGER) is None
    assert await bus.get_many(subjects.LEDGER, [1, 2]) == {}


async def test_messages_can_be_deleted_and_counted(bus: Bus) -> None:
    seqs = [await bus.publish(subjects.experience(job), b"x") for job in ("a", "a", "b")]
    assert await bus.subject_counts(subjects.EXPERIENCE) == {"experience.a": 2, "experience.b": 1}
    for _ in range(2):  # repeating is harmless
        await bus.delete_message(subjects.EXPERIENCE, seqs[0])
    await bus.delete_message(subjects.EXPERIENCE, 12345)
    assert await bus.purge(subjects.EXPERIENCE, "experience.b") == 1
    assert await bus.subject_counts(subjects.EXPERIENCE) == {"experience.a": 1}
    assert await bus.subject_counts(subjects.EXPERIENCE, "experience.zzz") == {}


def payload(nbytes: int) -> bytes:
    return os.urandom(nbytes)


async def test_large_payloads_are_stored_in_parts_and_read_whole(bus: Bus) -> None:
    sizes = [10, 1 << 20, (1 << 20) + 1, 9_500_000]
    stored = [payload(size) for size in sizes]
    messages = [Outgoing(EXPERIENCE, data, {"n": str(i)}, f"p.{i}") for i, data in enumerate(stored)]
    await bus.publish_whole(messages)
    await bus.publish_whole(messages)
    heads = await bus.read(subjects.EXPERIENCE, EXPERIENCE, headers_only=True)
    assert [head.headers["n"] for head in heads] == ["0", "1", "2", "3"], "one for each, none for repeats"
    found = await bus.get_whole(subjects.EXPERIENCE, [head.seq for head in heads])
    assert [found[head.seq].data for head in heads] == stored
    assert [found[head.seq].headers["n"] for head in heads] == ["0", "1", "2", "3"]
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 1 + 1 + 2 + 10

    await bus.delete_message(subjects.EXPERIENCE, heads[3].seq + 4)
    assert heads[3].seq not in await bus.get_whole(subjects.EXPERIENCE, [head.seq for head in heads]), "a part is gone"
    assert await bus.purge(subjects.EXPERIENCE, EXPERIENCE, below_seq=heads[3].seq) == 4
    assert await bus.purge(subjects.EXPERIENCE, EXPERIENCE) == 9


async def test_payloads_without_room_leave_nothing(bus: Bus) -> None:
    await bus.ensure_streams(experience_bytes=4 << 20, stream_bytes=16 << 20)
    with pytest.raises(StreamFull):
        await bus.publish_whole([Outgoing(EXPERIENCE, payload(2_500_000)), Outgoing(EXPERIENCE, payload(2_500_000))])
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 0
    await bus.publish_whole([Outgoing(EXPERIENCE, payload(2_500_000))])


HALF_A_GROUP = """
import asyncio, os, signal, sys
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.connection import Connection

async def main():
    bus = await Bus.connect(sys.argv[1], name="dies")
    send, sent = Connection.send, 0
    async def dying(self, subject, data, **more):
        nonlocal sent
        if sent == 5 and subject.startswith("experience."):
            await self.echo(5.0)  # the server has the first five parts
            os.kill(os.getpid(), signal.SIGKILL)
        sent += subject.startswith("experience.")
        await send(self, subject, data, **more)
    Connection.send = dying
    await bus.publish_whole([Outgoing(sys.argv[2], bytes(9 << 20), {}, "half")])

asyncio.run(main())
"""


async def test_a_writer_that_dies_between_parts_leaves_nothing(bus: Bus, nats_server: NatsServer) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HALF_A_GROUP, nats_server.url, EXPERIENCE)
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
    assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 0
    assert await bus.read(subjects.EXPERIENCE, f"{EXPERIENCE}.>") == []
    await bus.publish_whole([Outgoing(EXPERIENCE, bytes(9 << 20), {}, "half")])
    head = (await bus.read(subjects.EXPERIENCE, EXPERIENCE, headers_only=True))[0]
    assert len((await bus.get_whole(subjects.EXPERIENCE, [head.seq]))[head.seq].data) == 9 << 20
