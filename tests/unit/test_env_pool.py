"""The env pool on real CartPole: chunks, lengths of episodes, final observations, automatic resets, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import Simulator, open_simulator
from penstock.shared.errors import Conflict, PenstockError, ProtocolError
from penstock.shared.protocol.embodied.environment import (
    OpenEnv,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
    decode_env,
    encode_env,
)

NOWHERE = Path("/nonexistent")


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    simulator = open_simulator(OpenEnv(env_id="CartPole-v1", num_envs=3), NOWHERE)
    yield simulator
    simulator.close()


@pytest.fixture
def pool(simulator: Simulator) -> EnvPool:
    return EnvPool(simulator)


def reset(pool: EnvPool, envs: list[int], states: list[int]) -> ResetReply:
    return pool.reset(ResetRequest(seq=0, env_ids=np.asarray(envs, np.int32), state_ids=np.asarray(states, np.int64)))


def step(
    pool: EnvPool, envs: list[int], actions: Any, *, auto_reset: bool = True, next_states: list[int] | None = None
) -> StepReply:
    return pool.step(
        StepRequest(
            seq=1,
            auto_reset=auto_reset,
            env_ids=np.asarray(envs, np.int32),
            actions=np.asarray(actions),
            next_state_ids=np.asarray(next_states or [], np.int64),
        )
    )


def reference(seed: int, action: int) -> tuple[list[NDArray[np.float32]], int]:
    """Play an episode of plain Gymnasium with one constant action; return its observations and its length."""
    env = gymnasium.make("CartPole-v1")
    observations = [env.reset(seed=seed)[0]]
    ended = False
    while not ended:
        observation, _, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        ended = terminated or truncated
    env.close()
    return observations, len(observations) - 1


def test_group_members_start_in_equal_states_with_equal_hashes(pool: EnvPool) -> None:
    reply = reset(pool, [0, 1, 2], [7, 7, 8])
    assert reply.state_hashes[0] == reply.state_hashes[1] != reply.state_hashes[2]
    assert reply.episode_ids.tolist() == [0, 1, 2]


def test_chunk_stops_at_the_end_and_keeps_the_final_observation(pool: EnvPool) -> None:
    """Pushing one way ends CartPole after about ten steps: in the middle of a chunk of 30."""
    observations, length = reference(seed=5, action=1)
    reset(pool, [0, 1], [5, 5])
    actions = np.ones((2, 30), np.int64)
    actions[1] = np.arange(30) % 2
    reply = step(pool, [0, 1], actions, next_states=[100, 101])
    assert reply.ended.tolist() == [True, False]
    assert reply.valid.tolist() == [length, 30]
    assert reply.terminated[0].tolist() == [t == length - 1 for t in range(30)]
    assert not reply.truncated.any()
    assert reply.rewards[0].tolist() == [1.0] * length + [0.0] * (30 - length)
    assert np.array_equal(reply.final_observations["state"], observations[-1][None])
    assert np.array_equal(reply.observations["state"][0], reference(seed=100, action=1)[0][0])
    assert reply.state_ids.tolist() == [5, 5]
    assert (reply.episode_ids.tolist(), reply.next_episode_ids.tolist()) == ([0, 1], [2, 1])
    assert (reply.returns.tolist(), reply.lengths.tolist()) == ([length, 30.0], [length, 30])


def test_episode_lengths_count_over_chunks_and_restart_after_the_end(pool: EnvPool) -> None:
    _, length = reference(seed=5, action=1)
    reset(pool, [0], [5])
    chunks = [step(pool, [0], np.ones((1, 4), np.int64)) for _ in range(4)]
    ended = next(chunk for chunk in chunks if chunk.ended[0])
    assert ended.lengths.tolist() == [length]
    assert sum(chunk.valid[0] for chunk in chunks[: chunks.index(ended) + 1]) == length
    after = step(pool, [0], np.ones((1, 1), np.int64))
    assert after.state_ids.tolist() == [5 + 3], "without ids of the caller, an environment adds B to its last id"
    assert after.episode_ids.tolist() == [1]


def test_time_limit_is_a_truncation(pool: EnvPool) -> None:
    simulator = open_simulator(OpenEnv(env_id="CartPole-v1", num_envs=1, options={"max_episode_steps": 3}), NOWHERE)
    short = EnvPool(simulator)
    reset(short, [0], [1])
    reply = step(short, [0], [[0, 1, 0, 1]])
    assert reply.truncated.tolist() == [[False, False, True, False]]
    assert not reply.terminated.any()
    assert reply.valid.tolist() == [3]
    simulator.close()


def test_without_automatic_reset_an_ended_episode_refuses_steps(pool: EnvPool) -> None:
    reset(pool, [0, 1], [5, 6])
    reply = step(pool, [0], np.ones((1, 30), np.int64), auto_reset=False)
    assert np.array_equal(reply.observations["state"], reply.final_observations["state"])
    with pytest.raises(Conflict, match=r"environments \[0\] have no running episode"):
        step(pool, [0, 1], np.ones((2, 1), np.int64))
    reset(pool, [0], [9])
    untouched = step(pool, [0, 1], np.ones((2, 1), np.int64))
    assert untouched.lengths.tolist() == [1, 1], "the refused request stepped nothing"


@pytest.mark.parametrize(
    ("envs", "actions", "message"),
    [
        ([0, 0], [[1], [1]], "list of different environments"),
        ([], np.ones((0, 1), np.int64), "list of different environments"),
        ([3], [[1]], r"environments 0\.\.2"),
        ([0], [1], r"shape \[1\]; CartPole-v1 needs \[1, C\]"),
        ([0], np.ones((1, 0), np.int64), r"shape \[1, 0\]"),
        ([0], [[1.0]], "actions are float64; CartPole-v1 needs int64"),
        ([0], [[0, 2]], r"must lie in 0\.\.1"),
        ([2], [[1]], r"environments \[2\] have no running episode"),
    ],
)
def test_requests_that_do_not_fit_are_refused(pool: EnvPool, envs: list[int], actions: Any, message: str) -> None:
    reset(pool, [0, 1], [1, 2])
    with pytest.raises(PenstockError, match=message):
        step(pool, envs, actions)
    assert pool.num_steps == 0


def test_state_ids_must_fit(pool: EnvPool) -> None:
    with pytest.raises(ProtocolError, match="state_ids"):
        reset(pool, [0, 1], [1])
    with pytest.raises(ProtocolError, match="state_ids"):
        reset(pool, [0], [-1])
    reset(pool, [0, 1], [1, 2])
    with pytest.raises(ProtocolError, match="next_state_ids"):
        step(pool, [0, 1], np.ones((2, 1), np.int64), next_states=[4])


def test_continuous_actions_must_be_finite() -> None:
    simulator = open_simulator(OpenEnv(env_id="Pendulum-v1", num_envs=1), NOWHERE)
    pool = EnvPool(simulator)
    reset(pool, [0], [1])
    with pytest.raises(ProtocolError, match="not finite"):
        step(pool, [0], np.full((1, 1, 1), np.nan, np.float32))
    assert step(pool, [0], np.zeros((1, 2, 1), np.float32)).valid.tolist() == [2]
    simulator.close()


def test_messages_survive_the_wire(pool: EnvPool) -> None:
    request = ResetRequest(seq=4, env_ids=np.asarray([1], np.int32), state_ids=np.asarray([2], np.int64))
    back = decode_env(encode_env(request), StepRequest, ResetRequest)
    assert isinstance(back, ResetRequest)
    assert (back.seq, back.env_ids.tolist(), back.state_ids.tolist()) == (4, [1], [2])
    reply = encode_env(pool.reset(back))
    assert decode_env(reply, ResetReply).observations["state"].shape == (1, 4)
    with pytest.raises(ProtocolError, match="expected StepReply, got another"):
        decode_env(reply, StepReply)
    wrong = ResetRequest(seq=0, env_ids=np.zeros(1, np.int64), state_ids=np.zeros(1, np.int64))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"ResetRequest\.env_ids must be an array of int32"):
        decode_env(encode_env(wrong), ResetRequest)
