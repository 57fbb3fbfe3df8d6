"""Soft actor-critic: actor, twin critics with targets, temperature and the replay buffer of one job.

An update is a pure function of the state and its number: draws and noise come from the seed and the number of the step,
so that a run that was interrupted goes on to the same bytes. Every rank holds the same buffer, draws the same
transitions and computes its share of them; the number of ranks changes nothing but rounding.

Shape legend: B = this rank's share of the transitions of a step, O = numbers of an observation, A = dimensions of an
action, C = critics.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.collective import Collective
from penstock.services.trainer.optimizer import check_fits, copy_into
from penstock.services.trainer.replay_buffer import ReplayBuffer
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.algorithms.gaussian import squashed_sample
from penstock.shared.algorithms.sac import (
    sac_actor_loss,
    sac_critic_loss,
    sac_targets,
    sac_temperature_loss,
    soft_update,
)
from penstock.shared.config.embodied import PolicyConfig, SoftActorCriticConfig
from penstock.shared.errors import Conflict
from penstock.shared.models.control import SquashedPolicy, Temperature, TwinCritics

__all__ = ["SoftActorCriticRule"]

_BUFFER, _TARGET = "buffer.", "target."
"""Prefixes of names in the state."""


class SoftActorCriticRule:
    """``steps_per_update`` times critics, actor, temperature and targets, in this order (arXiv 1812.05905, alg. 1).

    Args:
        policy: shape of the policy network.
        observation_size, action_size: of the vectors that the environment gives and takes.
        seed: of the first weights, of all draws and of all noise.
        collective: the ranks that share a batch; all of them insert the same transitions.
        total_updates: length of the run for the learning-rate schedules.
        on_nonfinite: a loss or gradient that is not finite ends the update with an error, or leaves out that step.

    Raises:
        ConfigError: the buffer does not fit into its bytes, or an optimizer is not installed.
    """

    def __init__(
        self,
        config: SoftActorCriticConfig,
        policy: PolicyConfig,
        *,
        observation_size: int,
        action_size: int,
        seed: int,
        collective: Collective,
        total_updates: int | None = None,
        on_nonfinite: Literal["pause", "skip"] = "pause",
        device: torch.device | str = "cpu",
    ) -> None:
        self._config, self._seed, self._collective, self._device = config, seed, collective, torch.device(device)
        self._action_size = action_size
        self._target_entropy = -float(action_size) if config.target_entropy is None else config.target_entropy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = SquashedPolicy(observation_size, action_size, policy.hidden_sizes).to(self._device)
            self._critics = TwinCritics(observation_size, action_size, config.critic_hidden_sizes).to(self._device)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self._temperature = Temperature(config.initial_temperature).to(self._device)
        self._networks = TrainedNetworks(
            {
                "critic": (self._critics, config.critic),
                "actor": (self.actor, config.actor),
                "temperature": (self._temperature, config.temperature),
            },
            collective,
            total_updates=total_updates,
            on_nonfinite=on_nonfinite,
        )
        self.buffer = ReplayBuffer(config.buffer, observation_size=observation_size, action_size=action_size, seed=seed)

    @property
    def ready(self) -> bool:
        """True if the buffer has got enough for an update."""
        return self.buffer.inserted >= self._config.warmup_transitions

    def update(self, *, update_index: int) -> dict[str, float]:
        """One policy update; returns its metrics, means over its steps, the same on every rank.

        Args:
            update_index: number of the update in the run, from 0; decides the draws and the noise.

        Raises:
            Conflict: the buffer has not got enough yet; nothing was changed.
            NonFiniteStep: a loss or a gradient is not finite and ``on_nonfinite`` is ``pause``.
        """
        if not self.ready:
            raise Conflict(
                f"the replay buffer has got {self.buffer.inserted} of {self._config.warmup_transitions} transitions "
                "(warmup_transitions): collect more before the first update"
            )
        self._networks.begin(update_index)
        sums = {"logprob": 0.0, "value": 0.0, "target": 0.0}
        for step in range(self._config.steps_per_update):
            self._step(update_index * self._config.steps_per_update + step, sums)
        count = self._config.steps_per_update * self._config.batch_size
        means = {name: total / count for name, total in self._collective.sum(sums).items()}
        return self._networks.report() | {
            "policy/entropy": -means["logprob"],
            "policy/target_entropy": self._target_entropy,
            "policy/temperature": float(self._temperature().detach()),
            "critic/value": means["value"],
            "critic/target": means["target"],
            "buffer/size": float(len(self.buffer)),
            "buffer/inserted": float(self.buffer.inserted),
        }

    def state(self) -> dict[str, Tensor]:
        """Copies of weights, targets, optimizer states and the whole buffer, by name, on the CPU."""
        networks = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}
        return networks | {_BUFFER + name: tensor for name, tensor in self.buffer.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: of other networks or another buffer; nothing was loaded.
        """
        networks = {name: tensor for name, tensor in state.items() if not name.startswith(_BUFFER)}
        check_fits(self._tensors(), networks, what="soft actor-critic")
        self.buffer.load_state({n.removeprefix(_BUFFER): t for n, t in state.items() if n.startswith(_BUFFER)})
        copy_into(self._tensors(), networks, what="soft actor-critic")

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, number: int, sums: dict[str, float]) -> None:
        """Step ``number`` of the run; adds to ``sums`` over this rank's transitions."""
        batch, noise_BA, next_noise_BA = self._draw(number)
        alpha = self._temperature()
        with torch.no_grad():
            next_actions_BA, next_logprobs_B = self._act(batch["next_observations"], next_noise_BA)
            next_values_CB = self._targets(batch["next_observations"], next_actions_BA)
        targets_B = sac_targets(
            batch["rewards"],
            batch["terminated"],
            next_values_CB,
            next_logprobs_B,
            gamma=self._config.gamma,
            alpha=alpha,
        )
        values_CB = self._critics(batch["observations"], batch["actions"])
        self._networks.step("critic", self._mean(sac_critic_loss(values_CB, targets_B)))

        actions_BA, logprobs_B = self._act(batch["observations"], noise_BA)
        judged_CB = self._critics(batch["observations"], actions_BA)
        self._networks.step("actor", self._mean(sac_actor_loss(logprobs_B, judged_CB, alpha=alpha)))

        log_alpha = self._temperature.log_alpha
        loss_B = sac_temperature_loss(log_alpha, logprobs_B, target_entropy=self._target_entropy)
        self._networks.step("temperature", self._mean(loss_B))
        soft_update(self._targets.parameters(), self._critics.parameters(), tau=self._config.tau)

        sums["logprob"] += float(logprobs_B.detach().double().sum())
        sums["value"] += float(values_CB.detach().double().mean(0).sum())
        sums["target"] += float(targets_B.double().sum())

    def _draw(self, number: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """This rank's transitions of a step, and the noise [B, A] of the actions in their first and next states."""
        own = slice(self._collective.rank, None, self._collective.size)
        batch = self.buffer.sample(number, self._config.batch_size)
        rng = np.random.default_rng([self._seed, number, 1])
        noise = rng.standard_normal((2, self._config.batch_size, self._action_size), np.float32)
        both = torch.from_numpy(noise)[:, own].to(self._device)
        return {name: column[own].to(self._device) for name, column in batch.items()}, both[0], both[1]

    def _act(self, observations_BO: Tensor, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, A] in [-1, 1] and their log-probs [B]; differentiable."""
        mean_BA, log_std_BA = self.actor(observations_BO)
        return squashed_sample(mean_BA, log_std_BA, noise_BA)

    def _mean(self, losses_B: Tensor) -> Tensor:
        """This rank's part of the mean over the transitions of all ranks."""
        return losses_B.sum() / self._config.batch_size

    def _tensors(self) -> dict[str, Tensor]:
        targets = {_TARGET + name: param for name, param in self._targets.named_parameters()}
        return self._networks.tensors() | targets
