"""Files of demonstrations: reading returns what was written, and invalid files are refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.shared.data.demonstrations import (
    Demonstrations,
    check_demonstrations,
    read_demonstrations,
    write_demonstrations,
)
from penstock.shared.errors import ConfigError, DataError
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec
from penstock.shared.protocol.frame import encode_frame

SHOWN = Demonstrations(
    observations={"state": np.arange(10.0).reshape(5, 2)}, actions=np.array([0, 1, 1, 0, 2]),
    rewards=np.ones(5, np.float32), cu_seqlens=np.array([0, 2, 5]), succeeded=np.array([True, False]),
    about={"task": "CartPole-v1"},
)  # fmt: skip


def spec(**keys: Any) -> EnvSpec:
    known: dict[str, Any] = {
        "env_id": "CartPole-v1", "backend": "gymnasium", "num_envs": 1, "action_shape": (), "action_dtype": "int64",
        "observations": {"state": ArraySpec((2,), "float64")}, "num_actions": 3, "action_low": [], "action_high": [],
        "max_episode_steps": 500, "has_success": False, "versions": {},
    }  # fmt: skip
    return EnvSpec(**known | keys)


def test_written_demonstrations_are_read_back(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "file", SHOWN)
    found = read_demonstrations(tmp_path / "file")
    assert (len(found), found.num_episodes, found.about) == (5, 2, SHOWN.about)
    assert found.actions.dtype == np.int64
    for name in ("actions", "rewards", "cu_seqlens", "succeeded"):
        np.testing.assert_array_equal(getattr(found, name), getattr(SHOWN, name))
    np.testing.assert_array_equal(found.observations["state"], SHOWN.observations["state"])
    assert (found.final_observations, found.terminated) == ({}, None), "a file that does not record how episodes ended"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    ended = replace(SHOWN, final_observations={"state": np.ones((2, 2))}, terminated=np.array([True, False]))
    write_demonstrations(tmp_path / "file", ended)
    found = read_demonstrations(tmp_path / "file")
    np.testing.assert_array_equal(found.final_observations["state"], ended.final_observations["state"])
    assert found.terminated is not None
    assert found.terminated.tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": np.array([0, 2, 4])}, "do not cut 5 steps"),
        ({"cu_seqlens": np.array([0, 2, 2, 5]), "succeeded": np.ones(3, np.bool_)}, "do not cut 5 steps"),
        ({"succeeded": np.ones(3, np.bool_)}, "3 rows for 2 episodes"),
        ({"rewards": np.ones(4, np.float32)}, "'rewards' has 4 rows for 5 steps"),
        ({"observations": {"state": np.full((5, 2), np.nan)}}, "a number of 'state' is not finite"),
        ({"final_observations": {"state": np.ones((1, 2))}}, "do not have the 2 rows of observations"),
        ({"final_observations": {"state": np.full((2, 2), np.inf)}}, "'final_observations' is not finite"),
        ({"terminated": np.ones(3, np.bool_)}, "'terminated' has 3 rows for 2 episodes"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_demonstrations(tmp_path / "file", replace(SHOWN, **changes))
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(DataError, match="cannot be read"):
        read_demonstrations(path)
    tree = {"schema": 1, "kind": "Demonstrations", "about": {}, "observations": {}, "actions": np.zeros(2)}
    for data, message in (
        (b"PK", "which `penstock record` writes"),
        (b"".join(encode_frame({"kind": "EpisodeGroup"})), "which `penstock record` writes"),
        (b"".join(encode_frame(tree)), "'rewards' is not a column of float32"),
        (b"".join(encode_frame({**tree, "actions": [1]})), "'observations', 'actions' or 'about'"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message):
            read_demonstrations(path)
    with pytest.raises(DataError, match="cannot be written"):
        write_demonstrations(tmp_path / "nowhere" / "file", SHOWN)


def test_demonstrations_must_have_the_spaces_of_the_simulator() -> None:
    check_demonstrations(SHOWN, ("state",), spec())
    for changes, message in (
        ({"num_actions": 2}, "actions of 'CartPole-v1' .* are 0 to 1"),
        ({"action_shape": (1,)}, r"actions in the file: of shape \[\]; .* has \[1\]"),
        ({"observations": {"state": ArraySpec((3,), "float64")}}, r"observation 'state' in the file: of shape \[2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_demonstrations(SHOWN, ("state",), spec(**changes))
