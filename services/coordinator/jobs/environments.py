"""Gets the description of an embodied job's simulator from an env worker, and checks the job against it."""

from __future__ import annotations

import time
from math import prod

import msgspec
import numpy as np

from penstock.shared.config.embodied import IMAGE, SimulatorBase, SoftActorCriticConfig
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import HELD_OUT_SUCCESS, TRAINED_SUCCESS, EnvSpec
from penstock.shared.transport.bus import Bus

__all__ = ["check_camera", "check_followed", "check_held_out", "check_spec", "describe_environment"]

LEAST_S = 5.0
"""Shortest deadline for describing one simulator (seconds). This deadline applies even if the job's first simulator
took nearly all of the time."""
REST_BYTES = 96
"""Bytes that a decision of the policy takes in a stored group beyond its arrays: version spans, and padding."""


async def describe_environment(bus: Bus, config: EmbodiedJob, *, deadline_s: float, camera: bool = False) -> EnvSpec:
    """Have an env worker create the job's simulator and begin one episode; return its description.

    If held-out episodes use another simulator, the worker creates that one, too.

    Args:
        camera: also check if episodes can be recorded as video; see ``no_video`` of the description.

    Raises:
        ConfigError: the simulator cannot be created, or the job does not fit it.
        Unavailable: no env worker answered within ``deadline_s`` seconds.
    """
    until, other = time.monotonic() + deadline_s, config.evaluation.environment
    spec = await _described(bus, config, config.environment, until, camera=camera and other is None)
    check_spec(config, spec)
    if other is None:
        return msgspec.structs.replace(spec, held_out_success=spec.has_success)
    held_out = await _described(bus, config, other, until, camera=camera)
    check_held_out(config, spec, held_out)
    return msgspec.structs.replace(spec, no_video=held_out.no_video, held_out_success=held_out.has_success)


async def _described(bus: Bus, config: EmbodiedJob, sim: SimulatorBase, until: float, *, camera: bool) -> EnvSpec:
    request = pack(sim.opening(1, camera=camera), job=config.name)
    deadline_s = max(LEAST_S, until - time.monotonic())
    return unpack(await bus.request(subjects.ENV_DESCRIBE, request, deadline_s=deadline_s), EnvSpec)[0]


def check_spec(config: EmbodiedJob, spec: EnvSpec) -> None:
    """Check that policy and budgets of a job fit its simulator.

    Raises:
        ConfigError: the policy or a budget does not fit; the message names the key and the simulator's value.
    """
    policy, where = config.policy, f"{spec.backend} '{spec.env_id}'"
    unknown = [name for name in policy.observations if name not in spec.observations]
    if unknown:
        known = ", ".join(spec.observations)
        hint = "; environment.image adds it" if unknown[0] == IMAGE else ""
        raise ConfigError(f"policy.observations: {where} has no observation '{unknown[0]}'; it has: {known}{hint}")
    discrete = spec.num_actions is not None
    if discrete != (policy.type == "categorical"):
        kind = f"one of {spec.num_actions} actions" if discrete else f"{prod(spec.action_shape)} numbers"
        wanted = "categorical" if discrete else "gaussian, tokens or squashed"
        raise ConfigError(f"policy.type '{policy.type}': an action of {where} is {kind}; use {wanted}")
    unbounded = not np.isfinite([*spec.action_low, *spec.action_high]).all()
    if policy.type in ("tokens", "squashed") and unbounded:
        raise ConfigError(f"policy.type '{policy.type}': actions of {where} have no finite bounds; use gaussian")
    images = [name for name in policy.observations if spec.observations[name].is_image]
    if isinstance(config.algorithm, SoftActorCriticConfig):
        if images:
            raise ConfigError(
                f"policy.observations: '{images[0]}' of {where} is an image, which 'sac' cannot learn from: its replay "
                "buffer holds vectors; take algorithm 'ppo' or 'grpo'"
            )
        config.algorithm.buffer.check_bytes(
            observation_size=sum(prod(spec.observations[name].shape) for name in policy.observations),
            action_size=config.environment.action_chunk * prod(spec.action_shape),
        )
    need = bytes_per_step(config, spec)
    if need > config.environment.bytes_per_step:
        raise ConfigError(
            f"environment.bytes_per_step {config.environment.bytes_per_step}: one decision in {where} takes {need} "
            "bytes; raise it to at least that"
        )


def check_held_out(config: EmbodiedJob, spec: EnvSpec, held_out: EnvSpec) -> None:
    """Check that the policy of a job can act in the simulator of its held-out episodes.

    Raises:
        ConfigError: the actions, or an observation that the policy reads, differ from the simulator used in training.
    """
    pairs = {
        f"observation '{name}'": (spec.observations[name], held_out.observations.get(name))
        for name in config.policy.observations
    }
    own_actions, other_actions = (
        (one.action_shape, one.action_dtype, one.num_actions, one.action_low, one.action_high)
        for one in (spec, held_out)
    )
    for what, (trained, found) in {**pairs, "actions": (own_actions, other_actions)}.items():
        if trained != found:
            raise ConfigError(
                f"evaluation.environment: {what} of {held_out.backend} '{held_out.env_id}': {found or 'missing'}; the "
                f"policy is trained in {spec.backend} '{spec.env_id}' with {trained}"
            )


def check_camera(config: EmbodiedJob, spec: EnvSpec) -> list[str]:
    """Return a warning if the simulator cannot record videos. Raises ConfigError if the job requires videos."""
    if not spec.no_video:
        return []
    if config.evaluation.videos != "auto":
        raise ConfigError(f"evaluation.videos: no episode can be filmed: {spec.no_video}; or take 0 or auto")
    return [f"there will be no videos: {spec.no_video}"]


def check_followed(config: EmbodiedJob, spec: EnvSpec) -> list[str]:
    """Return a warning for each setting (early stop, best checkpoint) that watches a success metric which the simulator
    does not report."""
    reported = {TRAINED_SUCCESS: spec.has_success, HELD_OUT_SUCCESS: spec.held_out_success}
    followed = {"early_stop.metric": config.early_stop, "checkpoint.keep_best.metric": config.checkpoint.keep_best}
    return [
        f"{key}: '{rule.metric}' is missing as long as it is 0, because the simulator reports neither success nor "
        "failure in the first step of an episode"
        for key, rule in followed.items()
        if rule is not None and not reported.get(rule.metric, True)
    ]


def bytes_per_step(config: EmbodiedJob, spec: EnvSpec) -> int:
    """Return the bytes that one decision of the policy adds to a stored group: observations, actions, log-probs,
    rewards, flags."""
    observed = sum(prod(one.shape) * np.dtype(one.dtype).itemsize for one in spec.observations.values())
    numbers = max(1, prod(spec.action_shape))
    return observed + config.environment.action_chunk * (numbers * (8 + 4) + 4 + 2) + REST_BYTES
