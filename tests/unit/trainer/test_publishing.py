"""A version that cannot be written says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.publishing import Publishing
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Fenced
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes, make_layout
from penstock.shared.transport.bus import Bus


class Left(Learner):
    """Its ranks gather the weights, and one of them dies."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        def gathered() -> Iterator[Tensor]:
            whole = super(Left, self).weights()
            yield next(whole)[1]
            raise RuntimeError("Connection closed by peer")

        return zip([name for name, _, _ in self._policy.layout()], gathered(), strict=True)


def test_a_rank_that_is_lost_meanwhile_is_the_reason(make_config: Callable[..., JobConfig], tmp_path: Path) -> None:
    """And not that there is nothing more to gather."""
    publishing = Publishing(None, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), "job_1")  # type: ignore[arg-type]
    try:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            publishing._write(0, 1, None, WeightRoutes(epoch=0, transports={}), Left(make_config()))
    finally:
        publishing.close()


async def test_a_trainer_that_was_replaced_announces_nothing(bus: Bus, tmp_path: Path) -> None:
    """Its successor has announced a version; its own is older, whatever its number."""
    layout = make_layout([("w", "float32", (2,))])

    def manifest(version: int, epoch: int) -> WeightManifest:
        return WeightManifest(
            job="job_1", version=version, epoch=epoch, layout=layout, digest=f"d{epoch}", refs=(), created=0.0
        )

    old, new = (Publishing(bus, ServiceSettings(shm_dir=tmp_path), "job_1") for _ in range(2))
    await old.announce(manifest(3, 1))
    await new.announce(manifest(4, 2))
    with pytest.raises(Fenced, match="trainer epoch 2 > 1"):
        await old.announce(manifest(5, 1))
    assert await new.newest() == 4
