"""Both Python clients against a real server: typed answers, errors, retries with one effect, resumption."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml

from penstock.client import AsyncClient, Client
from penstock.client.answers import authorities
from penstock.client.calls import Call
from penstock.client.patience import Attempts
from penstock.services.coordinator.submission import Submissions
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError, Conflict, DeadlineError, NotFound, Unavailable


@pytest.fixture
def client(served: Any) -> Iterator[Client]:
    with Client(served.url) as found:
        yield found


def test_submit_from_a_file_a_mapping_and_a_config(client: Client, job: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    records = [client.submit(source) for source in (file, job, JobConfig.parse(job))]
    assert {record.name for record in records} == {"addition"}
    assert [JobConfig.parse(record.spec) for record in records] == [JobConfig.parse(job)] * 3
    assert client.get(records[0].id) == records[0]
    assert client.dry_run(job)["batch"]["groups"] == 2


def test_one_key_submits_once(client: Client, deployment: Any, job: Any) -> None:
    assert client.submit(job, idempotency_key="k").id == client.submit(job, idempotency_key="k").id
    assert deployment.submitted == 1


def test_lists_are_paged_behind_the_scenes(client: Client, job: Any) -> None:
    ids = [client.submit({**job, "name": f"n{i % 2}"}).id for i in range(105)]
    assert [record.id for record in client.list(limit=1000)] == ids[::-1]
    assert [record.id for record in client.list(limit=101, order="asc")] == ids[:101]
    assert len(client.list(limit=1000, name="n1")) == 52


def test_find(client: Client, job: Any) -> None:
    old, new = client.submit(job), client.submit(job)
    other = client.submit({**job, "name": "beef"})
    assert client.find(old.id) == old
    assert client.find("addition") == new
    assert client.find("beef") == other
    assert client.find(old.id[:-1]) == old
    assert client.find(old.id.removeprefix("job_")[:-1]) == old
    with pytest.raises(Conflict, match="3 jobs start with"):
        client.find("job_0")
    for ref in ("nobody", "ffff", "job_ffff", "not a name!", ""):
        with pytest.raises(NotFound):
            client.find(ref)


@pytest.mark.long
def test_find_looks_past_the_first_page(client: Client, job: Any) -> None:
    first = client.submit(job)
    for _ in range(120):
        client.submit(job)
    assert client.find(first.id[:-1]) == first


@pytest.mark.long
def test_errors_have_types_and_say_what_to_do(client: Client, served: Any, deployment: Any, job: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.max_update: unknown key; did you mean 'max_updates'\?"):
        client.submit({**job, "train": {**job["train"], "max_update": 1}})
    with pytest.raises(ConfigError, match="no JSON form"):
        client.submit({**job, "seed": object()})
    with pytest.raises(NotFound):
        client.get("job_" + "0" * 32)
    record = client.submit(job)
    deployment.advance(record.id, "failed")
    with pytest.raises(Conflict, match="cannot become paused"):
        client.pause(record.id)
    deployment.server.kill()
    with Client(served.url, retries=0) as hasty, pytest.raises(Unavailable, match="not connected to NATS"):
        hasty.get(record.id)


def test_an_absent_server_is_named_quickly() -> None:
    began = time.monotonic()
    with Client("http://127.0.0.1:1") as client, pytest.raises(Unavailable, match="penstock up"):
        client.list()
    assert time.monotonic() - began < 20
    with pytest.raises(ConfigError, match="not a URL"):
        Client("127.0.0.1:8000")


def test_something_else_on_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:  # the test has ended
                    return
                with closing(peer):
                    peer.recv(1 << 16)
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")

        threading.Thread(target=speak, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ValueError, match="is it a Penstock API"):
            client.version()


class Lossy:
    """A proxy that forwards requests and loses the first ``losses`` answers."""

    def __init__(self, port: int, losses: int) -> None:
        self._target, self._losses = port, losses
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            with closing(peer), socket.create_connection(("127.0.0.1", self._target)) as target:
                request = peer.recv(1 << 20)
                while b"\r\n\r\n" not in request or not request.endswith(b"}"):
                    request += peer.recv(1 << 20)
                target.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                answer = b"".join(iter(lambda target=target: target.recv(1 << 16), b""))
                self.requests += 1
                if self.requests > self._losses:
                    peer.sendall(answer)

    def close(self) -> None:
        self._server.close()


def test_a_lost_answer_is_asked_for_again_with_one_effect(served: Any, deployment: Any, job: Any) -> None:
    with closing(Lossy(served.port, losses=2)) as proxy, Client(proxy.url) as client:
        record = client.submit(job)
    assert proxy.requests == 3
    assert deployment.submitted == 1
    assert list(deployment.jobs) == [record.id]


@pytest.mark.long
def test_wait(client: Client, served: Any, deployment: Any, job: Any) -> None:
    record = client.submit(job)
    with pytest.raises(DeadlineError, match=r"pending after 0\.3 s, not terminal"):
        client.wait(record.id, timeout_s=0.3)
    threading.Timer(0.2, deployment.advance, (record.id, "running")).start()
    assert client.wait(record.id, goal="running", timeout_s=10).status.phase == "running"

    def fail_over() -> None:
        time.sleep(0.3)
        served.stop()
        time.sleep(0.5)
        served.start()
        deployment.advance(record.id, "succeeded")

    thread = threading.Thread(target=fail_over)
    thread.start()
    assert client.wait(record.id, timeout_s=20).status.phase == "succeeded"
    thread.join()


@pytest.mark.long
def test_events_resume_across_a_restart_of_the_server(client: Client, served: Any, deployment: Any, job: Any) -> None:
    record = client.submit(job)
    deployment.emit(record.id, "phase", "pending")

    def live() -> None:
        for i in range(100):
            deployment.emit(record.id, "step", str(i))
            time.sleep(0.01)
            if i in (30, 60):
                served.stop()
                served.start()
        deployment.advance(record.id, "succeeded")

    thread = threading.Thread(target=live)
    thread.start()
    rows = list(client.events(record.id))
    thread.join()
    assert [row["id"] for row in rows] == list(range(1, 103))
    assert rows[-1]["message"] == "succeeded"
    assert [row["id"] for row in client.events(record.id, after=99, follow=False)] == [100, 101, 102]


def test_a_client_gives_up_after_its_patience(served: Any, job: Any) -> None:
    with Client(served.url, patience_s=0.3, retries=0) as client:
        record = client.submit(job)
        served.stop()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.wait(record.id)
        with pytest.raises(Unavailable):
            list(client.events(record.id))
        assert time.monotonic() - began < 20


@pytest.mark.long
def test_a_repetition_waits_for_its_first_attempt(
    served: Any, deployment: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many 409 replies the repetition gets, it waits; both attempts return the same job."""
    submit, begun, may_end = Submissions.submit, threading.Event(), threading.Event()
    answers: list[int] = []

    async def held(*given: Any, **named: Any) -> Any:
        begun.set()
        await asyncio.to_thread(may_end.wait, 60)
        return await submit(*given, **named)

    def on_answer(reply: httpx.Response) -> None:
        answers.append(reply.status_code)
        if len(answers) == 3:  # more than it has retries
            may_end.set()

    monkeypatch.setattr(Submissions, "submit", held)
    call = Call("POST", "/v1/jobs", dict, body=orjson.dumps(job), key="same")
    with (
        Client(served.url, retries=1) as first,
        Client(served.url, retries=1) as again,
        ThreadPoolExecutor(2) as threads,
    ):
        again._http.event_hooks["response"].append(on_answer)
        one = threads.submit(first._send, call)
        assert begun.wait(60)
        other = threads.submit(again._send, call)
        assert one.result(60)["id"] == other.result(60)["id"]
    assert answers[:3] == [409, 409, 409]
    assert deployment.submitted == 1


def test_the_wait_for_a_first_attempt_has_an_end() -> None:
    in_flight = httpx.Response(409, headers={"Retry-After": "1", "x-should-retry": "true"})
    assert Attempts(1, patience_s=60).pause_s(in_flight) == 1
    assert Attempts(1, patience_s=0).pause_s(in_flight) is None
    conflict = httpx.Response(409, headers={"x-should-retry": "false"})
    assert Attempts(1, patience_s=60).pause_s(conflict) is None


def test_views(client: Client, deployment: Any, job: Any) -> None:
    record = client.submit(job)
    deployment.measure(record.id)
    deployment.beat(record.id)
    deployment.explain(record.id)
    deployment.train(record.id)
    deployment.write_log(record.id)
    deployment.repeat()
    assert client.metrics(record.id, names="loss")["series"] == {"loss": [5.0, 4.0, 3.0, 2.0, 1.0]}
    assert client.workers(record.id)[0]["worker"] == "rollout-0"
    assert "spans" not in client.workers(record.id)[0]
    assert [span["kind"] for span in client.workers(record.id, history=True)[0]["spans"]] == ["busy"]
    assert len(client.samples(record.id, limit=5, env="addition")) == 5
    with pytest.raises(NotFound, match="they are called addition"):
        client.samples(record.id, env="hard")
    assert client.why(record.id)[0]["age_s"] == 1.5
    assert client.audit(record.id)["ok"]
    assert client.logs(record.id, tail=1)["next"].startswith("trainer:")
    assert client.limits()["durability"] == "fsync"
    with pytest.raises(Conflict):
        list(client.replay(record.id))
    assert client.cancel(record.id).desired_state == "cancelled"
    deployment.advance(record.id, "cancelled")
    assert list(client.replay(record.id, from_batch=2))[-1]["ok"]


async def test_the_asynchronous_client_is_the_same(served: Any, deployment: Any, job: Any) -> None:
    async with AsyncClient(served.url) as client:
        record = await client.submit(job)
        assert await client.find("addition") == record
        assert (await client.pause(record.id)).desired_state == "paused"
        assert (await client.resume(record.id)).desired_state == "running"
        with pytest.raises(DeadlineError):
            await client.wait(record.id, timeout_s=0.1)
        waiting = asyncio.create_task(client.wait(record.id))
        deployment.repeat()
        deployment.emit(record.id, "step", "one")
        deployment.advance(record.id, "succeeded")
        assert (await waiting).status.phase == "succeeded"
        assert [row["id"] async for row in client.events(record.id)] == [1, 2, 3, 4]
        assert [row["id"] async for row in client.events(record.id, follow=False, after=3)] == [4]
        assert [row async for row in client.replay(record.id)][-1]["ok"]
        with pytest.raises(NotFound):
            await client.why("job_" + "0" * 32)


def test_keys(serve: Any, monkeypatch: Any) -> None:
    server = serve(api_keys="secret")
    with Client(server.url) as client, pytest.raises(ConfigError, match="PENSTOCK_API_KEY"):
        client.list()
    with Client(server.url, api_key="secret") as client:
        assert client.list() == []
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    with Client(server.url) as client:
        assert client.list() == []


def test_no_authority_is_trusted_where_none_is_needed() -> None:
    """For plain HTTP the client skips the load of authorities (20 ms); over TLS it trusts those of the machine."""
    assert authorities("https://penstock.example") is True
    none = authorities("http://127.0.0.1:8000")
    assert isinstance(none, ssl.SSLContext)
    assert (none.verify_mode, none.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert none.cert_store_stats()["x509_ca"] == 0
