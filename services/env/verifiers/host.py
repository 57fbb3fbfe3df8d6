"""Handle of the env service for the process that runs a job's `verifiers` episodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.env.tools.channel import LENGTH, encode
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.data.user_code import read_uploaded
from penstock.shared.errors import ToolError, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.tools import MAX_STEP_BYTES, EpisodeState, Step, ToolReply, ToolRequest
from penstock.shared.protocol.trials import Finding, TrialReply, TrialRequest
from penstock.shared.runtime.user_process import kill_group, start_with_channel

__all__ = ["VerifiersHost", "try_verifiers"]

REOPEN_S = 5.0
"""Pause before another attempt to open an environment that failed to open."""
OPEN_LIMIT_S = 180.0
"""Time limit to open an environment; importing the library alone takes many seconds."""
CLOSE_LIMIT_S = 5.0
"""Time that the process has to end its work before it is killed."""
CHILD = Path(__file__).with_name("child.py")
OPENING = "environment.env"
"""Key of the job file to which the findings of a trial refer."""


class VerifiersHost:
    """Creates episodes of one job. If the verifiers process dies, its episodes are lost; the next episode starts a new
    process."""

    def __init__(self, config: VerifiersConfig) -> None:
        self._config = config
        self._running: _Process | None = None
        self._lock = asyncio.Lock()
        self._tried = 0.0
        self.refused: tuple[float, str] | None = None
        """Start (Unix seconds) and reason of the current failure to open the environment; None if there is none."""

    async def start(self) -> None:
        """Open the environment early, so that ``refused`` holds the error if it cannot be opened."""
        with contextlib.suppress(ToolError):
            await self._open()

    async def begin(self, state: EpisodeState) -> HostedEpisode:
        """Create an episode. Raises ToolError if the environment cannot be opened."""
        return HostedEpisode(await self._open(), state.episode)

    async def close(self) -> None:
        """End the process and everything that it started."""
        async with self._lock:
            if self._running is not None:
                process, self._running = self._running, None
                await process.close()

    async def _open(self) -> _Process:
        async with self._lock:
            if self._running is not None and self._running.alive:
                return self._running
            if self._running is not None:
                await self._running.close()
                self._running = None
            if self.refused is not None and time.monotonic() - self._tried < REOPEN_S:
                raise ToolError(self.refused[1])
            self._tried = time.monotonic()
            try:
                self._running = await _Process.start(self._config)
            except ToolError as error:
                self.refused = self.refused or (bus_time(), str(error))
                raise
            self.refused = None
            return self._running


class HostedEpisode:
    """One episode in the verifiers process."""

    def __init__(self, process: _Process, episode: str) -> None:
        self._process, self._episode = process, episode

    async def ask(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Begin or continue the episode. The reply is ``lost`` if the verifiers process died, even if another episode
        caused that.

        Raises:
            ToolError: the step took longer than ``limit_s``, or its text is too long.
        """
        message = {"episode": self._episode, "purpose": request.purpose, **request.arguments}
        try:
            async with asyncio.timeout(limit_s):
                text = await self._process.ask(message)
        except TimeoutError:
            raise ToolError(f"the environment took longer than {limit_s:g} s (environment.step_timeout_s)") from None
        if text is None:
            return ToolReply(status="lost", text="the process of the environment died")
        if len(text.encode()) > MAX_STEP_BYTES:
            raise ToolError(f"the environment said {len(text)} characters at once, which is too much")
        return ToolReply(status="ok", text=text)

    async def close(self) -> None:
        """Cancel the episode if it is running."""
        self._process.send({"episode": self._episode, "purpose": "end"})


class _Process:
    """One running ``child.py`` with concurrent requests."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        code: tempfile.TemporaryDirectory[str] | None,
    ) -> None:  # fmt: skip
        self._process, self._reader, self._writer = process, reader, writer
        self._code = code
        """Folder with the uploaded module; None if the taskset is an installed package."""
        self._waiting: dict[int, asyncio.Future[str | None]] = {}
        self._last = 0
        self._listening: asyncio.Task[None] | None = None
        self.alive = True

    @classmethod
    async def start(cls, config: VerifiersConfig) -> _Process:
        """Start the process. Raises ToolError if the environment cannot be opened; the text gives the reason."""
        python = config.python or sys.executable
        env = {
            **{name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PENSTOCK_POLICY_API_KEY": secrets.token_urlsafe(24),
        }
        code = await asyncio.to_thread(_uploaded_code, config)
        if code is not None:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (code.name, os.environ.get("PYTHONPATH"))))
        try:
            process, channel = await start_with_channel(
                lambda fd: (python, "-P", str(CHILD), fd, json.dumps(config.complete)), env=env
            )
        except OSError as error:
            if code is not None:
                code.cleanup()
            raise ToolError(f"environment.python: '{python}' does not start: {error.strerror or error}") from None
        self = cls(process, *(await asyncio.open_unix_connection(sock=channel)), code)
        opened = False
        try:
            await self._check_opened()
            opened = True
        finally:
            if not opened:
                await self.close()
        self._listening = asyncio.create_task(self._listen())
        return self

    async def _check_opened(self) -> None:
        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                error = (await self._receive())["error"]
        except TimeoutError:
            raise ToolError(f"the environment was not open after {OPEN_LIMIT_S:g} s") from None
        except (asyncio.IncompleteReadError, OSError, ValueError):
            raise ToolError("the process of the environment died while it was opened; its log says why") from None
        if error:
            raise ToolError(error)

    async def ask(self, message: dict[str, Any]) -> str | None:
        """Send a request and return the text of its reply; None if the process died."""
        self._last += 1
        number = self._last
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.send({"id": number, **message})
            return await answer if self.alive else None
        finally:
            self._waiting.pop(number, None)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply."""
        if self.alive:
            self._writer.write(encode(message))

    async def close(self) -> None:
        """Let the process end its work, then kill it if that takes too long."""
        self._writer.close()
        if self._listening is not None:
            self._listening.cancel()
        self._end_waits()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._process.wait()
        await kill_group(self._process)
        if self._code is not None:
            self._code.cleanup()
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._receive()
                waiting = self._waiting.get(message["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message["text"])
        except (asyncio.IncompleteReadError, OSError, ValueError):
            self._end_waits()

    def _end_waits(self) -> None:
        self.alive = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    async def _receive(self) -> dict[str, Any]:
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        message: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        return message


def _uploaded_code(config: VerifiersConfig) -> tempfile.TemporaryDirectory[str] | None:
    """Copy the uploaded module of a taskset to a new folder, from which the process imports it by name.

    Raises:
        ToolError: the upload cannot be read.
    """
    if config.path is None:
        return None
    source = read_uploaded(config.path, what="environment.path", beside="env", error=ToolError)
    folder = tempfile.TemporaryDirectory(prefix="penstock-verifiers-")
    Path(folder.name, f"{config.module}.py").write_bytes(source)
    return folder


async def try_verifiers(config: VerifiersConfig, request: TrialRequest) -> TrialReply:
    """Open an environment before its job is submitted, begin one episode, kill the process, and return the findings.

    Raises:
        Unavailable: the sender of the request no longer waits.
    """
    if bus_time() > request.start_by:
        raise Unavailable("nobody waits for this trial any more")
    host = VerifiersHost(config)
    try:
        async with asyncio.timeout(request.limit_s):
            findings = await _first_step(host, request.limit_s)
    except TimeoutError:
        text = f"the environment had not begun an episode after {request.limit_s:g} s, when the trial ended"
        findings = [Finding(key=OPENING, text=text, fatal=False)]
    finally:
        await host.close()
    return TrialReply(findings=findings)


async def _first_step(host: VerifiersHost, limit_s: float) -> list[Finding]:
    """Let the environment begin its first task, until it asks for a turn of the policy; return what failed."""
    try:
        episode = await host.begin(EpisodeState(episode="trial", seed=0))
    except ToolError as error:
        return [Finding(key=OPENING, text=str(error), fatal=True)]
    what = "the first task, tried before a turn of the policy:"
    try:
        reply = await episode.ask(ToolRequest(purpose="begin", arguments={"task": 0}), limit_s)
    except ToolError as error:
        return [Finding(key=OPENING, text=f"{what} {error}", fatal=False)]
    problem = msgspec.json.decode(reply.text, type=Step).error if reply.status == "ok" else reply.text
    return [Finding(key=OPENING, text=f"{what} {problem}", fatal=False)] if problem else []
