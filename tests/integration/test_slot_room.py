"""Weight slots with scarce or slow shared memory: processes wait for room, fetch their own copy, and log the reason."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import Unavailable
from penstock.shared.protocol.weights import WeightManifest, make_layout
from penstock.shared.transport import bulk_segment
from penstock.shared.transport.bulk_segment import Segment
from penstock.shared.weights.host_copies import HostCopies
from penstock.shared.weights.shm import ShmPublisher, ShmReceiver, ShmStaged
from penstock.shared.weights.slots import turn_path
from penstock.shared.weights.tcp import TcpReceiver

JOB = "job_r"
NUM_FLOATS = 1 << 20
LAYOUT = make_layout([("w", "float32", (NUM_FLOATS,))])
ROOM_MIB = 10
"""Room for two slots of 4 MiB, but not for three."""

Disk = Callable[..., Path]


def weights(value: int) -> list[tuple[str, Tensor]]:
    return [("w", torch.full((NUM_FLOATS,), float(value)))]


def first_value(staged: ShmStaged) -> float:
    return float(staged.tensors()["w"][0])


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Event that is set once a slot found no room."""
    event, create = threading.Event(), Segment.create

    def watched(*args: object) -> Segment:
        try:
            return create(*args)  # type: ignore[arg-type]
        except Unavailable:
            event.set()
            raise

    monkeypatch.setattr(Segment, "create", watched)
    return event


def test_a_publisher_without_room_waits_for_a_reader(disk: Disk, refused: threading.Event) -> None:
    settings = ServiceSettings(host_id="h", shm_dir=disk(ROOM_MIB))
    publisher = ShmPublisher(JOB, LAYOUT, settings, timeout_s=60.0)
    reader = ShmReceiver(settings).stage(publisher.publish(weights(1), version=1, epoch=1))
    publisher.publish(weights(2), version=2, epoch=1)
    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(publisher.publish, weights(3), version=3, epoch=1)
        assert refused.wait(60)
        reader.release()
        assert first_value(ShmReceiver(settings).stage(publishing.result(60))) == 3
    publisher.close()


def test_a_publisher_that_gets_no_room_names_the_readers(disk: Disk) -> None:
    settings = ServiceSettings(host_id="h", shm_dir=disk(ROOM_MIB))
    publisher = ShmPublisher(JOB, LAYOUT, settings, timeout_s=0.0)
    reader = ShmReceiver(settings).stage(publisher.publish(weights(1), version=1, epoch=1))
    publisher.publish(weights(2), version=2, epoch=1)
    with pytest.raises(Unavailable, match=rf"no room for \d+ bytes.*the other 2 slots: process {os.getpid()}$"):
        publisher.publish(weights(3), version=3, epoch=1)
    assert len(list(settings.shm_dir.iterdir())) == 2
    reader.release()
    publisher.close()


class Far:
    """A trainer whose versions are for processes of another host with its own shared memory."""

    def __init__(self, near: Path, far: Path) -> None:
        near.mkdir()
        self.trainer = ShmPublisher(JOB, LAYOUT, ServiceSettings(host_id="near", shm_dir=near, bulk_host="127.0.0.1"))
        self.settings = ServiceSettings(host_id="far", shm_dir=far)

    def publish(self, version: int) -> WeightManifest:
        return self.trainer.publish(weights(version), version=version, epoch=1)


def test_processes_of_a_host_without_room_fetch_alone_and_log_it(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far = Far(tmp_path / "near", disk(1))
    manifest = far.publish(1)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            staged = TcpReceiver(far.settings, timeout_s=60).stage(manifest)
        assert staged.way.fetched_bytes == LAYOUT.nbytes
        (message,) = caplog.messages
        assert f"version 1 of job '{JOB}': this process fetches 4 MB for itself" in message
        assert f"all of host 'far': no room for {LAYOUT.nbytes} bytes in {far.settings.shm_dir}" in message
    far.trainer.close()


def test_a_host_with_room_for_two_copies_waits_for_its_readers(
    disk: Disk, tmp_path: Path, refused: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process still holds the version before the last one, whose slot will be free soon."""
    monkeypatch.setattr("penstock.shared.weights.host_copies._ROOM_S", 60.0)
    far = Far(tmp_path / "near", disk(ROOM_MIB))
    slow, fast = (TcpReceiver(far.settings, timeout_s=60) for _ in range(2))
    first = far.publish(1)
    held, _ = slow.stage(first), fast.stage(first).release()
    fast.stage(far.publish(2)).release()
    third = far.publish(3)
    with ThreadPoolExecutor(1) as thread:
        staging = thread.submit(fast.stage, third)
        assert refused.wait(60)
        held.release()
        staged = staging.result(60)
    assert isinstance(staged, ShmStaged)
    assert slow.stage(third).way.fetched_bytes == 0
    far.trainer.close()


def test_allocating_a_copy_counts_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocating a slot of some gigabytes takes longer than other processes wait for one without progress."""
    monkeypatch.setattr(bulk_segment, "_PIECE", 1 << 20)
    near, seen, allocate = tmp_path / "near", list[bytes](), os.posix_fallocate
    near.mkdir()
    trainer = ShmPublisher(JOB, LAYOUT, ServiceSettings(host_id="near", shm_dir=near))
    manifest = trainer.publish(weights(1), version=1, epoch=1)
    turn = turn_path(tmp_path, JOB, "far")

    def watched(fd: int, start: int, nbytes: int) -> None:
        seen.append(turn.read_bytes())
        allocate(fd, start, nbytes)

    def fetch(target: NDArray[np.uint8], on_bytes: Callable[[int], None]) -> None:
        before = turn.read_bytes()
        assert before not in seen, "the allocation counted as progress"
        np.copyto(target, np.full(NUM_FLOATS, 1, np.float32).view(np.uint8))
        on_bytes(len(target))
        assert turn.read_bytes() != before

    monkeypatch.setattr(os, "posix_fallocate", watched)
    copies = HostCopies(ServiceSettings(host_id="far", shm_dir=tmp_path))
    staged = copies.stage(manifest, fetch, end=time.monotonic() + 60)
    assert staged is not None
    assert len(seen) == len(set(seen)) == 5, "four pieces, and what the header takes"
    staged.release()
    copies.close()
    trainer.close()


def test_memory_without_a_limit_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs without a limit reports zero blocks and zero free blocks."""
    known = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*known[:2], 0, 0, 0, *known[5:10]]))
    Segment.create(tmp_path / "segment", 1 << 20).close()
