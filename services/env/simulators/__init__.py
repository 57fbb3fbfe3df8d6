"""Simulators. Adding one: one file here, one line in ``open_simulator``; it inherits the contract test."""

from __future__ import annotations

from penstock.services.env.simulators.base import Simulator, Transition
from penstock.services.env.simulators.gym import GymSimulator
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.environment import OpenEnv

__all__ = ["Simulator", "Transition", "open_simulator"]

MAX_ENVS = 4096
"""Environments of one session."""


def open_simulator(request: OpenEnv) -> Simulator:
    """Make the environments of a session. Blocking.

    Raises:
        ConfigError: no such backend or environment, or it cannot be made here.
    """
    if not 1 <= request.num_envs <= MAX_ENVS:
        raise ConfigError(f"num_envs {request.num_envs}: a session holds 1 to {MAX_ENVS} environments")
    if request.backend == "gymnasium":
        return GymSimulator(request.env_id, request.num_envs, request.options)
    raise ConfigError(f"no simulator backend '{request.backend}'; there is: gymnasium")
