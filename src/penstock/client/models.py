"""Jobs as models, and their versions, for both clients: ``client.models``."""

from __future__ import annotations

from urllib.parse import quote

from penstock.client.calls import Call, Row, post
from penstock.client.flows import until_done
from penstock.client.results import Model, ModelVersion
from penstock.client.results.reading import many, one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncModels", "Models"]


def _list() -> Call[list[Model]]:
    """Every job that trains and every deployment, under its name, and what is deployed when somebody asks for it."""
    return Call("GET", "/v1/models", many(Model))


def _show(model: str) -> Call[Model]:
    """One of them, by name or id of the job. Raises NotFound."""
    return Call("GET", _path(model), one(Model))


def _versions(model: str) -> Call[list[ModelVersion]]:
    """Its newest version, the one that is served, and those of its checkpoints; newest first. Raises NotFound."""
    return Call("GET", f"{_path(model)}/versions", many(ModelVersion))


def _promote(model: str, version: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Have the newest version of a model served whatever was measured of it; needs the scope ``admin``.

    Raises:
        Conflict: it is not the newest one, or the job has no gate.
        DeadlineError: the ledger does not say so within ``timeout_s``.
    """
    found: Model = yield _show(model)
    asked = yield post(f"{_path(found.job)}/promote", {"version": version})
    return (yield from until_done(found.job, asked, timeout_s, f"version {version} of '{model}' is not promoted"))


def _roll_back(model: str, version: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Give up the updates after a version that a checkpoint has; the ``version`` under which its weights go on.

    Raises:
        NotFound: no checkpoint has it.
        Conflict: nothing was trained after it, or the log does not reach back to it.
        DeadlineError: the trainer is not there within ``timeout_s``; it goes back when it can.
    """
    found: Model = yield _show(model)
    asked = yield post(f"{_path(found.job)}/rollback", {"version": version})
    return (yield from until_done(found.job, asked, timeout_s, f"'{model}' is not back at version {version}"))


def _path(model: str) -> str:
    return f"/v1/models/{quote(model, safe='')}"


class Models:
    """``list`` and ``show`` models, their ``versions``; ``promote`` the newest one, ``roll_back`` to another."""

    def __init__(self, send: Send) -> None:
        self._send = send

    list = sends(_list)
    show = sends(_show)
    versions = sends(_versions)
    promote = runs(_promote)
    roll_back = runs(_roll_back)


class AsyncModels:
    """``list`` and ``show`` models, their ``versions``; ``promote`` the newest one, ``roll_back`` to another."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    list = awaits(_list)
    show = awaits(_show)
    versions = awaits(_versions)
    promote = awaits_all(_promote)
    roll_back = awaits_all(_roll_back)
