"""The task in one plain process: Penstock's decoder and update rule in turn, without services, bus or overlap.

    python -m grpo.bare_run WORKLOAD MODEL ROWS RESULT --steps 100 [--goal 0.9] [--seed 0] [--threads 2] [--max-lag 1]

Beside TRL it shows what the kernels give, beside Penstock what the services cost and what overlap gives: without lag it
draws with the same random numbers. With ``--max-lag 1`` each batch is sampled one update ahead: what staleness does to
learning, without services.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo import task
from penstock.services.rollout.engines.completion import Completion, Finished
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.services.rollout.episode import build_group, completion_texts
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Prompt
from penstock.shared.protocol.generation import Sampling
from penstock.shared.protocol.ids import Draw, derive_seed
from penstock.shared.protocol.messages import ScoreReply
from penstock.shared.protocol.trajectory import Group

START = time.time()


class Loop:
    """Generate 16 groups, score them, update; again. With ``lag`` 1 each batch is one version old."""

    def __init__(
        self, config: JobConfig, workload: task.Workload, rows: list[dict[str, str]], *, seed: int, lag: int
    ) -> None:
        self._learner = Learner(config)
        self._tokenizer = self._learner.tokenizer
        self._stop = () if workload.min_new_tokens else (int(self._tokenizer.eos_token_id),)
        self._batch = Batch(
            self._learner.model, max_running=task.BATCH, max_length=128, detokenize=self._decode, version=0
        )
        self._sampling = Sampling(max_new_tokens=workload.max_new_tokens)
        self._reward = getattr(task, workload.reward)
        self._rows, self._seed, self._lag = rows, seed, lag
        self._updates, self._drawn = 0, 0
        self._ahead: deque[list[Group]] = deque()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def step(self) -> tuple[float, float]:
        """One update; returns mean reward and number of tokens."""
        while len(self._ahead) <= self._lag:
            self._ahead.append(self._draw())
        groups = self._ahead.popleft()
        self._learner.update(BatchShard.whole(groups), update_index=self._updates)
        self._updates += 1
        self._batch.adopt(self._updates)
        rewards = [float(group.rewards.mean()) for group in groups]
        return sum(rewards) / len(rewards), float(sum(len(group.token_ids) for group in groups))

    def _draw(self) -> list[Group]:
        start = self._drawn * task.PROMPTS
        rows = [self._rows[(start + i) % len(self._rows)] for i in range(task.PROMPTS)]
        prompts = [self._prompt(row) for row in rows]
        groups = list(self._groups(prompts, self._generate(prompts)))
        self._drawn += 1
        return groups

    def _prompt(self, row: dict[str, str]) -> Prompt:
        ids = self._tokenizer.encode(row["prompt"], add_special_tokens=False)
        return Prompt(row["prompt"], ids, row["answer"], dict(row), too_long=False)

    def _generate(self, prompts: list[Prompt]) -> list[Finished]:
        first = self._drawn * task.PROMPTS
        seeds = [derive_seed(self._seed, "draw", first + group, 0) for group in range(task.PROMPTS)]
        self._batch.admit(
            [
                Completion(group, member, prompts[group].token_ids, self._sampling, self._stop, seeds[group] + member)
                for group in range(task.PROMPTS)
                for member in range(task.GROUP)
            ]
        )
        finished: list[Finished] = []
        while self._batch.count:
            finished += self._batch.run(8, lambda: False).finished
        return sorted(finished, key=lambda f: (f.completion.request, f.completion.index))

    def _groups(self, prompts: list[Prompt], finished: list[Finished]) -> Iterator[Group]:
        for i, prompt in enumerate(prompts):
            samples = [f.sample for f in finished[i * task.GROUP : (i + 1) * task.GROUP]]
            texts = completion_texts(samples, self._decode, stop_tokens=frozenset(self._stop), stop=())
            group = build_group(
                job="bare", draw=Draw(i), epoch=0, worker="", prompt=prompt, samples=samples, texts=texts,
                temperature=1.0, num_greedy=0, seconds=0.0,
            )  # fmt: skip
            rewards = [self._reward(prompt.text, text, prompt.answer, prompt.row) for text in texts]
            yield group.scored(ScoreReply(rewards=rewards, failed=[False] * task.GROUP, parts={}, errors=[]))


def job(workload: task.Workload, model: str, rows: Path, *, seed: int, updates: int, **sections: Any) -> dict[str, Any]:
    """The job of the task: what Penstock is asked to do, and where the bare loop's learner finds its settings."""
    score = (
        {"type": "exact"}
        if workload.reward == "exact_reward"
        else {"type": "function", "path": f"grpo.task:{workload.reward}"}
    )
    spec: dict[str, Any] = {
        "name": f"vs-trl-{workload.name}",
        "seed": seed,
        "model": {"path": model},
        "data": {"train": {"type": "file", "path": str(rows)}, "shuffle": False, "prompt": {"max_tokens": 8}},
        "reward": {"scorers": [score]},
        "algorithm": {"type": "grpo", "group_size": task.GROUP},
        "sampling": {"max_new_tokens": workload.max_new_tokens, "ignore_eos": workload.min_new_tokens > 0},
        "optimizer": {"learning_rate": task.LEARNING_RATE},
        "train": {"batch_size": task.BATCH, "max_updates": updates},
        "checkpoint": {"every": 1_000_000},  # the others write none either
        "evaluation": {"at_start": False, "at_end": False},
    }
    for name, section in sections.items():
        spec[name] = {**spec.get(name, {}), **section}
    return spec


def main() -> None:
    """Train and write the result."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    workload = task.WORKLOADS[args.workload]
    config = JobConfig.parse(job(workload, args.model, args.rows, seed=args.seed, updates=args.steps))
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    loop, steps, began = Loop(config, workload, rows, seed=args.seed, lag=args.max_lag), [], time.time()
    for _ in range(args.steps):
        reward, tokens = loop.step()
        steps.append(task.Step(time.time(), reward, tokens, time.process_time()))
        if args.goal and task.reached([step.reward for step in steps[-10:]], args.goal):
            break
    task.write_run(args.result, task.Run("bare", began, began - START, steps, {"threads": torch.get_num_threads()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=task.WORKLOADS)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--goal", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--max-lag", type=int, default=0, choices=(0, 1))
    return parser.parse_args()


if __name__ == "__main__":
    main()
