"""vLLM as a rollout engine: its ``AsyncLLM`` in this process, its model in processes of its own.

Requests wait in ``dispatch`` until there is a slot. Weights go by reference: ``vllm_plugin`` opens them in vLLM's
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from penstock.services.rollout.engines.base import Listener, UpdateMode
from penstock.services.rollout.engines.completion import Finish
from penstock.services.rollout.engines.dispatch import Dispatch
from penstock.services.rollout.engines.remote import check_layout, label_of
from penstock.services.rollout.engines.requests import check_request, check_text
from penstock.services.rollout.engines.updates import ServedWeights
from penstock.services.rollout.engines.vllm_calls import (
    Stream,
    likely,
    sampling_params,
    score_params,
    settings_of,
)
from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.config.rollout import VllmConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, ConstraintError, PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import (
    Constraint,
    GenRequest,
    GenResult,
    PauseMode,
    Scores,
    WeightInfo,
)
from penstock.shared.protocol.weights import Layout, WeightManifest, WeightRoutes, short_digest
from penstock.shared.runtime.tasks import wait_for
from penstock.shared.weights import Way

__all__ = ["KNOWN_VERSIONS", "VllmEngine", "VllmModel"]

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.32.0",)
"""Versions of vLLM with which the contract tests of this adapter passed."""
CALL_S = 120.0
"""Longest that vLLM may take for one call; a step of a large batch comes before it."""
STAGE_S = 300.0
_POLL_S = 0.01

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VllmModel:
    """A model as vLLM needs it.

    Attributes:
        path: directory with config.json and weights.
        dtype: of weights and computation, as torch names it.
        max_length: most tokens of a prompt and its completion.
        head_dim: width of an attention head; 0: it is not compared with what vLLM computes.
        layout: parameters of a policy version, which every update must have; None: they are not compared.
        temporary: remove the directory once it is loaded.
        trusted: run code of the directory.
    """

    path: Path
    dtype: str
    vocab_size: int
    max_length: int
    head_dim: int = 0
    layout: Layout | None = None
    temporary: bool = False
    trusted: bool = False


@dataclass(slots=True)
class _Update:
    """To a version that vLLM's processes have open."""

    version: int
    digest: str
    base: bool = False


class VllmEngine:
    """See ``Engine``. Versions of weights come through ``stage``.

    Args:
        settings: of the rollout worker, for those that open slots.
        threads: of the computation.
        detokenize: for stop strings.
    """

    caps = VllmConfig.caps

    def __init__(
        self,
        model: VllmModel,
        config: VllmConfig,
        settings: ServiceSettings,
        *,
        max_running: int,
        stop_ids: Collection[int],
        detokenize: Callable[[list[int]], str],
        threads: int = 1,
    ) -> None:
        self.model, self._config, self._settings, self._threads = model, config, settings, threads
        self._max_running = max_running
        self.max_length, self.stop_ids = model.max_length, tuple(sorted(stop_ids))
        self._llm: Any = None
        self._dispatch: Dispatch[Stream] = Dispatch(
            "vLLM", max_running, begin=lambda completion: Stream(completion, detokenize), decode=self._decode,
            end=self._end,
        )  # fmt: skip
        self._halted = False
        self._served: ServedWeights[_Update] = ServedWeights(0)
        self._staged: WeightManifest | None = None
        self._num_scored = 0

    @property
    def running(self) -> int:
        """Sequences that vLLM has in hand."""
        return self._dispatch.running

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._dispatch.generated_tokens

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM's processes and load the model. Safe to repeat.

        Raises:
            ConfigError: vLLM cannot compute this model here.
            Unavailable: vLLM does not start; its own output says why.
        """
        if self._llm is not None:
            return
        self._llm = await asyncio.to_thread(self._open)
        await self._call(self._llm.update_weight_version(label_of(0, "")), "label its weights")
        self._dispatch.start()

    def _open(self) -> Any:
        """Blocks while the processes start, about 15 s on an idle CPU."""
        os.environ |= _variables(self._threads)
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from penstock.services.rollout.engines.vllm_plugin import BACKEND, SlotWorker

        if vllm.__version__.split("+")[0] not in KNOWN_VERSIONS:
            logger.warning(
                "this adapter was tested with vLLM %s, not with this %s: look at `mismatch/logprob` of the first batch",
                " and ".join(KNOWN_VERSIONS), vllm.__version__,
            )  # fmt: skip
        model = self.model
        _check_heads(model.head_dim)
        args = AsyncEngineArgs(
            model=str(model.path), skip_tokenizer_init=True, dtype=model.dtype, max_model_len=model.max_length,
            max_num_seqs=self._max_running, enforce_eager=True, enable_prefix_caching=True,
            logprobs_mode="processed_logprobs", max_logprobs=-1, disable_log_stats=True, generation_config="vllm",
            trust_remote_code=model.trusted,
            kv_cache_memory_bytes=int(self._config.kv_cache_gib * (1 << 30)),
            worker_extension_cls=f"{SlotWorker.__module__}.{SlotWorker.__qualname__}",
            weight_transfer_config={"backend": BACKEND},
        )  # fmt: skip
        try:
            return AsyncLLM.from_engine_args(args)
        except (RuntimeError, ValueError, OSError) as error:
            raise Unavailable(f"vLLM {vllm.__version__} does not start: {str(error).splitlines()[0]}") from error
        finally:
            if model.temporary:
                shutil.rmtree(model.path, ignore_errors=True)

    async def close(self) -> None:
        """End vLLM's processes; requests in flight fail with ``Unavailable``. Safe to repeat."""
        await self._dispatch.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        self._dispatch.fail()

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
        if self._dispatch.failure is None and (self._llm is None or self._llm.errored):
            self._dispatch.failure = "its processes are gone"
        if self._dispatch.failure is not None:
            raise self._dispatch.unavailable()

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
        """vLLM's own constraints change log-probs, so there are none here.

        Raises:
            ConstraintError: always.
        """
        raise ConstraintError(f"{constraint.asked_by}: rollout.engine 'vllm' keeps no answer to a form")

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Log-probs of a text; see ``Engine.score``. vLLM holds no weights but those that it serves."""
        assert held is None, "caps.held is False"
        self._check_ready()
        check_text(token_ids, vocab_size=self.model.vocab_size, max_length=self.max_length)
        dispatch = self._dispatch
        await dispatch.until(
            lambda: dispatch.failure is not None or (dispatch.paused is None and not dispatch.is_updating)
        )
        self._check_ready()
        self._num_scored += 1
        while True:  # an update while it computes would leave a mixture
            before = self._served.version, self._served.digest
            output = await self._ask_score(f"score-{self._num_scored}", list(token_ids), top_logprobs)
            self._check_ready()
            if (self._served.version, self._served.digest) == before and not dispatch.is_updating:
                break
            await dispatch.until(lambda: dispatch.failure is not None or not dispatch.is_updating)
        rows = [row for row in (output.prompt_logprobs or []) if row is not None]
        pairs = list(zip(rows, token_ids[1:], strict=True))
        return Scores(
            version=before[0],
            logprobs=[float(row[token].logprob) for row, token in pairs],
            top=[likely(row, top_logprobs) for row, _ in pairs] if top_logprobs else [],
        )

    async def _ask_score(self, request_id: str, token_ids: list[int], top_logprobs: int) -> Any:
        prompt = {"prompt_token_ids": token_ids}
        collector = await self._llm.add_request(request_id, prompt, score_params(top_logprobs))
        try:
            return await self._call(collector.get(), "score a text")
        except BaseException:
            await self._llm.abort(collector.request_id, internal=True)
            raise

    def _check_ready(self) -> None:
        self._check_alive()
        self._dispatch.check_ready()

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End requests with what they have; see ``Engine.abort``."""
        return await self._dispatch.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary; see ``Engine.pause``. vLLM itself stands still for 'keep' alone."""
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
        """End everything as 'abort' and refuse what comes; on a CPU vLLM gives no memory back."""
        self._dispatch.is_asleep = True
        await self.abort()

    async def wake(self) -> None:
        """Serve again. Safe to repeat."""
        self._dispatch.is_asleep = False
        self._dispatch.notice()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Have vLLM's processes open a version; see ``UpdatableByReference``."""
        self._check_alive()
        self._served.check_none()
        check_layout(manifest.layout, self.model.layout)
        self._staged = None
        request = {"manifest": manifest, "routes": routes, "settings": settings_of(self._settings)}
        await self._workers("penstock_stage", msgspec.msgpack.encode(request))
        end = time.monotonic() + STAGE_S
        while True:
            answers = await self._workers("penstock_staged")
            if all(answers):
                break
            if time.monotonic() > end:
                raise WeightsError(f"version {manifest.version} was not opened by vLLM's processes in {STAGE_S:g} s")
            await asyncio.sleep(_POLL_S)
        replies = [msgspec.msgpack.decode(answer) for answer in answers]
        if failed := [reply["error"] for reply in replies if reply["error"]]:
            await self._workers("penstock_release")
            raise WeightsError(failed[0])
        self._staged = manifest
        ways = [msgspec.convert(reply["way"], Way) for reply in replies]
        return Way(ways[0].transport, sum(way.fetched_bytes for way in ways))

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
            raise WeightsError(f"version {version} was not staged; vLLM's processes have {has} open")
        self._served.begin(_Update(version, digest))

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors of this process do not reach vLLM's.

        Raises:
            WeightsError: always; the update is over.
        """
        self._served.current()
        await self.abort_update()
        raise WeightsError("vLLM takes versions by reference: stage() and commit_update(), without load_chunk()")

    async def commit_update(self) -> float:
        """Load what is staged while nothing decodes, and drop every cache; see ``Engine.commit_update``."""
        update, start = self._served.current(), time.perf_counter()
        touched, self._dispatch.is_updating = False, True
        try:
            await self._halt(clear_cache=True)
            if not all(await self._workers("penstock_intact")):
                raise WeightsError(f"the memory of version {update.version} was overwritten before it was committed")
            touched = True
            await self._take_in(update)
            self._served.adopt()
            self._dispatch.is_dirty = False
            pause_s = time.perf_counter() - start
        except BaseException:
            await self._fail_update(dirty=touched)
            raise
        await self._let_go()
        return pause_s

    async def _take_in(self, update: _Update) -> None:
        """Load, label, and make sure that nothing computed with older weights is used again."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, label = self._llm, label_of(update.version, short_digest(update.digest))
        await self._call(llm.start_weight_update(), "begin an update", WeightsError)
        await self._call(llm.update_weights(WeightTransferUpdateRequest({})), "load weights", WeightsError)
        await self._call(llm.finish_weight_update(label), "finish an update", WeightsError)
        await self._flush()
        served = await self._call(llm.get_weight_version(), "say its version", WeightsError)
        if served != label:
            raise WeightsError(f"vLLM says that it serves '{served}' after the update to '{label}'")

    async def _flush(self) -> None:
        """Drop cached prefixes: what was computed with older weights would be silently wrong, whatever its label."""
        dropped = self._llm.reset_prefix_cache(reset_running_requests=True)
        if not await self._call(dropped, "drop its caches", WeightsError):
            raise WeightsError("vLLM did not drop its caches")

    async def abort_update(self) -> None:
        """Give up; see ``Engine.abort_update``. Before the commit nothing is touched."""
        if self._served.update is not None:
            self._served.give_up(dirty=False)
            await self._let_go()

    async def weight_info(self) -> WeightInfo:
        """The served version."""
        return self._served.info()

    async def _fail_update(self, *, dirty: bool) -> None:
        self._served.give_up(dirty=dirty)
        self._dispatch.is_dirty = self._served.dirty
        with contextlib.suppress(PenstockError):  # where it is dead, the error that is raised says so
            if dirty:
                await self._dispatch.end_started()
            await self._let_go()

    async def _let_go(self) -> None:
        """The version that was staged is needed no more."""
        self._staged = None
        await self._workers("penstock_release")
        self._dispatch.is_updating = False
        await self._go_on()

    # -- vLLM --------------------------------------------------------------------------------------------------------

    async def _decode(self, stream: Stream) -> Finish:
        """Have vLLM decode one completion; see ``Dispatch``."""
        completion, llm, is_over = stream.completion, self._llm, False
        prompt = {"prompt_token_ids": list(completion.prompt_ids)}
        name = f"{completion.request}.{completion.index}"
        collector = await llm.add_request(name, prompt, sampling_params(completion))
        stream.internal_id = collector.request_id
        state = llm.output_processor.request_states.get(collector.request_id)
        stream.starts = () if state is None else state.weight_version_starts  # a list that grows with its tokens
        try:
            if stream.unwanted:
                await llm.abort(collector.request_id, internal=True)
            while True:
                output = collector.get_nowait() or await collector.get()
                is_over = output.finished
                told, finish = stream.take(output.outputs[0])
                self._dispatch.generated_tokens += len(output.outputs[0].token_ids)
                self._dispatch.tell(completion, told)
                if finish is not None:
                    return finish
        finally:
            if not is_over:  # it wrote a stop string, or nobody waits for it any more
                await llm.abort(collector.request_id, internal=True)
            collector.close()

    async def _end(self, streams: Sequence[Stream]) -> None:
        """End streams; see ``Dispatch``. One that vLLM does not have yet ends as soon as it has."""
        names = [stream.internal_id for stream in streams if stream.internal_id]
        if names:
            await self._call(self._llm.abort(names, internal=True), "end requests")
        over = self._dispatch.until(lambda: not any(map(self._dispatch.lives, streams)))
        await wait_for(over, CALL_S, f"vLLM to end {len(streams)} completions")

    async def _halt(self, *, clear_cache: bool) -> None:
        """Have vLLM stop at a token boundary; with ``clear_cache`` it computes everything anew when it goes on."""
        self._halted = True
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=clear_cache), "pause")

    async def _go_on(self) -> None:
        """Undo ``_halt`` unless somebody else wants it, and look whether there is work."""
        if self._halted and not self._dispatch.is_updating and self._dispatch.paused != "keep":
            await self._call(self._llm.resume_generation(), "go on")
            self._halted = False
        self._dispatch.notice()

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ``SlotWorker`` in each worker process."""
        answer: list[Any] = await self._call(self._llm.collective_rpc(method, args=args), method, WeightsError)
        return answer

    async def _call(self, work: Coroutine[Any, Any, T], what: str, kind: type[PenstockError] = Unavailable) -> T:
        """The answer of vLLM.

        Raises:
            Unavailable: its processes are gone, or it took longer than CALL_S.
            PenstockError: of the given kind; it cannot do it.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=CALL_S)
        finally:
            if not task.done():
                task.cancel()
        if task.cancelled() or not task.done():
            raise Unavailable(f"vLLM did not {what} within {CALL_S:g} s")
        error = task.exception()
        if error is None:
            return task.result()
        self._check_alive()
        reason = (str(error).strip().splitlines() or [repr(error)])[-1]
        raise kind(f"vLLM could not {what}: {reason}") from error


def _check_heads(head_dim: int) -> None:
    """Raise ConfigError where vLLM has no attention for such heads here: it would say so at the first token."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes() if current_platform.is_cpu() else []
    if head_dim and sizes and head_dim not in sizes:
        raise ConfigError(
            f"on a CPU rollout.engine 'vllm' computes attention heads of {', '.join(map(str, sizes))}, and those of "
            f"this model have {head_dim}: take another model, or rollout.engine embedded"
        )


def _variables(threads: int) -> dict[str, str]:
    """For vLLM and its processes: no network, no compiler, no binding to cores that others use, too."""
    from penstock.services.rollout.engines.vllm_plugin import OWNER

    return {
        "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", OWNER: str(os.getpid()),
    }  # fmt: skip
