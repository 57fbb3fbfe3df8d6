"""Behaviour cloning: the policy of an embodied job learns from demonstrations before version 0.

A pure function of the policy, the demonstrations and the seed. Every rank holds all of them and computes its share of
each step, so the number of ranks changes only rounding.

Shape legend: S = demonstrated steps, N = decisions, C = actions of a decision, A = components of an action, M = this
rank's share of a step, ... = the shape of one observation or action.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.update_rules.episode_passes import Decisions
from penstock.services.trainer.update_rules.networks import TrainedNetworks
from penstock.shared.config.embodied import EpisodeWarmStartConfig
from penstock.shared.config.optimizer import OptimizerConfig
from penstock.shared.data.demonstrations import Demonstrations
from penstock.shared.models.episode_policy import EpisodePolicy

__all__ = ["imitate"]


def imitate(
    policy: EpisodePolicy,
    demonstrations: Demonstrations,
    config: EpisodeWarmStartConfig,
    *,
    seed: int,
    collective: Collective,
    on_pass: Callable[[int, float], None],
) -> None:
    """Maximise the likelihood of the demonstrated actions: ``epochs`` passes over all steps, each in random order.

    Every step is a decision on the following C actions; actions beyond the end of its episode are masked. Before
    training, the observation statistics are updated with the demonstrations. A Gaussian policy learns its mean only:
    its deviation is for exploration, and demonstrations would shrink it.

    Args:
        seed: seed of the order of the steps.
        on_pass: called after each pass with its number, from 1, and its mean loss in nats per decision.

    Raises:
        NonFiniteStep: the loss is not finite.
    """
    device = next(policy.parameters()).device
    decisions = _decisions(policy, demonstrations, device)
    policy.observe(decisions.observations)
    optimizer = OptimizerConfig(learning_rate=config.learning_rate)
    networks = TrainedNetworks(
        {"policy": (policy.trunk, optimizer)}, collective, total_updates=None, on_nonfinite="pause"
    )
    networks.begin(0)
    count = len(decisions)
    for number in range(1, config.epochs + 1):
        order, total = np.random.default_rng([seed, number]).permutation(count), 0.0
        for part in np.array_split(order, -(-count // config.batch_size)):
            own_M = torch.from_numpy(part[collective.rank :: collective.size]).to(device)
            own = decisions.rows(own_M)
            logprobs_NCA = policy.evaluate(own.observations, own.actions_NCA).logprobs_NCA
            loss = -own.of_executed(logprobs_NCA).sum() / len(part)
            networks.step("policy", loss)
            total += float(loss.detach()) * len(part)
        on_pass(number, collective.sum({"loss": total})["loss"] / count)


def _decisions(policy: EpisodePolicy, demonstrations: Demonstrations, device: torch.device) -> Decisions:
    """Return one decision for each demonstrated step."""
    steps_NC, executed_NC = _windows(demonstrations.cu_seqlens, policy.noise_shape[0])
    actions_NCA = policy.from_environment(demonstrations.actions[steps_NC])
    observations = {name: torch.from_numpy(demonstrations.observations[name].copy()) for name in policy.observed}
    return Decisions(
        {name: column.to(device) for name, column in observations.items()},
        actions_NCA.to(device),
        torch.zeros(actions_NCA.shape, device=device, dtype=torch.float32),
        torch.from_numpy(executed_NC).to(device),
    )


def _windows(cu_seqlens: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the C steps whose actions form the decision at each step, [S, C]: the step itself and the C - 1 steps
    after it. Also return a mask [S, C] that is False for steps beyond the end of the episode.

    The indices of steps beyond the end are replaced by the last step of the episode.
    """
    ends_S = np.repeat(cu_seqlens[1:], np.diff(cu_seqlens))
    steps_NC = np.arange(len(ends_S))[:, None] + np.arange(chunk)
    executed_NC = steps_NC < ends_S[:, None]
    return np.where(executed_NC, steps_NC, ends_S[:, None] - 1), executed_NC
