"""Dead letters of jobs, for both clients: ``client.dead_letters``."""

from __future__ import annotations

from penstock.client.calls import Call, nothing, operation, post, result_of, show
from penstock.client.flows import rows
from penstock.client.results import DeadLetter, DeadLetterReplay, DeadLetterRow
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncDeadLetters", "DeadLetters"]

_HOLD_S = 10.0


def _list(job: str, *, limit: int = 100) -> Steps[list[DeadLetterRow]]:
    """List up to ``limit`` dead letters, oldest first."""
    return (yield from rows(DeadLetterRow, f"/v1/jobs/{job}/dead-letters", "id", limit))


def _show(job: str, id: int) -> Call[DeadLetter]:
    """Show a dead letter with headers and content. Raises NotFound."""
    return show(_path(job, id), one(DeadLetter))


def _replay(job: str, id: int) -> Steps[DeadLetterReplay]:
    """Retry a dead letter. Return the new ``draw`` of its prompt, or the number of its messages that were ``stored``
    again.

    Raises NotFound, Conflict: the job does not draw prompts now, or still cannot decode the message.
    """
    asked = yield post(f"{_path(job, id)}/replay")
    while asked["state"] == "pending":
        asked = yield operation(job, asked["id"], _HOLD_S)
    return one(DeadLetterReplay)(result_of(asked))


def _drop(job: str, id: int) -> Call[None]:
    """Delete a dead letter. Raises NotFound."""
    return Call("DELETE", _path(job, id), nothing)


def _path(job: str, id: int) -> str:
    return f"/v1/jobs/{job}/dead-letters/{id}"


class DeadLetters:
    """Dead letters of a job: ``list``, ``show``, ``replay`` and ``drop``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    list = runs(_list)
    show = sends(_show)
    replay = runs(_replay)
    drop = sends(_drop)


class AsyncDeadLetters:
    """Dead letters of a job: ``list``, ``show``, ``replay`` and ``drop``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    list = awaits_all(_list)
    show = awaits(_show)
    replay = awaits_all(_replay)
    drop = awaits(_drop)
