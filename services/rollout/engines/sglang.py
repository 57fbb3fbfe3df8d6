"""SGLang as a rollout engine: its HTTP server, started by the rollout worker or running already.

Weights go as files in shared memory (``sglang_files``), which every build of SGLang reads. A running completion is
retracted while they are loaded: SGLang computes its keys and values anew, with the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.services.rollout.engines.base import Listener, UpdateMode
from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.dispatch import Dispatch
from penstock.services.rollout.engines.remote import check_layout, label_of
from penstock.services.rollout.engines.requests import check_request, check_text
from penstock.services.rollout.engines.sglang_calls import Stream, generate_body, name_of, read_scores, score_body
from penstock.services.rollout.engines.sglang_files import VersionFiles
from penstock.services.rollout.engines.sglang_server import CALL_S, SglangServer
from penstock.services.rollout.engines.updates import ServedWeights
from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.config.rollout import SglangConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, ConstraintError, DeadlineError, PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Constraint, GenRequest, GenResult, PauseMode, Scores, WeightInfo
from penstock.shared.protocol.weights import Layout, WeightManifest, WeightRoutes, short_digest
from penstock.shared.weights import Way

__all__ = ["KNOWN_VERSIONS", "SglangEngine", "SglangModel"]

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose routes, bodies and answers this adapter was written for."""
SETTLE_S = 0.02
"""A server that stands still has told all its tokens once none came for this long."""
STALL_S = 300.0
"""A server that decodes and tells no token for so long hangs."""
_AGAIN_S = 0.5
"""After this an end is asked for again: SGLang forgets that of a request which it does not have yet."""


@dataclass(frozen=True, slots=True)
class SglangModel:
    """A model as a server needs it.

    Attributes:
        path: directory with config.json and weights.
        tokenizer: directory of the tokenizer, which SGLang needs for min_new_tokens.
        dtype: of weights and computation, as torch names it.
        max_length: most tokens of a prompt and its completion.
        layout: parameters of a policy version, which every update must have; None: they are not compared.
        temporary: directories to remove at the end.
        trusted: run code of the directory.
        device: 'cpu' or a GPU.
    """

    path: Path
    tokenizer: Path
    dtype: str
    vocab_size: int
    max_length: int
    layout: Layout | None = None
    temporary: tuple[Path, ...] = ()
    trusted: bool = False
    device: str = "cpu"


@dataclass(slots=True)
class _Update:
    """To a version in a directory."""

    version: int
    digest: str
    base: bool = False


@dataclass(frozen=True, slots=True)
class _Staged:
    manifest: WeightManifest
    folder: Path


class SglangEngine:
    """See ``Engine``. Versions of weights come through ``stage``.

    Args:
        settings: of the rollout worker, for receiving weights.
        threads: of the computation on a CPU.
        detokenize: for stop strings.
    """

    caps = SglangConfig.caps

    def __init__(
        self,
        model: SglangModel,
        config: SglangConfig,
        settings: ServiceSettings,
        *,
        max_running: int,
        stop_ids: Collection[int],
        detokenize: Callable[[list[int]], str],
        threads: int = 1,
    ) -> None:
        self.model, self._config, self._settings, self._threads = model, config, settings, threads
        self._max_running, self._detokenize = max_running, detokenize
        self.max_length, self.stop_ids = model.max_length, tuple(sorted(stop_ids))
        self._name = secrets.token_hex(4)
        self._server: SglangServer | None = None
        self._files: VersionFiles | None = None
        self._dispatch: Dispatch[Stream] = Dispatch(
            "SGLang", max_running, begin=self._begin, decode=self._decode, end=self._end
        )
        self._served: ServedWeights[_Update] = ServedWeights(0)
        self._staged: _Staged | None = None
        self._label = label_of(0, "")
        self._halted = False
        self._num_scored = 0
        self._heard = time.monotonic()

    @property
    def running(self) -> int:
        """Sequences that the server has in hand."""
        return self._dispatch.running

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._dispatch.generated_tokens

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server, or find the one at ``sglang_url`` and give it this model. Safe to repeat.

        Raises:
            ConfigError: there is no SGLang here, or the server at the URL serves other models.
            Unavailable: it does not start or answer; its own output says why.
        """
        if self._server is not None:
            return
        url, python = self._settings.sglang_url, self._settings.sglang_interpreter
        self._files = await asyncio.to_thread(VersionFiles, self._settings, self.model.path)
        if url:
            self._server = SglangServer(url)
        elif python is not None:
            self._server = await SglangServer.start(python, self._words(), self._variables())
        else:
            raise ConfigError("there is no SGLang here; run: penstock engines install sglang")
        self._look_at(await self._server.ready())
        if not self._server.is_own:
            await self._take_over(self._server)
        await self._check_label(Unavailable)
        self._dispatch.start()

    def _words(self) -> list[str]:
        """Options of the server that is started here."""
        model, config = self.model, self._config
        words = [
            "--model-path", str(model.path), "--tokenizer-path", str(model.tokenizer), "--dtype", model.dtype,
            "--context-length", str(model.max_length), "--max-running-requests", str(self._max_running),
            "--weight-version", self._label,
            "--incremental-streaming-output", "--skip-server-warmup", "--log-level", "warning",
        ]  # fmt: skip
        words += ["--trust-remote-code"] if model.trusted else []
        words += [] if config.memory_fraction is None else ["--mem-fraction-static", str(config.memory_fraction)]
        if model.device == "cpu":
            tokens = str(max(model.max_length, self._max_running * model.max_length // 4))
            return [
                *words, "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                "--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", tokens,
            ]  # fmt: skip
        # Flash kernels are for types of 16 bits.
        words += ["--attention-backend", "triton"] if model.dtype == "float32" else []
        return [*words, "--enable-deterministic-inference"] if config.seeded else words

    def _variables(self) -> dict[str, str]:
        if self.model.device != "cpu":
            return {}
        return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(self._threads)}

    def _look_at(self, info: Mapping[str, Any]) -> None:
        """Compare what a server says of itself with what is needed."""
        version = str(info.get("version", "of an unknown version")).split("+")[0]
        if version not in KNOWN_VERSIONS:
            logger.warning(
                "this adapter was written for SGLang %s, not for %s: look at `mismatch/logprob` of the first batch",
                " and ".join(KNOWN_VERSIONS), version,
            )  # fmt: skip
        length = info.get("context_length")
        if length is not None and length < self.max_length:
            raise ConfigError(
                f"the SGLang at {self._settings.sglang_url} takes {length} tokens, and this job needs "
                f"{self.max_length}: start it with --context-length, or lower rollout.max_length"
            )
        if self._settings.sglang_url and self._config.seeded and not info.get("enable_deterministic_inference"):
            logger.warning(
                "the SGLang at %s ignores seeds: start it with --enable-deterministic-inference, or set "
                "rollout.seeded: false", self._settings.sglang_url,
            )  # fmt: skip

    async def _take_over(self, server: SglangServer) -> None:
        """Undo what an earlier worker may have left, and load the model as version 0."""
        await server.post("/abort_request", {"rid": "", "abort_all": True}, "end earlier requests")
        await server.post("/continue_generation", {}, "go on")
        await self._load(self.model.path, self._label)

    async def close(self) -> None:
        """End a server that was started here; requests in flight fail with ``Unavailable``. Safe to repeat."""
        await self._dispatch.close()
        server, self._server = self._server, None
        if server is not None:
            if not server.is_own and self._halted:
                with contextlib.suppress(PenstockError):  # it may be gone
                    await server.post("/continue_generation", {}, "go on")
            await server.close()
        await asyncio.to_thread(self._remove_files)
        self._dispatch.fail()

    def _remove_files(self) -> None:
        if self._files is not None:
            self._files.close()
        for folder in self.model.temporary:
            shutil.rmtree(folder, ignore_errors=True)

    async def health(self) -> dict[str, Any]:
        """Counts and flags. Raises Unavailable once the engine cannot serve."""
        await self._check_alive()
        return {
            "running": self.running,
            "waiting": self._dispatch.waiting,
            "paused": self._dispatch.paused,
            "asleep": self._dispatch.is_asleep,
            "dirty": self._served.dirty,
            "version": self._served.version,
            "generated_tokens": self.generated_tokens,
        }

    async def _check_alive(self) -> None:
        dispatch, server = self._dispatch, self._server
        if dispatch.failure is None and (server is None or server.is_gone):
            dispatch.failure = "its process is gone"
        if dispatch.failure is None and self.running and not self._halted:
            silent_s = time.monotonic() - self._heard
            if silent_s > STALL_S:
                dispatch.failure = f"it decodes and has told no token for {silent_s:.0f} s"
        if dispatch.failure is not None:
            raise dispatch.unavailable()
        assert server is not None
        if not server.is_own:
            await server.get("/model_info", "say what it serves", older="/get_model_info")

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenRequest, on_token: Listener | None = None, *, on_start: Callable[[], None] | None = None
    ) -> GenResult:
        """Complete a prompt; see ``Engine.generate``."""
        self._dispatch.check_ready()
        if request.constraint is not None:
            await self.prepare(request.constraint)
        check_request(request, vocab_size=self.model.vocab_size, max_length=self.max_length)
        own = set(request.sampling.stop_token_ids)
        stop_ids = own if request.sampling.ignore_eos else own.union(self.stop_ids)
        return await self._dispatch.complete(request, tuple(sorted(stop_ids)), on_token, on_start)

    async def prepare(self, constraint: Constraint) -> None:
        """SGLang's own constraints change log-probs, so there are none here.

        Raises:
            ConstraintError: always.
        """
        raise ConstraintError(f"{constraint.asked_by}: rollout.engine 'sglang' keeps no answer to a form")

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Log-probs of a text; see ``Engine.score``. A server holds no weights but those that it serves."""
        assert held is None, "caps.held is False"
        self._dispatch.check_ready()
        check_text(token_ids, vocab_size=self.model.vocab_size, max_length=self.max_length)
        while True:  # an update while it computes would leave a mixture
            await self._dispatch.until(lambda: self._dispatch.failure is not None or self._stands_free())
            self._dispatch.check_ready()
            self._num_scored += 1
            before, label = self._served.version, self._label
            body = score_body(f"{self._name}-score-{self._num_scored}.", list(token_ids), top_logprobs)
            answer = await self._post("/generate", body, "score a text")
            self._dispatch.check_ready()
            if self._label == label and self._stands_free():
                logprobs, top = read_scores(answer, token_ids, top_logprobs)
                return Scores(version=before, logprobs=logprobs, top=top)

    def _stands_free(self) -> bool:
        return self._dispatch.paused is None and not self._dispatch.is_updating

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End requests with what they have; see ``Engine.abort``."""
        return await self._dispatch.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary; see ``Engine.pause``. The server itself stands still for 'keep' alone."""
        self._dispatch.paused = mode
        self._dispatch.notice()
        if mode == "drain":
            await self._dispatch.drained()
        elif mode == "abort":
            await self._dispatch.end_started()
        else:
            await self._halt()

    async def resume(self) -> None:
        """Go on. Safe to repeat."""
        self._dispatch.paused = None
        await self._go_on()

    async def sleep(self) -> None:
        """End everything as 'abort' and refuse what comes; the server keeps its memory."""
        self._dispatch.is_asleep = True
        await self.abort()

    async def wake(self) -> None:
        """Serve again. Safe to repeat."""
        self._dispatch.is_asleep = False
        self._dispatch.notice()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Write a version where the server can read it; see ``UpdatableByReference``."""
        await self._check_alive()
        self._served.check_none()
        check_layout(manifest.layout, self.model.layout)
        assert self._files is not None
        await self._forget_staged()
        folder, way = await asyncio.to_thread(self._files.write, manifest, routes)
        self._staged = _Staged(manifest, folder)
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
        if staged is None or (staged.manifest.version, staged.manifest.digest) != (version, digest):
            has = "none" if staged is None else f"version {staged.manifest.version}"
            raise WeightsError(f"version {version} was not staged; there is {has} for SGLang")
        self._served.begin(_Update(version, digest))

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors of this process do not reach the server's.

        Raises:
            WeightsError: always; the update is over.
        """
        self._served.current()
        await self.abort_update()
        raise WeightsError("SGLang takes versions by reference: stage() and commit_update(), without load_chunk()")

    async def commit_update(self) -> float:
        """Load what is staged while nothing decodes, and drop every cache; see ``Engine.commit_update``."""
        update, start = self._served.current(), time.perf_counter()
        assert self._staged is not None
        touched, self._dispatch.is_updating = False, True
        try:
            await self._halt()
            touched = True
            label = label_of(update.version, short_digest(update.digest))
            await self._load(self._staged.folder, label)
            self._label = label
            await self._flush()
            await self._check_label(WeightsError)
            self._served.adopt()
            self._dispatch.is_dirty = False
            pause_s = time.perf_counter() - start
        except BaseException:
            await self._fail_update(dirty=touched)
            raise
        await self._forget_staged()  # SGLang copied it
        self._dispatch.is_updating = False
        await self._go_on()
        return pause_s

    async def _load(self, folder: Path, label: str) -> None:
        """Have the server load a directory and call its weights so. Running completions were retracted before."""
        body = {
            "model_path": str(folder), "load_format": "safetensors", "weight_version": label, "flush_cache": True,
            "abort_all_requests": False,
        }  # fmt: skip
        await self._post("/update_weights_from_disk", body, "load weights", WeightsError)

    async def _flush(self) -> None:
        """Drop cached prefixes: what was computed with older weights would be silently wrong, whatever its label.

        The update does so, too, but earlier versions of SGLang ignored it if that failed.
        """
        await self._post("/flush_cache", {}, "drop its caches", WeightsError)

    async def _check_label(self, kind: type[PenstockError]) -> None:
        """Have the server say what it serves."""
        if self._server is None:
            raise self._dispatch.unavailable()
        info = await self._server.get("/model_info", "say what it serves", older="/get_model_info")
        if info.get("weight_version") != self._label:
            raise kind(f"SGLang says that it serves '{info.get('weight_version')}', and not '{self._label}'")

    async def abort_update(self) -> None:
        """Give up; see ``Engine.abort_update``. Before the commit nothing is touched."""
        if self._served.update is not None:
            self._served.give_up(dirty=False)
            await self._forget_staged()

    async def weight_info(self) -> WeightInfo:
        """The served version."""
        return self._served.info()

    async def _fail_update(self, *, dirty: bool) -> None:
        self._served.give_up(dirty=dirty)
        self._dispatch.is_dirty = self._served.dirty
        await self._forget_staged()
        with contextlib.suppress(PenstockError):  # where it is dead, the error that is raised says so
            if dirty:  # while it stands still: no token comes from weights that are no version
                await self._dispatch.end_started()
        self._dispatch.is_updating = False
        with contextlib.suppress(PenstockError):
            await self._go_on()

    async def _forget_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and self._files is not None:
            await asyncio.to_thread(self._files.remove, staged.folder)

    # -- the server --------------------------------------------------------------------------------------------------

    def _begin(self, completion: Completion) -> Stream:
        self._heard = time.monotonic()
        return Stream(completion, self._detokenize, rid=name_of(self._name, completion))

    async def _decode(self, stream: Stream) -> Finish:
        """Follow a completion to the server's own end of it, which says which weights made which token."""
        assert self._server is not None
        events = self._server.events("/generate", generate_body(stream.rid, stream.completion))
        ended: Finish | None = None
        async with contextlib.aclosing(events):
            async for part in events:
                self._heard = time.monotonic()
                if ended is None:
                    before = len(stream.token_ids)
                    told, ended = stream.take(part, self._label)
                    self._dispatch.generated_tokens += len(stream.token_ids) - before
                    self._dispatch.tell(stream.completion, told)
                meta = part.get("meta_info") or {}
                if meta.get("finish_reason"):
                    stream.settle(meta)
                    return ended or "abort"
                if ended is not None:  # it wrote a stop string, which the server does not look for
                    await self._ask_to_end([stream])
        raise Unavailable("SGLang did not say how a completion ended")

    async def _end(self, streams: Sequence[Stream]) -> None:
        """End streams; see ``Dispatch``. One may be on its way to the server, so they are ended until they are over."""
        end = time.monotonic() + CALL_S
        while left := [stream for stream in streams if self._dispatch.lives(stream)]:
            if self._dispatch.failure is not None:
                return
            if time.monotonic() > end:
                raise DeadlineError(f"SGLang did not end {len(left)} completions within {CALL_S:g} s")
            await self._ask_to_end(left)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._dispatch.until(lambda: not any(map(self._dispatch.lives, streams)))

    async def _ask_to_end(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            await self._post("/abort_request", {"rid": stream.rid, "abort_all": False}, "end a request")

    async def _halt(self) -> None:
        """Have the server stop at a token boundary. It answers before it has: so its scheduler is asked something."""
        self._halted = True
        await self._post("/pause_generation", {"mode": "retract"}, "pause")
        assert self._server is not None
        await self._server.get("/server_info", "pause", older="/get_server_info")
        before = -1
        while self.running and before != self.generated_tokens:  # tokens of before may be on their way
            before = self.generated_tokens
            await asyncio.sleep(SETTLE_S)

    async def _go_on(self) -> None:
        """Undo ``_halt`` unless somebody else wants it, and look whether there is work."""
        if self._halted and not self._dispatch.is_updating and self._dispatch.paused != "keep":
            await self._post("/continue_generation", {}, "go on")
            self._halted = False
            self._heard = time.monotonic()
        self._dispatch.notice()

    async def _post(
        self, path: str, body: Mapping[str, Any], what: str, kind: type[PenstockError] = Unavailable
    ) -> dict[str, Any]:
        if self._server is None:
            raise self._dispatch.unavailable()
        return await self._server.post(path, body, what, kind)
