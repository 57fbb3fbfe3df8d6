"""Jobs as models: which version of each is served, and since when."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.services.coordinator.serving.models import ModelTable
from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol.jobs import JobRecord, JobStatus
from penstock.shared.transport.bus import Entry

SPEC = {"kind": "online_rl", "name": "agent", "model": {"config": {"hidden_size": 64}, "tokenizer": "char"}}


def record(**status: Any) -> JobRecord:
    fields = {"phase": "running", "policy_version": 7, **status}
    return JobRecord(
        id="job_1", name="agent", created_at=datetime(2026, 1, 1, tzinfo=UTC), spec=SPEC, status=JobStatus(**fields)
    )


class Bus:
    """Stand-in for the bus of the table, which follows nothing here."""


def test_a_model_has_its_promoted_version_and_the_time_of_promotion() -> None:
    bus: Any = Bus()
    table = ModelTable(bus)
    with pytest.raises(Unavailable):
        table.find("agent")
    table.current = True
    table._take(record())
    assert (table.find("agent").version, table.find("agent").promoted_at) == (7, None), (
        "served as soon as it is trained"
    )
    for version, second in ((3, 100), (5, 260)):
        table._take(record(served_version=version, promoted_at=datetime.fromtimestamp(second, UTC)))
        assert (table.find("job_1").version, table.find("job_1").promoted_at) == (version, second)
    ended = record(phase="succeeded")
    table._change(Entry(ended.id, ended.stored(), 9, 0.0))
    with pytest.raises(NotFound):
        table.find("agent")
