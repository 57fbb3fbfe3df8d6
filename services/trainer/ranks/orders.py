"""Orders of rank 0 to the other ranks: numbered entries of the store that all ranks share.

A follower waits for its next order for as long as there is none: rank 0 may wait for a sealed batch all night. Its end
is noticed at once, because the store is gone with it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.shared.errors import RankLost
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.messages import BatchManifest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "Close",
    "Forget",
    "Leave",
    "Load",
    "Open",
    "Order",
    "Orders",
    "Publish",
    "Recall",
    "Remember",
    "Save",
    "Train",
    "WarmStart",
]

FIRST_POLL_S, LONGEST_POLL_S = 0.0005, 0.02
"""Pauses between looks at the store; a wait inside the store cannot be ended from outside."""


class _Order(msgspec.Struct, frozen=True, tag=True):
    """Every rank carries it out, rank 0 included, and all of them before the next one."""


class Open(_Order, frozen=True, tag=True):
    """Build the learner of a job with its initial weights."""

    job: str
    spec: str
    """The job's configuration, JSON."""
    simulator: EnvSpec | None = None
    """Of an embodied job."""


class WarmStart(_Order, frozen=True, tag=True):
    """Train on reference answers."""


class Load(_Order, frozen=True, tag=True):
    """Read the checkpoint in this directory."""

    path: str


class Train(_Order, frozen=True, tag=True):
    """Fetch your groups of this batch, vote, make the update."""

    manifest: BatchManifest


class Remember(_Order, frozen=True, tag=True):
    """Copy the state."""


class Recall(_Order, frozen=True, tag=True):
    """Go back to the copy."""


class Forget(_Order, frozen=True, tag=True):
    """Free the copy."""


class Publish(_Order, frozen=True, tag=True):
    """Take part in gathering the whole weights for rank 0."""


class Save(_Order, frozen=True, tag=True):
    """Copy the state and begin to write it."""

    number: int
    token: str


class Close(_Order, frozen=True, tag=True):
    """Forget the job."""


class Leave(_Order, frozen=True, tag=True):
    """End the process."""


Order = Open | WarmStart | Load | Train | Remember | Recall | Forget | Publish | Save | Close | Leave

_decoder = msgspec.msgpack.Decoder(Order)


class Orders:
    """Both ends: rank 0 gives, the others take, in the same order on every rank."""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0
        self._stopped = threading.Event()

    def give(self, order: Order) -> None:
        """Tell every follower. Blocks shortly.

        Raises:
            RankLost: the store is gone.
        """
        self._number += 1
        data = msgspec.msgpack.encode(order)
        try:
            for rank in range(1, self._size):
                self._store.set(self._key(rank), data)  # type: ignore[arg-type]  # bytes are what it keeps
        except RuntimeError as error:
            raise RankLost(f"order {self._number} could not be given: {_first_line(error)}") from error

    def wait_until_taken(self, deadline_s: float) -> None:
        """Before the process that keeps the store ends: give the followers time to read the last order.

        Raises:
            RankLost: the store is gone.
        """
        until = time.monotonic() + deadline_s
        try:
            for rank in range(1, self._size):
                while self._store.check([self._key(rank)]) and time.monotonic() < until:
                    time.sleep(FIRST_POLL_S)
        except RuntimeError as error:
            raise RankLost(f"order {self._number} was not seen to be taken: {_first_line(error)}") from error

    def take(self) -> Order | None:
        """The next order; blocks until there is one. None once ``stop`` was called.

        Raises:
            RankLost: rank 0 is gone.
        """
        self._number += 1
        key, pause_s = self._key(self._rank), FIRST_POLL_S
        try:
            while not self._store.check([key]):
                if self._stopped.wait(pause_s):
                    return None
                pause_s = min(2 * pause_s, LONGEST_POLL_S)
            data = self._store.get(key)
            self._store.delete_key(key)
        except RuntimeError as error:
            raise RankLost(f"rank 0 is gone: its orders cannot be read any more ({_first_line(error)})") from None
        order: Order = _decoder.decode(data)
        return order

    def stop(self) -> None:
        """Make ``take`` return."""
        self._stopped.set()

    def _key(self, rank: int) -> str:
        return f"order/{self._number}/{rank}"


def _first_line(error: Exception) -> str:
    """Without the library's stack of addresses."""
    return str(error).strip().split("\n", 1)[0]
