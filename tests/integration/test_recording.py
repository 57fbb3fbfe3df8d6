"""Demonstrations recorded in real simulators: by a scripted expert, a function, or the policy of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from penstock.cli import app
from penstock.local.recording import Named, policy_of_checkpoint, record, scripted_expert
from penstock.services.env.simulators import describe_simulator
from penstock.services.trainer.checkpoint.state import save_checkpoint
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.data.demonstrations import read_demonstrations
from penstock.shared.errors import CheckpointError, ConfigError, DataError
from penstock.shared.protocol.embodied.environment import EnvSpec, OpenEnv
from tests.contract.simulated_envs import DIE, FOLDER

CARTPOLE, PENDULUM = OpenEnv(env_id="CartPole-v1", num_envs=1), OpenEnv(env_id="Pendulum-v1", num_envs=1)
REACH: dict[str, Any] = {
    "kind": "embodied", "name": "reach", "train": {"batch_size": 4, "max_updates": 1},
    "environment": {"backend": "metaworld", "task": "reach-v3", "horizon": 80, "first_reset_id": 100},
}  # fmt: skip


def balance(_: EnvSpec) -> Any:
    """Return an expert that pushes the cart to the side to which the pole falls."""
    return lambda seen: (seen["state"][:, 2] + 0.3 * seen["state"][:, 3] > 0).astype(np.int64)[:, None]


def test_episodes_are_recorded_as_they_were_played(tmp_path: Path) -> None:
    """There are more episodes than simulators; an episode played alone gives the same observations."""
    counts: list[int] = []
    found = record(CARTPOLE, tmp_path, balance, reset_ids=range(20), horizon=60, on_episode=counts.append)
    assert (found.num_episodes, counts) == (20, [16, 20])
    assert np.diff(found.cu_seqlens).tolist() == [60] * 20, "this expert does not let the pole fall"
    assert set(found.actions.tolist()) == {0, 1}
    assert found.about["first_reset_id"] == 0
    alone = record(CARTPOLE, tmp_path, balance, reset_ids=[17], horizon=60)
    rows = slice(found.cu_seqlens[17], found.cu_seqlens[18])
    np.testing.assert_array_equal(alone.observations["state"], found.observations["state"][rows])
    np.testing.assert_array_equal(alone.actions, found.actions[rows])


@pytest.mark.long
def test_random_episodes_are_recorded_with_their_ends(tmp_path: Path) -> None:
    """The actions depend on the reset id alone, not on episodes beside it; the last observation is that of the fall."""
    found = record(CARTPOLE, tmp_path, None, reset_ids=range(4), horizon=30)
    alone = record(CARTPOLE, tmp_path, None, reset_ids=[2], horizon=30)
    rows = slice(found.cu_seqlens[2], found.cu_seqlens[3])
    np.testing.assert_array_equal(alone.actions, found.actions[rows])
    assert found.terminated is not None
    assert found.terminated.tolist() == (np.diff(found.cu_seqlens) < 30).tolist()
    fallen = np.abs(found.final_observations["state"][:, 2]) > 0.2095
    assert fallen.tolist() == found.terminated.tolist()
    assert found.about["action"] == {"num_actions": 2, "low": [], "high": []}
    moved = record(PENDULUM, tmp_path, None, reset_ids=[0, 1], horizon=40)
    assert -2 <= moved.actions.min() < -1.5 < 1.5 < moved.actions.max() <= 2
    assert moved.terminated is not None
    assert not moved.terminated.any()


def test_episodes_that_an_environment_calls_failed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment of Gymnasium declares nothing: this one says at the end of an episode if its task is solved."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    late = OpenEnv(env_id="simulated_envs:Late-v0", num_envs=1)
    everything = record(late, tmp_path, None, reset_ids=range(8), horizon=200, only_solved=False)
    assert everything.num_episodes == 8
    assert 0 < everything.succeeded.sum() < 8
    solved = record(late, tmp_path, None, reset_ids=range(8), horizon=200)
    assert (solved.num_episodes, solved.succeeded.all()) == (everything.succeeded.sum(), True)


@pytest.mark.long
def test_random_actions_are_held_for_a_random_number_of_steps(tmp_path: Path) -> None:
    found = record(PENDULUM, tmp_path, None, reset_ids=[0, 1, 2], horizon=200, hold=4)
    alone = record(PENDULUM, tmp_path, None, reset_ids=[1], horizon=200, hold=4)
    np.testing.assert_array_equal(alone.actions, found.actions[200:400])
    assert found.about["hold"] == 4
    for actions in found.actions.reshape(3, 200):
        begins = np.flatnonzero(np.diff(actions))
        assert set(np.diff(begins).tolist()) == {1, 2, 3, 4}


@pytest.mark.long
def test_noise_moves_the_arm_and_not_the_record(tmp_path: Path) -> None:
    def still(spec: EnvSpec) -> Any:
        return lambda seen: np.zeros((len(seen["state"]), 1, *spec.action_shape), np.float32)

    plain, noisy, again = (
        record(PENDULUM, tmp_path, still, reset_ids=[3, 4], horizon=20, noise=noise) for noise in (0.0, 0.3, 0.3)
    )
    assert not noisy.actions.any(), "the expert's own action"
    assert np.abs(noisy.observations["state"] - plain.observations["state"]).max() > 0.01
    np.testing.assert_array_equal(noisy.observations["state"], again.observations["state"])
    with pytest.raises(ConfigError, match=r"noise: actions of 'CartPole-v1' .* have no finite bounds"):
        record(CARTPOLE, tmp_path, balance, reset_ids=[0], horizon=5, noise=0.1)


@pytest.mark.long
def test_the_policy_of_a_checkpoint_is_recorded(tmp_path: Path) -> None:
    spec = describe_simulator(PENDULUM, tmp_path)
    job = EmbodiedJob.parse(
        {"kind": "embodied", "name": "p", "environment": {"task": "Pendulum-v1", "horizon": 8, "action_chunk": 3},
         "policy": {"type": "gaussian", "hidden_sizes": [8]}, "train": {"batch_size": 2, "max_updates": 1}}
    )  # fmt: skip
    learner = EmbodiedLearner(job, spec)
    path = save_checkpoint(tmp_path, "job_1", 0, learner.state(), {})

    def expert(found: EnvSpec) -> Any:
        return policy_of_checkpoint(path, found)

    found = record(PENDULUM, tmp_path, expert, reset_ids=[5], horizon=8)
    seen = {"state": torch.from_numpy(found.observations["state"][[0, 3, 6]].copy())}
    decided = learner.policy.to_environment(learner.policy.act(seen, None).actions_NCA).reshape(-1, 1)
    np.testing.assert_allclose(found.actions, decided[:8], atol=1e-6)
    with pytest.raises(CheckpointError, match="holds no policy for 'CartPole-v1'"):
        policy_of_checkpoint(path, describe_simulator(CARTPOLE, tmp_path))
    with pytest.raises(CheckpointError, match="holds no policy"):
        policy_of_checkpoint(tmp_path / "nothing", spec)


@pytest.mark.long
def test_a_simulator_without_an_expert_or_that_breaks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no expert is scripted for it"):
        record(CARTPOLE, tmp_path, scripted_expert, reset_ids=[0], horizon=5)
    monkeypatch.setenv("PYTHONPATH", FOLDER)

    def die(_: EnvSpec) -> Any:
        def act(seen: Named) -> Any:
            return np.full((len(next(iter(seen.values()))), 1), DIE, np.int64)

        return act

    with pytest.raises(DataError, match=r"lost the episode of reset id 7: .*SIGKILL"):
        record(OpenEnv(env_id="simulated_envs:Fragile-v0", num_envs=1), tmp_path, die, reset_ids=[7], horizon=5)


def test_a_scripted_expert_is_recorded_by_the_command(tmp_path: Path) -> None:
    """Meta-World's own policy for reach-v3 solves these goals; the record contains only states, actions and results."""
    job, target = tmp_path / "job.yaml", tmp_path / "reach.demonstrations"
    job.write_text(yaml.safe_dump(REACH))
    missing = CliRunner().invoke(app, ["record", str(job)])
    assert missing.exit_code == 2
    done = CliRunner().invoke(app, ["record", str(job), "--to", str(target), "--episodes", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = read_demonstrations(target)
    assert (found.num_episodes, found.succeeded.all()) == (3, True)
    assert list(found.observations) == ["state"]
    assert found.about | {"task": "reach-v3", "source": "scripted expert", "first_reset_id": 100} == found.about
    assert np.abs(found.actions).max() <= 1
