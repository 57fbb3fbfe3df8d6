"""A session: one pool of environments, one thread, requests in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import Simulator, open_simulator
from penstock.shared.errors import Conflict, PenstockError
from penstock.shared.protocol.embodied.environment import (
    Body,
    CloseRequest,
    EnvSpec,
    FilmRequest,
    KeepRequest,
    OpenEnv,
    ResetRequest,
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
"""Bytes of an answer beside its observations, in all but extreme cases."""

P = ParamSpec("P")
T = TypeVar("T")

STEP_SECONDS = metrics.histogram("env_request_seconds", "Answering one reset or step request.")
STEPS = metrics.counter("env_steps", "Actions executed, over all environments.")


class EnvSession:
    """Answers the requests of one client. A repeated request gets the same answer and is not executed again."""

    def __init__(self, job: str, request: OpenEnv, mail: FrameMail, sims_dir: Path) -> None:
        self.job = job
        self._mail, self._sims_dir = mail, sims_dir
        self.closed = asyncio.Event()
        """Set when nothing more will be answered."""
        self.ended = asyncio.Event()
        """Set by the owner when everything is given back."""
        self._request = request
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"env {request.env_id}")
        self._lock = asyncio.Lock()
        self._seq = -1
        self._frame: list[Buffer] = []
        self._reply: Sent | None = None
        """The answer to request ``_seq``: first its frame, then its message, until the next request."""
        self._used = time.monotonic()
        self._simulator: Simulator | None = None
        self._pool: EnvPool | None = None

    async def open(self) -> EnvSpec:
        """Make the environments.

        Raises:
            ConfigError: they cannot be made, or their observations could not reach the client.
        """
        opened = False
        try:
            simulator = await self._in_thread(self._open_simulator)
            spec = simulator.spec
            self._mail.check(_reply_bytes(spec), self._request.host, f"a reply of '{spec.env_id}'")
            self._pool = EnvPool(simulator)
            self._used = time.monotonic()
            opened = True
            return spec
        finally:
            if not opened:
                await self.close()

    @property
    def idle(self) -> bool:
        """No request for longer than the client said, and none in progress."""
        return not self._lock.locked() and time.monotonic() - self._used > self._request.idle_s

    async def answer(self, data: bytes) -> bytes:
        """Handle one request.

        Raises:
            ProtocolError: it cannot be read or does not fit the environments.
            Conflict: it is out of order, or steps an episode that is over.
        """
        started = time.perf_counter()
        async with self._lock:
            self._used = time.monotonic()
            if not is_frame(data):
                data = await self._in_thread(self._fetch, data)
            body = decode_env(data, ResetRequest, StepRequest, FilmRequest, CloseRequest, KeepRequest)
            if isinstance(body, CloseRequest):
                self.closed.set()
                return encode_env(body)
            if isinstance(body, KeepRequest):
                return encode_env(body)
            assert isinstance(body, ResetRequest | StepRequest | FilmRequest)
            if body.seq != self._seq:
                await self._take(body)
            reply = await self._message()
            self._used = time.monotonic()
        STEP_SECONDS.observe(time.perf_counter() - started)
        return reply

    def _fetch(self, data: bytes) -> bytes:
        """The frame that a claim check leads to, copied: a simulator may keep its actions for longer."""
        with self._mail.open(data) as blob:
            return bytes(blob.data)

    async def _take(self, body: ResetRequest | StepRequest | FilmRequest) -> None:
        """Execute the next request. Who sends it has the answer to the one before."""
        if body.seq != self._seq + 1:
            raise Conflict(f"request {body.seq} after request {self._seq}: a session answers them in order")
        frame = await self._execute(body)
        self._release()
        self._seq, self._frame = body.seq, frame

    async def _message(self) -> bytes:
        """The answer to the last request. Without room for it now, whoever asks again gets it."""
        if self._reply is None:
            pack = partial(self._mail.pack, self._frame, job=self.job)
            self._reply = await self._in_thread(pack) if is_large(self._frame) else pack()
            self._frame = []
        return self._reply.data

    def _release(self) -> None:
        if self._reply is not None:
            self._reply.release()
            self._reply = None

    async def _execute(self, body: ResetRequest | StepRequest | FilmRequest) -> list[Buffer]:
        """Run one request; a simulator that breaks ends the session, for its state is unknown."""
        assert self._pool is not None
        broken = True
        try:
            if isinstance(body, ResetRequest):
                reply: Body = await self._in_thread(self._pool.reset, body)
            elif isinstance(body, FilmRequest):
                reply = await self._in_thread(self._pool.film, body)
            else:
                reply = result = await self._in_thread(self._pool.step, body)
                STEPS.inc(int(result.valid.sum()))
            broken = False
            return env_frame(reply)
        except PenstockError:
            broken = False
            raise
        finally:
            if broken:
                self.closed.set()

    async def close(self) -> None:
        """Close the simulator in its own thread, and give back what the client has not fetched."""
        async with self._lock:
            self.closed.set()
            self._release()
            await self._in_thread(self._close_simulator)
            self._thread.shutdown(wait=False)

    def _open_simulator(self) -> Simulator:
        """Make the environments; the thread keeps them even where nobody waits for them any more."""
        self._simulator = open_simulator(self._request, self._sims_dir)
        return self._simulator

    def _close_simulator(self) -> None:
        simulator, self._simulator = self._simulator, None
        if simulator is not None:
            simulator.close()

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    def status(self) -> dict[str, int]:
        """Counters of this session."""
        pool = self._pool
        return {
            "envs": self._request.num_envs,
            "steps": pool.num_steps if pool else 0,
            "episodes": pool.num_ended if pool else 0,
            "lost": pool.num_lost if pool else 0,
        }


def _reply_bytes(spec: EnvSpec) -> int:
    """Largest answer: current and final observations of all environments, and room for the rest."""
    sizes = [prod(one.shape) * np.dtype(one.dtype).itemsize for one in spec.observations.values()]
    return 2 * spec.num_envs * sum(sizes) + REST_BYTES
