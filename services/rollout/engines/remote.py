"""Common parts of engines that run in other processes: weight labels, parameter names, and recorded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from penstock.services.rollout.engines.completion import Completion, Finish, finished
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.generation import Likely, Sample, Token
from penstock.shared.protocol.weights import Layout

__all__ = ["CALL_S", "Written", "check_layout", "checkpoint_tensors", "label_of"]

CALL_S = 120.0
"""Timeout of one call to an engine, in seconds; the call may have to wait for the current step of a large batch."""
_PER_CHARACTER = 4
"""Maximum number of non-empty tokens per character of a stop string: UTF-8 needs at most 4 bytes."""


def label_of(version: int, weights: str) -> str:
    """Return the label of tokens from a policy version whose weights have the short digest ``weights``."""
    return f"{version}:{weights}"


@dataclass(slots=True, eq=False)
class Written:
    """A completion that another process decodes, with its tokens so far."""

    completion: Completion
    detokenize: Callable[[list[int]], str]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    unwanted: bool = False
    """True once the completion should end; the engine may not have received it yet."""
    ended: bool = False
    """True once its last token is recorded; the engine may still report how it ended."""

    def add(self, token_id: int, logprob: float, label: str, top: Likely) -> Token:
        """Record a token sampled with the weights of this label; keep ``top`` if the completion requests top
        log-probs."""
        completion = self.completion
        version, _, weights = label.partition(":")
        if not completion.starts or completion.starts[-1][:2] != (int(version), weights):
            completion.adopt(int(version), weights, len(self.token_ids))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if completion.top_logprobs:
            completion.top.append(top)
        return Token(completion.index, token_id, logprob, int(version), top, weights)

    def record(
        self, rows: Iterable[tuple[int, float, str, Likely]], finish: Finish | None
    ) -> tuple[list[Token], Finish | None]:
        """Record new tokens up to a stop string.

        Args:
            rows: arguments of ``add`` for each new token.
            finish: how the engine ended the completion after these tokens; None: it continues.

        Returns:
            New tokens except the one that ends the completion, and how it ended; None while it continues.
        """
        tokens = []
        for token_id, logprob, label, top in rows:
            tokens.append(self.add(token_id, logprob, label, top))
            if self.ends_with_stop_string():
                finish = "stop"
                break
        self.ended = finish is not None
        if tokens and finish in ("stop", "length"):
            tokens.pop()
        return tokens, finish

    def so_far(self) -> Sample | None:
        """Return the tokens generated so far as an aborted sample; None once the completion has ended."""
        if self.ended:
            return None
        return finished(self.completion, list(self.token_ids), list(self.logprobs), "abort").sample

    def ends_with_stop_string(self) -> bool:
        """Return True if the last tokens contain a stop string.

        Servers do not receive stop strings: they would need a tokenizer, and text is never tokenized twice.
        """
        stops = self.completion.sampling.stop_strings
        if not stops:
            return False
        reach, begun = _PER_CHARACTER * max(map(len, stops)) + 1, self.completion.begun
        token_ids = self.token_ids[-reach:]
        if begun is not None:
            token_ids = [*begun.token_ids, *token_ids][-reach:]
        text = self.detokenize(token_ids)
        return any(stop in text for stop in stops)


def check_layout(layout: Layout, expected: Layout | None) -> None:
    """Compare the parameters of a version with those of the model; ``expected`` None: skip the check.

    Raises:
        WeightsError: a parameter is missing or unknown, or its shape or dtype differs.
    """
    if expected is None:
        return
    own = {spec.name: (spec.dtype, spec.shape) for spec in expected.tensors}
    given = {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors}
    if missing := own.keys() - given.keys():
        raise WeightsError(f"the version lacks {len(missing)} parameters, among them '{min(missing)}'")
    if unknown := given.keys() - own.keys():
        raise WeightsError(f"the model has no parameter '{min(unknown)}'")
    for name, (dtype, shape) in given.items():
        if own[name] != (dtype, shape):
            raise WeightsError(f"'{name}' is {dtype}{list(shape)}, the model has {own[name][0]}{list(own[name][1])}")


def checkpoint_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters under the names and shapes of checkpoint files, which store each expert's matrices separately.

    ``mlp.experts.gate_up_proj`` [experts, 2 x intermediate, hidden] and ``down_proj`` [experts, hidden, intermediate]
    are split into the matrices of each expert; all other parameters are unchanged.
    """
    for name, tensor in tensors:
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2, 0)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, value in parts.items():
                yield f"{prefix}.{number}.{part}.weight", value
