"""Scaling as the HTTP API uses it. Implemented in ``coordinator.scaling``."""

from __future__ import annotations

from typing import Protocol

from penstock.shared.protocol.scaling import Pool, ScaleReply

__all__ = ["Scaling"]


class Scaling(Protocol):
    """The workers of the deployment."""

    async def pool(self, pool: Pool) -> ScaleReply:
        """The workers there are. Raises Unavailable where nobody starts processes by request."""
        ...
