"""Orders of rank 0 to the other ranks: numbered entries of the store that all ranks share.

A follower waits for its next order without limit, because rank 0 may wait hours for a sealed batch. The follower
notices the end of rank 0 at once, because the store disappears with it.
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
    "DiscardSnapshot",
    "Leave",
    "Load",
    "Open",
    "Order",
    "Orders",
    "Publish",
    "Restore",
    "Save",
    "Snapshot",
    "Train",
    "WarmStart",
]

FIRST_POLL_S, LONGEST_POLL_S = 0.0005, 0.02
"""Pauses between polls of the store. Polling is used because a wait inside the store cannot be interrupted."""


class _Order(msgspec.Struct, frozen=True, tag=True):
    """Order that every rank, including rank 0, carries out before the next one."""


class Open(_Order, frozen=True, tag=True):
    """Build the learner of a job with its initial weights."""

    job: str
    spec: str
    """Job config as JSON."""
    simulator: EnvSpec | None = None
    """Properties of the simulator: its observations and actions; None for a language job."""


class WarmStart(_Order, frozen=True, tag=True):
    """Train on reference answers or demonstrations."""


class Load(_Order, frozen=True, tag=True):
    """Load the checkpoint in a directory."""

    path: str


class Train(_Order, frozen=True, tag=True):
    """Fetch this rank's groups of a batch, vote, and make the update."""

    manifest: BatchManifest


class Snapshot(_Order, frozen=True, tag=True):
    """Copy the training state in memory, for ``Restore``."""


class Restore(_Order, frozen=True, tag=True):
    """Restore the training state from the copy that ``Snapshot`` made, and free the copy."""


class DiscardSnapshot(_Order, frozen=True, tag=True):
    """Free the copy that ``Snapshot`` made, if there is one."""


class Publish(_Order, frozen=True, tag=True):
    """Take part in gathering the whole weights for rank 0."""


class Save(_Order, frozen=True, tag=True):
    """Copy the state that batch ``number`` led to, and start to write it as a checkpoint. ``token`` distinguishes
    attempts."""

    number: int
    token: str


class Close(_Order, frozen=True, tag=True):
    """Free the models of the job."""


class Leave(_Order, frozen=True, tag=True):
    """End the follower."""


Order = Open | WarmStart | Load | Train | Snapshot | Restore | DiscardSnapshot | Publish | Save | Close | Leave

_decoder = msgspec.msgpack.Decoder(Order)


class Orders:
    """Both ends of the orders: rank 0 gives orders, and every follower takes them in the same order."""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0
        self._stopped = threading.Event()

    def give(self, order: Order) -> None:
        """Send an order to every follower. Blocks briefly.

        Raises:
            RankLost: the store is lost.
        """
        self._number += 1
        data = msgspec.msgpack.encode(order)
        try:
            for rank in range(1, self._size):
                self._store.set(self._key(rank), data)  # type: ignore[arg-type]  # bytes are what it keeps
        except RuntimeError as error:
            raise RankLost(f"order {self._number} could not be given: {_first_line(error)}") from error

    def wait_until_taken(self, deadline_s: float) -> None:
        """Wait until all followers have read the last order, but at most ``deadline_s``.

        Rank 0 calls this before its process, which holds the store, ends.

        Raises:
            RankLost: the store is lost.
        """
        until = time.monotonic() + deadline_s
        try:
            for rank in range(1, self._size):
                while self._store.check([self._key(rank)]) and time.monotonic() < until:
                    time.sleep(FIRST_POLL_S)
        except RuntimeError as error:
            raise RankLost(f"order {self._number} was not seen to be taken: {_first_line(error)}") from error

    def take(self) -> Order | None:
        """Wait for the next order and return it; None after ``stop``. Blocks.

        Raises:
            RankLost: rank 0 is lost.
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
        """Make ``take`` return None."""
        self._stopped.set()

    def _key(self, rank: int) -> str:
        return f"order/{self._number}/{rank}"


def _first_line(error: Exception) -> str:
    """Return the message without the library's stack trace."""
    return str(error).strip().split("\n", 1)[0]
