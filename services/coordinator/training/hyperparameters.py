"""Hyper-parameters of an update, derived from the settings in the ledger. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.events import Hyperparameters

__all__ = ["hyperparameters_of"]


def hyperparameters_of(settings: Mapping[str, Any]) -> Hyperparameters | None:
    """Return the hyper-parameters of the next batch. Return None for a ledger without settings, which an older version
    of Penstock wrote."""
    if not settings:
        return None
    return Hyperparameters(
        learning_rate=settings["optimizer.learning_rate"],
        kl_coef=settings["algorithm.kl.coef"],
        max_updates=settings["train.max_updates"],
    )
