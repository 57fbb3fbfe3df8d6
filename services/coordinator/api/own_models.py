"""Reach of keys for some models: the jobs of these, and ids that lead to one of them."""

from __future__ import annotations

from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.errors import NotFound

__all__ = ["check_job", "check_name", "jobs_of", "no_model", "reaches_all"]


def check_name(caller: Caller, name: str) -> None:
    """Raises HttpProblem: 403 the key is for other models than ``name``, which is that of a job to be."""
    if not caller.may_use(name, ""):
        raise HttpProblem(403, "other_model", f"this key is for other models than '{name}': {_models(caller)}")


def no_model(name: str) -> HttpProblem:
    """The answer to a name that no running job has, or one that the key does not reach: the same, to the letter."""
    detail = f"no running job serves a model '{name[:80]}'; GET /v1/models lists those that this key reaches"
    return HttpProblem(404, "model_not_found", detail)


async def check_job(backend: Backend, caller: Caller, job: str, missing: str = "") -> None:
    """Look whether a job is of the caller's models; ``missing`` is said where it is not, as if there were none.

    Raises:
        NotFound: it is not, or does not exist.
        Unavailable: it cannot be read.
    """
    if caller.models is not None and not caller.may_use((await backend.control.get(job)).name, job):
        raise NotFound(missing or f"no job '{job}'")


async def jobs_of(backend: Backend, caller: Caller) -> list[str] | None:
    """Ids of all jobs of the caller's models; None: of all models. Raises Unavailable."""
    if caller.models is None:
        return None
    return [entry.id for entry in await backend.control.job_entries(caller.models)]


def reaches_all(caller: Caller) -> HttpProblem:
    """The refusal of what is not of one model."""
    detail = f"this key is for some models alone ({_models(caller)}), and what was asked for is not of one model"
    return HttpProblem(403, "other_model", detail)


def _models(caller: Caller) -> str:
    return ", ".join(sorted(caller.models or ()))
