"""Steps of several calls, which the blocking and the asynchronous client carry out alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client import flows
from penstock.client.calls import Call, show
from penstock.client.files import Graders
from penstock.client.sending import Pause, Steps, awaits, awaits_all, complete, complete_async, runs, sends
from penstock.services.coordinator.graders import DEADLINE_S, GRACE_S
from penstock.shared.errors import Conflict, DeadlineError, Unavailable
from penstock.shared.protocol.grading import OPEN_S


def describe(name: str, *, times: int = 1) -> Call[str]:
    """One call."""
    return show(f"/{name}", str, times=times)


def patient(names: list[str]) -> Steps[list[str]]:
    """Call each name; if the server is away, pause and call ``NAME-again``. Return all replies."""
    found = []
    for name in names:
        try:
            found.append((yield describe(name)))
        except Unavailable:
            yield Pause(0.0)
            found.append((yield describe(f"{name}-again")))
    return found


def server(asked: list[str]) -> Callable[[Call[Any]], Any]:
    """Return a server that is away for `b` and refuses `c`; ``asked`` collects the paths of all calls."""

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


async def test_blocking_and_asynchronous_steps_do_the_same() -> None:
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
    assert str(inspect.signature(part.one)) == str(inspect.signature(other.one)) == "(name: 'str', *, times: 'int' = 1)"
    assert list(inspect.signature(part.many).parameters) == ["names"]


async def test_steps_without_a_call() -> None:
    def nothing() -> Steps[int]:
        yield from ()
        return 3

    async def never(call: Call[Any], /) -> Any:
        raise AssertionError

    assert complete(nothing(), server([])) == await complete_async(nothing(), never) == 3


def test_the_deadline_of_a_wait_holds_while_the_server_is_away() -> None:
    def away(call: Call[Any], /) -> Any:
        raise Unavailable("nobody there")

    with pytest.raises(DeadlineError, match="nobody there"):
        complete(flows.wait("job_1", "terminal", 0.05, patience_s=1.0), away)


def test_an_operation_is_waited_for_while_the_server_is_away() -> None:
    replies: list[Any] = [
        {"id": "op_1", "state": "pending"}, Unavailable("nobody there"), {"id": "op_1", "state": "pending"},
        Unavailable("nobody there"), {"id": "op_1", "state": "succeeded", "result": {"ready": 2}},
    ]  # fmt: skip

    def server(call: Call[Any], /) -> Any:
        reply = replies.pop(0)
        if isinstance(reply, Unavailable):
            raise reply
        return reply

    assert complete(flows.scale("job_1", "rollout", 2, timeout_s=30.0), server) == {"ready": 2}
    replies[:] = [{"id": "op_1", "state": "pending"}] + [Unavailable("nobody there")] * 9
    with pytest.raises(DeadlineError, match=r"not 2 workers .* within 0.1 s: nobody there"):
        complete(flows.scale("job_1", "rollout", 2, timeout_s=0.1), server)


def test_grader_calls_wait_as_long_as_the_server_may_take() -> None:
    seen: list[Call[Any]] = []

    def keep(call: Call[Any], /) -> Any:
        seen.append(call)

    graders = Graders(keep)
    graders.run({"type": "string_check"}, "a")
    graders.validate({"type": "string_check"})
    assert len(seen) == 2
    assert all(call.timeout_s is not None and call.timeout_s > OPEN_S + DEADLINE_S + GRACE_S for call in seen)
