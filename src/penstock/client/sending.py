"""Sends the calls of both clients, blocking or with asyncio; each call is described once, for both clients.

``sends`` or ``awaits`` turns a function that returns a ``Call`` into a method; ``runs`` or ``awaits_all`` does so for a
generator that yields calls (and pauses) and returns the result. Errors of a call are raised at its ``yield``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from penstock.client.calls import Call
from penstock.shared.errors import PenstockError

__all__ = ["AsyncSend", "Pause", "Send", "Steps", "awaits", "awaits_all", "complete", "complete_async", "runs", "sends"]

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Send(Protocol):
    """Callable that sends a call and reads its reply, with the client's retries."""

    def __call__(self, call: Call[T], /) -> T:
        """Send the call. Raises the errors of ``penstock.shared.errors``."""
        ...


class AsyncSend(Protocol):
    """Asyncio version of ``Send``."""

    async def __call__(self, call: Call[T], /) -> T:
        """Send the call. Raises the errors of ``penstock.shared.errors``."""
        ...


@dataclass(frozen=True)
class Pause:
    """Step that waits before the next call."""

    seconds: float


Steps = Generator[Call[Any] | Pause, Any, T]
"""Generator of calls that depend on each other's replies, and of pauses; it returns the result."""


class _Walk(Generic[T]):
    """Drives a generator of steps. The caller performs ``step``, sets ``reply`` or ``error``, and calls ``goes_on``
    again."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.step: Call[Any] | Pause
        self.reply: Any = None
        self.error: PenstockError | None = None
        self.result: T

    def goes_on(self) -> bool:
        """Advance to the next step and return True; return False at the end, with ``result`` set."""
        reply, error, self.reply, self.error = self.reply, self.error, None, None
        try:
            self.step = self._steps.send(reply) if error is None else self._steps.throw(error)
        except StopIteration as end:
            self.result = end.value
            return False
        return True


def complete(steps: Steps[T], send: Send) -> T:
    """Perform ``steps`` and return their result."""
    walk = _Walk(steps)
    while walk.goes_on():
        if isinstance(walk.step, Pause):
            time.sleep(walk.step.seconds)
            continue
        try:
            walk.reply = send(walk.step)
        except PenstockError as error:
            walk.error = error
    return walk.result


async def complete_async(steps: Steps[T], send: AsyncSend) -> T:
    """Perform ``steps`` as ``complete`` does, in asyncio."""
    walk = _Walk(steps)
    while walk.goes_on():
        if isinstance(walk.step, Pause):
            await asyncio.sleep(walk.step.seconds)
            continue
        try:
            walk.reply = await send(walk.step)
        except PenstockError as error:
            walk.error = error
    return walk.result


def sends(describe: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a blocking method that sends the call that ``describe`` returns, through ``self._send``."""

    @_like(describe)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        send: Send = self._send
        return send(describe(*args, **kwargs))

    return method


def awaits(describe: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """Return an asyncio method that sends the call that ``describe`` returns, through ``self._send``."""

    @_like(describe)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        send: AsyncSend = self._send
        return await send(describe(*args, **kwargs))

    return method


def runs(describe: Callable[P, Steps[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a blocking method that performs the steps that ``describe`` yields, and returns their result."""

    @_like(describe)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return complete(describe(*args, **kwargs), self._send)

    return method


def awaits_all(describe: Callable[P, Steps[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """Return an asyncio method that performs the steps that ``describe`` yields, and returns their result."""

    @_like(describe)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await complete_async(describe(*args, **kwargs), self._send)

    return method


def _like(describe: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator that gives a method the docstring and the signature of ``describe``, for ``help()``."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *inspect.signature(describe).parameters.values()]

    def dress(method: F) -> F:
        functools.update_wrapper(method, describe)
        setattr(method, "__signature__", inspect.Signature(parameters))  # noqa: B010
        return method

    return dress
