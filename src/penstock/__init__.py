"""Penstock: on-policy reinforcement learning for foundation models, as services."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.job import Job, train

__all__ = ["Job", "__version__", "train"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import ``Job`` or ``train`` on first use, because the services import this package and need neither."""
    if name not in ("Job", "train"):
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    from penstock import job

    return getattr(job, name)
