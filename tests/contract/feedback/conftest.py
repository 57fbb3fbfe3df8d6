"""The real application over a real bus, with online jobs and no leader: tests check how the API handles feedback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.feedback import service as service_module
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import build_services
from penstock.services.coordinator.serving import Gateway
from penstock.services.coordinator.webserver import KEEP_ALIVE_S
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import (
    EPISODE_HEADER,
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    StatusBatch,
    new_marked_id,
)
from penstock.shared.transport.bus import Bus, Outgoing

DEADLINE_S = 30.0
METRICS = {
    "accepted": {"type": "boolean"},
    "score": {"type": "float", "clip": [0.0, 1.0]},
    "solved": {"type": "boolean", "level": "episode"},
}


def online_job(name: str = "policy") -> dict[str, Any]:
    return {
        "kind": "online_rl",
        "name": name,
        "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
        "online": {"metrics": METRICS},
    }


class LiveDeployment:
    """A coordinator's HTTP application, and the parts behind it that tests inspect."""

    def __init__(
        self, bus: Bus, client: httpx.AsyncClient, service: FeedbackService, store: JobStore, job: str
    ) -> None:
        self.bus, self.client, self.service, self.store, self.job = bus, client, service, store, job

    def new_id(self) -> str:
        """Return a new id of an interaction or episode of the job, as the gateway creates it."""
        return new_marked_id(self.job)

    async def post(self, body: Any, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post("/v1/feedback", json=body, headers=names)

    async def accept(self, **body: Any) -> dict[str, Any]:
        """Post feedback, which the API must accept; return the body of the reply."""
        reply = await self.post({"inference_id": self.new_id(), "metric_name": "accepted", "value": True, **body})
        assert reply.status_code == 202, reply.text
        return dict(reply.json())

    async def status_of(self, feedback: str) -> dict[str, Any]:
        reply = await self.client.get(f"/v1/feedback/{feedback}")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def until(self, ask: Callable[[], Any], what: str) -> Any:
        """Await ``ask()`` until its result is true; return the result. ``what`` names it if the wait fails."""
        end = time.monotonic() + DEADLINE_S
        while not (found := await ask()):
            assert time.monotonic() < end, f"no {what} within {DEADLINE_S:g} s"
            await asyncio.sleep(0.01)
        return found

    async def stored(self) -> list[list[Feedback]]:
        """Return the items of each message in FEEDBACK."""
        messages = await self.bus.read(subjects.FEEDBACK, "feedback.*")
        whole = await self.bus.get_whole(subjects.FEEDBACK, [message.seq for message in messages])
        return [unpack(whole[m.seq].data, FeedbackBatch)[0].items for m in messages]

    async def items(self) -> list[Feedback]:
        return [item for batch in await self.stored() for item in batch]

    async def decide(self, *statuses: FeedbackStatus) -> None:
        """Publish the statuses of items, as the leader would."""
        await self.bus.publish(subjects.decisions(self.job), pack(StatusBatch(items=list(statuses)), job=self.job))

    async def record(self, user: str = "", text: str = "an answer", id: str = "", **more: Any) -> Interaction:
        """Record an interaction, as a rollout worker would; ``more`` sets other fields of it."""
        now = time.time()
        found = Interaction(
            id=id or self.new_id(), request="r", index=0, job=self.job, key_id="local",
            user=self.service.pseudonyms.of(user), split="train", untrainable="", prompt_ids=[1, 2], token_ids=[3, 4],
            logprobs=[-0.5, -0.25], spans=[Span(3, 0, 2)], sampling=Sampling(max_new_tokens=8), finish="stop",
            template="t", body_digest="d", text=text, started=now, first_token=now,
            **{"episode": self.new_id(), "ended": now, **more},
        )  # fmt: skip
        subject = subjects.interaction(self.job, found.id)
        headers = {EPISODE_HEADER: found.episode}
        await self.bus.publish_whole([Outgoing(subject, pack(found, job=self.job), headers, found.id)])
        return found


Open = Callable[..., contextlib.AbstractAsyncContextManager[LiveDeployment]]


@pytest.fixture(autouse=True)
def _no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let deletions wait for no leader: none runs, because tests write the ledgers by hand."""
    monkeypatch.setattr(service_module, "RELEASED_S", 0.0)


@pytest.fixture
def open_live(bus: Bus, tmp_path: Path) -> Open:
    """Return a function that runs a deployment; all of them share one bus. Keyword arguments are settings."""

    @contextlib.asynccontextmanager
    async def build(data_dir: Path | None = None, **more: Any) -> AsyncIterator[LiveDeployment]:
        settings = ServiceSettings(data_dir=data_dir or tmp_path, rate_limit="1000000/minute", **more)
        store = JobStore(bus)
        service = FeedbackService(bus, store, settings.data_dir)
        services = build_services(bus, store, Members(), {}, settings)
        gateway = Gateway(bus, "api-0", pseudonym=service.pseudonyms.of, consent_of=service.consents.of)
        app = create_app(services, feedback_service=service, serving=gateway)
        running = asyncio.gather(service.run(), service.finish_deletions(), gateway.run())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        jobs = (await store.index()).all() or [await store.create(parse_job(online_job()))]
        await service.pseudonyms.load()
        await asyncio.wait_for(service.index._caught_up.wait(), DEADLINE_S)
        try:
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
            async with app.router.lifespan_context(app), client:
                yield LiveDeployment(bus, client, service, store, jobs[0].id)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return build


@pytest.fixture
async def live(open_live: Open) -> AsyncIterator[LiveDeployment]:
    """Run one deployment with one online job."""
    async with open_live() as opened:
        yield opened


@pytest.fixture
async def url(live: Any) -> Any:
    """Serve the application of ``live`` on a port of its own; yield the URL."""
    server = uvicorn.Server(
        uvicorn.Config(
            live.client._transport.app, port=0, log_level="error", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S
        )
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving
