"""Views of a job in both clients: samples, timelines, followed logs, archives, artifacts."""

from __future__ import annotations

import asyncio
import hashlib
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.client.results import LogLine, MetricName, StageSpan
from penstock.services.coordinator.queries.diagnosis import Diagnosis
from penstock.shared.errors import CheckpointError, Conflict, NotFound
from penstock.shared.protocol.events import Checkpointed

WEIGHTS = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
async def job_id(served: Any, job: Any, asking: Any) -> str:
    async with asking(served.url) as ask:
        return str((await ask("submit", job)).id)


async def test_samples_timelines_and_names(served: Any, deployment: Any, asking: Any, job_id: str) -> None:
    deployment.measure(job_id)
    deployment.train(job_id)
    async with asking(served.url) as ask:
        assert await ask("metric_names", job_id) == [
            MetricName(name="loss", count=5, first_step=0, last_step=4, last=1.0),
            MetricName(name="reward", count=5, first_step=0, last_step=4, last=0.9),
        ]
        assert await ask("timeline", job_id, step=2) == [
            StageSpan(step=2, stage="generate", start=1.0, end=4.0),
            StageSpan(step=2, stage="train", start=4.0, end=5.0),
        ]
        first, second = await ask("samples", job_id, limit=2, sort="reward", min_reward=0.5)
        assert (first.id, first.completion, first.parts) == (f"{job_id}-2-2.0-0", "3", {"exact": 1.0})
        assert second.id == f"{job_id}-2-2.0-2"
        assert (await ask("samples", job_id, after=second.id))[0].id == f"{job_id}-2-2.0-3"
        tokens = await ask("sample", job_id, "2-3.0-1")
        assert (tokens.job, tokens.step, tokens.token_ids) == (job_id, 2, [2, 3])
        assert (tokens.mask, tokens.versions, tokens.logprobs) == ([1, 0], [1, 1], [-0.5, -1.0])
        with pytest.raises(NotFound):
            await ask("sample", job_id, "2-3.0-4")


@pytest.mark.long
async def test_logs_are_followed_across_a_restart(
    served: Any, deployment: Any, asking: Any, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client yields every line once: those from before the restart of the server, and those after it."""
    asked, read = threading.Event(), Diagnosis.logs

    async def logs(diagnosis: Diagnosis, job: str, **query: Any) -> dict[str, Any]:
        if query["after"]:  # the first lines have come
            asked.set()
        return await read(diagnosis, job, **query)

    def live() -> None:
        asked.wait(30)
        served.stop()
        with deployment.write_log(job_id).open("a") as log:
            log.write(f"line 3 of {job_id}\n")
        served.start()
        deployment.advance(job_id, "succeeded")

    monkeypatch.setattr(Diagnosis, "logs", logs)
    begun = deployment.write_log(job_id).stat().st_size
    async with asking(served.url) as ask:
        thread = threading.Thread(target=live)
        thread.start()
        rows = await ask("follow_logs", job_id, tail=2)
        await asyncio.to_thread(thread.join)
        lines = [f"line {number} of {job_id}" for number in (1, 2, 3)]
        assert rows == [LogLine(service="trainer", worker="trainer", text=line) for line in lines]
        assert [row.text for row in await ask("follow_logs", job_id, after=f"trainer:{begun}")] == lines[2:]
        with pytest.raises(NotFound, match="no log of 'nobody'"):
            await ask("follow_logs", job_id, service="nobody")
        with pytest.raises(NotFound):
            await ask("follow_logs", "job_" + "0" * 32)


async def test_archives_and_artifacts_are_downloaded(
    *, commit: Any, served: Any, deployment: Any, asking: Any, job_id: str, tmp_path: Path
) -> None:
    root, out = deployment.data_dir / "checkpoints", tmp_path / "out"
    folder = root / "job_a" / "4-x"
    commit(folder, {"model.safetensors": WEIGHTS, "config.json": b"{}"})
    deployment.record(
        job_id,
        Checkpointed(
            writer_epoch=1, time=1000.0, number=4, version=4, digest="d", path=str(folder), trainer_epoch=1, low_seq=0
        ),
    )
    async with asking(served.url, patience_s=1.0) as ask:
        (out / "deep").mkdir(parents=True)
        (out / "deep" / "all.tar.part").write_bytes(b"broken off")
        await ask("download_archive", job_id, 4, out / "deep" / "all.tar")
        with tarfile.open(out / "deep" / "all.tar") as tar:
            names = {member.name for member in tar}
            member = tar.extractfile("checkpoint-4/model.safetensors")
            assert member is not None
            assert member.read() == WEIGHTS
        assert names == {f"checkpoint-4/{name}" for name in ("model.safetensors", "config.json", "manifest.json")}
        with pytest.raises(NotFound):
            await ask("download_archive", job_id, 5, out / "five.tar")

        path, part = out / "weights", out / "weights.part"
        for begun in (b"", WEIGHTS[:70_000], WEIGHTS, WEIGHTS + b"more"):  # whole, and yet not verified; too much
            path.unlink(missing_ok=True)
            part.write_bytes(begun)
            await ask("download_artifact", SHA256, path)
            assert path.read_bytes() == WEIGHTS
            assert not part.exists()
        root.rename(tmp_path / "elsewhere")
        await ask("download_artifact", SHA256, path)  # it is there already
        (tmp_path / "elsewhere").rename(root)
        path.unlink()
        part.write_bytes(b"x" * 1000)
        with pytest.raises(CheckpointError, match="did not arrive"):
            await ask("download_artifact", SHA256, path)
        assert not part.exists()
        with pytest.raises(NotFound):
            await ask("download_artifact", "0" * 64, path)
        (folder / "model.safetensors").unlink()
        with pytest.raises((Conflict, NotFound)):
            await ask("download_archive", job_id, 4, out / "gone.tar")
        assert not (out / "gone.tar").exists()
