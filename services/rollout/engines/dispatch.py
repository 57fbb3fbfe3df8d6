"""The waiting room before an engine in other processes: what waits, what decodes there, and who may go in.

Requests wait here until there is a slot, as in the embedded engine, so that pausing, ending and counting them is the
same; what the engine has in hand is what decodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from penstock.services.rollout.engines.base import Listener
from penstock.services.rollout.engines.completion import Completion, Finish, finished
from penstock.services.rollout.engines.remote import Written
from penstock.services.rollout.engines.requests import Requests
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.generation import GenRequest, GenResult, PauseMode, Token
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["Dispatch"]

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Written)


class Dispatch(Generic[S]):
    """Hands completions over, up to ``max_running`` at once, in order of arrival.

    Args:
        name: of the engine, for messages.
        begin: the stream of a completion.
        decode: has the engine decode it, books its tokens, and returns how it ended. ConfigError and WeightsError are
            of this request; any other error ends the engine.
        end: has the engine end streams, which are ``unwanted``, and returns once they are over.
    """

    def __init__(
        self,
        name: str,
        max_running: int,
        *,
        begin: Callable[[Completion], S],
        decode: Callable[[S], Awaitable[Finish]],
        end: Callable[[Sequence[S]], Awaitable[None]],
    ) -> None:
        self._name, self._max_running = name, max_running
        self._begin, self._decode, self._end = begin, decode, end
        self._requests = Requests()
        self._streams: dict[Completion, S] = {}
        self._changed = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self.failure: str | None = "not started"
        self.paused: PauseMode | None = None
        self.is_updating, self.is_asleep, self.is_dirty = False, False, False
        self.generated_tokens = 0

    @property
    def running(self) -> int:
        """Sequences that the engine has in hand."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._requests.waiting

    def start(self) -> None:
        """Let completions in."""
        self.failure = None
        self._driver = asyncio.create_task(self._drive(), name=f"{self._name}-engine")
        self._driver.add_done_callback(self._driver_ended)

    async def close(self) -> None:
        """Let nobody in, and drop what is decoded. Requests fail once ``fail`` is called. Safe to repeat."""
        self.failure = self.failure or "closed"
        if self._driver is not None:
            await end_tasks([self._driver])

    def fail(self) -> None:
        """Fail every request with ``Unavailable``."""
        self._requests.fail(self.unavailable)

    def unavailable(self) -> Unavailable:
        """Why nothing is served."""
        return Unavailable(f"{self._name} cannot serve: {self.failure}")

    def check_ready(self) -> None:
        """Raise Unavailable or WeightsError where no request is taken."""
        if self.failure is not None:
            raise self.unavailable()
        if self.is_asleep:
            raise Unavailable("the engine sleeps; wake it first")
        if self.is_dirty:
            raise WeightsError("the engine is dirty after a failed update; it serves again after a full update")

    def notice(self) -> None:
        """Something changed: look whether there is work."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that changes with what happens here."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def complete(
        self,
        request: GenRequest,
        stop_ids: tuple[int, ...],
        on_token: Listener | None,
        on_start: Callable[[], None] | None,
    ) -> GenResult:
        """See ``Engine.generate``. Cancelling it ends what is decoded."""
        serial, answer = self._requests.open(request, stop_ids, on_token, on_start)
        self._changed.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self._requests.forget(serial)
            await self._end_streams({serial})
            raise

    def tell(self, completion: Completion, tokens: Iterable[Token]) -> None:
        """Pass new tokens to those who listen."""
        if completion.streamed:
            self._requests.tell((completion.request, token) for token in tokens)

    async def abort(self, request_ids: Collection[str] | None) -> int:
        """End requests with what they have; see ``Engine.abort``."""
        chosen = self._requests.chosen(request_ids)
        await self.end(chosen)
        return len(chosen)

    async def end_started(self) -> None:
        """End requests that had a completion in the engine's hands."""
        await self.end(self._requests.started())

    async def drained(self) -> None:
        """Wait until what was started is over, or another pause is asked for."""
        await self.until(lambda: self.paused != "drain" or not self._requests.started())

    async def end(self, requests: Collection[int]) -> None:
        """End requests as 'abort', waiting and running completions alike."""
        self._requests.unqueue(requests)
        await self._end_streams(requests)
        self._changed.set()

    async def _end_streams(self, requests: Collection[int]) -> None:
        ending = [stream for stream in self._streams.values() if stream.completion.request in requests]
        for stream in ending:
            stream.unwanted = True
        if ending:
            await self._end(ending)

    def lives(self, stream: S) -> bool:
        """True while the engine has it in hand."""
        return stream.completion in self._streams

    async def _drive(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self.until(self._can_admit)
                room = self._max_running - self.running
                for completion in self._requests.take(room, only_started=self.paused == "drain"):
                    stream = self._streams[completion] = self._begin(completion)
                    group.create_task(self._follow(stream))

    def _can_admit(self) -> bool:
        if self.is_dirty or self.is_asleep or self.is_updating or self.paused in ("abort", "keep"):
            return False
        if self.running >= self._max_running:
            return False
        return self._requests.waits_started() if self.paused == "drain" else bool(self._requests.waiting)

    async def _follow(self, stream: S) -> None:
        """Have the engine decode one completion, and book what comes of it."""
        completion = stream.completion
        try:
            finish = await self._decode(stream)
        except (ConfigError, WeightsError) as error:
            self._requests.refuse(completion.request, error)
            return
        finally:
            del self._streams[completion]
            self._changed.set()
        self._requests.finish([finished(completion, stream.token_ids, stream.logprobs, finish)])

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            self.failure = f"decoding failed: {_first(error)!r}"
            logger.error("%s failed", self._name, exc_info=error)
        self.fail()
        self._changed.set()


def _first(error: BaseException) -> BaseException:
    """The error that ended a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
