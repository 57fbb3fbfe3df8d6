"""A policy that never changes: the model of an evaluation job, as its engine loaded it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.services.rollout.engines import Engine

__all__ = ["FixedPolicy"]


class FixedPolicy:
    """Stands where a ``PolicyFollower`` stands; serves version 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.version = 0

    def status(self) -> dict[str, Any]:
        """Nothing comes to it, and nothing pauses it."""
        return {"pause_s": 0.0}

    async def run(self) -> None:
        """Keep the engine until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._engine.close()

    async def first(self) -> None:
        """Version 0 is there from the start."""

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        """Version 0 is there from the start, and no other one comes."""
        assert wanted(0), f"an evaluation job has no {what}"
