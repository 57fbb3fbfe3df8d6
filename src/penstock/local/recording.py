"""Records demonstrations for a warm start or a world model, by playing episodes in a simulator on this host.

Actions come from a scripted expert (which a simulator offers as the observation ``expert_action``), from the policy in
a checkpoint of an embodied job, or from a uniform distribution.

Shapes: B = parallel environments, n = environments with a running episode, C = actions of a decision, ... = the shape
of one observation or action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.services.env.simulators import Named, Simulator, open_simulator
from penstock.shared.config.embodied import PolicyConfig
from penstock.shared.data.demonstrations import ActionSpace, Demonstrations
from penstock.shared.errors import CheckpointError, ConfigError, DataError
from penstock.shared.protocol.embodied.environment import EnvSpec, OpenEnv

__all__ = ["EXPERT_OPTIONS", "Expert", "policy_of_checkpoint", "record", "scripted_expert"]

EXPERT_ACTION = "expert_action"
EXPERT_OPTIONS: dict[str, dict[str, Any]] = {"metaworld": {"expert": True}}
"""By backend: options with which its simulator offers its scripted expert's actions as an observation."""
MOST_ENVS = 16
"""Maximum number of parallel environments."""

Expert = Callable[[Named], NDArray[Any]]
"""Deterministic policy: converts observations of n environments, [n, ...] by name, to C actions each, [n, C, ...]."""


def scripted_expert(spec: EnvSpec) -> Expert:
    """Return the expert built into a simulator.

    Raises:
        ConfigError: the simulator has none.
    """
    if EXPERT_ACTION not in spec.observations:
        raise ConfigError(
            f"'{spec.env_id}' ({spec.backend}) has no observation '{EXPERT_ACTION}': no expert is scripted for it; "
            "record the policy of a checkpoint instead"
        )
    return lambda observations: observations[EXPERT_ACTION][:, None]


def policy_of_checkpoint(path: Path, spec: EnvSpec) -> Expert:
    """Return the policy in a checkpoint of an embodied job as an expert that acts without noise.

    Raises:
        CheckpointError: the folder holds no such checkpoint, or its policy does not fit ``spec``.
    """
    import torch  # not installed with the client
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from penstock.shared.models.episode_policy import build_policy

    try:
        saved = msgspec.json.decode((path / "config.json").read_bytes())
        config, chunk = PolicyConfig.parse(saved["policy"]), int(saved["action_chunk"])
        policy = build_policy(config, spec, action_chunk=chunk, seed=0)
        policy.load_state_dict(load_file(path / "model.safetensors"))
    except (OSError, msgspec.DecodeError, KeyError, TypeError, RuntimeError, SafetensorError, ConfigError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"{path} holds no policy for '{spec.env_id}' ({spec.backend}): {reason}") from None

    def act(observations: Named) -> NDArray[Any]:
        seen = {name: torch.from_numpy(observations[name].copy()) for name in config.observations}
        return policy.to_environment(policy.act(seen, None).actions_NCA)

    return act


@dataclass(slots=True)
class _Recorded:
    """One episode during its recording."""

    observations: list[dict[str, NDArray[Any]]]
    actions: list[NDArray[Any]]
    rewards: list[float]
    succeeded: bool = False
    final: dict[str, NDArray[Any]] = field(default_factory=dict)
    terminated: bool = False


def record(
    request: OpenEnv,
    sims_dir: Path,
    expert_of: Callable[[EnvSpec], Expert] | None,
    *,
    reset_ids: Sequence[int],
    horizon: int,
    noise: float = 0.0,
    hold: int = 1,
    only_solved: bool = True,
    source: str = "",
    on_episode: Callable[[int], None] = lambda count: None,
) -> Demonstrations:
    """Play an episode from each reset id; return the recorded episodes. Equal arguments give equal results. Blocking.

    Args:
        request: the simulator; ``num_envs`` is ignored.
        expert_of: creates the expert; None: actions are sampled uniformly, with the reset id as seed.
        horizon: number of steps after which an episode is truncated.
        noise: standard deviation of noise on continuous actions, as fraction of their range; not in the records.
        hold: most steps for which a sampled action is kept; the number of steps is sampled uniformly, too.
        only_solved: drop episodes that did not solve the task, if the simulator reports success.
        source: description of the expert, for users.
        on_episode: called with the number of episodes so far, after each set of parallel ones.

    Raises:
        CheckpointError: ``expert_of`` cannot load its checkpoint.
        ConfigError: the simulator cannot be created, or the expert or the noise does not fit it.
        DataError: no episode is left, or the simulator lost one.
    """
    num_envs = max(1, min(MOST_ENVS, len(reset_ids)))
    simulator = open_simulator(msgspec.structs.replace(request, num_envs=num_envs), sims_dir)
    try:
        spec, found = simulator.spec, list[_Recorded]()
        player = _Player(simulator, expert_of and expert_of(spec), horizon=horizon, noise=noise, hold=hold)
        for start in range(0, len(reset_ids), spec.num_envs):
            found += player.play(reset_ids[start : start + spec.num_envs])
            on_episode(len(found))
        only_solved = only_solved and simulator.described().has_success
    finally:
        simulator.close()
    kept = [one for one in found if one.succeeded or not only_solved]
    if not kept:
        raise DataError(f"none of {len(found)} episodes in '{spec.env_id}' ({spec.backend}) solved the task")
    names = [name for name in spec.observations if name != EXPERT_ACTION]
    action = ActionSpace(num_actions=spec.num_actions, low=spec.action_low, high=spec.action_high)
    return Demonstrations(
        observations={name: np.stack([seen[name] for one in kept for seen in one.observations]) for name in names},
        actions=np.stack([action for one in kept for action in one.actions]),
        rewards=np.array([reward for one in kept for reward in one.rewards], np.float32),
        cu_seqlens=np.cumsum([0, *(len(one.actions) for one in kept)], dtype=np.int64),
        succeeded=np.array([one.succeeded for one in kept]),
        final_observations={name: np.stack([one.final[name] for one in kept]) for name in names},
        terminated=np.array([one.terminated for one in kept]),
        about={
            "task": spec.env_id, "backend": spec.backend, "versions": spec.versions, "horizon": horizon,
            "source": source, "noise": noise, "hold": hold, "played": len(found), "first_reset_id": int(reset_ids[0]),
            "action": msgspec.to_builtins(action),
        },
    )  # fmt: skip


@dataclass(slots=True)
class _Chance:
    """All randomness of one episode: the random generator, the sampled action, and the number of steps for which it is
    kept."""

    rng: np.random.Generator
    action: NDArray[Any] | None = None
    left: int = 0


class _Player:
    def __init__(self, simulator: Simulator, expert: Expert | None, *, horizon: int, noise: float, hold: int) -> None:
        self._simulator, self._expert, self._horizon = simulator, expert, horizon
        self._noise, self._hold = noise, hold
        drawn = expert is None and simulator.spec.num_actions is None
        self._bounds = _bounds(simulator.spec) if noise or drawn else None

    def play(self, reset_ids: Sequence[int]) -> list[_Recorded]:
        """Play one episode from each reset id, all in parallel, and return the episodes in the order of the ids."""
        env_ids = np.arange(len(reset_ids), dtype=np.int32)
        begun = self._simulator.reset(env_ids, np.asarray(reset_ids, np.int64))
        _check_lost(begun.lost, reset_ids)
        episodes = [_Recorded([], [], []) for _ in reset_ids]
        chances = [_Chance(np.random.default_rng(reset_id)) for reset_id in reset_ids]
        seen = _copied(begun.observations)
        while len(env_ids):
            running = [chances[i] for i in env_ids.tolist()]
            for actions in self._chunk(seen, running):  # single steps, because every observation is recorded
                taken = np.stack([self._disturbed(a, one.rng) for a, one in zip(actions, running, strict=True)])
                chunk = self._simulator.step(env_ids, taken[:, None], None)
                _check_lost(chunk.lost, [reset_ids[i] for i in env_ids.tolist()])
                over = (chunk.terminated | chunk.truncated)[:, 0]
                for place, i in enumerate(env_ids.tolist()):
                    one = episodes[i]
                    one.observations.append({name: column[place] for name, column in seen.items()})
                    one.actions.append(actions[place])
                    one.rewards.append(float(chunk.rewards[place, 0]))
                    one.succeeded |= bool(chunk.success[place, 0])
                    over[place] |= len(one.actions) >= self._horizon
                seen = _copied(chunk.observations)
                for place in np.flatnonzero(over).tolist():
                    one = episodes[env_ids[place]]
                    one.final = {name: column[place] for name, column in seen.items()}
                    one.terminated = bool(chunk.terminated[place, 0])
                if over.any():  # the running episodes decide again, without the rest of their chunk
                    env_ids, seen = env_ids[~over], {name: column[~over] for name, column in seen.items()}
                    break
        return episodes

    def _chunk(self, seen: Named, running: Sequence[_Chance]) -> Iterator[NDArray[Any]]:
        if self._expert is None:
            yield np.stack([self._kept(one) for one in running])
            return
        decided = self._expert(seen)
        for step in range(decided.shape[1]):
            yield decided[:, step].astype(self._simulator.spec.action_dtype)

    def _kept(self, chance: _Chance) -> NDArray[Any]:
        """Return the sampled action; sample a new one if it has been kept for its number of steps."""
        if chance.action is None or not chance.left:
            chance.action = self._drawn(chance.rng)
            chance.left = int(chance.rng.integers(1, self._hold + 1)) if self._hold > 1 else 1
        chance.left -= 1
        return chance.action

    def _drawn(self, rng: np.random.Generator) -> NDArray[Any]:
        spec = self._simulator.spec
        if self._bounds is None:
            return rng.integers(spec.num_actions or 0, size=spec.action_shape).astype(spec.action_dtype)
        found: NDArray[Any] = rng.uniform(*self._bounds).astype(spec.action_dtype)
        return found

    def _disturbed(self, action: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        if self._bounds is None or not self._noise:
            return action
        low, high = self._bounds
        wide: NDArray[Any] = action + self._noise * (high - low) * rng.standard_normal(action.shape)
        cut: NDArray[Any] = np.clip(wide, low, high).astype(action.dtype)
        return cut


def _bounds(spec: EnvSpec) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the lower and the upper bounds of an action, in its shape. Raises ConfigError if they are not finite."""
    low, high = np.array([spec.action_low, spec.action_high])
    if spec.num_actions is not None or not np.isfinite(high - low).all():
        raise ConfigError(f"noise: actions of '{spec.env_id}' ({spec.backend}) have no finite bounds")
    return low.reshape(spec.action_shape), high.reshape(spec.action_shape)


def _check_lost(lost: dict[int, str], reset_ids: Sequence[int]) -> None:
    for place, reason in lost.items():
        raise DataError(f"the simulator lost the episode of reset id {reset_ids[place]}: {reason}")


def _copied(observations: Named) -> Named:
    """Copy observations, which are valid only until the next call of the simulator."""
    return {name: column.copy() for name, column in observations.items()}
