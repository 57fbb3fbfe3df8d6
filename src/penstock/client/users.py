"""Stored data and consent of a user, for both clients: ``client.users``.

Needs the scope ``feedback:admin``. Users have the names that requests and feedback give them.
"""

from __future__ import annotations

from urllib.parse import quote

from penstock.client.calls import Call
from penstock.client.results import Consent, Erasure
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Pause, Send, Steps, awaits, awaits_all, runs, sends
from penstock.shared.errors import DeadlineError

__all__ = ["AsyncUsers", "Users"]

_LOOK_S = 1.0


def _consent(user: str, *, train: bool) -> Call[Consent]:
    """Set whether the user's interactions may be trained on, from now on."""
    body = b'{"train": true}' if train else b'{"train": false}'
    return Call("PUT", f"{_path(user)}/consent", one(Consent), body=body)


def _erase(user: str, *, timeout_s: float = 120.0) -> Steps[Erasure]:
    """Delete the stored data of the user and wait. Return the numbers of deleted items, and the versions that were
    trained on the data.

    Raises:
        DeadlineError: the deletion is not done within ``timeout_s``; it continues, and ``erasure`` shows its progress.
    """
    report: Erasure = yield Call("DELETE", f"{_path(user)}/data", one(Erasure))
    waited = 0.0
    while report.status != "done":
        if waited >= timeout_s:
            raise DeadlineError(f"the deletion of the user's data is not done after {timeout_s:g} s; it goes on")
        yield Pause(_LOOK_S)
        waited += _LOOK_S
        report = yield _erasure(user)
    return report


def _erasure(user: str) -> Call[Erasure]:
    """Show the progress of the deletion of the user's data. Raises NotFound: it was not requested."""
    return Call("GET", f"{_path(user)}/data", one(Erasure))


def _path(user: str) -> str:
    return f"/v1/users/{quote(user, safe='')}"


class Users:
    """Data of a user: ``consent``, ``erase`` and ``erasure``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    consent = sends(_consent)
    erase = runs(_erase)
    erasure = sends(_erasure)


class AsyncUsers:
    """Data of a user: ``consent``, ``erase`` and ``erasure``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    consent = awaits(_consent)
    erase = awaits_all(_erase)
    erasure = awaits(_erasure)
