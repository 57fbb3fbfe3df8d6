"""Models and completions that every engine is given alike. Free of any framework: vLLM's interpreter imports it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

__all__ = ["GROUP", "MODELS", "PROMPT", "SHAPES", "Completion", "Model", "completions", "lognormal", "longest"]

SHAPES = ("equal", "ragged")
GROUP = 8
"""Completions of a prompt."""
PROMPT, PROMPTS = 16, (8, 32)
"""Tokens of a prompt where all are equal, and the range where they are not."""
SIGMA, CUT = 1.0, 8
"""Of the lognormal lengths, which are cut at this many medians."""
QUEUED = 2
"""Ragged completions for each row: with one the batch would only run empty."""


@dataclass(frozen=True)
class Model:
    """A Qwen3 with random weights whose embedding is its head, too.

    ``new_tokens`` are sampled where all completions are equally long; the median is half of them where they are not.
    """

    new_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @property
    def architecture(self) -> dict[str, int]:
        """For the job file's ``model.config``."""
        found = {**asdict(self), "max_position_embeddings": longest(self)}
        del found["new_tokens"]
        return found


MODELS = {
    "1m": Model(64, 128, 384, 4, 4, 2, 1024),
    "30m": Model(32, 512, 1536, 8, 8, 4, 8192),
    "100m": Model(24, 768, 2048, 14, 12, 4, 16384),
}
"""0.9, 29 and 101 million parameters."""


@dataclass(frozen=True)
class Completion:
    """A prompt and how many tokens must follow it."""

    prompt_ids: list[int]
    num_new: int


def lognormal(numbers: random.Random, median: float, *, shared: float | None = None) -> int:
    """A length whose logarithm is normal, from 1 to ``CUT`` medians.

    Args:
        shared: a standard normal number of the prompt, which makes half of the variance.
    """
    own = numbers.gauss(0, 1)
    normal = own if shared is None else (own + shared) / math.sqrt(2)
    return max(1, min(round(math.exp(SIGMA * normal) * median), round(CUT * median)))


def longest(model: Model) -> int:
    """Most tokens of a prompt and its completion."""
    return PROMPTS[1] + CUT * model.new_tokens // 2


def completions(model: Model, batch: int, shape: str, seed: int) -> list[Completion]:
    """The same for every engine. Equal ones fill the rows of the batch once (four times where it is one row)."""
    numbers = random.Random(f"{shape} {batch} {seed}")
    equal = shape == "equal"
    count = max(4, batch if equal else QUEUED * batch)
    prompts = _prompts(numbers, model.vocab_size, equal=equal)
    lengths = (model.new_tokens if equal else lognormal(numbers, model.new_tokens / 2) for _ in range(count))
    found: list[Completion] = []
    for place, num_new in enumerate(lengths):
        prompt = next(prompts) if place % min(GROUP, batch) == 0 else found[-1].prompt_ids
        found.append(Completion(prompt, num_new))
    return found


def _prompts(numbers: random.Random, vocab: int, *, equal: bool) -> Iterator[list[int]]:
    while True:
        length = PROMPT if equal else numbers.randint(*PROMPTS)
        yield [numbers.randrange(3, vocab) for _ in range(length)]
