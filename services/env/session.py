"""A session: one pool of environments, one thread, requests in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import ParamSpec, TypeVar

import numpy as np

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import Simulator, open_simulator
from penstock.shared.errors import ConfigError, Conflict, PenstockError
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.environment import (
    Body,
    CloseRequest,
    EnvSpec,
    OpenEnv,
    ResetRequest,
    StepRequest,
    decode_env,
    encode_env,
)
from penstock.shared.runtime import metrics

__all__ = ["EnvSession"]

P = ParamSpec("P")
T = TypeVar("T")

STEP_SECONDS = metrics.histogram("env_request_seconds", "Answering one reset or step request.")
STEPS = metrics.counter("env_steps", "Actions executed, over all environments.")


class EnvSession:
    """Answers the requests of one client. A repeated request gets the same answer and is not executed again."""

    def __init__(self, job: str, request: OpenEnv) -> None:
        self.job = job
        self.closed = asyncio.Event()
        """Set when nothing more will be answered."""
        self.ended = asyncio.Event()
        """Set by the owner when everything is given back."""
        self._request = request
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"env {request.env_id}")
        self._lock = asyncio.Lock()
        self._last: tuple[int, bytes] = (-1, b"")
        self._used = time.monotonic()
        self._simulator: Simulator | None = None
        self._pool: EnvPool | None = None

    async def open(self) -> EnvSpec:
        """Make the environments.

        Raises:
            ConfigError: they cannot be made, or their observations do not fit into a message.
        """
        opened = False
        try:
            self._simulator = await self._in_thread(open_simulator, self._request)
            spec = self._simulator.spec
            _check_size(spec)
            self._pool = EnvPool(self._simulator)
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
        body = decode_env(data, ResetRequest, StepRequest, CloseRequest)
        async with self._lock:
            self._used = time.monotonic()
            if isinstance(body, CloseRequest):
                self.closed.set()
                return encode_env(body)
            seq, reply = self._last
            if body.seq == seq:
                return reply
            if body.seq != seq + 1:
                raise Conflict(f"request {body.seq} after request {seq}: a session answers them in order")
            reply = await self._execute(body)
            self._last = (body.seq, reply)
            self._used = time.monotonic()
        STEP_SECONDS.observe(time.perf_counter() - started)
        return reply

    async def _execute(self, body: Body) -> bytes:
        """Run one request; a simulator that breaks ends the session, for its state is unknown."""
        assert self._pool is not None
        broken = True
        try:
            if isinstance(body, ResetRequest):
                reply = encode_env(await self._in_thread(self._pool.reset, body))
            else:
                assert isinstance(body, StepRequest)
                result = await self._in_thread(self._pool.step, body)
                STEPS.inc(int(result.valid.sum()))
                reply = encode_env(result)
            broken = False
            return reply
        except PenstockError:
            broken = False
            raise
        finally:
            if broken:
                self.closed.set()

    async def close(self) -> None:
        """Close the simulator in its own thread."""
        async with self._lock:
            self.closed.set()
            if self._simulator is not None:
                simulator, self._simulator = self._simulator, None
                await self._in_thread(simulator.close)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    def status(self) -> dict[str, int]:
        """Counters of this session."""
        pool = self._pool
        return {
            "envs": self._request.num_envs,
            "steps": pool.num_steps if pool else 0,
            "episodes": pool.num_ended if pool else 0,
        }


def _check_size(spec: EnvSpec) -> None:
    """Raise ConfigError where a reply (current and final observations) would not fit into a message."""
    size = spec.num_envs * prod(spec.observation_shape) * np.dtype(spec.observation_dtype).itemsize
    if size > MAX_INLINE_BYTES // 2:
        raise ConfigError(
            f"{spec.num_envs} observations of '{spec.env_id}' have {size} bytes; a message takes half of "
            f"{MAX_INLINE_BYTES}: use fewer environments per session"
        )
