"""Idempotency-Key: a repeated POST has one effect and one reply (IETF draft-ietf-httpapi-idempotency-key-header).

The first request with a key claims the key: the middleware stores that the request is running, and later its reply.
Claims and replies are stored in this process, and also in Redis, which shares them with other replicas and keeps them
across restarts. Without Redis they are valid only in this process.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import redis.asyncio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.services.coordinator.api.http.volatile import Volatile
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.errors import Unavailable

__all__ = ["Idempotency", "ReplyStore", "StoredReply", "token_of"]

KEEP_S = 24 * 3600
"""Seconds for which a reply is stored, to answer repeated requests."""
CLAIM_S = 60
"""Seconds after which a claim without a reply expires, since the process that claimed the key may have died."""
MAX_ENTRIES, MAX_BYTES = 4096, 64 << 20
"""Maximum number and total bytes of the entries in this process. Above either limit, the API key that uses most of them
loses its oldest entry."""
MAX_REPLY_BYTES = 256 << 10
"""Replies longer than this (bytes) are not stored; a retry then runs the request again."""
LARGE_PATHS = frozenset({"/v1/files"})
"""Paths whose bodies are too long to buffer before the route authorizes the caller. Their routes detect repetitions."""


class StoredReply(msgspec.Struct, frozen=True, array_like=True):
    """A stored reply; ``status`` is 0 while the request runs. ``fingerprint``: SHA-256 of the query and body sent."""

    fingerprint: bytes
    status: int = 0
    headers: list[tuple[str, str]] = []
    body: bytes = b""


class ReplyStore:
    """Stores claims and replies by idempotency key, in the memory of this process and in Redis. Without Redis, a
    process finds only its own."""

    def __init__(self, volatile: Volatile) -> None:
        self._volatile = volatile
        self._entries: dict[str, OrderedDict[str, tuple[float, StoredReply]]] = {}
        """Entries by owner (id of an API key). If there are too many entries, the owner that uses most of the limits
        loses its oldest entry."""
        self._nbytes: Counter[str] = Counter()
        self._count = 0

    async def claim(self, key: str, fingerprint: bytes, *, owner: str) -> StoredReply | None:
        """Claim ``key`` for a new request; return None on success, or the entry of an earlier request."""
        known = self._recall(key, owner)
        if known is not None:
            return known
        mine = StoredReply(fingerprint)
        self._remember(key, mine, CLAIM_S, owner)
        found = await self._claim_shared(key, msgspec.msgpack.encode(mine))
        if found is None:
            return None
        reply = msgspec.msgpack.decode(found, type=StoredReply)
        if reply.status:
            self._remember(key, reply, KEEP_S, owner)
        else:  # another process runs the request and will store its reply in Redis, not here
            self._drop(key, owner)
        return reply

    async def finish(self, key: str, reply: StoredReply, *, owner: str) -> None:
        """Store the reply of a claimed request."""
        self._remember(key, reply, KEEP_S, owner)
        data = msgspec.msgpack.encode(reply)
        await self._quietly(lambda r: r.set(_name(key), data, ex=KEEP_S))

    async def release(self, key: str, *, owner: str) -> None:
        """Release the claim of a failed request, so that the client can retry the request."""
        self._drop(key, owner)
        await self._quietly(lambda r: r.delete(_name(key)))

    def _recall(self, key: str, owner: str) -> StoredReply | None:
        entry = self._entries[owner].get(key) if owner in self._entries else None
        if entry is None:
            return None
        expires, reply = entry
        if expires < time.monotonic():
            self._drop(key, owner)
            return None
        return reply

    def _remember(self, key: str, reply: StoredReply, keep_s: float, owner: str) -> None:
        self._drop(key, owner)
        self._entries.setdefault(owner, OrderedDict())[key] = (time.monotonic() + keep_s, reply)
        self._nbytes[owner] += _size(reply)
        self._count += 1
        while self._count > MAX_ENTRIES or self._nbytes.total() > MAX_BYTES:
            most = max(
                self._entries, key=lambda name: len(self._entries[name]) / MAX_ENTRIES + self._nbytes[name] / MAX_BYTES
            )
            self._drop(next(iter(self._entries[most])), most)

    def _drop(self, key: str, owner: str) -> None:
        entries = self._entries.get(owner, OrderedDict())
        entry = entries.pop(key, None)
        if entry is None:
            return
        self._count -= 1
        self._nbytes[owner] -= _size(entry[1])
        if not entries:
            del self._entries[owner], self._nbytes[owner]

    async def _claim_shared(self, key: str, data: bytes) -> bytes | None:
        async def work(client: redis.asyncio.Redis) -> bytes | None:
            if await client.set(_name(key), data, nx=True, ex=CLAIM_S):
                return None
            found: bytes | None = await client.get(_name(key))
            return found

        try:
            return await self._volatile.call(work)
        except Unavailable:
            return None

    async def _quietly(self, work: Callable[[redis.asyncio.Redis], Awaitable[object]]) -> None:
        try:
            await self._volatile.call(work)
        except Unavailable:
            return


class Idempotency:
    """ASGI middleware that answers a repeated POST from the store instead of running it again."""

    def __init__(self, app: ASGIApp, store: ReplyStore) -> None:
        self.app = app
        self.store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        header = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if header is None or scope["method"] != "POST" or scope["path"] in LARGE_PATHS:
            await self.app(scope, receive, send)
            return
        token = token_of(header)
        body = await _read(receive)
        caller = scope.get("state", {}).get("caller")
        sender = caller.sender if caller is not None else ""
        key = "\n".join((sender, scope["path"], token))
        digest = hashlib.sha256(scope["query_string"] + b"\n" + body).digest()
        owner = caller.id if caller is not None else ""
        earlier = await self.store.claim(key, digest, owner=owner)
        if earlier is not None:
            await _answer_again(earlier, digest)(scope, receive, send)
            return
        await self._run(key, digest, owner, partial(self.app, scope, _replayed(body, receive)), send)

    async def _run(
        self, key: str, digest: bytes, owner: str, answer: Callable[[Send], Awaitable[None]], send: Send
    ) -> None:  # fmt: skip
        recorder = _Recorder(send)
        kept = False
        try:
            await answer(recorder)
            reply = recorder.reply(digest)
            if reply is not None:
                await self.store.finish(key, reply, owner=owner)
                kept = True
        finally:
            if not kept:
                await self.store.release(key, owner=owner)


class _Recorder:
    """ASGI ``send`` that passes a reply on and keeps a copy of a short one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._body = bytearray()
        self._complete = False
        self._streamed = False
        self._secret = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            names = ("content-type", "location", "etag")
            headers = Headers(raw=message["headers"])
            self._headers = [(k, v) for k, v in headers.items() if k in names]
            self._secret = headers.get("cache-control") == "no-store"
        elif message["type"] == "http.response.body":
            more = message.get("more_body", False)
            self._streamed = self._streamed or more
            if not self._streamed:
                self._body += message.get("body", b"")
            self._complete = not more
        await self._send(message)

    def reply(self, fingerprint: bytes) -> StoredReply | None:
        """Return the reply to store; None for 429 and 5xx, streams, secrets (``no-store``) and long replies."""
        if not self._complete or self._streamed or self._secret:
            return None
        if self._status == 429 or self._status >= 500 or len(self._body) > MAX_REPLY_BYTES:
            return None
        return StoredReply(fingerprint, self._status, self._headers, bytes(self._body))


def _answer_again(earlier: StoredReply, digest: bytes) -> Response:
    if earlier.fingerprint != digest:
        raise HttpProblem(
            422, "idempotency_key_reused", "this Idempotency-Key was used with another request; use a new key"
        )
    if not earlier.status:
        raise HttpProblem(
            409,
            "idempotency_in_flight",
            "the first request with this Idempotency-Key is still running; ask again in a moment",
            headers={"Retry-After": "1", "x-should-retry": "true"},
        )
    response = Response(earlier.body, earlier.status)
    headers = MutableHeaders(raw=response.raw_headers)
    for name, value in earlier.headers:
        headers[name] = value
    headers["Idempotent-Replayed"] = "true"
    return response


def token_of(header: str) -> str:
    """Return the key in an Idempotency-Key header, quoted (as the draft requires) or bare. Raises HttpProblem: 400."""
    token = header[1:-1] if len(header) >= 2 and header[0] == header[-1] == '"' else header
    if not token or len(token) > 255 or not token.isascii() or not token.isprintable():
        raise HttpProblem(400, "bad_idempotency_key", "Idempotency-Key must be 1 to 255 printable ASCII characters")
    return token


def _size(reply: StoredReply) -> int:
    return len(reply.body) + 256  # headers and overhead


def _name(key: str) -> str:
    return "penstock:idem:" + hashlib.sha256(key.encode()).hexdigest()


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise HttpProblem(400, "disconnected", "the client went away while sending the body")
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
