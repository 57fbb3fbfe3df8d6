"""The supervised arm: the trainer's warm start, continued from the checkpoint of version 0 for a given wall time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from calc.curve import Curve
from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.services.rollout.episode import completion_texts
from penstock.services.trainer.checkpoint.state import load_checkpoint
from penstock.services.trainer.learners.learner import Learner
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Demonstration, PromptSource
from penstock.shared.protocol.generation import Sampling
from penstock.shared.protocol.ids import derive_seed

__all__ = ["Evaluator", "continue_supervised"]

ENOUGH_STEPS = 10_000_000


class Evaluator:
    """Greedy exact match of a learner on the held-out prompts, decoded by the engine's core."""

    def __init__(self, config: JobConfig, learner: Learner) -> None:
        source = PromptSource(config.data, learner.tokenizer, config.seed)
        number = min(source.num_eval, config.evaluation.num_prompts)
        self._prompts = [prompt for prompt in map(source.eval, range(number)) if not prompt.too_long]
        self._stop = frozenset([int(learner.tokenizer.eos_token_id)])
        self._decode = lambda ids: str(learner.tokenizer.decode(ids, skip_special_tokens=False))
        self._sampling = Sampling(max_new_tokens=config.sampling.max_new_tokens, temperature=0.0)
        longest = config.data.prompt.max_tokens + config.sampling.max_new_tokens
        self._batch = Batch(
            learner.model, max_running=len(self._prompts), max_length=longest, detokenize=self._decode, version=0
        )
        self._version = 0

    def __call__(self) -> float:
        """Share of the prompts whose completion equals the answer."""
        self._version += 1
        self._batch.adopt(self._version)
        self._batch.admit(
            [Completion(i, 0, p.token_ids, self._sampling, tuple(self._stop), 0) for i, p in enumerate(self._prompts)]
        )
        right = 0
        while self._batch.count:
            for done in self._batch.run(8, lambda: False).finished:
                text = completion_texts([done.sample], self._decode, stop_tokens=self._stop, stop=())[0]
                right += text.strip() == self._prompts[done.completion.request].answer
        return right / len(self._prompts)


def continue_supervised(config: JobConfig, checkpoint: Path, *, rate: float, wall_s: float, points: int) -> Curve:
    """Train on the demonstrations for ``wall_s`` seconds, evaluating ``points`` times, the last time at the end."""
    torch.set_num_threads(config.placement.trainer_threads)
    warm = config.warm_start.model_copy(update={"learning_rate": rate, "schedule": "constant"})
    learner = Learner(config.model_copy(update={"warm_start": warm}))
    learner.load_state(load_checkpoint(checkpoint).state)
    evaluate = Evaluator(config, learner)
    curve = Curve(f"supervised, rate {rate:g}")
    curve.add(0.0, 0, evaluate())
    source = PromptSource(
        config.warm_start_data, learner.tokenizer, config.seed, demonstration=warm.demonstration
    )  # fmt: skip
    batches = source.warm_start_batches(warm.batch_size, ENOUGH_STEPS, derive_seed(config.seed, "continued"))
    clock = _Clock(wall_s)

    def on_step(step: int, loss: float) -> None:
        if clock.seconds >= len(curve.values) * wall_s / points or clock.over:
            clock.stop()
            curve.add(clock.seconds, step, evaluate())
            clock.go()

    learner.warm_start(clock.limit(batches), on_step)
    return curve


class _Clock:
    """Wall seconds of training; stands still while something is evaluated."""

    def __init__(self, wall_s: float) -> None:
        self._wall_s, self._before, self._since = wall_s, 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since else 0.0)

    @property
    def over(self) -> bool:
        return self.seconds >= self._wall_s

    def stop(self) -> None:
        self._before, self._since = self.seconds, 0.0

    def go(self) -> None:
        self._since = time.perf_counter()

    def limit(self, batches: Iterator[list[Demonstration]]) -> Iterator[list[Demonstration]]:
        """Batches until the time is over."""
        for batch in batches:
            if self.over:
                return
            yield batch
