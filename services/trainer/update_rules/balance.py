"""Sums that the load-balancing loss of a minibatch needs before its first gradient."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.services.trainer.backends.base import Backend
from penstock.services.trainer.collective import Collective
from penstock.services.trainer.packing import Microbatch

__all__ = ["balance"]


def balance(backend: Backend, microbatches: Iterable[Microbatch | None], collective: Collective) -> None:
    """Count the expert loads of the coming minibatch over all ranks, where a load-balancing loss needs them."""
    if backend.routers is not None and backend.routers.coef:
        for microbatch in microbatches:
            backend.route(microbatch)
        backend.routers.aim(collective)
