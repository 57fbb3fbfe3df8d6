"""Graders over HTTP and the bus, run by a real reward service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.services.coordinator import graders
from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import build_services
from penstock.services.reward.grading import GradingService
from penstock.services.reward.service import RewardService
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.grading import GradeRequest
from penstock.shared.transport.bus import Bus

CHECK = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{sample.output_text}}",
         "reference": "{{item.answer}}"}  # fmt: skip
PYTHON = {
    "type": "python",
    "name": "length",
    "source": "def grade(sample, item):\n    return len(sample['output_text'])",
}


@pytest.fixture
async def client(bus: Bus, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServiceSettings(data_dir=tmp_path, rate_limit="100000/minute")
    app = create_app(build_services(bus, JobStore(bus), Members(), {}, settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as found:
        yield found


@pytest.fixture
async def reward(bus: Bus, tmp_path: Path) -> AsyncIterator[RewardService]:
    service = RewardService(bus, ServiceSettings(data_dir=tmp_path))
    task = asyncio.create_task(service.run())
    async with asyncio.timeout(30):
        while not service.ready:
            await asyncio.sleep(0.01)
    yield service
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def run(client: httpx.AsyncClient, grader: dict[str, Any], sample: str, item: dict[str, Any]) -> Any:
    reply = await client.post("/v1/graders/run", json={"grader": grader, "model_sample": sample, "item": item})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.long
async def test_a_reward_worker_grades(client: httpx.AsyncClient, reward: RewardService, monkeypatch: Any) -> None:
    both = {"type": "multi", "name": "all", "graders": {"right": CHECK, "length": PYTHON},
            "calculate_output": "right + length / 10"}  # fmt: skip
    found = await run(client, both, "abc", {"answer": "abc"})
    assert (found["reward"], found["sub_rewards"]) == (pytest.approx(1.3), {"right": 1.0, "length": 3.0})
    assert found["metadata"]["execution_time"] > 0
    valid = await client.post("/v1/graders/validate", json={"grader": both})
    assert valid.status_code == 200, valid.text

    broken = {**PYTHON, "source": "def grade(sample, item):\n    return 1 / 0"}
    errors = (await run(client, broken, "x", {}))["metadata"]["errors"]
    assert errors["python_grader_runtime_error"] is True
    assert "ZeroDivisionError" in errors["python_grader_runtime_error_details"]
    assert [name for name, value in errors.items() if value is True] == ["python_grader_runtime_error"]

    lacks = {**PYTHON, "source": f"import nothing_of_that_name\n{PYTHON['source']}"}
    errors = (await run(client, lacks, "x", {}))["metadata"]["errors"]
    assert "does it import what is missing?" in errors["python_grader_runtime_error_details"]

    for source in ("x = 1", "def grade(sample): return 1", "def grade(sample, item, row): return 1",
                   "def grade(sample, item, *, row): return 1"):  # fmt: skip
        refused = await client.post("/v1/graders/validate", json={"grader": {**PYTHON, "source": source}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_grader"), source
    for source in ("def grade(*both): return 1", "def grade(sample, item, row=None, **rest): return 1"):
        valid = await client.post("/v1/graders/validate", json={"grader": {**PYTHON, "source": source}})
        assert valid.status_code == 200, valid.text

    monkeypatch.setattr(graders, "DEADLINE_S", 0.5)
    hangs = {**PYTHON, "source": "def grade(sample, item):\n    while True: pass"}
    errors = (await run(client, hangs, "x", {}))["metadata"]["errors"]
    assert errors["unresponsive_reward_error"] is True


async def test_requests_that_nobody_waits_for_are_not_graded(bus: Bus) -> None:
    request = GradeRequest(scorers=[{"type": "exact"}], sample="x", item={}, deadline_s=30, wait_s=0)
    async with await GradingService(bus).open():
        with pytest.raises(Unavailable, match="nobody waits"):
            await bus.request(subjects.GRADE, pack(request), deadline_s=30)


async def test_grading_without_a_reward_worker_or_a_model_is_an_error(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/graders/run", json={"grader": CHECK, "model_sample": "x"})
    assert reply.status_code == 503
    assert "no reward worker" in reply.json()["detail"]
    judge = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "x"}]}
    reply = await client.post("/v1/graders/run", json={"grader": judge, "model_sample": "x"})
    assert reply.status_code == 422
    assert "PENSTOCK_GRADER_URL" in reply.json()["detail"]
