"""Tickets of an embodied job on one rollout worker, with real simulators behind a real env service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.services.env.simulators import Named, Simulator, open_simulator
from penstock.services.rollout.embodied.engine import PolicyEngine
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.models.episode_policy import EpisodePolicy, build_policy
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.environment import OpenEnv
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.ids import Draw, derive_seed
from penstock.shared.protocol.weights import short_digest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
from tests.contract.simulated_envs import FOLDER, STEP
from tests.integration.embodied_worker import JOB, NOWHERE, env_service, job, spec_of, until, worker_of

ZERO = np.zeros(1, np.int32)
LONG = {"options": {"max_episode_steps": 1_000_000}, "bytes_per_step": 128}
"""Settings for Pendulum episodes that only the horizon ends."""
CASES = {
    "discrete": job("CartPole-v1", horizon=30, policy="categorical"),
    "chunks": job("Pendulum-v1", horizon=20, action_chunk=3),
    "bins": job("Pendulum-v1", horizon=7, policy="tokens", action_chunk=3, num_processes=2),
    "pictures of more than a message": job(
        "CartPole-v1",
        horizon=8,
        policy="categorical",
        observations=["image", "state"],
        bytes_per_step=600_000,
        image={"height": 200, "width": 300, "frames": 3},
    ),
    "metaworld": job("reach-v3", horizon=25, backend="metaworld", bytes_per_step=1024, group=4),
    "metaworld, chunks": job("reach-v3", horizon=25, backend="metaworld", bytes_per_step=1024, action_chunk=3),
}


SLOW_CASES = {"pictures of more than a message", "metaworld", "metaworld, chunks"}


def always(action: int) -> Any:
    """Return a function that makes a categorical policy always choose one action."""

    def prepare(policy: EpisodePolicy) -> None:
        with torch.no_grad():
            last = policy.layers[-1]  # type: ignore[index]
            last.weight.zero_()
            last.bias.zero_()
            last.bias.unflatten(0, (-1, 5))[:, action] = 100.0

    return prepare


def replay_all(config: EmbodiedJob, groups: list[EpisodeGroup]) -> None:
    """Replay each episode in a plain loop, one after another, and compare it with the recorded one."""
    simulator = open_simulator(config.environment.opening(1), NOWHERE)
    for group in groups:
        for member in range(group.num_trajectories):
            replay(config, simulator, group, member)
    simulator.close()


def replay(config: EmbodiedJob, simulator: Simulator, group: EpisodeGroup, member: int) -> None:
    """Replay one episode of a group in a plain loop, and compare every column."""
    sim, C = config.environment, config.environment.action_chunk
    policy = build_policy(config.policy, simulator.spec, action_chunk=C, seed=config.seed)
    key = derive_seed(config.seed, "episode", group.draw.ordinal, group.draw.n, member)
    generator = np.random.Generator(np.random.Philox(key=key))
    begun = simulator.reset(ZERO, np.asarray([sim.reset_id(group.draw.ordinal)]))
    assert begun.state_hashes[0] == group.state_hashes[member]
    seen, steps, total, has_ended = copied(begun.observations), 0, 0.0, False
    for t in range(int(group.cu_seqlens[member]), int(group.cu_seqlens[member + 1])):
        assert not has_ended, "nothing follows the end of an episode"
        assert all(np.array_equal(group.observations[name][t], column[0]) for name, column in seen.items())
        tensors = {name: torch.from_numpy(column) for name, column in seen.items()}
        noise = noise_block(generator, policy)
        decision = policy.act(tensors, torch.from_numpy(noise))
        recorded = torch.from_numpy(group.actions[t : t + 1].copy())
        torch.testing.assert_close(recorded, decision.actions_NCA, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            torch.from_numpy(group.logprobs[t : t + 1].copy()), decision.logprobs_NCA, rtol=0, atol=1e-6
        )
        own = policy.evaluate(tensors, recorded).logprobs_NCA.detach()
        np.testing.assert_allclose(group.logprobs[t : t + 1], own.numpy(), rtol=0, atol=1e-6)
        left = min(C, sim.horizon - steps)
        chunk = simulator.step(ZERO, policy.to_environment(recorded)[:, :left], None)
        steps += int(chunk.valid[0])
        padding = [0.0] * (C - left)
        assert group.rewards[t].tolist() == chunk.rewards[0].tolist() + padding
        assert group.valid[t] == chunk.valid[0]
        terminated, truncated = chunk.terminated[0].tolist(), chunk.truncated[0].tolist()
        if steps == sim.horizon and not any(terminated):
            truncated[left - 1] = True
        assert group.terminated[t].tolist() == terminated + [False] * (C - left)
        assert group.truncated[t].tolist() == truncated + [False] * (C - left)
        total += float(chunk.rewards.sum(dtype=np.float64))
        seen, has_ended = copied(chunk.observations), any(terminated + truncated)
    assert has_ended, "the episode was cut short"
    assert group.final_observations.keys() == seen.keys()
    assert all(np.array_equal(group.final_observations[name][member], column[0]) for name, column in seen.items())
    assert group.returns[member] == pytest.approx(total, rel=1e-6)


def copied(observations: Named) -> Named:
    """Copy observations, which the simulator overwrites at the next call."""
    return {name: column.copy() for name, column in observations.items()}


def noise_block(generator: np.random.Generator, policy: EpisodePolicy) -> NDArray[np.float32]:
    shape = (1, *policy.noise_shape)
    return generator.random(shape, np.float32) if policy.noise == "uniform" else normal(generator, shape)


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return generator.standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW_CASES else name for name in CASES]
)
async def test_episodes_equal_those_of_a_plain_loop(bus: Bus, tmp_path: Path, name: str) -> None:
    """There are more episodes than lanes; neither batching nor the choice of the lane changes an episode."""
    config = CASES[name]
    async with env_service(bus, tmp_path), worker_of(bus, tmp_path, config) as worker:
        for ordinal in range(3):
            await worker.ask(ordinal)
        groups = await worker.groups(3)
        await until(lambda: not worker.session.busy)
        assert await worker.tickets_left() == 0
    for group in groups:
        assert group.num_trajectories == config.algorithm.group_size
        assert not group.failed.any()
        assert len(set(group.state_hashes.tolist())) == 1, "all begin in the same state"
        assert {row[1] for row in group.spans.tolist()} == {1}
        assert set(group.weights) == {short_digest(worker.digests[1])}
        assert (group.reset_id, group.objective) == (group.draw.ordinal, "policy")
    await asyncio.to_thread(replay_all, config, groups)
    assert len({int(group.state_hashes[0]) for group in groups}) == 3


@pytest.mark.long
async def test_a_redraw_has_other_noise(bus: Bus, tmp_path: Path) -> None:
    config = job("Pendulum-v1", horizon=4)
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await worker.ask(3)
        await worker.ask(3, 1)
        first, again = await worker.groups(2)
    assert np.array_equal(first.observations["state"][0], again.observations["state"][0])
    assert not np.array_equal(first.actions, again.actions)
    assert not np.array_equal(first.actions[:4], first.actions[4:]), "each member of a group has its own noise"


@pytest.mark.long
async def test_the_horizon_truncates_and_success_is_recorded(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is solved at step 3. With horizon 9 an episode ends unsolved at step 4; with 3 it ends solved."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    whole, cut = (
        job("simulated_envs:Fragile-v0", horizon=horizon, policy="categorical", action_chunk=3, observations=["steps"])
        for horizon in (9, 3)
    )
    found = []
    for number, config in enumerate((whole, cut)):
        async with env_service(bus), worker_of(bus, tmp_path, config, prepare=always(STEP)) as worker:
            await worker.ask(number)
            found.append((await worker.groups(number + 1))[number])
    ended, truncated = found
    assert ended.valid.tolist() == [3, 1, 3, 1]
    assert ended.terminated[1].tolist() == [True, False, False]
    assert (ended.succeeded.all(), ended.solved_at_end.any(), ended.truncated.any()) == (True, False, False)
    assert truncated.valid.tolist() == [3, 3]
    assert truncated.truncated.tolist() == [[False, False, True]] * 2
    assert (truncated.succeeded.all(), truncated.solved_at_end.all(), truncated.terminated.any()) == (True, True, False)
    assert truncated.final_observations["steps"].tolist() == [[3.0], [3.0]]
    assert truncated.meta["task"] == "count to four"


@pytest.mark.long
async def test_episodes_with_different_initial_states_are_no_group(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The returns of such episodes are not comparable: the draw fails with the reason, and is counted."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    config = job("simulated_envs:Restless-v0", horizon=4)
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await worker.ask(3)
        (group,) = await worker.groups(1)
        (header,) = await worker.headers()
        assert worker.session.status()["unequal"] == 1
    assert (group.num_trajectories, header.lengths) == (0, [])
    assert header.error.endswith("the 2 episodes of reset id 3 began in 2 different states")


@pytest.mark.long
async def test_a_version_in_mid_episode_begins_another_span(bus: Bus, tmp_path: Path) -> None:
    """Parameters and observation statistics change together; each decision names the version that made it."""
    config = job("Pendulum-v1", horizon=400, **LONG)
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await worker.ask(0)
        await until(lambda: worker.session.status()["decisions"] > 60)
        worker.policy.observe({"state": torch.full((50, 3), 0.3) + torch.randn(50, 3)})
        with torch.no_grad():
            for weights in worker.policy.parameters():
                weights.add_(0.1)
        await worker.show(2)
        [group] = await worker.groups(1)
        second = worker.policy
        await until(lambda: worker.session.status()["version"] == 2)
    first = build_policy(config.policy, await asyncio.to_thread(spec_of, config), action_chunk=1, seed=config.seed)
    labels = {version: short_digest(digest) for version, digest in worker.digests.items()}
    assert labels[1] != labels[2]
    for member in range(2):
        rows = [
            (row, weights) for row, weights in zip(group.spans.tolist(), group.weights, strict=True) if row[0] == member
        ]
        assert [(row[1], weights) for row, weights in rows] == [(1, labels[1]), (2, labels[2])]
        for (row, _), policy in zip(rows, (first, second), strict=True):
            start, end = (int(group.cu_seqlens[member]) + at for at in row[2:])
            seen = torch.from_numpy(group.observations["state"][start:end].copy())
            actions = torch.from_numpy(group.actions[start:end].copy())
            own = policy.evaluate({"state": seen}, actions).logprobs_NCA.detach().numpy()
            np.testing.assert_allclose(group.logprobs[start:end], own, rtol=0, atol=2e-5)


async def test_a_worker_with_an_old_version_waits_and_reports_it(bus: Bus, tmp_path: Path) -> None:
    async with env_service(bus), worker_of(bus, tmp_path, job("Pendulum-v1", horizon=4)) as worker:
        await worker.ask(0, oldest=3)
        await until(lambda: worker.session.status().get("waiting_for") == "policy version 3 (serving 1)")
        assert worker.session.status()["decisions"] == 0
        assert worker.session.status()["holds"] == [str(Draw(0))]
        await worker.show(3)
        [group] = await worker.groups(1)
        assert {row[1] for row in group.spans.tolist()} == {3}
        assert "waiting_for" not in worker.session.status()


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True], ids=["where it trains", "in another simulator"])
async def test_held_out_episodes_take_the_mean_at_an_exact_version(
    bus: Bus, tmp_path: Path, *, elsewhere: bool
) -> None:
    config = job("CartPole-v1", horizon=25, policy="categorical")
    if elsewhere:  # in training, a step pays nothing and a fall costs 1
        other = {"environment": {"task": "CartPole-v1", "horizon": 25, "num_envs": 1}}
        paid = config.environment.model_dump() | {"options": {"sutton_barto_reward": True}}
        config = EmbodiedJob.parse(config.model_dump() | {"environment": paid, "evaluation": other})
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        for ordinal in (0, 1):
            await worker.ask(ordinal, version=1)
        await worker.ask(5)
        await until(lambda: len(worker.results) == 2)
        [group] = await worker.groups(1)
        assert group.rewards.max() == (0.0 if elsewhere else 1.0)
        await worker.show(4)
        await until(lambda: worker.session.status()["version"] == 4)
        await worker.ask(2, version=2)
        await until(worker_is_done, worker)
        assert len(worker.results) == 2, "an outdated version is not measured"
    policy = build_policy(config.policy, await asyncio.to_thread(spec_of, config), action_chunk=1, seed=config.seed)
    for result in worker.results:
        total = await asyncio.to_thread(greedy_return, config, policy, 1_000_000 + result.ordinal)
        assert (result.version, result.failed, result.greedy) == (1, [False], [True])
        assert (result.rewards, result.parts) == (
            [total], {"return": [total], "success": [0.0], "length": [total]}
        )  # fmt: skip


async def worker_is_done(worker: Any) -> bool:
    return not worker.session.busy and await worker.tickets_left() == 0


def greedy_return(config: EmbodiedJob, policy: EpisodePolicy, reset_id: int) -> float:
    simulator = open_simulator(OpenEnv(env_id=config.environment.task, num_envs=1), NOWHERE)
    seen, total = simulator.reset(ZERO, np.asarray([reset_id])).observations["state"].copy(), 0.0
    for _ in range(config.environment.horizon):
        actions = policy.act({"state": torch.from_numpy(seen)}, None).actions_NCA
        chunk = simulator.step(ZERO, policy.to_environment(actions), None)
        seen, total = chunk.observations["state"].copy(), total + float(chunk.rewards.sum())
        if chunk.terminated.any():
            break
    simulator.close()
    return total


@pytest.mark.long
async def test_a_new_version_ends_a_running_held_out_episode(bus: Bus, tmp_path: Path) -> None:
    config = job("Pendulum-v1", horizon=20_000, **LONG)
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await worker.ask(0, version=1)
        await until(lambda: worker.session.status()["decisions"] > 10)
        await worker.show(2)
        await until(worker_is_done, worker)
        assert worker.results == []
        assert worker.session.status()["running"] == 0


@pytest.mark.long
async def test_one_session_steps_while_the_policy_decides_for_the_other(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the decisions during a step instead of measuring time."""
    stepping, beside = 0, 0
    step, decide = EnvClient.step, PolicyEngine.decide

    async def counted_step(self: EnvClient, *args: Any, **kwargs: Any) -> Any:
        nonlocal stepping
        stepping += 1
        try:
            return await step(self, *args, **kwargs)
        finally:
            stepping -= 1

    async def counted_decide(self: PolicyEngine, *args: Any) -> Any:
        nonlocal beside
        beside += stepping > 0
        return await decide(self, *args)

    monkeypatch.setattr(EnvClient, "step", counted_step)
    monkeypatch.setattr(PolicyEngine, "decide", counted_decide)
    horizon = 100
    async with env_service(bus), worker_of(bus, tmp_path, job("Pendulum-v1", horizon=horizon)) as worker:
        for ordinal in range(4):
            await worker.ask(ordinal)
        await worker.groups(4)
    assert beside > horizon, f"{beside} decisions beside a step: the sessions took turns"


@pytest.mark.long
async def test_a_second_ticket_of_a_running_draw_ends_with_the_first(bus: Bus, tmp_path: Path) -> None:
    config = job("Pendulum-v1", horizon=400, **LONG)
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await worker.ask(0)
        await until(lambda: worker.session.status()["decisions"] > 10)
        await worker.ask(0)
        await until(tickets_are, worker, 1)
        assert await worker.headers() == [], "the first ticket is still in progress"
        await worker.groups(1)
        await until(tickets_are, worker, 0)


async def tickets_are(worker: Any, number: int) -> bool:
    return bool(await worker.tickets_left() == number)


@pytest.mark.long
async def test_a_worker_that_drains_ends_its_episodes_and_leaves_the_rest(bus: Bus, tmp_path: Path) -> None:
    config = job("Pendulum-v1", horizon=300, **LONG)
    async with env_service(bus) as service, worker_of(bus, tmp_path, config) as worker:
        for ordinal in range(6):
            await worker.ask(ordinal)
        await until(lambda: worker.session.status()["decisions"] > 10)
        assert len(worker.session.status()["holds"]) == 2, "four lanes hold two groups"
        worker.session.drain()
        await until(lambda: not service.sessions)
        groups = await worker.groups(2)
        assert all(not group.failed.any() for group in groups)
        assert await worker.tickets_left() == 4


@pytest.mark.long
async def test_a_late_ticket_is_given_back_and_frees_its_lanes(bus: Bus, tmp_path: Path) -> None:
    await bus.measure_clock()
    config = job("Pendulum-v1", horizon=50_000, **LONG)
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await until(lambda: worker.session.status()["version"] == 1)
        await worker.ask(0, deadline_s=1.0)
        await until(lambda: worker.session.status()["running"] == 2)
        await until(lambda: not worker.session.busy and not worker.session.status()["running"])
        state = await bus.consumer_state(subjects.TICKETS, f"rollout-{JOB}")
        assert state.pending + state.ack_pending == 1, "the coordinator alone drops a draw"
