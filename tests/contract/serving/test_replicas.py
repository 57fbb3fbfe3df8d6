"""Several coordinators on one bus: clients may change between them at any moment, and a coordinator may die."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.services.coordinator.serving import handover, retries
from penstock.services.coordinator.serving.answer import Answer
from penstock.services.coordinator.serving.models import Served
from penstock.shared.errors import ConfigError, PenstockError, RateLimited, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.inference import Chunks, Claim, ClientSampling, InferenceRequest
from penstock.shared.transport.bus import Bus

FIRST, AGAIN = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}
LENGTH = 300
BODY = {"max_tokens": LENGTH, "return_token_ids": True}


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(0.005)


def request_of(id: str, gateway: str) -> InferenceRequest:
    """A request that a gateway took."""
    return InferenceRequest(
        ids=[id], gateway=gateway, kind="chat", sampling=ClientSampling(seed=0), episode="e", key_id="k",
        body_digest="d", started=0.0,
    )  # fmt: skip


async def asked(stack: Any, front: Any, **body: Any) -> asyncio.Task[Any]:
    """Send a request, and wait until a worker answers it and its note is stored; return the task."""
    task = asyncio.create_task(stack.chat("again", client=front.client, headers=FIRST, **{**BODY, **body}))

    async def noted() -> bool:
        """Return True once the note is stored; the gateway renames a request that no worker accepted."""
        written = [answer.id for answer in front.gateway._answers.values() if answer.worker]
        keys = await stack.bus.kv(subjects.ANSWERS).keys("try")
        taken = any(key.endswith(id) for key in keys for id in written)
        return taken or bool(keys and await stack.interactions())

    await until(noted)
    return task


async def leave(front: Any, task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])

    async def abandoned() -> bool:
        return bool(front.gateway.retries.kept)

    await until(abandoned)


async def check_one(stack: Any, reply: Any) -> None:
    (record,) = await stack.interactions()
    assert reply.headers["x-interaction-id"] == record.id
    assert reply.headers["x-episode-id"] == f"ep_{record.episode}"
    assert reply.json()["choices"][0]["token_ids"] == record.token_ids
    assert (len(record.token_ids), record.finish, record.untrainable) == (LENGTH, "length", "")


@pytest.mark.long
async def test_a_retry_elsewhere_gets_the_answer_that_is_being_written(stack_of: Any) -> None:
    async with stack_of() as stack, stack.replica() as other:
        await leave(other, await asked(stack, other))
        await check_one(stack, await stack.chat("again", headers=AGAIN, **BODY))
        third = await stack.chat("again", client=other.client, headers=AGAIN, **BODY)
        assert third.headers["x-interaction-id"] != (await stack.interactions())[0].id, "it was read"


@pytest.mark.long
async def test_a_second_retry_where_the_answer_is_written_gets_it(stack_of: Any) -> None:
    """The first retry took the request over at another coordinator, and then its client left."""
    async with stack_of() as stack, stack.replica() as other:
        await leave(other, await asked(stack, other, max_tokens=1500))
        body = {**BODY, "max_tokens": 1500}
        retry = asyncio.create_task(stack.chat("again", headers=AGAIN, **body))

        async def handed_over() -> bool:
            read = [answer.key for answer in stack.gateway._answers.values() if answer.worker and answer.key]
            return bool(read) and bool(await other.gateway._notes.find(read[0]))

        await until(handed_over)
        await leave(stack, retry)
        reply = await stack.chat("again", client=other.client, headers=AGAIN, **body)
        (record,) = await stack.interactions()
        assert reply.headers["x-interaction-id"] == record.id
        assert reply.json()["choices"][0]["token_ids"] == record.token_ids
        assert (len(record.token_ids), record.finish, record.untrainable) == (1500, "length", "")
        for gateway in (stack.gateway, other.gateway):
            assert not gateway._answers
            assert not gateway._replicas._relays
            assert not gateway.retries.kept


async def test_a_relay_ends_with_the_gateway_that_claimed_the_answer(bus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sends nothing, and the other gateway gives no sign of life."""
    monkeypatch.setattr(handover, "ABSENT_S", 0.2)
    served = Served(name="agent", job="job_x", online=True, version=0, created=0, hold_s=1.0)
    relay = handover.Relay(
        bus, "here", Answer(served, request_of("i", "here")), Claim(key="k", request="i", gateway="there")
    )
    async with asyncio.timeout(30):
        await relay.run()


@pytest.mark.parametrize(
    ("error", "name"), [(RateLimited("capacity", "no"), "Unavailable"), (ConfigError("no"), "ConfigError")], ids=str
)
async def test_a_relay_sends_errors_by_a_name_that_the_other_gateway_can_raise(
    bus: Any, error: PenstockError, name: str
) -> None:
    """A refusal needs more than a message: the other gateway recovers the answer instead."""
    served = Served(name="agent", job="job_x", online=True, version=0, created=0, hold_s=1.0)
    answer, sent = Answer(served, request_of("i", "here")), asyncio.Queue[Chunks]()
    answer.fail(error)
    to = subjects.inference_chunks("there")
    async with asyncio.timeout(30), await bus.subscribe(to, lambda _, data: sent.put_nowait(unpack(data, Chunks)[0])):
        await handover.Relay(bus, "here", answer, Claim(key="k", request="i", gateway="there")).run()
        (failure,) = (await sent.get()).failures
    assert (failure.error, failure.text) == (name, "no")


@pytest.mark.long
@pytest.mark.parametrize("finished", [False, True])
async def test_a_retry_outlives_the_coordinator_that_had_the_request(stack_of: Any, finished: bool) -> None:
    async with stack_of() as stack, stack.replica() as other:
        task = await asked(stack, other)
        await other.die()
        await leave(other, task)
        if finished:
            await until(stack.interactions)
        await check_one(stack, await stack.chat("again", headers=AGAIN, **BODY))


async def test_a_request_is_noted_before_any_worker_has_it(stack_of: Any) -> None:
    """A coordinator may die at any moment; a retry must then find the answer that a worker generates."""
    noted: set[str] = set()
    asked: list[bool] = []

    def on_note(subject: str, data: bytes) -> None:
        noted.add(subject.rpartition(".")[2])

    def on_request(subject: str, data: bytes) -> None:
        asked.append(unpack(data, InferenceRequest)[0].id in noted)

    async with stack_of() as stack, await Bus.connect(stack.server.url, name="listens") as bus:
        await stack.chat("again")  # from now on a worker listens, too
        notes, requests = f"$KV.{subjects.ANSWERS}.try.>", subjects.inference(stack.job)
        async with await bus.subscribe(notes, on_note), await bus.subscribe(requests, on_request):
            replies = await asyncio.gather(*(stack.chat("again", headers=FIRST, user=str(n)) for n in range(20)))
    assert all(reply.is_success for reply in replies)
    assert len(asked) >= len(replies)
    assert all(asked)


async def test_a_note_that_is_not_stored_yet_is_found(stack_of: Any) -> None:
    """A coordinator may die right after it has sent the note."""
    async with stack_of() as stack, await Bus.connect(stack.server.url, name="dies") as bus:
        served = stack.gateway.find("agent")
        for n in range(200):
            answer = Answer(served, request_of(f"i{n}", "dies"))
            answer.key = f"k{n}"
            await handover.Notes(bus, "dies").write(answer)
        with pytest.raises(Unavailable):  # the server has read it all
            await bus.request("nobody", b"", deadline_s=5)
        ((note, _),) = await handover.Notes(stack.bus, "looks").find("k199")
        assert (note.gateway, note.ids) == ("dies", ["i199"])


@pytest.mark.long
async def test_an_answer_that_a_client_waits_for_goes_to_no_other(stack_of: Any) -> None:
    async with stack_of() as stack, stack.replica() as other:
        waiting = await asked(stack, other)
        mine = await stack.chat("again", headers=AGAIN, **BODY)
        assert mine.headers["x-interaction-id"] != (await waiting).headers["x-interaction-id"]
        assert len(await stack.interactions()) == 2


async def test_an_answer_without_a_retry_is_given_up_everywhere(stack_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack_of() as stack, stack.replica() as other:
        await leave(other, await asked(stack, other, max_tokens=1900))
        body = {**BODY, "max_tokens": 1900}
        retry = asyncio.create_task(stack.chat("again", headers=AGAIN, **body))

        async def handed_over() -> bool:
            return not other.gateway.retries.kept

        await until(handed_over)
        monkeypatch.setattr(retries, "COME_BACK_S", 0.1)
        await leave(stack, retry)
        await until(stack.interactions)
        (record,) = await stack.interactions()
        assert (record.finish, record.untrainable) == ("client_disconnected", "client_disconnected")


async def test_a_chat_goes_on_in_its_episode_at_any_coordinator(stack_of: Any) -> None:
    async with stack_of() as stack, stack.replica() as other:
        first = await stack.chat("hi", user="bob")
        answer = first.json()["choices"][0]["message"]
        question = {"role": "user", "content": "hi"}
        later = {"messages": [question, answer, question], "user": "bob"}
        for user, same in (("bob", True), ("eve", False)):
            second = await stack.chat("", client=other.client, **{**later, "user": user})
            assert (second.headers["x-episode-id"] == first.headers["x-episode-id"]) is same
