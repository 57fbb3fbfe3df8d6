"""Every operation of the OpenAPI document over a whole deployment, with keys and without: what it promises holds.

Each operation is called once so that it succeeds, and then with generated requests.
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
"""More generated requests: ``make fuzz``."""
SHORT_WAIT_S = 0.05
"""Longest that a generated request may ask to be held."""
BEYOND_SCHEMA = re.compile(
    r"(post|patch) (/v1/jobs(/{job_id})?|/v1/keys|.*/completions|.*/feedback(/batch|/tokens)?|/v1/files(/code)?|"
    r"/v1/webhooks.*|/v1/fine_tuning/.*|.*/graders/.*)"
)
"""Bodies with rules that a schema cannot say (between fields, 1.0 is no integer, code): a valid one may be a 422."""
SLOW = re.compile(r"graders/|/replay$")
"""Operations that start a process: they get a quarter of the requests."""
SUBMIT = ("POST /v1/jobs", "POST /v1/fine_tuning/jobs")
"""Operations whose jobs are ended at once: each one would start processes."""
VALID_KEY = re.compile(r"[A-Za-z0-9._~-]{1,255}")
UNKNOWN = 3
"""Every third generated request keeps the ids that were generated, which nothing has."""
LAST = ("DELETE", "cancel", "end", "resume")
"""Operations that take something away, or set it to work, come after the others."""


@pytest.mark.timeout(900)
def test_the_document_holds(front: Any) -> None:
    """Everything that is wrong is shown, and so are the operations that never succeeded."""
    examples = (40 if FULL else 12) if front.headers else (10 if FULL else 5)
    schema = schemathesis.openapi.from_url(f"{front.url}/openapi.json", timeout=60)
    found = Findings(front)
    for operation in sorted((one.ok() for one in schema.get_all_operations()), key=_order):
        found.look_at(operation, examples)
    assert not found.flaws, "\n\n".join(found.flaws.values())
    assert not found.never_succeeded, "\n".join(found.never_succeeded)


def _order(operation: Any) -> tuple[bool, bool, str]:
    method, path = operation.method.upper(), operation.path
    return method in LAST or path.endswith(LAST), method != "GET", path


class Findings:
    """Replies seen of each operation."""

    def __init__(self, front: Any) -> None:
        self.front = front
        self.flaws: dict[str, str] = {}
        self.never_succeeded: list[str] = []

    def look_at(self, operation: Any, examples: int) -> None:
        """Call an operation so that it succeeds, and then with ``examples`` generated requests."""
        label = f"{operation.method.upper()} {operation.path}"
        place = self.front.place(label)
        good = operation.Case(path_parameters=dict(place), **self.front.call(label))
        reply = self._send(label, good)
        if not 200 <= reply.status_code < 300:
            self.never_succeeded.append(f"{label}: {reply.status_code} {reply.text}")
        self._generate(operation, label, place, examples)

    def _generate(self, operation: Any, label: str, place: dict[str, Any], examples: int) -> None:
        """Call an operation with generated requests, most of them about what is there."""
        count = itertools.count(1)

        @hypothesis.settings(
            max_examples=1 + examples // 4 if SLOW.search(label) else examples, derandomize=True, database=None,
            deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy())
        def generated(case: Any) -> None:
            if next(count) % UNKNOWN:
                self._ground(label, case, place)
            _tame(case)
            self._send(label, case)

        generated()

    def _ground(self, label: str, case: Any, place: dict[str, Any]) -> None:
        """Have a generated request be about something that is there."""
        case.path_parameters |= place
        known = self.front.known_values(label)
        for item in case.body if isinstance(case.body, list) else [case.body]:
            if isinstance(item, dict):
                item.update({name: known[name] for name in item.keys() & known if isinstance(item[name], str)})

    def _send(self, label: str, case: Any) -> Any:
        """Send and check; what is wrong is kept, so that it does not hide the rest."""
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
    """Have a generated request not take long, and not be another one with an Idempotency-Key that was used."""
    key = case.headers.get("Idempotency-Key")
    if key is not None and VALID_KEY.fullmatch(key):
        case.headers["Idempotency-Key"] = uuid.uuid4().hex
    wait = case.query.get("wait") if isinstance(case.query, dict) else None
    if isinstance(wait, int | float):
        case.query["wait"] = min(wait, SHORT_WAIT_S)
    if isinstance(case.body, dict) and isinstance(case.body.get("replicas"), int | float):  # 64.0 is an integer, too
        case.body["replicas"] = 1
