"""Example of a custom rollout engine: runs any causal language model of transformers, without batching.

`docs/how-to/engine.md` explains it. It is small, not fast: a forward pass computes one token of one completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from penstock.services.rollout.engines.adapter import EngineAdapter
from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.remote import Written
from penstock.services.rollout.engines.sampling import Draws, draw, likeliest, stream_of
from penstock.shared.config.base import StrictModel
from penstock.shared.config.rollout import ClassConfig
from penstock.shared.errors import ConfigError, WeightsError
from penstock.shared.protocol.generation import Likely


class Options(StrictModel):
    """`rollout.options` of the job file."""

    attention: Literal["eager", "sdpa"] = "sdpa"
    """Attention implementation of transformers."""


@dataclass(slots=True, eq=False)
class Stream(Written):
    """A completion, with the key/value cache of its tokens so far."""

    cache: Any = None
    label: str = ""
    """Label of the weights that computed the cache."""


class TransformersEngine(EngineAdapter[Stream, ClassConfig]):
    """Runs one forward pass at a time; a lock serializes the completions."""

    title = "transformers"
    options_type = Options

    async def _open(self) -> None:
        self._lock = asyncio.Lock()  # asyncio locks are fair, so completions alternate token by token
        self._lm = await asyncio.to_thread(self._read_model)

    def _read_model(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            self.model.path, dtype=getattr(torch, self.model.dtype), attn_implementation=self.options.attention,
            trust_remote_code=self.model.trusted,
        )  # fmt: skip
        return model.to(self.model.device).eval()

    # -- completions -------------------------------------------------------------------------------------------------

    def _begin(self, completion: Completion) -> Stream:
        return Stream(completion, self._detokenize)

    async def _decode(self, stream: Stream) -> Finish:
        """Decode token by token. Between two tokens the engine may be paused or its weights may change."""
        wanted = stream.completion.sampling
        if wanted.frequency_penalty or wanted.presence_penalty or wanted.logit_bias:
            raise ConfigError("this engine has no penalties and no biases")
        while True:
            await self._dispatch.until(lambda: stream.unwanted or not self._halted)
            async with self._lock:
                if stream.unwanted:
                    return "abort"
                if self._halted:
                    continue
                token_id, logprob, top = await asyncio.to_thread(self._next, stream)
            finish = self._book(stream, token_id, logprob, top)
            if finish is not None:
                return finish

    @torch.inference_mode()
    def _next(self, stream: Stream) -> tuple[int, float, Likely]:
        """Return the next token, its log-prob of logits / temperature, and the top tokens."""
        completion, wanted = stream.completion, stream.completion.sampling
        if stream.label != self._label:  # the cache is from older weights
            stream.cache, stream.label = None, self._label
        text = [*completion.prompt_ids, *stream.token_ids]
        new = torch.tensor([text if stream.cache is None else text[-1:]], device=self.model.device)
        output = self._lm(new, past_key_values=stream.cache, use_cache=True, logits_to_keep=1)
        stream.cache = output.past_key_values
        logits_RV, num_written = output.logits[:, -1].cpu(), len(stream.token_ids)
        may_stop = num_written >= wanted.min_new_tokens - 1
        how = Draws(  # one row: a token depends on seed and position, not on other completions
            stream_R=torch.tensor([stream_of(completion.seed)]), index_R=torch.tensor([num_written]),
            temperature_R1=torch.tensor([[wanted.temperature or 1.0]]), greedy_R=None,
            all_greedy=wanted.temperature == 0, top_p_R=torch.tensor([wanted.top_p]),
            top_k_R=torch.tensor([wanted.top_k]),
            forbidden_RK=None if may_stop else torch.tensor([completion.stop_ids], dtype=torch.long),
        )  # fmt: skip
        token_R, logprob_R = draw(logits_RV, how)
        top: Likely = []
        if completion.top_logprobs:
            values, ids = likeliest(logits_RV, how, completion.top_logprobs)
            top = list(zip(ids[0].tolist(), values[0].tolist(), strict=True))
        return int(token_R), float(logprob_R), top

    def _book(self, stream: Stream, token_id: int, logprob: float, top: Likely) -> Finish | None:
        """Record a token with its weight label, and pass it on unless it ends the completion; returns how it ended."""
        completion, wanted = stream.completion, stream.completion.sampling
        token = stream.add(token_id, logprob, self._label, top)
        self._dispatch.generated_tokens += 1
        num = len(stream.token_ids)
        if num >= wanted.min_new_tokens and (token_id in completion.stop_ids or stream.ends_with_stop_string()):
            return "stop"
        if num == wanted.max_new_tokens:
            return "length"
        self._dispatch.deliver(completion, [token])
        return None

    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        async with self._lock:
            return await asyncio.to_thread(self._read, token_ids, top_logprobs)

    @torch.inference_mode()
    def _read(self, token_ids: Sequence[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        ids_1T = torch.tensor([list(token_ids)], device=self.model.device)
        logprobs_TV = torch.log_softmax(self._lm(ids_1T).logits[0, :-1].float(), -1)
        logprobs = logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()
        values_TK, ids_TK = logprobs_TV.topk(min(top_logprobs, logprobs_TV.shape[-1]), -1)
        rows = zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
        return logprobs, [list(zip(*row, strict=True)) for row in rows] if top_logprobs else []

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _stand_still(self, *, clear_cache: bool) -> None:
        async with self._lock:  # the token under way is finished; ``_halted`` keeps the next one back
            pass

    async def _move_on(self) -> None:
        """Do nothing: ``Dispatch`` wakes the completions, which check ``_halted``."""

    async def _load(self, label: str) -> None:
        assert self._fetched is not None
        tensors = self._fetched.tensors()
        found = await asyncio.to_thread(self._lm.load_state_dict, tensors, strict=False)
        if found.unexpected_keys:
            raise WeightsError(f"cannot load weights: the model has no {found.unexpected_keys[0]}")

    async def _flush(self) -> None:
        """Do nothing: ``_next`` drops a cache whose label is not the current one."""
