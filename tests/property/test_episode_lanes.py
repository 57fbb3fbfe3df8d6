"""Lanes of a session of simulators: in every order of events each episode ends once, with its own columns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.services.rollout.embodied.engine import Decided
from penstock.services.rollout.embodied.episodes import Episode, Record, episode_group
from penstock.services.rollout.embodied.lanes import FIRST_LENGTH, Lanes
from penstock.services.rollout.embodied.noise import NoiseSource
from penstock.services.rollout.embodied.queue import EpisodeQueue
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec, ResetReply, StepReply
from penstock.shared.protocol.embodied.episode_group import decode_episode_group, encode_episode_group
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket

A = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Course of one episode in the simulator. ``breaks_at``: step at which the simulator fails; 0: the reset fails."""

    ends_at: int
    terminates: bool
    solved_at: int
    breaks_at: int | None
    bad_reward_at: int | None
    noisy: bool
    version: int | None
    unwanted_after: int | None


plans = st.builds(
    Plan,
    ends_at=st.integers(1, 12),
    terminates=st.booleans(),
    solved_at=st.integers(1, 14),
    breaks_at=st.none() | st.integers(0, 12),
    bad_reward_at=st.none() | st.integers(1, 12),
    noisy=st.booleans(),
    version=st.none() | st.integers(1, 2),
    unwanted_after=st.none() | st.integers(0, 6),
)


class Simulators:
    """Stand-in for simulators that follow the plans; each step has an observation and a reward of its own."""

    def __init__(self, num_envs: int, chunk: int, all_plans: list[Plan]) -> None:
        self.chunk, self.plans = chunk, all_plans
        self.playing = [-1] * num_envs
        self.steps = [0] * num_envs

    @staticmethod
    def seen(number: int, step: int) -> list[float]:
        return [float(number), float(step)]

    @staticmethod
    def reward(number: int, step: int) -> float:
        return number + step / 64

    def reset(self, rows: NDArray[np.int32], ids: NDArray[np.int64]) -> ResetReply:
        lost = [self.plans[number].breaks_at == 0 for number in ids.tolist()]
        for lane, number in zip(rows.tolist(), ids.tolist(), strict=True):
            self.playing[lane], self.steps[lane] = number, 0
        return ResetReply(
            seq=0, observations={"state": np.asarray([self.seen(number, 0) for number in ids.tolist()])},
            episode_ids=ids, state_hashes=ids.astype(np.uint64) + np.uint64(100), tasks=[f"task {i}" for i in ids],
            lost=np.asarray(lost, np.bool_), reasons=["no scene" if gone else "" for gone in lost],
        )  # fmt: skip

    def step(self, rows: NDArray[np.int32], limit: int) -> StepReply:
        n = len(rows)
        rewards, valid = np.zeros((n, limit), np.float32), np.zeros(n, np.int32)
        terminated, truncated, success = (np.zeros((n, limit), np.bool_) for _ in range(3))
        lost = np.zeros(n, np.bool_)
        for i, lane in enumerate(rows.tolist()):
            number = self.playing[lane]
            plan = self.plans[number]
            for c in range(limit):
                self.steps[lane] += 1
                step = self.steps[lane]
                if step == plan.breaks_at:
                    lost[i] = True
                    break
                rewards[i, c] = np.nan if step == plan.bad_reward_at else self.reward(number, step)
                success[i, c], valid[i] = step == plan.solved_at, valid[i] + 1
                if step == plan.ends_at:
                    (terminated if plan.terminates else truncated)[i, c] = True
                    break
            if lost[i]:
                rewards[i], valid[i], terminated[i], truncated[i], success[i] = 0, 0, False, False, False
        shown = np.asarray([self.seen(self.playing[lane], self.steps[lane]) for lane in rows.tolist()])
        ended = (terminated | truncated).any(axis=1)
        nothing = np.zeros(n, np.int64)
        return StepReply(
            seq=0, observations={"state": shown}, rewards=rewards, terminated=terminated, truncated=truncated,
            success=success, valid=valid, ended=ended, lost=lost, reasons=["it broke" if gone else "" for gone in lost],
            final_observations={"state": shown[ended]}, state_ids=nothing, episode_ids=nothing,
            next_episode_ids=nothing, returns=rewards.sum(1), lengths=valid, succeeded=success.any(1),
            state_hashes=nothing.astype(np.uint64), tasks=[""] * n,
        )  # fmt: skip


def spec(num_envs: int) -> EnvSpec:
    return EnvSpec(
        env_id="t", backend="gymnasium", num_envs=num_envs, observations={"state": ArraySpec((2,), "float64")},
        action_shape=(A,), action_dtype="float32", num_actions=None, action_low=[-1.0] * A, action_high=[1.0] * A,
        max_episode_steps=None, has_success=True, versions={},
    )  # fmt: skip


def noise_of(number: int, chunk: int) -> NoiseSource:
    return NoiseSource(3, Draw(number), 0, kind="normal", shape=(chunk, A))


def check_record(record: Record, number: int, plan: Plan, *, chunk: int, horizon: int, versions: list[int]) -> None:
    """Check that ``record`` holds exactly what ``plan`` determines."""
    steps = min(plan.ends_at, horizon)
    D = -(-steps // chunk)
    assert record.num_decisions == D
    assert record.valid.tolist() == [min(chunk, steps - t * chunk) for t in range(D)]
    assert record.observations["state"].tolist() == [Simulators.seen(number, t * chunk) for t in range(D)]
    assert record.final_observations["state"].tolist() == Simulators.seen(number, steps)
    expected = np.zeros((D, chunk), np.float32)
    expected.flat[:steps] = [Simulators.reward(number, step) for step in range(1, steps + 1)]
    assert np.array_equal(record.rewards, expected)
    by_itself = plan.ends_at <= horizon
    ends = np.zeros((D, chunk), np.bool_)
    ends.flat[steps - 1] = True
    assert np.array_equal(record.terminated, ends & (by_itself and plan.terminates))
    assert np.array_equal(record.truncated, ends & (not by_itself or not plan.terminates))
    assert (record.succeeded, record.solved_at_end) == (plan.solved_at <= steps, plan.solved_at == steps)
    assert (record.state_hash, record.task) == (number + 100, f"task {number}")
    drawn = noise_of(number, chunk).next(D) if plan.noisy else np.zeros((D, chunk, A), np.float32)
    assert np.array_equal(record.actions, drawn), "the policy of this test returns its noise as actions"
    assert np.array_equal(record.logprobs, drawn + 1)
    labelled = np.zeros(D, np.int64)
    for (version, weights), start in record.spans:
        assert weights == f"w{version}"
        labelled[start:] = version
    assert labelled.tolist() == versions[:D]
    assert all(one != other for (one, _), (other, _) in zip(record.spans, record.spans[1:], strict=False))


@given(
    st.lists(plans, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 13),
    st.lists(st.integers(1, 15), max_size=3),
)  # fmt: skip
def test_every_episode_ends_once_with_its_own_columns(
    all_plans: list[Plan], num_envs: int, chunk: int, horizon: int, changes: list[int]
) -> None:
    """``changes``: the rounds at which the policy gets a new version."""
    simulators = Simulators(num_envs, chunk, all_plans)
    lanes = Lanes(spec(num_envs), horizon=horizon, noise_shape=(chunk, A), action_dtype="float32")
    ends: Counter[int] = Counter()
    episodes = [
        Episode(
            reset_id=number, noise=noise_of(number, chunk) if plan.noisy else None, version=plan.version,
            on_end=lambda episode: ends.update([episode.reset_id]),
        )
        for number, plan in enumerate(all_plans)
    ]  # fmt: skip
    decided_by: dict[int, list[int]] = {number: [] for number in range(len(all_plans))}
    waiting, rounds = list(episodes), 0
    while waiting or lanes.num_running:
        lanes.leave_unwanted()
        placed, waiting = waiting[: lanes.num_free], waiting[lanes.num_free :]
        if placed:
            rows, ids = lanes.place(placed)
            lanes.began(rows, simulators.reset(rows, ids))
        version = 1 + sum(rounds >= at for at in changes)
        for rows in lanes.to_decide():
            for number in decide_and_step(lanes, simulators, rows, version):
                decided_by[number].append(version)
        rounds += 1
        for plan, episode in zip(all_plans, episodes, strict=True):
            episode.unwanted = plan.unwanted_after is not None and rounds > plan.unwanted_after
    assert ends == dict.fromkeys(range(len(all_plans)), 1)
    for number, (plan, episode) in enumerate(zip(all_plans, episodes, strict=True)):
        steps = min(plan.ends_at, horizon)
        bad = [at for at in (plan.breaks_at, plan.bad_reward_at) if at is not None and at <= steps]
        if episode.record is not None:
            assert not bad
            assert plan.version is None or set(decided_by[number]) == {plan.version}
            check_record(episode.record, number, plan, chunk=chunk, horizon=horizon, versions=decided_by[number])
        elif episode.superseded_by is not None:
            assert plan.version not in {None, episode.superseded_by}
        else:
            assert bad or plan.unwanted_after is not None
            assert episode.lost in {"no scene", "it broke", "a reward is not finite", "nobody waits for it"}
    check_group(episodes, chunk)


def decide_and_step(lanes: Lanes, simulators: Simulators, rows: NDArray[np.int32], version: int) -> list[int]:
    """Let ``rows`` of lanes decide once, and step their simulators; return the numbers of the episodes that decided."""
    observations, noise = lanes.inputs(rows)
    numbers = [simulators.playing[lane] for lane in rows.tolist()]
    shown = [simulators.seen(number, simulators.steps[lane]) for lane, number in zip(rows, numbers, strict=True)]
    assert observations["state"].tolist() == shown
    drawn = np.zeros((len(rows), simulators.chunk, A), np.float32) if noise is None else noise
    decided = Decided(actions_NCA=drawn, logprobs_NCA=drawn + 1, executed=drawn, version=version, weights=f"w{version}")
    executed = lanes.decided(rows, decided)
    limits = lanes.limits(rows)
    for limit in np.unique(limits[executed]).tolist():
        chosen = executed & (limits == limit)
        lanes.stepped(rows[chosen], simulators.step(rows[chosen], limit))
    return [number for number, kept in zip(numbers, executed, strict=True) if kept]


def check_group(episodes: list[Episode], chunk: int) -> None:
    """Check that a group of the episodes survives encoding; lost episodes are in the group without decisions."""
    config = EmbodiedJob.parse(
        {
            "kind": "embodied", "name": "t", "environment": {"task": "t", "horizon": 13, "action_chunk": chunk},
            "train": {"batch_size": 1, "max_updates": 1}, "evaluation": {"episodes": 0},
        }
    )  # fmt: skip
    ticket = Ticket(draw=Draw(4, 2), min_version=0, deadline=0.0, epoch=1)
    begun = [episode.record for episode in episodes if episode.record is not None]
    if len(begun) > 1:  # each plan begins in another state
        assert episode_group("job_t", config, ticket, episodes, meta={}).num_trajectories == 0
    episodes = [
        dataclasses.replace(one, record=one.record and dataclasses.replace(one.record, state_hash=begun[0].state_hash))
        for one in episodes
    ]
    group = decode_episode_group(encode_episode_group(episode_group("job_t", config, ticket, episodes, meta={}))[0])
    records = [episode.record for episode in episodes]
    if not any(records):
        assert group.num_trajectories == 0
        return
    assert group.failed.tolist() == [record is None for record in records]
    assert group.lengths.tolist() == [0 if record is None else record.num_decisions for record in records]
    for i, record in enumerate(records):
        start, end = group.cu_seqlens[i : i + 2]
        if record is not None:
            assert np.array_equal(group.rewards[start:end], record.rewards)
            assert np.array_equal(group.observations["state"][start:end], record.observations["state"])
            assert np.array_equal(group.final_observations["state"][i], record.final_observations["state"])
            assert [row[1:3] for row in group.spans.tolist() if row[0] == i] == [
                [version, start] for (version, _), start in record.spans
            ]


def test_columns_grow_with_a_long_episode() -> None:
    horizon = 3 * FIRST_LENGTH
    plan = Plan(10_000, True, 10_000, None, None, True, None, None)
    simulators = Simulators(2, 1, [plan, plan])
    lanes = Lanes(spec(2), horizon=horizon, noise_shape=(1, A), action_dtype="float32")
    episodes = [Episode(reset_id=number, noise=noise_of(number, 1)) for number in range(2)]
    rows, ids = lanes.place(episodes)
    lanes.began(rows, simulators.reset(rows, ids))
    while lanes.num_running:
        _, noise = lanes.inputs(rows)
        assert noise is not None
        lanes.decided(rows, Decided(actions_NCA=noise, logprobs_NCA=noise + 1, executed=noise, version=1, weights="w1"))
        lanes.stepped(rows, simulators.step(rows, 1))
    for number, episode in enumerate(episodes):
        assert episode.record is not None
        check_record(episode.record, number, plan, chunk=1, horizon=horizon, versions=[1] * horizon)


def test_an_action_that_is_not_finite_loses_its_episode() -> None:
    plan = Plan(5, True, 9, None, None, False, None, None)
    simulators, lanes = (
        Simulators(2, 1, [plan, plan]),
        Lanes(spec(2), horizon=5, noise_shape=(1, A), action_dtype="float32"),
    )
    episodes = [Episode(reset_id=number) for number in range(2)]
    rows, ids = lanes.place(episodes)
    lanes.began(rows, simulators.reset(rows, ids))
    actions = np.zeros((2, 1, A), np.float32)
    actions[1, 0, 1] = np.nan
    decided = Decided(actions_NCA=actions, logprobs_NCA=actions, executed=actions, version=3, weights="w")
    assert lanes.decided(rows, decided).tolist() == [True, False]
    assert episodes[1].lost == "policy version 3 gives an action that is not finite"
    assert (lanes.num_running, lanes.num_free) == (1, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 20))
def test_noise_is_the_same_however_many_blocks_are_taken(counts: list[int], seed: int) -> None:
    for kind in ("normal", "uniform"):
        one, other = (
            NoiseSource(seed, Draw(2, 1), 3, kind=kind, shape=(3, 5))  # type: ignore[arg-type]
            for _ in range(2)
        )
        parts = np.concatenate([one.next(count) for count in counts])
        assert np.array_equal(parts, other.next(sum(counts)))
        assert parts.dtype == np.float32


def test_open_sessions_share_the_waiting_episodes() -> None:
    queue, episodes = EpisodeQueue(2), [Episode(reset_id=number) for number in range(8)]
    queue.add(episodes)
    queue.report(0, 0)
    queue.report(1, 0)
    assert queue.take(0, 8) == episodes[:4]
    queue.report(0, 4)
    assert queue.take(0, 4) == [], "the other session may still take its share"
    episodes[4].unwanted = True
    queue.report(1, None)
    assert queue.take(0, 3) == episodes[5:8], "the other session is no longer open"


def test_no_lane_stays_free_while_episodes_wait() -> None:
    """Two sessions take episodes in turn: afterwards no lane is free, as enough episodes waited."""
    queue: EpisodeQueue = EpisodeQueue(2)
    running, free = [3, 0], [1, 4]
    queue.add([Episode(reset_id=number) for number in range(5)])
    for session in (0, 1):
        queue.report(session, running[session])
    for session in (0, 1, 0, 1):
        taken: list[Any] = queue.take(session, free[session])
        running[session] += len(taken)
        free[session] -= len(taken)
        queue.report(session, running[session])
    assert (running, free) == ([4, 4], [0, 0])
