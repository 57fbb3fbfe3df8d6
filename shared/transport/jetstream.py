"""Requests to JetStream's JSON API: retried until a deadline, with errors converted to Penstock's exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from penstock.shared.errors import DiskFull, NotFound, Unavailable
from penstock.shared.transport.connection import Connection

__all__ = [
    "CONFLICTS",
    "ApiError",
    "Code",
    "call",
    "create_consumer",
    "drop_consumer",
    "ended_well",
    "is_disk_full",
    "raise_error",
    "retry_until",
]

ATTEMPT_S = 2.0
"""Timeout of one attempt (seconds); after a fail-over the server may have lost the request."""
PAUSE_S = 0.05


class Code:
    """Error codes of nats-server (server/errors.json) that are handled specially."""

    INSUFFICIENT_RESOURCES = 10023
    STORAGE_RESOURCES = 10047
    STORE_BUSY = 10049  # a stream of that name is still being deleted
    MESSAGE_DELETE_FAILED = 10057
    NO_PEERS = 10005  # fewer nodes are up than the stream's replicas
    NO_QUORUM = 10008  # the cluster has no leader
    NO_CLUSTER = 10074
    STREAM_EXISTS = 10058
    STREAM_NOT_FOUND = 10059
    MESSAGE_NOT_FOUND = 10037
    SEQUENCE_NOT_FOUND = 10043
    CONSUMER_NOT_FOUND = 10014
    WRONG_LAST_SEQUENCE = 10071
    WRONG_LAST_SEQUENCE_CONSTANT = 10164
    STORE_FAILED = 10077
    ATOMIC_DISABLED = 10174
    BATCH_DUPLICATE = 10201
    RESTORE_EXISTS = 10130


NO_SPACE = ("no space left on device", "disk quota exceeded")
"""Messages of operating systems for a full disk, at the end of the server's error description."""
CONFLICTS = frozenset({Code.WRONG_LAST_SEQUENCE, Code.WRONG_LAST_SEQUENCE_CONSTANT})


class ApiError(Unavailable):
    """JetStream rejected a request; ``code`` is its error code."""

    def __init__(self, message: str, code: int = 0, status: int = 0) -> None:
        super().__init__(message, code, status)
        self.code = code
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


def is_disk_full(error: Mapping[str, Any]) -> bool:
    """Return True if an ``error`` object of the API says that the disk of the server is full."""
    return str(error.get("description", "")).endswith(NO_SPACE)


def raise_error(error: Mapping[str, Any], what: str) -> NoReturn:
    """Raise the exception that corresponds to an ``error`` object of the API."""
    code = int(error.get("err_code", 0))
    if is_disk_full(error):
        raise DiskFull(f"{what}: the disk of NATS is full: {error.get('description')} ({code})")
    text = f"{what}: {error.get('description', 'no description')} ({code})"
    if code in (Code.STREAM_NOT_FOUND, Code.MESSAGE_NOT_FOUND, Code.CONSUMER_NOT_FOUND):
        raise NotFound(text)
    raise ApiError(text, code, int(error.get("code", 0)))


class retry_until:  # noqa: N801  reads as a phrase: `async for attempt in retry_until(...)`
    """Iterates over attempts until a deadline; each value is the time (seconds) that the attempt may take.

    Waits for the connection before each attempt. At the deadline it raises Unavailable with ``what`` and the reason
    last stored in ``why``.
    """

    def __init__(self, connection: Connection, deadline_s: float, what: str) -> None:
        self.why: Exception | str = "no answer"
        self.attempts = 0
        self._connection = connection
        self._deadline_s = deadline_s
        self._end = asyncio.get_running_loop().time() + deadline_s
        self._what = what

    def __aiter__(self) -> retry_until:
        return self

    async def __anext__(self) -> float:
        left = self._end - asyncio.get_running_loop().time()
        if self.attempts:
            await asyncio.sleep(min(PAUSE_S * self.attempts, 0.5, max(left, 0)))
            left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(f"{self._what} failed within {self._deadline_s:g} s: {self.why}")
        try:
            await self._connection.wait_connected(left)
        except Unavailable as error:
            raise Unavailable(f"{self._what} failed: {error}") from None
        self.attempts += 1
        return max(min(ATTEMPT_S, self._end - asyncio.get_running_loop().time()), 0.01)


async def call(
    connection: Connection, endpoint: str, body: Mapping[str, Any] | None = None, *, deadline_s: float, what: str
) -> dict[str, Any]:
    """Send a request to ``$JS.API.<endpoint>``, with retries. Only for idempotent requests.

    Raises:
        NotFound: the stream, message or consumer does not exist.
        ApiError: any other rejection.
        Unavailable: no answer until the deadline.
    """
    data = msgspec.json.encode(body) if body is not None else b""
    attempts = retry_until(connection, deadline_s, what)
    async for timeout_s in attempts:
        try:
            raw = await connection.request(f"$JS.API.{endpoint}", data, timeout_s=timeout_s)
        except Unavailable as error:
            attempts.why = error
            connection.doubt()
            continue
        answer: dict[str, Any] = msgspec.json.decode(raw.data)
        error_object = answer.get("error")
        if error_object is None:
            connection.trust()
            return answer
        if error_object.get("code") == 503 and error_object.get("err_code") not in (
            Code.STORAGE_RESOURCES,
            Code.INSUFFICIENT_RESOURCES,
        ):
            attempts.why = str(error_object.get("description"))  # JetStream is still starting, or has no leader
            connection.doubt()
            continue
        raise_error(error_object, what)
    raise AssertionError("retry_until ends by raising")


async def create_consumer(
    connection: Connection, stream: str, config: dict[str, Any], *, deadline_s: float
) -> dict[str, Any]:
    """Create or update the consumer ``config['name']``; return its info. Idempotent."""
    name = config["name"]
    subject = config.get("filter_subject", "")
    endpoint = f"CONSUMER.CREATE.{stream}.{name}" + (f".{subject}" if subject else "")
    body = {"stream_name": stream, "config": config, "action": ""}
    return await call(connection, endpoint, body, deadline_s=deadline_s, what=f"consumer '{name}' of {stream}")


def ended_well(status: str, description: str) -> bool:
    """Return True if a pull request ended normally: no message was available (404), it expired (408), or its maximum
    number of messages or bytes was reached (409).

    Any other status (deleted, moved, shut down, no responders) means that the consumer may not exist any more.
    """
    return status in ("404", "408") or (status == "409" and description.startswith(("Batch Completed", "Message Size")))


async def drop_consumer(connection: Connection, stream: str, name: str) -> None:
    """Delete a consumer without waiting for the reply. If the request is lost, the server deletes the idle ephemeral
    consumer itself."""
    if connection.connected:
        await connection.send(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", b"")
