"""How both clients do what a call describes: one description, two ways to wait for it.

A function that returns a ``Call`` becomes a method by ``sends`` or ``awaits``; a generator that yields calls (and
pauses) and returns what they came to, by ``runs`` or ``awaits_all``. Errors of a call are raised where it was yielded.
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
    """Sends a call and reads its reply, with the client's retries."""

    def __call__(self, call: Call[T], /) -> T:
        """Raises the errors of ``penstock.shared.errors``."""
        ...


class AsyncSend(Protocol):
    """As ``Send``, awaited."""

    async def __call__(self, call: Call[T], /) -> T:
        """Raises the errors of ``penstock.shared.errors``."""
        ...


@dataclass(frozen=True)
class Pause:
    """Wait a while before the next call."""

    seconds: float


Steps = Generator[Call[Any] | Pause, Any, T]
"""Calls that depend on each other's replies."""


class _Walk(Generic[T]):
    """Where steps have come to: ``step`` is to be done next, with ``reply`` or ``error`` of it they go on."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.step: Call[Any] | Pause
        self.reply: Any = None
        self.error: PenstockError | None = None
        self.result: T

    def goes_on(self) -> bool:
        """True if there is another step; else ``result`` is there."""
        reply, error, self.reply, self.error = self.reply, self.error, None, None
        try:
            self.step = self._steps.send(reply) if error is None else self._steps.throw(error)
        except StopIteration as end:
            self.result = end.value
            return False
        return True


def complete(steps: Steps[T], send: Send) -> T:
    """Do what ``steps`` ask for, and return what they come to."""
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
    """As ``complete``, awaited."""
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
    """A method of a part of the client that blocks; the part has ``_send``."""

    @_like(describe)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        send: Send = self._send
        return send(describe(*args, **kwargs))

    return method


def awaits(describe: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """A method of a part of the asyncio client; the part has ``_send``."""

    @_like(describe)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        send: AsyncSend = self._send
        return await send(describe(*args, **kwargs))

    return method


def runs(describe: Callable[P, Steps[T]]) -> Callable[Concatenate[Any, P], T]:
    """As ``sends``, for several calls."""

    @_like(describe)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return complete(describe(*args, **kwargs), self._send)

    return method


def awaits_all(describe: Callable[P, Steps[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """As ``awaits``, for several calls."""

    @_like(describe)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await complete_async(describe(*args, **kwargs), self._send)

    return method


def _like(describe: Callable[..., Any]) -> Callable[[F], F]:
    """A method with the docstring and the parameters of ``describe``, behind ``self``: what ``help`` shows of it."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *inspect.signature(describe).parameters.values()]

    def dress(method: F) -> F:
        functools.update_wrapper(method, describe)
        setattr(method, "__signature__", inspect.Signature(parameters))  # noqa: B010
        return method

    return dress
