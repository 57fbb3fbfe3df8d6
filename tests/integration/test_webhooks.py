"""Deliveries of events to a real server: in order, signed, at least once, also after a coordinator's death."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.services.coordinator.webhooks import delivery
from penstock.services.coordinator.webhooks.cloudevent import trial_event
from penstock.services.coordinator.webhooks.delivery import Courier
from penstock.services.coordinator.webhooks.posting import open_http, post_event
from penstock.services.coordinator.webhooks.store import WebhookStore
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.webhooks import DEFAULT_TYPES, StoredWebhook
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

JOB, OTHER = "job_" + "1" * 32, "job_" + "2" * 32


@dataclass
class Receiver:
    """Server that stores requests, and answers each with ``status(count)``."""

    url: str = ""
    seen: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    status: Callable[[int], int] = lambda count: 204

    @property
    def messages(self) -> list[str]:
        return [json.loads(body)["data"]["message"] for _, body in self.seen]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(length := int(self.headers["Content-Length"]))
            if len(body) < length:  # its sender was killed meanwhile
                return
            found.seen.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(found.status(len(found.seen)))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://localhost:{server.server_address[1]}/hook?a=b"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


async def publish_event(bus: Bus, message: str, *, type: str = "phase", job: str = JOB) -> None:
    row = {"time": 1.5, "level": "info", "type": type, "message": message, "data": {"n": 1}}
    await bus.publish(subjects.events(job), msgspec.json.encode(row))


async def until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within 30 s"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def courier(bus: Bus, store: WebhookStore) -> Any:
    task = asyncio.create_task(Courier(bus, store, private=True).run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def created(
    store: WebhookStore, receiver: Receiver, types: list[str] | None = None, job: str | None = None
) -> StoredWebhook:
    return await store.create(receiver.url, types or list(DEFAULT_TYPES), job=job, description="")


async def test_a_delivery_is_a_signed_cloud_event(bus: Bus, receiver: Receiver) -> None:
    store = WebhookStore(bus, private=True)
    await publish_event(bus, "succeeded: before")
    hook = await created(store, receiver, ["rl.job.succeeded.v1", "rl.checkpoint.*"])
    async with courier(bus, store):
        await publish_event(bus, "running")
        await publish_event(bus, "succeeded: it is done")
        await publish_event(bus, "no phase", type="checkpoint")
        await publish_event(bus, "succeeded, as a word", type="step")
        await until(lambda: len(receiver.seen) == 2, "two deliveries")
    assert json.loads(receiver.seen[1][1])["type"] == "rl.checkpoint.created.v1"
    headers, body = receiver.seen[0]
    event = json.loads(body)
    assert (event["specversion"], event["type"], event["source"]) == ("1.0", "rl.job.succeeded.v1", f"/jobs/{JOB}")
    assert (event["time"], event["data"]["data"]) == ("1970-01-01T00:00:01.500000+00:00", {"n": 1})
    assert headers["content-type"] == "application/cloudevents+json"
    assert headers["webhook-id"] == event["id"]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(hook.secret.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    assert headers["host"] == receiver.url.split("/")[2]


async def test_failures_are_tried_again_in_order(bus: Bus, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.01)
    store = WebhookStore(bus, private=True)
    hook = await created(store, receiver, ["rl.*"], JOB)
    receiver.status = lambda count: 503 if count < 4 else 200
    async with courier(bus, store):
        for number in range(3):
            await publish_event(bus, f"e{number}", type="step")
            await publish_event(bus, "of another job", job=OTHER)
        await until(lambda: len(receiver.seen) >= 6, "every delivery")
    assert receiver.messages == ["e0", "e0", "e0", "e0", "e1", "e2"]
    assert len({headers["webhook-id"] for headers, _ in receiver.seen}) == 3
    state = await store.state(hook.id)
    assert state.delivered >= 2


async def test_a_failing_receiver_is_disabled_and_can_be_enabled_again(
    bus: Bus, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.01)
    store = WebhookStore(bus, private=True)
    hook = await created(store, receiver, ["rl.*"])
    receiver.status = lambda count: 410

    async def enabled(wanted: bool) -> None:
        async with asyncio.timeout(30):
            while (await store.find(hook.id)).enabled is not wanted:
                await asyncio.sleep(0.01)

    async with courier(bus, store):
        await publish_event(bus, "e0", type="step")
        await enabled(False)
        assert "410" in (await store.find(hook.id)).disabled_reason
        await publish_event(bus, "e1", type="step")
        receiver.status = lambda count: 200
        await store.change(hook.id, {"enabled": True})
        await until(lambda: len(receiver.seen) == 3, "what waited")
        assert receiver.messages == ["e0", "e0", "e1"]
        assert (await store.find(hook.id)).disabled_reason == ""

        monkeypatch.setattr(delivery, "GIVE_UP_AFTER", delivery.timedelta(0))
        receiver.status = lambda count: 500
        await publish_event(bus, "e2", type="step")
        await enabled(False)
        assert "was not accepted" in (await store.find(hook.id)).disabled_reason
        assert (await store.state(hook.id)).attempts == 1
        await store.delete(hook.id)


async def test_private_addresses_get_nothing_by_default(bus: Bus, receiver: Receiver) -> None:
    store = WebhookStore(bus, private=True)
    hook = await created(store, receiver, ["rl.*"])
    strict = WebhookStore(bus, private=False)
    assert "private address" in await strict.test(hook.id)
    assert receiver.seen == []
    assert await store.test(hook.id) == ""
    assert json.loads(receiver.seen[0][1])["type"] == "rl.webhook.test.v1"


async def test_international_host_names_are_encoded(
    bus: Bus, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, name = socket.getaddrinfo, "xn--exmple-cua.example"

    def resolve(host: Any, *args: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == name else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = WebhookStore(bus, private=True)
    receiver.url = receiver.url.replace("localhost", "exämple.example")
    hook = await created(store, receiver)
    assert await store.test(hook.id) == ""
    assert receiver.seen[0][0]["host"].partition(":")[0] == name
    unreadable = hook.model_copy(update={"url": "http://xn--ä.example"})
    async with open_http() as http:
        with pytest.raises(Unavailable, match="did not answer"):
            await post_event(http, unreadable, trial_event(hook.id), private=True)


async def test_the_same_key_is_the_same_webhook(bus: Bus, receiver: Receiver) -> None:
    store = WebhookStore(bus, private=True)

    async def create(key: str) -> StoredWebhook:
        return await store.create(receiver.url, ["rl.*"], job=None, description="", key=key)

    first = await create("caller\nk1")
    await publish_event(bus, "running")
    place = await store.state(first.id)
    assert await create("caller\nk1") == first
    assert await store.state(first.id) == place
    other = await create("caller\nk2")
    assert [hook.id for hook in await store.list_all()] == [first.id, other.id]


@pytest.mark.slow
@pytest.mark.long
async def test_a_killed_coordinator_loses_no_delivery(
    nats_server: NatsServer, bus: Bus, receiver: Receiver, tmp_path: Path
) -> None:
    store = WebhookStore(bus, private=True)
    await created(store, receiver, ["rl.*"])
    environment = os.environ | {
        "PENSTOCK_NATS_URL": nats_server.url, "PENSTOCK_DATA_DIR": str(tmp_path), "PENSTOCK_HTTP_PORT": "0",
        "PENSTOCK_WEBHOOK_PRIVATE": "true", "PENSTOCK_LEASE_S": "1", "PENSTOCK_WORKER_ID": "coordinator-0",
        "PENSTOCK_STREAM_BYTES": str(16 << 20), "PENSTOCK_EXPERIENCE_BYTES": str(64 << 20),
    }  # fmt: skip
    total = 100

    async def start() -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "penstock.services.coordinator")
        return await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)

    process = await start()
    try:
        for number in range(total):
            await publish_event(bus, f"e{number}", type="step")
        await until(lambda: len(receiver.seen) >= 5, "5 deliveries")
        process.send_signal(signal.SIGKILL)
        await process.wait()
        assert len(receiver.seen) < total, "it was killed before its end"
        process = await start()
        await until(lambda: f"e{total - 1}" in receiver.messages, "the last delivery")
    finally:
        process.kill()
        await process.wait()
    first_times = list(dict.fromkeys(receiver.messages))
    assert first_times == [f"e{number}" for number in range(total)]
    repeats = len(receiver.seen) - total
    assert repeats <= 1, "only deliveries in progress at the death of the coordinator are repeated"
