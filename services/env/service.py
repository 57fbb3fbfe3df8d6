"""The env process: opens simulator sessions on request, closes idle ones, and executes tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.services.env.session import EnvSession
from penstock.services.env.simulators import describe_simulator
from penstock.services.env.tool_session import ToolSession
from penstock.services.env.verifiers import try_verifiers
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import EnvOpened, OpenEnv
from penstock.shared.protocol.trials import TrialRequest
from penstock.shared.runtime.jobs import Breaks, watch_jobs
from penstock.shared.runtime.user_process import run_trial
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.serve import Server
from penstock.shared.transport.unix_socket import UnixServer

__all__ = ["EnvService"]

logger = logging.getLogger(__name__)

QUEUE = "env"
IDLE_CHECK_S = 0.25
MAX_TRIALS = 2
"""Maximum number of environments that are tried out at the same time, each in a process of its own."""


class EnvService:
    """Opens and serves simulator sessions, and executes the tool calls of jobs."""

    name = "env"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, EnvSession] = {}
        self.tools: dict[str, ToolSession] = {}
        """Tool sessions by job."""
        self.ready = False
        self._draining = asyncio.Event()
        self._breaks = Breaks()
        self._tasks = asyncio.TaskGroup()
        self._mail: FrameMail

    async def run(self) -> None:
        """Serve until drained or cancelled."""
        self._mail = await asyncio.to_thread(FrameMail, self.settings)
        asked = [
            await self.bus.serve(subjects.ENV_OPEN, self._on_open, queue=QUEUE),
            await self.bus.serve(subjects.ENV_DESCRIBE, self._on_describe, queue=QUEUE),
            await self.bus.serve(subjects.ENV_TRY, self._on_try, queue=QUEUE, max_concurrent=MAX_TRIALS),
        ]
        try:
            async with self._tasks:
                watching = self._tasks.create_task(
                    watch_jobs(self.bus, self._serve_tools, open_evaluation=self._serve_tools, breaks=self._breaks)
                )
                self.ready = True
                await self._draining.wait()
                for server in asked:
                    await server.close()
                for tool in list(self.tools.values()):
                    await tool.ended.wait()
                watching.cancel()
        finally:
            for server in asked:
                await server.close()
            await asyncio.to_thread(self._mail.close)

    async def drain(self) -> None:
        """Open no more sessions; finish requests in progress and close all sessions. Clients reopen them elsewhere."""
        self.ready = False
        self._draining.set()
        sessions, tools = list(self.sessions.values()), list(self.tools.values())
        for session in sessions:
            session.closed.set()
        for tool in tools:
            tool.drain()
        for ended in [one.ended for one in sessions] + [one.ended for one in tools]:
            await ended.wait()

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the counters per job, summed over its sessions."""
        rows: dict[str, Counter[str]] = {}
        for session in self.sessions.values():
            rows.setdefault(session.job, Counter()).update({**session.status(), "sessions": 1})
        simulators = {job: dict(row) for job, row in rows.items()}
        tools = {job: session.status() | simulators.get(job, {}) for job, session in self.tools.items()}
        return self._breaks.add_to(simulators | tools)

    async def _serve_tools(self, job: str, config: TextJob) -> None:
        if config.environment is None or self._draining.is_set():
            return
        session = ToolSession(self.bus, job, config.environment, drain_s=self.settings.drain_s)
        self.tools[job] = session
        try:
            await session.run()
        finally:
            session.ended.set()
            self.tools.pop(job, None)

    async def _on_open(self, data: bytes) -> bytes:
        request, envelope = unpack(data, OpenEnv)
        session = EnvSession(envelope.job, request, self._mail, self.settings.sims_dir)
        spec = await session.open()
        name = secrets.token_hex(8)
        opened = EnvOpened(session=name, spec=spec)
        self.sessions[name] = session
        direct = None
        if request.host == self.settings.host_id:
            direct = UnixServer(session.answer)
            opened = EnvOpened(session=name, spec=spec, socket=direct.address, memory=session.memory)
        serving = asyncio.Event()
        self._tasks.create_task(self._serve(name, session, direct, serving))
        await serving.wait()
        return pack(opened, job=envelope.job, id=envelope.id, trace=envelope.trace)

    async def _on_describe(self, data: bytes) -> bytes:
        """Try a simulator in a worker thread, and return its encoded spec."""
        request, envelope = unpack(data, OpenEnv)
        spec = await asyncio.to_thread(describe_simulator, request, self.settings.sims_dir)
        return pack(spec, job=envelope.job, id=envelope.id, trace=envelope.trace)

    async def _on_try(self, data: bytes) -> bytes:
        """Run a trial of user code in its own process, and return the encoded ``TrialReply``."""
        request, envelope = unpack(data, TrialRequest)
        section = request.parts["environment"]
        if section.get("type") == "verifiers":
            reply = await try_verifiers(VerifiersConfig.model_validate(section), request)
        else:
            reply = await run_trial("penstock.services.env.tools.trial", request)
        return pack(reply, job=envelope.job, id=envelope.id, trace=envelope.trace)

    async def _serve(self, name: str, session: EnvSession, direct: UnixServer | None, serving: asyncio.Event) -> None:
        """Serve one session until it is closed or idle."""
        servers: list[Server | UnixServer] = []
        servers.append(await self.bus.serve(subjects.env(name), session.answer, max_concurrent=4))
        if direct is not None:
            try:
                await direct.start()
                servers.append(direct)
            except OSError as error:  # the client falls back to the bus
                logger.warning("session %s has no Unix socket: %s", name, error)
        serving.set()
        try:
            while not session.closed.is_set() and not session.idle:
                try:
                    async with asyncio.timeout(IDLE_CHECK_S):
                        await session.closed.wait()
                except TimeoutError:
                    continue
        finally:
            ending = asyncio.create_task(self._end(name, session, servers))
            while not ending.done():  # also if cancelled meanwhile, because the session owns processes
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)

    async def _end(self, name: str, session: EnvSession, servers: Sequence[Server | UnixServer]) -> None:
        for server in servers:
            await server.close()
        await session.close()
        self.sessions.pop(name, None)
        session.ended.set()
        logger.info("session %s of job '%s' is closed", name, session.job)
