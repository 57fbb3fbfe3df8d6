"""Checks of keys that are restricted to some models, and so may use only the jobs of these models."""

from __future__ import annotations

from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.errors import NotFound

__all__ = ["check_job", "check_name", "jobs_of", "no_model", "reaches_all"]


def check_name(caller: Caller, name: str) -> None:
    """Raise HttpProblem (403) if the key does not allow ``name``, the name of a new job."""
    if not caller.may_use(name, ""):
        raise HttpProblem(403, "other_model", f"this key is for other models than '{name}': {_models(caller)}")


def no_model(name: str) -> HttpProblem:
    """Return the error for a model that is unknown, or that the key may not use; the text does not reveal which."""
    detail = f"no running job serves a model '{name[:80]}'; GET /v1/models lists those that this key reaches"
    return HttpProblem(404, "model_not_found", detail)


async def check_job(backend: Backend, caller: Caller, job: str, missing: str = "") -> None:
    """Check that the caller's key may use a job. A key without a restriction to models may use every job.

    Raises:
        NotFound: the key may not use the job (with the text ``missing``), or the job does not exist.
        Unavailable: the job cannot be read.
    """
    if caller.models is not None and not caller.may_use((await backend.jobs.get(job)).name, job):
        raise NotFound(missing or f"no job '{job}'")


async def jobs_of(backend: Backend, caller: Caller) -> list[str] | None:
    """Return the ids of the jobs that the caller's key may use; None if it may use all. Raises Unavailable."""
    if caller.models is None:
        return None
    return [entry.id for entry in (await backend.jobs.index()).of_models(caller.models)]


def reaches_all(caller: Caller) -> HttpProblem:
    """Return the error (403) for a key that is restricted to some models, on a route that concerns all models. This
    function checks neither condition: call it only if both hold."""
    detail = f"this key is for some models alone ({_models(caller)}), and the request does not name one of them"
    return HttpProblem(403, "other_model", detail)


def _models(caller: Caller) -> str:
    return ", ".join(sorted(caller.models or ()))
