"""Plans the sizes of this machine's NATS streams: as configured, as they exist, or as the disk allows.

NATS reserves the maximum size of every stream, not its current size. By default, a server reserves at most three
quarters of the space that is free at its start, so on a full disk it would refuse its own streams. Penstock sets this
limit to the sum of the maximum sizes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.config.service import ServiceSettings, load_settings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.transport.streams import max_bytes

__all__ = ["LARGEST", "SMALLEST", "Room", "StreamSizes", "plan_room"]

SHARE = 0.75
"""Share of the free space for streams without a configured size; checkpoints and logs need the rest."""
SETTINGS = ("experience_bytes", "stream_bytes", "ledger_bytes")
MIB = 1 << 20


@dataclass(frozen=True)
class StreamSizes:
    """Maximum sizes of streams in bytes: one for the stream EXPERIENCE, one for LEDGER (None: the same as
    ``stream_bytes``), and ``stream_bytes`` for each other stream.

    Some streams and buckets are smaller than ``stream_bytes``: ``by_stream`` has all sizes.
    """

    experience_bytes: int
    stream_bytes: int
    ledger_bytes: int | None = None

    @property
    def by_stream(self) -> dict[str, int]:
        """Bytes of every stream, by its name at the server."""
        return max_bytes(
            experience_bytes=self.experience_bytes, stream_bytes=self.stream_bytes, ledger_bytes=self.ledger_bytes
        )

    @property
    def reserved_bytes(self) -> int:
        """Sum of all streams, in bytes."""
        return sum(self.by_stream.values())

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that tell services these sizes."""
        sizes = {"PENSTOCK_EXPERIENCE_BYTES": self.experience_bytes, "PENSTOCK_STREAM_BYTES": self.stream_bytes}
        sizes |= {"PENSTOCK_LEDGER_BYTES": self.ledger_bytes} if self.ledger_bytes is not None else {}
        return {name: str(size) for name, size in sizes.items()}


LARGEST = StreamSizes(
    ServiceSettings.model_fields["experience_bytes"].default, ServiceSettings.model_fields["stream_bytes"].default
)
"""Default sizes of streams; smaller ones are planned if the disk lacks room."""
SMALLEST = StreamSizes(256 * MIB, 64 * MIB)
"""Smallest sizes that are planned: EXPERIENCE holds one job with the default ``limits.byte_budget``."""


@dataclass(frozen=True)
class Room:
    """Planned sizes and folder of streams. ``max_file_store``: limit of all streams together, including existing
    streams."""

    sizes: StreamSizes
    max_file_store: int
    folder: Path
    free_bytes: int
    held_bytes: int
    """Bytes that the store uses on the disk now."""

    @property
    def fits(self) -> bool:
        """True if the disk has room for all streams at their maximum sizes."""
        return self.max_file_store <= self.free_bytes + self.held_bytes

    @property
    def summary(self) -> str:
        """Message for the user: the free disk space, and the maximum sizes of the streams."""
        sizes = self.sizes
        return (
            f"{self.folder} has {_mib(self.free_bytes)} free; streams take at most {_mib(self.max_file_store)} "
            f"(EXPERIENCE {_mib(sizes.experience_bytes)}, others {_mib(sizes.stream_bytes)} each)"
        )


def plan_room(store: Path, environment: Mapping[str, str], *, largest: StreamSizes = LARGEST) -> Room:
    """Return sizes for the streams of a NATS server with its data in ``store``, a folder that need not exist yet.

    A size set in ``environment``, or in the environment of this process, is used as it is. Otherwise existing streams
    keep their sizes, and new ones get ``largest``, halved until all fit, but at least SMALLEST.

    Raises:
        ConfigError: there is too little space for new streams, or a variable has an invalid value.
    """
    folder = next(path for path in (store, *store.parents) if path.exists())
    stored = _stored(store)
    held, free = _held(store), shutil.disk_usage(folder).free
    settings = load_settings(environment)
    explicit = {name: getattr(settings, name) for name in SETTINGS if name in settings.model_fields_set}
    exist = {subjects.EXPERIENCE, subjects.EVENTS, subjects.LEDGER} <= stored.keys()
    kept = stored if exist else {}
    own = kept.get(subjects.LEDGER) if kept.get(subjects.LEDGER) != kept.get(subjects.EVENTS) else None

    def planned(size: StreamSizes) -> Room:
        sizes = StreamSizes(
            explicit.get("experience_bytes", kept.get(subjects.EXPERIENCE, size.experience_bytes)),
            explicit.get("stream_bytes", kept.get(subjects.EVENTS, size.stream_bytes)),
            explicit.get("ledger_bytes", own),
        )
        wanted = sizes.by_stream
        reserved = sum(max(wanted.get(name, 0), stored.get(name, 0)) for name in {*wanted, *stored})
        return Room(sizes, reserved, folder, free, held)

    share = 1.0 if {"experience_bytes", "stream_bytes"} <= explicit.keys() else SHARE
    for size in _halved(largest):
        room = planned(size)
        if exist or room.sizes.reserved_bytes <= share * (free + held):
            return room
    need = round(room.sizes.reserved_bytes / share)
    raise ConfigError(
        f"{folder} has {_mib(free)} free, and the streams need {_mib(need)}: free some space, use another folder "
        "(--data-dir, PENSTOCK_DATA_DIR), or set lower PENSTOCK_EXPERIENCE_BYTES and PENSTOCK_STREAM_BYTES"
    )


def _halved(largest: StreamSizes) -> Iterator[StreamSizes]:
    size = largest
    yield size
    while size.experience_bytes > SMALLEST.experience_bytes or size.stream_bytes > SMALLEST.stream_bytes:
        size = StreamSizes(
            max(size.experience_bytes // 2, SMALLEST.experience_bytes),
            max(size.stream_bytes // 2, SMALLEST.stream_bytes),
        )
        yield size


def _stored(store: Path) -> dict[str, int]:
    """Return ``max_bytes`` of the existing streams, by name."""
    found = {}
    for path in store.glob("jetstream/*/streams/*/meta.inf"):
        try:
            config = json.loads(path.read_bytes())
            found[str(config["name"])] = max(0, int(config["max_bytes"]))
        except (OSError, ValueError, LookupError, TypeError):
            continue  # the server reports the flaw
    return found


def _held(store: Path) -> int:
    """Return the total size of the files in a store (bytes); files may be deleted meanwhile."""
    held = 0
    for folder, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(OSError):
                held += (Path(folder) / name).stat().st_size
    return held


def _mib(nbytes: int) -> str:
    return f"{nbytes // MIB:,} MiB"
