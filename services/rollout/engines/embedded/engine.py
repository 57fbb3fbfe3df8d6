"""Default rollout engine: Penstock's own batched decoder, in this process, with the same model code as the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.services.rollout.engines.base import Listener, UpdateMode
from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.constraint import Grammars
from penstock.services.rollout.engines.embedded.batch import Batch, Outcome, RowBatch, TornWeights
from penstock.services.rollout.engines.requests import Requests, check_request, check_text
from penstock.services.rollout.engines.updates import ServedWeights, WeightUpdate, drop, lent
from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.config.rollout import EmbeddedConfig
from penstock.shared.errors import Conflict, Unavailable, WeightsError
from penstock.shared.models.lora import adapter_parameters, base_parameters
from penstock.shared.protocol.generation import (
    Caps,
    Constraint,
    GenRequest,
    GenResult,
    PauseMode,
    Sample,
    Scores,
    Token,
    WeightInfo,
)
from penstock.shared.protocol.weights import short_digest
from penstock.shared.weights.pinned import PinnedCopies, pinned_copies

__all__ = ["EmbeddedEngine"]

STEPS_PER_RUN = 8
"""Maximum decode steps per call in the decoding thread; fewer if a completion ends or the call is interrupted."""

T = TypeVar("T")


class EmbeddedEngine:
    """Continuous batching in one dedicated thread. The event loop owns the requests, the thread owns the tensors.

    Everything that touches tensors is a call in that thread. Calls run one after another; the gap between two calls is
    a token boundary. ``_interrupt`` ends a running decode call at the next token boundary. Only copies of new weights
    to a GPU have another thread, so that decoding goes on meanwhile.
    """

    title: ClassVar[str] = "the embedded engine"
    """Name of the engine, for messages."""
    caps: Caps = EmbeddedConfig.caps
    batch_type: ClassVar[Callable[..., RowBatch]] = Batch
    """Class of the batch; it gets the arguments of ``Batch``."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        stop_ids: Collection[int],
        detokenize: Callable[[list[int]], str],
        max_length: int | None = None,
        version: int = 0,
        digest: str = "",
        base: str = "",
        record_routes: bool = False,
        grammars: Grammars | None = None,
        copies: PinnedCopies | None = None,
    ) -> None:
        self._model, self._grammars = model, grammars or Grammars()
        self._max_running = max_running
        self.max_length = max_length or model.config.max_position_embeddings
        self.stop_ids = tuple(sorted(stop_ids))
        self._vocab_size = model.get_output_embeddings().weight.shape[0]
        self._batch = self.batch_type(
            model, max_running=max_running, max_length=self.max_length, detokenize=detokenize, version=version,
            weights=short_digest(digest), record_routes=record_routes, on_tokens=self._on_tokens,
        )  # fmt: skip
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._copies = copies or pinned_copies(model.device)
        self._copying: asyncio.Future[None] | None = None
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._requests = Requests()
        self._cancelled: set[int] = set()
        self._changed = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = "not started"
        self._paused: PauseMode | None = None
        self._interrupt, self._asleep = False, False
        self._served: ServedWeights[WeightUpdate] = ServedWeights(version, digest, base)
        self._frozen_at: float | None = None
        self._generated_tokens = 0

    @property
    def running(self) -> int:
        """Number of sequences being decoded."""
        return self._batch.count

    @property
    def is_paused(self) -> bool:
        """True while ``pause`` or an update stops decoding."""
        return self._frozen_at is not None or self._paused is not None

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled since the start."""
        return self._generated_tokens

    @property
    def progress(self) -> int:
        """Number of forward passes since the start. A step may take several passes, so this number grows within a step,
        before the step's tokens are counted."""
        return self._batch.passes

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the decoding task. Safe to repeat."""
        if self._driver is None:
            self._failure = None
            self._loop = asyncio.get_running_loop()
            self._driver = asyncio.create_task(self._drive(), name="embedded-engine")
            self._driver.add_done_callback(self._driver_ended)

    async def close(self) -> None:
        """Stop at the next token boundary; requests in flight fail with ``Unavailable``. Safe to repeat."""
        self._failure = self._failure or "closed"
        self._notify(interrupt=True)
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
        await self._end_copies()
        await asyncio.to_thread(self._copy_thread.shutdown)
        await asyncio.to_thread(self._thread.shutdown)
        await self._grammars.close()
        self._requests.fail(self._unavailable)
        await asyncio.to_thread(self._free)

    def _free(self) -> None:
        """Free weights and caches now instead of at the next garbage collection.

        Engine and batch, and the modules of the model, are in reference cycles; until they are collected, a view of a
        weight slot would keep the memory of the whole slot.
        """
        self._served.give_up(dirty=False)
        if self._copies is not None:
            self._copies.close()
        self._batch.close()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)

    async def health(self) -> dict[str, Any]:
        """Return counters and flags of the engine's state. Raises Unavailable once the engine cannot serve."""
        if self._failure is not None:
            raise self._unavailable()
        return {
            "running": self.running,
            "waiting": self._requests.waiting,
            "paused": self._paused,
            "asleep": self._asleep,
            "dirty": self._served.dirty,
            "version": self._served.version,
            "generated_tokens": self._generated_tokens,
        }

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            self._failure = f"decoding failed: {error!r}"
        self._requests.fail(self._unavailable)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"{self.title} cannot serve: {self._failure}")

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenRequest, on_token: Listener | None = None, *, on_start: Callable[[], None] | None = None
    ) -> GenResult:
        """Complete a prompt; see ``Engine.generate``."""
        matchers = await self._grammars.matchers(request)
        self._check_ready()
        check_request(request, vocab_size=self._vocab_size, max_length=self.max_length)
        own = set(request.sampling.stop_token_ids)
        stop_ids = own if request.sampling.ignore_eos else own.union(self.stop_ids)
        serial, answer = self._requests.open(request, tuple(sorted(stop_ids)), on_token, on_start, matchers)
        self._notify(interrupt=self.running < self._max_running)
        try:
            return await answer
        except asyncio.CancelledError:
            self._requests.forget(serial)
            self._cancelled.add(serial)
            self._notify(interrupt=True)
            raise

    async def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint; see ``Engine.prepare``."""
        await self._grammars.compile(constraint)

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Score a text; see ``Engine.score``."""
        self._check_ready()
        check_text(token_ids, vocab_size=self._vocab_size, max_length=self.max_length)
        await self._until(lambda: self._failure is not None or (self._frozen_at is None and self._paused is None))
        self._check_ready()

        def work() -> Scores:
            if held is None:
                return self._batch.score(token_ids, top_logprobs)
            with lent(self._policy_parameters(), held.tensors):
                return replace(self._batch.score(token_ids, top_logprobs), version=held.version)

        try:
            return await self._call(work)
        except TornWeights:
            await self._mark_dirty()
            raise

    def _on_tokens(self, tokens: list[tuple[int, Token]]) -> None:
        """Pass new tokens to the listeners on the event loop; called in the decoding thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._requests.deliver, tokens)

    def _check_ready(self) -> None:
        if self._failure is not None:
            raise self._unavailable()
        if self._asleep:
            raise Unavailable("the engine sleeps; wake it first")
        if self._served.dirty:
            raise WeightsError("the engine is dirty after a failed update; it serves again after a full update")

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End requests with their partial tokens; see ``Engine.abort``."""
        chosen = self._requests.chosen(request_ids)
        await self._end(chosen)
        return len(chosen)

    async def written(self, request_ids: Collection[str]) -> dict[str, Sample]:
        """Return the tokens that requests have generated so far; see ``Engine.written``."""
        if self._failure is not None:
            raise self._unavailable()
        names = {serial: self._requests.name_of(serial) for serial in self._requests.chosen(request_ids)}
        if not names:
            return {}
        samples = await self._call(lambda: self._batch.written(names))
        return {names[serial]: sample for serial, sample in samples.items()}

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary; see ``Engine.pause``."""
        self._paused = mode
        self._notify(interrupt=True)
        if mode == "drain":
            await self._until(lambda: self._paused != "drain" or not self._requests.started())
        elif mode == "abort":
            await self._end(self._requests.started())
        else:
            await self._call(lambda: None)

    async def resume(self) -> None:
        """Continue decoding after ``pause``. Safe to repeat."""
        self._paused = None
        self._notify(interrupt=False)

    async def sleep(self) -> None:
        """End all requests as 'abort', reject new ones until ``wake``, and release the cache memory."""
        self._asleep = True
        await self.abort()
        await self._call(self._batch.release)

    async def wake(self) -> None:
        """Accept requests again. Safe to repeat."""
        self._asleep = False
        self._notify(interrupt=False)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(
        self,
        *,
        version: int,
        digest: str,
        mode: UpdateMode,
        guard: Callable[[], bool] | None = None,
        base: bool = False,
    ) -> None:
        """Open an update; see ``Engine.begin_update``. An in-place update stops decoding from here to its end."""
        self._served.check_none()
        adapters = bool(adapter_parameters(self._model))
        if base and (not adapters or mode != "in_place"):
            has = "an" if adapters else "no"
            raise Conflict(
                f"a base is updated in place and under an adapter: mode '{mode}', this engine has {has} adapter"
            )
        parameters = base_parameters(self._model, remove_duplicate=False) if base else self._policy_parameters()
        self._served.begin(WeightUpdate(parameters, version, digest, mode, guard, base, self._copies))
        if mode == "in_place":
            self._frozen_at = time.perf_counter()
            await self._call(lambda: None)

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Stage parameters; see ``Engine.load_chunk``."""
        update = self._served.current()
        in_place = update.mode == "in_place"
        try:
            if in_place:
                await self._call(lambda: update.stage(tensors))
            elif self._copies is None:
                update.stage(tensors)
            else:
                await self._stage_beside(update, tensors)
        except WeightsError:
            if self._served.update is update:  # else it was aborted meanwhile
                await self._close_update(failed=in_place)
            raise

    async def _stage_beside(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Stage tensors in a thread of its own while decoding continues.

        A cancelled caller first waits until the copies have ended, because it releases the memory that they read.
        """
        self._copying = asyncio.get_running_loop().run_in_executor(self._copy_thread, update.stage, tensors)
        try:
            await asyncio.shield(self._copying)
        finally:
            await self._end_copies()

    async def _end_copies(self) -> None:
        """Stop the weight copies that are in progress, and wait until they have stopped. Safe to repeat."""
        copying, cancelled = self._copying, False
        while copying is not None and not copying.done():
            if (update := self._served.update) is not None:
                update.given_up = True
            try:
                await asyncio.wait([copying])
            except asyncio.CancelledError:
                cancelled = True
        if copying is not None:
            copying.exception()  # marks it as retrieved, which a cancelled caller does not
            if self._copying is copying:
                self._copying = None  # its error refers to the tensors, and so to a slot
        if cancelled:
            raise asyncio.CancelledError

    async def commit_update(self) -> float:
        """Activate the staged weights, drop stale caches and change the version; see ``Engine.commit_update``."""
        update = self._served.current()

        def commit() -> float:
            start = time.perf_counter()
            update.commit()
            if update.base:
                self._batch.drop_cache()
            else:
                self._batch.guard = update.guard
                self._batch.adopt(update.version, short_digest(update.digest))
            return time.perf_counter() - start

        frozen_at = self._frozen_at
        try:
            pause_s = await self._call(commit)
        except WeightsError:
            await self._close_update(failed=update.mode == "in_place")
            raise
        await asyncio.to_thread(drop, update.replaced)
        self._served.adopt()
        await self._close_update(failed=False)
        return pause_s if frozen_at is None else time.perf_counter() - frozen_at

    async def abort_update(self) -> None:
        """Stop weight copies that are in progress, then discard the open update; see ``Engine.abort_update``."""
        await self._end_copies()
        if self._served.update is not None:
            await self._close_update(failed=self._served.update.touched)

    async def weight_info(self) -> WeightInfo:
        """Return the served version."""
        return self._served.info()

    def _policy_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that an update replaces, by name; tied parameters appear under each of their names."""
        return adapter_parameters(self._model) or base_parameters(self._model, remove_duplicate=False)

    async def _close_update(self, *, failed: bool) -> None:
        self._served.give_up(dirty=False)
        self._frozen_at = None
        if failed:
            await self._mark_dirty()
        self._notify(interrupt=False)

    async def _mark_dirty(self) -> None:
        """Mark the weights as dirty, end started requests, and reject new ones until a full update succeeds."""
        self._served.dirty = True
        await self._end(self._requests.started())

    # -- the driver --------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        while True:
            await self._until(lambda: bool(self._cancelled) or self._can_step())
            if self._cancelled:
                gone, self._cancelled = self._cancelled, set()
                await self._end(gone)
                continue
            admitted = self._requests.take(self._max_running - self.running, only_started=self._paused == "drain")
            outcome = await self._run(admitted)
            self._generated_tokens += outcome.tokens
            self._requests.finish(outcome.finished)
            if outcome.torn:
                await self._mark_dirty()
            self._changed.set()

    def _can_step(self) -> bool:
        if self._served.dirty or self._asleep or self._frozen_at is not None or self._paused in ("abort", "keep"):
            return False
        if self._paused == "drain":
            return bool(self._requests.started())
        return bool(self.running or self._requests.waiting)

    def _run(self, admitted: list[Completion]) -> asyncio.Future[Outcome]:
        self._interrupt = False
        following = self._requests.following

        def work() -> Outcome:
            if admitted:
                self._batch.admit(admitted, following)
            return self._batch.run(STEPS_PER_RUN, lambda: self._interrupt)

        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``function`` in the decoding thread at the next token boundary."""
        self._interrupt = True
        return asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _end(self, requests: set[int]) -> None:
        """End requests as 'abort', both queued and running completions."""
        self._requests.unqueue(requests)
        self._requests.finish(await self._call(lambda: self._batch.evict(requests)))
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _notify(self, *, interrupt: bool) -> None:
        self._interrupt = self._interrupt or interrupt
        self._changed.set()
