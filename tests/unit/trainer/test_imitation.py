"""Behaviour cloning: what is learnt, from which steps, and that it is a pure function."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.learners.imitation import _windows
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.data.demonstrations import Demonstrations, write_demonstrations
from penstock.shared.errors import ConfigError, DataError
from tests.unit.trainer.episode_batches import DISCRETE, job_of, spec_of


def demonstrations(seed: int = 0, *, episodes: int = 8, length: int = 12) -> Demonstrations:
    """Return demonstrations of an expert whose actions are a tanh of its observations, within [-1, 1] and [-2, 2]."""
    rng = np.random.default_rng(seed)
    count = episodes * length
    state, goal = rng.normal(2, 3, (count, 3)), rng.standard_normal((count, 1, 2)).astype(np.float32)
    actions = np.stack([np.tanh((state[:, 0] - 2) / 3), 2 * np.tanh(goal[:, 0, 1])], axis=1).astype(np.float32)
    return Demonstrations(
        observations={"state": state, "goal": goal}, actions=actions, rewards=np.ones(count, np.float32),
        cu_seqlens=np.arange(0, count + 1, length), succeeded=np.ones(episodes, np.bool_), about={"task": "Reach"},
    )  # fmt: skip


def warm_job(path: Path, *, epochs: int = 60, policy: dict[str, Any] | None = None, chunk: int = 1) -> EmbodiedJob:
    found = job_of(policy=policy).model_dump(mode="json")
    found["environment"]["action_chunk"] = chunk
    found["warm_start"] = {
        "demonstrations": str(path), "epochs": epochs, "batch_size": 32, "learning_rate": 1e-2,
    }  # fmt: skip
    return EmbodiedJob.parse(found)


def weights(learner: EmbodiedLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def act(learner: EmbodiedLearner, shown: Demonstrations) -> np.ndarray[Any, Any]:
    """Return the actions of the policy without noise on the observations of ``shown``, [N, C, ...]."""
    seen = {name: torch.from_numpy(column) for name, column in shown.observations.items()}
    return learner.policy.to_environment(learner.policy.act(seen, None).actions_NCA)


@pytest.mark.parametrize("kind", ["gaussian", "tokens"])
def test_the_policy_does_what_it_was_shown(tmp_path: Path, kind: str) -> None:
    shown, held_out = demonstrations(episodes=24), demonstrations(1)
    write_demonstrations(tmp_path / "shown", shown)
    job = warm_job(tmp_path / "shown", epochs=40, policy={"type": kind, "bins": 16})
    learner = EmbodiedLearner(job, spec_of())
    before, losses = weights(learner), list[float]()
    learner.warm_start(lambda number, loss: losses.append(loss))
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.3
    off = np.abs(act(learner, held_out)[:, 0] - held_out.actions).mean(0)
    assert (off < [0.3, 0.5]).all(), off
    assert (off < 0.5 * np.abs(held_out.actions).mean(0)).all(), "less than half of the error of doing nothing"
    if kind == "gaussian":
        assert torch.equal(weights(learner)["log_std"], before["log_std"]), "the exploration noise stays as configured"
    assert float(weights(learner)["normaliser.count"]) == len(shown)


def test_a_discrete_policy_does_what_it_was_shown(tmp_path: Path) -> None:
    shown = demonstrations()
    best = (shown.observations["state"][:, 0] > 2).astype(np.int64) * 3
    write_demonstrations(tmp_path / "shown", replace(shown, actions=best))
    learner = EmbodiedLearner(warm_job(tmp_path / "shown", policy={"type": "categorical"}), DISCRETE)
    learner.warm_start()
    assert (act(learner, shown)[:, 0] == best).mean() > 0.95


def test_a_warm_start_is_a_pure_function_and_becomes_the_first_version(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "shown", demonstrations())
    job = warm_job(tmp_path / "shown", epochs=3)
    one, two, other = (EmbodiedLearner(each, spec_of()) for each in (job, job, job.model_copy(update={"seed": 6})))
    first = weights(one)
    for learner in (one, two, other):
        learner.warm_start()
    assert all(torch.equal(tensor, weights(two)[name]) for name, tensor in weights(one).items())
    assert not torch.equal(weights(one)["layers.0.weight"], weights(other)["layers.0.weight"])
    assert not torch.equal(weights(one)["layers.0.weight"], first["layers.0.weight"])
    resumed = EmbodiedLearner(job_of().model_copy(update={"environment": job.environment}), spec_of())
    resumed.load_state(one.state())
    assert all(torch.equal(tensor, weights(one)[name]) for name, tensor in weights(resumed).items())


def test_a_decision_on_a_chunk_learns_the_steps_of_its_episode() -> None:
    steps, executed = _windows(np.array([0, 3, 4]), 2)
    assert steps.tolist() == [[0, 1], [1, 2], [2, 2], [3, 3]]
    assert executed.tolist() == [[True, True], [True, True], [True, False], [True, False]]


def test_chunks_are_learnt(tmp_path: Path) -> None:
    """Later actions of a chunk belong to later steps; they are constant in an episode, so the policy can learn them."""
    shown = demonstrations(episodes=12)
    level = np.repeat(np.linspace(-0.8, 0.8, 12), 12).astype(np.float32)
    state = shown.observations["state"] * 0 + level[:, None]
    constant = replace(
        shown, observations=shown.observations | {"state": state}, actions=np.stack([level, -level], axis=1)
    )
    write_demonstrations(tmp_path / "shown", constant)
    learner = EmbodiedLearner(warm_job(tmp_path / "shown", chunk=3, epochs=120), spec_of())
    learner.warm_start()
    assert np.abs(act(learner, constant) - constant.actions[:, None]).mean() < 0.12


def test_demonstrations_of_another_space_are_refused(tmp_path: Path) -> None:
    shown = demonstrations()
    for changed, message in (
        (replace(shown, actions=shown.actions[:, :1]), r"actions in the file: of shape \[1\]; 'Reach' .* has \[2\]"),
        (
            replace(shown, observations={"state": shown.observations["state"]}),
            "observation 'goal' in the file: missing",
        ),
    ):
        write_demonstrations(tmp_path / "shown", changed)
        learner = EmbodiedLearner(warm_job(tmp_path / "shown"), spec_of())
        before = weights(learner)
        with pytest.raises(ConfigError, match=message):
            learner.warm_start()
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
    with pytest.raises(DataError, match="cannot be read"):
        EmbodiedLearner(warm_job(tmp_path / "nothing"), spec_of()).warm_start()
    large = replace(shown, actions=np.full_like(shown.actions, 1e30))
    write_demonstrations(tmp_path / "shown", large)
    with pytest.raises(DataError, match="the policy cannot learn from it: the loss of the policy is inf"):
        EmbodiedLearner(warm_job(tmp_path / "shown"), spec_of()).warm_start()


def test_without_demonstrations_nothing_happens() -> None:
    learner = EmbodiedLearner(job_of(), spec_of())
    before = weights(learner)
    learner.warm_start()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
    assert not math.isnan(float(before["log_std"].sum()))
