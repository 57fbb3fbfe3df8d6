"""Learner of an embodied job on one rank: the policy and the update rule that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.services.trainer.backends.base import BackendState, LearnerState
from penstock.services.trainer.batch.episodes import EpisodeColumns, episode_columns, episode_facts
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.learners.imitation import imitate
from penstock.services.trainer.optimizer import check_fits, copy_into
from penstock.services.trainer.random_state import random_state, set_random_state
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.services.trainer.update_rules.episode_grpo import EpisodeGRPORule
from penstock.services.trainer.update_rules.episode_ppo import EpisodePPORule
from penstock.services.trainer.update_rules.on_policy import NonFiniteStep
from penstock.services.trainer.update_rules.soft_actor_critic import SoftActorCriticRule
from penstock.shared.config.embodied import EpisodePPOConfig, PolicyConfig, SoftActorCriticConfig
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.data.demonstrations import check_demonstrations, read_demonstrations
from penstock.shared.errors import CheckpointError, ConfigError, DataError, ProtocolError
from penstock.shared.models.episode_policy import EpisodePolicy, SquashedPolicy, build_policy
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import derive_seed
from penstock.shared.protocol.weights import Layout
from penstock.shared.weights import layout_of

__all__ = ["EmbodiedLearner"]

DESCRIPTION = "config.json"
"""File of a checkpoint that describes its policy and the policy's observation and action space."""


class EmbodiedLearner:
    """Trains on whole batches: every rank holds the policy, gets all groups, and computes its share of each step.

    Every method is a collective: all ranks call the same methods in the same order.

    Args:
        config: the job; its seed determines the initial weights.
        spec: properties of the simulator: its observations and actions.
        device: device of the networks.
        collective: ranks that share a batch.

    Raises:
        ConfigError: the policy does not fit the simulator, the replay buffer exceeds its byte limit or the memory, or
            an optimizer is not installed.
    """

    base_digest = ""
    """Empty: rollout workers need no weights besides the published ones."""

    def __init__(
        self, config: EmbodiedJob, spec: EnvSpec, *, device: str = "cpu", collective: Collective | None = None
    ) -> None:
        self._config, self._spec, self._device = config, spec, torch.device(device)
        policy = build_policy(
            config.policy, spec, action_chunk=config.environment.action_chunk,
            seed=derive_seed(config.seed, "policy"),
        )  # fmt: skip
        self._collective = collective or Alone()
        self.policy = policy.to(self._device)
        self._rule = _open_rule(config, self.policy, self._collective)

    def layout(self) -> Layout:
        """Return the layout of the policy's weights and of its observation statistics."""
        return layout_of(self.weights())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors for rollout workers in the order of ``layout``. Read only."""
        return iter(self.policy.state_dict().items())

    def base_layout(self) -> Layout:
        """Return an empty layout, because rollout workers need no base weights."""
        return layout_of(())

    def take_base(self) -> Iterator[tuple[str, Tensor]]:
        """Return an empty iterator, because rollout workers need no base weights."""
        return iter(())

    def environment(self) -> dict[str, str]:
        """Return the properties, besides the state, that bit-identical results depend on."""
        pins = describe_environment(dtype="float32", device=str(self._device))
        return pins | {"ranks": str(self._collective.size)}

    def state(self) -> LearnerState:
        """Return a copy of everything that the next update depends on, including the replay buffer."""
        policy = BackendState(
            weights={name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights()},
            optimizer={},
            reference={},
            rng=random_state(self._device),
            files={DESCRIPTION: msgspec.json.format(msgspec.json.encode(self._description()))},
            environment=self.environment(),
        )
        columns = self._rule.columns if isinstance(self._rule, SoftActorCriticRule) else frozenset[str]()
        return LearnerState(models={"policy": policy}, rule=self._rule.state(), columns=columns)

    def load_state(self, state: LearnerState) -> None:
        """Restore what ``state`` returned.

        Raises:
            CheckpointError: another space, policy or algorithm; nothing was loaded.
        """
        saved = state.models["policy"]
        self._check_description(saved.files.get(DESCRIPTION, b"{}"))
        own = dict(self.weights())
        check_fits(own, saved.weights, what="policy")
        self._rule.load_state(state.rule)
        copy_into(own, saved.weights, what="policy")
        set_random_state(saved.rng, self._device)

    def update(self, shard: BatchShard[EpisodeGroup], *, update_index: int) -> dict[str, float]:
        """Make one policy update on a batch of which every rank holds all groups.

        The observation statistics include the batch only after its last step, so that a version is trained with the
        statistics with which it acted.

        Args:
            update_index: number of updates before this one in the lineage.

        Returns:
            Metrics, the same on every rank. `reward/mean` is the mean return, `success/rate` the share of episodes that
            solved the task, `episode/length` the number of executed actions. `mismatch/*` compares trainer and rollout
            worker per action component, before any step.

        Raises:
            ProtocolError: every episode failed, or actions or observations do not fit the policy's space; nothing was
                changed.
            NonFiniteStep: a loss or gradient is not finite and `train.on_nonfinite` is `pause`.
        """
        assert shard.positions == list(range(shard.num_groups)), "every rank holds the whole batch"
        columns = episode_columns(shard.groups)
        self._check_space(columns)
        report = self._rule.update(columns, update_index=update_index)
        vectors = {name: torch.from_numpy(columns.observations[name]) for name in self.policy.vectors}
        self.policy.observe({name: column.to(self._device) for name, column in vectors.items()})
        return episode_facts(columns) | report

    def warm_start(self, on_pass: Callable[[int, float], None] = lambda number, loss: None) -> None:
        """Train on the job's demonstrations, if it has any; see ``imitation.imitate``.

        Raises:
            DataError: the file cannot be read, or its numbers make the loss non-finite.
            ConfigError: the demonstrations come from another space.
        """
        warm = self._config.warm_start
        if warm is None:
            return
        demonstrations = read_demonstrations(Path(warm.demonstrations))
        check_demonstrations(demonstrations, self.policy.observed, self._spec)
        seed = derive_seed(self._config.seed, "warm_start")
        try:
            imitate(self.policy, demonstrations, warm, seed=seed, collective=self._collective, on_pass=on_pass)
        except NonFiniteStep as error:
            raise DataError(f"{warm.demonstrations}: the policy cannot learn from it: {error.reason}") from None

    def _check_space(self, columns: EpisodeColumns) -> None:
        if columns.actions_NCA.shape[1:] != self.policy.noise_shape:
            found, expected = list(columns.actions_NCA.shape[1:]), list(self.policy.noise_shape)
            raise ProtocolError(f"a decision has the shape {found}, the policy's have {expected}")
        for name in self._config.policy.observations:
            column, shape = columns.observations.get(name), self._spec.observations[name].shape
            if column is None or column.shape[1:] != shape:
                what = "missing" if column is None else f"of shape {list(column.shape[1:])}"
                raise ProtocolError(f"observation '{name}' is {what}, the policy reads {list(shape)}")

    def _description(self) -> dict[str, Any]:
        """Return the description of the policy and of its observation and action space, for a checkpoint. An infinite
        bound of an action or observation becomes null."""
        return {
            "format": "penstock embodied policy",
            "policy": self._config.policy.model_dump(mode="json"),
            "action_chunk": self._config.environment.action_chunk,
            "environment": msgspec.to_builtins(self._spec),
        }

    def _check_description(self, saved: bytes) -> None:
        try:
            theirs = msgspec.json.decode(saved)
            own = msgspec.json.decode(msgspec.json.encode(self._description()))
            saved_policy = PolicyConfig.parse(theirs["policy"]).model_dump(mode="json")  # adds defaults of newer keys
            pairs = {
                **_facts("policy", saved_policy, own["policy"], own["policy"]),
                "action_chunk": (theirs["action_chunk"], own["action_chunk"]),
                **_facts("observation", theirs["environment"]["observations"], own["environment"]["observations"],
                         self._config.policy.observations),
                **_facts("environment", theirs["environment"], own["environment"], _ACTION_SPACE),
            }  # fmt: skip
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ConfigError):
            raise CheckpointError(f"the checkpoint's {DESCRIPTION} does not describe an embodied policy") from None
        for name, (found, expected) in pairs.items():
            if found != expected:
                raise CheckpointError(f"the checkpoint's {name} is {found}, this job's is {expected}")


_ACTION_SPACE = ("action_shape", "num_actions", "action_low", "action_high")


def _facts(where: str, theirs: dict[str, Any], own: dict[str, Any], names: Any) -> dict[str, tuple[Any, Any]]:
    return {f"{where} '{name}'": (theirs.get(name, "missing"), own[name]) for name in names}


def _open_rule(
    config: EmbodiedJob, policy: EpisodePolicy, collective: Collective
) -> EpisodePPORule | EpisodeGRPORule | SoftActorCriticRule:
    algorithm, train = config.algorithm, config.train
    keys: Any = {
        "seed": derive_seed(config.seed, "rule"), "collective": collective, "total_updates": train.max_updates,
        "on_nonfinite": train.on_nonfinite,
    }  # fmt: skip
    if isinstance(algorithm, SoftActorCriticConfig):
        if not isinstance(policy, SquashedPolicy):
            raise ConfigError("policy.type: algorithm 'sac' trains a 'squashed' policy")
        if policy.vectors != policy.observed:
            raise ConfigError("policy.observations: algorithm 'sac' learns from vectors, not from images")
        return SoftActorCriticRule(algorithm, policy, **keys)
    if isinstance(algorithm, EpisodePPOConfig):
        return EpisodePPORule(algorithm, policy, **keys)
    return EpisodeGRPORule(algorithm, policy, **keys)
