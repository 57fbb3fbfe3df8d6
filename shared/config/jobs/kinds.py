"""The kinds of jobs: a job file says by ``kind`` which model reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.jobs.training_job import TrainingJob
from penstock.shared.errors import ConfigError

__all__ = [
    "KINDS",
    "AnyJob",
    "AnyTraining",
    "TextJob",
    "job_model",
    "parse_job",
    "parse_training",
    "text_job",
    "trains",
]

TextJob = JobConfig | EvaluationJob
"""Jobs that have a language model answer prompts of theirs. An online job is a `JobConfig`, too: it is trained like
any other."""
AnyTraining = JobConfig | EmbodiedJob
"""Jobs with a trainer, a ledger and checkpoints."""
AnyJob = TextJob | EmbodiedJob | ServingJob

KINDS: dict[str, type[AnyJob]] = {
    "rl": JobConfig,
    "online_rl": OnlineJob,
    "embodied": EmbodiedJob,
    "evaluation": EvaluationJob,
    "serving": ServingJob,
}
"""Kinds of jobs that a file may describe."""


def job_model(data: Any) -> type[AnyJob]:
    """The model of a job file; one without a kind trains."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return KINDS.get(kind, JobConfig) if isinstance(kind, str) else JobConfig


def trains(data: Any) -> bool:
    """True if a job file is of a kind that has a trainer, a ledger and checkpoints."""
    return issubclass(job_model(data), TrainingJob)


def parse_job(data: Mapping[str, Any], *, where: str = "job") -> AnyJob:
    """Validate a job file of any kind.

    Raises:
        ConfigError: one line per problem, each with the dotted key.
    """
    return job_model(data).parse(data, where=where)


def parse_training(data: Mapping[str, Any], *, where: str = "job") -> AnyTraining:
    """Validate a job file of a kind that trains.

    Raises:
        ConfigError: as ``parse_job``, or it is of another kind.
    """
    config = parse_job(data, where=where)
    if not isinstance(config, AnyTraining):
        raise ConfigError(f"{where}: a job of kind '{config.kind}' trains nothing")
    return config


def text_job(data: Mapping[str, Any]) -> JobConfig:
    """Validate a job file of a language model that trains. Raises ConfigError."""
    config = parse_training(data)
    if not isinstance(config, JobConfig):
        raise ConfigError(f"a job of kind '{config.kind}' trains no language model")
    return config
