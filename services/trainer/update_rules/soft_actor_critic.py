"""Soft actor-critic: actor, twin critics with targets, temperature and replay buffer of one job.

An update is a pure function of the state and its number: samples and noise are seeded by the job's seed and the step
number, so that an interrupted run resumes to the same bytes. Every rank holds the same buffer, samples the same
transitions and computes its share of them; the number of ranks changes only rounding.

A transition is one decision, however many actions it has. The buffer stores raw observations; they are normalised with
the current statistics when they are sampled.

Shape legend: N = decisions of the batch, B = this rank's share of the transitions of a step, O = components of an
observation, A = components of a decision, C = critics. In NCA and BCA, C = actions of a decision and A = components of
one action.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.batch.episodes import EpisodeColumns, Transitions
from penstock.services.trainer.batch.replay_buffer import ReplayBuffer
from penstock.services.trainer.batch.statistics import Mismatch
from penstock.services.trainer.optimizer import check_fits, copy_into
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.update_rules.episode_passes import decisions_of
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.algorithms.sac import (
    sac_actor_loss,
    sac_critic_loss,
    sac_targets,
    sac_temperature_loss,
    soft_update,
)
from penstock.shared.config.embodied import SoftActorCriticConfig
from penstock.shared.models.building import building
from penstock.shared.models.control import Temperature, TwinCritics
from penstock.shared.models.episode_policy import SquashedPolicy

__all__ = ["SoftActorCriticRule"]

_BUFFER, _TARGET = "buffer.", "target."
"""Name prefixes in the state."""


class SoftActorCriticRule:
    """Soft actor-critic (arXiv 1812.05905, alg. 1). An update makes ``steps_per_update`` steps. Each step trains the
    critics, the actor and the temperature, and moves the target networks towards the critics.

    Args:
        seed: seed of the critics' initial weights, of all samples and of all noise.
        collective: ranks that share a batch; all of them get the same columns.
        total_updates: length of the run for the learning-rate schedules.
        on_nonfinite: ``pause``: a loss or gradient that is not finite ends the update with an error; ``skip``: the step
            is left out.

    Raises:
        ConfigError: the buffer exceeds its byte limit or the memory, or an optimizer is not installed.
    """

    def __init__(
        self,
        config: SoftActorCriticConfig,
        policy: SquashedPolicy,
        *,
        seed: int,
        collective: Collective,
        total_updates: int | None = None,
        on_nonfinite: Literal["pause", "skip"] = "pause",
    ) -> None:
        self._config, self._policy, self._seed, self._collective = config, policy, seed, collective
        self._device = next(policy.parameters()).device
        observation_size, action_size = policy.num_features, math.prod(policy.noise_shape)
        self._target_entropy = -float(action_size) if config.target_entropy is None else config.target_entropy
        with building(seed):
            self._critics = TwinCritics(observation_size, action_size, config.critic_hidden_sizes).to(self._device)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self._temperature = Temperature(config.initial_temperature).to(self._device)
        self._networks = TrainedNetworks(
            {
                "critic": (self._critics, config.critic),
                "actor": (policy, config.actor),
                "temperature": (self._temperature, config.temperature),
            },
            collective,
            total_updates=total_updates,
            on_nonfinite=on_nonfinite,
        )
        self.buffer = ReplayBuffer(config.buffer, observation_size=observation_size, action_size=action_size, seed=seed)

    def update(self, columns: EpisodeColumns, *, update_index: int) -> dict[str, float]:
        """Insert new groups of a batch, and make one policy update once enough transitions were inserted.

        Args:
            update_index: number of the update in the run, from 0; seeds samples and noise.

        Returns:
            Metrics averaged over the steps, the same on every rank; without a step only those of buffer and schedule.

        Raises:
            NonFiniteStep: a loss or a gradient is not finite and ``on_nonfinite`` is ``pause``. The groups stay in the
                buffer and are not inserted again.
        """
        fresh = self.buffer.insert(self._transitions(columns))
        self._networks.begin(update_index)
        filled = {
            "buffer/size": float(len(self.buffer)),
            "buffer/inserted": float(self.buffer.inserted),
            "buffer/fresh": float(fresh),
        }
        if self.buffer.inserted < self._config.warmup_transitions:
            return self._networks.report() | filled
        mismatch = self._mismatch(columns)
        sums = {"logprob": 0.0, "value": 0.0, "target": 0.0}
        for step in range(self._config.steps_per_update):
            self._step(update_index * self._config.steps_per_update + step, sums)
        count = self._config.steps_per_update * self._config.batch_size
        means = {name: total / count for name, total in self._collective.sum(sums).items()}
        return {
            **self._networks.report(), **filled, **mismatch,
            "policy/entropy": -means["logprob"],
            "policy/target_entropy": self._target_entropy,
            "policy/temperature": float(self._temperature().detach()),
            "critic/value": means["value"],
            "critic/target": means["target"],
        }  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything except the policy's weights, with the whole buffer, by name, on the CPU."""
        networks = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}
        return networks | {_BUFFER + name: tensor for name, tensor in self.buffer.state().items()}

    @property
    def columns(self) -> frozenset[str]:
        """Names of the entries of ``state`` that are columns of the replay buffer."""
        return frozenset(_BUFFER + name for name in self.buffer.columns)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned.

        Raises:
            CheckpointError: the state belongs to other networks or another buffer; nothing was loaded.
        """
        networks = {name: tensor for name, tensor in state.items() if not name.startswith(_BUFFER)}
        check_fits(self._tensors(), networks, what="soft actor-critic")
        self.buffer.load_state({n.removeprefix(_BUFFER): t for n, t in state.items() if n.startswith(_BUFFER)})
        copy_into(self._tensors(), networks, what="soft actor-critic")

    # -- before the first step ---------------------------------------------------------------------------------------

    def _transitions(self, columns: EpisodeColumns) -> Transitions:
        terminated_N = np.zeros(len(columns), np.bool_)
        terminated_N[columns.last] = columns.terminated_E
        return Transitions(
            draws=columns.draws,
            group_N=np.repeat(columns.group_E, columns.lengths),
            observations_NO=self._numbers(columns.observations),
            actions_NA=torch.tanh(torch.from_numpy(columns.actions_NCA)).flatten(1).numpy(),
            rewards_N=columns.rewards_N,
            next_observations_NO=self._numbers(columns.next_observations()),
            terminated_N=terminated_N,
        )

    def _numbers(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        tensors = {name: torch.from_numpy(column) for name, column in observations.items()}
        return self._policy.numbers(tensors).float().numpy()

    @torch.no_grad()
    def _mismatch(self, columns: EpisodeColumns) -> dict[str, float]:
        """Return the difference between trainer and acting policy over all decisions of the batch."""
        own = slice(self._collective.rank, None, self._collective.size)
        mine = decisions_of(columns, self._device).rows(torch.arange(len(columns))[own].to(self._device))
        mismatch = Mismatch()
        mine.compare(self._policy.evaluate(mine.observations, mine.actions_NCA).logprobs_NCA, mismatch)
        return mismatch.means(self._collective)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, number: int, sums: dict[str, float]) -> None:
        """Make step ``number`` of the run; add log-probs, values and targets of this rank's transitions to ``sums``."""
        batch, noise_BCA, next_noise_BCA = self._draw(number)
        observations_BO = self._policy.normalised(batch["observations"])
        following_BO = self._policy.normalised(batch["next_observations"])
        alpha = self._temperature()
        with torch.no_grad():
            next_actions_BA, next_logprobs_B = self._act(following_BO, next_noise_BCA)
            next_values_CB = self._targets(following_BO, next_actions_BA)
        targets_B = sac_targets(
            batch["rewards"],
            batch["terminated"],
            next_values_CB,
            next_logprobs_B,
            gamma=self._config.gamma,
            alpha=alpha,
        )
        values_CB = self._critics(observations_BO, batch["actions"])
        self._networks.step("critic", self._mean(sac_critic_loss(values_CB, targets_B)))

        actions_BA, logprobs_B = self._act(observations_BO, noise_BCA)
        judged_CB = self._critics(observations_BO, actions_BA)
        self._networks.step("actor", self._mean(sac_actor_loss(logprobs_B, judged_CB, alpha=alpha)))

        log_alpha = self._temperature.log_alpha
        loss_B = sac_temperature_loss(log_alpha, logprobs_B, target_entropy=self._target_entropy)
        self._networks.step("temperature", self._mean(loss_B))
        soft_update(self._targets.parameters(), self._critics.parameters(), tau=self._config.tau)

        sums["logprob"] += float(logprobs_B.detach().double().sum())
        sums["value"] += float(values_CB.detach().double().mean(0).sum())
        sums["target"] += float(targets_B.double().sum())

    def _draw(self, number: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return this rank's transitions of a step, and the noise [B, C, A] for actions in states and next states."""
        own = slice(self._collective.rank, None, self._collective.size)
        batch = self.buffer.sample(number, self._config.batch_size)
        rng = np.random.default_rng([self._seed, number, 1])
        noise = rng.standard_normal((2, self._config.batch_size, *self._policy.noise_shape), np.float32)
        both = torch.from_numpy(noise)[:, own].to(self._device)
        return {name: column[own].to(self._device) for name, column in batch.items()}, both[0], both[1]

    def _act(self, features_BO: Tensor, noise_BCA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions [B, A] in [-1, 1] and their log-probs [B]; differentiable."""
        drawn = self._policy.sample(features_BO, noise_BCA)
        return drawn.actions_NCA.flatten(1), drawn.logprobs_NCA.sum((1, 2))

    def _mean(self, losses_B: Tensor) -> Tensor:
        """Return this rank's part of the mean over the transitions of all ranks."""
        return losses_B.sum() / self._config.batch_size

    def _tensors(self) -> dict[str, Tensor]:
        targets = {_TARGET + name: param for name, param in self._targets.named_parameters()}
        return self._networks.tensors(without="actor") | targets
