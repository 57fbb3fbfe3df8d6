"""Quarantined feedback, for both clients: ``client.quarantine``. Needs the scope ``feedback:admin``."""

from __future__ import annotations

from penstock.client.calls import Call, show
from penstock.client.flows import rows
from penstock.client.results import HeldItem, HeldRow, Verdict
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncQuarantine", "Quarantine"]


def _list(job: str | None = None, *, limit: int = 100) -> Steps[list[HeldRow]]:
    """List up to ``limit`` items of a job (None: of all jobs), in the order of their ids."""
    path = "/v1/quarantine" if job is None else f"/v1/jobs/{job}/quarantine"
    return (yield from rows(HeldRow, path, "feedback_id", limit))


def _show(*place: str) -> Call[HeldItem]:
    """Show a quarantined item and its content; ``place``: the id of the item, or the ids of its job and of the item.

    Raises:
        NotFound: no such item, or not in this job.
        Conflict: the item is not quarantined any more.
    """
    return show(_path(*place), one(HeldItem))


def _release(*place: str) -> Call[Verdict]:
    """Release an item: it counts as if it arrived now. ``place`` and errors as in ``show``."""
    return Call("POST", f"{_path(*place)}/release", one(Verdict))


def _drop(*place: str) -> Call[Verdict]:
    """Reject an item permanently; ``place`` and errors as in ``show``."""
    return Call("POST", f"{_path(*place)}/drop", one(Verdict))


def _path(*place: str) -> str:
    match place:
        case (item,):
            return f"/v1/quarantine/{item}"
        case (job, item):
            return f"/v1/jobs/{job}/quarantine/{item}"
    raise TypeError(f"expected the id of an item, or of its job and of the item, got {len(place)} arguments")


class Quarantine:
    """Quarantined feedback: ``list``, ``show``, ``release`` and ``drop``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    list = runs(_list)
    show = sends(_show)
    release = sends(_release)
    drop = sends(_drop)


class AsyncQuarantine:
    """Quarantined feedback: ``list``, ``show``, ``release`` and ``drop``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    list = awaits_all(_list)
    show = awaits(_show)
    release = awaits(_release)
    drop = awaits(_drop)
