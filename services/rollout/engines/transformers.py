"""Engine for any causal language model of transformers: the model's own forward pass, for one completion at a time.

It is slow, because each token of each completion is a forward pass of its own, and exact: nothing is padded, and the
tokens of a completion are the same, bit for bit, whatever else is decoded. All but the forward pass is that of the
embedded engine: requests, sampling, constrained answers, weight updates.

Shape legend: R = rows, V = vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded.batch import OnTokens, Outcome, RowBatch
from penstock.services.rollout.engines.embedded.engine import EmbeddedEngine
from penstock.shared.config.rollout import TransformersConfig, longest_exact
from penstock.shared.errors import ConfigError

__all__ = ["ModuleBatch", "TransformersEngine", "longest_text"]

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names under which a forward pass accepts and returns its cache: since transformers 5.24, before it for attention, and
before it for state-space models."""


class ModuleBatch(RowBatch):
    """Completions, each with the cache that the model's forward pass returned for its tokens.

    If the model has no cache, or one under another name, each token is computed from the whole text.
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
        assert not record_routes, "caps.routers is False"
        super().__init__(
            model, max_running=max_running, detokenize=detokenize, version=version, weights=weights,
            on_tokens=on_tokens,
        )  # fmt: skip
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), "")
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._caches: dict[Completion, Any] = {}

    def admit(self, completions: Sequence[Completion], following: Completion | None = None) -> None:
        """Add completions; the next step computes their prompts, each by itself."""
        self._rows.reserve(max(len(c.prompt_ids) - c.num_begun + c.sampling.max_new_tokens for c in completions))
        self._rows.add(completions, self._version, self._weights)

    def drop_cache(self) -> None:
        """Drop every cache, so that the next step recomputes each row from its tokens."""
        self._caches.clear()

    def release(self) -> None:
        """Release the cache memory; the batch must be empty."""
        assert not self.count, "release needs an empty batch"
        self._caches.clear()

    def close(self) -> None:
        """Release the caches and drop ``guard``; see ``RowBatch``."""
        self.guard = None
        self._caches.clear()

    def _step(self, outcome: Outcome) -> None:
        code_R = self._advance(self._logits)
        outcome.tokens += len(code_R)
        self._finish(code_R, outcome)

    def _logits(self) -> Tensor:
        """Return the logits [R, V] after the last token of each row."""
        return torch.cat([self._next(row, completion) for row, completion in enumerate(self._rows.completions)])

    def _next(self, row: int, completion: Completion) -> Tensor:
        """Return the logits [1, V] after the last token of a row, and keep the cache of its tokens."""
        options, cache = dict(self._options), self._caches.pop(completion, None)
        text = self._rows.sequence(row) if cache is None else self._rows.tail(row, 1)
        if self._cache_name:
            options |= {self._cache_name: cache, "use_cache": True}
        output = self._model(input_ids=torch.tensor([list(text)], device=self._device), **options)
        self.passes += 1
        cache = getattr(output, self._cache_name, None) if self._cache_name else None
        if cache is not None:
            self._caches[completion] = cache
        logits_1V: Tensor = output.logits[:, -1]
        return logits_1V

    def _drop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._caches.pop(self._rows.completions[row], None)
        self._rows.drop(rows, self.count)


class TransformersEngine(EmbeddedEngine):
    """Embedded engine that decodes by the model's own forward pass; see ``ModuleBatch``."""

    title = "the engine 'transformers'"
    caps = TransformersConfig.caps
    batch_type = ModuleBatch


def longest_text(model: PreTrainedModel, wanted: int | None) -> int:
    """Return the maximum number of tokens of a text: ``wanted``, or else the most for which log-probs are exact.

    Raises:
        ConfigError: ``wanted`` exceeds this length (``longest_exact``), or is None for a model that names no length.
    """
    config = model.config.get_text_config()
    most = longest_exact(config.to_dict())
    if wanted is None and most is None:
        raise ConfigError(f"rollout.max_length: set it, because this {type(model).__name__} names no longest text")
    if wanted is not None and most is not None and wanted > most:
        raise ConfigError(f"rollout.max_length {wanted}: this {type(model).__name__} takes {most} tokens")
    return wanted or int(most or 0)
