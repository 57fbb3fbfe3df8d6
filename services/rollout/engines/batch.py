"""The decoding core: admits completions, decodes all of them one token at a time, drops stale caches. One thread only.

Rows [0, fresh) have their keys and values in the cache; rows [fresh, count) are computed from their tokens, or from
those that follow what was held of their session, in the same forward pass. New rows are appended there, and a new
policy version makes every row stale and drops what is held: no token comes from an old cache.

Shape legend: R = rows, V = vocabulary, T = flat tokens, D = model width, L = positions, N = layers with experts,
K = experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines.cache import KVCache
from penstock.services.rollout.engines.completion import Completion, Finish, Finished
from penstock.services.rollout.engines.grouping import Grouping, groups_of, joined
from penstock.services.rollout.engines.held import HeldSequence, HeldSequences
from penstock.services.rollout.engines.parts import Part, passes, together
from penstock.services.rollout.engines.routes import RouteTable
from penstock.services.rollout.engines.rows import Rows
from penstock.services.rollout.engines.sampling import draw, likeliest
from penstock.shared.errors import ConfigError, WeightsError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.decoder import decode, rope_at, selected_logits
from penstock.shared.models.experts import Recorder
from penstock.shared.models.packed import pack
from penstock.shared.protocol.generation import Likely, Scores, Token

__all__ = ["Batch", "Outcome", "TornWeights"]

_FINISH: dict[int, Finish] = {1: "stop", 2: "length"}
_BYTES_PER_CHARACTER = 4
"""A stop string of c characters is written by at most 4 c tokens that are not empty (UTF-8)."""
SCORED_TOKENS = 512
"""Positions whose logits are held at once when a text is scored."""
ATTEND_TOGETHER = 8
"""Rows whose attention is one call on the CPU. A GPU has room for padding, and each call costs it a launch."""

Tell = Callable[[list[tuple[int, Token]]], None]
"""Takes the new tokens of a step, each with the serial number of its request; called in the decoding thread."""


class TornWeights(WeightsError):  # noqa: N818
    """The guard said no around a step."""


@dataclass(slots=True)
class Outcome:
    """Result of a run. ``torn``: the weights changed under a pass; its tokens were thrown away."""

    finished: list[Finished] = field(default_factory=list)
    tokens: int = 0
    torn: bool = False


class Batch:
    """Running completions of one model.

    Args:
        record_routes: keep the experts of every token of a mixture of experts; they come with the sample.
        tell: gets the tokens of streamed completions that go on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_length: int,
        detokenize: Callable[[list[int]], str],
        version: int,
        weights: str = "",
        record_routes: bool = False,
        tell: Tell = lambda tokens: None,
    ) -> None:
        plan = plan_of(model)
        if plan is None:
            raise ConfigError(
                "the embedded engine decodes Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral models with full attention, "
                f"not this {type(model).__name__}"
            )
        self._model, self._plan, self._detokenize, self._tell = model, plan, detokenize, tell
        self._device = model.device
        self._rows = Rows(max_running, self._device)
        self._cache = KVCache(plan, rows=max_running, max_length=max_length)
        self._held = HeldSequences(max_running)
        self._routes = RouteTable(plan, max_running, self._device) if record_routes else None
        self._grouping = Grouping(ATTEND_TOGETHER if self._device.type == "cpu" else max_running)
        self._position_L = torch.arange(max_length, device=self._device)
        self._rope = rope_at(plan, self._position_L[:0])
        self._fresh = 0
        self._version, self._weights = version, weights
        self.guard: Callable[[], bool] | None = None

    @property
    def count(self) -> int:
        """Completions in the batch."""
        return self._rows.count

    def admit(self, completions: Sequence[Completion]) -> None:
        """Add completions; they are computed with the next step."""
        self._reserve(max(len(c.prompt_ids) + c.sampling.max_new_tokens for c in completions))
        if self._routes is not None:
            self._routes.add(self.count, self.count + len(completions))
        found = [(c, self._held.take(c.session, c.prompt_ids) if c.session else None) for c in completions]
        ordered = sorted(found, key=lambda one: one[1] is None)  # those with a cached part are computed together
        for row, (completion, held) in enumerate(ordered, start=self.count):
            if held is not None:
                self._cache.restore(row, held.keys, held.values)
                completion.num_cached = len(held.token_ids)
        self._rows.add([completion for completion, _ in ordered], self._version, self._weights)

    @torch.inference_mode()
    def run(self, max_steps: int, interrupted: Callable[[], bool]) -> Outcome:
        """Decode up to ``max_steps`` tokens of each row; returns early when a row ends or ``interrupted`` says so."""
        outcome = Outcome()
        for _ in range(max_steps):
            if not self.count or outcome.finished or outcome.torn or interrupted():
                break
            try:
                self._step(outcome)
            except TornWeights:
                outcome.torn = True
        return outcome

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], num_top: int) -> Scores:
        """Log-probs of ``token_ids`` after the first one; the cache has no part in it."""
        self._check_weights()
        tokens = pack([token_ids]).to(self._device)
        logits_of = selected_logits(self._model, tokens, torch.arange(len(token_ids) - 1, device=self._device))
        logprobs: list[float] = []
        top: list[Likely] = []
        for start in range(0, len(token_ids) - 1, SCORED_TOKENS):
            place_M = torch.arange(start, min(start + SCORED_TOKENS, len(token_ids) - 1), device=self._device)
            logprobs_MV = torch.log_softmax(logits_of(place_M).float(), -1)
            target_M1 = tokens.token_ids_T[place_M + 1, None]
            logprobs += logprobs_MV.gather(-1, target_M1)[:, 0].tolist()
            if num_top:
                best_MK, ids_MK = logprobs_MV.topk(min(num_top, logprobs_MV.shape[-1]), -1)
                pairs = zip(ids_MK.tolist(), best_MK.tolist(), strict=True)
                top += [list(zip(ids, best, strict=True)) for ids, best in pairs]
        self._check_weights()
        return Scores(version=self._version, logprobs=logprobs, top=top)

    def evict(self, requests: Collection[int]) -> list[Finished]:
        """End the completions of these requests as 'abort' with what they have."""
        rows = [row for row, completion in enumerate(self._rows.completions) if completion.request in requests]
        ended = [self._end(row, "abort") for row in rows]
        self._drop(rows)
        return ended

    def adopt(self, version: int, weights: str = "") -> None:
        """The weights are now those of ``version``, with this short digest: label what follows, and drop every cached
        key and value."""
        for completion, num_output in zip(self._rows.completions, self._rows.num_outputs(), strict=True):
            completion.adopt(version, weights, num_output)
        self._version, self._weights = version, weights
        if not self._rows.finite:
            self._cache.zero()
        self.drop_cache()

    def drop_cache(self) -> None:
        """Nothing in the cache is current: every row is computed again from its tokens."""
        self._fresh = 0
        self._held.clear()
        for completion in self._rows.completions:
            completion.num_cached = 0

    def release(self) -> None:
        """Give the cache memory back; allowed while the batch is empty."""
        assert not self.count, "release needs an empty batch"
        self._held.clear()
        self._cache.release()

    def close(self) -> None:
        """Give all memory back but the weights, and let go of the slot that they lie in; nothing is decoded again."""
        self.guard = None
        self._held.clear()
        self._cache.release()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, outcome: Outcome) -> None:
        lengths: list[int] = self._rows.length_R[: self._fresh].tolist()
        order = self._grouping.order(lengths)
        if order is not None:
            self._arrange(order)
            lengths = [lengths[row] for row in order]
        codes: list[Tensor] = []
        try:
            groups = joined(groups_of(lengths, self._grouping.size))
            for parts in passes(self._rows, self._cache, self._fresh, groups):
                codes.append(self._advance(parts))
                self._computed(parts[-1].stop)
        finally:  # a pass that fails takes nothing from those before it
            if codes:
                code_R = torch.cat(codes)
                outcome.tokens += len(code_R)
                self._finish(code_R, outcome)

    def _computed(self, stop: int) -> None:
        """All rows before ``stop`` are in the cache."""
        for completion in self._rows.completions[self._fresh : stop]:
            completion.num_cached = 0
        self._fresh = stop

    def _advance(self, parts: Sequence[Part]) -> Tensor:
        """Draw the next token of the rows of one pass; returns codes."""
        start, stop = parts[0].start, parts[-1].stop
        self._check_weights()
        logits_RV = self._logits(parts)
        how = self._rows.draws(start, stop, logits_RV.shape[-1])
        token_R, logprob_R = draw(logits_RV, how)
        num_top = self._rows.num_top()
        top = likeliest(logits_RV, how, num_top) if num_top else None
        self._check_weights()
        if top is not None:
            self._rows.keep_top(start, *top)
        return self._rows.append(start, token_R, logprob_R)

    def _check_weights(self) -> None:
        if self.guard is not None and not self.guard():
            raise TornWeights("the memory of the served weights was overwritten")

    def _logits(self, parts: Sequence[Part]) -> Tensor:
        """One forward pass: logits after the last token of each row of ``parts``; fills the cache."""
        token_T = torch.cat([part.token_T for part in parts])
        rope = self._rope_of(torch.cat([part.position_T for part in parts]))
        sizes = [part.num_tokens for part in parts]
        recorder = Recorder() if self._routes is not None else None
        hidden_TD = decode(self._plan, token_T, rope, together(parts), recorder)
        if self._routes is not None and recorder is not None:
            for part, table_TNK in zip(parts, torch.split(recorder.table(), sizes), strict=True):
                self._routes.write(part.row_W, part.position_W, part.written(table_TNK))
        firsts = accumulate(sizes, initial=0)
        last_R = torch.cat([first + part.last_R for first, part in zip(firsts, parts, strict=False)])
        logits_RV: Tensor = self._plan.head(hidden_TD[last_R])
        return logits_RV

    # -- rows come and go --------------------------------------------------------------------------------------------

    def _finish(self, code_R: Tensor, outcome: Outcome) -> None:
        """Of the rows that got a token, the first ones, tell those that go on and take out those that ended."""
        ends: dict[int, Finish] = {}
        if code_R.any():
            ends = {row: _FINISH[code] for row, code in enumerate(code_R.tolist()) if code}
        for row, completion, num_output in self._rows.watched(len(code_R)):
            if self._wrote_stop_string(row, completion.sampling.stop_strings, num_output):
                ends[row] = "stop"
        if self._rows.streamed:
            self._tell(self._new_tokens(len(code_R), ends))
        if ends:
            outcome.finished += [self._take(row, finish) for row, finish in ends.items()]
            self._drop(list(ends))

    def _new_tokens(self, stop: int, ends: Collection[int]) -> list[tuple[int, Token]]:
        """The last token of each streamed row before ``stop`` that goes on."""
        token_ids, logprobs = self._rows.newest(stop)
        version, weights = self._version, self._weights
        return [
            (c.request, Token(c.index, token_ids[row], logprobs[row], version, c.top[-1] if c.top else [], weights))
            for row, c in enumerate(self._rows.completions[:stop])
            if c.streamed and row not in ends
        ]

    def _wrote_stop_string(self, row: int, stop_strings: Sequence[str], num_output: int) -> bool:
        reach = _BYTES_PER_CHARACTER * max(map(len, stop_strings)) + 1
        text = self._detokenize(self._rows.tail(row, min(num_output, reach)))
        return any(stop in text for stop in stop_strings)

    def _end(self, row: int, finish: Finish) -> Finished:
        ended = self._rows.take(row, finish)
        if not math.isfinite(sum(ended.sample.logprobs)):
            self._cache.zero()
            self.drop_cache()
        if self._routes is not None:
            computed = len(ended.completion.prompt_ids) + len(ended.sample.token_ids) - 1
            ended = ended.with_experts(self._routes.take(row, computed))
        return ended

    def _take(self, row: int, finish: Finish) -> Finished:
        ended = self._end(row, finish)
        if finish == "stop" and ended.completion.keep and self._routes is None and row < self._fresh:
            self._hold(row, ended.completion.session)  # a row that is not fresh: its cache was zeroed a moment ago
        return ended

    def _hold(self, row: int, session: str) -> None:
        """Keep what is in the cache of a row: all but its last token, which went through no layer."""
        token_ids = list(self._rows.sequence(row))[:-1]
        self._held.keep(session, HeldSequence(token_ids, *self._cache.copied(row, len(token_ids))))

    def _drop(self, rows: Sequence[int]) -> None:
        longest = int(self._rows.length_R[: self.count].max()) if rows else 0
        moved, fresh = self._rows.drop(rows), self._fresh
        self._fresh = min(fresh, self.count)
        if moved is not None:
            sources, targets = moved
            self._cache.move(sources, targets, longest)
            if self._routes is not None:
                self._routes.move(sources, targets)
            stale = [t for s, t in zip(sources.tolist(), targets.tolist(), strict=True) if s >= fresh]
            self._fresh = min([self._fresh, *stale])

    def _arrange(self, order: Sequence[int]) -> None:
        """Rows change places; see ``Grouping.order``."""
        sources, targets = self._rows.rearrange(order)
        self._cache.move(sources, targets, int(self._rows.length_R[targets].max()))
        if self._routes is not None:
            self._routes.move(sources, targets)

    def _reserve(self, length: int) -> None:
        self._rows.reserve(length)
        self._cache.reserve(length)
        if self._routes is not None:
            self._routes.reserve(length)
        known = self._rope[0].shape[0]
        if length > known:
            self._rope = rope_at(self._plan, self._position_L[: max(length, 2 * known)])

    def _rope_of(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        cos_L1d, sin_L1d = self._rope
        return cos_L1d.index_select(0, position_T), sin_L1d.index_select(0, position_T)
