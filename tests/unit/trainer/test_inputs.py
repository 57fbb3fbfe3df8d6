"""Groups that were fetched ahead of their turn."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.trainer.inputs import BatchInputs, Untrainable
from penstock.services.trainer.sharding import BatchShard
from penstock.shared.errors import DeadlineError, Unavailable
from penstock.shared.protocol.messages import BatchManifest
from penstock.shared.transport.bus import Bus


@pytest.mark.parametrize("error", [Unavailable("no bus"), DeadlineError("no answer"), Untrainable([], "gone")])
async def test_a_bus_that_was_away_while_a_batch_was_prefetched_is_asked_again(bus: Bus, error: Exception) -> None:
    async def failed() -> BatchShard:
        raise error

    inputs = BatchInputs(bus, "job_1", lambda manifest: [], max_lag=1, last_trained=0)
    manifest = BatchManifest(number=1, revision=1, start_version=0, update_index=0, groups=[])
    inputs._fetching[1, 1] = asyncio.create_task(failed())
    if isinstance(error, Untrainable):
        with pytest.raises(Untrainable):
            await inputs.shard(manifest)
    else:
        assert (await inputs.shard(manifest)).groups == []
