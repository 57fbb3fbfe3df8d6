"""Which version of a policy is served, for both clients: ``client.versions``."""

from __future__ import annotations

from penstock.client.calls import Call, Row, post
from penstock.client.flows import until_done
from penstock.client.results import Versions as Served
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncVersions", "Versions"]


def _show(job: str) -> Call[Served]:
    """``newest``, ``served``, and ``canary``: the version on trial and what was said of both arms, or None."""
    return Call("GET", f"/v1/jobs/{job}/versions", one(Served))


def _promote(job: str, version: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Have the newest version served whatever was measured of it; needs the scope ``admin``.

    Raises:
        Conflict: it is not the newest one, or the job has no gate, or has ended.
        DeadlineError: the ledger does not say so within ``timeout_s``.
    """
    asked = yield post(f"/v1/jobs/{job}/promote", {"version": version})
    return (yield from until_done(job, asked, timeout_s, f"version {version} of job '{job}' is not promoted"))


def _roll_back(job: str, checkpoint: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Give up the updates after a checkpoint; the ``version`` under which its weights go on.

    Raises:
        Conflict: there is no such checkpoint, nothing was trained after it, or the log does not reach back to it.
        DeadlineError: the trainer is not there within ``timeout_s``; it goes back when it can.
    """
    asked = yield post(f"/v1/jobs/{job}/rollback", {"checkpoint": checkpoint})
    return (yield from until_done(job, asked, timeout_s, f"job '{job}' is not back at checkpoint {checkpoint}"))


class Versions:
    """``show`` which version of a job is served, ``promote`` its newest one, ``roll_back`` to a checkpoint."""

    def __init__(self, send: Send) -> None:
        self._send = send

    show = sends(_show)
    promote = runs(_promote)
    roll_back = runs(_roll_back)


class AsyncVersions:
    """``show`` which version of a job is served, ``promote`` its newest one, ``roll_back`` to a checkpoint."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    show = awaits(_show)
    promote = awaits_all(_promote)
    roll_back = awaits_all(_roll_back)
