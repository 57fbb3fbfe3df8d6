"""Protocol of every weight transport: publish on the trainer's side, stage on the engine's.

``publish`` copies a policy version out of the trainer's tensors and returns a manifest; the trainer may change its
weights as soon as it returns. ``stage`` makes the version reachable and verifies it while the engine serves on; the
engine then adopts ``Staged.tensors`` at a token boundary (swap), or copies from them, and releases what it no longer
reads. Nothing here talks to the bus; all of it blocks, so callers use a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest

__all__ = ["Staged", "Way", "WeightPublisher", "WeightReceiver"]


class Way(msgspec.Struct, frozen=True):
    """How a version came to a process: by which transport, and how many bytes this process itself moved over a network.

    ``fetched_bytes`` is 0 for all but one process of a host that shares what it fetches.
    """

    transport: str
    fetched_bytes: int = 0


class Staged(Protocol):
    """A verified policy version in memory that stays constant until ``release``."""

    @property
    def manifest(self) -> WeightManifest:
        """The announced version."""

    @property
    def way(self) -> Way:
        """How it came here."""

    def tensors(self) -> dict[str, Tensor]:
        """Views of the staged bytes, by name, without a copy. Not to be used after ``release``."""

    def intact(self) -> bool:
        """True if nobody has written to the bytes since; cheap enough for every decode step."""

    def release(self) -> None:
        """Give the memory back. May be called twice."""


class WeightPublisher(Protocol):
    """Hands out policy versions of one job."""

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """Send versions to the receivers ``members`` from now on, where the transport has to know them.

        ``epoch`` rises with every change of the members. Transports whose receivers come by themselves do nothing.
        """

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None = None
    ) -> WeightManifest:
        """Copy ``tensors`` out and describe where they are. What ``keep`` describes stays reachable.

        Raises:
            WeightsError: they do not fit the layout, or the bytes cannot be stored.
            DeadlineError: receivers hold every slot.
            Fenced: a publisher with a higher epoch exists.
        """

    def close(self) -> None:
        """Stop serving; what was published stays until ``cleanup``."""


class WeightReceiver(Protocol):
    """Stages policy versions on one host."""

    def accepts(self, ref: SlotRef) -> bool:
        """True if this receiver can reach such a reference."""

    def stage(self, manifest: WeightManifest) -> Staged:
        """Reach, check and verify the bytes of ``manifest``.

        Raises:
            WeightsError: it cannot; nothing is held and the engine keeps its version.
        """

    def close(self) -> None:
        """Forget cached mappings and buffers; staged versions stay valid."""
