"""An engine on a device copies new weights while it decodes; the pause only exchanges pointers.

The stream of the stand-in makes each copy only when it is waited for, and here only once the test allows it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from torch import Tensor

from penstock.services.rollout.engines import EmbeddedEngine
from penstock.services.rollout.engines.updates import WeightUpdate
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.generation import WeightInfo
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.weights import Staged, layout_of, open_publisher, open_receiver
from penstock.shared.weights.pinned import PinnedCopies
from penstock.shared.weights.slots import slot_paths
from tests.contract.device_memories import LateStream
from tests.contract.engines.conftest import LATE, ON_GPU, Bench, in_this_process, peaked_model

OLD = WeightInfo(version=0, digest="", dirty=False)
JOB = "job_copies"


class Held:
    """Stream whose first wait blocks until the test lets it go on."""

    def __init__(self) -> None:
        self.stream = LateStream()
        self.stream.waiting = self._wait
        self.reached, self.go_on = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


@pytest.fixture
def held() -> Held:
    return Held()


@asynccontextmanager
async def bench_of(stream: LateStream) -> AsyncIterator[Bench]:
    engine = in_this_process(LATE, copies=PinnedCopies(stream, buffer_bytes=4096))
    await engine.start()
    try:
        yield Bench(engine)
    finally:
        await engine.close()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


@pytest.mark.usefixtures("one_thread")
async def test_decoding_goes_on_while_weights_are_copied(held: Held) -> None:
    async with bench_of(held.stream) as bench:
        asking = asyncio.create_task(bench.engine.generate(bench.ask("through", n=2)))
        updating = asyncio.create_task(bench.update(1, seed=1))
        await until(held.reached)
        await bench.until_tokens(20)
        assert not bench.engine.is_paused
        assert await bench.engine.weight_info() == OLD
        held.go_on.set()
        await updating
        assert (await bench.engine.weight_info()).version == 1
        for sample in (await asking).samples:
            assert [span.version for span in sample.spans] == [0, 1]
            assert bench.error(sample, seeds=(0, 1)) < 1e-4


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", [LATE, pytest.param(ON_GPU, marks=pytest.mark.gpu)])
async def test_the_pause_moves_no_weights(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit exchanges pointers: the tensors that it makes the parameters are those that were staged."""
    engine = in_this_process(where)
    await engine.start()
    staged: dict[str, int] = {}
    commit = WeightUpdate.commit

    def watched(update: WeightUpdate) -> None:
        for name, parameter in update.parameters.items():
            tensor = update._staged[id(parameter)]
            assert tensor.device == parameter.device, name
            staged[name] = tensor.data_ptr()
        commit(update)

    monkeypatch.setattr(WeightUpdate, "commit", watched)
    try:
        bench = Bench(engine)
        await bench.update(1, seed=1)
        parameters = engine._policy_parameters()
        assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == staged
        for name, tensor in bench.weights(1).items():
            assert parameters[name].cpu().equal(tensor), name
    finally:
        await engine.close()


@pytest.mark.usefixtures("one_thread")
async def test_weights_that_arrive_damaged_are_never_served() -> None:
    stream = LateStream()
    async with bench_of(stream) as bench:
        before = (await bench.engine.generate(bench.ask("before", max_new_tokens=30))).samples[0]
        stream.spoil = lambda target: target[:1].bitwise_not_()
        with pytest.raises(WeightsError, match="damaged"):
            await bench.update(1, seed=1)
        assert await bench.engine.weight_info() == OLD
        assert (await bench.engine.generate(bench.ask("after", max_new_tokens=30))).samples[0] == before
        stream.spoil = lambda target: None
        await bench.update(1, seed=1)
        sample = (await bench.engine.generate(bench.ask("new", max_new_tokens=30))).samples[0]
        assert bench.error(sample, seeds=(0, 1)) < 1e-4


@pytest.mark.usefixtures("one_thread")
async def test_memory_that_is_overwritten_while_it_is_copied_is_refused(held: Held) -> None:
    intact = True
    async with bench_of(held.stream) as bench:
        updating = asyncio.create_task(bench.update(1, seed=1, guard=lambda: intact))
        await until(held.reached)
        intact = False
        held.go_on.set()
        with pytest.raises(WeightsError, match="overwritten"):
            await updating
        assert await bench.engine.weight_info() == OLD


async def cancel(bench: Bench, loading: asyncio.Task[Any]) -> None:
    """Cancel the task that waits for the copies, twice."""
    for _ in range(2):
        loading.cancel()
        await asyncio.sleep(0)


async def abort(bench: Bench, loading: asyncio.Task[Any]) -> None:
    await bench.engine.abort_update()


async def close(bench: Bench, loading: asyncio.Task[Any]) -> None:
    await bench.engine.close()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("end", [cancel, abort, close])
async def test_a_slot_stays_locked_until_the_copies_from_it_have_ended(
    held: Held, settings: ServiceSettings, end: Callable[[Bench, asyncio.Task[Any]], Awaitable[None]]
) -> None:
    """The follower releases the slot of a version that it does not serve once ``load_chunk`` has returned or raised."""
    layout = layout_of(peaked_model(0).named_parameters())
    publisher = open_publisher(JOB, layout, settings)
    receiver = open_receiver(settings)
    staged = receiver.stage(publisher.publish(peaked_model(1).named_parameters(), version=1, epoch=1))
    slot = next(path for path in slot_paths(settings.shm_dir, JOB) if not free(path))
    try:
        async with bench_of(held.stream) as bench:
            await bench.engine.begin_update(version=1, digest="d1", mode="swap", guard=staged.intact)
            loading = asyncio.create_task(load(bench.engine, staged))
            await until(held.reached)
            ending = asyncio.create_task(end(bench, loading))
            for _ in range(20):  # of the event loop
                await asyncio.sleep(0)
            assert not loading.done()
            assert not free(slot)
            held.go_on.set()
            await asyncio.wait([loading, ending], timeout=60)
            await ending
            assert isinstance(error_of(loading), asyncio.CancelledError if end is cancel else WeightsError)
            assert (free(slot), held.stream.queued) == (True, 0)
            assert held.stream.num_copies < 10, "the rest was not copied"
            if end is not close:
                await bench.engine.abort_update()
                await bench.update(2, seed=2)
                assert (await bench.engine.weight_info()).version == 2
    finally:
        held.go_on.set()
        receiver.close()
        publisher.close()


async def load(engine: Any, staged: Staged) -> None:
    """Load a version as ``PolicyFollower`` does."""
    assert isinstance(engine, EmbeddedEngine)
    try:
        await engine.load_chunk(staged.tensors())
    finally:
        staged.release()


def free(path: Any) -> bool:
    """Return True if a publisher could write to this slot now."""
    file = LockedFile.open(path)
    try:
        return file.try_exclusive()
    finally:
        file.close()


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def test_a_version_from_memory_of_the_device_is_not_copied() -> None:
    """CUDA IPC stages a version on the device itself; the meta device stands for it here."""
    stream = LateStream()
    model = peaked_model(0)
    parameters = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}
    update = WeightUpdate(parameters, 1, "d1", "swap", None, copies=PinnedCopies(stream, 4096))
    there: dict[str, Tensor] = {name: tensor.clone() for name, tensor in parameters.items()}
    update.stage(there)
    assert stream.num_copies == 0
    assert all(update._staged[id(parameters[name])] is tensor for name, tensor in there.items())
