"""World models: what they learn of a real simulator, and how the env service runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import yaml
from numpy.typing import NDArray
from torch.nn import functional
from typer.testing import CliRunner

from penstock.cli import app
from penstock.local.recording import record
from penstock.local.world_model import Fitted, Fitting, fit, write_world_model
from penstock.services.env.simulators import open_simulator
from penstock.services.env.simulators.backends.world_model_backend import WorldModelBatch, read_tensors
from penstock.shared.data.demonstrations import Demonstrations
from penstock.shared.errors import ConfigError, DataError
from penstock.shared.protocol.embodied.environment import OpenEnv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOWHERE = Path("/nonexistent")
CARTPOLE, PENDULUM = OpenEnv(env_id="CartPole-v1", num_envs=1), OpenEnv(env_id="Pendulum-v1", num_envs=1)
ME = np.zeros(1, np.int32)
SMALL = Fitting(members=3, hidden_sizes=(32,), epochs=40, learning_rate=1e-2)


class WorldModel:
    """A batch of one environment."""

    def __init__(self, task: str, folder: Path, **options: Any) -> None:
        self.batch = WorldModelBatch(task, folder, 1, **options)

    @property
    def _state(self) -> Any:
        return self.batch._states_ND[0]

    @_state.setter
    def _state(self, value: Any) -> None:
        self.batch._states_ND[0] = value

    def reset(self, state_id: int) -> dict[str, Any]:
        return {name: rows[0] for name, rows in self.batch.reset(ME, np.array([state_id])).items()}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, bool]:
        seen, *columns = self.batch.step(ME, np.asarray(action)[None])
        reward, terminated, truncated, success = (column[0].item() for column in columns)
        return {name: rows[0] for name, rows in seen.items()}, reward, terminated, truncated, success


@pytest.fixture(scope="module")
def swung() -> Demonstrations:
    """Episodes of random actions in Pendulum."""
    return record(PENDULUM, NOWHERE, None, reset_ids=range(40), horizon=50)


@pytest.fixture(scope="module")
def fitted(swung: Demonstrations) -> Fitted:
    return fit(swung, SMALL)


@pytest.mark.long
def test_a_model_predicts_what_the_simulator_does(fitted: Fitted, swung: Demonstrations, tmp_path: Path) -> None:
    """Predicts single steps of new episodes; a model that predicts no change has an error near 1."""
    assert fitted.facts["error"]["state"] < 0.2
    assert fitted.facts["error"]["reward"] < 0.3
    assert (fitted.facts["ends"], fitted.facts["error"]["ends"]) == (False, 0.0)
    assert fitted.facts["horizon"] == 50
    write_world_model(tmp_path, fitted)
    model = WorldModel("Pendulum-v1", tmp_path)
    new = record(PENDULUM, NOWHERE, None, reset_ids=[500], horizon=30)
    for t in range(10):
        model._state = new.observations["state"][t]
        seen, reward, terminated, truncated, _ = model.step(new.actions[t])
        np.testing.assert_allclose(seen["state"], new.observations["state"][t + 1], atol=0.4)
        assert abs(reward - new.rewards[t]) < 2.5
        assert not (terminated or truncated)
    one, again = (fit(swung, replace(SMALL, epochs=1)) for _ in range(2))
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], tensor)


def test_the_simulated_model_equals_the_trained_one(fitted: Fitted, tmp_path: Path) -> None:
    """Compares NumPy in the simulator's process with torch, for each ensemble member that the state id draws."""
    write_world_model(tmp_path, fitted)
    read = read_tensors(tmp_path / "world_model.safetensors")
    expected = safetensors.numpy.load_file(tmp_path / "world_model.safetensors")
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[name], one) for name, one in expected.items())
    t = {name: torch.from_numpy(one) for name, one in expected.items()}
    model = WorldModel("Pendulum-v1", tmp_path)
    state = torch.from_numpy(model.reset(41)["state"])
    np.testing.assert_array_equal(state, expected["starts"][41 % 40], "the second of 40 recorded episodes")
    members = np.random.default_rng(41).integers(3, size=5)
    for member, force in zip(members.tolist(), (0.5, -2.0, 2.0, 0.0, 1.0), strict=True):
        x = (torch.cat([state, torch.tensor([force])]) - t["input_mean"]) / t["input_std"]
        hidden = functional.silu(x @ t["layers.0.weight"][member] + t["layers.0.bias"][member])
        out = (hidden @ t["layers.1.weight"][member] + t["layers.1.bias"][member])[:-1]
        out = out * t["output_std"] + t["output_mean"]
        state = (state + out[:-1]).clamp(*t["state_bounds"])
        seen, reward, *_ = model.step(np.array([force], np.float32))
        np.testing.assert_allclose(seen["state"], state, atol=1e-5)
        assert reward == pytest.approx(float(out[-1].clamp(*t["reward_bounds"])), abs=1e-4)


def alone(folder: Path, state_id: int, actions: NDArray[Any], starts: str) -> list[Any]:
    """Play an episode as plain NumPy of one vector: the observation, reward and end of each step."""
    t, facts = read_tensors(folder / "world_model.safetensors"), json.loads((folder / "world_model.json").read_bytes())
    rng, weights = np.random.default_rng(state_id), [t["layers.0.weight"], t["layers.1.weight"]]
    anywhere = starts == "anywhere"
    state = t["states"][rng.integers(len(t["states"]))] if anywhere else t["starts"][state_id % len(t["starts"])]
    played: list[Any] = [state.tolist()]
    for action in actions:
        member = int(rng.integers(len(weights[0])))
        x = (np.concatenate([state, np.eye(2, dtype=np.float32)[action]]) - t["input_mean"]) / t["input_std"]
        x = x @ weights[0][member] + t["layers.0.bias"][member]
        x = x / (1 + np.exp(-np.clip(x, -60, 60)))
        x = x @ weights[1][member] + t["layers.1.bias"][member]
        out = x[:-1] * t["output_std"] + t["output_mean"]
        state = np.clip(state + out[:-1], *t["state_bounds"])
        over = bool(facts["ends"] and x[-1] > 0)
        played.append([state.tolist(), float(np.clip(out[-1], *t["reward_bounds"])), over])
        if over or len(played) > facts["horizon"]:
            break
    return played


@pytest.mark.parametrize("starts", [pytest.param("recorded", marks=pytest.mark.long), "anywhere"])
def test_environments_of_a_batch_play_as_if_alone(tmp_path: Path, starts: str) -> None:
    """Bit for bit, in random parts of a batch; the episodes are longer than the draws that the model stores."""
    poles = fit(record(CARTPOLE, NOWHERE, None, reset_ids=range(30), horizon=90), replace(SMALL, epochs=2))
    write_world_model(tmp_path, replace(poles, facts=poles.facts | {"horizon": 90, "ends": starts == "anywhere"}))
    batch, rng = WorldModelBatch("CartPole-v1", tmp_path, 24, starts=starts), np.random.default_rng(1)
    everyone, state_ids, actions = np.arange(24, dtype=np.int32), rng.integers(0, 99, 24), rng.integers(0, 2, (24, 90))
    begun = batch.reset(everyone, state_ids)["state"]
    played: list[list[Any]] = [[state.tolist()] for state in begun]
    running = set(everyone.tolist())
    while running:
        some = rng.permutation(sorted(running))[: rng.integers(1, len(running) + 1)].astype(np.int32)
        steps = np.array([len(played[env]) - 1 for env in some.tolist()])
        seen, rewards, terminated, truncated, _ = batch.step(some, actions[some, steps])
        for i, env in enumerate(some.tolist()):
            played[env].append([seen["state"][i].tolist(), float(rewards[i]), bool(terminated[i])])
            if terminated[i] or truncated[i]:
                running.remove(env)
    assert played == [alone(tmp_path, int(state_ids[env]), actions[env], starts) for env in everyone.tolist()]
    lengths = {len(one) - 1 for one in played}
    assert max(lengths) > 64 if starts == "recorded" else min(lengths) < 90


def test_a_model_stays_within_the_recorded_bounds(fitted: Fitted, tmp_path: Path) -> None:
    write_world_model(tmp_path, fitted)
    model = WorldModel("Pendulum-v1", tmp_path, starts="anywhere")
    low, high = fitted.tensors["state_bounds"]
    places = set()
    for state_id in range(4):
        places.add(model.reset(state_id)["state"].tobytes())
        for step in range(50):
            seen, _, terminated, truncated, success = model.step(np.array([2.0], np.float32))
            assert (seen["state"] >= low).all()
            assert (seen["state"] <= high).all()
            assert (terminated, truncated, success) == (False, step == 49, False)
    assert len(places) == 4


@pytest.mark.long
def test_a_model_learns_when_an_episode_ends(tmp_path: Path) -> None:
    """The pole counts as fallen at 12 degrees; the model only sees at which states episodes ended."""
    fallen = fit(record(CARTPOLE, NOWHERE, None, reset_ids=range(80), horizon=60), replace(SMALL, epochs=150))
    assert fallen.facts["ends"]
    assert fallen.facts["error"]["ends"] < 0.03, "a model that never ends errs in one step of twenty"
    write_world_model(tmp_path, fallen)
    model = WorldModel("CartPole-v1", tmp_path)
    pushed = [(0.0, False), (0.19, True), (-0.19, True)]
    for angle, ends in pushed:
        model._state = np.array([0, 0, angle, 20 * angle], np.float32)
        assert model.step(0)[2] is ends, angle


def reaching(rewards: Callable[[np.random.Generator], NDArray[np.float64]]) -> Demonstrations:
    """Return 30 episodes of 20 steps: the hand moves by the action, the goal of the episode and a zero stay."""
    rng = np.random.default_rng(0)
    moves, goals = rng.uniform(-1, 1, (30, 20, 1)).astype(np.float32), rng.uniform(-1, 1, (30, 1, 1))
    hand = np.concatenate([np.zeros((30, 1, 1)), np.cumsum(moves, axis=1)], axis=1)
    states = np.concatenate([hand, np.broadcast_to(goals, hand.shape), np.zeros_like(hand)], axis=2)
    box = {"num_actions": None, "low": [-1.0], "high": [1.0]}
    return Demonstrations(
        observations={"state": states[:, :-1].reshape(-1, 3)}, actions=moves.reshape(-1, 1),
        rewards=rewards(rng).astype(np.float32), cu_seqlens=np.arange(0, 601, 20), succeeded=np.zeros(30, bool),
        final_observations={"state": states[:, -1]}, terminated=np.zeros(30, bool),
        about={"task": "reach", "backend": "x", "horizon": 20, "action": box},
    )  # fmt: skip


def test_a_model_predicts_exactly_what_never_changes(tmp_path: Path) -> None:
    """Goals differ between episodes; the network was hardly trained, so that it would let them drift."""
    shown = reaching(lambda rng: np.full(600, -0.3))
    fitted = fit(shown, Fitting(members=2, hidden_sizes=(8,), epochs=1))
    assert fitted.facts["error"]["reward"] == 0
    assert fitted.facts["error"]["state"] > 0.01, "of the hand alone"
    write_world_model(tmp_path, fitted)
    model = WorldModel("reach", tmp_path)
    for state_id in range(6):
        begun = model.reset(state_id)["state"]
        assert begun[1] == np.float32(shown.observations["state"][20 * state_id, 1])
        for t in range(20):
            seen, reward, *_ = model.step(shown.actions[20 * state_id + t])
            assert (seen["state"][1:].tolist(), reward) == (begun[1:].tolist(), np.float32(-0.3))
            assert seen["state"][0] != begun[0]


def test_what_changes_only_in_held_out_episodes_counts_as_an_error() -> None:
    """One episode of thirty has rewards, and is held out: a model that knows none of them is wrong about it."""
    order = np.random.default_rng(0).permutation(30)
    rewards = np.zeros(600)
    rewards[20 * order[0] : 20 * order[0] + 20] = 1.0
    fitted = fit(reaching(lambda rng: rewards), Fitting(members=2, hidden_sizes=(8,), epochs=1))
    assert fitted.facts["error"]["reward"] > 0.3


def test_rare_jumps_hardly_move_what_a_model_predicts(tmp_path: Path) -> None:
    """One reward of a hundred is 100, at random: their mean is 1, but nearly every step pays 0."""
    shown = reaching(lambda rng: 100.0 * (rng.permutation(600) < 6))
    write_world_model(tmp_path, fit(shown, Fitting(members=3, hidden_sizes=(4,), epochs=30)))
    model = WorldModel("reach", tmp_path)
    found = []
    for state_id in range(30):
        model.reset(state_id)
        found += [model.step(shown.actions[20 * state_id + t])[1] for t in range(20)]
    assert abs(float(np.median(found))) < 0.5


def test_demonstrations_without_needed_fields_are_refused(swung: Demonstrations) -> None:
    about = swung.about
    for changes, message in (
        ({"about": about | {"noise": 0.1}}, "does not hold the actions that were executed"),
        ({"terminated": None}, "does not say how its episodes ended: record it anew"),
        ({"about": {"task": "Pendulum-v1"}}, "does not name its 'backend'"),
        ({"about": about | {"action": {"low": 3}}}, "does not say what its actions are"),
        ({"observations": {"image": np.zeros((len(swung), 4, 4, 1), np.uint8)}}, "'image' is no vector"),
    ):
        with pytest.raises(DataError, match=message):
            fit(replace(swung, **changes), SMALL)  # type: ignore[arg-type]


def test_a_model_is_recorded_trained_and_opened_by_commands(tmp_path: Path) -> None:
    job, shown, folder = tmp_path / "job.yaml", tmp_path / "cartpole.demonstrations", tmp_path / "model"
    job.write_text(
        yaml.safe_dump(
            {"kind": "embodied", "name": "p", "environment": {"task": "CartPole-v1", "horizon": 30},
             "policy": {"type": "categorical"}, "train": {"batch_size": 2, "max_updates": 1}}
        )
    )  # fmt: skip
    both = CliRunner().invoke(app, ["record", str(job), "--to", str(shown), "--random", "--noise", "0.1"])
    assert both.exit_code == 2
    held = CliRunner().invoke(app, ["record", str(job), "--to", str(shown), "--hold", "2"])
    assert (held.exit_code, "--hold keeps random actions: add --random" in held.output) == (2, True)
    done = CliRunner().invoke(app, ["record", str(job), "--to", str(shown), "--random", "--episodes", "9"])
    assert done.exit_code == 0, done.output
    trained = CliRunner().invoke(
        app,
        ["sims", "world-model", "train", str(shown), "--out", str(folder), "--epochs", "3", "--hidden", "8", "--json"],
    )
    assert trained.exit_code == 0, trained.output
    facts = json.loads(trained.stdout)
    assert (facts["task"], facts["episodes"], facts["horizon"]) == ("CartPole-v1", 9, 30)
    request = OpenEnv(env_id="CartPole-v1", num_envs=1, backend="world_model", options={"model": str(folder)})
    simulator = open_simulator(request, NOWHERE)
    spec = simulator.spec
    simulator.close()
    assert (spec.num_actions, spec.max_episode_steps, spec.action_dtype) == (2, 30, "int64")
    assert spec.observations["state"].shape == (4,)
    assert spec.versions["world_model"], "results say which model they come from"
    wrong = OpenEnv(env_id="Pendulum-v1", num_envs=1, backend="world_model", options={"model": str(folder)})
    with pytest.raises(ConfigError, match="is a model of 'CartPole-v1' \\(gymnasium\\), not of 'Pendulum-v1'"):
        open_simulator(wrong, NOWHERE)
