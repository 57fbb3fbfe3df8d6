"""Ids of jobs, draws and attempts."""

from __future__ import annotations

import secrets

import msgspec
import uuid6
import xxhash

__all__ = ["Draw", "derive_seed", "new_attempt", "new_job_id"]


class Draw(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Draw ``(ordinal, n)``: the n-th attempt to get a group for a position in the data order.

    Only ledger events allocate draws. Draws are ordered by ordinal, then by n.
    """

    ordinal: int
    n: int = 0

    def __str__(self) -> str:
        return f"{self.ordinal}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> Draw:
        """Parse the text form of a draw, as ``str`` returns it."""
        ordinal, _, n = text.partition(".")
        return cls(int(ordinal), int(n))

    def again(self) -> Draw:
        """Return the draw that replaces this one after it was dropped."""
        return Draw(self.ordinal, self.n + 1)


def new_job_id() -> str:
    """Return ``job_`` + UUIDv7 in hex. Such ids sort by time, and each is one token of a NATS subject."""
    return f"job_{uuid6.uuid7().hex}"


def new_attempt() -> str:
    """Return a random id, for example for an attempt to generate the group of a draw."""
    return secrets.token_hex(8)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Derive the 63-bit seed for one purpose from the job's seed. The function is pure, so all hosts get the same
    seed."""
    text = "/".join(str(part) for part in (seed, *parts))
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
