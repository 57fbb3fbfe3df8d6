"""A sweep submits a group of jobs, waits for them and compares them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.long
def test_rates_and_seeds_are_compared(stack: Any, make_job: Any, tmp_path: Path) -> None:
    file, plot = tmp_path / "job.yaml", tmp_path / "curves.svg"
    file.write_text(yaml.safe_dump(make_job(name="swept", metadata={"team": "a"})))
    words = ["--grid", "optimizer.learning_rate=1e-4,3e-4", "--seeds", "2", "--set", "train.max_updates=2"]
    result = stack.cli("sweep", str(file), *words, "--plot", str(plot), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [point["settings"] for point in found["points"]] == [
        ["optimizer.learning_rate=1e-4"], ["optimizer.learning_rate=3e-4"],
    ]  # fmt: skip
    assert all(len(point["ends"]) == 2 for point in found["points"])
    jobs = stack.client.list(metadata={"sweep": found["sweep"], "team": "a"})
    assert len(jobs) == 4
    assert sorted((job.spec["optimizer"]["learning_rate"], job.spec["seed"]) for job in jobs) == [
        (1e-4, 0), (1e-4, 1), (3e-4, 0), (3e-4, 1),
    ]  # fmt: skip
    assert len(ElementTree.parse(plot).findall(".//{*}polyline")) == 4
    check_table(stack, file)


def check_table(stack: Any, file: Path) -> None:
    """Check that the table has one row for each combination, with the rewards of its jobs."""
    words = ("--grid", "optimizer.learning_rate=1e-4", "--seeds", "2", "--set", "train.max_updates=1")
    result = stack.cli("sweep", str(file), *words)
    assert result.exit_code == 0, result.output
    head, *rows = [re.split(r" {2,}", line.strip()) for line in result.stdout.splitlines()]
    assert head == ["SETTINGS", "reward/mean", "LEAST", "MOST", "JOBS", "BEST JOB", "WARNINGS"]
    ((settings, mean, least, most, jobs, best, *_),) = rows
    (label,) = re.findall(r"--label sweep=(\S+)", result.stderr)
    rewards = {job.id: job.status.reward for job in stack.client.list(metadata={"sweep": label})}
    ends = list(rewards.values())
    assert (settings, jobs, rewards[best]) == ("optimizer.learning_rate=1e-4", "2", max(ends))
    shown = [float(value) for value in (mean, least, most)]
    assert shown == pytest.approx([fmean(ends), min(ends), max(ends)], rel=1e-3)
