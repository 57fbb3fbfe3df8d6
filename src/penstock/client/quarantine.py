"""Feedback that is held back, for both clients: ``client.quarantine``. Needs the scope ``feedback:admin``."""

from __future__ import annotations

from penstock.client.calls import Call, Row, Rows, post, show
from penstock.client.flows import rows
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncQuarantine", "Quarantine"]


def _list(job: str | None = None, *, limit: int = 100) -> Steps[Rows]:
    """Up to ``limit`` items of a job (None: of all), in the order of their ids."""
    path = "/v1/quarantine" if job is None else f"/v1/jobs/{job}/quarantine"
    return (yield from rows(path, "feedback_id", limit))


def _show(job: str, item: str) -> Call[Row]:
    """One of them, with what it says. Raises NotFound, Conflict: it is not held any more."""
    return show(_path(job, item), dict)


def _release(job: str, item: str) -> Call[Row]:
    """Let it count. Raises NotFound, Conflict: it is not held any more."""
    return post(f"{_path(job, item)}/release")


def _drop(job: str, item: str) -> Call[Row]:
    """Reject it for good. Raises NotFound, Conflict: it is not held any more."""
    return post(f"{_path(job, item)}/drop")


def _path(job: str, item: str) -> str:
    return f"/v1/jobs/{job}/quarantine/{item}"


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
