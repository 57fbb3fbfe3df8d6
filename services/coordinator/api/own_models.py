"""What keys of some models reach: the jobs of these, and whatever an id leads to one of them."""

from __future__ import annotations

from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.api.auth import Caller
from penstock.services.coordinator.api.replies import HttpProblem

__all__ = ["check_job", "check_model", "jobs_of", "reaches_all"]


def check_model(caller: Caller, name: str, job: str) -> None:
    """Raises HttpProblem: 403 the key is for other models than ``name``, which is ``job`` ('': one that is not yet)."""
    if not caller.may_use(name, job):
        raise HttpProblem(403, "other_model", f"this key is for other models than '{name}': {_models(caller)}")


async def check_job(backend: Backend, caller: Caller, job: str) -> None:
    """Look whether a job is of the caller's models.

    Raises:
        HttpProblem: 403 it is not.
        NotFound: a key for some models asks for a job that does not exist.
        Unavailable: it cannot be read.
    """
    if caller.models is not None:
        check_model(caller, (await backend.control.get(job)).name, job)


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
