"""The replay buffer: every group once, only the newest transitions, draws that are pure functions, exact resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.batch.episodes import Transitions
from penstock.services.trainer.batch.replay_buffer import ReplayBuffer, sampled_rows
from penstock.shared.config.embodied import ReplayBufferConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.protocol.ids import Draw

ROW_BYTES = 4 * (2 + 1 + 1 + 2) + 1


def group(*members: tuple[int, int, int], **columns: Any) -> Transitions:
    """Build groups of transitions from (ordinal of the draw, first, last); rewards are the numbers first to last."""
    numbers = np.concatenate([np.arange(first, last + 1) for _, first, last in members])
    counts = [last + 1 - first for _, first, last in members]
    values = numbers.astype(np.float32)
    given: dict[str, Any] = {
        "draws": tuple(Draw(ordinal) for ordinal, _, _ in members),
        "group_N": np.repeat(np.arange(len(members)), counts),
        "observations_NO": np.stack([values, -values], axis=1),
        "actions_NA": values[:, None] / 7,
        "rewards_N": values,
        "next_observations_NO": np.stack([values + 1, -values - 1], axis=1),
        "terminated_N": numbers % 5 == 4,
        **columns,
    }
    return Transitions(**given)


def buffer_of(capacity: int, **keys: int) -> ReplayBuffer:
    config = ReplayBufferConfig(capacity=capacity, **keys)
    return ReplayBuffer(config, observation_size=2, action_size=1, seed=5)


def rewards_of(buffer: ReplayBuffer) -> list[float]:
    return sorted(buffer.state()["rewards"].tolist())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_group_is_inserted_once() -> None:
    buffer = buffer_of(100)
    assert buffer.insert(group((0, 0, 4))) == 5
    assert buffer.insert(group((0, 0, 4))) == 0, "the same again"
    assert buffer.insert(group((0, 0, 4), (1, 5, 7), (1, 5, 7), (2, 8, 8))) == 4
    again = group((0, 9, 9))
    assert buffer.insert(replace(again, draws=(Draw(0, 1),))) == 1, "another draw of the same ordinal"
    assert rewards_of(buffer) == list(range(10))
    assert buffer.inserted == len(buffer) == 10
    assert buffer.state()["terminated"].sum() == 2
    assert buffer.state()["groups"].tolist() == [[0, 0, 5], [1, 0, 8], [2, 0, 9], [0, 1, 10]]


def test_a_group_without_transitions_is_none() -> None:
    buffer = buffer_of(100)
    assert buffer.insert(replace(group((0, 0, 1)), draws=(Draw(0), Draw(1)))) == 2
    assert buffer.state()["groups"].tolist() == [[0, 0, 2]]


def test_the_newest_transitions_stay() -> None:
    buffer = buffer_of(4)
    buffer.insert(group((0, 0, 2)))
    buffer.insert(group((1, 3, 5)))
    assert rewards_of(buffer) == [2, 3, 4, 5]
    assert (len(buffer), buffer.inserted) == (4, 6)
    assert buffer.insert(group((0, 0, 2), (1, 3, 5))) == 0, "some of each is still stored"
    buffer.insert(group((2, 6, 15)))
    assert rewards_of(buffer) == [12, 13, 14, 15], "more at once than there is room for"
    assert buffer.state()["rewards"].tolist() == [12, 13, 14, 15]
    assert buffer.state()["groups"].tolist() == [[2, 0, 16]], "groups without stored transitions are removed"
    assert buffer.insert(group((2, 6, 15))) == 0


def test_a_draw_is_a_function_of_its_number() -> None:
    rows = sampled_rows(5, 3, stored=50, size=400)
    assert np.array_equal(rows, sampled_rows(5, 3, stored=50, size=400))
    assert set(rows) == set(range(50)), "uniform over everything that is stored"
    for other in (sampled_rows(5, 4, stored=50, size=400), sampled_rows(6, 3, stored=50, size=400)):
        assert not np.array_equal(rows, other)
    buffer = buffer_of(50)
    buffer.insert(group((0, 0, 49)))
    first = buffer.sample(3, 20)
    np.random.default_rng().random()
    buffer.sample(9, 7)
    assert same(buffer.sample(3, 20), first)
    assert first["rewards"].tolist() == sampled_rows(5, 3, stored=50, size=20).tolist()
    assert torch.equal(first["next_observations"][:, 0], first["rewards"] + 1), "rows belong together"


@pytest.mark.parametrize("count", [4, 13])
def test_resume_is_exact(count: int) -> None:
    """The buffer resumes both before and after its ring has wrapped around."""
    going, resumed = buffer_of(8), buffer_of(8)
    going.insert(group((0, 0, 1), (1, 2, count - 1)))
    saved = going.state()
    going.insert(group((2, count, count + 2)))
    assert rewards_of(going) != sorted(saved["rewards"].tolist()), "a state is a copy"
    resumed.load_state(saved)
    assert same(resumed.state(), saved)
    assert resumed.insert(group((1, 2, count - 1), (2, count, count + 2))) == 3
    assert same(resumed.state(), going.state())
    assert same(resumed.sample(7, 30), going.sample(7, 30))


def test_another_buffer_cannot_be_loaded() -> None:
    buffer, small, saved = buffer_of(8), buffer_of(4), buffer_of(8)
    saved.insert(group((0, 0, 5)))
    small.insert(group((1, 0, 1)))
    before = small.state()
    with pytest.raises(CheckpointError, match=r"'observations' is float32 \[6, 2\], expected float32 \[4, 2\]"):
        small.load_state(saved.state())
    with pytest.raises(CheckpointError, match="'groups' has another shape"):
        small.load_state({**before, "groups": torch.zeros(2, 2)})
    assert same(small.state(), before)
    with pytest.raises(CheckpointError, match="the columns are"):
        buffer.load_state({name: tensor for name, tensor in saved.state().items() if name != "actions"})


def test_bytes_are_bounded() -> None:
    full = buffer_of(10, max_bytes=10 * ROW_BYTES)
    full.insert(group((0, 0, 9)))
    columns = [column for name, column in full.state().items() if name not in ("inserted", "groups")]
    assert sum(column.nbytes for column in columns) == 10 * ROW_BYTES
    with pytest.raises(ConfigError, match=rf"capacity 11 needs {11 * ROW_BYTES} bytes .* at most 10 fit"):
        buffer_of(11, max_bytes=10 * ROW_BYTES + 3)
