"""Served policy versions of a job, for both clients: ``client.versions``."""

from __future__ import annotations

from penstock.client.calls import Call, Row, post
from penstock.client.flows import until_done
from penstock.client.results import Versions as Served
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncVersions", "Versions"]


def _show(job: str) -> Call[Served]:
    """Return the ``newest`` and the ``served`` version, and ``canary``: the trial of a canary version, or None."""
    return Call("GET", f"/v1/jobs/{job}/versions", one(Served))


def _promote(job: str, version: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Serve the newest version regardless of its evaluation; needs the scope ``admin``.

    Raises:
        Conflict: the version is not the newest one, the job has no promotion gate, or it has ended.
        DeadlineError: the ledger did not record the promotion within ``timeout_s``.
    """
    asked = yield post(f"/v1/jobs/{job}/promote", {"version": version})
    return (yield from until_done(job, asked, timeout_s, f"version {version} of job '{job}' is not promoted"))


def _roll_back(job: str, checkpoint: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Discard all updates after a checkpoint. Training continues from its weights under a new version number, returned
    as ``version``.

    Raises:
        Conflict: no such checkpoint, nothing was trained after it, or the log does not reach back to it.
        DeadlineError: the trainer did not respond within ``timeout_s``; it rolls back once it can.
    """
    asked = yield post(f"/v1/jobs/{job}/rollback", {"checkpoint": checkpoint})
    return (yield from until_done(job, asked, timeout_s, f"job '{job}' is not back at checkpoint {checkpoint}"))


class Versions:
    """Served versions: ``show`` them, ``promote`` the newest, ``roll_back`` to a checkpoint."""

    def __init__(self, send: Send) -> None:
        self._send = send

    show = sends(_show)
    promote = runs(_promote)
    roll_back = runs(_roll_back)


class AsyncVersions:
    """Served versions: ``show`` them, ``promote`` the newest, ``roll_back`` to a checkpoint."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    show = awaits(_show)
    promote = awaits_all(_promote)
    roll_back = awaits_all(_roll_back)
