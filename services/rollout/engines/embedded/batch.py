"""Decoding core: admits completions, decodes all of them one token at a time, drops stale caches. One thread only.

Rows [0, fresh) have their keys and values in the cache. Rows [fresh, count) are stale: the same forward pass computes
them from all their tokens, or only from those after the prefix that is in the cache. New rows are appended as stale
rows. A step computes a bounded number of tokens of stale rows, so that long prompts do not hold up the fresh rows.
A new policy version makes every row stale and drops all held and shared prefixes: no token comes from an old cache.

Shape legend: R = rows, V = vocabulary, T = flat tokens, D = model width, L = positions, N = layers with experts,
K = experts of a token, C = token capacity of a row, W = tokens to write.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines.completion import Completion, Finish, Finished
from penstock.services.rollout.engines.embedded.cache import HeldSequence, HeldSequences, KVCache
from penstock.services.rollout.engines.embedded.grouping import Grouping, groups_of, joined
from penstock.services.rollout.engines.embedded.parts import Part, next_pass, together
from penstock.services.rollout.engines.embedded.prefixes import shared_from
from penstock.services.rollout.engines.embedded.rows import Rows
from penstock.services.rollout.engines.sampling import draw, likeliest
from penstock.shared.config.rollout import ANY_MODEL
from penstock.shared.errors import ConfigError, WeightsError
from penstock.shared.models.architecture import Plan, plan_of
from penstock.shared.models.decoder import decode, rope_at, selected_logits
from penstock.shared.models.experts import Recorder
from penstock.shared.models.packed import pack
from penstock.shared.protocol.generation import Likely, Sample, Scores, Token

__all__ = ["Batch", "Outcome", "RouteTable", "RowBatch", "TornWeights"]

_FINISH: dict[int, Finish] = {1: "stop", 2: "length"}
_BYTES_PER_CHARACTER = 4
"""Maximum number of non-empty tokens per character of a stop string: UTF-8 needs at most 4 bytes."""
SCORED_TOKENS = 512
"""Number of positions whose logits are in memory at once while a text is scored."""
ATTEND_TOGETHER = 8
"""Rows per attention call on a CPU. A GPU takes all rows in one call: padding is cheaper there than kernel launches."""

OnTokens = Callable[[list[tuple[int, Token]]], None]
"""Callback for the new tokens of a step, each with the serial number of its request; runs in the decoding thread."""


class TornWeights(WeightsError):  # noqa: N818
    """Raised if the memory of the served weights was overwritten before or during a decode step."""


@dataclass(slots=True)
class Outcome:
    """Result of one ``Batch.run``. ``tokens``: number of sampled tokens.

    ``torn``: the weights were overwritten during a forward pass, whose tokens were discarded.
    """

    finished: list[Finished] = field(default_factory=list)
    tokens: int = 0
    torn: bool = False


class RowBatch(ABC):
    """Running completions of one model, each of which gets a token per step. Subclasses compute logits and keep caches.

    Args:
        on_tokens: receives the new tokens of streamed completions, except those that end a completion.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        detokenize: Callable[[list[int]], str],
        version: int,
        weights: str = "",
        on_tokens: OnTokens = lambda tokens: None,
    ) -> None:
        self._model, self._detokenize, self._on_tokens = model, detokenize, on_tokens
        self._device = model.device
        self._rows = Rows(max_running, self._device)
        self._version, self._weights = version, weights
        self.guard: Callable[[], bool] | None = None
        self.passes = 0
        """Number of forward passes so far. It grows within a step too, where a step is several passes."""

    @property
    def count(self) -> int:
        """Number of completions in the batch."""
        return self._rows.count

    @abstractmethod
    def admit(self, completions: Sequence[Completion], following: Completion | None = None) -> None:
        """Add completions; the next step computes their prompts.

        Args:
            following: the next completion that will be admitted, if one waits: it may have the same prompt.
        """

    @torch.inference_mode()
    def run(self, max_steps: int, interrupted: Callable[[], bool]) -> Outcome:
        """Decode up to ``max_steps`` tokens per row; returns early if a row ends or ``interrupted()`` is True."""
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
        """Return the log-probs of ``token_ids`` after the first, and ``num_top`` most likely tokens at each position.

        Neither uses nor changes the cache.
        """
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
        """End the completions of these requests as 'abort', and return them with their partial tokens."""
        rows = [row for row, completion in enumerate(self._rows.completions) if completion.request in requests]
        ended = [self._end(row, "abort") for row in rows]
        self._drop(rows)
        return ended

    def written(self, requests: Collection[int]) -> dict[int, Sample]:
        """Return the tokens that requests have generated so far, by serial number, as samples with finish 'abort'."""
        rows = enumerate(self._rows.completions)
        return {c.request: self._rows.take(row, "abort").sample for row, c in rows if c.request in requests}

    def adopt(self, version: int, weights: str = "") -> None:
        """Label all further tokens with ``version`` and short digest ``weights``, and drop every cached key and value.

        Called after the weights were replaced.
        """
        for completion, num_output in zip(self._rows.completions, self._rows.num_outputs(), strict=True):
            completion.adopt(version, weights, num_output - completion.num_begun)
        self._version, self._weights = version, weights
        self.drop_cache()

    @abstractmethod
    def drop_cache(self) -> None:
        """Drop every cached key and value, so that the next step recomputes each row from its tokens."""

    @abstractmethod
    def release(self) -> None:
        """Release the cache memory; the batch must be empty."""

    @abstractmethod
    def close(self) -> None:
        """Release the caches, and drop ``guard``, the function that checks that the memory of the served weights is
        intact. The function refers to this memory, which could not be freed otherwise. No call may follow."""

    @abstractmethod
    def _step(self, outcome: Outcome) -> None:
        """Decode one token of the rows that are ready, and record it in ``outcome``."""

    def _advance(self, compute: Callable[[], Tensor]) -> Tensor:
        """Call ``compute`` for the logits [R, V] of the first R rows, and sample and append the next token of each of
        these rows. Return the codes of ``Rows.append``."""
        self._check_weights()
        logits_RV = compute()
        how = self._rows.draws(0, len(logits_RV), logits_RV.shape[-1])
        token_R, logprob_R = draw(logits_RV, how)
        num_top = self._rows.num_top()
        top = likeliest(logits_RV, how, num_top) if num_top else None
        self._check_weights()
        if top is not None:
            self._rows.keep_top(0, *top)
        return self._rows.append(0, token_R, logprob_R)

    def _check_weights(self) -> None:
        if self.guard is not None and not self.guard():
            raise TornWeights("the memory of the served weights was overwritten")

    def _finish(self, code_R: Tensor, outcome: Outcome) -> None:
        """Pass on the new tokens of rows that continue, and remove the rows that ended.

        Args:
            code_R: codes of ``Rows.append`` for the first R rows; only these have a new token.
        """
        ends: dict[int, Finish] = {}
        if code_R.any():
            ends = {row: _FINISH[code] for row, code in enumerate(code_R.tolist()) if code}
        for row, completion, num_output in self._rows.watched(len(code_R)):
            if self._wrote_stop_string(row, completion.sampling.stop_strings, num_output):
                ends[row] = "stop"
        if self._rows.streamed:
            self._on_tokens(self._new_tokens(len(code_R), ends))
        if ends:
            outcome.finished += [self._take(row, finish) for row, finish in ends.items()]
            self._drop(list(ends))

    def _new_tokens(self, stop: int, ends: Collection[int]) -> list[tuple[int, Token]]:
        """Return the newest token of each streamed row below index ``stop``, except of the rows in ``ends``."""
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
        """Build the result of a row, which stays in the batch until ``_drop``."""
        return self._rows.take(row, finish)

    def _take(self, row: int, finish: Finish) -> Finished:
        """Build the result of a row that ended by itself; see ``_end``."""
        return self._end(row, finish)

    @abstractmethod
    def _drop(self, rows: Sequence[int]) -> None:
        """Remove rows."""


class Batch(RowBatch):
    """``RowBatch`` of a model that Penstock's own forward function (``shared.models.decoder``) can compute, with keys
    and values in static tensors.

    Args:
        record_routes: record the experts of every token of a mixture-of-experts model in ``Sample.experts``.
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
        on_tokens: OnTokens = lambda tokens: None,
    ) -> None:
        plan = plan_of(model)
        if plan is None:
            raise ConfigError(
                "the embedded engine decodes Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral models with full attention, "
                f"not this {type(model).__name__}: {ANY_MODEL}"
            )
        super().__init__(
            model, max_running=max_running, detokenize=detokenize, version=version, weights=weights,
            on_tokens=on_tokens,
        )  # fmt: skip
        self._plan = plan
        self._cache = KVCache(plan, rows=max_running, max_length=max_length)
        self._held = HeldSequences(max_running)
        self._routes = RouteTable(plan, max_running, self._device) if record_routes else None
        self._grouping = Grouping(ATTEND_TOGETHER if self._device.type == "cpu" else max_running)
        self._position_L = torch.arange(max_length, device=self._device)
        self._rope = rope_at(plan, self._position_L[:0])
        self._fresh = 0

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values of all rows and shared prefixes."""
        return self._cache.num_bytes

    def admit(self, completions: Sequence[Completion], following: Completion | None = None) -> None:
        """Add completions; see ``RowBatch``. They share the keys and values of equal prompts."""
        found = [(c, self._held.take(c.session, c.prompt_ids) if c.session else None) for c in completions]
        ordered = sorted(found, key=lambda one: one[1] is None)  # cached prefixes adjacent: they share a part
        if self._routes is not None:
            self._routes.add(self.count, self.count + len(completions))
        else:
            new = [completion for completion, held in ordered if held is None]
            self._cache.prefixes.join(new, following, at_least=shared_from(self._device))
        prefixes = [self._cache.prefixes.of(completion) for completion, _ in ordered]
        shared = [0 if prefix is None else len(prefix) for prefix in prefixes]
        longest = [len(c.prompt_ids) - c.num_begun + c.sampling.max_new_tokens for c, _ in ordered]
        self._reserve(max(longest), max(length - num for length, num in zip(longest, shared, strict=True)))
        for row, (completion, held) in enumerate(ordered, start=self.count):
            if held is not None:
                self._cache.restore(row, held.keys, held.values)
                completion.num_cached = len(held.token_ids)
        self._rows.add([completion for completion, _ in ordered], self._version, self._weights, shared)

    @torch.inference_mode()
    def run(self, max_steps: int, interrupted: Callable[[], bool]) -> Outcome:
        """Decode up to ``max_steps`` tokens per row; see ``RowBatch``."""
        self._cache.prefixes.free_unused()
        return super().run(max_steps, interrupted)

    def adopt(self, version: int, weights: str = "") -> None:
        """Label all further tokens and drop the caches; see ``RowBatch``."""
        if not self._rows.finite:
            self._cache.zero()
        super().adopt(version, weights)

    def drop_cache(self) -> None:
        """Mark every row and shared prefix as stale, so that the next step recomputes it from its tokens, and drop held
        prefixes."""
        self._fresh = 0
        self._cache.prefixes.drop()
        self._held.clear()
        for completion in self._rows.completions:
            completion.num_cached = 0

    def release(self) -> None:
        """Release the cache memory; see ``RowBatch``."""
        assert not self.count, "release needs an empty batch"
        self._held.clear()
        self._cache.release()

    def close(self) -> None:
        """Release the caches and drop ``guard``; see ``RowBatch``."""
        self.guard = None
        self._held.clear()
        self._cache.release()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, outcome: Outcome) -> None:
        lengths = self._rows.own_lengths(self._fresh)
        order = self._grouping.order(lengths)
        if order is not None:
            self._arrange(order)
            lengths = [lengths[row] for row in order]
        groups = joined(groups_of(lengths, self._grouping.size))
        parts = next_pass(self._rows, self._cache, self._fresh, groups)
        code_R = self._advance(lambda: self._logits(parts))
        self._computed(parts)
        outcome.tokens += len(code_R)
        self._finish(code_R, outcome)

    def _computed(self, parts: Sequence[Part]) -> None:
        """Mark as fresh the rows that a pass completed; for other rows, and for shared prefixes, record how many tokens
        are in the cache."""
        for part in parts:
            if part.prefix is not None:
                part.prefix.num_cached = part.num_cached
                continue
            for completion in self._rows.completions[max(part.start, self._fresh) : part.stop]:
                completion.num_cached = part.num_cached
            if not part.num_cached:
                self._fresh = part.stop

    def _logits(self, parts: Sequence[Part]) -> Tensor:
        """Run one forward pass; returns the logits after the last token of each row of ``parts``. Fills the cache."""
        token_T = torch.cat([part.token_T for part in parts])
        rope = self._rope_of(torch.cat([part.position_T for part in parts]))
        sizes = [part.num_tokens for part in parts]
        recorder = Recorder() if self._routes is not None else None
        hidden_TD = decode(self._plan, token_T, rope, together(parts), recorder)
        self.passes += 1
        if self._routes is not None and recorder is not None:
            for part, table_TNK in zip(parts, torch.split(recorder.table(), sizes), strict=True):
                self._routes.write(part.row_W, part.position_W, part.written(table_TNK))
        firsts = accumulate(sizes, initial=0)
        last_R = torch.cat([first + part.last_R for first, part in zip(firsts, parts, strict=False)])
        logits_RV: Tensor = self._plan.head(hidden_TD[last_R])
        return logits_RV

    # -- rows come and go --------------------------------------------------------------------------------------------

    def _end(self, row: int, finish: Finish) -> Finished:
        ended = self._rows.take(row, finish)
        if not math.isfinite(sum(ended.sample.logprobs)):
            self._cache.zero()
            self.drop_cache()
        if self._routes is not None:
            computed = int(self._rows.length_R[row]) - 1
            ended = ended.with_experts(self._routes.take(row, computed))
        return ended

    def _take(self, row: int, finish: Finish) -> Finished:
        ended = self._end(row, finish)
        if finish == "stop" and ended.completion.keep and self._routes is None and row < self._fresh:
            self._hold(row, ended.completion.session)  # not fresh: ``_end`` has just zeroed its cache
        return ended

    def _hold(self, row: int, session: str) -> None:
        """Hold a row's cached keys and values for its session: those of all tokens but the last, which no pass has
        computed."""
        token_ids, prefix = list(self._rows.sequence(row))[:-1], self._cache.prefixes.of(self._rows.completions[row])
        num_own = len(token_ids) - (0 if prefix is None else len(prefix))
        self._held.keep(session, HeldSequence(token_ids, *self._cache.copied(row, num_own, prefix)))

    def _drop(self, rows: Sequence[int]) -> None:
        fresh = self._fresh
        for row in rows:
            self._cache.prefixes.leave(self._rows.completions[row])
        moved = self._rows.drop(rows, fresh)
        self._fresh = fresh - sum(row < fresh for row in rows)
        self._move(moved, [(s, t) for s, t in moved if s < fresh or self._rows.completions[t].num_cached])

    def _arrange(self, order: Sequence[int]) -> None:
        """Reorder the rows; see ``Grouping.order``."""
        moved = self._rows.rearrange(order)
        self._move(moved, moved)

    def _move(self, moved: Sequence[tuple[int, int]], cached: Sequence[tuple[int, int]]) -> None:
        """Move the data of rows. ``moved`` and ``cached`` are pairs (source row, target row): recorded experts move as
        ``moved`` says, cached keys and values as ``cached`` says."""
        if cached:
            source_M, target_M = torch.tensor(cached, device=self._device).T
            own_M = self._rows.length_R[target_M] - self._rows.shared_R[target_M]
            self._cache.move(source_M, target_M, int(own_M.max()))
        if moved and self._routes is not None:
            self._routes.move(*torch.tensor(moved, device=self._device).T)

    def _reserve(self, length: int, own: int) -> None:
        """Make room for rows of at most ``length`` tokens, of which at most ``own`` follow a shared prefix."""
        self._rows.reserve(length)
        self._cache.reserve(own - 1)  # the last token is not computed
        if self._routes is not None:
            self._routes.reserve(length)
        known = self._rope[0].shape[0]
        if length > known:
            self._rope = rope_at(self._plan, self._position_L[: max(length, 2 * known)])

    def _rope_of(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        cos_L1d, sin_L1d = self._rope
        return cos_L1d.index_select(0, position_T), sin_L1d.index_select(0, position_T)


class RouteTable:
    """Experts chosen at every position of every row, [R, C, N, K]; the trainer replays these choices. Rows are added
    and moved as in ``Rows``.

    When the weights change during a completion, its tokens are recomputed. The following token was sampled from the
    first computation, so the experts of the first computation are kept.
    """

    def __init__(self, plan: Plan, rows: int, device: torch.device) -> None:
        num_experts = plan.sparse[0].router.weight.shape[0]
        dtype = torch.uint8 if num_experts <= 1 << 8 else torch.int16
        shape = (rows, 0, len(plan.sparse), plan.sparse[0].top_k)
        self._table_RCNK = torch.zeros(shape, dtype=dtype, device=device)
        self._known_R = torch.zeros(rows, dtype=torch.long, device=device)

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` tokens per row."""
        extra = length - self._table_RCNK.shape[1]
        if extra > 0:
            self._table_RCNK = torch.nn.functional.pad(self._table_RCNK, (0, 0, 0, 0, 0, extra + length // 2))

    def add(self, start: int, stop: int) -> None:
        """Clear rows [start, stop) for new completions."""
        self._known_R[start:stop] = 0

    def write(self, row_W: Tensor, position_W: Tensor, chosen_WNK: Tensor) -> None:
        """Store the experts [W, N, K] of tokens that are computed for the first time; ignore recomputed ones."""
        new_W = position_W >= self._known_R[row_W]
        self._table_RCNK[row_W[new_W], position_W[new_W]] = chosen_WNK[new_W].to(self._table_RCNK.dtype)
        self._known_R.scatter_reduce_(0, row_W, position_W + 1, "amax")

    def take(self, row: int, length: int) -> NDArray[Any]:
        """Return a copy of the expert ids of the first ``length`` tokens of a row, uint8 or uint16 [length, N, K]."""
        table: NDArray[Any] = self._table_RCNK[row, :length].to("cpu", copy=True).numpy()
        return table if table.dtype == np.uint8 else table.view(np.uint16)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows ``sources`` to ``targets``."""
        for tensor in (self._table_RCNK, self._known_R):
            tensor[targets] = tensor[sources]
