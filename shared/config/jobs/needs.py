"""Optional packages that a job needs, and the services that need them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, TextJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.rewards.scorers import MathScorer, RewardModelScorer
from penstock.shared.config.rollout import ENGINE_PACKAGES, ENVIRONMENT_OF

__all__ = ["ANNOUNCED", "OPTIONAL", "Need", "needs"]

OPTIONAL = {
    "bitsandbytes": "optim-8bit",
    "math_verify": "reward",
    "megatron": "megatron",
    "peft": "lora",
    "torch": "torch",
    "verifiers": "verifiers",
}
"""Optional packages by import name, with the extra of Penstock that installs each."""
ANNOUNCED = (*OPTIONAL, *ENGINE_PACKAGES)
"""Packages whose presence a process reports in its heartbeats."""


@dataclass(frozen=True)
class Need:
    """Package that a job requires: ``key`` in the job file needs ``package`` in the processes of ``service``.

    ``package`` is an optional package of Penstock, which every process of the service needs, or an engine. One process
    with the engine suffices, because rollout workers without the engine do not take the job's work.
    """

    key: str
    package: str
    service: str

    @property
    def extra(self) -> str:
        """Name of the pip extra that installs the package: EXTRA in ``pip install penstock[EXTRA]``."""
        return OPTIONAL[self.package]

    @property
    def is_engine(self) -> bool:
        """True if the package is a rollout engine. For an engine, one worker that has the package is enough. Any other
        package must be installed for every worker of the service."""
        return self.package in ENVIRONMENT_OF


def needs(spec: AnyJob) -> list[Need]:
    """Return the optional packages that a job needs, as far as its job file shows them."""
    if isinstance(spec, EmbodiedJob):
        return []
    found = [Need("rollout.engine", spec.rollout.engine, "rollout")] if spec.rollout.engine in ENVIRONMENT_OF else []
    if isinstance(spec, ServingJob):
        return found
    found += _of_rollouts(spec)
    if isinstance(spec, JobConfig):
        found += _of_training(spec)
    return found


def _of_rollouts(spec: TextJob) -> Iterator[Need]:
    if spec.model.lora is not None:
        yield Need("model.lora", "peft", "rollout")
    for place, scorer in enumerate(spec.reward.scorers):
        if isinstance(scorer, MathScorer):
            yield Need(f"reward.scorers[{place}]", "math_verify", "reward")
        if isinstance(scorer, RewardModelScorer):
            yield Need(f"reward.scorers[{place}]", "torch", "reward")
    if isinstance(spec.environment, VerifiersConfig) and spec.environment.python is None:
        yield Need("environment", "verifiers", "env")


def _of_training(spec: JobConfig) -> Iterator[Need]:
    critic = spec.algorithm.critic
    if spec.model.lora is not None:
        yield Need("model.lora", "peft", "trainer")
    if spec.optimizer.type == "adamw_8bit":
        yield Need("optimizer.type", "bitsandbytes", "trainer")
    if critic is not None and critic.optimizer.type == "adamw_8bit":
        yield Need("algorithm.critic.optimizer.type", "bitsandbytes", "trainer")
    if spec.backend.type == "megatron":
        yield Need("backend.type", "megatron", "trainer")
