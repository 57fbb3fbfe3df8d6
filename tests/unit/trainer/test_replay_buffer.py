"""The replay buffer: every transition once, the newest kept, draws that are pure functions, exact resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.replay_buffer import ReplayBuffer, sampled_rows
from penstock.services.trainer.transitions import Rollout, Transitions
from penstock.shared.config.embodied import ReplayBufferConfig
from penstock.shared.errors import CheckpointError, ConfigError, ProtocolError

ROW_BYTES = 4 * (2 + 1 + 1 + 2) + 1


def steps(episode: int, first: int, last: int, *, end: str = "", **columns: Any) -> Transitions:
    """Steps ``first`` to ``last`` of an episode, whose reward tells which step it is; ``end`` of the last one."""
    numbers = np.arange(first, last + 1)
    over = numbers == last
    values = (100 * episode + numbers).astype(np.float32)
    given: dict[str, Any] = {
        "episodes_N": np.full(len(numbers), episode),
        "steps_N": numbers,
        "observations_NO": np.stack([values, -values], axis=1),
        "actions_NA": values[:, None] / 7,
        "rewards_N": values,
        "next_observations_NO": np.stack([values + 1, -values - 1], axis=1),
        "terminated_N": over & (end == "terminated"),
        "truncated_N": over & (end == "truncated"),
        **columns,
    }
    return Transitions(**given)


def buffer_of(capacity: int, **keys: int) -> ReplayBuffer:
    config = ReplayBufferConfig(capacity=capacity, **keys)
    return ReplayBuffer(config, observation_size=2, action_size=1, seed=5)


def kept(buffer: ReplayBuffer) -> list[float]:
    return sorted(buffer.state()["rewards"].tolist())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_transition_is_taken_in_once() -> None:
    buffer = buffer_of(100)
    assert buffer.insert(steps(0, 0, 4)) == 5
    assert buffer.insert(steps(0, 0, 4)) == 0, "the same again"
    assert buffer.insert(steps(0, 3, 7, end="terminated")) == 3, "it overlaps"
    assert buffer.insert(steps(1, 0, 2)) == 3
    assert buffer.insert(steps(0, 5, 7, end="terminated")) == 0, "an episode that is over"
    assert kept(buffer) == [*range(8), 100, 101, 102]
    assert buffer.inserted == len(buffer) == 11
    assert buffer.state()["terminated"].sum() == 1


def test_rows_of_several_episodes_in_one_call() -> None:
    buffer = buffer_of(100)
    both = [steps(0, 0, 1), steps(1, 0, 1)]
    mixed = Transitions(
        **{name: np.concatenate([getattr(part, name) for part in both])[[0, 2, 0, 3, 1]] for name in both[0].__slots__}
    )
    assert buffer.insert(mixed) == 4
    assert kept(buffer) == [0, 1, 100, 101]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (steps(0, 4, 5), "step 4 comes before step 3"),
        (steps(1, 1, 1), "step 1 comes before step 0"),
        (steps(2, 2, 2), "step 2 comes after its end"),
        (steps(-1, 0, 0), "numbered from 0"),
        (steps(3, 0, 0, actions_NA=np.zeros((1, 2), np.float32)), r"actions have the shape \[2\]"),
    ],
)
def test_what_cannot_be_taken_in_changes_nothing(given: Transitions, message: str) -> None:
    buffer = buffer_of(10)
    buffer.insert(steps(0, 0, 2))
    buffer.insert(steps(2, 0, 1, end="truncated"))
    before = buffer.state()
    with pytest.raises(ProtocolError, match=message):
        buffer.insert(given)
    assert same(buffer.state(), before)
    assert buffer.insert(steps(0, 3, 3)) == 1


def test_the_newest_are_kept() -> None:
    buffer = buffer_of(4)
    buffer.insert(steps(0, 0, 2))
    buffer.insert(steps(0, 3, 5))
    assert kept(buffer) == [2, 3, 4, 5]
    assert (len(buffer), buffer.inserted) == (4, 6)
    buffer.insert(steps(0, 6, 15))
    assert kept(buffer) == [12, 13, 14, 15], "more at once than there is room for"
    assert buffer.state()["rewards"].tolist() == [12, 13, 14, 15]


def test_episodes_that_are_over_are_forgotten_and_still_known() -> None:
    buffer = buffer_of(8)
    for episode in (1, 0, 2, 4):
        buffer.insert(steps(episode, 0, 3, end="truncated"))
    state = buffer.state()
    assert state["floor"].tolist() == [3]
    assert state["marks"].tolist() == [[4, 4, 1]]
    assert [buffer.insert(steps(episode, 0, 3, end="truncated")) for episode in (0, 1, 2, 4)] == [0] * 4
    buffer.insert(steps(3, 0, 0))
    buffer.give_up([3, 5])
    assert buffer.state()["floor"].tolist() == [6]
    assert len(buffer.state()["marks"]) == 0
    assert buffer.insert(steps(6, 0, 0)) == 1


def test_a_draw_is_a_function_of_its_number() -> None:
    rows = sampled_rows(5, 3, stored=50, size=400)
    assert np.array_equal(rows, sampled_rows(5, 3, stored=50, size=400))
    assert set(rows) == set(range(50)), "uniform over everything that is stored"
    for other in (sampled_rows(5, 4, stored=50, size=400), sampled_rows(6, 3, stored=50, size=400)):
        assert not np.array_equal(rows, other)
    buffer = buffer_of(50)
    buffer.insert(steps(0, 0, 49))
    first = buffer.sample(3, 20)
    np.random.default_rng().random()
    buffer.sample(9, 7)
    assert same(buffer.sample(3, 20), first)
    assert first["rewards"].tolist() == sampled_rows(5, 3, stored=50, size=20).tolist()
    assert torch.equal(first["next_observations"][:, 0], first["rewards"] + 1), "rows belong together"


@pytest.mark.parametrize("count", [4, 13])
def test_resume_is_exact(count: int) -> None:
    """Before and after the ring has come round."""
    going, resumed = buffer_of(8), buffer_of(8)
    going.insert(steps(0, 0, count - 1))
    saved = going.state()
    going.insert(steps(0, count, count + 2, end="terminated"))
    assert kept(going) != sorted(saved["rewards"].tolist()), "a state is a copy"
    resumed.load_state(saved)
    assert same(resumed.state(), saved)
    assert resumed.insert(steps(0, count - 2, count + 2, end="terminated")) == 3
    assert same(resumed.state(), going.state())
    assert same(resumed.sample(7, 30), going.sample(7, 30))


def test_another_buffer_cannot_be_loaded() -> None:
    buffer, small, saved = buffer_of(8), buffer_of(4), buffer_of(8)
    saved.insert(steps(0, 0, 5))
    small.insert(steps(0, 0, 1))
    before = small.state()
    with pytest.raises(CheckpointError, match=r"'observations' is float32 \[6, 2\], expected float32 \[4, 2\]"):
        small.load_state(saved.state())
    assert same(small.state(), before)
    with pytest.raises(CheckpointError, match="the columns are"):
        buffer.load_state({name: tensor for name, tensor in saved.state().items() if name != "actions"})


def test_bytes_are_bounded() -> None:
    buffer_of(10, max_bytes=10 * ROW_BYTES)
    with pytest.raises(ConfigError, match=rf"capacity 11 needs {11 * ROW_BYTES} bytes .* at most 10 fit"):
        buffer_of(11, max_bytes=10 * ROW_BYTES + 3)


def test_columns_that_are_not_right_are_refused() -> None:
    with pytest.raises(ProtocolError, match="rewards has 3 rows, the other columns 2"):
        steps(0, 0, 1, rewards_N=np.zeros(3, np.float32))
    with pytest.raises(ProtocolError, match="next_observations: a number of row 1 is not finite"):
        steps(0, 0, 1, next_observations_NO=np.array([[0, 0], [0, np.inf]], np.float32))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards_N": np.array([0, np.nan, 0], np.float32)}, "rewards: a number of row 1 is not finite"),
        ({"logprobs_N": np.zeros(2, np.float32)}, "logprobs has 2 rows, the other columns 3"),
        ({"terminated_S": np.zeros(1, np.bool_)}, "terminated has 1 rows, the other columns 2"),
        ({"cu_seqlens_S1": np.array([0, 3, 3])}, "does not cut 3 transitions"),
        ({"cu_seqlens_S1": np.array([0, 1, 2])}, "does not cut 3 transitions"),
    ],
)
def test_rollouts_that_are_not_right_are_refused(columns: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "observations_NO": np.zeros((3, 2), np.float32),
        "actions_NA": np.zeros((3, 1), np.float32),
        "logprobs_N": np.zeros(3, np.float32),
        "rewards_N": np.zeros(3, np.float32),
        "cu_seqlens_S1": np.array([0, 1, 3]),
        "last_observations_SO": np.zeros((2, 2), np.float32),
        "terminated_S": np.zeros(2, np.bool_),
    }
    assert len(Rollout(**right)) == 3
    with pytest.raises(ProtocolError, match=message):
        Rollout(**right | columns)
