"""Base of the adapters of engines that others wrote: all but how one starts, decodes and loads.

Requests wait in ``dispatch`` until there is a slot. A version is staged while the engine serves on, and committed while
nothing decodes::

    stage ──> begin_update ──> commit_update: halt, load, flush, compare labels, go on
                    └────────> abort_update
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from penstock.services.rollout.engines.base import Listener, UpdateMode
from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.dispatch import Dispatch
from penstock.services.rollout.engines.remote import CALL_S, Written, check_layout, label_of
from penstock.services.rollout.engines.requests import check_request, check_text
from penstock.services.rollout.engines.updates import ServedWeights
from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.config.base import StrictModel
from penstock.shared.config.rollout import ClassConfig, SglangConfig, VllmConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConstraintError, PenstockError, WeightsError
from penstock.shared.protocol.generation import (
    Constraint,
    GenRequest,
    GenResult,
    Likely,
    PauseMode,
    Scores,
    WeightInfo,
)
from penstock.shared.protocol.weights import Layout, WeightManifest, WeightRoutes, short_digest
from penstock.shared.runtime.tasks import wait_for
from penstock.shared.weights import Staged, Way, open_receiver
from penstock.shared.weights.open import Receiver

__all__ = ["EngineAdapter", "ModelFiles"]

S = TypeVar("S", bound=Written)
C = TypeVar("C", bound=VllmConfig | SglangConfig | ClassConfig)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as another program reads it.

    Attributes:
        path: directory with config.json and weights.
        dtype: of weights and computation, as torch names it.
        max_length: most tokens of a prompt and its completion.
        layout: parameters of a policy version, which every update must have; None: they are not compared.
        tokenizer: directory of the tokenizer, for engines that need one.
        head_dim: width of an attention head; 0: it is not compared with what the engine computes.
        temporary: directories that nobody needs once the engine is closed.
        trusted: run code of the directory.
        device: 'cpu' or a GPU.
    """

    path: Path
    dtype: str
    vocab_size: int
    max_length: int
    layout: Layout | None = None
    tokenizer: Path | None = None
    head_dim: int = 0
    temporary: tuple[Path, ...] = ()
    trusted: bool = False
    device: str = "cpu"

    def remove_temporary(self) -> None:
        """Remove what was written for the engine alone; blocks. Safe to repeat."""
        for folder in self.temporary:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Update:
    """To the version that is staged."""

    version: int
    digest: str
    base: bool = False


class EngineAdapter(ABC, Generic[S, C]):
    """See ``Engine``. Versions of weights come through ``stage``; the engine has one copy of the weights.

    Args:
        settings: of the rollout worker, for receiving weights.
        threads: of the computation on a CPU.
        detokenize: for stop strings.

    Raises:
        ConfigError: the options are not of ``options_type``.
    """

    title: ClassVar[str]
    """Name of the engine, for messages."""
    options_type: ClassVar[type[StrictModel]] = StrictModel
    """Of ``rollout.options``, for an engine that a job file names by its class; by default it takes none."""

    def __init__(
        self,
        model: ModelFiles,
        config: C,
        settings: ServiceSettings,
        *,
        max_running: int,
        stop_ids: Collection[int],
        detokenize: Callable[[list[int]], str],
        threads: int = 1,
    ) -> None:
        self.model, self._config, self._settings, self._threads = model, config, settings, threads
        self._max_running, self._detokenize = max_running, detokenize
        self.options: Any = None
        if isinstance(config, ClassConfig):
            self.options = self.options_type.parse(config.options, where="rollout.options")
        self.caps = config.caps
        self.max_length, self.stop_ids = model.max_length, tuple(sorted(stop_ids))
        self._dispatch: Dispatch[S] = Dispatch(
            self.title, max_running, begin=self._begin, decode=self._decode, end=self._end
        )
        self._served: ServedWeights[_Update] = ServedWeights(0)
        self._staged: WeightManifest | None = None
        self._is_open, self._halted = False, False
        self._num_scored = 0
        self._label = label_of(0, "")
        """Of the tokens that are decoded now."""
        self._staging = ThreadPoolExecutor(1, "stage")
        self._receiver: Receiver | None = None
        self._fetched: Staged | None = None

    # -- for each engine ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Start the engine with the model as version 0; see ``start``."""

    async def _shut(self) -> None:
        """End it, also where it did not start. Safe to repeat."""

    def _gone(self) -> str | None:
        """Why it cannot serve any more; None: it can."""
        return None

    @abstractmethod
    def _begin(self, completion: Completion) -> S:
        """The stream of a completion; see ``Dispatch``."""

    @abstractmethod
    async def _decode(self, stream: S) -> Finish:
        """Decode a completion, and book and tell its tokens; see ``Dispatch``. One that is ``unwanted`` ends soon."""

    async def _end(self, streams: Sequence[S]) -> None:
        """Wait until streams are over, which are ``unwanted``; see ``Dispatch``."""
        self._dispatch.notice()
        over = self._dispatch.until(lambda: not any(map(self._dispatch.lives, streams)))
        await wait_for(over, CALL_S, f"{self.title} to end {len(streams)} completions")

    @abstractmethod
    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        """Log-probs of the tokens of a text after its first one, and the likeliest ones at each of these places."""

    @abstractmethod
    async def _stand_still(self, *, clear_cache: bool) -> None:
        """Return once no token is computed any more; with ``clear_cache`` all is computed anew when it goes on.

        ``self._halted`` is True from before until ``_move_on`` has returned. May be repeated meanwhile.
        """

    @abstractmethod
    async def _move_on(self) -> None:
        """Undo ``_stand_still``."""

    async def _fetch(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version and prove its digest, instead of the one that was fetched before; see ``stage``.

        By default in this process: ``self._fetched`` has its tensors until ``_release``.
        """
        return await asyncio.get_running_loop().run_in_executor(self._staging, self._receive, manifest, routes)

    async def _release(self) -> None:
        """Let go of the version that was fetched, if there is one. Safe to repeat."""
        await asyncio.get_running_loop().run_in_executor(self._staging, self._drop)

    async def _check_fetched(self, version: int) -> None:
        """Raise WeightsError where the version that was fetched is not intact; asked before and after it is loaded."""
        if self._fetched is not None and not self._fetched.intact():
            raise WeightsError(f"the memory of version {version} was overwritten before it was loaded")

    @abstractmethod
    async def _load(self, label: str) -> None:
        """Load what was fetched, and label its tokens so. Raises WeightsError."""

    @abstractmethod
    async def _flush(self) -> None:
        """Drop cached prefixes: what was computed with older weights would be silently wrong, whatever its label.

        Raises:
            WeightsError: they may be there still.
        """

    async def _served_label(self) -> str:
        """The engine's own label of the weights that it serves."""
        return self._label

    def _receive(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        if self._receiver is None:
            self._receiver = open_receiver(self._settings)
        if routes is not None:
            self._receiver.follow(self._settings.worker_id, routes)
        self._drop()
        self._fetched = self._receiver.stage(manifest)
        return self._fetched.way

    def _drop(self) -> None:
        if self._fetched is not None:
            self._fetched.release()
            self._fetched = None

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that the engine has in hand."""
        return self._dispatch.running

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._dispatch.generated_tokens

    async def start(self) -> None:
        """Start the engine and load the model. Safe to repeat.

        Raises:
            ConfigError: it cannot compute this model here.
            Unavailable: it does not start; its own output says why.
        """
        if self._is_open:
            return
        await self._open()
        self._is_open = True
        self._dispatch.start()

    async def close(self) -> None:
        """End the engine; requests in flight fail with ``Unavailable``. Safe to repeat."""
        await self._dispatch.close()
        self._is_open = False
        await self._shut()
        await asyncio.to_thread(self._clean_up)
        self._dispatch.fail()

    def _clean_up(self) -> None:
        self._staging.shutdown()  # what it still receives is dropped, too: a lock would stay
        self._drop()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self.model.remove_temporary()

    async def health(self) -> dict[str, Any]:
        """Counts and flags. Raises Unavailable once the engine cannot serve."""
        self._check_alive()
        return {
            "running": self.running,
            "waiting": self._dispatch.waiting,
            "paused": self._dispatch.paused,
            "asleep": self._dispatch.is_asleep,
            "dirty": self._served.dirty,
            "version": self._served.version,
            "generated_tokens": self.generated_tokens,
        }

    def _check_alive(self) -> None:
        dispatch = self._dispatch
        if dispatch.failure is None:
            dispatch.failure = self._gone()
        if dispatch.failure is not None:
            raise dispatch.unavailable()

    def _check_ready(self) -> None:
        self._check_alive()
        self._dispatch.check_ready()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenRequest, on_token: Listener | None = None, *, on_start: Callable[[], None] | None = None
    ) -> GenResult:
        """Complete a prompt; see ``Engine.generate``."""
        self._check_ready()
        if request.constraint is not None:
            await self.prepare(request.constraint)
        check_request(request, vocab_size=self.model.vocab_size, max_length=self.max_length)
        own = set(request.sampling.stop_token_ids)
        stop_ids = own if request.sampling.ignore_eos else own.union(self.stop_ids)
        return await self._dispatch.complete(request, tuple(sorted(stop_ids)), on_token, on_start)

    async def prepare(self, constraint: Constraint) -> None:
        """Constraints of other engines change log-probs, so there are none here.

        Raises:
            ConstraintError: always.
        """
        raise ConstraintError(
            f"{constraint.asked_by}: rollout.engine '{self._config.engine}' keeps no answer to a form"
        )

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Log-probs of a text; see ``Engine.score``. The engine holds no weights but those that it serves."""
        assert held is None, "caps.held is False"
        self._check_ready()
        check_text(token_ids, vocab_size=self.model.vocab_size, max_length=self.max_length)
        dispatch = self._dispatch
        while True:
            await dispatch.until(
                lambda: dispatch.failure is not None or (dispatch.paused is None and not dispatch.is_updating)
            )
            self._check_ready()
            before = self._served.version, self._served.digest
            self._num_scored += 1
            logprobs, top = await self._score(self._num_scored, list(token_ids), top_logprobs)
            self._check_ready()
            # An update while it computed would leave a mixture.
            if (self._served.version, self._served.digest) == before and not dispatch.is_updating:
                return Scores(version=before[0], logprobs=logprobs, top=top)

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End requests with what they have; see ``Engine.abort``."""
        return await self._dispatch.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary; see ``Engine.pause``. The engine itself stands still for 'keep' alone."""
        self._dispatch.paused = mode
        self._dispatch.notice()
        if mode == "drain":
            await self._dispatch.drained()
        elif mode == "abort":
            await self._dispatch.end_started()
        else:
            await self._halt(clear_cache=False)

    async def resume(self) -> None:
        """Go on. Safe to repeat."""
        self._dispatch.paused = None
        await self._go_on()

    async def sleep(self) -> None:
        """End everything as 'abort' and refuse what comes; the engine keeps its memory."""
        self._dispatch.is_asleep = True
        await self.abort()

    async def wake(self) -> None:
        """Serve again. Safe to repeat."""
        self._dispatch.is_asleep = False
        self._dispatch.notice()

    async def _halt(self, *, clear_cache: bool) -> None:
        """Have the engine stop at a token boundary; with ``clear_cache`` it computes everything anew afterwards."""
        self._halted = True
        await self._stand_still(clear_cache=clear_cache)

    async def _go_on(self) -> None:
        """Undo ``_halt`` unless somebody else wants it, and look whether there is work."""
        if self._halted and not self._dispatch.is_updating and self._dispatch.paused != "keep":
            await self._move_on()
            self._halted = False
        self._dispatch.notice()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version while the engine serves on; see ``UpdatableByReference``."""
        self._check_alive()
        self._served.check_none()
        check_layout(manifest.layout, self.model.layout)
        self._staged = None
        way = await self._fetch(manifest, routes)
        self._staged = manifest
        return way

    async def begin_update(
        self,
        *,
        version: int,
        digest: str,
        mode: UpdateMode,
        guard: Callable[[], bool] | None = None,
        base: bool = False,
    ) -> None:
        """Open an update to what was staged; see ``Engine.begin_update``.

        Raises:
            WeightsError: another version is staged, or none.
        """
        self._served.check_none()
        staged = self._staged
        if staged is None or (staged.version, staged.digest) != (version, digest):
            has = "none" if staged is None else f"version {staged.version}"
            raise WeightsError(f"version {version} was not staged; {self.title} has {has} open")
        self._served.begin(_Update(version, digest))

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors of this process do not reach the engine's.

        Raises:
            WeightsError: always; the update is over.
        """
        self._served.current()
        await self.abort_update()
        raise WeightsError(
            f"{self.title} takes versions by reference: stage() and commit_update(), without load_chunk()"
        )

    async def commit_update(self) -> float:
        """Load what is staged while nothing decodes, and drop every cache; see ``Engine.commit_update``."""
        update, start = self._served.current(), time.perf_counter()
        touched, self._dispatch.is_updating = False, True
        try:
            await self._halt(clear_cache=True)
            await self._check_fetched(update.version)
            touched = True
            label = label_of(update.version, short_digest(update.digest))
            await self._load(label)
            self._label = label
            await self._check_fetched(update.version)
            await self._flush()
            await self._check_label(label, WeightsError)
            self._served.adopt()
            self._dispatch.is_dirty = False
            pause_s = time.perf_counter() - start
        except BaseException:
            await self._fail_update(dirty=touched)
            raise
        await self._let_go()
        return pause_s

    async def abort_update(self) -> None:
        """Give up; see ``Engine.abort_update``. Before the commit nothing is touched."""
        if self._served.update is not None:
            self._served.give_up(dirty=False)
            await self._let_go()

    async def weight_info(self) -> WeightInfo:
        """The served version."""
        return self._served.info()

    async def _check_label(self, expected: str, kind: type[PenstockError]) -> None:
        """Have the engine say which weights it serves; raises an error of the given kind if these are others."""
        served = await self._served_label()
        if served != expected:
            raise kind(f"{self.title} says that it serves '{served}', and not '{expected}'")

    async def _fail_update(self, *, dirty: bool) -> None:
        self._served.give_up(dirty=dirty)
        self._dispatch.is_dirty = self._served.dirty
        with contextlib.suppress(PenstockError):  # where it is dead, the error that is raised says so
            if dirty:  # while it stands still: no token comes from weights that are no version
                await self._dispatch.end_started()
        with contextlib.suppress(PenstockError):
            await self._let_go()

    async def _let_go(self) -> None:
        """The version that was staged is needed no more."""
        self._staged = None
        try:
            await self._release()
        finally:
            self._dispatch.is_updating = False
        await self._go_on()
