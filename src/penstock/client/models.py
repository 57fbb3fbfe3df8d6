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
    """List the models: training jobs and serving jobs under their names, and checkpoints. The first request to a
    checkpoint starts a serving job for it."""
    return Call("GET", "/v1/models", many(Model))


def _show(model: str) -> Call[Model]:
    """Show a model, by name or id of its job. Raises NotFound."""
    return Call("GET", _path(model), one(Model))


def _versions(model: str) -> Call[list[ModelVersion]]:
    """List a model's versions, newest first: the newest version, the served version, and all with a checkpoint. Raises
    NotFound."""
    return Call("GET", f"{_path(model)}/versions", many(ModelVersion))


def _promote(model: str, version: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Serve the newest version of a model regardless of its evaluation; needs the scope ``admin``.

    Raises:
        Conflict: the version is not the newest one, or the job has no promotion gate.
        DeadlineError: the ledger did not record the promotion within ``timeout_s``.
    """
    found: Model = yield _show(model)
    asked = yield post(f"{_path(found.job)}/promote", {"version": version})
    return (yield from until_done(found.job, asked, timeout_s, f"version {version} of '{model}' is not promoted"))


def _roll_back(model: str, version: int, *, timeout_s: float = 120.0) -> Steps[Row]:
    """Discard all updates after ``version`` and continue training from the weights of that version. The field
    ``version`` of the result is the new version number.

    Raises:
        NotFound: no checkpoint has the version.
        Conflict: nothing was trained after the version, or the log does not reach back to it.
        DeadlineError: the trainer did not respond within ``timeout_s``; it rolls back once it can.
    """
    found: Model = yield _show(model)
    asked = yield post(f"{_path(found.job)}/rollback", {"version": version})
    return (yield from until_done(found.job, asked, timeout_s, f"'{model}' is not back at version {version}"))


def _path(model: str) -> str:
    return f"/v1/models/{quote(model, safe='')}"


class Models:
    """Models: ``list`` and ``show`` them, list their ``versions``, ``promote`` the newest, ``roll_back`` to another."""

    def __init__(self, send: Send) -> None:
        self._send = send

    list = sends(_list)
    show = sends(_show)
    versions = sends(_versions)
    promote = runs(_promote)
    roll_back = runs(_roll_back)


class AsyncModels:
    """Models: ``list`` and ``show`` them, list their ``versions``, ``promote`` the newest, ``roll_back`` to another."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    list = awaits(_list)
    show = awaits(_show)
    versions = awaits(_versions)
    promote = awaits_all(_promote)
    roll_back = awaits_all(_roll_back)
