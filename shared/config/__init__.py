"""Configuration: the job file and the settings of a service."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.shared.config.base import StrictModel, load_yaml, with_overrides
    from penstock.shared.config.jobs.job import JobConfig
    from penstock.shared.config.service import ServiceSettings, load_settings

__all__ = ["JobConfig", "ServiceSettings", "StrictModel", "load_settings", "load_yaml", "with_overrides"]

_HOMES = {
    "JobConfig": "jobs.job",
    "ServiceSettings": "service",
    "StrictModel": "base",
    "load_settings": "service",
    "load_yaml": "base",
    "with_overrides": "base",
}


def __getattr__(name: str) -> Any:
    """Import the module of ``name`` only when ``name`` is first used. Scorer processes also import this package, and
    should not load the code for job files and service settings, which they do not need."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
