"""Feedback that is held back, for both clients: ``client.quarantine``. Needs the scope ``feedback:admin``."""

from __future__ import annotations

from penstock.client.calls import Call, show
from penstock.client.flows import rows
from penstock.client.results import HeldItem, HeldRow, Verdict
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncQuarantine", "Quarantine"]


def _list(job: str | None = None, *, limit: int = 100) -> Steps[list[HeldRow]]:
    """Up to ``limit`` items of a job (None: of all), in the order of their ids."""
    path = "/v1/quarantine" if job is None else f"/v1/jobs/{job}/quarantine"
    return (yield from rows(HeldRow, path, "feedback_id", limit))


def _show(*place: str) -> Call[HeldItem]:
    """One of them, with what it says; ``place``: its id, or its job and its id.

    Raises:
        NotFound: there is none, or not in this job.
        Conflict: it is not held any more.
    """
    return show(_path(*place), one(HeldItem))


def _release(*place: str) -> Call[Verdict]:
    """Let it count; ``place`` and errors as of ``show``."""
    return Call("POST", f"{_path(*place)}/release", one(Verdict))


def _drop(*place: str) -> Call[Verdict]:
    """Reject it for good; ``place`` and errors as of ``show``."""
    return Call("POST", f"{_path(*place)}/drop", one(Verdict))


def _path(*place: str) -> str:
    match place:
        case (item,):
            return f"/v1/quarantine/{item}"
        case (job, item):
            return f"/v1/jobs/{job}/quarantine/{item}"
    raise TypeError(f"expected the id of an item, or of its job and of the item, got {len(place)} arguments")


class Quarantine:
    """``list``, ``show``, ``release`` and ``drop`` feedback that is held back."""

    def __init__(self, send: Send) -> None:
        self._send = send

    list = runs(_list)
    show = sends(_show)
    release = sends(_release)
    drop = sends(_drop)


class AsyncQuarantine:
    """``list``, ``show``, ``release`` and ``drop`` feedback that is held back."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    list = awaits_all(_list)
    show = awaits(_show)
    release = awaits(_release)
    drop = awaits(_drop)
