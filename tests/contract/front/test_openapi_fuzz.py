"""Every operation of the OpenAPI document under generated requests, with keys and without: what it promises holds."""

from __future__ import annotations

import re
from typing import Any

import httpx
import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

EXAMPLES = 3
"""Generated requests for each operation."""
ENDLESS = frozenset({"/v1/jobs/{job_id}/events"})
"""Streams that end with their job only; they have tests of their own."""
AWAY = frozenset({"no_gateway", "no_feedback"})
"""What the coordinator of these tests does not have, and says so."""
BEYOND_SCHEMA = re.compile(
    r"(post|patch) (/v1/jobs(/{job_id})?|/v1/keys|.*/completions|.*/feedback(/batch|/tokens)?|/v1/files|/v1/webhooks.*|"
    r"/v1/fine_tuning/.*|.*/graders/.*)"
)
"""Bodies with rules that a schema cannot say (between fields, 1.0 is no integer): a valid one may still be a 422."""
KEY = "fuzz-key"


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {KEY}"}], ids=["open", "with a key"])
def test_the_document_holds(serve: Any, books: Any, job: Any, headers: dict[str, str]) -> None:
    server = serve(api_keys=KEY if headers else "")
    job_id = httpx.post(f"{server.url}/v1/jobs", json=job, headers=headers).json()["id"]
    books.advance(job_id, "succeeded")  # so that nothing waits for what will not come
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    failures: list[str] = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in ENDLESS:
            failures += _flaws(operation, job_id, headers)
    assert not failures, "\n\n".join(failures)


def _flaws(operation: Any, job_id: str, headers: dict[str, str]) -> list[str]:
    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy())
    def hold(case: Any) -> None:
        if "job_id" in case.path_parameters:  # any other is unknown, which says little
            case.path_parameters["job_id"] = job_id
        response = case.call(headers=headers, timeout=30)
        if response.status_code == 503 and response.json()["error"]["code"] in AWAY:
            return
        case.validate_response(response, excluded_checks=beyond, headers=headers)

    beyond = (
        [checks.positive_data_acceptance] if BEYOND_SCHEMA.fullmatch(f"{operation.method} {operation.path}") else []
    )
    try:
        hold()
    except (Exception, BaseExceptionGroup) as error:  # what is wrong with one operation must not hide the others
        text = "\n".join(f"{type(inner).__name__}: {inner}" for inner in getattr(error, "exceptions", [error]))
        notes = "\n".join(getattr(error, "__notes__", []))
        return [f"{operation.method.upper()} {operation.path}: {error}\n{text}\n{notes}"]
    return []
