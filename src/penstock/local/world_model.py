"""Trains world models: ensembles of small networks that learn a simulator from recorded episodes.

The env service runs the result as the simulator ``world_model``; its adapter describes the method and its sources.

Shapes: K = members, N = transitions, E = episodes, D = size of all observations together, A = size of an action
(one-hot if discrete), B = minibatch size, F = D + A input features, O = D + 2 outputs: the change of the observation,
the reward, and the logit of termination.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.services.env.simulators.backends.world_model_backend import FACTS, FORMAT, TENSORS
from penstock.shared.data.demonstrations import ActionSpace, Demonstrations
from penstock.shared.errors import ConfigError, DataError

__all__ = ["Fitted", "Fitting", "fit", "write_world_model"]

WIDENED = 0.1
"""Margin by which predictions may leave the recorded range on each side, as fraction of the range."""
MOST_STARTS = 50_000
"""Maximum number of recorded states that a model stores for ``starts: anywhere``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Hyperparameters of a fit.

    Attributes:
        members: K; each is trained on a bootstrap sample of the transitions (arXiv 1805.12114).
        hidden_sizes: widths of the hidden layers, with SiLU.
        epochs: passes over the transitions; a cosine schedule decays the learning rate to 0.
        held_out: fraction of the episodes that only serve to measure the error; at least one episode.
    """

    members: int = 5
    hidden_sizes: tuple[int, ...] = (64, 64)
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 5e-3
    held_out: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A fitted model: float32 tensors by name, and its description (``facts``) for the env service and for users.

    ``facts["error"]`` is the one-step error of the members' mean prediction on held-out episodes. ``state`` and
    ``reward``: root mean square error divided by the standard deviation of the target, without constant ones.
    ``ends``: fraction of steps whose termination was predicted wrongly.
    """

    tensors: dict[str, NDArray[np.float32]]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Transitions:
    inputs_NF: NDArray[np.float32]
    """Observation and action of each step."""
    targets_NO: NDArray[np.float32]
    """Change of the observation, reward, and 1 if the episode terminated at this step."""

    def __len__(self) -> int:
        return len(self.inputs_NF)


def fit(
    shown: Demonstrations, fitting: Fitting, *, on_epoch: Callable[[int, float], None] = lambda epoch, loss: None
) -> Fitted:
    """Fit an ensemble of networks to recorded episodes. Blocking.

    Args:
        on_epoch: called with the number of finished epochs and the mean loss of the last one.

    Raises:
        ConfigError: torch is not installed.
        DataError: the episodes are not suited to learn dynamics; the message tells how to record suitable ones.
    """
    action = _check(shown)
    states_ND, cuts = _flat(shown.observations), shown.cu_seqlens
    transitions = _transitions(shown, states_ND, action)
    order = np.random.default_rng(fitting.seed).permutation(shown.num_episodes)
    count = max(1, round(fitting.held_out * shown.num_episodes))
    held_out, seen = _rows(order[:count], cuts), _rows(order[count:], cuts)
    scale = _scales(transitions, seen)
    ends = bool(transitions.targets_NO[seen, -1].any())
    with _one_thread():
        layers = _train(_scaled(transitions, seen, scale), fitting, ends=ends, on_epoch=on_epoch)
    tensors = layers | scale | _bounds(states_ND, shown)
    every = max(1, -(-len(states_ND) // MOST_STARTS))
    tensors |= {"starts": states_ND[cuts[:-1]], "states": states_ND[::every]}
    varies_O = scale["output_std"] > 0
    error = _error(layers, _scaled(transitions, held_out, scale), varies_O) | ({} if ends else {"ends": 0.0})
    facts = {
        "format": FORMAT, "task": shown.about["task"], "backend": shown.about["backend"],
        "versions": shown.about.get("versions", {}), "horizon": int(shown.about["horizon"]),
        "observations": {name: [one.shape[1:], str(one.dtype)] for name, one in shown.observations.items()},
        "action": {**msgspec.to_builtins(action), "shape": shown.actions.shape[1:], "dtype": str(shown.actions.dtype)},
        "ends": ends, "has_success": ends and bool((shown.succeeded == shown.terminated).all()),
        "episodes": shown.num_episodes, "transitions": len(transitions), "error": error,
        "fitting": asdict(fitting),
    }  # fmt: skip
    return Fitted(tensors={name: np.ascontiguousarray(one, np.float32) for name, one in tensors.items()}, facts=facts)


def write_world_model(folder: Path, fitted: Fitted) -> None:
    """Write a model to ``folder``. Its description is written last, so that a folder with a description is complete.

    Raises:
        DataError: the folder cannot be written.
    """
    from safetensors.numpy import save  # not installed with the client

    data = save(fitted.tensors)
    facts = fitted.facts | {"digest": hashlib.sha256(data).hexdigest()[:16]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((TENSORS, data), (FACTS, json.dumps(facts, indent=1).encode())):
            part = folder / f"{name}.partial"
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.rename(folder / name)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None


# -- training data ---------------------------------------------------------------------------------------------------


def _check(shown: Demonstrations) -> ActionSpace:
    """Return the action space of recorded episodes. Raises DataError if a world model cannot be learned from them."""
    images = [name for name, one in shown.observations.items() if one.ndim > 2]
    if images:
        raise DataError(f"observation '{images[0]}' is no vector: world models are of vectors; record without images")
    if shown.about.get("noise"):
        raise DataError("the file was recorded with noise, so it does not hold the actions that were executed")
    if not shown.final_observations or shown.terminated is None:
        raise DataError("the file does not say how its episodes ended: record it anew with `penstock record`")
    if shown.num_episodes < 2:
        raise DataError("one episode is too few: some are held out to measure the error")
    missing = [name for name in ("task", "backend", "horizon", "action") if name not in shown.about]
    if missing:
        raise DataError(f"the file does not name its '{missing[0]}': record it with `penstock record`")
    try:
        return msgspec.convert(shown.about["action"], ActionSpace)
    except msgspec.ValidationError as error:
        raise DataError(f"the file does not say what its actions are: {error}") from None


def _flat(observations: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Concatenate all observations of each row to one vector; return [rows, size of the vector]."""
    return np.concatenate([one.reshape(len(one), -1) for one in observations.values()], axis=1).astype(np.float32)


def _transitions(shown: Demonstrations, states_ND: NDArray[np.float32], action: ActionSpace) -> _Transitions:
    last = shown.cu_seqlens[1:] - 1
    following = np.concatenate([states_ND[1:], states_ND[:1]])
    following[last] = _flat(shown.final_observations)
    ended = np.zeros(len(shown), np.float32)
    ended[last] = shown.terminated
    if action.num_actions is None:
        actions_NA = shown.actions.reshape(len(shown), -1).astype(np.float32)
    else:
        actions_NA = np.eye(action.num_actions, dtype=np.float32)[shown.actions]
    targets = np.concatenate([following - states_ND, shown.rewards[:, None], ended[:, None]], axis=1)
    return _Transitions(np.concatenate([states_ND, actions_NA], axis=1), targets)


def _rows(episodes: NDArray[np.int64], cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of all steps of ``episodes``; ``cuts[i]`` is the first step of episode i."""
    return np.concatenate([np.arange(cuts[one], cuts[one + 1]) for one in episodes.tolist()])


def _scales(transitions: _Transitions, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Return mean and standard deviation of each column over ``rows``, the training steps.

    The deviation of a column that is constant there is 1, so that it can be divided by. That of an output that is
    constant in all steps is 0, so that the model predicts exactly this constant: else a goal that never moves would
    drift by the network's small errors.
    """
    found = {}
    for name, columns in (("input", transitions.inputs_NF), ("output", transitions.targets_NO[:, :-1])):
        deviation = columns[rows].std(axis=0, dtype=np.float64)
        deviation = np.where(deviation < 1e-6, 1.0, deviation)
        if name == "output":
            deviation = np.where(np.ptp(columns, axis=0) < 1e-6, 0.0, deviation)
        found[f"{name}_mean"] = columns[rows].mean(axis=0, dtype=np.float64).astype(np.float32)
        found[f"{name}_std"] = deviation.astype(np.float32)
    return found


def _scaled(transitions: _Transitions, rows: NDArray[np.int64], scale: dict[str, NDArray[np.float32]]) -> _Transitions:
    inputs, targets = transitions.inputs_NF[rows], transitions.targets_NO[rows].copy()
    deviation = np.where(scale["output_std"] > 0, scale["output_std"], np.float32(1))
    targets[:, :-1] = (targets[:, :-1] - scale["output_mean"]) / deviation
    return _Transitions((inputs - scale["input_mean"]) / scale["input_std"], targets)


def _bounds(states_ND: NDArray[np.float32], shown: Demonstrations) -> dict[str, NDArray[np.float32]]:
    """Return the smallest and largest observations and rewards that the model may predict."""
    found = {}
    everything = np.concatenate([states_ND, _flat(shown.final_observations)])
    for name, column in (("state", everything), ("reward", shown.rewards)):
        low, high = column.min(axis=0), column.max(axis=0)
        found[f"{name}_bounds"] = np.stack([low - WIDENED * (high - low), high + WIDENED * (high - low)])
    return found


# -- the networks ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread during the block, because more threads slow down networks this small.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        import torch  # not installed with the client
    except ImportError:
        raise ConfigError("world models are trained with torch: pip install 'penstock[torch]'") from None
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    data: _Transitions, fitting: Fitting, *, ends: bool, on_epoch: Callable[[int, float], None]
) -> dict[str, NDArray[np.float32]]:
    """Train all K members in parallel; return, for each layer I, weight [K, in, out] and bias [K, out], by name.

    The loss is quadratic up to an error of one standard deviation, and linear beyond it: rare jumps, such as those of
    an object that the hand hits, would otherwise outweigh everything else.
    """
    import torch
    from torch.nn import functional

    random = torch.Generator().manual_seed(fitting.seed)
    widths = [data.inputs_NF.shape[1], *fitting.hidden_sizes, data.targets_NO.shape[1]]
    K, N = fitting.members, len(data)
    layers = []
    for fan_in, fan_out in itertools.pairwise(widths):
        weight = torch.randn(K, fan_in, fan_out, generator=random, dtype=torch.float32) / math.sqrt(fan_in)
        layers += [weight.requires_grad_(), torch.zeros(K, fan_out, dtype=torch.float32, requires_grad=True)]
    optimizer = torch.optim.Adam(layers, lr=fitting.learning_rate)
    inputs_NF, targets_NO = torch.from_numpy(data.inputs_NF), torch.from_numpy(data.targets_NO)
    samples_KN = torch.randint(N, (K, N), generator=random)
    num_batches = -(-N // fitting.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, fitting.epochs * num_batches)
    for epoch in range(fitting.epochs):
        order = torch.stack([row[torch.randperm(N, generator=random)] for row in samples_KN])
        total = 0.0
        for start in range(0, N, fitting.batch_size):
            rows_KB = order[:, start : start + fitting.batch_size]
            predicted_KBO, wanted_KBO = _forward(layers, inputs_NF[rows_KB]), targets_NO[rows_KB]
            errors_KBO = functional.huber_loss(predicted_KBO[..., :-1], wanted_KBO[..., :-1], reduction="none")
            loss: Any = 2 * errors_KBO.mean(dim=(1, 2)).sum()
            if ends:
                loss = (
                    loss
                    + functional.binary_cross_entropy_with_logits(
                        predicted_KBO[..., -1], wanted_KBO[..., -1], reduction="none"
                    )
                    .mean(dim=1)
                    .sum()
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) / K
        on_epoch(epoch + 1, total / num_batches)
    named = zip((f"layers.{i // 2}.{('weight', 'bias')[i % 2]}" for i in range(len(layers))), layers, strict=True)
    return {name: layer.detach().numpy() for name, layer in named}


def _forward(layers: list[Any], x_KBF: Any) -> Any:
    """Return the predictions [K, B, outputs] of K members for inputs [K, B, features], or for inputs [1, B, features]
    that all members share."""
    from torch.nn import functional

    for i in range(0, len(layers), 2):
        x_KBF = x_KBF @ layers[i] + layers[i + 1][:, None]
        if i + 2 < len(layers):
            x_KBF = functional.silu(x_KBF)
    return x_KBF


def _error(layers: dict[str, NDArray[np.float32]], data: _Transitions, varies_O: NDArray[np.bool_]) -> dict[str, float]:
    """Return the errors of the members' mean prediction on the scaled held-out ``data``, as defined in ``Fitted``.

    ``varies_O`` is False for observations and the reward if they were constant, so that the model cannot err.
    """
    import torch

    with torch.no_grad():
        members_KNO = _forward(
            [torch.from_numpy(one) for one in layers.values()], torch.from_numpy(data.inputs_NF)[None]
        )
    predicted_NO = members_KNO.mean(dim=0).numpy()
    squares = np.square(predicted_NO[:, :-1] - data.targets_NO[:, :-1]).mean(axis=0) * varies_O
    wrong = (predicted_NO[:, -1] > 0) != (data.targets_NO[:, -1] > 0)
    return {
        "state": round(math.sqrt(squares[:-1].sum() / max(1, varies_O[:-1].sum())), 5),
        "reward": round(math.sqrt(squares[-1]), 5),
        "ends": round(float(wrong.mean()), 5),
    }  # fmt: skip
