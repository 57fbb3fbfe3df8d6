"""Messages that set or query a service's number of workers, for the supervisor, which starts the workers."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

__all__ = ["POOLS", "Pool", "ScaleReply", "ScaleRequest"]

Pool = Literal["rollout", "reward", "env"]
"""Services whose workers may come and go while jobs run: other workers redo the work that one leaves unfinished."""
POOLS: tuple[Pool, ...] = get_args(Pool)


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to run ``replicas`` workers of a pool; None: only report the numbers of workers. Safe to repeat.

    ``operation``: id of the operation. Ids are ordered by time, and a request is rejected if a newer one was applied.
    """

    pool: Pool
    replicas: int | None = None
    operation: str = ""


class ScaleReply(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of workers of a pool: ``replicas`` workers stay, ``ready`` of these are ready, and ``leaving`` further
    workers are draining."""

    replicas: int
    ready: int
    leaving: int
