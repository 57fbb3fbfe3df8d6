"""Replies as structs: an older client reads the replies of a newer server, and names what does not fit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from msgspec import inspect

from penstock.client import results
from penstock.client.results import FeedbackStatus, Funnel, LogLine, MetricName, Sample, StageSpan, TokenSample
from penstock.client.results.reading import many, one
from penstock.client.streams import EventReader
from penstock.services.coordinator.online.groups import example_group
from penstock.services.coordinator.queries.charts import metric_names, timeline
from penstock.services.coordinator.queries.logfiles import read_logs
from penstock.services.coordinator.queries.samples import sample_detail, sample_rows
from penstock.shared.errors import NotFound, ProtocolError, Unavailable
from penstock.shared.protocol.events import BatchSealed, BatchTrained, SealedGroup
from penstock.shared.protocol.ids import Draw

KINDS = [getattr(results, name) for name in results.__all__]
VALUES: dict[type[inspect.Type], Any] = {
    inspect.StrType: "a word that nobody knows yet", inspect.IntType: 1, inspect.FloatType: 0.5,
    inspect.BoolType: True, inspect.NoneType: None, inspect.AnyType: {"any": "thing"},
    inspect.DateTimeType: datetime(2026, 1, 1, tzinfo=UTC).isoformat(),
}  # fmt: skip


def example(kind: inspect.Type, *, newer: bool) -> Any:
    """Return a value of ``kind``; with ``newer`` each object has one more key, and each row one more column."""
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


def test_fields_with_a_default_may_be_missing() -> None:
    short = {"feedback_id": "f", "job": "j", "kind": "metric", "metric": "m", "status": "received"}
    found = one(FeedbackStatus)({**short, "received": 1, "time": 2.5})
    assert (found.trained, found.interactions, found.received) == (None, [], 1.0)


def test_a_reply_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ProtocolError, match=r"the server's FeedbackStatus does not fit this client: .*feedback_id"):
        one(FeedbackStatus)({"job": "j"})
    with pytest.raises(ProtocolError, match=r"by_status"):
        one(Funnel)({"job": "j", "items": 1, "by_status": [], "data": []})
    for reply in ({}, [], None, {"data": {}}):
        with pytest.raises(ProtocolError, match="no list of Sample"):
            many(Sample)(reply)


def test_rows_without_a_schema_have_the_keys_of_their_structs(tmp_path: Path) -> None:
    """Functions of the coordinator create samples, metrics, spans and log lines; no model of its API defines them."""
    group = example_group("j", Draw(0, 0), [4], [[5, 6], [7]], objective="policy", reward=0.0, epoch=1)
    broken = replace(group, rewards=np.array([np.nan, 1.0], np.float32))
    sealed = BatchSealed(
        writer_epoch=1, time=3.0, number=1, revision=1, start_version=0, update_index=0,
        groups=[SealedGroup(Draw(0), "a", 1, "d", 0, 0, [1.0], 3, "w")],
    )  # fmt: skip
    trained = BatchTrained(writer_epoch=1, time=6.0, number=1, revision=1, version=1, digest="a", trainer_epoch=1)
    (tmp_path / "trainer-0.log").write_text("hello\n")
    lines = read_logs(tmp_path, job="j", service=None, tail=1, after=None)["lines"]
    rows: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
        (Sample, {**sample_rows(1, [broken])[0], "href": "/"}),
        (TokenSample, {**sample_detail(1, group, 1), "href": "/", "token_texts": None}),  # SampleBrowser adds it
        (MetricName, metric_names([{"step": 1, "values": {"reward": 0.5}}])[0]),
        (StageSpan, timeline([sealed, trained], step=None)[0]),
        (LogLine, lines[0]),
    ]
    for kind, row in rows:
        assert row.keys() == set(kind.__struct_fields__), kind
        found = one(kind)(orjson.loads(orjson.dumps(row)))
        assert msgspec.to_builtins(found).keys() == row.keys()
    assert one(Sample)(orjson.loads(orjson.dumps(rows[0][1]))).reward is None, "the reward is not finite"


def feed(reader: EventReader, *lines: str) -> list[Any]:
    return [event.row for event in map(reader.feed, lines) if event is not None]


def test_events_are_numbered_or_have_cursors() -> None:
    event = ("event: log", 'data: {"n": 1}', "")
    numbered = EventReader(3)
    assert feed(numbered, "id: 3", *event, "id: 4", *event) == [{"n": 1}], "the first event is a repetition"
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
