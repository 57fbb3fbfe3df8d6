"""Publishing from ranks: no rank holds a second whole copy of the weights, not even rank 0, which writes the slot.

Anonymous memory (``RssAnon``) is the memory that a rank has for itself. The slots are shared memory: they are the
published copy. glibc keeps what was freed in blocks of up to 32 MiB, and here would keep more than the whole weights
after the first version. So ranks map each larger block by itself, as `MALLOC_MMAP_THRESHOLD_` does (docs/backends.md).
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.ranks.process_group import World
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol.weights import WeightRoutes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

MOST = 0.4
"""Upper bound of what a rank needs while it publishes, relative to the whole weights. The largest unit that is gathered
at once is 1/16 of them."""
MODEL = {
    "config": {
        "hidden_size": 512, "intermediate_size": 1536, "num_layers": 16, "num_heads": 8, "num_kv_heads": 8,
        "max_position_embeddings": 64,
    },
}  # fmt: skip
MAPPED_BYTES = 1 << 20
"""Size from which a block of memory returns to the system when it is freed."""
M_MMAP_THRESHOLD = -3
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp": {"type": "fsdp"},
    "tensor": {"type": "megatron", "tensor_parallel": 2},
    "stages": {"type": "megatron", "pipeline_parallel": 2},
}


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process that is resident now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


class Peak:
    """Samples the anonymous memory in a thread, and wherever ``look`` is called. ``grown``: peak above the start."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.grown, self._start, self._over = 0, anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        self.grown = max(self.grown, anonymous_bytes() - self._start)

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.look()


class Watched(Learner):
    """A learner that samples the memory at each tensor that it hands out; ``hoards``: it gathers all of them first."""

    peak: Peak
    hoards = False

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        whole = super().weights()
        for named in [(name, tensor.clone()) for name, tensor in whole] if self.hoards else whole:
            self.peak.look()
            yield named


def publish(learner: Watched, publishing: Publishing | None, version: int) -> int:
    """Publish a version on rank 0, and gather it on the others, as replicas do; return the growth of memory (bytes)."""
    with Peak() as learner.peak:
        if publishing is not None:
            publishing._write(version, 1, None, WeightRoutes(epoch=0, transports={}), learner)
        else:
            for _ in learner.weights():
                pass
    return learner.peak.grown


def measure(world: World, config: JobConfig, directory: Path) -> tuple[int, list[int], int]:
    """Return the size of the weights, the growth at each of two versions, and that of a rank that hoards them."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) == 1
    learner = Watched(config, collective=world.data_parallel(config.backend.model_parallel))
    settings = ServiceSettings(data_dir=directory, shm_dir=directory)
    publishing = Publishing(None, settings, "job_1") if world.place.rank == 0 else None  # type: ignore[arg-type]
    try:
        grown = [publish(learner, publishing, version) for version in range(2)]
        learner.hoards = True
        return learner.layout().nbytes, grown, publish(learner, publishing, 2)
    finally:
        if publishing is not None:
            publishing.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rank_needs_a_second_copy_of_the_weights(
    ranks: Any, make_config: Callable[..., JobConfig], backend: str
) -> None:
    if backend != "fsdp":
        pytest.importorskip("megatron.core")
    config = make_config(model=MODEL, backend=BACKENDS[backend])
    root = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="penstock-publish-", dir=root if root.is_dir() else None) as directory:
        found = ranks.run(2, measure, config, Path(directory))
    for nbytes, grown, hoarded in found:
        assert nbytes > 200e6
        assert hoarded > nbytes, "the measurement sees a whole copy"
        assert max(grown) < MOST * nbytes, (grown, nbytes)
