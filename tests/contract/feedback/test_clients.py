"""The Python clients and the command line, over HTTP and a real server."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.local.load import Plan, run
from penstock.shared.errors import ConfigError, NotFound
from penstock.shared.protocol.live.interaction import FeedbackStatus


async def test_both_clients(live: Any, url: str) -> None:
    def blocking() -> str:
        with Client(url) as client:
            id = str(uuid.uuid4())
            target = live.new_id()
            replies = [client.feedback("accepted", True, inference=target, id=id) for _ in range(2)]
            assert [reply.duplicate for reply in replies] == [False, True]
            assert client.feedback("solved", False, episode=target, final=True, tags={"a": "b"}).status == "accepted"
            with pytest.raises(ConfigError, match="declares no metric"):
                client.feedback("liked", True, inference=target)
            with pytest.raises(ConfigError, match="one of them"):
                client.feedback("accepted", True)
            rows = client.feedback_batch(
                {"inference_id": live.new_id(), "metric_name": "score", "value": 0.5} for _ in range(300)
            )
            assert [row.status for row in rows] == [202] * 300
            assert not client.retract(id).too_late
            return id

    id = await asyncio.to_thread(blocking)
    assert len(await live.items()) == 303
    async with AsyncClient(url) as client:
        assert (await client.feedback_status(id)).status == "received"
        assert (await client.feedback("accepted", False, inference=live.new_id())).job == live.job
        assert [row.status for row in await client.feedback_batch([{"metric_name": "accepted"}])] == [422]
        with pytest.raises(NotFound):
            await client.retract(str(uuid.uuid4()))


async def test_commands(live: Any, url: str, tmp_path: Path) -> None:
    file = tmp_path / "items.ndjson"
    lines = [{"inference_id": live.new_id(), "metric_name": "accepted", "value": value} for value in (True, 7)]
    file.write_text("\n".join(json.dumps(line) for line in lines))

    def command(*words: str) -> Any:
        return CliRunner().invoke(cli, ["feedback", *words], env={"PENSTOCK_URL": url, "PENSTOCK_API_KEY": ""})

    def commands() -> None:
        sent = command("send", live.new_id(), "accepted", "true", "--comment", "good", "--json")
        id = json.loads(sent.stdout)["feedback_id"]
        assert "received" in command("status", id).stdout
        assert command("send", f"ep_{live.new_id()}", "solved", "false", "--final").exit_code == 0
        assert command("send", live.new_id(), "comment", "12").exit_code == 0
        assert command("retract", id).exit_code == 0
        posted = command("batch", str(file))
        assert (posted.exit_code, posted.stdout) == (1, "1 of 2 items stored, 0 of them before\n")
        assert "item 2: 422" in posted.stderr
        file.write_text("\n".join(json.dumps(dict(reversed(line.items()))) for line in reversed([*lines, lines[0]])))
        again = command("batch", str(file))
        assert again.stdout == "2 of 3 items stored, 1 of them before\n", "the second of two equal lines is new"
        assert command("batch", str(file)).stdout == "2 of 3 items stored, 2 of them before\n"
        assert command("batch", str(tmp_path / "none")).exit_code == 2

    await asyncio.to_thread(commands)
    kinds = [(item.metric, item.value) for item in await live.items() if item.kind == "metric"]
    assert kinds == [("accepted", True), ("solved", False), ("comment", "12"), ("accepted", True), ("accepted", True)]


async def test_clients_and_commands_decide_on_quarantined_feedback(live: Any, url: str) -> None:
    ids = [(await live.accept())["feedback_id"] for _ in range(5)]
    await live.decide(*(FeedbackStatus(feedback=id, status="quarantined", reason="drift: far", time=2.0) for id in ids))

    def command(*words: str) -> Any:
        return CliRunner().invoke(cli, ["quarantine", *words], env={"PENSTOCK_URL": url, "PENSTOCK_API_KEY": ""})

    def client_knows(*place: str) -> Any:
        with Client(url) as client:
            return client.quarantine.show(*place)

    def blocking() -> None:
        with Client(url) as client:
            assert [row.feedback_id for row in client.quarantine.list(live.job)] == sorted(ids)
            assert client.quarantine.list() == client.quarantine.list(live.job)
            assert client.quarantine.show(live.job, ids[0]).value is True
            assert client.quarantine.release(live.job, ids[0]).verdict == "release"
            with pytest.raises(NotFound):
                client.quarantine.drop(live.job, str(uuid.uuid4()))
        listed = command("ls", live.job)
        assert (listed.exit_code, "drift: far" in listed.stdout) == (0, True), listed.output
        of_all = json.loads(command("ls", "--json").stdout)
        assert [(row["feedback_id"], row["job"]) for row in of_all] == [(id, live.job) for id in sorted(ids)]
        assert live.job in command("ls").stdout
        assert json.loads(command("show", live.job, ids[1]).stdout)["feedback_id"] == ids[1]
        assert command("drop", live.job, ids[1]).exit_code == 0
        assert command("release", live.job, "nonsense").exit_code == 1
        assert client_knows(ids[3]) == client_knows(live.job, ids[3])
        assert json.loads(command("show", ids[3]).stdout)["job"] == live.job
        assert command("release", ids[3]).exit_code == 0
        assert command("drop", "nonsense").exit_code == 1
        for words in ((), (live.job, ids[3], "more")):
            assert command("drop", *words).exit_code == 2, words

    await asyncio.to_thread(blocking)
    async with AsyncClient(url) as client:
        assert len(await client.quarantine.list(live.job, limit=2)) == 2
        assert (await client.quarantine.show(live.job, ids[2])).reason == "drift: far"
        assert (await client.quarantine.drop(live.job, ids[2])).duplicate is False
        assert (await client.quarantine.release(live.job, ids[2])).status == "accepted"
        assert (await client.quarantine.drop(ids[4])).verdict == "drop"
    decided = [(item.kind, item.body["feedback"]) for item in await live.items() if item.kind in ("release", "drop")]
    assert decided == [
        ("release", ids[0]), ("drop", ids[1]), ("release", ids[3]), ("drop", ids[2]), ("release", ids[2]),
        ("drop", ids[4]),
    ]  # fmt: skip


async def test_the_benchmark_counts_what_the_stream_holds(live: Any, url: str, tmp_path: Path) -> None:
    """The benchmark's client counts as acknowledged exactly the items that the stream holds."""
    body = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True}
    port, acked = int(url.rpartition(":")[2]), tmp_path / "acked"
    plan = Plan(
        host="127.0.0.1", port=port, path="/v1/feedback", body=json.dumps(body), connections=8, seconds=0.5,
        acked=str(acked),
    )  # fmt: skip
    result = await run(plan)
    ids = acked.read_text().split()
    assert result.requests == len(ids) == len(set(ids)) > 0
    assert set(ids) == {item.id for item in await live.items()}
    batch = msgspec.structs.replace(plan, path="/v1/feedback/batch", body=json.dumps([body] * 3), items=3, seconds=0.2)
    assert (await run(batch)).statuses.keys() == {"207"}
    assert {item.id for item in await live.items()} == set(acked.read_text().split())
