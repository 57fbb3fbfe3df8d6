"""Steps of several calls: the same for the client that blocks and the one that awaits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.client.calls import Call, show
from penstock.client.sending import Pause, Steps, awaits, awaits_all, complete, complete_async, runs, sends
from penstock.shared.errors import Conflict, Unavailable


def describe(name: str, *, times: int = 1) -> Call[str]:
    """One call."""
    return show(f"/{name}", str, times=times)


def patient(names: list[str]) -> Steps[list[str]]:
    """Asks for each, and again after a pause where the server is away."""
    found = []
    for name in names:
        try:
            found.append((yield describe(name)))
        except Unavailable:
            yield Pause(0.0)
            found.append((yield describe(f"{name}-again")))
    return found


def server(asked: list[str]) -> Callable[[Call[Any]], Any]:
    """Is away for `b`, refuses `c`."""

    def answer(call: Call[Any]) -> Any:
        asked.append(call.path)
        if call.path == "/b":
            raise Unavailable("away")
        if call.path == "/c":
            raise Conflict("no")
        return call.read(call.path.upper())

    return answer


class Part:
    def __init__(self, asked: list[str]) -> None:
        self._send = server(asked)

    one = sends(describe)
    many = runs(patient)


class AsyncPart:
    def __init__(self, asked: list[str]) -> None:
        answer = server(asked)

        async def send(call: Call[Any]) -> Any:
            return answer(call)

        self._send = send

    one = awaits(describe)
    many = awaits_all(patient)


async def test_both_ways_do_the_same() -> None:
    here: list[str] = []
    there: list[str] = []
    part, other = Part(here), AsyncPart(there)
    assert part.one("a", times=2) == await other.one("a", times=2) == "/A"
    assert part.many(["a", "b"]) == await other.many(["a", "b"]) == ["/A", "/B-AGAIN"]
    assert here == there == ["/a", "/a", "/b", "/b-again"]
    with pytest.raises(Conflict):
        part.many(["c"])
    with pytest.raises(Conflict):
        await other.many(["c"])
    assert part.one.__doc__ == other.one.__doc__ == "One call."


async def test_steps_without_a_call() -> None:
    def nothing() -> Steps[int]:
        yield from ()
        return 3

    async def never(call: Call[Any], /) -> Any:
        raise AssertionError

    assert complete(nothing(), server([])) == await complete_async(nothing(), never) == 3
