"""The workloads and their batches, free of any framework: TRL's environment imports this file too.

* ``ragged``: prompts of 16 to 64 tokens, completions of 8 to 256, a Qwen3-shaped model of 7 million parameters.
* ``short``: an addition and its answer, 4 and 2 to 3 tokens, a model of one million: what a step costs beside the
  arithmetic.
* ``large``: 0.5 billion parameters and up to 2048 tokens, for a GPU.

Tokens and rewards are random: time does not depend on them. No two rewards of a group are equal, so every completion
has an advantage and no system can leave one out.

Shape legend: B = completions, G = groups, P = longest prompt, C = longest completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH_FILE", "CLIP", "FORMS", "LEARNING_RATE", "MAX_GRAD_NORM", "WORKLOADS", "Batch", "Workload"]

LEARNING_RATE = 1e-6
"""Small: the policy stays near the log-probs in the batch however often it is trained on it."""
CLIP = 0.2
MAX_GRAD_NORM = 1.0
FIRST_TOKEN = 4
"""Ids below it are the tokenizer's own."""
BATCH_FILE = "batch.npz"
FORMS = ("padded", "sorted", "flat", "decoder")
"""Of the bare loop: see bare_step.py."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Architecture (keys of ``model.config``), batch, and how it is measured.

    ``rows_per_pass`` bounds what TRL and the padded form put through the model at once; ``steps`` are made in each
    turn; ``forms`` of the bare loop are tried.
    """

    name: str
    architecture: dict[str, Any]
    groups: int
    group_size: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    rows_per_pass: int
    steps: int
    forms: tuple[str, ...] = FORMS

    @property
    def completions(self) -> int:
        """B."""
        return self.groups * self.group_size


WORKLOADS = {
    "ragged": Workload(
        "ragged",
        {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 6, "vocab_size": 4096},
        groups=2, group_size=8, prompt_tokens=(16, 64), completion_tokens=(8, 256), rows_per_pass=16, steps=1,
    ),
    "short": Workload(
        "short",
        {"hidden_size": 128, "intermediate_size": 512, "num_layers": 4, "vocab_size": 512},
        groups=16, group_size=8, prompt_tokens=(4, 4), completion_tokens=(2, 3), rows_per_pass=128, steps=20,
    ),
    "large": Workload(
        "large",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8,
            "vocab_size": 151936, "max_position_embeddings": 4096,
        },
        groups=8, group_size=8, prompt_tokens=(64, 256), completion_tokens=(64, 2048), rows_per_pass=8, steps=5,
        forms=("sorted", "decoder"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Completions and what is known of them, group after group.

    Attributes:
        prompts: G arrays of token ids; ``completions``: B of them.
        logprobs: B arrays, of the policy before its first step.
        rewards_B: float32.
    """

    prompts: list[Ints]
    completions: list[Ints]
    logprobs: list[NDArray[np.float32]]
    rewards_B: NDArray[np.float32]

    @classmethod
    def draw(cls, workload: Workload, seed: int) -> Batch:
        """At random, without log-probs yet."""
        rng = np.random.default_rng(seed)

        def ids(lengths: tuple[int, int]) -> Ints:
            return rng.integers(FIRST_TOKEN, workload.architecture["vocab_size"], rng.integers(*lengths, endpoint=True))

        prompts = [ids(workload.prompt_tokens) for _ in range(workload.groups)]
        completions = [ids(workload.completion_tokens) for _ in range(workload.completions)]
        rewards_B = rng.standard_normal(workload.completions).astype(np.float32)
        return cls(prompts, completions, [np.zeros(len(row), np.float32) for row in completions], rewards_B)

    @property
    def group_size(self) -> int:
        """Completions of each prompt."""
        return len(self.completions) // len(self.prompts)

    @property
    def trained(self) -> int:
        """Tokens that get a gradient: those of the completions."""
        return sum(len(row) for row in self.completions)

    def lengths(self) -> list[int]:
        """Positions that each sequence needs: the last token scores nothing."""
        return [len(self.prompts[i // self.group_size]) + len(row) - 1 for i, row in enumerate(self.completions)]

    def advantages(self) -> NDArray[np.float32]:
        """``(r - mean) / std`` with the unbiased deviation of the group, float32 [B]."""
        rewards = self.rewards_B.astype(np.float64).reshape(len(self.prompts), -1)
        centred = rewards - rewards.mean(1, keepdims=True)
        advantages: NDArray[np.float32] = (centred / rewards.std(1, ddof=1, keepdims=True)).ravel().astype(np.float32)
        return advantages

    def padded(self) -> dict[str, NDArray[Any]]:
        """As TRL has them: prompts padded at the left [B, P], completions and log-probs at the right [B, C], masks."""
        prompts = [self.prompts[i // self.group_size] for i in range(len(self.completions))]
        return {
            "prompt_ids": _block(prompts, np.int64, left=True),
            "prompt_mask": _block([np.ones(len(row)) for row in prompts], np.int64, left=True),
            "completion_ids": _block(self.completions, np.int64),
            "completion_mask": _block([np.ones(len(row)) for row in self.completions], np.int64),
            "old_per_token_logps": _block(self.logprobs, np.float32),
        }

    def write(self, path: Path) -> None:
        """Save as .npz."""
        sizes = {"prompt_lengths": [len(i) for i in self.prompts], "lengths": [len(i) for i in self.completions]}
        arrays: dict[str, Any] = {name: np.array(values) for name, values in sizes.items()}
        for name in ("prompts", "completions", "logprobs"):
            arrays[name] = np.concatenate(getattr(self, name))
        np.savez(path, **arrays, rewards=self.rewards_B)

    @classmethod
    def read(cls, path: Path) -> Batch:
        """Inverse of ``write``."""
        with np.load(path) as data:
            prompt_ends, ends = np.cumsum(data["prompt_lengths"])[:-1], np.cumsum(data["lengths"])[:-1]
            return cls(
                np.split(data["prompts"], prompt_ends),
                np.split(data["completions"], ends),
                np.split(data["logprobs"], ends),
                data["rewards"],
            )


def _block(rows: list[Any], dtype: Any, *, left: bool = False) -> NDArray[Any]:
    block = np.zeros((len(rows), max(len(row) for row in rows)), dtype)
    for place, row in zip(block, rows, strict=True):
        place[len(place) - len(row) if left else 0 :][: len(row)] = row
    return block
