"""Client of a simulator session: requests in order, repeated if the bus loses them.

If the env service runs on the same host, requests go through a Unix socket, which takes half a millisecond less, and
over the bus once the socket fails; observations are read in the memory to which the simulators write them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import mmap
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import (
    Body,
    CloseRequest,
    EnvOpened,
    EnvSpec,
    FilmReply,
    FilmRequest,
    KeepRequest,
    ObservationMemory,
    OpenEnv,
    ResetReply,
    ResetRequest,
    RestoreRequest,
    SnapshotReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
    decode_env,
    env_frame,
)
from penstock.shared.protocol.frame import is_frame
from penstock.shared.transport.bulk import Blob
from penstock.shared.transport.bulk_message import FrameMail, is_large
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.connection import NoResponders
from penstock.shared.transport.unix_socket import UnixClient

__all__ = ["EnvClient"]

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Observed = TypeVar("Observed", ResetReply, StepReply)

RETRY_S = 0.05
ATTEMPT_S = 10.0
GONE_S = 10.0
"""Time without a server (seconds) after which a session is considered lost; env services reconnect faster after a
restart of the broker."""


class EnvClient:
    """Client of one simulator session. The arrays of a reply are valid only until the next request, because they may be
    in shared memory.

    ``open`` opens a session, ``close`` ends it. The env service ends a session without requests after its idle time.
    """

    def __init__(
        self, bus: Bus, mail: FrameMail, job: str, opened: EnvOpened, direct: UnixClient | None = None
    ) -> None:
        self._bus, self._mail, self._job, self._direct = bus, mail, job, direct
        self.subject = subjects.env(opened.session)
        self._blob: Blob | None = None
        self.spec = opened.spec
        self._everyone = np.arange(opened.spec.num_envs)
        self._observations: dict[str, NDArray[Any]] | None = None
        if opened.memory is not None and direct is not None and direct.peer:
            self._observations = _mapped(opened.memory, direct.peer, opened.spec)
        self.seq = 0
        """Number of the next request."""

    @classmethod
    async def open(
        cls, bus: Bus, mail: FrameMail, request: OpenEnv, *, job: str, deadline_s: float = 60.0
    ) -> EnvClient:
        """Open a session at any free env service.

        Raises:
            ConfigError: the environments cannot be created, or their observations could not reach this process.
            Unavailable: no env service answered until the deadline.
        """
        data = pack(msgspec.structs.replace(request, host=mail.host), job=job)
        # Making environments may take long, and a repeated request would make others: one request waits for all of the
        # time.
        reply = await _repeated(lambda left_s: bus.request(subjects.ENV_OPEN, data, deadline_s=left_s), deadline_s)
        opened = unpack(reply, EnvOpened)[0]
        direct = None
        if opened.socket:
            try:
                direct = await UnixClient.open(opened.socket)
            except Unavailable as error:  # containers may share a host id and no network namespace
                log.info("requests to '%s' go by the bus: %s", request.env_id, error)
        return cls(bus, mail, job, opened, direct)

    @property
    def is_direct(self) -> bool:
        """True while requests go through a Unix socket."""
        return self._direct is not None and self._direct.is_open

    @property
    def is_mapped(self) -> bool:
        """True if observations are read in the memory of the env service, without a copy."""
        return self._observations is not None

    async def reset(self, request: ResetRequest, *, deadline_s: float = 60.0) -> ResetReply:
        """Start episodes; return a reply with their first observations. Raises the same errors as ``step``."""
        return await self._observe(request, ResetReply, deadline_s)

    async def step(self, request: StepRequest, *, deadline_s: float = 60.0) -> StepReply:
        """Execute a chunk of actions; return the reply with rewards and new observations.

        Raises:
            ProtocolError, Conflict: the request does not fit the environments. It does not use up its number: the next
                request has the same one.
            Unavailable: no process serves the session for 10 s, or it does not answer until the deadline.
        """
        return await self._observe(request, StepReply, deadline_s)

    async def snapshot(self, env_ids: NDArray[np.int32], *, deadline_s: float = 60.0) -> list[bytes]:
        """Store the running episodes of ``env_ids`` [n], which continue; return n snapshots for ``restore``.

        Raises:
            Unsupported: the simulator has no snapshots (``spec.has_snapshots``).
            Unavailable: the simulator lost an episode meanwhile; otherwise as ``step``.
        """
        reply = await self._ask(SnapshotRequest(seq=self.seq, env_ids=env_ids), SnapshotReply, deadline_s)
        if reply.lost.any():
            reasons = [f"environment {e}: {why}" for e, why in zip(env_ids, reply.reasons, strict=True) if why]
            raise Unavailable("; ".join(reasons))
        return [part.tobytes() for part in np.split(reply.snapshots, np.cumsum(reply.sizes)[:-1])]

    async def restore(
        self, env_ids: NDArray[np.int32], snapshots: Sequence[bytes], *, deadline_s: float = 60.0
    ) -> ResetReply:
        """Continue n stored episodes, of this or another session with equal environments, in ``env_ids`` [n].

        The reply has their current observations. Raises Unsupported, or as ``step``.
        """
        request = RestoreRequest(
            seq=self.seq,
            env_ids=env_ids,
            snapshots=np.frombuffer(b"".join(snapshots), np.uint8),
            sizes=np.asarray([len(snapshot) for snapshot in snapshots], np.int64),
        )
        return await self._observe(request, ResetReply, deadline_s)

    async def film(self, env_id: int, *, deadline_s: float = 60.0) -> tuple[bytes, str]:
        """Return ``(video, reason)``: the newest episode of an environment as an MP4 file, and if there is none, the
        reason. Raises the same errors as ``step``."""
        reply = await self._ask(FilmRequest(seq=self.seq, env_id=env_id), FilmReply, deadline_s)
        return reply.film.tobytes(), "".join(reply.reasons)

    async def keep(self) -> None:
        """Keep the session alive. Raises Unavailable if the session is lost or does not answer."""
        frame = b"".join(env_frame(KeepRequest(seq=self.seq)))
        await self._request(frame, 2 * ATTEMPT_S)

    async def close(self) -> None:
        """End the session; its arrays become invalid."""
        try:
            frame = b"".join(env_frame(CloseRequest(seq=self.seq)))
            if self._direct is not None and self._direct.is_open:
                with contextlib.suppress(Unavailable):
                    await self._direct.request(frame, deadline_s=ATTEMPT_S)
                    return
            await self._bus.request(self.subject, frame, deadline_s=ATTEMPT_S)
        finally:
            if self._direct is not None:
                self._direct.close()
            self._observations = None
            self._release()

    async def _observe(
        self, body: ResetRequest | StepRequest | RestoreRequest, kind: type[Observed], deadline_s: float
    ) -> Observed:
        """Send a request and return its reply. Read the observations from the session's memory if this process has
        mapped it."""
        if self._observations is None:
            return await self._ask(body, kind, deadline_s)
        reply = await self._ask(dataclasses.replace(body, observe=False), kind, deadline_s)
        rows = slice(None) if np.array_equal(body.env_ids, self._everyone) else body.env_ids
        observations = {name: array[rows] for name, array in self._observations.items()}
        return dataclasses.replace(reply, observations=observations)

    async def _ask(
        self, body: ResetRequest | StepRequest | FilmRequest | SnapshotRequest | RestoreRequest, kind: type[B],
        deadline_s: float,
    ) -> B:  # fmt: skip
        frame = env_frame(body)
        sent = (
            await asyncio.to_thread(self._mail.pack, frame, job=self._job)
            if is_large(frame)
            else self._mail.pack(frame, job=self._job)
        )
        try:
            data = await self._request(sent.data, deadline_s)
        finally:
            sent.release()
        self._release()
        self.seq = body.seq + 1
        self._blob = self._mail.open(data) if is_frame(data) else await asyncio.to_thread(self._mail.open, data)
        return decode_env(self._blob.data, kind)

    async def _request(self, data: bytes, deadline_s: float) -> bytes:
        """Repeat a request until a reply arrives, and return the reply. Requests go through the Unix socket while it is
        open, otherwise over the bus."""

        def send(left_s: float) -> Awaitable[bytes]:
            if self._direct is not None and self._direct.is_open:
                return self._direct.request(data, deadline_s=left_s)
            return self._bus.request(self.subject, data, deadline_s=min(left_s, ATTEMPT_S))

        return await _repeated(send, deadline_s, gone_s=GONE_S)

    def _release(self) -> None:
        if self._blob is not None:
            self._blob.release()
            self._blob = None


def _mapped(memory: ObservationMemory, process: int, spec: EnvSpec) -> dict[str, NDArray[Any]] | None:
    """Map the memory with a session's current observations; return arrays [environments, ...] by name, or None on
    failure.

    ``process`` is the id of the process that serves the session.
    """
    try:
        descriptor = os.open(f"/proc/{process}/fd/{memory.descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (memory.inode, memory.size):
                raise FileNotFoundError("it is another file")
            mapping = mmap.mmap(descriptor, memory.size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        arrays = {}
        for name, one in spec.observations.items():
            count = spec.num_envs * math.prod(one.shape)
            flat = np.frombuffer(mapping, np.dtype(one.dtype), count, memory.offsets[name])
            arrays[name] = flat.reshape(spec.num_envs, *one.shape)
    except (OSError, ValueError, KeyError) as error:
        log.info("observations of '%s' are sent, because their memory cannot be read: %r", spec.env_id, error)
        return None
    return arrays


async def _repeated(send: Callable[[float], Awaitable[bytes]], deadline_s: float, *, gone_s: float = math.inf) -> bytes:
    """Repeat a request until a reply arrives, and return the reply. The server executes a repeated request only once.

    ``send`` sends the request, given the time that is left (seconds). The call fails with NoResponders if there is no
    server for ``gone_s`` seconds.
    """
    clock = asyncio.get_running_loop().time
    end, gone = clock() + deadline_s, math.inf
    while True:
        left_s = end - clock()
        try:
            return await send(max(0.05, left_s))
        except NoResponders:
            gone = min(gone, clock() + gone_s)
            if left_s <= RETRY_S or clock() >= gone:
                raise
        except Unavailable:
            gone = math.inf
            if left_s <= RETRY_S:
                raise
        await asyncio.sleep(RETRY_S)
