"""The reward service on a real bus: requests, slow groups, redelivery, drain, and scorers that cannot be opened."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.services.reward import session
from penstock.services.reward.service import RewardService
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.ids import Draw, new_attempt
from penstock.shared.protocol.jobs import JobRecord, JobStatus
from penstock.shared.protocol.messages import Heartbeat, ScoreReply, ScoreRequest
from penstock.shared.protocol.trajectory import Group, decode_group, encode_group, group_headers, parse_group_header
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.server import NatsServer
from tests.processes import is_alive

JOB = "job_reward_test"
USER_CODE = """
import random
import time

def score(prompt, completion, answer, row):
    if completion == "bad":
        raise ValueError("bad completion")
    time.sleep(float(row.get("seconds", 0)))
    return float(completion == answer)

def dice(prompt, completion, answer, row):
    time.sleep(0.3)
    return random.random()
"""


def record(reward: dict[str, Any], phase: str = "running") -> JobRecord:
    spec = {
        "name": "reward-test",
        "model": {"config": {"hidden_size": 32, "num_layers": 1}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": reward,
        "train": {"max_updates": 1, "batch_size": 8},
    }
    JobConfig.parse(spec)
    status = JobStatus.model_validate({"phase": phase})
    return JobRecord(id=JOB, name="reward-test", created_at=datetime.now(UTC), spec=spec, status=status)


async def put_job(bus: Bus, reward: dict[str, Any], phase: str = "running") -> None:
    await bus.kv(subjects.JOBS).put(JOB, record(reward, phase).model_dump_json().encode())


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "service_scorers.py").write_text(USER_CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@asynccontextmanager
async def run_reward(bus: Bus) -> AsyncIterator[RewardService]:
    service = RewardService(bus, ServiceSettings(drain_s=10))
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(bus: Bus, *completions: str, within_s: float = 15.0, **row: Any) -> ScoreReply:
    """Send one scoring request, repeatedly while no worker serves the job; return the reply."""
    request, name = ScoreRequest(prompt="2+2=", completions=list(completions), answer="4", row=row), new_attempt()
    async with asyncio.timeout(within_s):
        while True:
            try:
                data = await bus.request(subjects.score(JOB), pack(request, job=JOB, id=name), deadline_s=within_s)
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                reply, envelope = unpack(data, ScoreReply)
                assert (envelope.job, envelope.id) == (JOB, name)
                return reply


async def eventually(holds: Callable[[], Awaitable[bool]], within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


def raw_group(*completions: str, **row: Any) -> Group:
    g = len(completions)
    return Group(
        job=JOB, draw=Draw(3), attempt="a1", epoch=7,
        prompt_ids=np.arange(3, dtype=np.int32), token_ids=np.arange(2 * g, dtype=np.int32),
        cu_seqlens=np.arange(0, 2 * g + 1, 2, dtype=np.int32), logprobs=np.full(2 * g, -0.5, np.float32),
        mask=np.ones(2 * g, np.uint8), rewards=np.zeros(g, np.float32), failed=np.zeros(g, np.bool_),
        finish=np.zeros(g, np.uint8), spans=np.asarray([[i, 5, 0, 2] for i in range(g)], np.int32),
        meta={"prompt": "2+2=", "completions": list(completions), "answer": "4", "row": row, "worker": "w"},
    )  # fmt: skip


async def publish_raw(bus: Bus, group: Group) -> None:
    data, header = encode_group(group)
    await bus.publish(subjects.raw(JOB), data, headers=group_headers(header))


async def test_requests_are_scored_for_as_long_as_the_job_runs(bus: Bus) -> None:
    async with run_reward(bus) as service:
        await put_job(bus, {"scorers": [{"type": "exact"}]})
        reply = await ask(bus, "4", "5", " 4")
        assert reply.rewards == [1.0, 0.0, 1.0]
        assert reply.parts == {"exact": [1.0, 0.0, 1.0]}
        assert service.status()[JOB]["completions"] == 3
        with pytest.raises(PenstockError, match="not an envelope"):
            await bus.request(subjects.score(JOB), b"rubbish", deadline_s=5)
        await put_job(bus, {"scorers": [{"type": "exact"}]}, phase="succeeded")

        async def gone() -> bool:
            return not service.sessions

        await eventually(gone)
        with pytest.raises(Unavailable, match="nobody serves"):
            await bus.request(subjects.score(JOB), b"", deadline_s=5)


def scorer_processes() -> list[psutil.Process]:
    """Return the running scorer processes of services in this process, without zombies."""
    children = [child for child in psutil.Process().children() if is_alive(child)]
    return [child for child in children if "penstock.services.reward.worker" in child.cmdline()]


@pytest.mark.long
async def test_a_job_that_ends_while_it_is_scored_leaves_no_process(bus: Bus, user_module: None) -> None:
    reward = {"scorers": [{"type": "function", "path": "service_scorers:score"}], "processes": 2, "timeout_s": 600}
    async with run_reward(bus) as service:
        await put_job(bus, reward)
        await ask(bus, "4")
        assert len(scorer_processes()) == 2
        asking = asyncio.create_task(ask(bus, "4", within_s=60, seconds=300))

        async def scoring() -> bool:
            return service.status()[JOB]["running"] == 1

        await eventually(scoring)
        await put_job(bus, reward, phase="cancelled")

        async def gone() -> bool:
            return not service.sessions and not scorer_processes()

        await eventually(gone, 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_scorer_that_cannot_be_opened_is_visible_everywhere(bus: Bus) -> None:
    async with run_reward(bus) as service:
        await put_job(bus, {"scorers": [{"type": "function", "path": "not_installed.rewards:score"}]})
        reply = await ask(bus, "4", "5")
        assert reply.failed == [True, True]
        assert "scorer function 'not_installed.rewards:score' cannot be imported" in reply.errors[0]
        row = service.status()[JOB]
        assert "cannot be imported" in row["waiting_for"]
        assert row["subject"] == subjects.score(JOB)


@pytest.mark.long
async def test_missing_key_of_a_judge_is_visible_and_fails_every_completion(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("PENSTOCK_SCORER_ENV", "NO_SUCH_KEY")
    judge = {"type": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "m", "template": "{completion}"}
    async with run_reward(bus) as service:
        await put_job(bus, {"scorers": [{**judge, "api_key_env": "NO_SUCH_KEY"}], "timeout_s": 90, "processes": 1})
        reply = await ask(bus, "4")
        assert reply.failed == [True]
        assert "NO_SUCH_KEY of the reward service is not set" in reply.errors[0]
        assert "NO_SUCH_KEY" in service.status()[JOB]["waiting_for"]


async def test_open_scorers_describe_themselves_in_the_status(bus: Bus) -> None:
    async with run_reward(bus) as service:
        await put_job(bus, {"scorers": [{"type": "code", "weight": 2.0}, {"type": "exact"}], "processes": 1})
        tests = ["assert x == 4"]
        reply = await ask(bus, "x = 4", "4", tests=tests)
        assert reply.rewards == [2.0, 1.0]
        assert reply.parts == {"code": [1.0, 0.0], "exact": [0.0, 1.0]}
        assert service.status()[JOB]["scorers"]["code"] in {"sandbox: namespaces", "sandbox: landlock"}


@pytest.mark.long
async def test_slow_groups_move_from_raw_to_experience(
    bus: Bus, user_module: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring takes longer than the lease, which the worker extends, so the group is scored once."""
    monkeypatch.setattr(session, "ACK_WAIT_S", 2.0)
    reward = {"scorers": [{"type": "function", "path": "service_scorers:score"}], "slow": True, "timeout_s": 30}
    async with run_reward(bus):
        await put_job(bus, reward)
        await publish_raw(bus, raw_group("4", "bad", "5", seconds=2.5))
        group = await first_experience(bus)
        assert group.rewards.tolist() == [1.0, 0.0, 0.0]
        assert group.failed.tolist() == [False, True, False]
        assert group.parts["function"].tolist() == [1.0, 0.0, 0.0]
        assert "ValueError: bad completion" in group.meta["error"]
        assert group.token_ids.tolist() == list(range(6))

        async def acknowledged() -> bool:
            return (await bus.stream_state(subjects.RAW)).messages == 0

        await eventually(acknowledged)
        assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 1
        state = await bus.consumer_state(subjects.RAW, f"reward-{JOB}")
        assert state.redelivered == 0


@pytest.mark.long
async def test_a_group_above_one_message_is_scored_whole(bus: Bus, user_module: None) -> None:
    """The group arrives in parts and is published in parts; no part is left in RAW."""
    async with run_reward(bus):
        await put_job(bus, {"scorers": [{"type": "exact"}], "slow": True})
        group = raw_group("4", "5")
        large = replace(group, meta={**group.meta, "note": "x" * (9 << 20)})
        data, header = encode_group(large)
        await bus.publish_whole([Outgoing(subjects.raw(JOB), data, group_headers(header))])
        scored = await first_experience(bus)
        assert scored.rewards.tolist() == [1.0, 0.0]
        assert scored.meta["note"] == large.meta["note"]

        async def nothing_left() -> bool:
            return (await bus.stream_state(subjects.RAW)).messages == 0

        await eventually(nothing_left)
        assert (await bus.stream_state(subjects.EXPERIENCE)).messages == 10


@pytest.mark.long
async def test_a_repeated_request_joins_the_first_one(bus: Bus, user_module: None) -> None:
    """A rollout worker repeats an unanswered request under the same id; the completions are scored once."""
    async with run_reward(bus):
        await put_job(bus, {"scorers": [{"type": "function", "path": "service_scorers:dice"}]})
        await ask(bus, "4")
        request = ScoreRequest(prompt="2+2=", completions=["4"], answer="4", row={})

        async def score(name: str) -> float:
            reply = await bus.request(subjects.score(JOB), pack(request, job=JOB, id=name), deadline_s=20)
            return unpack(reply, ScoreReply)[0].rewards[0]

        assert len(set(await asyncio.gather(*(score("again") for _ in range(8))))) == 1
        assert len(set(await asyncio.gather(*(score(f"other{i}") for i in range(3))))) == 3


async def first_experience(bus: Bus) -> Group:
    async with asyncio.timeout(30):
        reader = bus.follow(subjects.EXPERIENCE, subjects.experience(JOB))
        try:
            message = await anext(reader)
        finally:
            await reader.aclose()
    header = parse_group_header(message.headers)
    found = await bus.get_whole(subjects.EXPERIENCE, [message.seq])
    group = decode_group(found[message.seq].data)
    assert (header.draw, header.attempt, header.epoch) == (Draw(3), "a1", 7)
    assert header.rewards == group.rewards.tolist()
    assert header.failed == group.failed.tolist()
    return group


@pytest.mark.long
async def test_unreadable_group_becomes_a_dead_letter_and_blocks_nobody(
    bus: Bus, user_module: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "UNREADABLE_PAUSE_S", 0.05)
    buried: asyncio.Queue[tuple[str, int]] = asyncio.Queue(8)
    await bus.dead_letters(lambda stream, consumer, seq: buried.put_nowait((stream, seq)))
    async with run_reward(bus):
        await put_job(bus, {"scorers": [{"type": "exact"}], "slow": True})
        seq = await bus.publish(subjects.raw(JOB), b"not a group")
        await publish_raw(bus, raw_group("4"))
        assert (await first_experience(bus)).rewards.tolist() == [1.0]
        async with asyncio.timeout(20):
            assert await buried.get() == (subjects.RAW, seq)


@pytest.mark.long
async def test_process_drains_on_sigterm(bus: Bus, nats_server: NatsServer, user_module: None) -> None:
    """A real process sends heartbeats and serves; after SIGTERM it finishes its requests and leaves no scorers."""
    beats: asyncio.Queue[Heartbeat] = asyncio.Queue(1000)
    await bus.subscribe(subjects.HEARTBEATS, lambda _, data: beats.put_nowait(unpack(data, Heartbeat)[0]))
    env = {**os.environ, "PENSTOCK_NATS_URL": nats_server.url, "PENSTOCK_HEARTBEAT_S": "0.2"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock.services.reward", env=env)
    try:
        await put_job(bus, {"scorers": [{"type": "function", "path": "service_scorers:score"}]})
        assert (await ask(bus, "4", within_s=30)).rewards == [1.0]
        scorers = children(process.pid)
        assert scorers
        slow = asyncio.create_task(ask(bus, "4", "4", seconds=1.0))
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert (await slow).rewards == [1.0, 1.0]
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    seen = [beats.get_nowait() for _ in range(beats.qsize())]
    assert {beat.service for beat in seen} == {"reward"}
    assert any(beat.ready and beat.jobs[JOB]["completions"] == 1 for beat in seen if JOB in beat.jobs)
    assert not [pid for pid in scorers if alive(pid)]


@pytest.mark.long
async def test_scorers_die_with_their_service(bus: Bus, nats_server: NatsServer, user_module: None) -> None:
    env = {**os.environ, "PENSTOCK_NATS_URL": nats_server.url}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock.services.reward", env=env)
    await put_job(bus, {"scorers": [{"type": "function", "path": "service_scorers:score"}]})
    await ask(bus, "4", within_s=30)
    busy = asyncio.create_task(ask(bus, "4", seconds=60))
    await asyncio.sleep(0.3)
    scorers = children(process.pid)
    process.kill()
    await process.wait()
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)

    async def none_left() -> bool:
        return not [pid for pid in scorers if alive(pid)]

    assert scorers
    await eventually(none_left)


def children(parent: int) -> list[int]:
    """Return the process ids of the direct children."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


def alive(pid: int) -> bool:
    """Return True unless the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
