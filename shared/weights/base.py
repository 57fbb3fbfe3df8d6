"""Protocol of weight transports: the trainer publishes versions, the engine stages them.

``publish`` copies a policy version out of the trainer's tensors and returns a manifest; the trainer may change its
weights as soon as it returns. ``stage`` makes the version available and verifies it while the engine continues to
serve; the engine then adopts ``Staged.tensors`` at a token boundary (swap), or copies from them, and releases what it
no longer reads. Nothing here uses the bus; all calls block, so callers use a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest

__all__ = ["Staged", "Way", "WeightPublisher", "WeightReceiver"]


class Way(msgspec.Struct, frozen=True):
    """Transport by which a version reached a process, and the number of bytes that this process itself received over a
    network.

    If processes of a host share a fetched version, ``fetched_bytes`` is 0 in all of them but the one that fetched it.
    """

    transport: str
    fetched_bytes: int = 0


class Staged(Protocol):
    """A verified policy version in memory that stays constant until ``release``."""

    @property
    def manifest(self) -> WeightManifest:
        """Manifest of the version."""

    @property
    def way(self) -> Way:
        """Transport and number of transferred bytes."""

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the staged bytes, by name, without a copy. Invalid after ``release``."""

    def intact(self) -> bool:
        """Return True if the bytes are unchanged since staging; cheap enough for every decode step."""

    def release(self) -> None:
        """Release the memory. Idempotent."""


class WeightPublisher(Protocol):
    """Publishes the policy versions of one job."""

    def open(self, layout: Layout, members: Sequence[str], epoch: int) -> None:
        """Send all later versions to the receivers ``members``.

        ``epoch`` rises with every change of the members. Transports that receivers pull from do nothing.
        """

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, epoch: int, keep: WeightManifest | None = None
    ) -> WeightManifest:
        """Publish a copy of ``tensors`` and return its manifest. The version that ``keep`` describes stays available.

        Raises:
            WeightsError: the tensors do not fit the layout, or the bytes cannot be stored.
            DeadlineError: receivers hold every slot.
            Fenced: a publisher with a higher epoch exists.
        """

    def close(self) -> None:
        """Stop serving; published versions stay until ``cleanup``."""


class WeightReceiver(Protocol):
    """Stages policy versions on one host."""

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if this receiver can use ``ref``, a reference in a manifest."""

    def stage(self, manifest: WeightManifest) -> Staged:
        """Make the version of ``manifest`` available in memory, verify its bytes, and return it.

        Raises:
            WeightsError: the version could not be staged; nothing is held, and the engine keeps its version.
        """

    def close(self) -> None:
        """Drop cached mappings and buffers; staged versions stay valid."""
