"""Every algorithm for embodied jobs learns a task of the env service's pool: to move a point on a line to a goal.

The observation is position and goal in [-1, 1]. The action in [-1, 1] moves the point by up to 0.3. A step costs the
distance from the goal and 0.1. The episode ends within 0.05 of the goal, and is truncated after 20 steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import open_simulator
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.models.episode_policy import EpisodePolicy
from penstock.shared.protocol.embodied.environment import OpenEnv, ResetRequest, StepReply, StepRequest
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import Draw
from tests.contract.simulated_envs import FOLDER

ENV_ID, NUM_ENVS = "simulated_envs:PointReach-v0", 8
HELD_OUT = 1_000_000
"""First of the held-out reset ids, which are not used for training."""

Rows = list[tuple[dict[str, Any], Any, Any, StepReply, int]]
"""Steps of one episode: observations, actions, log-probs, the reply, and the row of this environment in the reply."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvPool]:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    simulator = open_simulator(OpenEnv(env_id=ENV_ID, num_envs=NUM_ENVS), Path("/nonexistent"))
    yield EnvPool(simulator)
    simulator.close()


def play(pool: EnvPool, policy: EpisodePolicy, reset_ids: list[int], noise: np.random.Generator | None) -> list[Rows]:
    """Play one episode from each reset id, and return them; without ``noise``, the policy acts with its mean."""
    envs = np.arange(len(reset_ids), dtype=np.int32)
    observations = pool.reset(ResetRequest(seq=0, env_ids=envs, state_ids=np.array(reset_ids))).observations
    episodes: list[Rows] = [[] for _ in reset_ids]
    while len(envs):
        drawn = None
        if noise is not None:
            shape = (len(envs), *policy.noise_shape)
            uniform = policy.noise == "uniform"
            drawn = torch.from_numpy(noise.random(shape) if uniform else noise.standard_normal(shape, np.float32))
        seen = {name: column.copy() for name, column in observations.items()}
        decision = policy.act({name: torch.from_numpy(column) for name, column in seen.items()}, drawn)
        reply = pool.step(
            StepRequest(
                seq=0, auto_reset=False, env_ids=envs, actions=policy.to_environment(decision.actions_NCA),
                next_state_ids=np.zeros(0, np.int64),
            )
        )  # fmt: skip
        for row, env in enumerate(envs):
            before = {name: column[row] for name, column in seen.items()}
            actions, logprobs = (each[row].numpy() for each in decision)
            episodes[env].append((before, actions, logprobs, reply, row))
        envs = envs[~reply.ended]
        observations = {name: column[~reply.ended] for name, column in reply.observations.items()}
    return episodes


def group_of(ordinal: int, episodes: list[Rows], objective: Any) -> EpisodeGroup:
    """Return a group with the episodes of one draw."""
    rows = [row for episode in episodes for row in episode]
    ends = [episode[-1] for episode in episodes]
    lengths = [len(episode) for episode in episodes]

    def stepped(name: str) -> np.ndarray[Any, Any]:
        return np.stack([getattr(reply, name)[row] for *_, reply, row in rows])

    def at_end(name: str) -> np.ndarray[Any, Any]:
        return np.stack([getattr(reply, name)[row] for *_, reply, row in ends])

    final = [reply.final_observations["state"][int(reply.ended[:row].sum())] for *_, reply, row in ends]
    solved = at_end("terminated").any(1)
    return EpisodeGroup(
        job="job_1", draw=Draw(ordinal), attempt="a", epoch=1, cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        observations={"state": np.stack([before["state"] for before, *_ in rows])},
        final_observations={"state": np.stack(final)}, actions=np.stack([row[1] for row in rows]),
        logprobs=np.stack([row[2] for row in rows]), valid=stepped("valid"), rewards=stepped("rewards"),
        terminated=stepped("terminated"), truncated=stepped("truncated"), returns=at_end("returns"), succeeded=solved,
        solved_at_end=solved, failed=np.zeros(len(episodes), np.bool_), reset_id=ordinal,
        state_hashes=np.zeros(len(episodes), np.uint64), objective=objective,
        spans=np.array([[i, 0, 0, n] for i, n in enumerate(lengths)], np.int32),
    )  # fmt: skip


def held_out(pool: EnvPool, policy: EpisodePolicy) -> tuple[float, float]:
    """Play held-out episodes without noise; return the fraction that reaches the goal, and the mean return."""
    rounds = [play(pool, policy, list(range(HELD_OUT + 8 * i, HELD_OUT + 8 * i + 8)), None) for i in range(4)]
    ends = [episode[-1] for episodes in rounds for episode in episodes]
    reached = np.mean([reply.terminated[row].any() for *_, reply, row in ends])
    return float(reached), float(np.mean([reply.returns[row] for *_, reply, row in ends]))


def train(pool: EnvPool, job: EmbodiedJob) -> tuple[tuple[float, float], tuple[float, float]]:
    """Train for all updates of the job; return the results of ``held_out`` before and after."""
    learner = EmbodiedLearner(job, pool._simulator.spec)
    untrained = held_out(pool, learner.policy)
    noise, size = np.random.default_rng(1), job.algorithm.group_size
    objective = "replay" if job.algorithm.type == "sac" else "policy"
    for update in range(job.train.max_updates):
        groups: list[EpisodeGroup] = []
        while len(groups) * size < job.train.batch_size:
            first = update * job.groups_per_batch + len(groups)
            reset_ids = [first + i // size for i in range(NUM_ENVS)]
            episodes = play(pool, learner.policy, reset_ids, noise)
            groups += [group_of(reset_ids[i], episodes[i : i + size], objective) for i in range(0, NUM_ENVS, size)]
        learner.update(BatchShard.whole(groups), update_index=update)
    return untrained, held_out(pool, learner.policy)


def job_of(kind: str, algorithm: dict[str, Any], *, updates: int, batch_size: int, **policy: Any) -> EmbodiedJob:
    return EmbodiedJob.parse(
        {
            "name": "reach", "kind": "embodied", "seed": 1, "environment": {"task": ENV_ID, "horizon": 20},
            "policy": {"type": kind, "hidden_sizes": [32, 32], **policy}, "algorithm": algorithm,
            "train": {"batch_size": batch_size, "max_updates": updates},
        }
    )  # fmt: skip


OPTIMIZER = {"learning_rate": 3e-3, "eps": 1e-5, "max_grad_norm": 0.5}


@pytest.mark.long
def test_soft_actor_critic_learns(pool: EnvPool) -> None:
    optimizer = {"learning_rate": 3e-3, "max_grad_norm": 10.0}
    algorithm = {
        "type": "sac", "critic_hidden_sizes": [32, 32], "gamma": 0.9, "tau": 0.02, "batch_size": 64,
        "steps_per_update": 40, "warmup_transitions": 200, "initial_temperature": 0.1, "buffer": {"capacity": 4000},
        "actor": optimizer, "critic": optimizer, "temperature": optimizer,
    }  # fmt: skip
    untrained, trained = train(pool, job_of("squashed", algorithm, updates=20, batch_size=8))
    assert untrained[0] < 0.5
    assert trained[0] >= 0.85


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "keys", "batch_size"), [("gaussian", {"initial_log_std": -1.0}, 32), ("tokens", {"bins": 7}, 16)]
)
def test_ppo_learns(pool: EnvPool, kind: str, keys: dict[str, Any], batch_size: int) -> None:
    algorithm = {
        "type": "ppo", "value_hidden_sizes": [32, 32], "gamma": 0.9, "epochs": 6, "minibatches": 4,
        "policy": OPTIMIZER, "value": OPTIMIZER,
    }  # fmt: skip
    untrained, trained = train(pool, job_of(kind, algorithm, updates=35, batch_size=batch_size, **keys))
    assert untrained[0] < 0.5
    assert trained[0] >= 0.85


@pytest.mark.long
def test_grpo_learns(pool: EnvPool) -> None:
    algorithm = {"type": "grpo", "group_size": 4, "epochs": 6, "minibatches": 4, "policy": OPTIMIZER}
    untrained, trained = train(pool, job_of("tokens", algorithm, updates=25, batch_size=32, bins=7))
    assert untrained[1] < -10
    assert trained[1] > -5
