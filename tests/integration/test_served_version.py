"""The manifest of the served version recovers from a late write of an older leader or trainer."""

from __future__ import annotations

import asyncio

from penstock.services.coordinator.leader.served_version import ServedVersionPublisher
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Promoted
from penstock.shared.protocol.weights import WeightManifest, make_layout
from penstock.shared.transport.bus import Bus

JOB = "job_1"


def manifest(version: int, epoch: int) -> bytes:
    layout = make_layout([])
    manifest = WeightManifest(
        job=JOB, version=version, epoch=epoch, layout=layout, digest=f"w{version}", refs=(), created=0.0
    )
    return pack(manifest, job=JOB, epoch=epoch)


def promoted(version: int) -> Promoted:
    return Promoted(writer_epoch=1, time=0.0, version=version, number=version, digest=f"w{version}", reason="passed")


async def until_served(bus: Bus, version: int, epoch: int, *, other: int = -1) -> None:
    """Wait until the manifest key names a version and an epoch, at a revision above ``other``."""
    async with asyncio.timeout(30):
        while True:
            entry = await bus.kv(subjects.MANIFESTS).get(JOB)
            if entry is not None and entry.value is not None and entry.revision > other:
                found, _ = unpack(entry.value, WeightManifest)
                if (found.version, found.epoch) == (version, epoch):
                    return
            await asyncio.sleep(0.02)


async def test_a_late_write_of_an_older_leader_or_trainer_does_not_stay(bus: Bus) -> None:
    kv, candidate = bus.kv(subjects.MANIFESTS), subjects.candidate_manifest(JOB)
    announced, served = [-1], [promoted(1)]
    of_leader = ServedVersionPublisher(bus, JOB, lambda: served[0], announced.append)
    publisher = asyncio.ensure_future(of_leader.follow())
    try:
        await kv.put(candidate, manifest(1, 1))
        await until_served(bus, 1, 1)
        await kv.put(candidate, manifest(2, 1))
        served[0] = promoted(2)
        await until_served(bus, 2, 1)
        await kv.put(candidate, manifest(3, 1))  # the weights of version 2 are a candidate no more
        late = await kv.put(JOB, manifest(1, 1))
        await until_served(bus, 2, 1, other=late)
        again = await kv.put(JOB, manifest(2, 2))  # another trainer made version 2 again
        async with asyncio.timeout(30):  # a watch delivers the newest value alone, so the publisher may miss one
            while of_leader._served is None or of_leader._served.manifest.epoch != 2:
                await asyncio.sleep(0.02)
        late = await kv.put(JOB, manifest(2, 1))
        await until_served(bus, 2, 2, other=max(late, again))
        async with asyncio.timeout(30):
            while announced[-1] != 2:
                await asyncio.sleep(0.02)
    finally:
        publisher.cancel()
        await asyncio.gather(publisher, return_exceptions=True)
