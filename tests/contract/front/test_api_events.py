"""The event stream over a real server: ids, resumption without loss, pings, endings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from penstock.client import Client
from penstock.services.coordinator.api.http.sse import event_stream
from penstock.services.coordinator.jobs.events import JobEvents
from penstock.services.coordinator.webhooks.cloudevent import event_of
from penstock.shared.errors import Unavailable
from penstock.shared.transport.bus import Message


def blocks(text: str) -> list[dict[str, str]]:
    found = []
    for block in text.strip().split("\n\n"):
        pairs = [line.partition(": ") for line in block.splitlines()]
        found.append({name: value for name, _, value in pairs})
    return found


def submit(served: Any, job: Any) -> str:
    """Submit a job, and publish the event ``pending`` as its leader does; return the id."""
    id: str = httpx.post(f"{served.url}/v1/jobs", json=job).json()["id"]
    served.deployment.emit(id, "phase", "pending")
    return id


def test_list_pages(served: Any, deployment: Any, job: Any) -> None:
    id = submit(served, job)
    for i in range(5):
        deployment.emit(id, "step", f"step {i}")
    page = httpx.get(f"{served.url}/v1/jobs/{id}/events?limit=4").json()
    assert [row["id"] for row in page["data"]] == [1, 2, 3, 4]
    assert page["has_more"]
    rest = httpx.get(f"{served.url}/v1/jobs/{id}/events", params={"after": page["last_id"]}).json()
    assert [row["message"] for row in rest["data"]] == ["step 3", "step 4"]


def test_a_cursor_that_the_stream_never_sent_is_refused(served: Any, job: Any) -> None:
    url = f"{served.url}/v1/jobs/{submit(served, job)}/events"
    with httpx.Client() as client:
        for cursor in ("9" * 5000, "-1", "1x", "\u00b2", str(1 << 53)):
            reply = client.get(url, headers={"last-event-id": cursor.encode("latin-1")})
            assert (reply.status_code, reply.json()["type"]) == (422, "urn:penstock:problem:invalid_cursor"), cursor
        for cursor in ("x", "-1", "1.5", "9" * 30):
            reply = client.get(url, headers={"accept": "text/event-stream", "last-event-id": cursor})
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_cursor"), cursor


def test_stream_to_the_end(served: Any, deployment: Any, job: Any) -> None:
    id = submit(served, job)
    deployment.advance(id, "succeeded")
    reply = httpx.get(f"{served.url}/v1/jobs/{id}/events", headers={"accept": "text/event-stream"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    first, *events, end = blocks(reply.text)
    assert first == {"retry": "1000"}
    assert [(e["id"], e["event"]) for e in events] == [("1", "phase"), ("2", "phase")]
    assert json.loads(events[1]["data"])["message"] == "succeeded"
    assert end["event"] == "end"


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [{"params": {"format": "cloudevents"}}, {"headers": {"accept": "application/cloudevents+json"}}],
    ids=["query", "accept"],
)
def test_events_are_what_webhooks_are_sent(served: Any, deployment: Any, job: Any, asked: dict[str, Any]) -> None:
    id = submit(served, job)
    deployment.emit(id, "checkpoint", "checkpoint 3", number=3)
    deployment.advance(id, "succeeded")
    posted = [
        json.loads(event_of(Message(f"events.{id}", msgspec.json.encode(row), {}, seq, 0.0)).body)
        for seq, row in enumerate(deployment.events(id), 1)
    ]
    assert [event["type"] for event in posted[1:3]] == ["rl.checkpoint.created.v1", "rl.job.succeeded.v1"]
    page = httpx.get(f"{served.url}/v1/jobs/{id}/events", **asked).json()
    assert (page["data"], page["first_id"], page["last_id"]) == (posted, 1, 3)

    plain = httpx.get(f"{served.url}/v1/jobs/{id}/events", params={"format": "json"}, headers=asked.get("headers"))
    assert [row["type"] for row in plain.json()["data"]] == ["phase", "checkpoint", "phase"]
    headers = {"accept": "text/event-stream, " + asked.get("headers", {}).get("accept", "*/*"), "last-event-id": "1"}
    deployment.forget_event(1)
    stream = httpx.get(f"{served.url}/v1/jobs/{id}/events", params=asked.get("params"), headers=headers)
    _, reset, *events, end = blocks(stream.text)
    assert (reset["event"], end["event"]) == ("reset", "end"), "signs of the stream"
    assert [json.loads(event["data"]) for event in events] == posted[1:]
    assert [(event["id"], event["event"]) for event in events] == [
        (str(event["data"]["sequence"]), event["type"]) for event in posted[1:]
    ]
    assert httpx.get(f"{served.url}/v1/jobs/{id}/events?format=xml").status_code == 422


@pytest.mark.long
def test_thirteen_reconnects_lose_and_repeat_nothing(served: Any, serve: Any, deployment: Any, job: Any) -> None:
    id, urls = submit(served, job), (served.url, serve().url)

    def produce() -> None:
        for i in range(399):
            deployment.emit(id, "step", f"{i}")
            time.sleep(0.001)
        deployment.advance(id, "succeeded")

    producer = threading.Thread(target=produce)
    producer.start()
    seen: list[int] = []
    last = "0"
    connections, ended = 0, False
    while not ended:
        connections += 1
        headers = {"accept": "text/event-stream", "last-event-id": last}
        taken = 0
        url = f"{urls[connections % 2]}/v1/jobs/{id}/events"
        with httpx.stream("GET", url, headers=headers, timeout=10) as reply:
            for line in reply.iter_lines():
                if line.startswith("id: "):
                    last = line[4:]
                    seen.append(int(last))
                    taken += 1
                ended = ended or line == "event: end"
                if taken >= 31:
                    break
    producer.join()
    assert connections >= 13
    assert seen == list(range(1, 402))


def test_a_client_that_resumes_at_deleted_events_gets_a_reset(served: Any, deployment: Any, job: Any) -> None:
    id = submit(served, job)
    for i in range(5):
        deployment.emit(id, "step", f"step {i}")
    deployment.advance(id, "succeeded")
    deployment.forget_event(3)

    def stream(last: str) -> list[dict[str, str]]:
        headers = {"accept": "text/event-stream", "last-event-id": last}
        return blocks(httpx.get(f"{served.url}/v1/jobs/{id}/events", headers=headers).text)

    _, reset, *events, end = stream("3")
    assert (reset["event"], "id" in reset) == ("reset", False), "a client cannot resume from it"
    assert json.loads(reset["data"])["data"] == {"after": 3}
    assert [event["id"] for event in events] == ["4", "5", "6", "7"]
    assert end["event"] == "end"
    assert "reset" not in {block.get("event") for last in ("0", "2", "4") for block in stream(last)}
    with Client(served.url) as client:
        rows = list(client.events(id, after=3))
    assert [row["type"] for row in rows] == ["reset", *["step"] * 3, "phase"]


def test_unknown_job_is_404_not_a_stream(served: Any) -> None:
    url = f"{served.url}/v1/jobs/job_{'0' * 32}/events"
    assert httpx.get(url, headers={"accept": "text/event-stream"}).status_code == 404


def test_the_server_stops_while_clients_listen(served: Any, job: Any) -> None:
    id = submit(served, job)
    headers = {"accept": "text/event-stream"}
    with httpx.stream("GET", f"{served.url}/v1/jobs/{id}/events", headers=headers, timeout=10) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "retry: 1000"
        began = time.monotonic()
        threading.Thread(target=served.stop).start()
        assert "event: end" not in list(lines)
        assert time.monotonic() - began < 9


async def test_pings_and_cleanup() -> None:
    closed = False

    async def quiet() -> Any:
        nonlocal closed
        try:
            await asyncio.sleep(60)
            yield 1, {}
        finally:
            closed = True

    stream = event_stream(quiet(), stopping=asyncio.Event(), ping_s=0.05)
    assert await anext(stream) == b"retry: 1000\n\n"
    assert await anext(stream) == b": ping\n\n"
    assert await anext(stream) == b": ping\n\n"
    await stream.aclose()
    assert closed


def test_a_failing_source_is_reported_and_can_be_resumed(
    served: Any, deployment: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = JobEvents.follow

    async def broken(reader: JobEvents, job: str, *, after: int) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        async with contextlib.aclosing(follow(reader, job, after=after)) as events:
            async for seq, row in events:
                yield seq, row
                if seq == 2:
                    monkeypatch.undo()
                    raise Unavailable("the bus went away")

    monkeypatch.setattr(JobEvents, "follow", broken)
    id = submit(served, job)
    url = f"{served.url}/v1/jobs/{id}/events"
    with httpx.stream("GET", url, headers={"accept": "text/event-stream"}, timeout=30) as reply:
        lines = reply.iter_lines()
        assert "id: 1" in lines
        deployment.emit(id, "step", "one")
        last = blocks("\n".join(lines) + "\n")[-1]
    assert (last["event"], json.loads(last["data"])["code"]) == ("error", "unavailable")
    deployment.advance(id, "succeeded")
    rest = blocks(httpx.get(url, headers={"accept": "text/event-stream", "last-event-id": "2"}).text)
    assert [block.get("id") for block in rest] == [None, "3", None]


@pytest.mark.long
def test_an_endless_reply_does_not_starve_the_others(served: Any, deployment: Any, job: Any) -> None:
    id = submit(served, job)
    deployment.repeat()
    deployment.advance(id, "succeeded")
    url = f"{served.url}/v1/jobs/{id}/replay"
    with httpx.stream("POST", url, json={"to_batch": 1 << 40}, timeout=10) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines))["batch"] == 0
        assert httpx.get(f"{served.url}/healthz", timeout=5).status_code == 200
    time.sleep(0.2)
    assert httpx.get(f"{served.url}/healthz", timeout=5).status_code == 200
