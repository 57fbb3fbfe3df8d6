"""Services of the HTTP API on a real bus: the fold of a finished job, and the audit in bounded portions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.coordinator.api.jobs.samples import SAMPLE_ID
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.leader_rpc import LeaderRpc
from penstock.services.coordinator.queries import health
from penstock.services.coordinator.queries.diagnosis import chunks_of, largest_size
from penstock.services.coordinator.services import build_services
from penstock.services.coordinator.training import ledger_cache
from penstock.services.coordinator.training.journal import Journal
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Conflict, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Finished,
    JobStarted,
    Redrawn,
    SealedGroup,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.jetstream import call

CONFIG = JobConfig.parse(
    {
        "name": "shown",
        "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 1},
    }
)


async def job_of(bus: Bus, *, phase: str) -> str:
    """Store a job with an initial checkpoint, finished in the ledger unless ``phase`` is running; return its id."""
    store = JobStore(bus)
    job = (await store.create(CONFIG)).id
    journal = Journal(bus, job)
    await journal.load()
    await journal.append([JobStarted(writer_epoch=1, time=0.0, config_digest="c")])
    await journal.append(
        [
            Checkpointed(
                writer_epoch=1, time=0.0, number=0, version=0, digest="w", path="/gone", trainer_epoch=1, low_seq=0
            )
        ]
    )  # fmt: skip
    if phase != "running":
        await journal.append([Finished(writer_epoch=1, time=0.0, reason=phase, summary={})])
    await store.set_status(job, phase=phase, finished_at=datetime.now(UTC) if phase != "running" else None)
    return job


async def test_a_finished_ledger_is_folded_once(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_cache, "KEPT_STATES", 2)
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    jobs = [await job_of(bus, phase="succeeded") for _ in range(3)]
    running = await job_of(bus, phase="running")
    for job in [*jobs, running]:
        assert [row["number"] for row in await services.checkpoints.rows(job)] == [0]
        await bus.purge(subjects.LEDGER, subjects.ledger(job))  # without entries, only a cached state gives rows
    assert [len(await services.checkpoints.rows(job)) for job in reversed([*jobs, running])] == [0, 1, 1, 0]


def test_the_audit_reads_portions_bounded_in_bytes() -> None:
    mib = 1 << 20
    assert chunks_of({1: 60 * mib, 2: 4 * mib, 3: 1, 4: 65 * mib, 5: mib}) == [[1, 2], [3], [4], [5]]
    assert chunks_of({}) == []
    full = CONFIG.completions_per_group * CONFIG.sampling.max_new_tokens
    group = SealedGroup(Draw(0), "a", 1, "d", 0, 0, [1.0], full, "w")
    assert largest_size(CONFIG, group) == CONFIG.max_group_bytes


async def test_an_audit_names_data_that_it_cannot_read(bus: Bus, tmp_path: Path) -> None:
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    job, base = await job_of(bus, phase="running"), {"writer_epoch": 1, "time": 0.0}
    journal = Journal(bus, job)
    await journal.load()
    await journal.append([Drawn(**base, start=0, stop=2, min_version=0, deadline=9.0)])

    async def train(number: int, data: bytes, digest: str) -> dict[str, Any]:
        version = number - 1
        seq = await bus.publish(subjects.experience(job), data)
        groups = [SealedGroup(Draw(version), "a" * number, seq, digest, version, version, [0.0, 1.0, 0.0, 1.0], 4, "w")]
        place = {"number": number, "revision": 1}
        await journal.append(
            [
                BatchSealed(**base, **place, start_version=version, update_index=version, groups=groups),
                BatchTrained(**base, **place, version=number, digest="w", trainer_epoch=1),
            ]
        )
        return await services.diagnosis.audit(job)

    data, header = encode_group(group(job, Draw(0)))
    honest = await train(1, data, header.digest)
    assert honest["ok"], honest["violations"]
    assert {check["name"]: check["detail"] for check in honest["checks"]}["digests"].startswith("1 groups read")
    (flaw,) = (await train(2, b"overwritten", "d"))["violations"]
    assert flaw.startswith("digests: batch 2, draw 1.0: the stored group does not decode: ")
    await bus.publish(subjects.ledger(job), b"overwritten")
    assert "ledger equation: entry 6: " in (await services.diagnosis.audit(job))["violations"][0]


async def test_pages_of_samples_go_through_every_batch(bus: Bus, tmp_path: Path) -> None:
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    job = await job_of(bus, phase="running")
    journal = Journal(bus, job)
    await journal.load()
    base, expected = {"writer_epoch": 1, "time": 0.0}, []
    await journal.append([Drawn(**base, start=0, stop=4, min_version=0, deadline=9.0)])
    for number in (1, 2, 3):
        draw = Draw(number, 10**12)  # of a replayed dead letter
        await journal.append([Redrawn(**base, letter=number, draw=draw, min_version=0, deadline=9.0)])
        found = group(job, draw)
        data, header = encode_group(replace(found, meta={"source": "addition" if number < 3 else "gone"}))
        seq = await bus.publish(subjects.experience(job), data, headers=group_headers(header))
        sealed = SealedGroup(draw, "a", seq, header.digest, number - 1, number - 1, header.rewards, 4, "w")
        trained = {"revision": 1, "version": number, "digest": "w", "trainer_epoch": 1}
        await journal.append(
            [
                BatchSealed(
                    **base,
                    number=number,
                    revision=1,
                    start_version=number - 1,
                    update_index=number - 1,
                    groups=[sealed],
                ),
                BatchTrained(**base, number=number, **trained),
            ]
        )
        expected = [f"{job}-{number}-{draw}-{index}" for index in range(4)] + expected

    async def pages(min_reward: float | None, env: str | None = None) -> list[str]:
        seen: list[str] = []
        while rows := await services.samples.page(
            job, step=None, limit=1, sort=None, after=seen[-1] if seen else None, min_reward=min_reward, env=env
        ):
            seen += [row["id"] for row in rows]
        return seen

    assert await pages(None) == expected
    assert await pages(0.5) == [id for id in expected if int(id[-1]) % 2]
    assert await pages(None, "addition") == expected[4:], "the newest batch has a row of another source"
    with pytest.raises(NotFound, match="they are called addition"):
        await pages(None, "gone")
    for id in expected:
        path = SAMPLE_ID.fullmatch(id)
        assert path is not None, "GET /v1/samples/{id} takes the ids that the list shows"
        one = await services.samples.one(path[1], path[2])
        assert (one["id"], one["href"]) == (id, f"/v1/samples/{id}")
        assert set(one["siblings"]) < set(expected)


async def test_a_budget_may_shrink_no_further_than_the_groups_allow(bus: Bus, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "x" * 50_000, "answer": "y"}) + "\n")
    spec = CONFIG.model_dump(mode="json", exclude_unset=True) | {"data": {"train": {"type": "file", "path": str(rows)}}}
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    job = (await services.jobs.create(JobConfig.parse(spec))).id
    need = 4 * CONFIG.groups_per_batch * CONFIG.max_group_bytes  # without its rows

    def with_budget(byte_budget: int) -> Callable[[JobRecord], JobConfig]:
        return lambda record: JobConfig.parse({**spec, "limits": {"byte_budget": byte_budget}})

    with pytest.raises(ConfigError, match="a data row of up to 50"):
        await services.steering.amend(job, with_budget(need), by="k")
    assert (await services.steering.amend(job, with_budget(need + 2_000_000), by="k")).generation == 2
    rows.unlink()
    assert (await services.steering.amend(job, with_budget(need + 3_000_000), by="k")).generation == 3, (
        "a larger budget is always accepted"
    )
    await services.jobs.set_status(job, phase="succeeded")
    with pytest.raises(Conflict, match=r"is succeeded; .*: extend or clone it"):
        await services.steering.amend(job, with_budget(need + 4_000_000), by="k")


def group(job: str, draw: Draw) -> Group:
    """Return a group of four completions of one token; every other completion is right."""
    ones = np.ones(4, np.int32)
    return Group(
        job=job, draw=draw, attempt="a", epoch=1, prompt_ids=ones, token_ids=ones,
        cu_seqlens=np.arange(5, dtype=np.int32), logprobs=np.zeros(4, np.float32), mask=np.ones(4, np.uint8),
        rewards=np.asarray([0, 1, 0, 1], np.float32), failed=np.zeros(4, np.bool_), finish=np.zeros(4, np.uint8),
        spans=np.asarray([[i, 0, 0, 1] for i in range(4)], np.int32), meta={},
    )  # fmt: skip


async def test_a_deployment_that_cannot_write_is_not_ready(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    monkeypatch.setattr(LeaderRpc, "name", lambda self: asyncio.sleep(0, "api-0"))
    ready, checks = await services.health.check()
    assert (ready, checks["write"]["detail"]) == (True, "taken")
    await call(bus._connection, f"STREAM.DELETE.KV_{subjects.ANSWERS}", {}, deadline_s=5, what="lose a bucket")
    monkeypatch.setattr(health, "TRUST_S", 0.0)
    assert (await services.health.check())[0], "the newest answer holds for a moment"
    services.health._probe._until = 0.0
    ready, checks = await services.health.check()
    assert not ready
    assert checks["ledger"]["ok"], "it can still be read"
    assert not checks["write"]["ok"]


async def test_an_open_deployment_warns_about_a_job_without_defences(bus: Bus, tmp_path: Path) -> None:
    settings = ServiceSettings(data_dir=tmp_path, http_host="0.0.0.0", api_keys="k")
    services = build_services(bus, JobStore(bus), Members(), {}, settings)
    model = {"config": {"hidden_size": 64}, "tokenizer": "char"}
    for name, online, num_warnings in (("bare", {}, 1), ("guarded", {"defences": "standard"}, 0)):
        file = {"kind": "online_rl", "name": name, "model": model, "online": online}
        spec = parse_job(file)
        plan = await services.submissions.dry_run(spec)
        record = await services.submissions.submit(spec, file)
        events = [row for _, row in await services.events.page(record.id, after=0, limit=9)]
        assert [(row["level"], row["type"], row["message"]) for row in events] == [
            ("warning", "submitted", text) for text in plan["warnings"]
        ]
        assert len(events) == num_warnings
