"""PPO on Meta-World in one process without Penstock: what the job of ``embodied_training.py`` is measured against.

    python benchmarks/reach/plain.py --task reach-v3 --seed 1 --updates 40 --out result.json

The same batch, networks, normalisation, loss and optimizer as examples/metaworld-reach-ppo.yaml: 16 episodes of 100
steps, then 8 passes of 8 minibatches. Writes the success rate of each update, the seconds until its end, and the
seconds that its rollout took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import metaworld
import numpy as np
import torch
from torch import Tensor, nn

EPISODES, HORIZON, GAMMA, LAM, PASSES, MINIBATCHES, CLIP, MAX_KL = 16, 100, 0.9, 0.9, 8, 8, 0.2, 0.03


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64 with tanh, orthogonal weights."""
    sizes, layers = [inputs, 64, 64, outputs], list[nn.Module]()
    for place, (a, b) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, gain if place == 2 else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if place == 2 else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


class Normaliser:
    """Mean and deviation of every observation that was trained on."""

    def __init__(self, size: int) -> None:
        self.count, self.total, self.squares = 0, np.zeros(size), np.zeros(size)

    def __call__(self, observations: np.ndarray) -> Tensor:
        if not self.count:
            return torch.from_numpy(observations.clip(-10, 10).astype(np.float32))
        mean = self.total / self.count
        deviation = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0) + 1e-8)
        return torch.from_numpy(((observations - mean) / deviation).clip(-10, 10).astype(np.float32))

    def add(self, observations: np.ndarray) -> None:
        self.count += len(observations)
        self.total += observations.sum(0)
        self.squares += (observations**2).sum(0)


def log_prob(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Of whole actions under a Gaussian, [N]."""
    return (-(((actions - mean) / log_std.exp()) ** 2) / 2 - log_std - 0.5 * math.log(2 * math.pi)).sum(1)


def advantages(rewards: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GAE of whole episodes that a limit cut off; rewards [T, N], values [T + 1, N]."""
    found, last = np.zeros_like(rewards), np.zeros(rewards.shape[1], np.float32)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + GAMMA * values[t + 1] - values[t]
        last = delta + GAMMA * LAM * last
        found[t] = last
    return found, found + values[:-1]


def train(task: str, seed: int, updates: int) -> dict[str, Any]:
    """Success rate of each update, seconds until its end, and seconds that its rollout took."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    benchmark = metaworld.MT1(task, seed=0)
    envs = [benchmark.train_classes[task]() for _ in range(EPISODES)]
    size, actions = envs[0].observation_space.shape[0], envs[0].action_space.shape[0]
    policy, value = network(size, actions, 0.01), network(size, 1, 1.0)
    log_std = nn.Parameter(torch.full((actions,), -0.5))
    of_policy = torch.optim.AdamW([*policy.parameters(), log_std], lr=1e-3, eps=1e-5, weight_decay=0.0)
    of_value = torch.optim.AdamW(value.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    normalise, drawn, rates, seconds = Normaliser(size), 0, list[float](), list[float]()
    rollout: list[float] = []
    began = time.perf_counter()
    for _ in range(updates):
        started, states = time.perf_counter(), []
        for env in envs:
            env.set_task(benchmark.train_tasks[drawn % 50])
            states.append(env.reset()[0])
            drawn += 1
        seen, acted, logprobs, rewards = [], [], [], np.zeros((HORIZON, EPISODES), np.float32)
        solved = np.zeros(EPISODES, bool)
        for t in range(HORIZON):
            observations = np.stack(states)
            with torch.no_grad():
                mean = policy(normalise(observations))
                action = mean + log_std.exp() * torch.randn_like(mean)
                logprobs.append(log_prob(mean, log_std, action))
            seen.append(observations)
            acted.append(action)
            for place, env in enumerate(envs):
                states[place], reward, _, _, info = env.step(np.clip(action[place].numpy(), -1, 1))
                rewards[t, place] = reward
                solved[place] |= bool(info["success"])
        rollout.append(time.perf_counter() - started)
        batch = np.concatenate(seen)
        features = normalise(batch)
        with torch.no_grad():
            every = torch.cat([features, normalise(np.stack(states))])
            values = value(every)[:, 0].numpy().reshape(HORIZON + 1, EPISODES)
        advantage, target = advantages(rewards, values)
        learnt = torch.from_numpy(advantage.reshape(-1)), torch.from_numpy(target.reshape(-1))
        columns = [features, torch.cat(acted), torch.cat(logprobs), *learnt]
        step(policy, value, log_std, (of_policy, of_value), columns)
        normalise.add(batch)
        rates.append(float(solved.mean()))
        seconds.append(time.perf_counter() - began)
    return {"success": rates, "seconds": seconds, "rollout": rollout}


def step(
    policy: nn.Module, value: nn.Module, log_std: nn.Parameter, optimizers: tuple[Any, Any], columns: list[Tensor]
) -> None:
    """The passes of one update; ``columns``: features, actions, their log-probs, advantages and value targets, [N]."""
    columns[3] = (columns[3] - columns[3].mean()) / (columns[3].std() + 1e-8)
    for _ in range(PASSES):
        kl = 0.0
        for rows in torch.randperm(len(columns[0])).chunk(MINIBATCHES):
            features, actions, behaviour, advantage, target = (column[rows] for column in columns)
            difference = log_prob(policy(features), log_std, actions) - behaviour
            ratio = difference.exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            wrong = ((value(features)[:, 0] - target) ** 2).mean() / 2
            for optimizer, each, parameters in (
                (optimizers[0], loss, [*policy.parameters(), log_std]), (optimizers[1], wrong, [*value.parameters()]),
            ):  # fmt: skip
                optimizer.zero_grad()
                each.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
            kl += float((ratio - 1 - difference).detach().sum())
        if kl / len(columns[0]) > MAX_KL:
            return


def main() -> None:
    """Train and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="reach-v3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(train(args.task, args.seed, args.updates)))


if __name__ == "__main__":
    main()
