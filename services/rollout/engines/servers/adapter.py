"""Base class of adapters for engines that are HTTP servers: their common handling of requests, pauses and failures.

Only the final event of a completion says which weights generated which token. A streamed token therefore gets the label
of the weights that are served when it arrives, and the completion fails if its final event says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from penstock.services.rollout.engines.adapter import EngineAdapter, ModelFiles
from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.remote import CALL_S
from penstock.services.rollout.engines.servers.client import EngineServer
from penstock.services.rollout.engines.servers.stream import ServerStream, name_of
from penstock.shared.config.rollout import SglangConfig, VllmServerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import DeadlineError, PenstockError, Unavailable
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["ServerAdapter"]

SETTLE_S = 0.02
"""Seconds without a new token after which a paused server is assumed to have sent all its tokens."""
STALL_S = 300.0
"""Seconds without a new token after which a server that is decoding is assumed to hang."""
_AGAIN_S = 0.5
"""Seconds after which an abort is repeated: servers ignore an abort that arrives before its request."""

S = TypeVar("S", bound=ServerStream)
C = TypeVar("C", bound=SglangConfig | VllmServerConfig)


class ServerAdapter(EngineAdapter[S, C]):
    """Implements ``EngineAdapter`` for an HTTP server, which subclasses open as ``self._server``."""

    generate_path: ClassVar[str]
    """Route that decodes a completion as a stream of events."""
    stream_type: type[S]

    _server: EngineServer | None = None
    _heard = 0.0
    """Monotonic time of the last event from the server, in seconds."""

    def __init__(self, model: ModelFiles, config: C, settings: ServiceSettings, **options: Any) -> None:
        super().__init__(model, config, settings, **options)
        self._name = secrets.token_hex(4)
        """Random prefix of the request ids of this engine, so that they are unique if the server has other clients."""

    @abstractmethod
    def _body(self, stream: S) -> Mapping[str, Any]:
        """Return the body of the request that decodes a completion as a stream of events."""

    @abstractmethod
    async def _ask_to_end(self, streams: Sequence[S]) -> None:
        """Ask the server to end the completions of ``streams``, of which there is at least one."""

    @abstractmethod
    async def _pause(self, *, clear_cache: bool) -> None:
        """Pause the server for ``_stand_still``. Tokens that the server sampled before the pause may still arrive."""

    @abstractmethod
    async def _echo(self) -> None:
        """Send a request that the server answers after it has paused and sent the tokens it had sampled."""

    # -- life --------------------------------------------------------------------------------------------------------

    def _gone(self) -> str | None:
        if self._server is None or self._server.is_gone:
            return "its process is gone"
        silent_s = time.monotonic() - self._heard
        if self.running and not self._halted and silent_s > STALL_S:
            return f"it decodes and has told no token for {silent_s:.0f} s"
        return None

    # -- requests ----------------------------------------------------------------------------------------------------

    def _begin(self, completion: Completion) -> S:
        self._heard = time.monotonic()
        rid = name_of(self._name, completion)
        return self.stream_type(completion, self._detokenize, rid=rid, label=self._label)

    async def _decode(self, stream: S) -> Finish:
        """Read a completion to its end, or until ``_end`` closes its connection."""
        stream.reading = asyncio.create_task(self._read(stream))
        try:
            await asyncio.wait([stream.reading])
        finally:
            await end_tasks([stream.reading])
        return "abort" if stream.reading.cancelled() else stream.reading.result()

    async def _read(self, stream: S) -> Finish:
        """Read a completion up to the server's final event, which reports the weight label of each token."""
        assert self._server is not None
        events = self._server.events(self.generate_path, self._body(stream))
        ended: Finish | None = None
        async with contextlib.aclosing(events):
            async for part in events:
                self._heard = time.monotonic()
                if ended is None:
                    before = len(stream.token_ids)
                    tokens, ended = stream.take(part, self._label)
                    self._dispatch.generated_tokens += len(stream.token_ids) - before
                    self._dispatch.deliver(stream.completion, tokens)
                spans = stream.final(part)
                if spans is not None:
                    stream.settle(spans)
                    return ended or "abort"
                if ended is not None:  # it ended with a stop string, which the server does not know
                    await self._ask_to_end([stream])
        raise Unavailable(f"{self.title} did not say how a completion ended")

    async def _end(self, streams: Sequence[S]) -> None:
        """Abort streams repeatedly until they have ended, because a request may reach the server after its abort.

        Close the connection of one that has no token after its first abort: SGLang forgets an abort of a request that
        arrived in a pause, and ignores any further one. Servers end a request whose connection is closed.
        """
        end, aborted = time.monotonic() + CALL_S, False
        while left := [stream for stream in streams if self._dispatch.lives(stream)]:
            if self._dispatch.failure is not None:
                return
            if time.monotonic() > end:
                raise DeadlineError(f"{self.title} did not end {len(left)} completions within {CALL_S:g} s")
            await self._ask_to_end(left)
            for stream in left:
                if aborted and not stream.token_ids and stream.reading is not None:
                    stream.reading.cancel()
            aborted = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._dispatch.until(lambda: not any(map(self._dispatch.lives, streams)))

    async def _stand_still(self, *, clear_cache: bool) -> None:
        """Pause the server and wait until it has stopped and its last tokens have arrived.

        Raises:
            DeadlineError: tokens still arrive after ``CALL_S``.
        """
        await self._pause(clear_cache=clear_cache)
        before, end = -1, time.monotonic() + CALL_S
        while before != self.generated_tokens:
            if time.monotonic() > end:
                raise DeadlineError(f"{self.title} still sends tokens {CALL_S:g} s after it was paused")
            before = self.generated_tokens
            await self._echo()
            if self.running:
                await asyncio.sleep(SETTLE_S)

    async def _move_on(self) -> None:
        await self._go()
        self._heard = time.monotonic()

    @abstractmethod
    async def _go(self) -> None:
        """Undo ``_pause``."""

    # -- the server --------------------------------------------------------------------------------------------------

    async def _post(
        self, path: str, body: Mapping[str, Any], what: str, kind: type[PenstockError] = Unavailable
    ) -> dict[str, Any]:
        return await self._running_server().post(path, body, what, kind)

    def _running_server(self) -> EngineServer:
        if self._server is None:
            raise self._dispatch.unavailable()
        return self._server
