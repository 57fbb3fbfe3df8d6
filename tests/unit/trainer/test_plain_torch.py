"""Twenty updates of PPO and of SAC on recorded episodes equal a page of plain PyTorch each.

The plain versions use nothing of the rules, the maths or the policies: only torch, numpy, and the same first weights,
order of decisions and noise. They take sums of GAE and of the normaliser in another order, and torch.distributions has
formulas of its own; after twenty updates every weight is within 1e-6, while each tensor has moved by more than 0.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import derive_seed
from tests.unit.trainer.episode_batches import group_of, job_of, spec_of

UPDATES = 20


def network(weights: dict[str, Tensor], prefix: str, activation: type[nn.Module]) -> nn.Sequential:
    """Return two linear layers with the weights whose names begin with ``prefix``."""
    first, last = (weights[f"{prefix}{i}.weight"] for i in (0, 2))
    layers = nn.Sequential(nn.Linear(first.shape[1], len(first)), activation(), nn.Linear(len(first), len(last)))
    layers.load_state_dict({n.removeprefix(prefix): t.clone() for n, t in weights.items() if n.startswith(prefix)})
    return layers


def adamw(params: list[Tensor], rate: float) -> torch.optim.AdamW:
    groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
              {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, fused=True)


def make_step(optimizer: torch.optim.AdamW, params: list[Tensor], loss: Tensor) -> None:
    optimizer.zero_grad()
    for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = gradient
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    optimizer.step()


def read(named: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the observations that the policy reads, concatenated to one row per step."""
    return np.concatenate([named["state"], named["goal"][:, 0].astype(np.float64)], axis=1)


class Normal01:
    """Normaliser with the mean and deviation of all observations in ``seen``."""

    def __init__(self) -> None:
        self.seen = np.zeros((0, 5))

    def __call__(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        known = len(self.seen) > 0
        mean, variance = (self.seen.mean(0), self.seen.var(0)) if known else (0.0, 1.0)
        return torch.from_numpy(np.clip((numbers - mean) / np.sqrt(variance + 1e-8), -10, 10).astype(np.float32))


def plain_ppo(job: EmbodiedJob, weights: dict[str, Tensor], rule: dict[str, Tensor], batches: Any) -> dict[str, Tensor]:
    c: Any = job.algorithm
    actor, critic = network(weights, "layers.", nn.Tanh), network(rule, "value.layers.", nn.Tanh)
    log_std, normal = nn.Parameter(weights["log_std"].clone()), Normal01()
    policy, value = [log_std, *actor.parameters()], list(critic.parameters())
    policy_adam, value_adam = adamw(policy, 1e-2), adamw(value, 1e-2)
    for index, groups in enumerate(batches):
        x = normal(np.concatenate([read(g.observations) for g in groups]))
        last = normal(np.concatenate([read(g.final_observations) for g in groups]))
        actions = torch.from_numpy(np.concatenate([g.actions for g in groups]))
        old = torch.from_numpy(np.concatenate([g.logprobs for g in groups]))
        used = torch.from_numpy(np.concatenate([np.arange(2) < g.valid[:, None] for g in groups]))[..., None]
        old = torch.where(used, old, 0).sum((1, 2))
        with torch.no_grad():
            values, final = critic(x)[:, 0], critic(last)[:, 0]
        advantages, at, episode = np.zeros(len(x)), 0, 0
        for g in groups:  # GAE, backwards through each episode
            for i in range(len(g.returns)):
                n = int(g.cu_seqlens[i + 1] - g.cu_seqlens[i])
                rows = slice(g.cu_seqlens[i], g.cu_seqlens[i + 1])
                following, carried = 0.0 if g.terminated[rows].any() else float(final[episode]), 0.0
                for t in reversed(range(n)):
                    reward = float(g.rewards[g.cu_seqlens[i] + t].sum())
                    delta = reward + c.gamma * following - float(values[at + t])
                    carried = delta + c.gamma * c.lam * carried
                    advantages[at + t], following = carried, float(values[at + t])
                at, episode = at + n, episode + 1
        returns = torch.from_numpy((advantages + values.double().numpy()).astype(np.float32))
        a32 = advantages.astype(np.float32).astype(np.float64)
        a = torch.from_numpy(((a32 - a32.mean()) / np.sqrt(a32.var(ddof=1) + 1e-8)).astype(np.float32))
        for epoch in range(c.epochs):
            order = np.random.default_rng([derive_seed(job.seed, "rule"), index, epoch]).permutation(len(x))
            for part in np.array_split(order, c.minibatches):
                dist = Normal(actor(x[part]).reshape(-1, 2, 2), log_std.exp().reshape(2, 2))
                new = torch.where(used[part], dist.log_prob(actions[part]), 0).sum((1, 2))
                ratio = (new - old[part]).exp()
                clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
                surrogate = torch.minimum(ratio * a[part], clipped * a[part])
                entropy = dist.entropy().sum((1, 2))
                make_step(policy_adam, policy, -(surrogate + c.entropy_coef * entropy).sum() / len(part))
                error = critic(x[part])[:, 0] - returns[part]
                make_step(value_adam, value, (error.square() / 2).sum() / len(part))
        normal.seen = np.concatenate([normal.seen, *(read(g.observations) for g in groups)])
    found = {f"layers.{n}": t for n, t in actor.state_dict().items()} | {"log_std": log_std.detach()}
    return found | {f"value.layers.{n}": t for n, t in critic.state_dict().items()}


def transitions(group: EpisodeGroup) -> list[tuple[Any, ...]]:
    """Return (observation, action before squashing, reward, next observation, True if the task ended) of each step."""
    numbers, final = (read(n).astype(np.float32) for n in (group.observations, group.final_observations))
    rows = []
    for i, end in enumerate(group.cu_seqlens[1:]):
        for t in range(group.cu_seqlens[i], end):
            after = final[i] if t + 1 == end else numbers[t + 1]
            rows.append((numbers[t], group.actions[t], group.rewards[t].sum(), after, bool(group.terminated[t].any())))
    return rows


@torch.no_grad()
def follow(targets: list[nn.Sequential], critics: list[nn.Sequential], tau: float) -> None:
    for critic, target in zip(critics, targets, strict=True):
        for param, slow in zip(critic.parameters(), target.parameters(), strict=True):
            slow.add_(tau * (param - slow))


def plain_sac(job: EmbodiedJob, weights: dict[str, Tensor], rule: dict[str, Tensor], batches: Any) -> dict[str, Tensor]:
    c: Any = job.algorithm
    seed = derive_seed(job.seed, "rule")
    actor, normal = network(weights, "layers.", nn.ReLU), Normal01()
    critics = [network(rule, f"critic.critics.{i}.", nn.ReLU) for i in (0, 1)]
    targets = [network(rule, f"target.critics.{i}.", nn.ReLU) for i in (0, 1)]
    log_alpha = nn.Parameter(rule["temperature.log_alpha"].clone())
    judge, act, heat = [p for q in critics for p in q.parameters()], list(actor.parameters()), [log_alpha]
    adams = [adamw(params, 1e-2) for params in (judge, act, heat)]
    stored: list[tuple[Any, ...]] = []
    inserted = 0

    def sample(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = actor(x).reshape(-1, 2, 2, 2).unbind(1)
        dist = Normal(mean, (-5 + 7 * (torch.tanh(raw) + 1) / 2).exp())
        u = dist.mean + dist.stddev * noise
        logprob = dist.log_prob(u) - 2 * (np.log(2) - u - nn.functional.softplus(-2 * u))
        return torch.tanh(u).flatten(1), logprob.sum((1, 2))

    def least(nets: list[nn.Sequential], x: Tensor, a: Tensor) -> Tensor:
        return torch.minimum(*(net(torch.cat([x, a], 1))[:, 0] for net in nets))

    for index, groups in enumerate(batches):
        for row in (row for g in groups for row in transitions(g)):
            stored[inserted % 64 : inserted % 64 + 1] = [row]
            inserted += 1
        steps = c.steps_per_update if inserted >= c.warmup_transitions else 0
        for number in range(index * c.steps_per_update, index * c.steps_per_update + steps):
            rows = [stored[i] for i in np.random.default_rng([seed, number]).integers(0, len(stored), c.batch_size)]
            noise = np.random.default_rng([seed, number, 1]).standard_normal((2, c.batch_size, 2, 2), np.float32)
            here, there = (torch.from_numpy(each) for each in noise)
            x, y = (normal(np.stack([row[i] for row in rows])) for i in (0, 3))
            a = torch.tanh(torch.from_numpy(np.stack([row[1] for row in rows]))).flatten(1)
            reward, ended = torch.tensor(np.array([row[2] for row in rows])), torch.tensor([row[4] for row in rows])
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                next_a, next_logprob = sample(y, there)
                future = least(targets, y, next_a) - alpha * next_logprob
                goal = reward + c.gamma * torch.where(ended, 0, future)
            errors = [net(torch.cat([x, a], 1))[:, 0] - goal for net in critics]
            make_step(adams[0], judge, (errors[0].square() / 2 + errors[1].square() / 2).sum() / c.batch_size)
            new, logprob = sample(x, here)
            make_step(adams[1], act, (alpha * logprob - least(critics, x, new)).sum() / c.batch_size)
            lack = logprob.detach() - 4.0  # the target is minus the number of dimensions
            make_step(adams[2], heat, (-log_alpha.exp() * lack).sum() / c.batch_size)
            follow(targets, critics, c.tau)
        normal.seen = np.concatenate([normal.seen, *(read(g.observations) for g in groups)])
    found = {f"layers.{n}": t for n, t in actor.state_dict().items()} | {"temperature.log_alpha": log_alpha.detach()}
    for i in (0, 1):
        found |= {f"critic.critics.{i}.{n}": t for n, t in critics[i].state_dict().items()}
        found |= {f"target.critics.{i}.{n}": t for n, t in targets[i].state_dict().items()}
    return found


@pytest.mark.parametrize(
    ("job", "plain"),
    [
        (job_of(), plain_ppo),
        (job_of({"tau": 0.1, "gamma": 0.9, "steps_per_update": 2, "warmup_transitions": 40}, {"type": "squashed"}),
         plain_sac),
    ],
    ids=["ppo", "sac"],
)  # fmt: skip
def test_twenty_updates_equal_plain_torch(job: EmbodiedJob, plain: Any) -> None:
    learner = EmbodiedLearner(job, spec_of())
    start = learner.state()
    batches: list[list[EpisodeGroup]] = []
    for index in range(UPDATES):
        batches.append([group_of(learner.policy, 2 * index + i, lengths=(5, 3)) for i in range(2)])
        learner.update(BatchShard.whole(batches[-1]), update_index=index)
    state = learner.state()
    weights, first = state.models["policy"].weights | state.rule, start.models["policy"].weights | start.rule
    expected = plain(job, start.models["policy"].weights, start.rule, batches)
    trained = [
        name for name in weights if ".optimizer." not in name and not name.startswith(("buffer.", "normaliser."))
    ]
    assert set(trained) == set(expected)
    off = {name: float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()}
    moved = {name: float((weights[name] - first[name]).abs().max()) for name in expected}
    assert max(off.values()) < 1e-6, off
    assert min(moved.values()) > 0.1, moved
