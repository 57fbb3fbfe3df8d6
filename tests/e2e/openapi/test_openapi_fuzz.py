"""Check that a whole deployment keeps to its OpenAPI document, for every operation, with keys and without.

The test calls each operation once so that it succeeds, and then with generated requests.
"""

from __future__ import annotations

import itertools
import os
import re
import uuid
from typing import Any

import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

FULL = os.environ.get("PENSTOCK_FUZZ") == "full"
"""True in ``make fuzz``, which generates more requests."""
SHORT_WAIT_S = 0.05
"""Longest ``wait`` of a generated request."""
BEYOND_SCHEMA = re.compile(
    r"(post|patch) (/v1/jobs(/{job_id})?|/v1/keys|.*/completions|.*/feedback(/batch|/tokens)?|/v1/files(/code)?|"
    r"/v1/webhooks.*|/v1/fine_tuning/.*|.*/graders/.*)"
)
"""Operations with rules that a schema cannot express (between fields, 1.0 as integer, code): 422 is allowed."""
SLOW = re.compile(r"graders/|/replay$")
"""Operations that start a process; the test sends them a quarter of the requests."""
SUBMIT = ("POST /v1/jobs", "POST /v1/fine_tuning/jobs")
"""Operations whose jobs the test ends at once, since each job would start processes."""
VALID_KEY = re.compile(r"[A-Za-z0-9._~-]{1,255}")
UNKNOWN = 3
"""Every third generated request keeps its generated ids, which no object has."""
LAST = ("DELETE", "cancel", "end", "resume")
"""Operations that delete an object or change its state run after the others."""


@pytest.mark.timeout(900)
def test_the_api_keeps_to_its_openapi_document(front: Any) -> None:
    """The test reports all violations together, and the operations that never succeeded."""
    examples = (40 if FULL else 12) if front.headers else (10 if FULL else 5)
    schema = schemathesis.openapi.from_url(f"{front.url}/openapi.json", timeout=60)
    found = Findings(front)
    for operation in sorted((one.ok() for one in schema.get_all_operations()), key=_order):
        found.check_operation(operation, examples)
    assert not found.flaws, "\n\n".join(found.flaws.values())
    assert not found.never_succeeded, "\n".join(found.never_succeeded)


def _order(operation: Any) -> tuple[bool, bool, str]:
    method, path = operation.method.upper(), operation.path
    return method in LAST or path.endswith(LAST), method != "GET", path


class Findings:
    """Violations of the document, and operations that never succeeded."""

    def __init__(self, front: Any) -> None:
        self.front = front
        self.flaws: dict[str, str] = {}
        self.never_succeeded: list[str] = []

    def check_operation(self, operation: Any, examples: int) -> None:
        """Call an operation so that it succeeds, and then with ``examples`` generated requests."""
        label = f"{operation.method.upper()} {operation.path}"
        parameters = self.front.path_parameters(label)
        good = operation.Case(path_parameters=dict(parameters), **self.front.call(label))
        reply = self._send(label, good)
        if not 200 <= reply.status_code < 300:
            self.never_succeeded.append(f"{label}: {reply.status_code} {reply.text}")
        self._generate(operation, label, parameters, examples)

    def _generate(self, operation: Any, label: str, parameters: dict[str, Any], examples: int) -> None:
        """Call an operation with generated requests, most of them about existing objects."""
        count = itertools.count(1)

        @hypothesis.settings(
            max_examples=1 + examples // 4 if SLOW.search(label) else examples, derandomize=True, database=None,
            deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy())
        def generated(case: Any) -> None:
            if next(count) % UNKNOWN:
                self._ground(label, case, parameters)
            _tame(case)
            self._send(label, case)

        generated()

    def _ground(self, label: str, case: Any, parameters: dict[str, Any]) -> None:
        """Change a generated request so that it is about existing objects."""
        case.path_parameters |= parameters
        known = self.front.known_values(label)
        for item in case.body if isinstance(case.body, list) else [case.body]:
            if isinstance(item, dict):
                item.update({name: known[name] for name in item.keys() & known if isinstance(item[name], str)})

    def _send(self, label: str, case: Any) -> Any:
        """Send a request and check the reply. Record a violation, so that it does not hide later ones."""
        response = case.call(headers=self.front.headers, timeout=30)
        beyond = [checks.positive_data_acceptance] if BEYOND_SCHEMA.fullmatch(label.lower()) else []
        try:
            case.validate_response(response, excluded_checks=beyond, headers=self.front.headers)
        except (Exception, BaseExceptionGroup) as error:
            text = "\n".join(f"{type(inner).__name__}: {inner}" for inner in getattr(error, "exceptions", [error]))
            self.flaws.setdefault(f"{label} {response.status_code} {type(error).__name__}", f"{label}: {error}\n{text}")
        if label in SUBMIT and response.status_code in (200, 202) and (job := response.json().get("id")):
            self.front.end(job)
        return response


def _tame(case: Any) -> None:
    """Limit the duration of a generated request, and give it a new Idempotency-Key if it has one."""
    key = case.headers.get("Idempotency-Key")
    if key is not None and VALID_KEY.fullmatch(key):
        case.headers["Idempotency-Key"] = uuid.uuid4().hex
    wait = case.query.get("wait") if isinstance(case.query, dict) else None
    if isinstance(wait, int | float):
        case.query["wait"] = min(wait, SHORT_WAIT_S)
    if isinstance(case.body, dict) and isinstance(case.body.get("replicas"), int | float):  # 64.0 is an integer, too
        case.body["replicas"] = 1
