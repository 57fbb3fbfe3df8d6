"""Trainer backends, which place a model on devices and differentiate it. Each implements ``base.Backend``."""

from __future__ import annotations

from penstock.services.trainer.backends.base import Backend, Role
from penstock.services.trainer.backends.local import open_local
from penstock.services.trainer.ranks.collective import Collective
from penstock.shared.config.backend import FSDPConfig, LocalConfig, MegatronConfig
from penstock.shared.config.jobs.job import JobConfig

__all__ = ["open_backend"]


def open_backend(config: JobConfig, role: Role, collective: Collective, device: str) -> Backend:
    """Open the job's backend for one model with its initial weights.

    Args:
        role: the policy, or the critic (same body, scalar head).
        device: device on which this rank computes.

    Raises:
        ConfigError: the model or tokenizer cannot be loaded, or the backend cannot do what the job asks.
    """
    match config.backend:
        case FSDPConfig():
            from penstock.services.trainer.backends.fsdp.backend import open_fsdp

            return open_fsdp(config, role, collective, device)
        case MegatronConfig():
            from penstock.services.trainer.backends.megatron.backend import open_megatron

            return open_megatron(config, role, device)
        case LocalConfig():
            assert collective.size == 1, "backend 'local' runs in one process"
            return open_local(config, role, device)
