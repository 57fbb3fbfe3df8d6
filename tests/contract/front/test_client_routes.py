"""The clients and the OpenAPI document: each operation has a method, and each reply fits the clients' types."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.client import AsyncClient, Client, results
from penstock.client.streams import Streams
from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.services import Services
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import PenstockError

Operation = tuple[str, str]

OPENAI = {
    # Answers and models in OpenAI's shape: what agents speak, by OpenAI's SDK or another. `client.models` has the rest.
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/e/{episode_id}/v1/chat/completions"),
    ("POST", "/e/{episode_id}/v1/completions"),
    ("GET", "/e/{episode_id}/v1/models"),
    ("GET", "/e/{episode_id}/v1/models/{model}"),
    # Jobs in the shape of OpenAI's fine-tuning, under the same ids as at `/v1/jobs`, which the clients speak to.
    ("GET", "/v1/fine_tuning/jobs"),
    ("POST", "/v1/fine_tuning/jobs"),
    ("GET", "/v1/fine_tuning/jobs/{job_id}"),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/pause"),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/resume"),
    ("GET", "/v1/fine_tuning/jobs/{job_id}/events"),
    ("GET", "/v1/fine_tuning/jobs/{job_id}/checkpoints"),
    # The graders under the names that OpenAI's SDK has for them; `client.graders` uses `/v1/graders`.
    ("POST", "/v1/fine_tuning/alpha/graders/run"),
    ("POST", "/v1/fine_tuning/alpha/graders/validate"),
    # Who uploaded a file has it: for `openai.files.content`.
    ("GET", "/v1/files/{file_id}/content"),
}
OTHERS = {
    ("POST", "/feedback"),  # `POST /v1/feedback` where TensorZero's clients expect it
    ("GET", "/healthz"),  # for probes
    ("GET", "/readyz"),
    ("GET", "/metrics"),  # for Prometheus
}

REPLIES: dict[type, Operation] = {
    results.Accepted: ("POST", "/v1/feedback"),
    results.ItemReply: ("POST", "/v1/feedback/batch"),
    results.Retracted: ("POST", "/v1/feedback/{feedback_id}/retract"),
    results.FeedbackStatus: ("GET", "/v1/feedback/{feedback_id}"),
    results.Funnel: ("GET", "/v1/jobs/{job_id}/feedback"),
    results.FeedbackToken: ("POST", "/v1/feedback/tokens"),
    results.Consent: ("PUT", "/v1/users/{user}/consent"),
    results.Erasure: ("GET", "/v1/users/{user}/data"),
    results.Interaction: ("GET", "/v1/interactions/{interaction}"),
    results.NewEpisode: ("POST", "/v1/episodes"),
    results.Episode: ("GET", "/v1/episodes/{episode}"),
    results.EpisodeKey: ("POST", "/v1/episodes/{episode}/keys"),
    results.Model: ("GET", "/v1/models/{model}"),
    results.ModelVersion: ("GET", "/v1/models/{model}/versions"),
    results.Versions: ("GET", "/v1/jobs/{job_id}/versions"),
    results.TokenSample: ("GET", "/v1/samples/{sample_id}"),
    results.HeldRow: ("GET", "/v1/quarantine"),
    results.HeldItem: ("GET", "/v1/quarantine/{item}"),
    results.Verdict: ("POST", "/v1/quarantine/{item}/release"),
    results.Key: ("GET", "/v1/keys"),
    results.NewKey: ("POST", "/v1/keys"),
    results.Webhook: ("GET", "/v1/webhooks"),
    results.NewWebhook: ("POST", "/v1/webhooks"),
    results.WebhookState: ("GET", "/v1/webhooks/{webhook_id}"),
    results.WebhookTrial: ("POST", "/v1/webhooks/{webhook_id}/test"),
    results.DeadLetterRow: ("GET", "/v1/jobs/{job_id}/dead-letters"),
    results.DeadLetter: ("GET", "/v1/jobs/{job_id}/dead-letters/{letter}"),
    results.File: ("GET", "/v1/files"),
    results.Code: ("POST", "/v1/files/code"),
    results.CheckedGrader: ("POST", "/v1/graders/validate"),
    results.GraderRun: ("POST", "/v1/graders/run"),
    results.AuditEntry: ("GET", "/v1/audit-log"),
}
"""Structs that methods return, alone or in a list, each with its operation. Other tests read rows without a schema."""

ARGUMENTS: dict[str, Any] = {
    "job": "job_1", "goal": "terminal", "ref": "addition", "patch": {}, "number": 1, "pool": "rollout", "replicas": 1,
    "metric": "m", "value": True, "items": [{}], "id": "7", "chosen": "a", "rejected": "b", "inference": "a",
    "corrected": "b", "model": "policy", "sha256": "a" * 64, "name": "n", "scopes": ["admin"], "url": "http://x.test",
    "grader": {}, "sample": "text", "version": 1, "checkpoint": 1, "item": "7", "user": "eve", "train": True,
    "max_updates": 5,
    "source": "x = 1",
}  # fmt: skip
"""Arguments of the methods, by the names of their parameters."""
WAYS: dict[str, list[dict[str, Any]]] = {
    "submit": [{"job": {}}],
    "dry_run": [{"job": {}}],
    "events": [{}, {"follow": False}],
    "feedback": [{"inference": "a"}],
    "feedback_tokens.create": [{"inference": "a"}],
    "quarantine.list": [{}, {"job": "job_1"}],
    **{f"quarantine.{verb}": [{"*": ("7",)}, {"*": ("job_1", "7")}] for verb in ("show", "release", "drop")},
}
"""Methods that need more arguments, or can be called in several ways; ``*`` holds positional arguments."""


class Recorder(httpx.BaseTransport):
    """A transport that answers each POST with an operation, and most other requests with 404; records all requests."""

    def __init__(self) -> None:
        self.asked: set[Operation] = set()
        file = {"name": "f", "nbytes": 1, "sha256": "0" * 64}
        model = {"id": "policy", "created": 1, "job": "job_1", "online": True, "policy_version": 1}
        self._there = {
            "/v1/jobs/job_1/checkpoints/1": {"available": True, "number": 1, "path": "p", "files": [file]},
            "/v1/models/policy": model,
        }

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.add((request.method, request.url.path))
        if request.method == "POST":
            return httpx.Response(202, json={"id": "op_1", "state": "pending", "plan": {}, "data": []})
        if request.url.path in self._there:
            return httpx.Response(200, json=self._there[request.url.path])
        return httpx.Response(404, json={"detail": "not here", "error": {"code": "not_found"}})


def parts(client: object) -> dict[str, object]:
    """Return the client under an empty name, and its parts by name."""
    named = {name: part for name, part in vars(client).items() if not name.startswith("_")}
    own = {name: part for name, part in named.items() if type(part).__module__.startswith("penstock.client.")}
    return {"": client, **own}


def methods(client: object) -> dict[str, Callable[..., Any]]:
    """Return all public methods of a client and of its parts, by name."""
    return {
        f"{name}.{verb}".lstrip("."): getattr(part, verb)
        for name, part in parts(client).items()
        for verb, _ in inspect.getmembers(type(part), inspect.isfunction)
        if not verb.startswith("_") and verb != "close"
    }


def run(method: Callable[..., Any], given: dict[str, Any]) -> None:
    """Call a method with its required arguments and those ``given``; ignore result and errors."""
    needed = {
        name: ARGUMENTS[name]
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and name not in given
        and parameter.kind != parameter.VAR_POSITIONAL
    }
    placed, named = given.get("*", ()), {name: value for name, value in given.items() if name != "*"}
    try:
        found = method(*placed, **needed, **named)
        if isinstance(found, types.GeneratorType):
            list(found)
    except PenstockError:
        pass


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Return the OpenAPI document of an application without services."""
    absent: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Services))
    return create_app(Services(**{**absent, "settings": ServiceSettings()})).openapi()


def operations(document: dict[str, Any]) -> set[Operation]:
    verbs = ("get", "post", "put", "patch", "delete")
    return {(verb.upper(), path) for path, item in document["paths"].items() for verb in item if verb in verbs}


def template_of(asked: Operation, known: set[Operation]) -> Operation | None:
    """Return the operation of a request: of those that match, the one with the fewest parameters."""
    fitting = [
        (method, path)
        for method, path in known
        if method == asked[0] and re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)), asked[1])
    ]
    return min(fitting, key=lambda one: one[1].count("{"), default=None)


def test_every_operation_has_a_method_or_a_reason(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    recorder, known = Recorder(), operations(document)
    with Client("http://api.test", retries=0, patience_s=0) as client:
        client._http = httpx.Client(transport=recorder, base_url=client.url)
        client._streams = Streams(client._http, client.url, 1.0, 0.0)
        for name, method in methods(client).items():
            for given in WAYS.get(name, [{}]):
                takes = inspect.signature(method).parameters
                paths = {"path": file, "directory": tmp_path / "out"}
                run(method, {**{key: path for key, path in paths.items() if key in takes}, **given})
        client._http.close()
    reached = {template_of(asked, known) for asked in recorder.asked}
    assert None not in reached, [asked for asked in recorder.asked if template_of(asked, known) is None]
    assert known - reached - OPENAI - OTHERS == set(), "add a method to the clients, or list here who calls it"
    assert known >= OPENAI | OTHERS, "it is gone"
    assert (OPENAI | OTHERS) & reached == set(), "the clients do that"


@pytest.mark.parametrize("kind", REPLIES, ids=lambda kind: str(kind.__name__))
def test_replies_are_those_of_the_document(document: dict[str, Any], kind: type) -> None:
    verb, path = REPLIES[kind]
    replies = document["paths"][path][verb.lower()]["responses"]
    good = next(replies[code] for code in ("200", "201", "202", "207") if "$ref" in str(replies.get(code)))
    schema = resolved(document, good["content"]["application/json"]["schema"])
    if set(schema["properties"]) >= {"object", "data"} and "data" not in kind.__struct_fields__:  # type: ignore[attr-defined]
        schema = resolved(document, schema["properties"]["data"]["items"])
    compare(document, kind, schema)


def test_parts_of_the_clients_answer_with_structs() -> None:
    """A method that begins an operation returns the operation's result, whose type depends on its kind."""
    with Client() as client:
        returned = {name: typing.get_type_hints(inspect.unwrap(one))["return"] for name, one in methods(client).items()}
    loose = {name for name, kind in returned.items() if "." in name and "dict[str, typing.Any]" in str(kind)}
    assert loose == {f"{part}.{verb}" for part in ("models", "versions") for verb in ("promote", "roll_back")}


def compare(document: dict[str, Any], kind: type, schema: dict[str, Any]) -> None:
    """Check that a struct has all properties of a schema, requires no optional one, and accepts null where allowed."""
    fields = {field.encode_name: field for field in msgspec.inspect.type_info(kind).fields}  # type: ignore[union-attr]
    properties = schema["properties"]
    assert properties.keys() - {"object"} <= fields.keys(), kind
    if not schema.get("additionalProperties"):
        assert fields.keys() <= properties.keys(), kind
    for name, property in properties.items():
        if name == "object":
            continue
        field = fields[name]
        assert not field.required or name in schema["required"], f"{kind.__name__}.{name} may be missing"
        options = [resolved(document, option) for option in property.get("anyOf", [property])]
        mine = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        takes_null = any(isinstance(one, msgspec.inspect.NoneType | msgspec.inspect.AnyType) for one in mine)
        assert takes_null or {"type": "null"} not in options, f"{kind.__name__}.{name} may be null"
        for inner in mine:
            item = getattr(inner, "item_type", inner)
            rows = [resolved(document, option.get("items", option)) for option in options]
            if isinstance(item, msgspec.inspect.StructType) and not item.array_like:
                compare(document, item.cls, next(row for row in rows if "properties" in row))


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema, or the one that it refers to."""
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


async def test_both_clients_offer_the_same() -> None:
    def surface(client: object) -> dict[str, list[tuple[str, Any]]]:
        return {
            name: [(one.name, one.default) for one in inspect.signature(method).parameters.values()]
            for name, method in methods(client).items()
        }

    def streamed(client: object) -> set[str]:
        kinds = (Iterator, AsyncIterator)
        found = {name: inspect.signature(method).return_annotation for name, method in methods(client).items()}
        return {name for name, kind in found.items() if any(one.__name__ in str(kind) for one in kinds)}

    with Client() as client:
        async with AsyncClient() as other:
            assert surface(client) == surface(other)
            assert streamed(client) == streamed(other) == {"events", "follow_logs", "replay"}
            assert len(parts(client)) == len(parts(other)) > 10
