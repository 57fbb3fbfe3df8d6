"""A trace begins at the API and is in all messages and log lines of a job."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.messages import BatchManifest, Ticket
from penstock.shared.protocol.trace import TRACE_HEADER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_the_trace_of_a_submission_is_in_tickets_groups_batches_and_logs(stack: Any, make_job: Any) -> None:
    headers = {"authorization": "Bearer e2e-key", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    with stack.frozen("rollout-0"):
        reply = httpx.post(f"{stack.stack.url}/v1/jobs", json=make_job("train.max_updates=4"), headers=headers)
        job = reply.json()["id"]

        def tickets() -> Any:
            return stack.on_bus(lambda bus: bus.walk(subjects.TICKETS, subjects.tickets(job), last_seq=1 << 40))

        found = stack.until(tickets, "tickets that nobody takes")
        assert {unpack(message.data, Ticket)[1].trace for message in found} == {TRACE}
    record = stack.finish(job)
    assert (record.status.phase, record.trace) == ("succeeded", TRACE)

    groups = stack.on_bus(lambda bus: bus.read(subjects.EXPERIENCE, subjects.experience(job), headers_only=True))
    assert {message.headers.get(TRACE_HEADER) for message in groups} == {TRACE}
    batches = stack.on_bus(lambda bus: bus.read(subjects.BATCHES, subjects.batches(job)))
    assert {unpack(message.data, BatchManifest)[1].trace for message in batches} == {TRACE}
    assert (len(groups) >= 16, len(batches)) == (True, 4)
    for worker in ("coordinator-0", "rollout-0", "trainer-0"):
        rows = [json.loads(line) for line in stack.log(worker).splitlines() if TRACE in line]
        assert rows, f"{worker} logged nothing for it"
        assert {(row["trace"], row["job"]) for row in rows} == {(TRACE, job)}, worker


@pytest.mark.long
def test_a_request_without_a_trace_begins_one(stack: Any) -> None:
    first, second = (stack.submit("train.max_updates=1") for _ in range(2))
    traces = {stack.finish(job).trace for job in (first, second)}
    assert len(traces) == 2
    assert all(len(trace) == 32 and int(trace, 16) for trace in traces)
