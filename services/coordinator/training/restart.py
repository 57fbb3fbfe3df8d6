"""Finds the checkpoint from which a trainer of a job may restart. Pure."""

from __future__ import annotations

from penstock.services.coordinator.training.ledger import LedgerState

__all__ = ["earliest_start"]


def earliest_start(state: LedgerState, newest: int) -> int:
    """Return the number of the oldest checkpoint from which a trainer may restart and repeat the later batches.

    That is ``newest``, which exists or is about to, or an older one from which the served version can be recomputed: a
    trainer that starts while newer versions are refused begins there, and training may roll back to it.
    """
    if state.promoted is None or state.promoted.number >= newest:
        return newest
    served = state.base_of(state.promoted.number)
    return newest if served is None else min(newest, served.number)
