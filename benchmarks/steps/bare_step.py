"""The same step as a bare PyTorch loop: forward, clipped loss, backward, clip, fused AdamW. Everything that can be made
before the first step is made before it.

    python -m steps.bare_step WORKLOAD MODEL --form padded [--threads 2] [--device cpu] [--dtype float32]

Forms of the forward pass; the fastest is what Penstock is measured against:

* ``padded``: transformers' own, all rows padded at the right; the causal mask alone keeps padding from real tokens.
* ``sorted``: the same by chunks of rows of like length, gradients accumulated.
* ``flat``: transformers' own over one row of all tokens with restarting positions, from which it makes a block mask.
* ``decoder``: Penstock's functional decoder over the same packed microbatches, without the learner around it.

In bfloat16 the weights stay in float32 under autocast.

Shape legend: M = scored tokens of a pass, S = its rows, L = its longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.shared.models.decoder import selected_logprobs
from steps.groups import job, packed
from steps.options import note, options, parser, turns_on
from steps.workload import BATCH_FILE, CLIP, FORMS, LEARNING_RATE, MAX_GRAD_NORM, WORKLOADS, Batch

CHUNK = 8


@dataclass(frozen=True)
class Pass:
    """One forward and backward: what gives the log-probs, and what the loss needs beside them."""

    logprobs: Callable[[], Tensor]
    behaviour_M: Tensor
    advantages_M: Tensor
    forwarded: int


class Loop:
    """The loop's model and optimizer."""

    def __init__(self, passes: list[Pass], model: Any, trained: int, autocast: AbstractContextManager[Any]) -> None:
        self._passes, self._model, self._trained, self._autocast = passes, model, trained, autocast
        self._adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        total = 0.0
        for one in self._passes:
            with self._autocast:
                logprobs_M = one.logprobs()
            ratio_M = (logprobs_M - one.behaviour_M).exp()
            clipped_M = ratio_M.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio_M * one.advantages_M, clipped_M * one.advantages_M).sum() / self._trained
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._adam.step()
        self._adam.zero_grad()
        return total, float(norm)


def _packed_passes(model: Any, batch: Batch, max_tokens: int, device: str) -> list[Pass]:
    advantages_B = torch.from_numpy(batch.advantages()).to(device)

    def one(microbatch: Any) -> Pass:
        at = (microbatch.tokens, microbatch.select_M, microbatch.targets_M)
        return Pass(
            lambda: selected_logprobs(model, *at, temperature=1.0, entropy=False)[0],
            microbatch.behaviour_M,
            advantages_B[microbatch.rows_M],
            microbatch.tokens.num_tokens,
        )

    return [one(microbatch.to(torch.device(device))) for microbatch in packed(batch, max_tokens)[1]]


def _padded_passes(model: Any, batch: Batch, chunk: int, device: str) -> list[Pass]:
    order = np.argsort(batch.lengths(), kind="stable")
    return [_padded_pass(model, batch, order[i : i + chunk], device) for i in range(0, len(order), chunk)]


def _padded_pass(model: Any, batch: Batch, rows: Any, device: str) -> Pass:
    length = max(batch.lengths()[row] for row in rows)
    ids_SL, places = np.zeros((len(rows), length), np.int64), []
    for number, row in enumerate(rows):
        prompt, completion = batch.prompts[row // batch.group_size], batch.completions[row]
        ids_SL[number, : len(prompt) + len(completion) - 1] = np.concatenate([prompt, completion[:-1]])
        places.append(number * length + len(prompt) - 1 + np.arange(len(completion)))
    inputs = {"input_ids": torch.from_numpy(ids_SL).to(device)}
    return _hugging_face_pass(model, batch, rows, inputs, places)


def _flat_pass(model: Any, batch: Batch, device: str) -> Pass:
    rows, lengths = range(len(batch.completions)), np.array(batch.lengths())
    prompts = [batch.prompts[row // batch.group_size] for row in rows]
    ids = [np.concatenate([p, c[:-1]]) for p, c in zip(prompts, batch.completions, strict=True)]
    starts = np.cumsum(lengths) - lengths
    places = [s + len(p) - 1 + np.arange(len(c)) for s, p, c in zip(starts, prompts, batch.completions, strict=True)]
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate(ids))[None].to(device),
        "position_ids": torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None].to(device),
    }
    return _hugging_face_pass(model, batch, rows, inputs, places)


def _hugging_face_pass(model: Any, batch: Batch, rows: Any, inputs: dict[str, Tensor], scored: list[Any]) -> Pass:
    """``scored`` has a place in the flattened hidden states for each token of the completions: only there is a head."""
    device = inputs["input_ids"].device
    select_M = torch.from_numpy(np.concatenate(scored)).to(device)
    targets_M = torch.from_numpy(np.concatenate([batch.completions[row] for row in rows])).to(device)

    def logprobs() -> Tensor:
        hidden_SLD = model.model(**inputs, use_cache=False).last_hidden_state
        logits_MV = model.lm_head(hidden_SLD.flatten(0, 1).index_select(0, select_M))
        return torch.log_softmax(logits_MV.float(), -1).gather(-1, targets_M[:, None])[:, 0]

    advantages_B, counts = batch.advantages(), [len(batch.completions[row]) for row in rows]
    return Pass(
        logprobs,
        torch.from_numpy(np.concatenate([batch.logprobs[row] for row in rows])).to(device),
        torch.from_numpy(np.repeat(advantages_B[list(rows)], counts)).to(device),
        inputs["input_ids"].numel(),
    )


def main() -> None:
    """Make steps when told to."""
    made = parser()
    made.add_argument("--form", choices=FORMS, required=True)
    args = options(made)
    turns = turns_on(args.device)
    workload, batch = WORKLOADS[args.workload], Batch.read(args.model / BATCH_FILE)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    match args.form:
        case "decoder":
            passes = _packed_passes(model, batch, job(workload).train.max_tokens_per_microbatch, args.device)
        case "flat":
            passes = [_flat_pass(model, batch, args.device)]
        case form:
            chunk = workload.rows_per_pass if form == "padded" else CHUNK
            passes = _padded_passes(model, batch, chunk, args.device)
    narrow = args.dtype == "bfloat16"
    loop = Loop(passes, model, batch.trained, torch.autocast(args.device, torch.bfloat16) if narrow else nullcontext())
    forwarded = sum(one.forwarded for one in passes)
    while turns.begin():
        loss, norm = loop.step()
        turns.end()
        note(turns, args.device, loss=loss, grad_norm=norm, forwarded=forwarded)


if __name__ == "__main__":
    main()
