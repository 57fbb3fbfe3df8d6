"""The audit log over the real bus: a record for each request about jobs, keys and users' data, and a job's events."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from penstock.services.coordinator import access
from penstock.services.coordinator.access import AuditLog
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.audit_log import AuditRecord
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.jetstream import call

ROOT = {"authorization": "Bearer root"}


def steps(job: str) -> list[tuple[str, str, Any, int]]:
    """Return the requests to send in this order, as (method, path, body, expected status)."""
    at = f"/v1/jobs/{job}"
    return [
        ("POST", f"{at}/promote", {"version": 0}, 202),
        ("POST", f"{at}/rollback", {"checkpoint": 0}, 202),
        ("POST", f"{at}/checkpoints", None, 202),
        ("PATCH", f"{at}?wait=0", {"metadata": {"a": "b"}}, 202),
        ("POST", f"{at}/pause", None, 202),
        ("POST", f"{at}/pause", None, 202),
        ("POST", f"{at}/resume", None, 202),
        ("POST", f"{at}/scale", {"pool": "rollout", "replicas": 2}, 409),
        ("PUT", "/v1/users/alice/consent", {"train": False}, 200),
        ("DELETE", "/v1/users/alice/data", None, 202),
        ("POST", "/v1/keys", {"name": "other", "scopes": ["jobs:read"]}, 201),
        ("POST", f"{at}/cancel?force=true", None, 202),
    ]


async def test_a_record_names_the_key_that_sent_the_request(open_live: Any) -> None:
    async with open_live(api_keys="root") as live:
        created = (await live.client.post("/v1/keys", json={"name": "ops", "scopes": ["admin"]}, headers=ROOT)).json()
        ops = {"authorization": f"Bearer {created['key']}"}
        wanted = steps(live.job)
        for method, path, body, status in wanted:
            reply = await live.client.request(method, path, json=body, headers=ops)
            assert reply.status_code == status, (path, reply.text)
        rows = (await live.client.get(f"/v1/audit-log?key={created['id']}&limit=100", headers=ROOT)).json()["data"]
        templates = [
            path.partition("?")[0].replace(live.job, "{job_id}").replace("alice", "{user}") for _, path, _, _ in wanted
        ]
        expected = [(method, place, status) for (method, _, _, status), place in zip(wanted, templates, strict=True)]
        assert [(row["method"], row["route"], row["status"]) for row in reversed(rows)] == expected
        assert {row["job"] for row in rows} == {live.job, ""}
        erased = live.service.pseudonyms.of("alice")
        assert [row["path"] for row in rows if "users" in row["route"]] == [{"user": erased}] * 2
        stored = b"".join(message.data for message in await live.bus.read(subjects.AUDIT, "audit.>"))
        assert b"alice" not in stored
        assert created["key"].encode() not in stored

        of_job = (await live.client.get(f"/v1/audit-log?job={live.job}&limit=100", headers=ROOT)).json()["data"]
        assert of_job == [row for row in rows if row["job"]]
        record = (await live.client.get(f"/v1/jobs/{live.job}", headers=ROOT)).json()
        assert {(one["kind"], one["by"]) for one in record["operations"]} == {
            (kind, created["id"]) for kind in ("promote", "rollback", "checkpoint")
        }
        events = (await live.client.get(f"/v1/jobs/{live.job}/events", headers=ROOT)).json()["data"]
        asked = [event for event in events if event["type"] == "asked"]
        actions = ["promote", "rollback", "checkpoint", "amend", "pause", "resume", "cancel"]
        assert [event["data"]["action"] for event in asked] == actions, "a second pause changes nothing"
        assert {event["data"]["by"] for event in asked} == {created["id"]}
        assert asked[0]["message"] == f"promote (version 0), by key {created['id']}"
        assert asked[3]["message"] == f"amend metadata.a, by key {created['id']}"


async def test_feedback_and_refused_requests_leave_no_record(open_live: Any) -> None:
    async with open_live(api_keys="root") as live:
        body = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True}
        assert (await live.client.post("/v1/feedback", json=body, headers=ROOT)).status_code == 202
        assert (await live.client.delete("/v1/users/alice/data")).status_code == 401
        token = (await live.client.post("/v1/feedback/tokens", json=_about(body), headers=ROOT)).json()["token"]
        bearer = {"authorization": f"Bearer {token}"}
        for _ in range(3):
            again = {**bearer, "idempotency-key": "same"}
            assert (await live.client.delete("/v1/users/alice/data", headers=bearer)).status_code == 403
            assert (await live.client.post(f"/v1/jobs/{live.job}/cancel", headers=again)).status_code == 403
        assert (await live.bus.stream_state(subjects.AUDIT)).messages == 0


def _about(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("inference_id", "metric_name")}


async def test_records_cannot_be_deleted_and_old_ones_make_room(bus: Bus) -> None:
    log = AuditLog(bus)
    await log.append(record(0))
    with pytest.raises(Unavailable):
        await bus.delete_message(subjects.AUDIT, 1)
    with pytest.raises(Unavailable):
        await bus.purge(subjects.AUDIT, "audit.>")
    sizes = {"experience_bytes": 8 << 20, "stream_bytes": 1 << 20}
    await bus.ensure_streams(**sizes, audit_keep_s=86400.0)
    info = await call(bus._connection, "STREAM.INFO.AUDIT", {}, deadline_s=5, what="look at AUDIT")
    config = info["config"]
    assert (config["deny_delete"], config["deny_purge"], config["max_age"]) == (True, True, 86400 * 10**9)
    for _ in range(8):
        await bus.publish(subjects.audit("k", ""), os.urandom(200_000))
    await log.append(record(1))
    state = await bus.stream_state(subjects.AUDIT)
    assert (state.first_seq > 1, state.last_seq) == (True, 10)


async def test_pages_begin_where_they_are_asked_to(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(bus)
    for newest_first in (False, True):
        assert await log.page(key="", job="", since=0.0, after=None, limit=10, newest_first=newest_first) == []
    for number in range(12):
        await log.append(record(number, key="ab"[number % 2], job=f"job_{number % 3:032x}"))
        await asyncio.sleep(0.002)
    times = [message.time for message in await bus.read(subjects.AUDIT, "audit.>")]

    async def seqs(
        key: str = "", job: str = "", since: float | None = None, after: int | None = None, newest_first: bool = False
    ) -> list[int]:
        page = await log.page(key=key, job=job, since=since, after=after, limit=5, newest_first=newest_first)
        return [seq for seq, _ in page]

    assert await seqs() == [1, 2, 3, 4, 5]
    assert await seqs(after=9) == [10, 11, 12]
    assert await seqs(key="b") == [2, 4, 6, 8, 10]
    assert await seqs(key="a", job=f"job_{2:032x}") == [3, 9]
    for place, time in enumerate(times, 1):
        assert (await seqs(since=time - 1e-6))[0] == place
    assert await seqs(since=times[6] - 1e-6, after=8) == [9, 10, 11, 12]
    assert await seqs(since=times[-1] + 1) == await seqs(since=times[-1] + 1, newest_first=True) == []

    assert await seqs(newest_first=True) == [12, 11, 10, 9, 8]
    assert await seqs(after=4, newest_first=True) == [3, 2, 1]
    assert await seqs(key="b", newest_first=True) == [12, 10, 8, 6, 4]
    assert await seqs(key="a", job=f"job_{2:032x}", newest_first=True) == [9, 3]
    assert await seqs(since=times[9] - 1e-6, newest_first=True) == [12, 11, 10]
    assert await seqs(after=1, newest_first=True) == await seqs(after=12) == []
    monkeypatch.setattr(access, "BLOCK", 2)
    assert await seqs(job=f"job_{0:032x}", after=12, newest_first=True) == [10, 7, 4, 1]


async def test_a_request_takes_effect_although_its_record_is_lost(
    open_live: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "APPEND_S", 0.2)
    async with open_live() as live:
        await call(live.bus._connection, "STREAM.DELETE.AUDIT", {}, deadline_s=5, what="lose the log")
        reply = await live.client.put("/v1/users/alice/consent", json={"train": False})
        assert (reply.status_code, reply.json()["train"]) == (200, False)
    (line,) = [one for one in caplog.records if one.levelname == "ERROR" and "audit log lacks" in one.getMessage()]
    assert reply.headers["x-request-id"] in line.getMessage()


def record(number: int, key: str = "k", job: str = "") -> AuditRecord:
    return AuditRecord(
        request=f"req_{number:032x}", time=float(number), key=key, method="POST", route="/v1/x", status=200, job=job
    )
