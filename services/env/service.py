"""The env process: opens sessions on request, answers them, closes the idle ones."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from typing import Any

from penstock.services.env.session import EnvSession
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.environment import EnvOpened, OpenEnv
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus

__all__ = ["EnvService"]

logger = logging.getLogger(__name__)

QUEUE = "env"
IDLE_CHECK_S = 0.25


class EnvService:
    """Holds the sessions of this process."""

    name = "env"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, EnvSession] = {}
        self.ready = False
        self._draining = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._mail: FrameMail

    async def run(self) -> None:
        """Serve until drained or cancelled."""
        self._mail = await asyncio.to_thread(FrameMail, self.settings)
        opening = await self.bus.serve(subjects.ENV_OPEN, self._on_open, queue=QUEUE)
        try:
            async with self._tasks:
                self.ready = True
                await self._draining.wait()
                await opening.close()
        finally:
            await opening.close()
            await asyncio.to_thread(self._mail.close)

    async def drain(self) -> None:
        """Open no more sessions; answer what is in hand and close them. Their clients open others elsewhere."""
        self.ready = False
        self._draining.set()
        sessions = list(self.sessions.values())
        for session in sessions:
            session.closed.set()
        for session in sessions:
            await session.ended.wait()

    def status(self) -> dict[str, dict[str, Any]]:
        """Counters per job, summed over its sessions."""
        rows: dict[str, Counter[str]] = {}
        for session in self.sessions.values():
            rows.setdefault(session.job, Counter()).update({**session.status(), "sessions": 1})
        return {job: dict(row) for job, row in rows.items()}

    async def _on_open(self, data: bytes) -> bytes:
        request, envelope = unpack(data, OpenEnv)
        session = EnvSession(envelope.job, request, self._mail)
        spec = await session.open()
        name = secrets.token_hex(8)
        self.sessions[name] = session
        serving = asyncio.Event()
        self._tasks.create_task(self._serve(name, session, serving))
        await serving.wait()
        return pack(EnvOpened(session=name, spec=spec), job=envelope.job, id=envelope.id, trace=envelope.trace)

    async def _serve(self, name: str, session: EnvSession, serving: asyncio.Event) -> None:
        """Answer one session until it is closed or idle."""
        server = await self.bus.serve(subjects.env(name), session.answer, max_concurrent=4)
        serving.set()
        try:
            while not session.closed.is_set() and not session.idle:
                try:
                    async with asyncio.timeout(IDLE_CHECK_S):
                        await session.closed.wait()
                except TimeoutError:
                    continue
        finally:
            await server.close()
            await session.close()
            self.sessions.pop(name, None)
            session.ended.set()
            logger.info("session %s of job '%s' is closed", name, session.job)
