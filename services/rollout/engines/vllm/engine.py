"""Adapter of vLLM: ``AsyncLLM`` runs in this process, the model in vLLM's worker processes.

Weights are passed by reference: ``plugin`` opens them in the worker processes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from penstock.services.rollout.engines.adapter import EngineAdapter, ModelFiles
from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.remote import CALL_S
from penstock.services.rollout.engines.vllm.calls import Stream, likely, sampling_params, score_params
from penstock.services.rollout.engines.vllm.workers import (
    SlotWorkers,
    StagedByWorkers,
    check_heads,
    check_shared_memory,
    check_version,
    engine_options,
    variables,
)
from penstock.shared.config.rollout import VllmConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Likely

__all__ = ["VllmEngine"]

T = TypeVar("T")


class VllmEngine(StagedByWorkers, EngineAdapter[Stream, VllmConfig]):
    """Implements ``EngineAdapter`` for vLLM."""

    title = "vLLM"
    _llm: Any = None
    """``AsyncLLM``; its module is imported only when the engine starts."""

    def __init__(self, model: ModelFiles, config: VllmConfig, settings: ServiceSettings, **options: Any) -> None:
        super().__init__(model, config, settings, **options)
        self._slots = SlotWorkers(self._workers, settings)

    # -- life --------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._llm = await asyncio.to_thread(self._start_processes)
        await self._call(self._llm.update_weight_version(self._label), "label its weights")

    def _start_processes(self) -> Any:
        """Start vLLM and return its ``AsyncLLM``. Blocks for about 15 s on an idle CPU."""
        check_shared_memory()
        os.environ |= variables(self._threads)
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from penstock.services.rollout.engines.vllm.plugin import head_sizes

        check_version(vllm.__version__)
        model = self.model
        check_heads(model.head_dim, head_sizes())
        args = AsyncEngineArgs(**engine_options(model, self._config, max_running=self._max_running))
        try:
            return AsyncLLM.from_engine_args(args)
        except (RuntimeError, ValueError, OSError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise Unavailable(
                f"vLLM {vllm.__version__} does not start: {reason} (the log of this worker has the output of vLLM)"
            ) from error
        finally:
            model.remove_temporary()

    async def _shut(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    def _gone(self) -> str | None:
        return "its processes are gone" if self._llm is None or self._llm.errored else None

    # -- requests ----------------------------------------------------------------------------------------------------

    def _begin(self, completion: Completion) -> Stream:
        return Stream(completion, self._detokenize)

    async def _decode(self, stream: Stream) -> Finish:
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
                tokens, finish = stream.take(output.outputs[0])
                self._dispatch.generated_tokens += len(output.outputs[0].token_ids)
                self._dispatch.deliver(completion, tokens)
                if finish is not None:
                    return finish
        finally:
            if not is_over:  # a stop string ended it, or the task was cancelled
                await llm.abort(collector.request_id, internal=True)
            collector.close()

    async def _end(self, streams: Sequence[Stream]) -> None:
        """Abort streams and wait for their end; ``_decode`` aborts those that vLLM has not received yet."""
        names = [stream.internal_id for stream in streams if stream.internal_id]
        if names:
            await self._call(self._llm.abort(names, internal=True), "end requests")
        await super()._end(streams)

    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        prompt = {"prompt_token_ids": token_ids}
        collector = await self._llm.add_request(f"score-{number}", prompt, score_params(top_logprobs))
        try:
            output = await self._call(collector.get(), "score a text")
        except BaseException:
            await self._llm.abort(collector.request_id, internal=True)
            raise
        rows = [row for row in (output.prompt_logprobs or []) if row is not None]
        pairs = list(zip(rows, token_ids[1:], strict=True))
        top = [likely(row, top_logprobs) for row, _ in pairs] if top_logprobs else []
        return [float(row[token].logprob) for row, token in pairs], top

    async def _stand_still(self, *, clear_cache: bool) -> None:
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=clear_cache), "pause")

    async def _move_on(self) -> None:
        await self._call(self._llm.resume_generation(), "go on")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _load(self, label: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        await self._call(llm.start_weight_update(), "begin an update", WeightsError)
        await self._call(llm.update_weights(WeightTransferUpdateRequest({})), "load weights", WeightsError)
        await self._call(llm.finish_weight_update(label), "finish an update", WeightsError)

    async def _flush(self) -> None:
        dropped = self._llm.reset_prefix_cache(reset_running_requests=True)
        if not await self._call(dropped, "drop its caches", WeightsError):
            raise WeightsError("vLLM did not drop its caches")

    async def _served_label(self) -> str:
        return str(await self._call(self._llm.get_weight_version(), "say its version", WeightsError))

    # -- vLLM --------------------------------------------------------------------------------------------------------

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ``SlotWorker`` in each worker process; see ``SlotWorkers``."""
        answer: list[Any] = await self._call(self._llm.collective_rpc(method, args=args), method, WeightsError)
        return answer

    async def _call(self, work: Coroutine[Any, Any, T], what: str, kind: type[PenstockError] = Unavailable) -> T:
        """Await a call to vLLM and return its result.

        Args:
            what: action for error messages: "vLLM could not <what>".

        Raises:
            Unavailable: vLLM's processes are gone, or the call took longer than ``CALL_S``.
            PenstockError: an error of class ``kind``; the call failed.
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
