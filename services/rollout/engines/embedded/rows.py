"""State of the running completions as tensors: one row each, without gaps, so that a step needs no loop over rows.

Shape legend: R = rows, C = token capacity of a row, K = stop tokens of a row (padded with -1),
B = biased tokens, V = vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.services.rollout.engines.completion import Completion, Finish, Finished, finished
from penstock.services.rollout.engines.constraint import allowed_tokens
from penstock.services.rollout.engines.sampling import Draws, stream_of

__all__ = ["Rows"]


class Rows:
    """Rows [0, count) of static tensors. Removing rows moves others into the gaps."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.completions: list[Completion] = []
        self._device = device
        self._features: Counter[str] = Counter()
        self._biases: dict[Completion, tuple[Tensor, Tensor]] = {}
        """(token ids [B], values added to their logits [B]) of each completion with a ``logit_bias``."""
        self._ints = torch.zeros((8, capacity), dtype=torch.long, device=device)
        self._floats = torch.zeros((2, capacity), device=device, dtype=torch.float32)
        (
            self.length_R, self.shared_R, self._prompt_R, self._limit_R, self._minimum_R, self._stream_R,
            self._top_k_R, self._greedy_R,
        ) = self._ints  # fmt: skip
        """``shared_R``: number of first tokens whose keys and values are in a prefix, not in the row of the cache."""
        self._temperature_R, self._top_p_R = self._floats
        self._stops_RK = torch.full((capacity, 1), -1, dtype=torch.long, device=device)
        self.tokens_RC = torch.zeros((capacity, 0), dtype=torch.long, device=device)
        self._logprobs_RC = torch.zeros((capacity, 0), device=device, dtype=torch.float32)

    @property
    def count(self) -> int:
        """Number of rows in use."""
        return len(self.completions)

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` tokens per row."""
        extra = length - self.tokens_RC.shape[1]
        if extra > 0:
            extra += length // 2
            self.tokens_RC = torch.nn.functional.pad(self.tokens_RC, (0, extra))
            self._logprobs_RC = torch.nn.functional.pad(self._logprobs_RC, (0, extra))

    def add(
        self, completions: Sequence[Completion], version: int, weights: str = "", shared: Sequence[int] = ()
    ) -> None:
        """Append a row for each completion. If it continues earlier tokens (``Completion.begun``), the row counts these
        as output, although this engine did not sample them.

        Args:
            shared: number of tokens in the prefix of each row; empty: no row has one.
        """
        start, stop = self.count, self.count + len(completions)
        ints, floats, stops = [], [], []
        width = max(self._stops_RK.shape[1], *(len(c.stop_ids) for c in completions))
        self._stops_RK = torch.nn.functional.pad(self._stops_RK, (0, width - self._stops_RK.shape[1]), value=-1)
        for c, num_shared in zip(completions, shared or [0] * len(completions), strict=True):
            c.adopt(version, weights, 0)
            s, length = c.sampling, len(c.prompt_ids)
            prompt = length - c.num_begun
            limits = prompt + s.max_new_tokens, prompt + s.min_new_tokens
            ints.append((length, num_shared, prompt, *limits, stream_of(c.seed), s.top_k, int(s.temperature == 0)))
            floats.append((s.temperature or 1.0, s.top_p))
            stops.append((*c.stop_ids, *[-1] * (width - len(c.stop_ids))))
            self._features.update(_features(c))
            if s.logit_bias:
                tokens, biases = zip(*s.logit_bias, strict=True)
                self._biases[c] = (
                    torch.tensor(tokens, device=self._device),
                    torch.tensor(biases, device=self._device, dtype=torch.float32),
                )
        self._ints[:, start:stop] = torch.tensor(ints, device=self._device).T
        self._floats[:, start:stop] = torch.tensor(floats, device=self._device, dtype=torch.float32).T
        self._stops_RK[start:stop] = torch.tensor(stops, device=self._device)
        for row, c in enumerate(completions, start):
            self.tokens_RC[row, : len(c.prompt_ids)] = torch.tensor(c.prompt_ids, device=self._device)
        self.completions += completions

    def draws(self, start: int, stop: int, vocab: int) -> Draws:
        """Return the sampling parameters of the next token of rows [start, stop), over ``vocab`` tokens."""
        rows, has, count = slice(start, stop), self._features, self.count
        length_R = self.length_R[rows]
        forbidden = None
        if has["minimum"]:
            forbidden = torch.where((length_R < self._minimum_R[rows])[:, None], self._stops_RK[rows], -1)
        allowed = None
        if has["constrained"]:
            matchers = [completion.matcher for completion in self.completions[rows]]
            allowed = allowed_tokens(matchers, self.tokens_RC[rows], length_R, self._prompt_R[rows], vocab)
        return Draws(
            stream_R=self._stream_R[rows],
            index_R=length_R - self._prompt_R[rows],
            temperature_R1=self._temperature_R[rows, None] if has["temperature"] else None,
            greedy_R=self._greedy_R[rows] > 0 if has["greedy"] else None,
            all_greedy=has["greedy"] == count,
            top_p_R=self._top_p_R[rows] if has["top_p"] else None,
            top_k_R=self._top_k_R[rows] if has["top_k"] else None,
            forbidden_RK=forbidden,
            nudge_RV=self._nudges(start, stop, vocab) if has["nudged"] else None,
            allowed_RV=allowed,
        )

    def _nudges(self, start: int, stop: int, vocab: int) -> Tensor:
        nudge_RV = torch.zeros((stop - start, vocab), device=self._device, dtype=torch.float32)
        for place, completion in enumerate(self.completions[start:stop]):
            s, row, nudge_V = completion.sampling, start + place, nudge_RV[place]
            if s.frequency_penalty or s.presence_penalty:
                output = self.tokens_RC[row, int(self._prompt_R[row]) : int(self.length_R[row])]
                count_V = torch.bincount(output, minlength=vocab).float()
                nudge_V -= s.frequency_penalty * count_V + s.presence_penalty * (count_V > 0)
            if completion in self._biases:
                token_B, bias_B = self._biases[completion]
                nudge_V.index_add_(0, token_B, bias_B)
        return nudge_RV

    def append(self, start: int, token_R: Tensor, logprob_R: Tensor) -> Tensor:
        """Append one token to each of R rows from ``start`` on; returns codes: 0 continues, 1 stop token, 2 length."""
        rows = slice(start, start + len(token_R))
        length_R = self.length_R[rows]
        self.tokens_RC[rows].scatter_(1, length_R[:, None], token_R[:, None])
        self._logprobs_RC[rows].scatter_(1, length_R[:, None], logprob_R[:, None])
        length_R += 1
        ended_R = (length_R >= self._limit_R[rows]) * 2
        stopped_R = (token_R[:, None] == self._stops_RK[rows]).any(-1) & (length_R >= self._minimum_R[rows])
        return torch.where(stopped_R, 1, ended_R)

    @property
    def streamed(self) -> bool:
        """True if at least one row is streamed."""
        return bool(self._features["streamed"])

    @property
    def finite(self) -> bool:
        """True if all log-probs are finite; leftover values of removed rows may be included in the check."""
        return bool(self._logprobs_RC[: self.count].isfinite().all())

    def newest(self, stop: int) -> tuple[list[int], list[float]]:
        """Return the last token of each row before ``stop``, and its log-prob."""
        last_R1 = self.length_R[:stop, None] - 1
        token_R = self.tokens_RC[:stop].gather(1, last_R1)[:, 0]
        return token_R.tolist(), self._logprobs_RC[:stop].gather(1, last_R1)[:, 0].tolist()

    def num_top(self) -> int:
        """Return the maximum ``top_logprobs`` of all rows."""
        return max(c.top_logprobs for c in self.completions) if self._features["top"] else 0

    def keep_top(self, start: int, logprob_RK: Tensor, token_RK: Tensor) -> None:
        """Store the most likely tokens of rows from ``start`` on, best first, as many as each request asks for."""
        for completion, tokens, logprobs in zip(
            self.completions[start:], token_RK.tolist(), logprob_RK.tolist(), strict=False
        ):
            if completion.top_logprobs:
                completion.top.append(list(zip(tokens, logprobs, strict=True))[: completion.top_logprobs])

    def watched(self, stop: int) -> list[tuple[int, Completion, int]]:
        """Return the rows, among those before index ``stop``, whose text must be checked for stop strings: (row,
        completion, number of output tokens)."""
        if not self._features["stop_strings"]:
            return []
        outputs = self.num_outputs()
        return [
            (row, c, n)
            for row, (c, n) in enumerate(zip(self.completions[:stop], outputs, strict=False))
            if c.sampling.stop_strings and n >= max(1, c.sampling.min_new_tokens)
        ]

    def num_outputs(self) -> list[int]:
        """Return the number of output tokens of each row."""
        return list((self.length_R - self._prompt_R)[: self.count].tolist())

    def sequence(self, row: int) -> Sequence[int]:
        """Return the prompt and output tokens of a row."""
        prompt_ids, length = self.completions[row].prompt_ids, int(self.length_R[row])
        return prompt_ids if length == len(prompt_ids) else self.tokens_RC[row, :length].tolist()

    def own_lengths(self, stop: int) -> list[int]:
        """Return, for each row before ``stop``, the number of tokens after its shared prefix."""
        return list((self.length_R - self.shared_R)[:stop].tolist())

    def tail(self, row: int, num: int) -> list[int]:
        """Return the last ``num`` tokens of a row."""
        length = int(self.length_R[row])
        return list(self.tokens_RC[row, length - num : length].tolist())

    def take(self, row: int, finish: Finish) -> Finished:
        """Build the result of a row. The row stays in the batch until ``drop``."""
        completion = self.completions[row]
        output = slice(len(completion.prompt_ids), int(self.length_R[row]))
        tokens, logprobs = self.tokens_RC[row, output].tolist(), self._logprobs_RC[row, output].tolist()
        return finished(completion, tokens, logprobs, finish)

    def drop(self, rows: Sequence[int], fresh: int) -> list[tuple[int, int]]:
        """Remove rows; returns (source, target) of each row that moved, so that the cache can move it too.

        Gaps among the first ``fresh`` rows are filled with the last of these rows. The other rows follow in their
        previous order.
        """
        gone = set(rows)
        front, back = ([row for row in some if row not in gone] for some in (range(fresh), range(fresh, self.count)))
        gaps = [row for row in range(len(front)) if row in gone]
        moves = list(zip((row for row in front if row >= len(front)), gaps, strict=True))
        moves += [(row, place) for place, row in enumerate(back, start=len(front)) if row != place]
        for row in rows:
            self._features.subtract(_features(self.completions[row]))
            self._biases.pop(self.completions[row], None)
        if moves:
            self._copy(moves)
        del self.completions[len(front) + len(back) :]
        return moves

    def rearrange(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """Move row ``order[i]`` to position i for each i, and return (source, target) of each row that moves.

        At least one row must move.
        """
        moves = [(row, place) for place, row in enumerate(order) if row != place]
        self._copy(moves)
        return moves

    def _copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows from sources to targets; all sources are read before any write."""
        moving = [(self.completions[source], target) for source, target in moves]
        for completion, target in moving:
            self.completions[target] = completion
        source_M, target_M = torch.tensor(moves, device=self._device).T
        self._ints[:, target_M] = self._ints[:, source_M]
        self._floats[:, target_M] = self._floats[:, source_M]
        for tensor in (self._stops_RK, self.tokens_RC, self._logprobs_RC):
            tensor[target_M] = tensor[source_M]


def _features(completion: Completion) -> list[str]:
    s = completion.sampling
    wanted = {
        "temperature": s.temperature not in (0.0, 1.0),
        "greedy": s.temperature == 0,
        "top_p": s.top_p < 1,
        "top_k": s.top_k > 0,
        "minimum": s.min_new_tokens > 0,
        "stop_strings": bool(s.stop_strings),
        "nudged": bool(s.frequency_penalty or s.presence_penalty or s.logit_bias),
        "streamed": completion.streamed,
        "top": completion.top_logprobs > 0,
        "constrained": completion.matcher is not None,
    }
    return [name for name, present in wanted.items() if present]
