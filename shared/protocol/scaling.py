"""How many workers of a service there are: asked of whoever starts the processes of this deployment."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

__all__ = ["POOLS", "Pool", "ScaleReply", "ScaleRequest"]

Pool = Literal["rollout", "reward", "env"]
"""Services whose workers hold only leases: any number of them may come and go while jobs run."""
POOLS: tuple[Pool, ...] = get_args(Pool)


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Have ``replicas`` workers; None only asks. Safe to repeat.

    ``wish``: id of the operation. Ids are ordered by time, and a wish that is older than one that was taken is refused.
    """

    pool: Pool
    replicas: int | None = None
    wish: str = ""


class ScaleReply(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that stay, those of them that can work, and others that finish what they have in hand."""

    replicas: int
    ready: int
    leaving: int
