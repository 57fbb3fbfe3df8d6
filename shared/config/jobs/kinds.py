"""Kinds of jobs: ``kind`` of a job file selects the config class that validates it."""

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
"""Jobs of a language model with a data section. An online job is a subclass of `JobConfig` and trained in the same
way."""
AnyTraining = JobConfig | EmbodiedJob
"""Jobs that have a trainer, a ledger and checkpoints."""
AnyJob = TextJob | EmbodiedJob | ServingJob

KINDS: dict[str, type[AnyJob]] = {
    "rl": JobConfig,
    "online_rl": OnlineJob,
    "embodied": EmbodiedJob,
    "evaluation": EvaluationJob,
    "serving": ServingJob,
}
"""Config class that validates a job file, by its kind."""


def job_model(data: Any) -> type[AnyJob]:
    """Return the config class for the kind of the job file ``data``; if the kind is missing or unknown, the class for
    ``rl``."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return KINDS.get(kind, JobConfig) if isinstance(kind, str) else JobConfig


def trains(data: Any) -> bool:
    """Return True if jobs of this job file's kind have a trainer, a ledger and checkpoints."""
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
        ConfigError: as ``parse_job``, or the job is of a kind that does not train.
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
