"""What replies become: a newer server does not break an older client, and what does not fit is said."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from penstock.client import results
from penstock.client.results import Fate, Funnel, Sample
from penstock.client.results.reading import many, one
from penstock.client.sse import EventReader
from penstock.shared.errors import NotFound, ProtocolError, Unavailable

KINDS = [getattr(results, name) for name in results.__all__]
VALUES: dict[type[inspect.Type], Any] = {
    inspect.StrType: "a word that nobody knows yet", inspect.IntType: 1, inspect.FloatType: 0.5,
    inspect.BoolType: True, inspect.NoneType: None, inspect.AnyType: {"any": "thing"},
    inspect.DateTimeType: datetime(2026, 1, 1, tzinfo=UTC).isoformat(),
}  # fmt: skip


def example(kind: inspect.Type, *, newer: bool) -> Any:
    """A value that fits; of a ``newer`` server every object has one more key, and every row one more column."""
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: example(field.type, newer=newer) for field in kind.fields}
        if kind.array_like:
            return [*fields.values(), *(["more"] if newer else [])]
        return {**fields, **({"from_tomorrow": {"a": [1]}} if newer else {})}
    if isinstance(kind, inspect.UnionType):
        return example(next(one for one in kind.types if not isinstance(one, inspect.NoneType)), newer=newer)
    if isinstance(kind, inspect.ListType):
        return [example(kind.item_type, newer=newer)]
    if isinstance(kind, inspect.DictType):
        return {"key": example(kind.value_type, newer=newer)}
    return VALUES[type(kind)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_a_newer_server_does_not_break_an_older_client(kind: type[msgspec.Struct]) -> None:
    today, tomorrow = (example(inspect.type_info(kind), newer=newer) for newer in (False, True))
    assert today != tomorrow
    assert one(kind)(tomorrow) == one(kind)(today)
    assert kind.__struct_config__.frozen


def test_what_has_a_default_may_be_missing() -> None:
    short = {"feedback_id": "f", "job": "j", "kind": "metric", "metric": "m", "status": "received"}
    found = one(Fate)({**short, "received": 1, "time": 2.5})
    assert (found.trained, found.interactions, found.received) == (None, [], 1.0)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ProtocolError, match=r"the server's Fate does not fit this client: .*feedback_id"):
        one(Fate)({"job": "j"})
    with pytest.raises(ProtocolError, match=r"by_status"):
        one(Funnel)({"job": "j", "items": 1, "by_status": [], "data": []})
    for reply in ({}, [], None, {"data": {}}):
        with pytest.raises(ProtocolError, match="no list of Sample"):
            many(Sample)(reply)


def feed(reader: EventReader, *lines: str) -> list[Any]:
    return [event.row for event in map(reader.feed, lines) if event is not None]


def test_events_are_numbered_or_have_cursors() -> None:
    event = ("event: log", 'data: {"n": 1}', "")
    numbered = EventReader(3)
    assert feed(numbered, "id: 3", *event, "id: 4", *event) == [{"n": 1}], "the first one is a repetition"
    assert numbered.last_id == 4
    with pytest.raises(ProtocolError):
        feed(numbered, "id: trainer:7", *event)
    cursors = EventReader("trainer:3")
    assert feed(cursors, "id: trainer:3", *event, "id: trainer:9,env:1", *event) == [{"n": 1}] * 2
    assert cursors.last_id == "trainer:9,env:1"
    with pytest.raises(Unavailable, match="away"):
        feed(cursors, "event: error", 'data: {"code": "unavailable", "detail": "away"}', "")
    with pytest.raises(NotFound, match="no log"):
        feed(cursors, "event: error", 'data: {"code": "not_found", "detail": "no log"}', "")
