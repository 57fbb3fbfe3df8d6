"""Generated addition problems, a pure function of seed and index."""

from __future__ import annotations

from typing import Any

import xxhash

from penstock.shared.config.data import AdditionSource

__all__ = ["AdditionRows"]


class AdditionRows:
    """Row i is ``{"prompt": "a+b=", "answer": "<a+b>", "a": a, "b": b}``; operands are a hash of (seed, i)."""

    endless = True
    notes: tuple[str, ...] = ()

    def __init__(self, source: AdditionSource, seed: int) -> None:
        self.name = f"addition of {source.digits}-digit numbers"
        self._bound = 10**source.digits
        self._num_rows = source.num_rows
        self._seed = seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 0:
            raise IndexError(f"row {index}: indices start at 0")
        bits = xxhash.xxh3_128_intdigest(f"{self._seed}:{index}".encode())
        a, b = (bits >> 64) % self._bound, (bits & (2**64 - 1)) % self._bound  # bias below 1e-10
        return {"prompt": f"{a}+{b}=", "answer": str(a + b), "a": a, "b": b}

    def where(self, index: int) -> str:
        """Return the description of the source and the row number, for error messages."""
        return f"{self.name}, row {index}"
