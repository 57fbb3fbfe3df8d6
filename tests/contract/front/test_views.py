"""Views of a job: names of metrics, timelines, samples, archives, artifacts, logs, dead letters."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.services.coordinator.queries.charts import columns, largest_triangles, thinned, timeline
from penstock.services.coordinator.training.checkpoints import Artifacts
from penstock.shared.errors import Conflict, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Finished,
    SealedGroup,
)
from penstock.shared.protocol.ids import Draw

FILES = {"config.json": b"{}", "critic/model.safetensors": bytes(range(256)) * 300, "empty.bin": b""}


def recorded(deployment: Any, job: str, number: int, path: Path) -> None:
    deployment.record(
        job,
        Checkpointed(
            writer_epoch=1, time=1000.0, number=number, version=number, digest="d", path=str(path), trainer_epoch=1,
            low_seq=0,
        ),
    )  # fmt: skip


async def test_an_archive_holds_every_file_and_is_the_same_each_time(
    commit: Any, connect: Any, deployment: Any, job: Any, tmp_path: Path
) -> None:
    long = {f"{'d' * 90}/{'f' * 90}-{i}": b"x" * (511 + i) for i in range(3)}
    commit(tmp_path / "4", {**FILES, **long})
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        path = f"/v1/jobs/{id}/checkpoints"
        recorded(deployment, id, 4, tmp_path / "4")
        recorded(deployment, id, 5, tmp_path / "5")
        got = await client.get(f"{path}/4/archive")
        assert int(got.headers["content-length"]) == len(got.content)
        with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
            read = {one.name.partition("/")[2]: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
        assert {name: read[name] for name in (*FILES, *long)} == {**FILES, **long}
        assert set(read) == {*FILES, *long, "manifest.json"}
        assert (await client.get(f"{path}/4/archive")).content == got.content
        assert (await client.get(f"{path}/5/archive")).status_code == 409
        assert (await client.get(f"{path}/6/archive")).status_code == 404


async def test_artifacts_are_found_by_content(commit: Any, connect: Any, deployment: Any) -> None:
    root = deployment.data_dir / "checkpoints"
    commit(root / "job_a" / "4-x", FILES)
    commit(root / "job_a" / "5-x", {"other": b"5"})
    (root / "job_a" / "5-x" / "COMMIT").unlink()
    data = FILES["critic/model.safetensors"]
    sha256 = hashlib.sha256(data).hexdigest()
    async with connect() as client:
        whole = await client.get(f"/v1/artifacts/{sha256}")
        assert (whole.content, whole.headers["etag"]) == (data, f'"{sha256}"')
        part = await client.get(f"/v1/artifacts/{sha256}", headers={"range": "bytes=100-199"})
        assert (part.status_code, part.content) == (206, data[100:200])
        same = await client.get(f"/v1/artifacts/{sha256}", headers={"if-none-match": f'"{sha256}"'})
        assert same.status_code == 304
        for unknown in (hashlib.sha256(b"5").hexdigest(), "0" * 64, "abc", sha256.upper()):
            assert (await client.get(f"/v1/artifacts/{unknown}")).status_code == 404
        (root / "job_a" / "4-x" / "COMMIT").unlink()
        assert (await client.get(f"/v1/artifacts/{sha256}")).status_code == 404


def test_a_manifest_that_could_not_be_read_is_read_again(commit: Any, tmp_path: Path) -> None:
    folder, artifacts = tmp_path / "job_a" / "4-x", Artifacts(tmp_path)
    commit(folder, FILES)
    manifest = folder / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    sha256 = hashlib.sha256(FILES["critic/model.safetensors"]).hexdigest()
    with pytest.raises(NotFound):
        artifacts.find(sha256)
    manifest.write_bytes(data)
    assert artifacts.find(sha256) == folder / "critic/model.safetensors"


def test_what_a_run_needs_is_not_deleted(commit: Any, served: Any, deployment: Any, job: Any, tmp_path: Path) -> None:
    for number in (0, 4, 8):
        commit(tmp_path / str(number), FILES)
    with Client(served.url) as client:
        id = client.submit(job).id
        for number in (0, 4, 8):
            recorded(deployment, id, number, tmp_path / str(number))
        for needed in (0, 8):
            with pytest.raises(Conflict, match="needed while the job runs"):
                client.delete_checkpoint(id, needed)
        client.delete_checkpoint(id, 4)
        assert not (tmp_path / "4").exists()
        assert not client.checkpoint(id, 4)["available"]
        with pytest.raises(Conflict, match="not on the coordinator's host"):
            client.delete_checkpoint(id, 4)
        with pytest.raises(NotFound):
            client.delete_checkpoint(id, 5)
        deployment.record(id, Finished(writer_epoch=1, time=0.0, reason="succeeded", summary={}))
        gone = CliRunner().invoke(cli, ["ckpt", "rm", id, "initial"], env={"PENSTOCK_URL": served.url})
        assert gone.exit_code == 0, gone.output
        assert not (tmp_path / "0").exists()


async def test_names_timeline_and_a_single_sample(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        deployment.measure(id)
        deployment.train(id)
        names = (await client.get(f"/v1/jobs/{id}/metrics/names")).json()["data"]
        assert names == [
            {"name": "loss", "count": 5, "first_step": 0, "last_step": 4, "last": 1.0},
            {"name": "reward", "count": 5, "first_step": 0, "last_step": 4, "last": 0.9},
        ]
        spans = (await client.get(f"/v1/jobs/{id}/timeline?step=2")).json()["data"]
        assert [(span["step"], span["stage"]) for span in spans] == [(2, "generate"), (2, "train")]
        sample = (await client.get(f"/v1/samples/{id}-2-3.0-1")).json()
        assert (sample["token_ids"], sample["logprobs"], sample["versions"]) == ([2, 3], [-0.5, -1.0], [1, 1])
        for wrong in (f"{id}-2-3.0-4", f"{id}", "x", f"job_{'0' * 32}-2-3.0-1"):
            assert (await client.get(f"/v1/samples/{wrong}")).status_code == 404, wrong
        assert (await client.get(f"/v1/jobs/{id}/samples?min_reward=nan")).status_code == 422


async def test_samples_of_one_source(connect: Any, deployment: Any, job: Any) -> None:
    mixed = {**job, "data": {"train": [{"type": "addition"}, {"type": "addition", "digits": 2, "name": "hard"}]}}
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=mixed)).json()["id"]
        deployment.train(id)
        url = f"/v1/jobs/{id}/samples"
        assert {row["env"] for row in (await client.get(url)).json()["data"]} == {"addition", "hard"}
        first = (await client.get(f"{url}?env=hard&limit=2")).json()
        assert ([row["id"] for row in first["data"]], first["has_more"]) == ([f"{id}-2-3.0-0", f"{id}-2-3.0-1"], True)
        assert {row["env"] for row in first["data"]} == {"hard"}
        unknown = await client.get(f"{url}?env=harder")
        assert unknown.status_code == 404
        assert "no source of this job is called 'harder'; they are called addition, hard" in unknown.json()["detail"]


async def test_samples_of_a_simulator_tell_the_newest_held_out_results(connect: Any, deployment: Any, job: Any) -> None:
    arm = {"kind": "embodied", "name": "arm", "environment": {"task": "CartPole-v1", "horizon": 9},
           "train": {"batch_size": 8, "max_updates": 9}}  # fmt: skip

    def measure(id: str, kind: str, step: int, **values: float) -> None:
        named = {f"eval/{name}" if kind == "eval" else name: value for name, value in values.items()}
        row = {"kind": kind, "step": step, "version": step + 1, "time": 1.0, "values": named}
        deployment.run(deployment.bus.publish(subjects.metrics(id), msgspec.json.encode(row)))

    async with connect() as client:
        id, text = deployment.submit(arm), deployment.submit(job)
        assert (await client.get(f"/v1/jobs/{id}/samples")).json()["held_out"] is None
        for each in (id, text):
            measure(each, "eval", 0, success=0.25, length=8.5, failed=0)
            measure(each, "eval", 4, success=0.5, length=7.5, failed=0, **{"return": 3.5})
            measure(each, "train", 5, reward=1)
        async with asyncio.timeout(60):  # a reply is shared for a moment
            while (found := (await client.get(f"/v1/jobs/{id}/samples")).json()["held_out"]) is None:
                await asyncio.sleep(0.02)
        assert found == {
            "step": 4, "version": 5, "values": {"eval/success": 0.5, "eval/return": 3.5, "eval/length": 7.5},
        }  # fmt: skip
        assert (await client.get(f"/v1/jobs/{text}/samples")).json()["held_out"] is None


async def test_logs_are_followed_to_the_end(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        end = deployment.write_log(id).stat().st_size
        deployment.advance(id, "succeeded")
        stream = await client.get(f"/v1/jobs/{id}/logs?follow=true")
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert f"id: trainer:{end}\nevent: log\n" in stream.text
        assert stream.text.endswith("event: end\ndata: {}\n\n")
        again = await client.get(f"/v1/jobs/{id}/logs?follow=true", headers={"last-event-id": f"trainer:{end}"})
        assert "event: log" not in again.text
        assert (await client.get(f"/v1/jobs/job_{'0' * 32}/logs?follow=true")).status_code == 404


async def test_dead_letters(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        path = f"/v1/jobs/{id}/dead-letters"
        deployment.bury(id)
        page = (await client.get(f"{path}?limit=1")).json()
        assert ([row["id"] for row in page["data"]], page["has_more"]) == ([1], True)
        assert [row["id"] for row in (await client.get(f"{path}?after={page['last_id']}")).json()["data"]] == [2]
        assert (await client.get(f"{path}/1")).json()["content"] == "abc"
        asked = await client.post(f"{path}/1/replay")
        assert (asked.status_code, asked.json()["args"]) == (202, {"id": 1})
        assert (await client.post(f"{path}/2/replay")).status_code == 404
        assert (await client.delete(f"{path}/2")).status_code == 204
        assert (await client.delete(f"{path}/2")).status_code == 404
        assert (await client.get(f"/v1/jobs/job_{'0' * 32}/dead-letters")).status_code == 404


async def test_clients_and_commands_see_dead_letters(served: Any, deployment: Any, job: Any) -> None:
    async with AsyncClient(served.url) as client:
        id = (await client.submit(job)).id
        deployment.bury(id)
        assert [row.id for row in await client.dead_letters.list(id)] == [1, 2]
        await client.dead_letters.drop(id, 2)
        with pytest.raises(NotFound):
            await client.dead_letters.show(id, 2)
    env = {"PENSTOCK_URL": served.url}
    listed = CliRunner().invoke(cli, ["dlq", "ls", id], env=env)
    assert (listed.exit_code, "max deliveries" in listed.output) == (0, True)
    assert CliRunner().invoke(cli, ["dlq", "show", id, "1"], env=env).exit_code == 0
    assert CliRunner().invoke(cli, ["dlq", "drop", id, "1"], env=env).exit_code == 0
    assert CliRunner().invoke(cli, ["dlq", "replay", id, "1"], env=env).exit_code == 1


# -- pure parts ------------------------------------------------------------------------------------------------------


def test_thinning_keeps_the_ends_and_where_curves_turn() -> None:
    steps = list(range(1000))
    spike = [0.0] * 1000
    spike[617] = 5.0
    slow = list(np.sin(np.arange(1000) / 150))
    for points in (2, 3, 10, 100, 999):
        chosen = largest_triangles(steps, [slow, spike], points)
        assert len(chosen) == points
        assert chosen == sorted(set(chosen))
        assert (chosen[0], chosen[-1]) == (0, 999)
        assert (617 in chosen) or points < 10, "an evenly spaced choice of ten would miss it"
    gaps = [None if i % 3 else float("nan") for i in range(1000)]
    assert len(largest_triangles(steps, [gaps], 10)) == 10
    assert largest_triangles(steps, [], 5)[0] == 0
    assert largest_triangles([1, 2], [[1.0, 2.0]], 10) == [0, 1]


def test_thinning_keeps_every_value_of_a_curve_with_few() -> None:
    steps = list(range(2000))
    dense: list[list[float | None]] = [list(np.sin(np.arange(2000) / k)) for k in (3, 20, 150)]
    held_out: list[float | None] = [i / 2000 if i % 50 == 7 else None for i in steps]
    rows = [
        {"step": i, "time": float(i), "values": {f"dense/{k}": curve[i] for k, curve in enumerate(dense)}}
        for i in steps
    ] + [{"step": i, "time": float(i), "values": {"eval/success": held_out[i]}} for i in steps if i % 50 == 7]
    shown = columns(rows, names=None, step_from=None, step_to=None, max_points=400)
    assert (len(shown["steps"]) <= 400, shown["steps"][0], shown["steps"][-1]) == (True, 0, 1999)
    assert [value for value in shown["series"]["eval/success"] if value is not None] == held_out[7::50]
    for points in (2, 3, 4, 40, 1999):
        chosen = thinned(steps, [*dense, held_out], points)
        assert len(chosen) <= points
        assert chosen == sorted(set(chosen))
        assert (chosen[0], chosen[-1]) == (0, 1999)


def test_spans_of_an_update() -> None:
    base = {"writer_epoch": 1}
    events = [
        Drawn(**base, time=1.0, start=0, stop=2, min_version=0, deadline=9.0),
        *(
            BatchSealed(
                **base, time=3.0 + n, number=n, revision=1, start_version=n - 1, update_index=n - 1,
                groups=[SealedGroup(Draw(n - 1), "a", n, "d", 0, 0, [1.0], 3, "w")],
            )
            for n in (1, 2)
        ),
        BatchTrained(**base, time=6.0, number=1, revision=1, version=1, digest="a", trainer_epoch=1),
        BatchTrained(**base, time=8.0, number=2, revision=1, version=2, digest="b", trainer_epoch=1),
        Checkpointed(**base, time=9.0, number=2, version=2, digest="b", path="p", trainer_epoch=1, low_seq=0),
    ]  # fmt: skip
    shown = [(s["step"], s["stage"], s["start"], s["end"]) for s in timeline(events, step=None)]
    assert shown == [
        (1, "generate", 1.0, 4.0),
        (1, "train", 4.0, 6.0),
        (2, "generate", 1.0, 5.0),
        (2, "wait", 5.0, 6.0),
        (2, "train", 6.0, 8.0),
        (2, "checkpoint", 8.0, 9.0),
    ]
    assert timeline(events, step=1) == timeline(events, step=None)[:2]
    assert timeline(events, step=None, limit=1) == timeline(events, step=2)
    assert timeline(events, step=3) == []
