"""The scheduler of the stand-in: a thread that decodes one token of each running completion at a time."""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CACHED = 32
ABORTED = {"type": "abort", "message": "Aborted by AbortReq.", "status_code": None, "err_type": None}


@dataclass(eq=False)
class Completion:
    """A request in progress. ``changes``: for each change of weights, the label before it and the number of tokens."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    num_top: int
    scored_from: int
    ids: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    score_top: list[Any] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    cache: DynamicCache | None = None
    num_retractions: int = 0
    is_ending: bool = False

    def versions(self, current: str) -> list[dict[str, Any]]:
        """Return the spans of labels, as SGLang computes them at the end."""
        spans: list[dict[str, Any]] = []
        for label, end in [*self.changes, (current, len(self.ids))]:
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = end
                continue
            spans.append({"version": label, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


class Scheduler:
    """Decodes in a thread of its own, and carries out commands in order between two steps."""

    def __init__(
        self, options: argparse.Namespace, send: Callable[[dict[str, Any]], Any], later: Callable[..., Any]
    ) -> None:
        self.options, self.send, self.later = options, send, later
        self.model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=getattr(torch, options.dtype))
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer_path)
        more = tokenizer.get_added_vocab().get("<|eom_id|>")
        self.ends = [tokenizer.eos_token_id, *([] if more is None else [more])]
        """Tokens that end a completion although its request does not name them."""
        self.version = options.weight_version
        self.waiting: list[Completion] = []
        self.running: list[Completion] = []
        self.prefixes: dict[tuple[int, ...], DynamicCache] = {}
        self.is_paused = False
        self.commands: queue.Queue[tuple[str, Any, asyncio.Future[Any] | None]] = queue.Queue()
        torch.set_num_threads(1)
        threading.Thread(target=self.live, daemon=True).start()

    def post(self, what: str, value: Any = None) -> None:
        """Send a command without waiting for it."""
        self.commands.put((what, value, None))

    async def ask(self, what: str, value: Any = None) -> Any:
        """Send a command, wait until it is carried out, and return its result."""
        answer = asyncio.get_running_loop().create_future()
        self.commands.put((what, value, answer))
        return await answer

    def live(self) -> None:
        """Work, and end the server process if the scheduler fails."""
        try:
            self.work()
        finally:
            traceback.print_exc()
            os._exit(1)

    @torch.inference_mode()
    def work(self) -> None:
        """Carry out commands and decode, forever."""
        while True:
            idle = self.is_paused or not (self.waiting or self.running)
            while idle or not self.commands.empty():
                what, value, answer = self.commands.get()
                result = getattr(self, f"do_{what}")(value)
                if answer is not None:
                    self.later(answer.set_result, result)
                idle = self.is_paused or not (self.waiting or self.running)
            room = self.options.max_running_requests - len(self.running)
            self.running += self.waiting[:room]
            del self.waiting[:room]
            for completion in list(self.running):
                self.step(completion)

    # -- commands ----------------------------------------------------------------------------------------------------

    def do_add(self, completion: Completion) -> None:
        self.waiting.append(completion)

    def do_abort(self, rid: str) -> None:
        for completion in [one for one in self.waiting if one.rid.startswith(rid)]:
            self.waiting.remove(completion)
            event = self.event(completion, {"type": "abort", "message": "Abort in waiting queue"})
            if self.options.incremental_streaming_output:
                event |= {"output_ids": completion.ids[-1:], "whole": True}
            self.send(event)
        for completion in self.running:
            completion.is_ending |= completion.rid.startswith(rid)

    def do_pause(self, mode: str) -> None:
        self.is_paused = True
        if mode == "retract":
            for completion in self.running:
                completion.cache = None
                completion.num_retractions += 1
            self.waiting = self.running + self.waiting
            self.running = []

    def do_continue(self, _: None) -> None:
        self.is_paused = False

    def do_flush(self, _: None) -> bool:
        if self.running or (self.waiting and not self.is_paused):
            return False
        self.prefixes.clear()
        return True

    def do_state(self, _: None) -> dict[str, Any]:
        return {"running": len(self.running), "waiting": len(self.waiting)}

    def do_update(self, asked: dict[str, Any]) -> str:
        if asked["load_format"] not in (None, "auto", "safetensors"):
            return f"Failed to get model loader: {asked['load_format']}."
        try:
            tensors = load_file(Path(asked["model_path"]) / "model.safetensors")
        except OSError as error:
            return f"Failed to get weights iterator: {error!r}."
        own = dict(self.model.named_parameters())
        for name in own.keys() & tensors.keys():
            own[name].copy_(tensors[name])  # an error ends the scheduler, as SGLang's second attempt does
        label = asked["weight_version"]
        if label is not None and label != self.version:
            for completion in [*self.running, *self.waiting]:
                if completion.ids:
                    completion.changes.append((self.version, len(completion.ids)))
            self.version = label
        if asked["flush_cache"] and not self.do_flush(None):
            return "Weights were updated, but the cache was not flushed because requests are still running or queued."
        return ""

    # -- decoding ----------------------------------------------------------------------------------------------------

    def step(self, completion: Completion) -> None:
        reason = ABORTED if completion.is_ending else None
        if reason is None:
            logits = self.logits(completion)
            self.sample(completion, logits)
            reason = self.end_of(completion)
        if reason is not None:
            self.running.remove(completion)
        self.send(self.event(completion, reason))

    def logits(self, completion: Completion) -> Tensor:
        """Return the logits [V] after the last token, computed on a cached prefix if there is one."""
        ids = completion.prompt + completion.ids
        if completion.cache is None:
            completion.cache = self.cached(completion, ids)
        start = completion.cache.get_seq_length()
        new = torch.tensor([ids[start:]])
        out = self.model(new, past_key_values=completion.cache, use_cache=True).logits[0].float()
        if completion.scored_from == 0 and not completion.ids:
            self.score(completion, torch.log_softmax(out, -1))
        if len(out) > 1:
            self.prefixes.pop(next(iter(self.prefixes)) if len(self.prefixes) >= CACHED else (), None)
            self.prefixes[tuple(ids)] = copy.deepcopy(completion.cache)
        return out[-1]

    def cached(self, completion: Completion, ids: list[int]) -> DynamicCache:
        if completion.scored_from == 0:
            return DynamicCache()
        best = max((shared(ids[:-1], known) for known in self.prefixes), default=0)
        for known, cache in self.prefixes.items():
            if best and shared(ids[:-1], known) == best:
                own = copy.deepcopy(cache)
                if own.get_seq_length() > best:
                    own.crop(best - own.get_seq_length())
                return own
        return DynamicCache()

    def score(self, completion: Completion, plain: Tensor) -> None:
        prompt, num = completion.prompt, completion.num_top
        completion.scores = [[None, prompt[0], None]]
        completion.score_top = [None]
        for place, token in enumerate(prompt[1:]):
            completion.scores.append([float(plain[place, token]), token, None])
            completion.score_top.append(likeliest(plain[place], num))

    def sample(self, completion: Completion, logits: Tensor) -> None:
        params, ids = completion.params, completion.ids
        for token, bias in (params["logit_bias"] or {}).items():
            logits[int(token)] += bias
        for token in set(ids):
            logits[token] -= params["frequency_penalty"] * ids.count(token) + params["presence_penalty"]
        if len(ids) < params["min_new_tokens"]:
            logits[[*(params["stop_token_ids"] or ()), *self.ends]] = -torch.inf
        greedy = params["temperature"] == 0
        logprobs = torch.log_softmax(logits / (params["temperature"] or 1.0), -1)
        token = int(logprobs.argmax()) if greedy else self.draw(completion, truncated(logprobs, params))
        completion.rows.append([float(logprobs[token]), token, None])
        completion.top.append(likeliest(logprobs, completion.num_top))
        ids.append(token)

    def draw(self, completion: Completion, logprobs: Tensor) -> int:
        """Sample a token: by seed and position alone with ``--enable-deterministic-inference``, else at random."""
        seed, place = completion.params["sampling_seed"], len(completion.prompt) + len(completion.ids)
        noise = torch.Generator()
        if self.options.enable_deterministic_inference and seed is not None:
            noise.manual_seed((seed * 1_000_003 + place) % (1 << 63))
        else:
            noise.seed()
        return int((logprobs - torch.empty_like(logprobs).exponential_(generator=noise).log()).argmax())

    def end_of(self, completion: Completion) -> dict[str, Any] | None:
        params, token = completion.params, completion.ids[-1]
        if not params["ignore_eos"] and token in (*(params["stop_token_ids"] or ()), *self.ends):
            return {"type": "stop", "matched": token}
        if len(completion.ids) >= params["max_new_tokens"]:
            return {"type": "length", "length": len(completion.ids)}
        return None

    def event(self, completion: Completion, reason: dict[str, Any] | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": completion.rid, "finish_reason": reason, "prompt_tokens": len(completion.prompt),
            "completion_tokens": len(completion.ids), "num_retractions": completion.num_retractions,
            "output_token_logprobs": list(completion.rows), "output_top_logprobs": list(completion.top),
            "input_token_logprobs": completion.scores, "input_top_logprobs": completion.score_top,
        }  # fmt: skip
        if reason is not None:
            meta["weight_versions"] = completion.versions(self.version)
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
        return {"text": "", "output_ids": list(completion.ids), "meta_info": meta}


def shared(ids: list[int], known: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    num = 0
    for a, b in zip(ids, known, strict=False):
        if a != b:
            break
        num += 1
    return num


def truncated(logprobs: Tensor, params: dict[str, Any]) -> Tensor:
    """Return log-probs with -inf for the tokens that ``top_k`` and ``top_p`` exclude."""
    ordered, order = logprobs.sort(descending=True)
    keep = ordered.exp().cumsum(-1) - ordered.exp() < params["top_p"]
    if params["top_k"] > 0:
        keep[params["top_k"] :] = False
    return torch.full_like(logprobs, -torch.inf).scatter(0, order[keep], ordered[keep])


def likeliest(logprobs: Tensor, num: int) -> list[Any] | None:
    """Return the ``num`` likeliest tokens as rows [log-prob, token, None], the likeliest first."""
    values, tokens = logprobs.topk(num) if num else (logprobs[:0], logprobs[:0])
    return [[float(value), int(token), None] for value, token in zip(values, tokens, strict=True)]
