"""Trial of a user's code before a job is submitted: a worker imports the code and calls it once, in another process."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Finding", "TrialReply", "TrialRequest"]


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to try a user's code on one example.

    ``parts`` has sections of a job file, or names of code, by dotted key. ``prompt``, ``answer`` and ``row`` are the
    first row of the job's data. A worker ends the trial after ``limit_s``, and does not begin it after ``start_by``
    (Unix seconds), because the sender then no longer waits.
    """

    parts: dict[str, Any]
    limit_s: float
    start_by: float
    prompt: str = ""
    answer: str | None = None
    row: dict[str, Any] = {}
    judges: bool = False
    """True if the environment's objects return the reward of an episode."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag="finding"):
    """A problem with the user code that the job file names under ``key``. ``fatal`` True: the job cannot run; False:
    the code failed only on the example."""

    key: str
    text: str
    fatal: bool


class TrialReply(msgspec.Struct, frozen=True, kw_only=True):
    """All problems that the trial found; empty if there are none."""

    findings: list[Finding] = []
