"""The API refuses hostile feedback bodies without listing each of their flaws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from penstock.services.coordinator.api.http.occupancy import Occupancy
from penstock.services.coordinator.api.live.feedback_bodies import MAX_ITEM_VALUES, NDJSON, read_batch, read_post
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.config.service import ServiceSettings

ID = "0190b5a4-7d3c-7000-8000-000000000000"


def request_of(body: bytes, kind: str = "application/json") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    state = SimpleNamespace(backend=SimpleNamespace(occupancy=Occupancy(ServiceSettings())))
    headers = [(b"content-type", kind.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers, "app": SimpleNamespace(state=state)}, receive)


def metric(value: Any, **more: Any) -> dict[str, Any]:
    return {"metric_name": "reward", "inference_id": ID, "value": value, **more}


async def refused(body: bytes) -> HttpProblem:
    with pytest.raises(HttpProblem) as caught:
        await read_post(request_of(body))
    return caught.value


async def test_a_list_is_refused_at_its_first_flaw() -> None:
    problem = await refused(orjson.dumps(metric([1] * 50_000)))
    assert (problem.status, problem.code) == (422, "invalid_feedback")
    assert len(problem.errors) < 10
    assert "more" in problem.detail
    assert "49999" not in problem.detail


async def test_more_values_than_an_interaction_has_are_not_validated() -> None:
    body = orjson.dumps(metric([1] * MAX_ITEM_VALUES))
    assert (await refused(body)).code == "too_complex"
    for kind, sent in ((NDJSON, body + b"\n" + orjson.dumps(metric(1.0))), ("application/json", b"[%b]" % body)):
        found = await read_batch(request_of(sent, kind))
        assert isinstance(found[0], HttpProblem)
        assert found[0].code == "too_complex"
        assert [item.value for item in found[1:]] == ([1.0] if kind == NDJSON else [])


async def test_many_unknown_keys_are_one_flaw() -> None:
    problem = await refused(orjson.dumps(metric(1.0, **{f"x{i}": 1 for i in range(5000)})))
    assert problem.status == 422
    assert len(problem.errors) == 1


async def test_a_long_text_with_many_commas_is_no_complex_body() -> None:
    post = await read_post(request_of(orjson.dumps(metric("," * 120_000))))
    assert post.value == "," * 120_000
