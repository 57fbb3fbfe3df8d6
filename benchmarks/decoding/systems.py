"""One engine in a process of its own: loads a model, decodes when it is its turn (``steps/turns.py``).

    python -m decoding.systems ENGINE MODEL BATCH DIRECTORY

A turn is a step for each shape of ``workload.SHAPES``. All engines use one thread and sample from the whole
distribution at temperature 1; no token ends a completion early.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.turns import Turns

from decoding.workload import MODELS, SHAPES, Completion, completions, longest

if TYPE_CHECKING:  # the interpreter of vLLM lacks it
    from penstock.services.rollout.engines import EmbeddedEngine

Decode = Callable[[Sequence[Completion]], int]
"""Decodes completions, no more than the batch at once; returns how many tokens were sampled."""
KV_BYTES = 2 << 30
"""Of vLLM, enough for every batch."""


def opened(directory: Path, rows: int, length: int, *, own_forward: bool = False) -> EmbeddedEngine:
    """Penstock's engine, not started; ``own_forward``: that of any model, the engine `transformers`."""
    from penstock.services.rollout.engines import EmbeddedEngine, TransformersEngine
    from penstock.shared.config.model import ModelConfig
    from penstock.shared.models import build_model

    model = build_model(ModelConfig(path=str(directory), tokenizer="char"), 0, seed=0)
    kind = TransformersEngine if own_forward else EmbeddedEngine
    return kind(model, max_running=rows, stop_ids=[], detokenize=str, max_length=length)


async def ask(engine: EmbeddedEngine, number: int, one: Completion) -> int:
    """Have one completion written, as a rollout worker does; returns how many tokens were sampled."""
    from penstock.shared.protocol.generation import GenRequest, Sampling

    sampling = Sampling(max_new_tokens=one.num_new, ignore_eos=True, seed=number)
    result = await engine.generate(GenRequest(request_id=str(number), prompt_ids=one.prompt_ids, sampling=sampling))
    return len(result.samples[0].token_ids)


def embedded(directory: Path, batch: int, length: int, *, own_forward: bool = False) -> Decode:
    """Penstock's engine; a log-prob comes with every token."""
    import torch

    torch.set_num_threads(1)
    engine, loop = opened(directory, batch, length, own_forward=own_forward), asyncio.new_event_loop()
    loop.run_until_complete(engine.start())

    async def all_of(wanted: Sequence[Completion]) -> int:
        return sum(await asyncio.gather(*(ask(engine, number, one) for number, one in enumerate(wanted))))

    return lambda wanted: loop.run_until_complete(all_of(wanted))


def generate(directory: Path, batch: int, length: int) -> Decode:
    """``generate`` of transformers: padded batches in order of arrival, each as long as its longest; no log-probs."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    class Enough(StoppingCriteria):  # type: ignore[misc]
        """Ends each row at its own length."""

        def __init__(self, limit_R: torch.Tensor) -> None:
            self._limit_R = limit_R

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return self._limit_R <= input_ids.shape[1]

    def decode(wanted: Sequence[Completion]) -> int:
        width = max(len(one.prompt_ids) for one in wanted)
        ids_RL = torch.tensor([[0] * (width - len(one.prompt_ids)) + one.prompt_ids for one in wanted])
        mask_RL = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in (one.prompt_ids for one in wanted)])
        limits = torch.tensor([width + one.num_new for one in wanted])
        out_RL = model.generate(
            ids_RL, attention_mask=mask_RL, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            max_new_tokens=max(one.num_new for one in wanted), stopping_criteria=StoppingCriteriaList([Enough(limits)]),
        )  # fmt: skip
        assert out_RL.shape[1] == width + max(one.num_new for one in wanted), "a batch ended early"
        return sum(one.num_new for one in wanted)

    return lambda wanted: sum(decode(wanted[start : start + batch]) for start in range(0, len(wanted), batch))


def vllm(directory: Path, batch: int, length: int) -> Decode:
    """vLLM's ``LLM`` in this process, eager; a log-prob comes with every token."""
    os.environ |= {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=length, max_num_seqs=batch,
        enforce_eager=True, kv_cache_memory_bytes=KV_BYTES, logprobs_mode="processed_logprobs",
    )  # fmt: skip

    def decode(wanted: Sequence[Completion]) -> int:
        params = [
            SamplingParams(max_tokens=one.num_new, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
            for one in wanted
        ]
        prompts = [{"prompt_token_ids": one.prompt_ids} for one in wanted]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return decode


SYSTEMS: dict[str, Callable[[Path, int, int], Decode]] = {
    "embedded": embedded,
    "generate": generate,
    "vllm": vllm,
    "transformers": partial(embedded, own_forward=True),
}


def main() -> None:
    """Decode until the end of input."""
    name, size, batch, directory = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    turns, model = Turns(), MODELS[size]
    decode = SYSTEMS[name](directory, batch, longest(model))
    decode([Completion(one.prompt_ids, 4) for one in completions(model, batch, "ragged", seed=-1)])
    step = 0
    while turns.begin():
        seed, place = divmod(step, len(SHAPES))
        wanted = completions(model, batch, SHAPES[place], seed)
        sampled = decode(wanted)
        turns.end()
        expected = sum(one.num_new for one in wanted)
        if sampled != expected:
            raise SystemExit(f"{name} sampled {sampled} tokens, not {expected}")
        turns.note(**{SHAPES[place]: sampled})
        step += 1


if __name__ == "__main__":
    main()
