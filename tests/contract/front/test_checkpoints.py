"""Checkpoints over HTTP, in both clients and on the command line, with real files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.client import AsyncClient, Client
from penstock.services.coordinator.api.http.open_file import byte_range, open_file, reply_of
from penstock.services.coordinator.origins import warnings_of
from penstock.services.coordinator.problems import HttpProblem
from penstock.services.coordinator.services import Services
from penstock.services.coordinator.training.checkpoints import Checkpoints, checkpoint_row
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import CheckpointError, ConfigError, Conflict, NotFound
from penstock.shared.protocol.events import BestCheckpoint, Checkpointed, Finished
from penstock.shared.protocol.jobs import ModelOrigin

WEIGHTS = bytes(range(256)) * 1000
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "critic/model.safetensors": b"critic", "empty.bin": b""}


def write(path: Path, files: dict[str, bytes], *, committed: bool = True) -> None:
    """Write a checkpoint as trainers do; without ``committed`` it has no ``COMMIT``."""
    entries = {name: {"nbytes": len(data), "sha256": sha256(data)} for name, data in files.items()}
    manifest = json.dumps({"schema": 2, "job": "j", "number": 1, "meta": {}, "environment": {}, "files": entries})
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    (path / "manifest.json").write_text(manifest)
    if committed:
        (path / "COMMIT").write_text(sha256(manifest.encode()))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record(deployment: Any, job: str, number: int, path: Path, reason: str = "interval") -> None:
    deployment.record(
        job,
        Checkpointed(
            writer_epoch=1, time=1000.0 + number, number=number, version=number, digest=f"d{number}", path=str(path),
            trainer_epoch=1, low_seq=0, reason=reason,
        ),
    )  # fmt: skip


@pytest.fixture
def submitted(served: Any, deployment: Any, job: Any, tmp_path: Path) -> Iterator[tuple[Client, str]]:
    """Submit a job with checkpoints 0, 4 (the best), 8 (deleted) and 9 (not committed); yield a client and its id."""
    for number, files in ((0, {"config.json": b"{}"}), (4, FILES), (9, FILES)):
        write(tmp_path / "data" / str(number), files, committed=number != 9)
    (tmp_path / "data" / "secret").write_text("secret")
    with Client(served.url) as client:
        id = client.submit(job).id
        for number, reason in ((0, "initial"), (4, "new best"), (8, "interval"), (9, "interval")):
            record(deployment, id, number, tmp_path / "data" / str(number), reason)
        best = {"number": 4, "metric": "eval/greedy", "value": 0.9, "step": 4}
        deployment.record(id, BestCheckpoint(writer_epoch=1, time=0.0, **best))
        yield client, id


def test_the_list_describes_each_checkpoint(submitted: tuple[Client, str], deployment: Any) -> None:
    client, job = submitted
    rows = client.checkpoints(job)
    assert [row["number"] for row in rows] == [0, 4, 8, 9]
    assert [row["number"] for row in rows if row["available"]] == [0, 4]
    assert [row["format"] for row in rows] == [None, "hf", None, None], "the files that are here decide the format"
    assert [[flag for flag in ("initial", "best", "newest", "final") if row[flag]] for row in rows] == [
        ["initial"],
        ["best"],
        [],
        ["newest"],
    ]
    best = client.checkpoint(job, 4)
    assert best == rows[1]
    assert (best["reason"], best["version"], best["digest"], best["time"]) == ("new best", 4, "d4", 1004.0)
    sizes = {file["name"]: (file["nbytes"], file["sha256"]) for file in best["files"]}
    assert {name: sizes[name] for name in FILES} == {name: (len(data), sha256(data)) for name, data in FILES.items()}
    assert best["nbytes"] == sum(nbytes for nbytes, _ in sizes.values())
    deployment.record(job, Finished(writer_epoch=1, time=0.0, reason="succeeded", summary={}))
    assert client.checkpoint(job, 9)["final"]
    with pytest.raises(NotFound, match="no checkpoint 5; there are: 0, 4, 8, 9"):
        client.checkpoint(job, 5)


def test_an_adapter_is_distinguished_from_whole_weights(tmp_path: Path) -> None:
    """The checkpoint of an adapter may hold the base weights, too, for jobs that cannot find them elsewhere."""
    write(tmp_path, {"adapter_model.safetensors": b"a", "model.safetensors": b"base"})
    ledger = LedgerState()
    ledger.apply(
        Checkpointed(
            writer_epoch=1, time=0.0, number=4, version=4, digest="d", path=str(tmp_path), trainer_epoch=1, low_seq=0
        )
    )  # fmt: skip
    assert checkpoint_row(ledger, tmp_path, 4)["format"] == "lora"


async def test_ranges_resume_only_what_is_unchanged(connect: Any, deployment: Any, job: Any, tmp_path: Path) -> None:
    write(tmp_path / "4", FILES)
    async with connect() as http:
        id = (await http.post("/v1/jobs", json=job)).json()["id"]
        record(deployment, id, 4, tmp_path / "4")
        base = f"/v1/jobs/{id}/checkpoints/4/files"
        whole = await http.get(f"{base}/model.safetensors")
        etag = whole.headers["etag"]
        assert (whole.status_code, whole.content, etag) == (200, WEIGHTS, f'"{sha256(WEIGHTS)}"')
        assert whole.headers["accept-ranges"] == "bytes"

        part = await http.get(f"{base}/model.safetensors", headers={"Range": "bytes=1000-", "If-Range": etag})
        assert (part.status_code, part.content) == (206, WEIGHTS[1000:])
        assert part.headers["content-range"] == f"bytes 1000-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
        middle = await http.get(f"{base}/model.safetensors", headers={"Range": "bytes=10-19"})
        assert (middle.status_code, middle.content) == (206, WEIGHTS[10:20])
        tail = await http.get(f"{base}/model.safetensors", headers={"Range": "bytes=-5"})
        assert tail.content == WEIGHTS[-5:]

        other = {"Range": "bytes=1000-", "If-Range": '"another"'}
        assert (await http.get(f"{base}/model.safetensors", headers=other)).content == WEIGHTS
        past = await http.get(f"{base}/model.safetensors", headers={"Range": f"bytes={len(WEIGHTS)}-"})
        assert (past.status_code, past.headers["content-range"]) == (416, f"bytes */{len(WEIGHTS)}")
        assert past.headers["content-type"] == "application/problem+json"
        other["Range"] = f"bytes={len(WEIGHTS)}-"
        changed = await http.get(f"{base}/model.safetensors", headers=other)
        assert (changed.status_code, changed.content) == (200, WEIGHTS)
        same = await http.get(f"{base}/model.safetensors", headers={"If-None-Match": etag})
        assert (same.status_code, same.content) == (304, b"")
        assert (await http.get(f"{base}/critic/model.safetensors")).content == b"critic"
        assert (await http.get(f"{base}/empty.bin")).content == b""


async def test_a_file_that_retention_takes_meanwhile_is_a_conflict(
    connect: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object) -> tuple[Path, str]:
        return tmp_path / "deleted since", "0" * 64

    monkeypatch.setattr(Checkpoints, "file", found)
    async with connect() as http:
        id = (await http.post("/v1/jobs", json=job)).json()["id"]
        reply = await http.get(f"/v1/jobs/{id}/checkpoints/4/files/model.safetensors")
    assert (reply.status_code, reply.json()["detail"]) == (409, "file 'model.safetensors' of checkpoint 4 is gone")


async def test_a_download_goes_on_when_retention_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WEIGHTS)
    file, size = await open_file(path)
    path.unlink()
    reply = reply_of(file, size, byte_range("bytes=100-", size), etag='"x"')
    assert b"".join([bytes(chunk) async for chunk in reply.body_iterator]) == WEIGHTS[100:]
    assert (reply.status_code, reply.headers["content-length"]) == (206, str(size - 100))
    assert file.closed


def test_ranges_of_bytes() -> None:
    places = {
        "": None, "bytes=0-": (0, 10), "bytes=3-5": (3, 6), "bytes=3-99": (3, 10), "bytes=-4": (6, 10),
        "bytes=-99": (0, 10), "bytes=5-3": None, "bytes=-": None, "bytes=0-1,3-4": None, "rows=1-2": None,
    }  # fmt: skip
    assert {wanted: byte_range(wanted, 10) for wanted in places} == places
    for past in ("bytes=10-", "bytes=10-12", "bytes=-0"):
        with pytest.raises(HttpProblem):
            byte_range(past, 10)


NO_FILES = [
    "../secret",
    "..%2Fsecret",
    "%2e%2e/secret",
    "critic/../../secret",
    "critic/..%2f..%2fsecret",
    "/etc/passwd",
    "%2Fetc%2Fpasswd",
    "unlisted.bin",
    "COMMIT",
    "config.json%00.png",
    "",
]


async def test_only_names_of_the_manifest_are_served(connect: Any, deployment: Any, job: Any, tmp_path: Path) -> None:
    write(tmp_path / "4", FILES)
    (tmp_path / "4" / "unlisted.bin").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    async with connect() as http:
        job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
        record(deployment, job_id, 4, tmp_path / "4")
        listed = await http.get(f"/v1/jobs/{job_id}/checkpoints/4/files/{next(iter(FILES))}")
        assert listed.status_code == 200
        for name in NO_FILES:
            reply = await http.get(f"/v1/jobs/{job_id}/checkpoints/4/files/{name}")
            assert reply.status_code == 404, (name, reply.text)
            assert reply.headers["content-type"] == "application/problem+json", name


async def test_a_link_that_leads_out_is_not_followed(connect: Any, deployment: Any, job: Any, tmp_path: Path) -> None:
    write(tmp_path / "4", FILES)
    (tmp_path / "secret").write_bytes(FILES["config.json"])
    (tmp_path / "4" / "config.json").unlink()
    (tmp_path / "4" / "config.json").symlink_to(tmp_path / "secret")
    async with connect() as http:
        job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
        record(deployment, job_id, 4, tmp_path / "4")
        reply = await http.get(f"/v1/jobs/{job_id}/checkpoints/4/files/config.json")
    assert reply.status_code == 409


def test_what_is_not_committed_or_was_changed_is_not_served(submitted: tuple[Client, str], tmp_path: Path) -> None:
    client, job = submitted
    with pytest.raises(Conflict, match="not on the coordinator's host"):
        client.download_checkpoint(job, 9, tmp_path / "out")
    manifest = tmp_path / "data" / "4" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("config.json", "conflg.json"))
    assert not client.checkpoint(job, 4)["available"]


def test_a_download_is_complete_verified_and_resumed(
    submitted: tuple[Client, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, job = submitted
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors.part").write_bytes(WEIGHTS[:100_000])  # broken off
    asked: list[str] = []
    send = client._http.stream

    def spy(method: str, url: str, **more: Any) -> Any:
        asked.append(more["headers"].get("Range", ""))
        return send(method, url, **more)

    monkeypatch.setattr(client._http, "stream", spy)
    client.download_checkpoint(job, 4, out)
    assert {name: (out / name).read_bytes() for name in FILES} == FILES
    assert sorted(p.name for p in out.rglob("*.part")) == []
    assert [r for r in asked if r] == ["bytes=100000-"]
    asked.clear()
    client.download_checkpoint(job, 4, out)  # everything is there
    assert asked == []


def test_damage_on_the_way_is_found(submitted: tuple[Client, str], tmp_path: Path) -> None:
    client, job = submitted
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors.part").write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match="did not arrive as it was committed"):
        client.download_checkpoint(job, 4, out, names=["model.safetensors"])
    assert list(out.iterdir()) == []
    client.download_checkpoint(job, 4, out, names=["model.safetensors"])
    assert (out / "model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(NotFound, match="no file 'nothing'"):
        client.download_checkpoint(job, 4, out, names=["nothing"])


async def test_the_async_client_downloads_too(submitted: tuple[Client, str], tmp_path: Path) -> None:
    client, job = submitted
    async with AsyncClient(client.url) as other:
        assert await other.checkpoints(job) == client.checkpoints(job)
        await other.download_checkpoint(job, 4, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == FILES


def test_the_command_line_lists_and_gets(
    submitted: tuple[Client, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, job = submitted
    monkeypatch.chdir(tmp_path)
    env = {"PENSTOCK_URL": client.url}
    listed = CliRunner().invoke(app, ["ckpt", "ls", job], env=env)
    assert listed.exit_code == 0, listed.output
    assert "new best" in listed.output
    assert "gone" in listed.output
    got = CliRunner().invoke(app, ["ckpt", "get", job, "best"], env=env)
    assert got.exit_code == 0, got.output
    assert (tmp_path / "addition-4" / "model.safetensors").read_bytes() == WEIGHTS
    missing = CliRunner().invoke(app, ["ckpt", "get", job, "final"], env=env)
    assert missing.exit_code == 1
    assert "there are: 0, 4, 8, 9" in missing.output


# -- a checkpoint as a model -----------------------------------------------------------------------------------------


async def test_a_model_path_may_name_a_checkpoint(submitted: tuple[Client, str], services: Services, job: Any) -> None:
    client, name = submitted

    async def resolved(path: str) -> str | None:
        spec, origin = await services.origins.resolve(JobConfig.parse({**job, "model": {"path": path}}))
        assert (origin is None) == (path == "/models/tiny")
        assert origin is None or (origin.model, origin.path, origin.job) == (path, spec.model.path, name)
        return str(spec.model.path)

    paths = {row["number"]: row["path"] for row in client.checkpoints(name)}
    assert await resolved(f"job:{name}@best") == paths[4]
    assert await resolved(f"job:{job['name']}@4") == await resolved(f"job:{job['name']}@step:4") == paths[4]
    assert await resolved(f"job:{name}@initial") == paths[0]
    assert await resolved("/models/tiny") == "/models/tiny"
    wrong = {
        f"job:{name}@7": "the nearest is 8", f"job:{name}@final": "the latest one is 9", f"job:{name}@worst": "one of",
        f"job:{name}@{'9' * 5000}": "write job:NAME@final", f"job:{name}": "write job:NAME@final",
        "job:job_0@1": "no job 'job_0'", f"job:{name}@8": "there are those of: 0, 4", f"job:{name}@latest": "of: 0, 4",
    }  # fmt: skip
    for path, hint in wrong.items():
        with pytest.raises(ConfigError, match=f"model\\.path: 'job:.*{hint}"):
            await resolved(path)
    unknown = "job_" + "0" * 32
    with pytest.raises(ConfigError, match="no job"):
        await resolved(f"job:{unknown}@0")
    with pytest.raises(NotFound, match="no final checkpoint"):
        await services.deployments.find(f"job:{name}@final")


async def test_a_job_from_a_checkpoint_warms_its_optimizer_up(
    submitted: tuple[Client, str], services: Services, job: Any
) -> None:
    async def resolved(**changes: Any) -> tuple[JobConfig, ModelOrigin | None]:
        spec, origin = await services.origins.resolve(JobConfig.parse({**job, "model": {"path": model}, **changes}))
        assert isinstance(spec, JobConfig)
        return spec, origin

    model = f"job:{submitted[1]}@4"
    for updates, warmup in {100: 10, 20: 10, 8: 4, 1: 0}.items():
        spec, origin = await resolved(train={**job["train"], "max_updates": updates})
        assert spec.optimizer.warmup_updates == warmup
        assert JobConfig.parse(spec.model_dump(mode="json", exclude_unset=True)).optimizer == spec.optimizer
    spec, origin = await resolved(optimizer={"warmup_updates": 0}, warm_start={"steps": 3})
    assert spec.optimizer.warmup_updates == 0
    assert [text.partition(":")[0] for text in warnings_of(spec, origin)] == ["warm_start", "optimizer.warmup_updates"]
    assert not warnings_of(spec, None)
    spec, origin = await resolved(optimizer={"learning_rate": 1e-3}, train={**job["train"], "max_updates": 30})
    assert (spec.optimizer.learning_rate, spec.optimizer.warmup_updates) == (1e-3, 10)
    assert not warnings_of(spec, origin)
    model = "/models/tiny"
    spec, origin = await resolved()
    assert (spec.optimizer.warmup_updates, origin) == (0, None)
