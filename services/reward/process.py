"""Handle of the reward service for one scorer process: start, submit, wait with a limit, kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque

from penstock.services.reward.channel import Decoder, FromProcess, Open, Opened, Result, Score, encode
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.errors import ProtocolError, ScoringError
from penstock.shared.runtime.user_process import start_with_channel

__all__ = ["ScorerProcess"]

_EXIT_LIMIT_S = 5.0
_CATCH_UP_S = 0.01


class _Channel(asyncio.Protocol):
    """Queue of the messages from a scorer process. One task at a time may wait for the next message."""

    def __init__(self) -> None:
        self.messages: deque[Opened | Result] = deque()
        self.closed = False
        self.lost = asyncio.Event()
        self._decoder = Decoder(FromProcess)
        self._waiter: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        try:
            self.messages.extend(self._decoder.feed(data))
        except ProtocolError:
            self.closed = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.lost.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, limit_s: float) -> Opened | Result | None:
        """Return the next message; None if the channel closed. Raises TimeoutError after ``limit_s``."""
        while not self.messages:
            if self.closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(limit_s):
                    await self._waiter
            except TimeoutError:
                await asyncio.sleep(_CATCH_UP_S)  # lets a lagging loop read the socket
                if not self.messages and not self.closed:
                    raise
        return self.messages.popleft()


class ScorerProcess:
    """One running ``worker.py``. Used for one group at a time."""

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.Transport, channel: _Channel) -> None:
        """Wrap a running process; use ``start`` to create one."""
        self._process = process
        self._transport = transport
        self._channel = channel
        self.about: dict[str, str] = {}
        """Descriptions of the open scorers by name."""

    @classmethod
    async def start(cls, config: RewardConfig) -> ScorerProcess:
        """Start a process and open the scorers in it.

        Raises:
            ScoringError: a scorer cannot be opened; the text gives the reason.
        """
        process, ours = await start_with_channel(
            lambda fd: (sys.executable, "-m", "penstock.services.reward.worker", fd, str(os.getpid()))
        )
        transport, channel = await asyncio.get_running_loop().create_unix_connection(_Channel, sock=ours)
        self = cls(process, transport, channel)
        opened = False
        try:
            await self._open(config)
            opened = True
        finally:
            if not opened:
                await self.kill()
        return self

    async def _open(self, config: RewardConfig) -> None:
        self._transport.write(encode(Open([s.model_dump(mode="json") for s in config.scorers])))
        try:
            opened = await self._channel.next(config.open_timeout_s)
        except TimeoutError:
            raise ScoringError(
                f"opening the scorers took longer than reward.open_timeout_s ({config.open_timeout_s:g} s)"
            ) from None
        if opened is None:
            raise ScoringError(f"the scorer process {await self._exit_text()} while it opened the scorers")
        assert isinstance(opened, Opened)
        if opened.error:
            raise ScoringError(opened.error)
        self.about = opened.about

    @property
    def pid(self) -> int:
        """Process id, equal to the process group id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the process is known to have ended."""
        return not self._channel.closed and self._process.returncode is None

    def submit(self, request: Score) -> None:
        """Send completions to score. The caller then awaits ``result`` once per completion."""
        self._transport.write(encode(request))

    async def result(self, limit_s: float) -> Result:
        """Wait until the scoring process has scored the next completion of those sent to it; return the result.

        Raises:
            ScoringError: the result took longer than ``limit_s``, or the process died. Next, call ``kill``.
        """
        try:
            result = await self._channel.next(limit_s)
        except TimeoutError:
            raise ScoringError(f"scoring took longer than reward.timeout_s ({limit_s:g} s) and was killed") from None
        if result is None:
            raise ScoringError(f"the scorer process {await self._exit_text()} while scoring")
        assert isinstance(result, Result)
        return result

    async def kill(self) -> None:
        """Send SIGKILL to the process and all its children, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._transport.abort()
        await self._exit_code()
        await self._channel.lost.wait()

    async def _exit_code(self) -> int | None:
        try:
            async with asyncio.timeout(_EXIT_LIMIT_S):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def _exit_text(self) -> str:
        code = await self._exit_code()
        if code is None:
            return "closed its channel"
        return f"died of signal {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
