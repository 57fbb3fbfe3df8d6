"""Columns of episode groups, compared with those computed for one episode at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.trainer.batch.episodes import episode_columns, episode_facts
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import Draw

CHUNK = 3
ENDS = ("terminated", "truncated", "both", "neither")

episodes = st.lists(
    st.tuples(
        st.lists(st.integers(1, CHUNK), min_size=0, max_size=5), st.sampled_from(ENDS), st.booleans(), st.booleans()
    ),
    min_size=0,
    max_size=4,
)
"""Episodes: executed actions of each decision, the kind of end, failed or not, succeeded or not."""


def group_of(ordinal: int, drawn: list[tuple[list[int], str, bool, bool]]) -> EpisodeGroup:
    lengths = [len(valid) for valid, *_ in drawn]
    count, size = sum(lengths), len(drawn)
    cuts = np.cumsum([0, *lengths]).astype(np.int32)
    rng = np.random.default_rng(ordinal)
    valid = np.array([n for each, *_ in drawn for n in each], np.int32)
    over = {name: np.zeros((count, CHUNK), np.bool_) for name in ("terminated", "truncated")}
    for (each, end, _, _), stop in zip(drawn, cuts[1:], strict=True):
        for name in over if end == "both" else (end,) if end != "neither" else ():
            if each:
                over[name][stop - 1, each[-1] - 1] = True
    rewards = rng.integers(-9, 9, (count, CHUNK)).astype(np.float32)  # also where nothing was executed
    return EpisodeGroup(
        job="job_1", draw=Draw(ordinal), attempt="a", epoch=1, cu_seqlens=cuts,
        observations={"state": rng.standard_normal((count, 2)), "image": rng.integers(0, 255, (count, 2, 2), np.uint8)},
        final_observations={
            "state": rng.standard_normal((size, 2)), "image": rng.integers(0, 255, (size, 2, 2), np.uint8)
        },
        actions=rng.standard_normal((count, CHUNK, 1)).astype(np.float32),
        logprobs=rng.standard_normal((count, CHUNK, 1)).astype(np.float32), valid=valid, rewards=rewards, **over,
        returns=rng.standard_normal(size).astype(np.float32),
        succeeded=np.array([s for *_, s in drawn], np.bool_), solved_at_end=np.zeros(size, np.bool_),
        failed=np.array([f for *_, f, _ in drawn], np.bool_), reset_id=0, state_hashes=np.zeros(size, np.uint64),
        spans=np.array([[i, 0, 0, n] for i, n in enumerate(lengths) if n], np.int32).reshape(-1, 4),
    )  # fmt: skip


def counted(groups: list[EpisodeGroup]) -> list[dict[str, Any]]:
    """Return the columns of each episode that counts, one dictionary per episode."""
    found = []
    for place, group in enumerate(groups):
        group.check()
        for i, (start, stop) in enumerate(zip(group.cu_seqlens, group.cu_seqlens[1:], strict=False)):
            if group.failed[i] or start == stop:
                continue
            rewards = [sum(group.rewards[t, : group.valid[t]].tolist()) for t in range(start, stop)]
            states = list(group.observations["state"][start:stop])
            found.append(
                {
                    "rewards": rewards, "states": states, "group": place, "return": group.returns[i],
                    "next": [*states[1:], group.final_observations["state"][i]],
                    "steps": int(group.valid[start:stop].sum()), "terminated": group.terminated[start:stop].any(),
                    "truncated": group.truncated[start:stop].any(), "succeeded": group.succeeded[i],
                    "actions": group.actions[start:stop], "logprobs": group.logprobs[start:stop],
                    "valid": group.valid[start:stop],
                }
            )  # fmt: skip
    return found


@given(st.lists(episodes, min_size=1, max_size=4))
def test_columns_hold_the_counting_episodes_in_order(drawn: Any) -> None:
    groups = [group_of(ordinal, each) for ordinal, each in enumerate(drawn)]
    expected = counted(groups)
    if not expected:
        with pytest.raises(ProtocolError, match="episodes of the batch failed"):
            episode_columns(groups)
        return
    columns = episode_columns(groups)

    def joined(name: str) -> Any:
        return np.concatenate([each[name] for each in expected])

    assert columns.lengths.tolist() == [len(each["rewards"]) for each in expected]
    np.testing.assert_array_equal(columns.rewards_N, joined("rewards"))
    np.testing.assert_array_equal(columns.observations["state"], joined("states"))
    np.testing.assert_array_equal(columns.next_observations()["state"], joined("next"))
    assert columns.next_observations()["image"].dtype == np.uint8
    np.testing.assert_array_equal(columns.actions_NCA, joined("actions"))
    np.testing.assert_array_equal(columns.logprobs_NCA, joined("logprobs"))
    np.testing.assert_array_equal(columns.executed_NC.sum(1), joined("valid"))
    assert columns.executed_NC[:, 0].all()
    for name in ("terminated", "truncated", "succeeded", "group"):
        assert getattr(columns, f"{name}_E").tolist() == [each[name] for each in expected]
    assert columns.returns_E.tolist() == [each["return"] for each in expected]
    assert columns.draws == tuple(group.draw for group in groups)
    assert columns.num_failed + len(expected) == sum(group.num_trajectories for group in groups)
    metrics = episode_facts(columns)
    assert metrics["reward/mean"] == pytest.approx(np.mean([float(each["return"]) for each in expected]), abs=1e-6)
    assert metrics["success/rate"] == pytest.approx(np.mean([each["succeeded"] for each in expected]))
    assert metrics["episode/length"] == pytest.approx(np.mean([each["steps"] for each in expected]))
    assert metrics["episode/length_max"] == max(each["steps"] for each in expected)


def two() -> EpisodeGroup:
    return group_of(3, [([3, 2], "terminated", False, True), ([1], "truncated", False, False)])


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("rewards", (0, 1), np.nan), ("logprobs", (1, 0, 0), np.inf), ("actions", (2, 0, 0), np.nan),
     ("returns", (1,), np.nan)],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_refused_by_name(name: str, place: Any, value: float) -> None:
    array = getattr(two(), name).copy()
    array[place] = value
    with pytest.raises(ProtocolError, match=r"group 3\.0: a number of its \S+ is not finite"):
        episode_columns([replace(two(), **{name: array})])
    final = {**two().final_observations, "state": np.full((2, 2), np.nan)}
    with pytest.raises(ProtocolError, match="its final state is not finite"):
        episode_columns([replace(two(), final_observations=final)])


def test_a_number_that_is_not_finite_after_the_end_of_an_episode_does_not_matter() -> None:
    rewards = two().rewards.copy()
    rewards[1, 2] = np.nan  # two of the three actions of this decision were executed
    columns = episode_columns([replace(two(), rewards=rewards)])
    assert np.isfinite(columns.rewards_N).all()


@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 0)])
def test_an_episode_that_goes_on_after_its_end_is_refused(place: tuple[int, int]) -> None:
    terminated = two().terminated.copy()
    terminated[place] = True
    with pytest.raises(ProtocolError, match=r"group 3\.0: an episode goes on after it was over"):
        episode_columns([replace(two(), terminated=terminated)])


def test_groups_of_different_spaces_are_refused() -> None:
    other = replace(two(), draw=Draw(4), observations={**two().observations, "state": np.zeros((3, 5))})
    with pytest.raises(ProtocolError, match=r"group 4\.0 is of another space than group 3\.0"):
        episode_columns([two(), other])
