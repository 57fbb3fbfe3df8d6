"""Adapter of world models, learned models that replace a simulator; `penstock sims world-model train` fits them.

An ensemble of small networks predicts the change of the observation, the reward, and whether the episode terminates,
from observation and action (Ha & Schmidhuber 2018, arXiv 1803.10122). Each step uses one member drawn at random, so
that a policy does not exploit the errors of a single member (trajectory sampling TS1 of Chua et al. 2018, arXiv
1805.12114). Members predict single values, so they do not reproduce randomness of the simulator itself.

The state id seeds the draws of members. Episode ``n`` begins where the recorded episode ``n mod S`` began. With
``starts: anywhere`` it begins in a recorded state drawn at random, as in the short branched rollouts of Janner et al.
2019 (arXiv 1906.08253), for which a job sets a short ``environment.horizon``.

Shapes: K = members, D = size of all observations together, A = size of an action (one-hot if discrete), S = recorded
episodes, M = recorded states.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["STARTS", "WorldModel", "make", "read_tensors"]

FACTS, TENSORS = "world_model.json", "world_model.safetensors"
FORMAT = 1
STARTS = ("recorded", "anywhere")
DTYPES = {"F32": "<f4"}
"""NumPy dtypes by safetensors dtype; models contain no others."""


class WorldModel:
    """One environment, simulated by a model. It clips observations and rewards to the recorded range, slightly widened.

    Args:
        task: the simulator's task, which must be the one that the model was trained on.
        folder: folder that `penstock sims world-model train` wrote.
        starts: one of ``STARTS``.

    Raises:
        ValueError: the folder holds no model, or the model of another task.
    """

    task = ""

    def __init__(self, task: str, folder: Path, *, starts: str = "recorded") -> None:
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
        self._state = np.zeros(0, np.float32)
        self._steps = 0
        self._random = np.random.default_rng(0)
        action = facts["action"]
        self.spec: dict[str, Any] = {
            "observations": {name: (shape, dtype) for name, (shape, dtype) in facts["observations"].items()},
            "action": (action["shape"], action["dtype"]), "num_actions": action["num_actions"],
            "low": action["low"], "high": action["high"], "max_episode_steps": self._horizon,
            "has_success": self._success, "versions": {**facts["versions"], "world_model": facts["digest"]},
            "snapshots": True,
        }  # fmt: skip

    def reset(self, state_id: int) -> Mapping[str, NDArray[Any]]:
        """Begin episode ``state_id``."""
        self._random, self._steps = np.random.default_rng(state_id), 0
        place = int(self._random.integers(len(self._starts))) if self._anywhere else state_id % len(self._starts)
        self._state = self._starts[place]
        return self._named()

    def step(self, action: Any) -> tuple[Mapping[str, NDArray[Any]], float, bool, bool, bool]:
        """Predict one step with a random member. Termination is a success if every recorded termination was a
        success."""
        t = self._tensors
        member = int(self._random.integers(len(self._layers[0][0])))
        x = np.concatenate([self._state, self._encoded(action)])
        x = (x - t["input_mean"]) / t["input_std"]
        for number, (weight, bias) in enumerate(self._layers):
            x = x @ weight[member] + bias[member]
            if number < len(self._layers) - 1:
                x = x / (1 + np.exp(-np.clip(x, -60, 60)))  # SiLU
        predicted = x[:-1] * t["output_std"] + t["output_mean"]
        self._state = np.clip(self._state + predicted[:-1], *t["state_bounds"])
        reward = float(np.clip(predicted[-1], *t["reward_bounds"]))
        self._steps += 1
        over = self._ends and bool(x[-1] > 0)
        return self._named(), reward, over, not over and self._steps >= self._horizon, over and self._success

    def state(self) -> bytes:
        """Return observation, number of steps and random generator, which determine the rest of the episode."""
        return pickle.dumps([self._state.tobytes(), self._steps, self._random.bit_generator.state], protocol=4)

    def snapshot(self) -> dict[str, Any]:
        """Return observation, number of steps and random generator."""
        return {"state": self._state, "steps": self._steps, "random": self._random.bit_generator.state}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self._random = np.random.default_rng(0)
        self._random.bit_generator.state = values["random"]
        self._state, self._steps = values["state"], values["steps"]

    def close(self) -> None:
        """Do nothing, because the environment holds no resources."""

    def _encoded(self, action: Any) -> NDArray[np.float32]:
        count = self.spec["num_actions"]
        if count is None:
            return np.asarray(action, np.float32).ravel()
        one_hot = np.zeros(count, np.float32)
        one_hot[int(action)] = 1
        return one_hot

    def _named(self) -> Mapping[str, NDArray[Any]]:
        """Split the flat state into observations by name, in the order of ``spec``."""
        found, start = {}, 0
        for name, (shape, dtype) in self.spec["observations"].items():
            size = math.prod(shape)
            found[name] = self._state[start : start + size].reshape(shape).astype(dtype)
            start += size
        return found


def make(env_id: str, options: dict[str, Any]) -> WorldModel:
    """Create an environment from the options ``model`` (a folder) and ``starts`` (`recorded` or `anywhere`).

    Raises:
        ValueError: an option is invalid, or ``model`` is missing.
    """
    unknown = sorted(options.keys() - {"model", "starts"})
    if unknown:
        raise ValueError(f"no option '{unknown[0]}'; there is: model, starts")
    if "model" not in options:
        raise ValueError("options.model is missing: the folder that `penstock sims world-model train` wrote")
    return WorldModel(env_id, Path(options["model"]), starts=options.get("starts", "recorded"))


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
