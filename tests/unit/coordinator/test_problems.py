"""The table that maps errors of the core to HTTP problems, as clients see them."""

from __future__ import annotations

import json
import pickle
from http import HTTPStatus

import pytest

from penstock.services.coordinator.api.http.replies import problem_response
from penstock.services.coordinator.problems import HttpProblem, from_error
from penstock.shared import errors
from penstock.shared.errors import Flaw, PenstockError, Refused, RetryLater
from penstock.shared.transport.serve import error_of

PATH = "/v1/feedback"
FLAW = Flaw(pointer="/value", detail="must be finite")
LATER = {"retry-after": "1"}
CASES: list[tuple[PenstockError, int, str, str, dict[str, str]]] = [
    (errors.Invalid("odd", "no", [FLAW]), 422, "odd", "invalid_request_error", {}),
    (
        errors.Unauthenticated("odd", "no"), 401, "odd", "authentication_error",
        {"www-authenticate": 'Bearer realm="penstock"'},
    ),
    (errors.Forbidden("odd", "no", [FLAW]), 403, "odd", "permission_error", {}),
    (errors.OutOfReach("odd", "no"), 404, "odd", "not_found_error", {}),
    (errors.Gone("odd", "no"), 410, "odd", "invalid_request_error", {}),
    (errors.TooLarge("odd", "no"), 413, "odd", "invalid_request_error", {}),
    (
        errors.RateLimited("odd", "no", retry_after_s=0.5), 429, "odd", "rate_limit_error",
        {"retry-after": "1", "retry-after-ms": "500"},
    ),
    (
        errors.RateLimited("odd", "no", retry_after_s=5.0), 429, "odd", "rate_limit_error",
        {"retry-after": "5", "retry-after-ms": "5000"},
    ),
    (
        errors.RetryLater("odd", "no"), 503, "odd", "server_error",
        {"retry-after": "1", "retry-after-ms": "1000"},
    ),
    (
        errors.RetryLater("odd", "no", retry_after_s=30), 503, "odd", "server_error",
        {"retry-after": "30"},
    ),
    (errors.NoRoom("odd", "no"), 507, "odd", "server_error", {}),
    (
        errors.QuotaUsed("odd", "no"), 507, "odd", "server_error",
        {"x-should-retry": "false"},
    ),
    (errors.NotFound("no"), 404, "not_found", "not_found_error", {}),
    (errors.Conflict("no"), 409, "conflict", "invalid_request_error", {"x-should-retry": "false"}),
    (errors.ConfigError("no"), 422, "invalid_job", "invalid_request_error", {}),
    (errors.ConstraintError("no"), 422, "invalid_job", "invalid_request_error", {}),
    (errors.DataError("no"), 422, "invalid_data", "invalid_request_error", {}),
    (errors.StreamFull("no"), 503, "backlog_full", "server_error", LATER),
    (errors.Unavailable("no"), 503, "unavailable", "server_error", LATER),
    (errors.DiskFull("no"), 503, "unavailable", "server_error", LATER),
    (errors.Fenced("no"), 503, "not_leader", "server_error", LATER),
    (errors.DeadlineError("no"), 504, "timeout", "server_error", {}),
]  # fmt: skip


def _name(value: object) -> str:
    return type(value).__name__ if isinstance(value, PenstockError) else str(value)


@pytest.mark.parametrize(("error", "status", "code", "kind", "headers"), CASES, ids=_name)
def test_an_error_is_answered_as_its_class_says(
    error: PenstockError, status: int, code: str, kind: str, headers: dict[str, str]
) -> None:
    reply = problem_response(from_error(error), PATH)
    flaws = [{"pointer": flaw.pointer, "detail": flaw.detail} for flaw in getattr(error, "flaws", ())]
    assert json.loads(bytes(reply.body)) == {
        "type": f"urn:penstock:problem:{code}", "title": HTTPStatus(status).phrase, "status": status,
        "detail": "no", "instance": PATH, "errors": flaws,
        "error": {"message": "no", "type": kind, "param": flaws[0]["pointer"] if flaws else None, "code": code},
    }  # fmt: skip
    assert reply.status_code == status
    own = {name: value for name, value in reply.headers.items() if not name.startswith("content-")}
    assert own == headers


def test_the_table_has_every_class_of_refusals() -> None:
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Refused)}
    assert classes - {Refused} == {type(case[0]) for case in CASES if isinstance(case[0], Refused)}


def test_other_errors_are_defects_and_problems_stay_as_they_are() -> None:
    defect = from_error(errors.ScoringError("broke"))
    assert (defect.status, defect.code, defect.detail) == (500, "internal", "ScoringError: broke")
    problem = HttpProblem(418, "odd", "no")
    assert from_error(problem) is problem


@pytest.mark.parametrize("error", [case[0] for case in CASES if isinstance(case[0], Refused)], ids=repr)
def test_a_refusal_survives_pickling_and_prints_its_detail(error: Refused) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code, copy.flaws) == (type(error), "no", "odd", error.flaws)
    if isinstance(error, RetryLater):
        assert copy.retry_after_s == error.retry_after_s


@pytest.mark.parametrize("name", [*errors.__all__, "Exception", "class_named"])
def test_an_error_of_another_process_is_raised_by_its_name(name: str) -> None:
    error = error_of(name, b"no")
    kind = getattr(errors, name, None)
    is_plain = isinstance(kind, type) and issubclass(kind, PenstockError) and not issubclass(kind, Refused)
    assert (type(error), str(error)) == (kind if is_plain else PenstockError, "no")
