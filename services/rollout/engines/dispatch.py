"""Scheduler for an engine that runs in other processes: queues requests, tracks running ones, and admits new ones.

Requests wait here until a slot is free, as in the embedded engine, so that pausing, aborting and counting them works
the same way. The external engine only receives the completions that it decodes.
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
from penstock.shared.protocol.generation import GenRequest, GenResult, PauseMode, Sample, Token
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["Dispatch"]

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Written)


class Dispatch(Generic[S]):
    """Passes completions to the engine in order of arrival, at most ``max_running`` at once.

    Args:
        name: name of the engine, for messages.
        begin: creates the stream of a completion.
        decode: decodes the completion of a stream, records its tokens, and returns how it ended. ConfigError and
            WeightsError fail only its request; any other error stops the engine.
        end: makes the engine end these streams, which are marked ``unwanted``, and returns once they have ended.
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
        """Number of sequences that the engine is decoding."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return self._requests.waiting

    def start(self) -> None:
        """Start the task that admits completions."""
        self.failure = None
        self._driver = asyncio.create_task(self._drive(), name=f"{self._name}-engine")
        self._driver.add_done_callback(self._driver_ended)

    async def close(self) -> None:
        """Stop admitting and cancel the running completions. Requests stay open until ``fail``. Safe to repeat."""
        self.failure = self.failure or "closed"
        if self._driver is not None:
            await end_tasks([self._driver])

    def fail(self) -> None:
        """Fail every request with ``Unavailable``."""
        self._requests.fail(self.unavailable)

    def unavailable(self) -> Unavailable:
        """Return the error for requests, with the reason why the engine cannot serve."""
        return Unavailable(f"{self._name} cannot serve: {self.failure}")

    def check_ready(self) -> None:
        """Raise Unavailable if the engine has failed or is asleep, WeightsError if its weights are dirty."""
        if self.failure is not None:
            raise self.unavailable()
        if self.is_asleep:
            raise Unavailable("the engine sleeps; wake it first")
        if self.is_dirty:
            raise WeightsError("the engine is dirty after a failed update; it serves again after a full update")

    def notice(self) -> None:
        """Wake every task that waits in ``until``; call it after a change of state."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true; the condition is checked again after each change of state."""
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
        """Queue a request and wait for its result; see ``Engine.generate``. Cancelling ends its streams."""
        serial, answer = self._requests.open(request, stop_ids, on_token, on_start)
        self._changed.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self._requests.forget(serial)
            await self._end_streams({serial})
            raise

    def deliver(self, completion: Completion, tokens: Iterable[Token]) -> None:
        """Pass new tokens to the listener of the request, if it has one."""
        if completion.streamed:
            self._requests.deliver((completion.request, token) for token in tokens)

    async def abort(self, request_ids: Collection[str] | None) -> int:
        """End requests with their partial tokens; see ``Engine.abort``."""
        chosen = self._requests.chosen(request_ids)
        await self.end(chosen)
        return len(chosen)

    def written(self, request_ids: Collection[str]) -> dict[str, Sample]:
        """Return the tokens that running completions have generated so far; see ``Engine.written``."""
        chosen = self._requests.chosen(request_ids)
        samples = {}
        for completion, stream in self._streams.items():
            if completion.request in chosen and (sample := stream.so_far()) is not None:
                samples[self._requests.name_of(completion.request)] = sample
        return samples

    async def end_started(self) -> None:
        """End every open request of which at least one completion was passed to the engine."""
        await self.end(self._requests.started())

    async def drained(self) -> None:
        """Wait until all started requests have finished, or the pause mode is no longer 'drain'."""
        await self.until(lambda: self.paused != "drain" or not self._requests.started())

    async def end(self, requests: Collection[int]) -> None:
        """End requests as 'abort', both queued and running completions."""
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
        """Return True while the engine is decoding this stream."""
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
        """Decode one completion and record its result, or fail its request."""
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
    """Return the first error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
