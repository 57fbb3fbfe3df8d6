"""Five services, a log and a bus learn from a simulator what a page of plain PyTorch and Gymnasium learns.

The loops below play their own episodes. They share with the services only the first weights and the random numbers: the
noise of actions, the order of decisions, the draws from the buffer. The ledger gives them the draws of each batch and
their order.

With ``max_lag: 0`` services run in lockstep: each batch is played with the weights after the update before. SAC also
runs with workers that play ahead. They may begin an episode before the newest update and end it with later weights, and
how many steps each version decides is a matter of time. The SAC loop takes these versions from the groups, and computes
their weights and everything else itself; nothing of the groups enters the PPO loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

from penstock.services.env.simulators import describe_simulator
from penstock.services.rollout.embodied.noise import NoiseSource
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.protocol.embodied.environment import OpenEnv
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Checkpointed
from penstock.shared.protocol.ids import Draw, derive_seed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

UPDATES = 20
BOUND = 1e-4
"""Largest difference between services and loop, of numbers in episodes and of the last weights."""
FAST = {"learning_rate": 3e-3, "eps": 1e-5, "max_grad_norm": 0.5}
JOB: dict[str, Any] = {
    "kind": "embodied", "name": "plain", "seed": 3, "evaluation": {"episodes": 0}, "limits": {"byte_budget": 16 << 20},
    "train": {"batch_size": 4, "max_updates": UPDATES + 1, "max_lag": 0, "draw_timeout_s": 30},
}  # fmt: skip
PPO = JOB | {
    "environment": {"task": "CartPole-v1", "horizon": 40, "num_envs": 2, "sessions": 2, "bytes_per_step": 256},
    "policy": {"type": "categorical", "hidden_sizes": [16]},
    "algorithm": {
        "type": "ppo", "epochs": 2, "minibatches": 3, "value_hidden_sizes": [16], "policy": FAST, "value": FAST,
    },
}  # fmt: skip
CHUNKS = PPO | {
    "environment": {
        "task": "Pendulum-v1", "horizon": 25, "action_chunk": 2, "num_envs": 2, "sessions": 2, "bytes_per_step": 256,
    },
    "policy": {"type": "gaussian", "hidden_sizes": [16]},
}  # fmt: skip
"""Two actions per decision; the horizon cuts the last decision of an episode."""
SAC = JOB | {
    "environment": {"task": "Pendulum-v1", "horizon": 25, "num_envs": 2, "sessions": 2, "bytes_per_step": 256},
    "policy": {"type": "squashed", "hidden_sizes": [16]},
    "algorithm": {
        "type": "sac", "critic_hidden_sizes": [16], "batch_size": 32, "warmup_transitions": 150, "steps_per_update": 5,
        "tau": 0.05, "buffer": {"capacity": 800}, **dict.fromkeys(("actor", "critic", "temperature"), FAST),
    },
}  # fmt: skip
SAC_AHEAD = SAC | {"train": JOB["train"] | {"max_lag": 2}}
"""Workers play ahead of the trainer; a replay buffer takes episodes of any age."""


class Episode(NamedTuple):
    """Episode of T decisions on C actions each: T + 1 observations, and of each decision its drawn actions and their
    log-probs, the number of executed actions and the sum of their rewards."""

    observations: np.ndarray[Any, Any]
    actions: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    executed: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    terminated: bool


Act = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Any]]
"""From ``(decision, observation [1, O], noise [C])`` to drawn actions [C], log-probs [C], and C inputs of Gymnasium."""


def play(env: Any, job: EmbodiedJob, draw: Draw, kind: Any, act: Act) -> Episode:
    """Play one episode whose decisions ``act`` makes; return it."""
    seen = [env.reset(seed=job.environment.reset_id(draw.ordinal))[0]]
    noise = NoiseSource(job.seed, draw, 0, kind=kind, shape=(job.environment.action_chunk, 1))
    rows, left, done = [], job.environment.horizon, False
    while left and not done:
        with torch.no_grad():
            drawn, logprobs, inputs = act(len(rows), torch.tensor(seen[-1])[None], torch.tensor(noise.next(1))[0, :, 0])
        paid: list[np.float32] = []
        while len(paid) < min(len(inputs), left) and not done:
            observation, reward, done, _, _ = env.step(inputs[len(paid)])
            paid.append(np.float32(reward))
        left -= len(paid)
        seen.append(observation)
        rows.append((drawn.numpy(), logprobs.numpy(), len(paid), np.sum(paid)))
    return Episode(np.stack(seen), *map(np.stack, zip(*rows, strict=True)), done)


class Normal01:
    """Scales inputs by mean and deviation of all observations so far."""

    def __init__(self, size: int) -> None:
        self.seen = np.zeros((0, size))

    def __call__(self, numbers: Any) -> Tensor:
        known = len(self.seen) > 0
        mean, variance = (self.seen.mean(0), self.seen.var(0)) if known else (0.0, 1.0)
        scaled = (np.asarray(numbers, np.float64) - mean) / np.sqrt(variance + 1e-8)
        return torch.from_numpy(np.clip(scaled, -10, 10).astype(np.float32))

    def see(self, episodes: list[Episode]) -> None:
        self.seen = np.concatenate([self.seen, *(one.observations[:-1] for one in episodes)])


def network(weights: dict[str, Tensor], prefix: str, activation: type[nn.Module]) -> nn.Sequential:
    """Return two linear layers with the weights whose names begin with ``prefix``."""
    first, last = (weights[f"{prefix}{i}.weight"] for i in (0, 2))
    layers = nn.Sequential(nn.Linear(first.shape[1], len(first)), activation(), nn.Linear(len(first), len(last)))
    layers.load_state_dict({n.removeprefix(prefix): t.clone() for n, t in weights.items() if n.startswith(prefix)})
    return layers


def named(prefix: str, layers: nn.Sequential) -> dict[str, Tensor]:
    """Return the weights of ``layers``, whose names begin with ``prefix``."""
    return {f"{prefix}{name}": weight for name, weight in layers.state_dict().items()}


class Adam:
    """AdamW with clipped gradients; a step computes gradients only of its own parameters."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.optimizer = torch.optim.AdamW(self.params, lr=FAST["learning_rate"], eps=FAST["eps"], weight_decay=0.0)

    def step(self, loss: Tensor) -> None:
        for param, gradient in zip(self.params, torch.autograd.grad(loss, self.params), strict=True):
            param.grad = gradient
        nn.utils.clip_grad_norm_(self.params, FAST["max_grad_norm"])
        self.optimizer.step()


class PlainPPO:
    """Plain PPO (arXiv 1707.06347) with GAE on whole episodes of CartPole or Pendulum."""

    def __init__(self, job: EmbodiedJob, weights: dict[str, Tensor], rule: dict[str, Tensor]) -> None:
        self.job, self.normal = job, Normal01(len(weights["normaliser.mean_O"]))
        self.actor, self.critic = network(weights, "layers.", nn.Tanh), network(rule, "value.layers.", nn.Tanh)
        self.spread = {name: nn.Parameter(weights[name].clone()) for name in weights if name == "log_std"}
        self.policy = Adam([*self.actor.parameters(), *self.spread.values()])
        self.value = Adam(self.critic.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Return all weights under their names in a checkpoint."""
        return (
            named("layers.", self.actor)
            | named("value.layers.", self.critic)
            | {name: weight.detach() for name, weight in self.spread.items()}
        )

    def decide(self, x: Tensor) -> Distribution:
        """Return the distribution of the C actions of each decision, [N, C]."""
        found = self.actor(x)
        if self.spread:
            return Normal(found, self.spread["log_std"].exp())
        return Categorical(logits=found[:, None])

    def play(self, env: Any, group: EpisodeGroup, update: int) -> Episode:
        assert group.spans[:, 1].tolist() == [update], "strictly on-policy"

        def act(_: int, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Any]:
            dist = self.decide(self.normal(seen))
            if isinstance(dist, Normal):
                chosen = dist.mean + dist.stddev * noise
                return chosen[0], dist.log_prob(chosen)[0], chosen[0, :, None].clamp(-2, 2).numpy()
            ends = dist.logits.double().softmax(-1).cumsum(-1)
            chosen = (ends <= noise.double()[:, None]).sum(-1)
            return chosen[0], dist.log_prob(chosen)[0], chosen[0].tolist()

        return play(env, self.job, group.draw, "normal" if self.spread else "uniform", act)

    def learn(self, episodes: list[Episode], update: int) -> None:
        c: Any = self.job.algorithm
        x = self.normal(np.concatenate([one.observations[:-1] for one in episodes]))
        actions, old, count = (
            torch.from_numpy(np.concatenate([getattr(one, name) for one in episodes]))
            for name in ("actions", "logprobs", "executed")
        )
        executed = torch.arange(actions.shape[1]) < count[:, None]
        advantages, returns = (torch.cat(parts) for parts in zip(*map(self.gae, episodes), strict=True))
        advantages = (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt()
        for epoch in range(c.epochs):
            order = np.random.default_rng([derive_seed(self.job.seed, "rule"), update, epoch]).permutation(len(x))
            for rows in np.array_split(order, c.minibatches):
                change = self.decide(x[rows]).log_prob(actions[rows]) - old[rows]
                ratio = change.where(executed[rows], 0).sum(1).exp()
                clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
                self.policy.step(-torch.minimum(ratio * advantages[rows], clipped * advantages[rows]).mean())
                self.value.step((self.critic(x[rows])[:, 0] - returns[rows]).square().mean() / 2)
        self.normal.see(episodes)

    @torch.no_grad()
    def gae(self, episode: Episode) -> tuple[Tensor, Tensor]:
        c: Any = self.job.algorithm
        values = self.critic(self.normal(episode.observations))[:, 0].tolist()
        if episode.terminated:
            values[-1] = 0.0
        found, carried = [], 0.0
        for t in reversed(range(len(episode.rewards))):
            carried = episode.rewards[t] + c.gamma * values[t + 1] - values[t] + c.gamma * c.lam * carried
            found.insert(0, carried)
        return torch.tensor(found).float(), torch.tensor(np.add(found, values[:-1])).float()


class PlainSAC:
    """Plain soft actor-critic (arXiv 1812.05905) on Pendulum; the group names the version that decides on each step."""

    def __init__(self, job: EmbodiedJob, weights: dict[str, Tensor], rule: dict[str, Tensor]) -> None:
        self.job, self.normal = job, Normal01(3)
        self.actor = network(weights, "layers.", nn.ReLU)
        self.critics = [network(rule, f"critic.critics.{i}.", nn.ReLU) for i in (0, 1)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(rule["temperature.log_alpha"].clone())
        self.judges, self.acts = Adam(p for q in self.critics for p in q.parameters()), Adam(self.actor.parameters())
        self.heat = Adam([self.log_alpha])
        self.data: list[tuple[Any, ...]] = []
        self.inserted = 0
        self.versions = [(copy.deepcopy(self.actor), copy.deepcopy(self.normal))]

    def weights(self) -> dict[str, Tensor]:
        """Return all weights under their names in a checkpoint."""
        judges = [named(f"critic.critics.{i}.", one) for i, one in enumerate(self.critics)]
        slow = [named(f"target.critics.{i}.", one) for i, one in enumerate(self.targets)]
        found = {name: weight for each in (*judges, *slow) for name, weight in each.items()}
        return found | named("layers.", self.actor) | {"temperature.log_alpha": self.log_alpha.detach()}

    def play(self, env: Any, group: EpisodeGroup, update: int) -> Episode:
        assert group.spans[:, 1].max() <= update

        def act(step: int, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Any]:
            [version] = [int(v) for _, v, start, end in group.spans if start <= step < end]
            actor, normal = self.versions[version]
            raw, logprob = self.sample(actor, normal(seen), noise[None])
            return raw[0], logprob[0], (2 * raw.double().tanh()).float().numpy()

        return play(env, self.job, group.draw, "normal", act)

    def sample(self, actor: nn.Sequential, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions before squashing and the log-probs of the squashed actions, both [B, 1]."""
        mean, raw = actor(x).chunk(2, dim=-1)
        dist = Normal(mean, (-5 + 7 * (torch.tanh(raw) + 1) / 2).exp())
        u = dist.mean + dist.stddev * noise
        return u, dist.log_prob(u) - 2 * (np.log(2) - u - nn.functional.softplus(-2 * u))

    def learn(self, episodes: list[Episode], update: int) -> None:
        c: Any = self.job.algorithm
        for one in episodes:
            for t, reward in enumerate(one.rewards):
                row = one.observations[t], one.actions[t], reward, one.observations[t + 1]
                self.data[self.inserted % c.buffer.capacity : self.inserted % c.buffer.capacity + 1] = [row]
                self.inserted += 1
        for step in range(c.steps_per_update if self.inserted >= c.warmup_transitions else 0):
            self.step(update * c.steps_per_update + step)
        self.normal.see(episodes)
        self.versions.append((copy.deepcopy(self.actor), copy.deepcopy(self.normal)))

    def step(self, number: int) -> None:
        c: Any = self.job.algorithm
        seed = derive_seed(self.job.seed, "rule")
        rows = [self.data[i] for i in np.random.default_rng([seed, number]).integers(0, len(self.data), c.batch_size)]
        noise = np.random.default_rng([seed, number, 1]).standard_normal((2, c.batch_size, 1, 1), np.float32)
        here, there = torch.from_numpy(noise)[..., 0]
        x, y = (self.normal(np.stack([row[i] for row in rows])) for i in (0, 3))
        a, reward = torch.tensor(np.stack([row[1] for row in rows])).tanh(), torch.tensor([float(r[2]) for r in rows])
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            u, logprob = self.sample(self.actor, y, there)
            goal = reward + c.gamma * (self.least(self.targets, y, u.tanh()) - alpha * logprob[:, 0])
        errors = [critic(torch.cat([x, a], 1))[:, 0] - goal for critic in self.critics]
        self.judges.step((errors[0].square() / 2 + errors[1].square() / 2).mean())
        u, logprob = self.sample(self.actor, x, here)
        self.acts.step((alpha * logprob[:, 0] - self.least(self.critics, x, u.tanh())).mean())
        self.heat.step((-self.log_alpha.exp() * (logprob.detach()[:, 0] - 1.0)).mean())
        with torch.no_grad():
            for critic, target in zip(self.critics, self.targets, strict=True):
                for param, slow in zip(critic.parameters(), target.parameters(), strict=True):
                    slow.add_(c.tau * (param - slow))

    @staticmethod
    def least(networks: list[nn.Sequential], x: Tensor, a: Tensor) -> Tensor:
        return torch.minimum(*(each(torch.cat([x, a], 1))[:, 0] for each in networks))


def trained(stack: Any, job: str) -> Iterator[list[EpisodeGroup]]:
    """Yield the groups of every update, in the order of the sealed batch."""
    events, groups = stack.ledger(job), stack.groups(job)
    sealed = {event.number: event for event in events if isinstance(event, BatchSealed)}
    for event in events:
        if isinstance(event, BatchTrained):
            yield [groups[one.seq] for one in sealed[event.number].groups]


def last_weights(stack: Any, job: str) -> dict[str, Tensor]:
    """Return what the checkpoint after the last update holds: the policy and the networks of the update rule."""
    last = [event for event in stack.ledger(job) if isinstance(event, Checkpointed)][-1]
    assert last.number == UPDATES + 1
    files = (load_file(stack.data_dir / last.path / name) for name in ("model.safetensors", "rule.safetensors"))
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize(
    ("spec", "plain"),
    [(PPO, PlainPPO), (CHUNKS, PlainPPO), (SAC, PlainSAC), (SAC_AHEAD, PlainSAC)],
    ids=["ppo", "ppo of chunks", "sac", "sac with workers ahead"],
)
def test_services_learn_from_a_simulator_what_a_plain_loop_learns(stack: Any, spec: dict[str, Any], plain: Any) -> None:
    job = stack.client.submit(spec).id
    record = stack.finish(job, 200)
    assert (record.status.phase, record.status.step) == ("succeeded", UPDATES + 1), record.status
    config, task = EmbodiedJob.parse(spec), spec["environment"]["task"]
    described = describe_simulator(OpenEnv(env_id=task, num_envs=1), stack.data_dir)
    first = EmbodiedLearner(config, described).state()
    begun = first.models["policy"].weights | first.rule
    loop = plain(config, {n: t.clone() for n, t in first.models["policy"].weights.items()}, first.rule)
    env, apart, older, update = gymnasium.make(task), [], 0, -1
    for update, batch in enumerate(trained(stack, job)):
        older += sum(int(group.spans[:, 1].min()) < update for group in batch)
        episodes = [loop.play(env, group, update) for group in batch]
        for group, episode in zip(batch, episodes, strict=True):
            assert group.valid.tolist() == episode.executed.tolist(), f"update {update}, draw {group.draw}"
            for name, found, expected in (
                ("observations", group.observations["state"], episode.observations[:-1]),
                ("last observation", group.final_observations["state"], episode.observations[-1:]),
                ("actions", group.actions[..., 0], episode.actions),
                ("log-probs", group.logprobs[..., 0], episode.logprobs),
                ("rewards", group.rewards.sum(1), episode.rewards),
            ):
                apart.append((float(np.abs(found - expected).max()), name, update))
            assert bool(group.terminated[-1].any()) == episode.terminated
        loop.learn(episodes, update)
    env.close()
    assert update == UPDATES, "the last batch is played after twenty updates"
    assert (older > 0) is (spec is SAC_AHEAD), f"{older} groups are older than the update that trained them"
    assert max(apart)[0] < BOUND, max(apart)
    found, expected = last_weights(stack, job), loop.weights()
    off = {name: float((found[name] - weight).abs().max()) for name, weight in expected.items()}
    assert max(off.values()) < BOUND, off
    moved = {name: float((weight - begun[name]).abs().max()) for name, weight in expected.items()}
    assert min(moved.values()) > 50 * BOUND, moved
