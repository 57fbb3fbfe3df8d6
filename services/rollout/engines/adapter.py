"""Base class of the adapters of external engines. Subclasses implement starting, decoding and loading weights.

Requests wait in ``dispatch`` until a slot is free. A version is staged while the engine keeps serving, and committed
while decoding is stopped::

    stage ──> begin_update ──> commit_update: halt, load, flush, compare labels, resume
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
from penstock.services.rollout.engines.requests import check_request, check_text, rest_of
from penstock.services.rollout.engines.updates import ServedWeights
from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.config.base import StrictModel
from penstock.shared.config.rollout import ClassConfig, SglangConfig, VllmConfig, VllmServerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConstraintError, PenstockError, WeightsError
from penstock.shared.protocol.generation import (
    Constraint,
    GenRequest,
    GenResult,
    Likely,
    PauseMode,
    Sample,
    Scores,
    WeightInfo,
)
from penstock.shared.protocol.weights import Layout, WeightManifest, WeightRoutes, short_digest
from penstock.shared.runtime.tasks import wait_for
from penstock.shared.weights import Staged, Way, open_receiver
from penstock.shared.weights.open import Receiver

__all__ = ["EngineAdapter", "ModelFiles"]

S = TypeVar("S", bound=Written)
C = TypeVar("C", bound=VllmConfig | VllmServerConfig | SglangConfig | ClassConfig)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Model directory and properties that an external engine needs to load the model.

    Attributes:
        path: directory with config.json and weights.
        dtype: torch name of the dtype of weights and computation.
        vocab_size: number of columns of the logits.
        max_length: maximum number of tokens of a prompt plus its completion.
        layout: parameters that every update must contain; None: updates are not checked.
        tokenizer: directory of the tokenizer, for engines that need one.
        head_dim: width of an attention head; 0: skip the check that the engine supports it.
        temporary: directories to remove when the engine no longer needs them.
        trusted: run Python code from the model directory (``trust_remote_code``).
        device: torch device, 'cpu' or a GPU.
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
        """Remove the temporary directories; blocks. Safe to repeat."""
        for folder in self.temporary:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Update:
    """An open update to the staged version."""

    version: int
    digest: str
    base: bool = False


class EngineAdapter(ABC, Generic[S, C]):
    """Implements ``Engine`` for an external engine, which holds one copy of the weights and loads staged versions.

    Args:
        settings: settings of the rollout worker, for receiving weights.
        detokenize: turns tokens into text, to find stop strings.
        threads: number of threads for computation on a CPU.

    Raises:
        ConfigError: ``rollout.options`` does not match ``options_type``.
    """

    title: ClassVar[str]
    """Name of the engine, for messages."""
    options_type: ClassVar[type[StrictModel]] = StrictModel
    """Pydantic model of ``rollout.options``, for ``rollout.engine: class``; the default accepts no options."""

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
        """Weight label of the tokens that are decoded now; see ``label_of``."""
        self._staging = ThreadPoolExecutor(1, "stage")
        self._receiver: Receiver | None = None
        self._fetched: Staged | None = None

    # -- for each engine ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Start the engine and load the model as version 0; see ``start``."""

    async def _shut(self) -> None:
        """Stop the engine, even if it failed to start. Safe to repeat."""

    def _gone(self) -> str | None:
        """Return the reason why the engine can no longer serve; None if it can."""
        return None

    @abstractmethod
    def _begin(self, completion: Completion) -> S:
        """Create the stream of a completion; see ``Dispatch``."""

    @abstractmethod
    async def _decode(self, stream: S) -> Finish:
        """Decode a completion, record its tokens and pass them to ``Dispatch.deliver``; see ``Dispatch``.

        Must return soon after ``stream.unwanted`` is set.
        """

    async def _end(self, streams: Sequence[S]) -> None:
        """Wait until these streams, which are marked ``unwanted``, have ended; see ``Dispatch``."""
        self._dispatch.notice()
        over = self._dispatch.until(lambda: not any(map(self._dispatch.lives, streams)))
        await wait_for(over, CALL_S, f"{self.title} to end {len(streams)} completions")

    @abstractmethod
    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        """Return the log-prob of each token of a text except the first, and the top tokens at each of these positions.

        Args:
            number: unique number of this call.
        """

    @abstractmethod
    async def _stand_still(self, *, clear_cache: bool) -> None:
        """Stop computing tokens and return once stopped. ``clear_cache``: caches must be recomputed after the stop.

        ``self._halted`` is True from before this call until ``_move_on`` has returned. May be called again meanwhile.
        """

    @abstractmethod
    async def _move_on(self) -> None:
        """Continue decoding after ``_stand_still``."""

    async def _fetch(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version and verify its digest; replaces the version fetched before. See ``stage``.

        The default opens it in this process: ``self._fetched`` holds its tensors until ``_release``.
        """
        return await asyncio.get_running_loop().run_in_executor(self._staging, self._receive, manifest, routes)

    async def _release(self) -> None:
        """Release the fetched version, if any. Safe to repeat."""
        await asyncio.get_running_loop().run_in_executor(self._staging, self._drop)

    async def _check_fetched(self, version: int) -> None:
        """Raise WeightsError if the fetched version is no longer intact; called before and after the engine loads the
        version."""
        if self._fetched is not None and not self._fetched.intact():
            raise WeightsError(f"the memory of version {version} was overwritten before it was loaded")

    @abstractmethod
    async def _load(self, label: str) -> None:
        """Load the fetched version into the engine with the weight label ``label``. Raises WeightsError."""

    @abstractmethod
    async def _flush(self) -> None:
        """Drop cached prefixes: prefixes of older weights would silently give wrong tokens under the new label.

        Raises:
            WeightsError: the engine may still have cached prefixes.
        """

    async def _served_label(self) -> str:
        """Return the label that the engine itself reports for the served weights."""
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
        """Number of sequences that the engine is decoding."""
        return self._dispatch.running

    @property
    def is_paused(self) -> bool:
        """True while ``pause`` or an update stops decoding."""
        return self._halted or self._dispatch.is_updating or self._dispatch.paused is not None

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled since the start."""
        return self._dispatch.generated_tokens

    async def start(self) -> None:
        """Start the engine and load the model. Safe to repeat.

        Raises:
            ConfigError: the engine does not support this model on this machine.
            Unavailable: the engine does not start; its own output gives the reason.
        """
        if self._is_open:
            return
        await self._open()
        self._is_open = True
        self._dispatch.start()

    async def close(self) -> None:
        """Stop the engine; requests in flight fail with ``Unavailable``. Safe to repeat."""
        await self._dispatch.close()
        self._is_open = False
        await self._shut()
        await asyncio.to_thread(self._clean_up)
        self._dispatch.fail()

    def _clean_up(self) -> None:
        self._staging.shutdown()  # wait for a version that is still being received: it is released below with its lock
        self._drop()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self.model.remove_temporary()

    async def health(self) -> dict[str, Any]:
        """Return counts and flags. Raises Unavailable once the engine cannot serve."""
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
        return await self._dispatch.complete(rest_of(request), tuple(sorted(stop_ids)), on_token, on_start)

    async def prepare(self, constraint: Constraint) -> None:
        """Reject every constraint: the constrained decoding of external engines would change log-probs.

        Raises:
            ConstraintError: always.
        """
        raise ConstraintError(
            f"{constraint.asked_by}: rollout.engine '{self._config.engine}' keeps no answer to a form"
        )

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Score a text; see ``Engine.score``. ``held`` (weights of a published version) must be None: the engine has
        only the served weights."""
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
            # If the weights were updated meanwhile, the log-probs may mix both versions: compute them again.
            if (self._served.version, self._served.digest) == before and not dispatch.is_updating:
                return Scores(version=before[0], logprobs=logprobs, top=top)

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End requests with their partial tokens; see ``Engine.abort``."""
        return await self._dispatch.abort(request_ids)

    async def written(self, request_ids: Collection[str]) -> dict[str, Sample]:
        """Return the tokens that requests have generated so far; see ``Engine.written``."""
        return self._dispatch.written(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary; see ``Engine.pause``. The external engine itself is paused only in mode 'keep'."""
        self._dispatch.paused = mode
        self._dispatch.notice()
        if mode == "drain":
            await self._dispatch.drained()
        elif mode == "abort":
            await self._dispatch.end_started()
        else:
            await self._halt(clear_cache=False)

    async def resume(self) -> None:
        """Continue decoding after ``pause``. Safe to repeat."""
        self._dispatch.paused = None
        await self._go_on()

    async def sleep(self) -> None:
        """End all requests as 'abort' and reject new ones until ``wake``; the engine keeps its memory."""
        self._dispatch.is_asleep = True
        await self.abort()

    async def wake(self) -> None:
        """Accept requests again. Safe to repeat."""
        self._dispatch.is_asleep = False
        self._dispatch.notice()

    async def _halt(self, *, clear_cache: bool) -> None:
        """Stop the engine at a token boundary. ``clear_cache``: caches must be recomputed after the stop."""
        self._halted = True
        await self._stand_still(clear_cache=clear_cache)

    async def _go_on(self) -> None:
        """Undo ``_halt``, unless an update or a 'keep' pause still needs it, and admit waiting completions."""
        if self._halted and not self._dispatch.is_updating and self._dispatch.paused != "keep":
            await self._move_on()
            self._halted = False
        self._dispatch.notice()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version while the engine keeps serving; see ``UpdatableByReference``."""
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
        """Open an update to the staged version; see ``Engine.begin_update``.

        Raises:
            WeightsError: this version is not the staged one.
        """
        self._served.check_none()
        staged = self._staged
        if staged is None or (staged.version, staged.digest) != (version, digest):
            has = "none" if staged is None else f"version {staged.version}"
            raise WeightsError(f"version {version} was not staged; {self.title} has {has} open")
        self._served.begin(_Update(version, digest))

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Abort the update: external engines cannot take tensors of this process; they use ``stage``.

        Raises:
            WeightsError: always, if an update is open.
            Conflict: no update is open.
        """
        self._served.current()
        await self.abort_update()
        raise WeightsError(
            f"{self.title} takes versions by reference: stage() and commit_update(), without load_chunk()"
        )

    async def commit_update(self) -> float:
        """Load the staged version while decoding is stopped, and drop all caches; see ``Engine.commit_update``."""
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
        """Discard the staged version (see ``Engine.abort_update``); the served weights stay unchanged."""
        if self._served.update is not None:
            self._served.give_up(dirty=False)
            await self._let_go()

    async def weight_info(self) -> WeightInfo:
        """Return the served version."""
        return self._served.info()

    async def _check_label(self, expected: str, kind: type[PenstockError]) -> None:
        """Raise an error of class ``kind`` if the engine reports another label than ``expected``."""
        served = await self._served_label()
        if served != expected:
            raise kind(f"{self.title} says that it serves '{served}', and not '{expected}'")

    async def _fail_update(self, *, dirty: bool) -> None:
        self._served.give_up(dirty=dirty)
        self._dispatch.is_dirty = self._served.dirty
        if dirty:  # before the engine continues, so that it samples no token with half-loaded weights
            try:
                await self._dispatch.end_started()
            except PenstockError as error:
                self._dispatch.failure = self._dispatch.failure or f"requests may have half-loaded weights: {error}"
        with contextlib.suppress(PenstockError):  # if the engine is dead, the caller's error already reports it
            await self._let_go()

    async def _let_go(self) -> None:
        """Release the staged version, end the update and continue decoding, unless the engine has failed."""
        self._staged = None
        try:
            await self._release()
        finally:
            self._dispatch.is_updating = False
        if self._dispatch.failure is None:
            await self._go_on()
