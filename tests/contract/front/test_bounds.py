"""Bounds on one client: its connections, heads, bodies, concurrent requests and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import Client
from penstock.services.coordinator.api.feeds import PER_TURN, Feeds
from penstock.services.coordinator.api.http.documents import MAX_VALUES, count_values, items_of
from penstock.services.coordinator.api.http.sse import END, RETRY
from penstock.services.coordinator.jobs.events import JobEvents
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.problems import HttpProblem
from penstock.services.coordinator.services import Services
from penstock.services.coordinator.webserver import KEEP_ALIVE_S, MAX_PIPELINED, _Bounds, server_of
from penstock.shared.config.service import ServiceSettings
from penstock.shared.runtime.tasks import end_tasks

LONG_S = 20
ROOT = {"authorization": "Bearer root"}


def test_a_connection_without_requests_is_closed_by_the_client() -> None:
    """If the server closed an idle connection first, a request already on its way would be lost."""
    assert server_of(answering, ServiceSettings(http_port=0)).config.timeout_keep_alive == KEEP_ALIVE_S
    for client in (httpx.Client(), Client("http://127.0.0.1:1")._http):
        expiry = client._transport._pool._keepalive_expiry  # type: ignore[attr-defined]
        assert 0 < 2 * expiry <= KEEP_ALIVE_S


@contextlib.asynccontextmanager
async def serving(deployment: Any, **more: Any) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Run the application in the server that coordinators use; yield a client and the port."""
    async with (
        deployment.listening(**more) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as client,
    ):
        yield client, port


async def answer_to(port: int, *pieces: bytes, wait_s: float = 0.0) -> bytes:
    """Send ``pieces`` one by one; return all that the server sends before it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(wait_s)
        async with asyncio.timeout(LONG_S):
            answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def head(path: str = "/healthz", *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


async def test_a_head_is_bounded_before_it_is_read(deployment: Any) -> None:
    async with serving(deployment) as (client, port):
        long = "x-long: " + "a" * (65 << 10)
        many = [f"x-{number}: a" for number in range(300)]
        for sent in (head("/healthz", long), head("/healthz", *many), head("/" + "a" * (65 << 10))):
            answer = await answer_to(port, sent)
            assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
            assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_long"
        fits = await client.get("/healthz", headers={"x-long": "a" * (60 << 10)})
        assert fits.status_code == 200


async def test_trailers_are_bounded_like_a_head(deployment: Any) -> None:
    async with serving(deployment) as (_, port):
        begun = head("/v1/jobs", "transfer-encoding: chunked", "content-type: application/json", method="POST")
        answer = await answer_to(port, begun + b"2\r\n{}\r\n0\r\nx-long: " + b"a" * (140 << 10))
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 422 ")), answer[:100]


@pytest.mark.long
async def test_slow_heads_bodies_and_silence_end(deployment: Any) -> None:
    async with serving(deployment, http_head_s=0.3, http_body_s=0.3) as (client, port):
        assert await answer_to(port) == b""
        assert (await answer_to(port, b"GET / HT", b"TP/1.1\r\nx", wait_s=0.1)).startswith(b"HTTP/1.1 408 ")
        body = head("/v1/jobs", "content-length: 9", "content-type: application/json", method="POST")
        assert (await answer_to(port, body + b"{", b" ", wait_s=0.1)).startswith(b"HTTP/1.1 408 ")
        assert (await client.get("/healthz")).status_code == 200


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Answer as an ASGI application: with one large piece, after small pieces for ``/slow``."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/slow":
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
            await asyncio.sleep(0.1)
    await send({"type": "http.response.body", "body": bytes(16 << 20)})


@pytest.mark.long
async def test_a_slow_reader_gets_its_answer_and_a_stopped_one_is_dropped(
    monkeypatch: pytest.MonkeyPatch, listen: Callable[..., Any]
) -> None:
    monkeypatch.setattr("penstock.services.coordinator.webserver.WRITE_S", 0.8)
    async with listen(answering, ServiceSettings(http_port=0)) as port:

        async def read(first_s: float, pause_s: float) -> int:
            """Read an answer with a pause before the first byte and after each MiB; return the number of bytes."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(head("/", "connection: close"))
            await asyncio.sleep(first_s)
            found = 0
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 20):
                    before, found = found, found + len(data)
                    await asyncio.sleep(pause_s if before >> 20 != found >> 20 else 0)
            writer.close()
            return found

        slow, silent = await asyncio.gather(read(0.0, 0.15), read(2.5, 0.0))
        assert slow > 16 << 20 > silent


async def test_an_answer_is_not_cut_by_the_head_behind_it(listen: Callable[..., Any]) -> None:
    """Some clients send an empty line after a body, or the next request before the answer arrived."""
    async with listen(answering, ServiceSettings(http_port=0, http_head_s=0.3)) as port:
        answer = await answer_to(port, head("/slow", "connection: close"), b"\r\n", wait_s=0.1)
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:100]
        assert answer.count(b"piece") == 10


async def test_requests_that_wait_are_answered_before_a_connection_ends(deployment: Any) -> None:
    """The server answers the requests that may wait, then closes; the client repeats the others."""
    async with serving(deployment) as (_, port):
        answer = await answer_to(port, head("/healthz") * 40)
        assert answer.count(b"HTTP/1.1 200 ") == 1 + MAX_PIPELINED
        assert answer.count(b"connection: close") == 1


async def test_a_target_that_is_no_url_is_answered(deployment: Any) -> None:
    async with serving(deployment) as (_, port):
        for line in (b"GET http://x:99999/ HTTP/1.1", b"CONNECT x:443 HTTP/1.1"):
            answer = await answer_to(port, line + b"\r\nHost: a\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 "), answer[:100]


async def test_connections_of_one_address_are_bounded(deployment: Any) -> None:
    async with serving(deployment, http_connections_per_address=3) as (_, port), contextlib.AsyncExitStack() as stack:
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
        for writer in writers:
            stack.callback(writer.close)
        refused = await answer_to(port, head())
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
        writers[0].close()
        async with asyncio.timeout(LONG_S):
            while not (await answer_to(port, head("/healthz", "connection: close"))).startswith(b"HTTP/1.1 200 "):
                await asyncio.sleep(0.05)


async def test_a_trusted_proxy_may_open_all_connections(deployment: Any) -> None:
    bounds = {"http_connections_per_address": 1, "http_connections": 16, "forwarded_allow_ips": "127.0.0.1"}
    async with serving(deployment, **bounds) as (_, port), contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            stack.callback((await asyncio.open_connection("127.0.0.1", port))[1].close)
        assert (await answer_to(port, head())).startswith(b"HTTP/1.1 503 ")


async def test_requests_of_one_key_at_once_are_bounded(connect: Any, job: Any) -> None:
    async with connect(api_keys="root,other", key_concurrency=2) as client:
        id = (await client.post("/v1/jobs", json=job, headers=ROOT)).json()["id"]
        path, held = f"/v1/jobs/{id}", {"params": {"wait": 30}, "headers": ROOT}

        async def poll() -> None:
            while (await client.get(path, **held)).status_code == 429:  # it met a check of the number of streams
                await asyncio.sleep(0.01)

        polls = [asyncio.create_task(poll()) for _ in range(2)]
        async with asyncio.timeout(LONG_S):
            while (reply := await client.get(path, headers=ROOT)).status_code == 200:
                await asyncio.sleep(0.02)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_at_once")
        assert reply.headers["retry-after"] == "1"
        assert (await client.get(path, headers={"authorization": "Bearer other"})).status_code == 200
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        async with asyncio.timeout(LONG_S):
            while (await client.get(path, headers=ROOT)).status_code != 200:
                await asyncio.sleep(0.02)


async def test_the_document_is_written_once(connect: Any) -> None:
    async with connect(api_keys="root") as client:
        first = await client.get("/openapi.json")
        again = await client.get("/openapi.json", headers={"if-none-match": first.headers["etag"]})
        assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
        assert first.json()["openapi"].startswith("3.")


async def test_people_read_the_document_as_a_page_without_a_key(connect: Any) -> None:
    async with connect(api_keys="root") as client:
        page = await client.get("/docs")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "<script" not in page.text
        assert "://" not in page.text, "it loads nothing from elsewhere"
        paths = (await client.get("/openapi.json")).json()["paths"]
        listed = re.findall(r"<summary><code>(\w+) ([^<]+)</code> [^<]", page.text)
        assert listed == [(method.upper(), path) for path, methods in paths.items() for method in methods]
        assert len(listed) > 50
        assert "<td><code>limit</code></td><td>query</td>" in page.text
        assert "JobConfig or" in page.text
        again = await client.get("/docs", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.long
async def test_many_polls_of_a_job_share_its_reads(
    connect: Any, deployment: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect() as client:
        id, reads, get = (await client.post("/v1/jobs", json=job)).json()["id"], 0, JobStore.get

        async def counted(store: JobStore, name: str) -> Any:
            nonlocal reads
            reads += 1
            return await get(store, name)

        monkeypatch.setattr(JobStore, "get", counted)
        polls = [asyncio.create_task(client.get(f"/v1/jobs/{id}", params={"wait": 30})) for _ in range(40)]
        async with asyncio.timeout(LONG_S):
            while reads < 45:  # 40 first reads, and a few shared ones after all polls wait
                await asyncio.sleep(0.05)
        began, before = time.monotonic(), reads
        await asyncio.sleep(1.0)
        assert reads - before <= 4 * (time.monotonic() - began) + 2
        deployment.advance(id, "succeeded")
        replies = await asyncio.gather(*polls)
        assert {reply.json()["status"]["phase"] for reply in replies} == {"succeeded"}


async def test_many_readers_of_events_share_a_follower(
    deployment: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers, follow = 0, JobEvents.follow

    def counted(events: JobEvents, name: str, *, after: int) -> Any:
        nonlocal followers
        followers += 1
        return follow(events, name, after=after)

    monkeypatch.setattr(JobEvents, "follow", counted)
    async with serving(deployment) as (client, _):
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        deployment.emit(id, "phase", "pending")
        begun = set[int]()

        async def read(number: int) -> list[str]:
            found = []
            headers = {"accept": "text/event-stream"} | ({"last-event-id": str(number % 3)} if number % 3 else {})
            async with client.stream("GET", f"/v1/jobs/{id}/events", headers=headers) as reply:
                async for line in reply.aiter_lines():
                    begun.add(number)
                    found += [line] if line.startswith(("id: ", "event: end")) else []
            return found

        deployment.emit(id, "step", "one")
        readers = [asyncio.create_task(read(number)) for number in range(30)]
        async with asyncio.timeout(LONG_S):
            while len(begun) < 30:
                await asyncio.sleep(0.01)
        for number in range(5):
            deployment.emit(id, "step", str(number))
            await asyncio.sleep(0.02)
        deployment.advance(id, "succeeded")
        found = await asyncio.gather(*readers)
    assert followers == 1
    for number, lines in enumerate(found):
        assert lines == [*(f"id: {seq}" for seq in range(number % 3 + 1, 9)), "event: end"]


async def test_readers_that_left_leave_nothing_behind(deployment: Any, services: Services, job: Any) -> None:
    """Clients come and go while a job has no events."""
    id = deployment.submit(job)
    deployment.emit(id, "phase", "pending")
    feeds = Feeds(services.jobs, services.events, asyncio.Event())
    newest = await services.events.newest(id)

    async def read() -> list[bytes]:
        stream = feeds.events(id, after=newest, encode=lambda job, seq, row: row["message"].encode())
        return [await anext(stream), await anext(stream)]

    stays = asyncio.create_task(read())
    for _ in range(20):
        goes = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        goes.cancel()
        await asyncio.gather(goes, return_exceptions=True)
    followed = feeds._followed[id]
    assert (followed.readers, len(followed._waiting)) == (1, 1)
    deployment.emit(id, "step", "one")
    assert await stays == [RETRY, b"one"]
    await feeds.close()


class Crowd:
    """Many readers of one job's events; counts the encoded events, and the most sent in one turn of the loop."""

    def __init__(self, feeds: Feeds, job: str, *, after: int) -> None:
        self.feeds, self.job, self.after = feeds, job, after
        self.encoded, self.sent, self.busiest = list[int](), 0, 0

    async def read(self, number: int) -> list[bytes]:
        counting = asyncio.create_task(self._count())
        try:
            return await asyncio.gather(*(self._one() for _ in range(number)))
        finally:
            await end_tasks([counting])

    async def _one(self) -> bytes:
        found = b""
        async for some in self.feeds.events(self.job, after=self.after, encode=self._encode):
            if some not in (RETRY, END):
                self.sent += 1
                found += some
        return found

    def _encode(self, job: str, seq: int, row: dict[str, Any]) -> bytes:
        self.encoded.append(seq)
        return b"x"

    async def _count(self) -> None:
        while True:
            before = self.sent
            await asyncio.sleep(0)
            self.busiest = max(self.busiest, self.sent - before)


async def test_readers_that_are_behind_share_what_is_encoded_and_take_turns(
    deployment: Any, services: Services, job: Any
) -> None:
    id = deployment.submit(job)
    deployment.emit(id, "phase", "pending")
    for place in range(200):
        deployment.emit(id, "step", str(place))
    deployment.advance(id, "succeeded")
    feeds = Feeds(services.jobs, services.events, asyncio.Event())
    crowd = Crowd(feeds, id, after=0)
    found = await crowd.read(200)
    await feeds.close()
    assert set(found) == {b"x" * 202}
    assert crowd.encoded == list(range(1, 203)), "each once, however many read it"
    assert crowd.busiest <= 2 * PER_TURN, "those that had waited for their turn, and those that had not"


async def test_readers_that_wait_share_what_is_encoded_and_take_turns(
    deployment: Any, services: Services, job: Any
) -> None:
    id = deployment.submit(job)
    deployment.emit(id, "phase", "pending")
    feeds = Feeds(services.jobs, services.events, asyncio.Event())
    crowd = Crowd(feeds, id, after=await services.events.newest(id))
    reading = asyncio.create_task(crowd.read(200))
    async with asyncio.timeout(LONG_S):
        while id not in feeds._followed or len(feeds._followed[id]._waiting) < 200:
            await asyncio.sleep(0.01)
    deployment.emit(id, "step", "one")
    deployment.advance(id, "succeeded")
    found = await reading
    await feeds.close()
    assert set(found) == {b"xx"}
    assert crowd.encoded == [2, 3]
    assert crowd.busiest <= 2 * PER_TURN


@pytest.mark.long
async def test_a_connection_that_is_gone_is_not_written_to(
    deployment: Any, job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers left, and an event comes before the server has handled the ends of all their connections."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(_Bounds, "later", lambda self, loop, end: waiting.append(end))
    id = deployment.submit(job)
    deployment.emit(id, "phase", "pending")
    path = f"/v1/jobs/{id}/events"
    async with serving(deployment) as (client, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n".encode())
        await reader.readuntil(b"id: 1")
        writer.transport.abort()
        async with asyncio.timeout(LONG_S):
            while not waiting:
                await asyncio.sleep(0.01)
        async with client.stream("GET", path, headers={"accept": "text/event-stream"}) as stays:
            lines = stays.aiter_lines()
            for number in range(2, 20):
                deployment.emit(id, "step", "one")
                while await anext(lines) != f"id: {number}":
                    pass
        while waiting:
            waiting.pop()()
    assert [record.message for record in caplog.records if "socket.send" in record.message] == []


async def test_a_wait_returns_no_older_revision_than_it_began_with(
    deployment: Any, services: Services, job: Any
) -> None:
    """Another client read the job just before the change, and the wait shares that read."""
    id = deployment.submit(job)
    deployment.emit(id, "phase", "pending")
    feeds = Feeds(services.jobs, services.events, asyncio.Event())
    old = await feeds.once(("job", id), 30.0, lambda: services.jobs.get(id))
    deployment.advance(id, "running")
    new = await services.jobs.get(id)
    assert new.revision > old.revision
    assert (await feeds.until(new, lambda record: False, 0.01)).revision == new.revision
    await feeds.close()


# -- bodies ----------------------------------------------------------------------------------------------------------


def values_of(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + sum(map(values_of, data.values()))
    return 1 + sum(map(values_of, data)) if isinstance(data, list) else 1


TEXTS = st.text(alphabet=st.sampled_from('ab,[]{}"\\:\n\u20ac'))
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


@settings(deadline=None, max_examples=50)
@given(DOCUMENTS, st.integers(1, 7), st.booleans())
def test_values_are_counted_before_they_are_parsed(data: Any, size: int, ascii: bool) -> None:
    body = json.dumps([data] * 3, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.services.coordinator.api.http.documents.CHUNK_BYTES", size)
        patch.setattr("penstock.services.coordinator.api.http.documents.MAX_VALUES", 0)
        count = count_values(body)
        assert [json.loads(text) for text in items_of(body, 3)] == [data] * 3
    assert values_of([data] * 3) <= count <= 2 * values_of([data] * 3)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[1}", 200), (b"[1", 400), (b"[1]]", 400), (b"[[1]", 400), (b"{}", 422), (b"[1,2,3]", 413), (b"[1]x", 400)],
)
def test_invalid_arrays(body: bytes, status: int) -> None:
    """``[1}`` is cut into texts of which one is no valid JSON; their parser must refuse it."""
    found = 200
    try:
        items_of(body, 2)
    except HttpProblem as problem:
        found = problem.status
    assert found == status


async def test_bodies_with_too_many_values_hold_nothing_up(connect: Any) -> None:
    many = b"[" + b"{}," * ((8 << 20) // 3 - 20) + b"{}]"
    async with connect() as client:
        worst, done = 0.0, asyncio.Event()

        async def probe() -> None:
            nonlocal worst
            while not done.is_set():
                began = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - began)

        probing = asyncio.create_task(probe())
        headers = {"content-type": "application/json"}
        chat = b'{"model":"m","messages":' + many[: -(1 << 10)].rpartition(b",")[0] + b"]}"
        posts = [client.post("/v1/chat/completions", content=chat, headers=headers) for _ in range(3)]
        replies = await asyncio.gather(*posts)
        done.set()
        await probing
        assert {(reply.status_code, reply.json()["error"]["code"]) for reply in replies} == {(422, "too_complex")}
        assert worst < 0.5, "parsing such a body takes 1.5 s"
        listed = b'{"name": [' + b"1," * MAX_VALUES + b"1]}"
        reply = await client.post("/v1/jobs", content=listed, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "too_complex")
