"""A version that cannot be written says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from penstock.services.trainer.learner import Learner
from penstock.services.trainer.publishing import Publishing
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings


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
            publishing._write(0, 1, None, Left(make_config()))
    finally:
        publishing.close()
