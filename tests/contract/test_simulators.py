"""Every simulator keeps the same contract. A new one adds its cases to ``CASES``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.env.simulators import Simulator, open_simulator
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.environment import OpenEnv

CASES = {
    "discrete": OpenEnv(env_id="CartPole-v1", num_envs=3),
    "continuous": OpenEnv(env_id="Pendulum-v1", num_envs=3),
    "options": OpenEnv(env_id="CartPole-v1", num_envs=3, options={"sutton_barto_reward": True}),
}


@pytest.fixture(params=list(CASES))
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    opened = open_simulator(CASES[request.param])
    yield opened
    opened.close()


def ids(*numbers: int) -> NDArray[np.int32]:
    return np.asarray(numbers, np.int32)


def states(*numbers: int) -> NDArray[np.int64]:
    return np.asarray(numbers, np.int64)


def random_actions(simulator: Simulator, seed: int, n: int) -> NDArray[Any]:
    rng, spec = np.random.default_rng(seed), simulator.spec
    if spec.num_actions is not None:
        return rng.integers(0, spec.num_actions, (n, *spec.action_shape)).astype(spec.action_dtype)
    low, high = (np.reshape(bound, spec.action_shape) for bound in (spec.action_low, spec.action_high))
    return rng.uniform(low, high, (n, *spec.action_shape)).astype(spec.action_dtype)


def test_shapes_and_types_are_as_declared(simulator: Simulator) -> None:
    spec = simulator.spec
    assert spec.num_envs == 3
    first = simulator.reset(ids(2, 0), states(5, 6))
    assert first.shape == (2, *spec.observation_shape)
    assert first.dtype == np.dtype(spec.observation_dtype)
    result = simulator.step(ids(0), random_actions(simulator, 0, 1))
    assert result.observations.shape == (1, *spec.observation_shape)
    assert result.rewards.dtype == np.float32
    assert result.terminated.dtype == result.truncated.dtype == np.bool_


def test_state_id_alone_decides_the_episode(simulator: Simulator) -> None:
    """Equal ids in two environments, again in the same one, and in another instance."""
    first = simulator.reset(ids(0, 1, 2), states(11, 11, 12))
    assert np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])
    path = [simulator.step(ids(0, 1), np.repeat(random_actions(simulator, t, 1), 2, axis=0)) for t in range(6)]
    for step in path:
        assert np.array_equal(step.observations[0], step.observations[1])
    assert np.array_equal(simulator.reset(ids(2), states(11))[0], first[0])
    for t, step in enumerate(path):
        again = simulator.step(ids(2), random_actions(simulator, t, 1))
        assert np.array_equal(again.observations[0], step.observations[0])
        assert again.rewards[0] == step.rewards[0]


def test_environments_that_are_not_named_do_not_move(simulator: Simulator) -> None:
    simulator.reset(ids(0, 1), states(1, 1))
    for t in range(3):
        simulator.step(ids(0), random_actions(simulator, t, 1))
    late = [simulator.step(ids(1), random_actions(simulator, t, 1)).observations for t in range(3)]
    simulator.reset(ids(0), states(1))
    assert [o.tolist() for o in late] == [
        simulator.step(ids(0), random_actions(simulator, t, 1)).observations.tolist() for t in range(3)
    ]


def test_results_are_not_changed_by_later_calls(simulator: Simulator) -> None:
    first = simulator.reset(ids(0), states(1))
    kept = first.copy()
    step = simulator.step(ids(0), random_actions(simulator, 0, 1))
    step_kept = step.observations.copy()
    simulator.step(ids(0), random_actions(simulator, 1, 1))
    assert np.array_equal(first, kept)
    assert np.array_equal(step.observations, step_kept)


def test_episodes_end_and_begin_again(simulator: Simulator) -> None:
    limit = simulator.spec.max_episode_steps
    assert limit is not None
    simulator.reset(ids(1), states(3))
    for t in range(limit):
        result = simulator.step(ids(1), random_actions(simulator, t, 1))
        if result.terminated[0] or result.truncated[0]:
            break
    assert result.terminated[0] != result.truncated[0]
    simulator.reset(ids(1), states(4))
    after = simulator.step(ids(1), random_actions(simulator, 0, 1))
    assert not after.terminated[0]
    assert not after.truncated[0]


def test_gymnasium_is_passed_through_exactly() -> None:
    simulator = open_simulator(CASES["discrete"])
    env = gymnasium.make("CartPole-v1")
    expected, _ = env.reset(seed=42)
    assert np.array_equal(simulator.reset(ids(1), states(42))[0], expected)
    for t in range(200):
        result = simulator.step(ids(1), np.asarray([t % 2]))
        observation, reward, terminated, truncated, _ = env.step(t % 2)
        assert np.array_equal(result.observations[0], observation)
        assert (result.rewards[0], result.terminated[0], result.truncated[0]) == (reward, terminated, truncated)
        if terminated or truncated:
            break
    assert t > 5
    env.close()
    simulator.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (OpenEnv(env_id="NoSuchTask-v1", num_envs=1), "'NoSuchTask-v1' cannot be made"),
        (OpenEnv(env_id="CartPole-v1", num_envs=0), "a session holds 1 to 4096"),
        (OpenEnv(env_id="CartPole-v1", num_envs=40_000), "a session holds 1 to 4096"),
        (OpenEnv(env_id="CartPole-v1", num_envs=1, options={"no_such": 1}), "cannot be made.*no_such"),
        (OpenEnv(env_id="FrozenLake-v1", num_envs=1), "only Box is supported"),
        (OpenEnv(env_id="CartPole-v1", num_envs=1, backend="warp"), "no simulator backend 'warp'"),
    ],
)
def test_what_cannot_be_made_says_why(request_: OpenEnv, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_simulator(request_)
