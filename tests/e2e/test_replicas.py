"""Two coordinators: both serve all clients and one leads; if it dies, the other one takes over within seconds."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from penstock.client import Client
from penstock.local.ports import free_ports
from penstock.services.coordinator.leader.leader_rpc import COORDINATOR
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import BatchTrained
from penstock.shared.protocol.live.interaction import FeedbackBatch, Interaction
from penstock.shared.runtime.lease import LeaseRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

API_KEY = "e2e-key"
KEY = {"authorization": f"Bearer {API_KEY}"}
LEASE_S = ServiceSettings.model_fields["lease_s"].default
MOVED_S = 5.0
"""Limit for a change of the leader: length of the lease, one poll of it, and delays of a busy machine."""
PACED = {"scorers": [{"type": "function", "path": "e2e_scorers:paced"}], "processes": 1}
LIVE = {
    "kind": "online_rl",
    "name": "live",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {"metrics": {"liked": {"type": "boolean"}}, "max_wait_s": 1},
}


def lease_holder(stack: Any) -> str:
    """Return the holder of the lease from its record, without asking a coordinator."""
    entry = stack.on_bus(lambda bus: bus.kv(subjects.LEASES).get(COORDINATOR))
    return msgspec.json.decode(entry.value, type=LeaseRecord).holder


def leader(url: str) -> str:
    """Return the holder of the lease that the coordinator at ``url`` reports."""
    reply = httpx.get(f"{url}/readyz", timeout=10).json()
    return str(reply["checks"]["leader"]["detail"]).partition(" ")[0]


class Replica:
    """Second coordinator, started by hand with the lease that a deployment has by default."""

    def __init__(self, process: Any, url: str) -> None:
        self.process, self.url = process, url
        self.client = Client(url, api_key=API_KEY, retries=10)

    def leader(self) -> str:
        """Return the holder of the lease that this coordinator reports."""
        return leader(self.url)

    def kill(self) -> None:
        """Kill the process by SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def replica(stack: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """Second coordinator beside that of the stack."""
    port = free_ports(1)[0]
    monkeypatch.setitem(stack.environment, "PENSTOCK_HTTP_PORT", str(port))
    monkeypatch.setitem(stack.environment, "PENSTOCK_LEASE_S", str(LEASE_S))
    with stack.attached("penstock.services.coordinator", "coordinator-b") as process:
        made = Replica(process, f"http://127.0.0.1:{port}")
        yield made
        made.client.close()


def trained(stack: Any, job: str) -> list[BatchTrained]:
    """Return the trained batches from the ledger, without asking a coordinator."""
    return [event for event in stack.ledger(job) if isinstance(event, BatchTrained)]


def hang_up_while_submitting(url: str, body: bytes, name: str) -> None:
    """Send a submission, and disconnect without waiting for the reply."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {API_KEY}\r\nIdempotency-Key: {name}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)


@pytest.mark.long
def test_a_client_that_hangs_up_leaves_no_orphan(stack: Any, replica: Replica, make_job: Any) -> None:
    """If a submission created a job, the same submission to the other coordinator gives that job, else a new one."""
    urls = [stack.stack.url, replica.url]
    body = json.dumps(make_job("train.max_updates=1000", metadata={"test": "hung-up"})).encode()
    names = [f"hung-up-{number}" for number in range(4)]
    for number, name in enumerate(names):
        hang_up_while_submitting(urls[number % 2], body, name)

    def submit(number: int, name: str) -> httpx.Response:
        headers = {**KEY, "content-type": "application/json", "idempotency-key": name}
        return httpx.post(f"{urls[1 - number % 2]}/v1/jobs", content=body, headers=headers, timeout=30)

    jobs = [submit(number, name).json()["id"] for number, name in enumerate(names)]
    found = [record.id for record in stack.client.list() if record.spec.get("metadata") == {"test": "hung-up"}]
    assert sorted(found) == sorted(jobs)
    assert len(set(jobs)) == len(names)
    for job in jobs:
        stack.client.cancel(job, force=True)
    for job in jobs:
        stack.finish(job)


def follow(urls: list[str], job: str, connections: int) -> list[int]:
    """Return the ids of events: one from each of the connections, which go to the coordinators in turn."""
    seen: list[int] = []
    for _, url in zip(range(connections), itertools.cycle(urls), strict=False):
        headers = {**KEY, "accept": "text/event-stream", "last-event-id": str(seen[-1] if seen else 0)}
        with httpx.stream("GET", f"{url}/v1/jobs/{job}/events", headers=headers, timeout=60) as reply:
            seen.append(next(int(line[4:]) for line in reply.iter_lines() if line.startswith("id: ")))
    return seen


@pytest.mark.long
def test_the_lease_moves_and_the_job_goes_on(stack: Any, replica: Replica, make_job: Any, capsys: Any) -> None:
    changes = ("train.max_updates=100000", "checkpoint.every=1")
    job = replica.client.submit(make_job(*changes, reward=PACED)).id
    seen = follow([stack.stack.url, replica.url], job, connections=14)
    stored = stack.on_bus(lambda bus: bus.read(subjects.EVENTS, subjects.events(job), headers_only=True))
    assert seen == [message.seq for message in stored][:14], "thirteen reconnects: none is lost, none comes twice"
    waits = [stack.client.why(job), replica.client.why(job)]
    assert not any("a coordinator to lead" in row["waiting_for"] for rows in waits for row in rows), waits
    replica.client.pause(job)
    stack.until(lambda: stack.status(job).phase == "paused", "the pause that the follower was asked for")
    stack.client.resume(job)

    began = time.monotonic()
    with stack.frozen("coordinator-0"):
        stack.until(lambda: lease_holder(stack) == "coordinator-b", "the lease with the follower", 30)
        stalled_s = time.monotonic() - began
        stack.until(lambda: replica.leader() == "coordinator-b", "a follower that says that it leads")
    step = stack.reach(job, trained(stack, job)[-1].number + 2)
    epoch = trained(stack, job)[-1].writer_epoch

    began = time.monotonic()
    replica.kill()
    stack.until(lambda: lease_holder(stack) == "coordinator-0", "the lease with the other one", 30)
    killed_s = time.monotonic() - began
    assert leader(stack.stack.url) == "coordinator-0"
    stack.until(lambda: trained(stack, job)[-1].writer_epoch > epoch, "updates that nobody asked for", 30)
    updated_s = time.monotonic() - began
    with capsys.disabled():
        summary = f"lease of {LEASE_S:g} s: moved {stalled_s:.1f} s after a stall, {killed_s:.1f} s after SIGKILL"
        print(f"\n{summary}; an update after {updated_s:.1f} s")
    assert max(stalled_s, killed_s) <= MOVED_S, "from the signal to the lease record of the next one"
    total = stack.reach(job, step + 2) + 15
    stack.client.amend(job, {"train": {"max_updates": total}})
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", total)
    assert record.status.attempt >= 3, "led by one, by the other, and by the one again"
    stack.check_audit(job)
    assert [event.number for event in trained(stack, job)] == list(range(1, total + 1)), "each update once"


class Agent(threading.Thread):
    """Client that asks and posts feedback at two coordinators in turn, and retries failed requests at the other one."""

    def __init__(self, urls: list[str], stop: threading.Event) -> None:
        super().__init__()
        self.urls, self.stop = itertools.cycle(urls), stop
        self.answers: list[str] = []
        self.accepted: list[str] = []

    def run(self) -> None:
        with httpx.Client(timeout=20, headers=KEY) as http:
            while not self.stop.is_set():
                question = {"role": "user", "content": f"1+{len(self.answers)}"}
                body = {"model": "live", "messages": [question], "user": self.name}
                answer = self.send(http, "/v1/chat/completions", body)
                self.answers.append(answer["id"].removeprefix("chatcmpl-"))
                verdict = {"feedback_id": str(uuid.uuid4()), "inference_id": answer["id"], "metric_name": "liked"}
                self.accepted.append(self.send(http, "/v1/feedback", {**verdict, "value": True})["feedback_id"])

    def send(self, http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for tries in range(200):
            try:
                reply = http.post(next(self.urls) + path, json=body, headers={"x-stainless-retry-count": str(tries)})
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            if reply.is_success:
                return dict(reply.json())
            assert reply.status_code in (429, 503), reply.text
            time.sleep(0.1)
        raise AssertionError(f"no answer to {path}")


@pytest.mark.long
def test_live_requests_and_feedback_outlive_either_coordinator(stack: Any, replica: Replica, make_job: Any) -> None:
    spec = {**make_job(), **LIVE}
    spec = {name: section for name, section in spec.items() if name not in ("data", "reward")}
    job = stack.client.submit(spec).id
    stack.until(lambda: stack.status(job).phase == "running", "the job runs")
    stop = threading.Event()
    agents = [Agent([stack.stack.url, replica.url], stop) for _ in range(4)]
    for agent in agents:
        agent.start()
    stack.until(lambda: all(len(agent.accepted) >= 10 for agent in agents), "some traffic")
    stack.kill("coordinator-0")
    reached = [len(agent.accepted) + 10 for agent in agents]
    stack.until(lambda: all(len(a.accepted) >= n for a, n in zip(agents, reached, strict=True)), "more of it")
    replica.kill()
    reached = [len(agent.accepted) + 5 for agent in agents]
    stack.until(lambda: all(len(a.accepted) >= n for a, n in zip(agents, reached, strict=True)), "still more")
    stop.set()
    for agent in agents:
        agent.join(60)
    accepted = [id for agent in agents for id in agent.accepted]
    answers = [id for agent in agents for id in agent.answers]

    async def stored(bus: Any) -> tuple[Counter[str], list[Interaction]]:
        batches = await bus.read(subjects.FEEDBACK, subjects.feedback(job))
        items = [item for message in batches for item in unpack(message.data, FeedbackBatch)[0].items]
        records = await bus.read(subjects.INTERACTIONS, subjects.interactions(job))
        return Counter(item.id for item in items), [unpack(record.data, Interaction)[0] for record in records]

    counts, records = stack.on_bus(stored)
    assert {id: counts[id] for id in accepted} == dict.fromkeys(accepted, 1), "each 202 is there, once"
    asked = Counter((record.user, record.body_digest) for record in records if record.finish != "client_disconnected")
    assert max(asked.values()) == 1, "a request that was repeated is one interaction"
    assert {record.id for record in records} >= set(answers)
    assert all(stack.client.feedback_status(agent.accepted[-1]).job == job for agent in agents)
    stack.client.cancel(job)
    stack.finish(job)
    stack.check_audit(job)
