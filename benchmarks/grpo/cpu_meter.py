"""CPU seconds of named processes over time, children included."""

from __future__ import annotations

import asyncio
import bisect
import os
import time
from collections.abc import Callable, Mapping

import psutil

__all__ = ["CpuMeter"]

EVERY_S, FAMILIES_EVERY_S = 0.25, 5.0


class CpuMeter:
    """Samples every 0.25 s while ``run`` runs; ``at`` interpolates."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._times: list[float] = []
        self._rows: list[dict[str, float]] = []

    async def run(self) -> None:
        """Until cancelled. A child is found within five seconds: looking for them reads all of /proc."""
        families: dict[str, list[psutil.Process]] = {}
        looked = 0.0
        while True:
            now = time.time()
            if now - looked > FAMILIES_EVERY_S:
                families, looked = {name: _family(pid) for name, pid in self._pids().items()}, now
            self._times.append(now)
            self._rows.append({name: sum(map(_cpu_s, family)) for name, family in families.items()})
            await asyncio.sleep(EVERY_S)

    def at(self, moment: float) -> dict[str, float]:
        """CPU seconds used by each process until ``moment`` (Unix seconds)."""
        right = min(max(1, bisect.bisect_left(self._times, moment)), len(self._times) - 1)
        before, after = self._times[right - 1], self._times[right]
        share = min(1.0, max(0.0, (moment - before) / (after - before)))
        low, high = self._rows[right - 1], self._rows[right]
        return {name: low[name] + share * (high[name] - low[name]) for name in low if name in high}


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        own = pid == os.getpid()  # its children are the others
        return [process] if own else [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_s(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0
