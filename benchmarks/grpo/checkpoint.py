"""The initial model of a workload, as a Hugging Face directory that every system loads.

    python -m grpo.checkpoint short DIRECTORY [--target 0.4]

A character-level Qwen2 with 1.05 million parameters. For ``long`` its weights are random; for ``short`` supervised
training takes it to about ``--target`` sampled accuracy, so that there is something to reinforce. Seeded.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from grpo.task import WORKLOADS
from penstock.services.trainer.learners.learner import Learner
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Demonstration

__all__ = ["create"]

LETTERS = "0123456789+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"
VOCABULARY = 512
BATCH, CHECK_EVERY, MOST_STEPS, CHECKED = 64, 10, 1000, 256


def _config(seed: int) -> JobConfig:
    special = 4  # the tokenizer's own tokens
    fillers = "".join(chr(0x4E00 + i) for i in range(VOCABULARY - special - len(LETTERS)))
    return JobConfig.parse(
        {
            "name": "initial",
            "seed": seed,
            "model": {
                "config": {"arch": "qwen2", "hidden_size": 128, "intermediate_size": 512, "num_layers": 4},
                "tokenizer": "char",
                "characters": LETTERS + fillers,
            },
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "warm_start": {"learning_rate": 1e-3},
            "train": {"max_updates": 1},
        }
    )


def create(directory: Path, *, target: float, seed: int) -> float:
    """Write model and tokenizer; returns the sampled accuracy on one-digit additions. ``target`` 0: random weights."""
    torch.manual_seed(seed)
    learner = Learner(_config(seed))
    rng = random.Random(seed)
    if target:
        learner.warm_start(_batches(learner, rng, target))
    learner.model.save_pretrained(directory)
    learner.tokenizer.save_pretrained(directory)
    return _accuracy(learner, rng)


def _batches(learner: Learner, rng: random.Random, target: float) -> Iterator[list[Demonstration]]:
    for step in range(MOST_STEPS):
        if step % CHECK_EVERY == 0 and _accuracy(learner, rng) >= target:
            return
        yield [_demonstration(learner, *problem) for problem in _problems(rng, BATCH)]
    raise SystemExit(f"accuracy did not reach {target} in {MOST_STEPS} steps")


def _demonstration(learner: Learner, prompt: str, answer: str) -> Demonstration:
    prompt_ids, answer_ids = (learner.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
    return Demonstration(prompt_ids, answer_ids, [1] * len(answer_ids))


def _problems(rng: random.Random, number: int) -> list[tuple[str, str]]:
    pairs = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(number)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


@torch.no_grad()
def _accuracy(learner: Learner, rng: random.Random) -> float:
    problems, tokenizer = _problems(rng, CHECKED), learner.tokenizer
    ids = torch.tensor([tokenizer.encode(p, add_special_tokens=False) for p, _ in problems])
    out = learner.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = [bool(text == answer) for text, (_, answer) in zip(texts, problems, strict=True)]
    return sum(right) / CHECKED


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target = args.target if args.workload == "short" else 0.0
    accuracy = create(args.directory, target=target, seed=args.seed)
    print(f"{args.directory}: sampled accuracy on one-digit additions {accuracy:.3f}")


if __name__ == "__main__":
    main()
