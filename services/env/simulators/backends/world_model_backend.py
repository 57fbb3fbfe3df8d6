"""Adapter of world models, learned models that replace a simulator; `penstock sims world-model train` fits them.

An ensemble of small networks predicts the change of the observation, the reward, and whether the episode terminates,
from observation and action (Ha & Schmidhuber 2018, arXiv 1803.10122). Each step uses one member drawn at random, so
that a policy does not exploit the errors of a single member (trajectory sampling TS1 of Chua et al. 2018, arXiv
1805.12114). Members predict single values, so they do not reproduce randomness of the simulator itself.

The state id seeds the draws of members. Episode ``n`` begins where the recorded episode ``n mod S`` began. With
``starts: anywhere`` it begins in a recorded state drawn at random, as in the short branched rollouts of Janner et al.
2019 (arXiv 1906.08253), for which a job sets a short ``environment.horizon``.

All environments of a process are simulated together. Each row is multiplied on its own, because the rounding of a
matrix product depends on the number of rows: so an episode is the same in a session of any size, bit for bit.

Shapes: N = environments, n = environments of one call, K = members, D = size of all observations together, A = size
of an action (one-hot if discrete), F = D + A, O = outputs of a network, S = recorded episodes, M = recorded states.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["STARTS", "WorldModelBatch", "make_batch", "read_tensors"]

FACTS, TENSORS = "world_model.json", "world_model.safetensors"
FORMAT = 1
STARTS = ("recorded", "anywhere")
DTYPES = {"F32": "<f4"}
"""NumPy dtypes by safetensors dtype; models contain no others."""
DRAWS = 64
"""Number of members that an environment draws at once."""


class WorldModelBatch:
    """Environments that a learned model simulates. Observations and rewards are clipped to the recorded range, slightly
    widened.

    Args:
        task: the simulator's task, which must be the one that the model was trained on.
        folder: folder that `penstock sims world-model train` wrote.
        num_envs: N.
        starts: one of ``STARTS``.

    Raises:
        ValueError: the folder holds no model, or the model of another task.
    """

    task = ""

    def __init__(self, task: str, folder: Path, num_envs: int, *, starts: str = "recorded") -> None:
        if starts not in STARTS:
            raise ValueError(f"starts '{starts}': it is one of {', '.join(STARTS)}")
        facts = _read_facts(folder)
        if facts["task"] != task:
            raise ValueError(f"{folder} is a model of '{facts['task']}' ({facts['backend']}), not of '{task}'")
        self._tensors = read_tensors(folder / TENSORS)
        layers = sorted(int(name.split(".")[1]) for name in self._tensors if name.endswith(".weight"))
        self._layers = [(self._tensors[f"layers.{i}.weight"], self._tensors[f"layers.{i}.bias"]) for i in layers]
        self._starts = self._tensors["starts" if starts == "recorded" else "states"]
        self._anywhere = starts == "anywhere"
        self._ends, self._horizon = bool(facts["ends"]), int(facts["horizon"])
        self._success = bool(facts["has_success"])
        self._states_ND = np.zeros((num_envs, self._starts.shape[1]), np.float32)
        self._steps_N = np.zeros(num_envs, np.int64)
        self._state_ids_N = np.zeros(num_envs, np.int64)
        self._members_NB = np.zeros((num_envs, DRAWS), np.int64)
        """Members of the steps from the last multiple of ``DRAWS`` on."""
        self._random = [np.random.default_rng(0)] * num_envs
        action = facts["action"]
        self.spec: dict[str, Any] = {
            "observations": {name: (shape, dtype) for name, (shape, dtype) in facts["observations"].items()},
            "action": (action["shape"], action["dtype"]), "num_actions": action["num_actions"],
            "low": action["low"], "high": action["high"], "max_episode_steps": self._horizon,
            "has_success": self._success, "versions": {**facts["versions"], "world_model": facts["digest"]},
            "snapshots": True,
        }  # fmt: skip

    def reset(self, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Begin episodes."""
        places = [
            self._begin(env, state_id) for env, state_id in zip(env_ids.tolist(), state_ids.tolist(), strict=True)
        ]
        self._states_ND[env_ids], self._steps_N[env_ids] = self._starts[places], 0
        return self._named(env_ids)

    def step(
        self, env_ids: NDArray[np.int32], actions: NDArray[Any]
    ) -> tuple[Mapping[str, NDArray[Any]], Any, Any, Any, Any]:
        """Predict one step of each environment, with a random member of the ensemble. A termination counts as a success
        if every recorded termination was a success."""
        t, drawn_n = self._tensors, self._steps_N[env_ids] % DRAWS
        for env in env_ids[drawn_n == 0].tolist():
            self._members_NB[env] = self._random[env].integers(len(self._layers[0][0]), size=DRAWS)
        states_nD = self._states_ND[env_ids]
        x_nF = np.concatenate([states_nD, self._encoded(actions)], axis=1)
        out_nO = self._output((x_nF - t["input_mean"]) / t["input_std"], self._members_NB[env_ids, drawn_n])
        predicted_nO = out_nO[:, :-1] * t["output_std"] + t["output_mean"]
        self._states_ND[env_ids] = np.clip(states_nD + predicted_nO[:, :-1], *t["state_bounds"])
        self._steps_N[env_ids] += 1
        over_n = (out_nO[:, -1] > 0) & self._ends
        cut_n = ~over_n & (self._steps_N[env_ids] >= self._horizon)
        return (
            self._named(env_ids),
            np.clip(predicted_nO[:, -1], *t["reward_bounds"]),
            over_n,
            cut_n,
            over_n & self._success,
        )

    def states(self, env_ids: NDArray[np.int32]) -> list[bytes]:
        """Return state id, number of steps and observation, which determine the rest of the episode."""
        return [
            struct.pack("<qq", self._state_ids_N[env], self._steps_N[env]) + self._states_ND[env].tobytes()
            for env in env_ids.tolist()
        ]

    def snapshot(self, env_id: int) -> dict[str, Any]:
        """Return state id, number of steps and observation."""
        state_id, steps = int(self._state_ids_N[env_id]), int(self._steps_N[env_id])
        return {"state_id": state_id, "steps": steps, "state": self._states_ND[env_id].copy()}

    def restore(self, env_id: int, values: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        steps = values["steps"]
        if not 0 <= steps < self._horizon:
            raise ValueError(f"the snapshot was made after {steps} steps, and episodes have {self._horizon}")
        self._begin(env_id, values["state_id"])
        drawn = self._random[env_id].integers(len(self._layers[0][0]), size=-(-steps // DRAWS) * DRAWS)
        if steps % DRAWS:
            self._members_NB[env_id] = drawn[-DRAWS:]
        self._states_ND[env_id], self._steps_N[env_id] = values["state"], steps

    def close(self) -> None:
        """Do nothing, because the environments hold no resources."""

    def _begin(self, env: int, state_id: int) -> int:
        """Seed the random draws of an episode; return the index of the episode's first state."""
        self._state_ids_N[env] = state_id
        random = self._random[env] = np.random.default_rng(state_id)
        return int(random.integers(len(self._starts))) if self._anywhere else state_id % len(self._starts)

    def _output(self, x_nF: NDArray[np.float32], members_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the outputs [n, O] of the ensemble, each row from one member. No row affects the outputs of another
        row."""
        order_n = np.argsort(members_n, kind="stable")
        members_n = members_n[order_n]
        drawn, firsts = np.unique(members_n, return_index=True)
        rows_of_drawn = [slice(*cut) for cut in itertools.pairwise([*firsts.tolist(), len(members_n)])]
        x_n1F = x_nF[order_n][:, None]
        for number, (weight_KFO, bias_KO) in enumerate(self._layers):
            y_n1O = np.empty((len(x_n1F), 1, weight_KFO.shape[2]), np.float32)
            for member, rows in zip(drawn.tolist(), rows_of_drawn, strict=True):
                np.matmul(x_n1F[rows], weight_KFO[member], out=y_n1O[rows])  # [n, 1, F]: each row on its own
            x_n1F = y_n1O + bias_KO[members_n][:, None]
            if number < len(self._layers) - 1:
                x_n1F = x_n1F / (1 + np.exp(-np.clip(x_n1F, -60, 60)))  # SiLU
        out_nO = np.empty_like(x_n1F[:, 0])
        out_nO[order_n] = x_n1F[:, 0]
        return out_nO

    def _encoded(self, actions: NDArray[Any]) -> NDArray[np.float32]:
        count = self.spec["num_actions"]
        if count is None:
            return np.asarray(actions, np.float32).reshape(len(actions), -1)
        one_hot_nA = np.zeros((len(actions), count), np.float32)
        one_hot_nA[np.arange(len(actions)), actions.reshape(len(actions))] = 1
        return one_hot_nA

    def _named(self, env_ids: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        """Split flat states into observations [n, ...] by name, in the order of ``spec``."""
        states_nD, found, start = self._states_ND[env_ids], {}, 0
        for name, (shape, dtype) in self.spec["observations"].items():
            size = math.prod(shape)
            found[name] = states_nD[:, start : start + size].reshape(len(env_ids), *shape).astype(dtype)
            start += size
        return found


def make_batch(env_id: str, options: dict[str, Any], num_envs: int) -> WorldModelBatch:
    """Create environments from the options ``model`` (a folder) and ``starts`` (`recorded` or `anywhere`).

    Raises:
        ValueError: an option is invalid, or ``model`` is missing.
    """
    unknown = sorted(options.keys() - {"model", "starts"})
    if unknown:
        raise ValueError(f"no option '{unknown[0]}'; there is: model, starts")
    if "model" not in options:
        raise ValueError("options.model is missing: the folder that `penstock sims world-model train` wrote")
    return WorldModelBatch(env_id, Path(options["model"]), num_envs, starts=options.get("starts", "recorded"))


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Read float32 tensors by name from a safetensors file, without the package `safetensors`, which may be missing.

    Raises:
        ValueError: the file cannot be read, or is no safetensors file of float32.
    """
    try:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        entries = {name: one for name, one in json.loads(data[8:start]).items() if name != "__metadata__"}
        return {
            name: np.frombuffer(data[start:], DTYPES[one["dtype"]])[
                one["data_offsets"][0] // 4 : one["data_offsets"][1] // 4
            ].reshape(one["shape"])
            for name, one in entries.items()
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no tensors of a world model: {error}") from None


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_bytes())
        known = facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} holds no world model, which `penstock sims world-model train` writes: {error}"
        ) from None
    if known != FORMAT:
        raise ValueError(f"{folder}: format {known} of world models is not known here, only {FORMAT}")
    return facts
