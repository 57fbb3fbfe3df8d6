"""Embodied jobs, and groups of episodes as a policy would have recorded them in a simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.services.trainer.batch.episodes import EpisodeColumns, episode_columns
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.models.episode_policy import EpisodePolicy
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import Draw

CHUNK = 2
OPTIMIZER = {"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}


def spec_of(**keys: Any) -> EnvSpec:
    """Return the spec of an environment with continuous actions of two dimensions; ``keys`` replace fields."""
    fields: dict[str, Any] = {
        "env_id": "Reach", "backend": "gymnasium", "num_envs": 1, "max_episode_steps": 20, "has_success": True,
        "observations": {"state": ArraySpec((3,), "float64"), "goal": ArraySpec((1, 2), "float32")},
        "action_shape": (2,), "action_dtype": "float32", "num_actions": None, "versions": {},
        "action_low": [-1.0, -2.0], "action_high": [1.0, 2.0],
    }  # fmt: skip
    return EnvSpec(**fields | keys)


DISCRETE = spec_of(action_shape=(), action_dtype="int64", num_actions=4, action_low=[], action_high=[])


def job_of(
    algorithm: Mapping[str, Any] | None = None, policy: Mapping[str, Any] | None = None, **train: Any
) -> EmbodiedJob:
    """Return a job with small networks; ``algorithm`` and ``policy`` change keys of their sections."""
    chosen = {"type": "ppo", **(algorithm or {})}
    kind = {"squashed": "sac"}.get(str((policy or {}).get("type")), chosen["type"])
    sections: dict[str, dict[str, Any]] = {
        "ppo": {
            "value_hidden_sizes": [16], "epochs": 2, "minibatches": 3, "policy": OPTIMIZER, "value": OPTIMIZER,
            "entropy_coef": 0.01,
        },
        "grpo": {"group_size": 2, "epochs": 2, "minibatches": 3, "policy": OPTIMIZER},
        "sac": {
            "critic_hidden_sizes": [16], "batch_size": 32, "warmup_transitions": 1, "buffer": {"capacity": 64},
            **dict.fromkeys(("actor", "critic", "temperature"), OPTIMIZER),
        },
    }  # fmt: skip
    return EmbodiedJob.parse(
        {
            "name": "reach", "kind": "embodied", "seed": 5,
            "environment": {"task": "Reach", "horizon": 20, "action_chunk": CHUNK},
            "policy": {"hidden_sizes": [16], "observations": ["state", "goal"],
                       "type": "squashed" if kind == "sac" else "gaussian", **(policy or {})},
            "algorithm": {**sections[kind], **chosen, "type": kind},
            "train": {"batch_size": 4, "max_updates": 20, **train},
        }
    )  # fmt: skip


def group_of(
    policy: EpisodePolicy,
    ordinal: int,
    *,
    lengths: Sequence[int] = (5, 3),
    scale: float = 1.0,
    failed: Sequence[int] = (),
    terminated: Sequence[int] = (1,),
    succeeded: Sequence[int] = (1,),
    version: int = 0,
    objective: Any = "policy",
    seed: int = 0,
    image: tuple[int, int, int] | None = None,
) -> EpisodeGroup:
    """Return a group of episodes in which ``policy`` decides on random observations.

    The last decision of every second episode is executed in part only.

    Args:
        lengths: numbers of decisions of the episodes.
        scale: standard deviation of the rewards.
        terminated: indices of episodes that ended with their task; the others are cut off.
        image: shape of an additional image observation.
    """
    rng = np.random.default_rng([seed, ordinal])
    count, size, (chunk, _) = sum(lengths), len(lengths), policy.noise_shape
    observations = _observations(rng, count, image)
    shape = (count, *policy.noise_shape)
    noise = rng.random(shape) if policy.noise == "uniform" else rng.standard_normal(shape)
    tensors = {name: torch.from_numpy(column) for name, column in observations.items()}
    drawn = policy.act(tensors, torch.from_numpy(noise.astype(np.float32)))
    cuts = np.cumsum([0, *lengths]).astype(np.int32)
    valid = np.full(count, chunk, np.int32)
    valid[cuts[1::2] - 1] = max(1, chunk - 1)
    executed = np.arange(chunk) < valid[:, None]
    rewards = np.where(executed, scale * rng.standard_normal((count, chunk)), 0).astype(np.float32)
    ends = {name: np.zeros((count, chunk), np.bool_) for name in ("terminated", "truncated")}
    for episode, end in enumerate(cuts[1:]):
        ends["terminated" if episode in terminated else "truncated"][end - 1, valid[end - 1] - 1] = True
    return EpisodeGroup(
        job="job_1", draw=Draw(ordinal), attempt="a", epoch=1, cu_seqlens=cuts, observations=observations,
        final_observations=_observations(rng, size, image), actions=drawn.actions_NCA.numpy(),
        logprobs=drawn.logprobs_NCA.numpy(), valid=valid, rewards=rewards, **ends,
        returns=np.add.reduceat(rewards.sum(1), cuts[:-1]).astype(np.float32),
        succeeded=np.isin(np.arange(size), succeeded), solved_at_end=np.isin(np.arange(size), succeeded),
        failed=np.isin(np.arange(size), failed), reset_id=ordinal, state_hashes=np.full(size, 7, np.uint64),
        spans=np.array([[i, version, 0, n] for i, n in enumerate(lengths)], np.int32), objective=objective,
    )  # fmt: skip


def columns_of(policy: EpisodePolicy, ordinal: int, **keys: Any) -> EpisodeColumns:
    """Return the columns of a group that ``group_of`` builds."""
    return episode_columns([group_of(policy, ordinal, **keys)])


def _observations(rng: np.random.Generator, count: int, image: tuple[int, int, int] | None) -> dict[str, NDArray[Any]]:
    pictures = {} if image is None else {"image": rng.integers(0, 256, (count, *image), np.uint8)}
    return {
        **pictures,
        "state": rng.normal(2, 3, (count, 3)),
        "goal": rng.standard_normal((count, 1, 2)).astype(np.float32),
    }
