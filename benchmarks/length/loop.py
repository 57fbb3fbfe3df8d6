"""A job's sampler, scorer and update rule in turn, in one process: what its trainer does to the length of answers.

Shape legend: B = completions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.services.rollout.episode import build_group, completion_texts
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Prompt, PromptSource
from penstock.shared.protocol.generation import Sample, Sampling
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import ScoreReply
from penstock.shared.protocol.trajectory import Group

__all__ = ["Lengths", "Loop"]

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Lengths:
    """Completions of one version. Lengths are in tokens, the end counted; a mean over no completion is None."""

    right: float
    """Share that is right."""
    wrong_length: float | None
    """Of those that are wrong."""
    astray: float | None
    """Of what stands after the last token that still was right, in those that are wrong."""
    truncated: float
    """Share cut off by the limit."""


class Loop:
    """Trains one job with a token per character; rewards are exact matches, batches are sampled by the newest weights.

    Args:
        config: the job. Its scorers are not asked.
        version_0: file of the weights after the warm start; made if it is not there.
        cut_off_fails: completions that were cut off leave their group, as where a scorer raises an error on them;
            a group that is too small then is not trained on.
    """

    def __init__(self, config: JobConfig, version_0: Path, *, cut_off_fails: bool = False) -> None:
        self._config = config
        self._cut_off_fails = cut_off_fails
        self._learner = Learner(config)
        self._tokenizer = self._learner.tokenizer
        self._eos = int(self._tokenizer.eos_token_id)
        self._prompts = PromptSource(config.data, self._tokenizer, config.seed)
        self._load(version_0)
        max_length = config.data.prompt.max_tokens + config.sampling.max_new_tokens
        self._batch = Batch(
            self._learner.model, max_running=config.placement.max_running, max_length=max_length,
            detokenize=self._decode, version=0,
        )  # fmt: skip
        self._updates = 0

    def _load(self, version_0: Path) -> None:
        if not version_0.exists():
            warm = self._config.warm_start
            data = self._config.data.model_copy(update={"train": warm.data or self._config.data.train})
            source = PromptSource(data, self._tokenizer, self._config.seed)
            self._learner.warm_start(source.warm_start_batches(warm.batch_size, warm.steps, self._config.seed))
            version_0.parent.mkdir(parents=True, exist_ok=True)
            own = version_0.with_suffix(f".{os.getpid()}")  # another arm of the same seed may be at it, too
            torch.save(self._learner.model.state_dict(), own)
            own.replace(version_0)
        self._learner.model.load_state_dict(torch.load(version_0))

    def step(self) -> Lengths:
        """One update; returns what it was trained on."""
        size = self._config.algorithm.group_size
        num_groups = self._config.groups_per_batch
        prompts = [self._prompts.train(self._updates * num_groups + i) for i in range(num_groups)]
        samples = self._sample(prompts, size, seed=self._updates + 1)
        rewards_B, lengths = self._judge(prompts, samples, size)
        if groups := self._groups(prompts, samples, rewards_B):
            self._learner.update(BatchShard.whole(groups), update_index=self._updates)
        self._updates += 1
        self._batch.adopt(self._updates)
        return lengths

    def held_out(self, num_prompts: int, each: int) -> Lengths:
        """The present policy on held-out prompts, always with the same random numbers."""
        prompts = [self._prompts.eval(i) for i in range(num_prompts)]
        return self._judge(prompts, self._sample(prompts, each, seed=0), each)[1]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _sample(self, prompts: Sequence[Prompt], each: int, *, seed: int) -> list[Sample]:
        config, first = self._config.sampling, (self._config.seed << 40) + (seed << 20)
        sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
        completions = [
            Completion(number, index, prompt.token_ids, sampling, (self._eos,), first + number * each + index)
            for number, prompt in enumerate(prompts)
            for index in range(each)
        ]
        finished, limit = [], self._config.placement.max_running
        for start in range(0, len(completions), limit):
            self._batch.admit(completions[start : start + limit])
            while self._batch.count:
                finished += self._batch.run(8, lambda: False).finished
        finished.sort(key=lambda f: (f.completion.request, f.completion.index))
        return [f.sample for f in finished]

    def _texts(self, samples: Sequence[Sample]) -> list[str]:
        return completion_texts(samples, self._decode, stop_tokens=frozenset([self._eos]), stop=())

    def _judge(self, prompts: Sequence[Prompt], samples: Sequence[Sample], each: int) -> tuple[Floats, Lengths]:
        """Rewards [B], and what there is to say about the completions."""
        answers = [prompt.answer or "" for prompt in prompts for _ in range(each)]
        texts = self._texts(samples)
        rewards_B = np.array(list(map(eq, texts, answers)), np.float32)
        lengths_B = np.array([len(sample.token_ids) for sample in samples])
        agree_B = np.array([sum(takewhile(bool, map(eq, *pair))) for pair in zip(texts, answers, strict=True)])
        wrong_B = rewards_B == 0
        return rewards_B, Lengths(
            right=float(rewards_B.mean()),
            wrong_length=_mean(lengths_B[wrong_B]),
            astray=_mean((lengths_B - agree_B)[wrong_B]),
            truncated=float(np.mean([sample.finish == "length" for sample in samples])),
        )

    def _groups(self, prompts: Sequence[Prompt], samples: Sequence[Sample], rewards_B: Floats) -> list[Group]:
        size, groups = self._config.algorithm.group_size, []
        failed_B = np.array([self._cut_off_fails and sample.finish == "length" for sample in samples])
        for number, prompt in enumerate(prompts):
            own = slice(number * size, (number + 1) * size)
            if size - failed_B[own].sum() < self._config.algorithm.smallest_group:
                continue
            group = build_group(
                job="loop", draw=Draw(number), epoch=0, worker="", prompt=prompt, samples=samples[own],
                texts=self._texts(samples[own]), temperature=self._config.sampling.temperature, num_greedy=0,
                seconds=0.0,
            )  # fmt: skip
            groups.append(
                group.scored(
                    ScoreReply(rewards=rewards_B[own].tolist(), failed=failed_B[own].tolist(), parts={}, errors=[])
                )
            )
        return groups


def _mean(values: NDArray[np.int64]) -> float | None:
    return float(values.mean()) if len(values) else None
