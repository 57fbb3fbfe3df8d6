"""Request handlers. A server handles each request in its own task, up to a maximum number at once. A reply to a failed
request carries the class name of the error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.shared.errors import PenstockError, ProtocolError, Unavailable, class_named
from penstock.shared.protocol.permissions import inbox_of
from penstock.shared.transport.connection import Connection, Subscription
from penstock.shared.transport.inbox import Raw

__all__ = ["Server", "answer_of", "error_of", "error_reply"]

log = logging.getLogger(__name__)

ERROR_HEADER = "Penstock-Error"
"""Header of an error reply: the name of a class of shared/errors.py; the body is the message."""


INBOX = f"{inbox_of('')}."
"""Prefix of subjects to which replies may be sent."""


class Server:
    """Handler that serves a subject. Made by ``Bus.serve``; ends with ``close``."""

    def __init__(
        self, connection: Connection, subject: str, handler: Callable[[bytes], Awaitable[bytes]], max_concurrent: int
    ) -> None:
        self.subject = subject
        self._connection = connection
        self._handler = handler
        self._slots = asyncio.Semaphore(max_concurrent)
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None
        self.on_close: Callable[[Server], None] = lambda server: None

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, queue: str) -> None:
        """Start serving."""
        self._subscription = await self._connection.subscribe(self.subject, self._on_request, queue=queue)

    async def close(self, deadline_s: float = 5.0) -> None:
        """Accept no more requests; give running requests ``deadline_s`` to finish, then cancel them."""
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()
            self.on_close(self)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=deadline_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)

    async def _on_request(self, raw: Raw) -> None:
        await self._slots.acquire()
        task = asyncio.create_task(self._answer(raw), name=f"serve {self.subject}")
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        self._tasks.discard(task)

    async def _answer(self, raw: Raw) -> None:
        headers = None
        try:
            data = await self._handler(raw.data)
            if len(data) > self._connection.max_payload:
                raise ProtocolError(f"the answer on '{self.subject}' has {len(data)} bytes: too large")
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # this server ends; otherwise the handler cancelled itself
                raise
            name, data = error_reply(f"'{self.subject}'", error)
            headers = {ERROR_HEADER: name}
        if not raw.reply:
            return
        if not raw.reply.startswith(INBOX):  # or a client could make this process publish where it may not itself
            log.error(
                "a request on %s wants its answer on '%s', which is no inbox: not answered", self.subject, raw.reply
            )
            return
        try:
            await self._connection.send(raw.reply, data, headers=headers)
        except Unavailable as failure:
            log.warning("an answer on %s could not be sent: %s", self.subject, failure)


def error_reply(what: str, error: BaseException) -> tuple[str, bytes]:
    """Return ``(class name, message)``, by which a reply reports ``error`` to the requester.

    ``what`` names the subject or socket whose handler raised ``error``.
    """
    if isinstance(error, PenstockError):
        return type(error).__name__, str(error).encode()
    log.error("handler of %s failed", what, exc_info=error)
    return "PenstockError", f"{what} failed inside: {error!r}".encode()


def error_of(name: str, message: bytes) -> PenstockError:
    """Convert the class name and message from ``error_reply`` back to an exception."""
    return class_named(name)(message.decode("utf-8", "replace"))


def answer_of(reply: Raw) -> bytes:
    """Return the body of a server's reply; for an error reply, raise the PenstockError that the reply names."""
    name = reply.headers.get(ERROR_HEADER) if reply.headers else None
    if name is None:
        return reply.data
    raise error_of(name, reply.data)
