"""Configuration: the job file and the settings of a service."""

from penstock.shared.config.base import StrictModel, load_yaml, with_overrides
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings, load_settings

__all__ = ["JobConfig", "ServiceSettings", "StrictModel", "load_settings", "load_yaml", "with_overrides"]
