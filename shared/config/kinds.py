"""The kinds of jobs: a job file says by ``kind`` which model reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.config.evaluation_job import EvaluationJob
from penstock.shared.config.job import JobConfig

__all__ = ["KINDS", "AnyJob", "job_model", "parse_job"]

AnyJob = JobConfig | EvaluationJob

KINDS: dict[str, type[JobConfig] | type[EvaluationJob]] = {"rl": JobConfig, "evaluation": EvaluationJob}
"""What a job file may be."""


def job_model(data: Any) -> type[JobConfig] | type[EvaluationJob]:
    """The model of a job file; one without a kind trains."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return KINDS.get(kind, JobConfig) if isinstance(kind, str) else JobConfig


def parse_job(data: Mapping[str, Any], *, where: str = "job") -> AnyJob:
    """Validate a job file of any kind.

    Raises:
        ConfigError: one line per problem, each with the dotted key.
    """
    return job_model(data).parse(data, where=where)
