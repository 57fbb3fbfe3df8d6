"""A deployment is backed up while it runs, deleted, and restored at another path, and its jobs continue.

The commands are those of docs/operations.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

DIGITS = "0123456789"
SOURCE = "def score(prompt, completion, answer, row):\n    return 1.0\n"


def test_a_running_job_goes_on_from_a_backup_on_another_path(deploy: Callable[[Path], Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text("\n".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a)}) for a in DIGITS))
    data = {"train": {"type": "file", "path": str(rows)}, "prompt": {"max_tokens": 8}}
    (tmp_path / "first").mkdir()
    with deploy(tmp_path / "first") as first:
        done = first.submit("train.max_updates=3")
        assert first.finish(done).status.phase == "succeeded"
        job = first.submit("train.max_updates=60", "checkpoint.every=4", data=data)
        first.reach(job, 12)
        code = first.client.files.upload_code(SOURCE).sha256
        made = first.cli("backup", str(tmp_path / "backup"), "--data-dir", str(first.data_dir), "--json")
        assert made.exit_code == 0, made.output
        first.reach(job, 16)  # it went on meanwhile, and what it did since is not in the backup
        refused = first.cli("backup", str(tmp_path / "backup"), "--data-dir", str(first.data_dir))
        assert (refused.exit_code, "is not empty" in refused.output) == (2, True)
        assert not list(first.data_dir.glob(".backup-*"))
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(rows.parent)

    second_dir = tmp_path / "elsewhere" / "second"
    second_dir.parent.mkdir()
    with_new_path = deploy(second_dir)
    again = with_new_path.cli("restore", str(tmp_path / "backup"), "--data-dir", str(second_dir / "data"), "--json")
    assert again.exit_code == 0, again.output
    with with_new_path as second:
        assert second.status(done).phase == "succeeded"
        assert (second.data_dir / "code" / f"{code}.py").read_text() == SOURCE, "jobs name it by its content"
        second.check_audit(done)
        assert second.finish(job, 120).status.step == 60
        second.check_audit(job)
        second.check_replay(job, at_least=1)
        spec = second.client.get(job).spec
        assert str(second_dir) in json.dumps(spec["data"])


def test_jobs_of_an_earlier_version_continue(deploy: Callable[[Path], Any], recorded: Path) -> None:
    with deploy(recorded) as today:
        jobs = {record.name: record.id for record in today.client.list()}
        for name in ("unfinished", "agent"):
            today.client.resume(jobs[name])
        assert today.finish(jobs["unfinished"], 120).status.step == 12
        today.check_audit(jobs["unfinished"])
        today.check_replay(jobs["unfinished"], at_least=0)  # bit for bit only on the machine that recorded it
        today.until(lambda: today.status(jobs["agent"]).phase == "running", "the online job runs")
        today.client.cancel(jobs["agent"])
        assert today.finish(jobs["agent"]).status.phase == "cancelled"
        today.check_audit(jobs["agent"])
