"""The demos of README.md, docs/cli.md and docs/embodied.md run to their end and keep what these pages promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1000)]

LIMIT_S = 900
"""A demo takes one or two minutes on an idle machine; the online demos give up 60 s before this limit."""
LINE = re.compile(
    r" running +update (\d+)/600 +version (\d+) .*reward .*lag \d.* tokens/s .*queues: \d+ tickets, \d+ groups"
)


def run(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "demo", *words, "--json", "--data-dir", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def demo(*words: str, directory: Path) -> tuple[dict[str, Any], str]:
    """Run ``penstock demo`` and check that it succeeds; return its summary and its output on stderr."""
    result = run(*words, directory=directory)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-4000:]}"
    assert not re.search(r"^error:", result.stderr, re.MULTILINE), result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["audit"] is True
    assert found["data_dir"] == str(directory)
    return found, result.stderr


def test_a_small_model_learns_to_add(tmp_path: Path) -> None:
    found, output = demo(directory=tmp_path)
    reward, equation = found["reward"], found["equation"]
    assert (found["phase"], found["name"]) == ("succeeded", "addition")
    assert reward["first"] <= 0.5
    assert reward["last"] >= reward["goal"] == 0.9
    assert reward["reached"] is True
    assert found["evaluation"]["eval/greedy"]["last"] >= 0.95
    assert 0 < found["updates"] == found["version"] <= 600
    assert equation["trained"] == 32 * found["updates"]
    assert equation["drawn"] == equation["trained"] + sum(equation["dropped"].values()) + equation["in_flight"]
    assert equation["in_flight"] == 0
    assert (Path(found["checkpoint"]) / "COMMIT").is_file()
    lines = [(int(step), int(version)) for step, version in LINE.findall(output)]
    assert len(lines) >= 3
    assert len({step for step, _ in lines}) == len(lines), "no update twice"
    assert all(version == step for step, version in lines)


def test_a_missed_goal_is_reported(tmp_path: Path) -> None:
    words = ("--set", "train.max_updates=3", "--set", "warm_start.steps=5")
    result = run(*words, directory=tmp_path)
    assert result.returncode == 1
    found = json.loads(result.stdout)
    assert (found["ok"], found["phase"], found["audit"], found["updates"]) == (False, "succeeded", True, 3)
    assert found["reward"]["reached"] is False
    assert result.stderr.splitlines()[-1].startswith(
        "error: the goal was missed: a mean sampled reward of at least 0.9"
    )


def test_a_served_policy_learns_from_its_users(tmp_path: Path) -> None:
    check_online(tmp_path)


@pytest.mark.vllm
def test_a_policy_that_vllm_serves_learns_from_its_users(tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    assert python_with("vllm").is_file()
    changes = ("rollout.engine=vllm", "model.config.num_heads=2", "model.config.num_kv_heads=1")
    check_online(tmp_path, *(word for change in changes for word in ("--set", change)))


def check_online(directory: Path, *words: str) -> None:
    """Run the online demo with ``words`` on its command line; check that it learns and that its audit passes."""
    found, output = demo("online", "--set", "seed=0", "--limit-s", str(LIMIT_S - 60), *words, directory=directory)
    accepted = found["accepted"]
    assert accepted["first"] <= accepted["start"] == 0.35
    assert accepted["last"] >= accepted["goal"] == 0.8
    assert found["failures"] == []
    assert found["answers"] >= 2 * accepted["answers"]
    assert found["version"] > 0
    counts = found["feedback"]
    assert counts["posted"] >= found["answers"]
    assert min(counts["late"], counts["twice"], counts["corrected"]) > 0
    assert found["equation"]["trained"] > 0
    rates = [float(row.split()[3]) for row in output.splitlines() if re.fullmatch(r" +[\d.]+( +[\d.]+){7}", row)]
    assert rates[0] <= accepted["start"], "the first rate is no better than the warm start"
    assert rates[-1] >= accepted["goal"]


def test_a_flood_of_inverted_feedback_does_not_invert_the_policy(tmp_path: Path) -> None:
    found, _ = demo("online", "--hostile", "--set", "seed=2", "--limit-s", str(LIMIT_S - 60), directory=tmp_path)
    accepted = found["accepted"]
    assert accepted["first"] <= accepted["start"] == 0.35
    assert accepted["last"] >= accepted["goal"] == 0.8
    assert found["failures"] == []
    assert found["hostile"]["traffic"] >= 0.85, "of all answers, each of them judged the wrong way round"
    assert 0 < found["hostile"]["influence"] <= 0.16, "of the feedback that was trained on: its share is 0.15"


def test_a_robot_arm_learns_and_is_filmed(tmp_path: Path) -> None:
    found, output = demo("robot", directory=tmp_path)
    assert (found["phase"], found["name"]) == ("succeeded", "metaworld-reach-ppo")
    assert found["reward"]["first"] <= 0.3
    assert found["reward"]["last"] >= found["reward"]["goal"] == 0.9
    assert found["evaluation"]["eval/success"]["last"] >= 0.9
    film = Path(found["video"])
    assert film.name == f"{found['version']}-1000000.mp4", output[-2000:]
    assert film.read_bytes()[4:8] == b"ftyp"
