"""Interface of the learners, and the choice of the learner for a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from penstock.services.trainer.backends.base import LearnerState
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import resolve_device
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.weights import Layout

__all__ = ["JobLearner", "open_learner"]


class JobLearner(Protocol):
    """Models of a job on one rank and the rule that trains them, as used by replicas, publishing and replays.

    Every method is a collective: all ranks call the same methods in the same order.
    """

    @property
    def base_digest(self) -> str:
        """Digest of the base weights of a published adapter; "" without one."""

    def layout(self) -> Layout:
        """Return the layout of the tensors for engines."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors for engines in the order of ``layout``. All ranks must exhaust the iterator. Read only."""

    def base_layout(self) -> Layout:
        """Return the layout of the tensors of ``take_base``."""

    def take_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield, at the first call only, an adapter's base weights that engines cannot load themselves. Read only."""

    def environment(self) -> dict[str, str]:
        """Return the properties, besides the state, that bit-identical results depend on."""

    def state(self) -> LearnerState:
        """Return a copy of everything that the next update depends on."""

    def load_state(self, state: LearnerState) -> None:
        """Restore what ``state`` returned. Raises CheckpointError."""

    def update(self, shard: BatchShard[Any], *, update_index: int) -> dict[str, float]:
        """Make one policy update and return its metrics.

        Raises:
            ProtocolError: the batch cannot be trained; nothing was changed.
            NonFiniteStep: a loss or gradient is not finite and `train.on_nonfinite` is `pause`.
        """


def open_learner(
    config: AnyTraining, collective: Collective | None = None, *, simulator: EnvSpec | None = None
) -> JobLearner:
    """Return the learner for the job's kind, on the device that ``config.placement`` names.

    Args:
        simulator: properties of the simulator: its observations and actions; required for an embodied job.

    Raises:
        ConfigError: the models cannot be built.
    """
    device = resolve_device(config.placement.device)
    if isinstance(config, JobConfig):
        return Learner(config, device=device, collective=collective)
    if simulator is None:
        raise ConfigError(
            f"simulator '{config.environment.task}' was not described: an env service has to say what it observes "
            "before the job is trained"
        )
    return EmbodiedLearner(config, simulator, device=device, collective=collective)
