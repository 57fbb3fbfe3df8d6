"""Simulator session: one pool of environments, one thread, requests in order."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import ParamSpec, TypeVar, get_args

import numpy as np

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import Simulator, open_simulator
from penstock.services.env.simulators.child import holds_message
from penstock.shared.errors import Conflict, PenstockError
from penstock.shared.protocol.embodied.environment import (
    Body,
    CloseRequest,
    EnvSpec,
    FilmRequest,
    KeepRequest,
    ObservationMemory,
    OpenEnv,
    ResetRequest,
    RestoreRequest,
    SnapshotRequest,
    StepReply,
    StepRequest,
    decode_env,
    encode_env,
    env_frame,
)
from penstock.shared.protocol.frame import Buffer, is_frame
from penstock.shared.runtime import metrics
from penstock.shared.transport.bulk_message import FrameMail, Sent, is_large

__all__ = ["EnvSession"]

REST_BYTES = 1 << 16
"""Bytes that are allowed for a reply in addition to its observations; almost always enough."""

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 1 << 18
"""Maximum size of replies, in bytes, up to which the event loop itself steps the environments of a session. If replies
can be larger, a thread does, and clients on this host may read observations in the simulator's memory."""
INLINE_ACTIONS = 1 << 13
"""Maximum number of action components in a request that the event loop sends to the simulator: request and reply then
fit into the buffers of a socket."""

Numbered = ResetRequest | StepRequest | FilmRequest | SnapshotRequest | RestoreRequest
"""Requests that are executed once and in order."""
NUMBERED = get_args(Numbered)

STEP_SECONDS = metrics.histogram("env_request_seconds", "Answering one reset or step request.")
STEPS = metrics.counter("env_steps", "Actions executed, over all environments.")


class EnvSession:
    """Serves the requests of one client. A repeated request gets the same reply and is not executed again."""

    def __init__(self, job: str, request: OpenEnv, mail: FrameMail, sims_dir: Path) -> None:
        self.job = job
        self._mail, self._sims_dir = mail, sims_dir
        self.closed = asyncio.Event()
        """Set when no more requests will be answered."""
        self.ended = asyncio.Event()
        """Set by the owner when all resources are released."""
        self._request = request
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"env {request.env_id}")
        self._lock = asyncio.Lock()
        self._seq = -1
        self._frame: list[Buffer] = []
        self._reply: Sent | None = None
        """Encoded reply to request ``_seq``, kept until the next request; None until it is made from ``_frame``."""
        self._used = time.monotonic()
        self._small = False
        """True if replies are so small that the event loop copies them itself."""
        self._simulator: Simulator | None = None
        self._pool: EnvPool | None = None

    async def open(self) -> EnvSpec:
        """Create the environments.

        Raises:
            ConfigError: they cannot be created, or their observations are too large for the client.
        """
        opened = False
        try:
            simulator = await self._in_thread(self._open_simulator)
            spec = simulator.spec
            self._mail.check(_reply_bytes(spec), self._request.host, f"a reply of '{spec.env_id}'")
            self._small = _reply_bytes(spec) <= INLINE_BYTES
            self._pool = EnvPool(simulator)
            self._used = time.monotonic()
            opened = True
            return spec
        finally:
            if not opened:
                await self.close()

    @property
    def memory(self) -> ObservationMemory | None:
        """Memory that holds the observations of the open session; None if replies are small enough to carry the
        observations."""
        assert self._simulator is not None
        return None if self._small else self._simulator.memory

    @property
    def idle(self) -> bool:
        """True if the session had no request for longer than the client's ``idle_s`` and none is in progress."""
        return not self._lock.locked() and time.monotonic() - self._used > self._request.idle_s

    async def answer(self, data: bytes) -> bytes:
        """Answer one encoded request; return the encoded reply.

        Raises:
            ProtocolError: the request cannot be read or does not fit the environments.
            Conflict: the request is out of order, or steps an episode that has ended.
            Unsupported: the simulator has no snapshots.
        """
        started = time.perf_counter()
        async with self._lock:
            self._used = time.monotonic()
            if not is_frame(data):
                data = await self._in_thread(self._fetch, data)
            body = decode_env(data, *NUMBERED, CloseRequest, KeepRequest)
            if isinstance(body, CloseRequest):
                self.closed.set()
                return encode_env(body)
            if isinstance(body, KeepRequest):
                return encode_env(body)
            assert isinstance(body, NUMBERED)
            if body.seq != self._seq:
                await self._take(body)
            reply = await self._message()
            self._used = time.monotonic()
        STEP_SECONDS.observe(time.perf_counter() - started)
        return reply

    def _fetch(self, data: bytes) -> bytes:
        """Return a copy of the encoded request to which the message ``data`` refers. A copy is needed because a
        simulator may read the actions in the request after the client has freed the memory."""
        with self._mail.open(data) as blob:
            return bytes(blob.data)

    async def _take(self, body: Numbered) -> None:
        """Execute the next request and release the previous reply, which the client has received if it sends a next
        request."""
        if body.seq != self._seq + 1:
            raise Conflict(f"request {body.seq} after request {self._seq}: a session answers them in order")
        frame = await self._execute(body)
        self._release()
        self._seq, self._frame = body.seq, frame

    async def _message(self) -> bytes:
        """Return the reply to the last request. If no space is left to encode the reply, a repetition of the request
        tries again."""
        if self._reply is None:
            pack = partial(self._mail.pack, self._frame, job=self.job)
            self._reply = await self._in_thread(pack) if is_large(self._frame) else pack()
            self._frame = []
        return self._reply.data

    def _release(self) -> None:
        if self._reply is not None:
            self._reply.release()
            self._reply = None

    async def _execute(self, body: Numbered) -> list[Buffer]:
        """Execute one request. An unexpected simulator error ends the session, because its state is then unknown."""
        assert self._pool is not None
        broken = True
        try:
            if isinstance(body, ResetRequest):
                reply: Body = await self._in_thread(self._pool.reset, body)
            elif isinstance(body, FilmRequest):
                reply = await self._in_thread(self._pool.film, body)
            elif isinstance(body, SnapshotRequest):
                reply = await self._in_thread(self._pool.snapshot, body)
            elif isinstance(body, RestoreRequest):
                reply = await self._in_thread(self._pool.restore, body)
            else:
                reply = result = await self._step(self._pool, body)
                STEPS.inc(int(result.valid.sum()))
            broken = False
            return env_frame(reply)
        except PenstockError:
            broken = False
            raise
        finally:
            if broken:
                self.closed.set()

    async def _step(self, pool: EnvPool, body: StepRequest) -> StepReply:
        """Step the environments. The event loop itself exchanges small messages with the simulator processes, because a
        detour through the thread would take as long as the step of a simple simulator.
        """
        if not self._small or body.actions.size > INLINE_ACTIONS:
            return await self._in_thread(pool.step, body)
        begun = pool.begin_step(body)
        if await _readable(begun.stepping.sockets, begun.stepping.until):
            return pool.finish_step(begun)
        return await self._in_thread(pool.finish_step, begun)  # it waits, and kills processes that died or hung

    async def close(self) -> None:
        """Close the simulator in its own thread, and release replies that the client has not fetched."""
        async with self._lock:
            self.closed.set()
            self._release()
            await self._in_thread(self._close_simulator)
            self._thread.shutdown(wait=False)

    def _open_simulator(self) -> Simulator:
        """Create the environments and store them, so that ``close`` finds them even if the caller was cancelled."""
        self._simulator = open_simulator(self._request, self._sims_dir)
        return self._simulator

    def _close_simulator(self) -> None:
        simulator, self._simulator, self._pool = self._simulator, None, None
        if simulator is not None:
            simulator.close()

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    def status(self) -> dict[str, int]:
        """Return the counters of this session."""
        pool = self._pool
        return {
            "envs": self._request.num_envs,
            "steps": pool.num_steps if pool else 0,
            "episodes": pool.num_ended if pool else 0,
            "lost": pool.num_lost if pool else 0,
        }


async def _readable(sockets: Sequence[socket.socket], until: float) -> bool:
    """Return True once every socket has a whole message, or False at the time ``until`` (monotonic seconds).

    Return False earlier if a socket is closed or has only a part of a message.
    """
    loop = asyncio.get_running_loop()
    for connection in sockets:
        ready = loop.create_future()
        loop.add_reader(connection, _resolve, ready, True)
        timer = loop.call_later(until - time.monotonic(), _resolve, ready, False)
        try:
            if not await ready or not holds_message(connection):
                return False
        finally:
            timer.cancel()
            loop.remove_reader(connection)
    return True


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _reply_bytes(spec: EnvSpec) -> int:
    """Return the maximum number of bytes of a reply.

    A reply has the current and the final observation of each environment; ``REST_BYTES`` allows for everything else.
    """
    sizes = [prod(one.shape) * np.dtype(one.dtype).itemsize for one in spec.observations.values()]
    return 2 * spec.num_envs * sum(sizes) + REST_BYTES
