"""docs/how-to/own-model.md, executed as written: a Hugging Face folder, a sweep, its best model in transformers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/own-model.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINES = "".join(text for kind, _, text in FENCE.findall(PAGE) if kind == "bash").splitlines()
SMALLER = "limits.byte_budget=8388608"
"""Change that makes the byte budget of a job fit the small streams of the tests."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the files of the page."""
    for _, name, text in FENCE.findall(PAGE):
        if name:
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*words: str) -> str:
    """Run a Python program; return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_commands_of_the_page_run_in_order(stack: Any, folder: Path) -> None:
    best, ran = "", []
    for line in LINES:
        program, *words = shlex.split(line.replace("$BEST", best))
        verb = words[0]
        ran.append(verb)
        if program == "python":
            printed = python(*words)
            continue
        assert program == "penstock"
        if verb == "up":
            continue  # the stack of the tests
        result = stack.cli(*words, *(["--set", SMALLER] if verb in ("submit", "sweep") else []))
        assert result.exit_code == 0, f"{line}\n{result.output}"
        if verb == "submit":
            assert "warning" not in result.output, result.output
            assert "200 rows" in result.output
        if verb == "sweep":
            summary = result.output
            print(summary)
            found = re.search(r"^the best one: penstock export (job_\w+)@best --to DIRECTORY$", summary, re.MULTILINE)
            assert found is not None, summary
            best = found[1]
    assert ran == ["tiny.py", "up", "submit", "sweep", "metrics", "samples", "export", "use.py"]
    assert re.fullmatch(r"\d+\n", printed), printed
    assert len(ElementTree.parse(folder / "rates.svg").findall(".//{*}polyline")) == 3
    jobs = stack.client.list(metadata={"sweep": stack.client.get(best).spec["metadata"]["sweep"]})
    assert {job.id for job in jobs} == set(re.search(r"/#/compare\?jobs=([\w,]+)", summary)[1].split(","))
    check_learning(stack, best)
    check_export(folder)


def check_learning(stack: Any, job: str) -> None:
    """Check that the sampled reward rose, and that the best checkpoint of the job is better than its first one."""
    record = stack.client.get(job)
    assert record.spec["optimizer"]["learning_rate"] in (3e-4, 1e-3, 3e-3)
    uploads = [file for file in stack.client.files.list() if file.filename == "base.zip"]
    assert [str(stack.data_dir / "files" / file.id / "model") for file in uploads] == [record.spec["model"]["path"]], (
        "the folder was uploaded once"
    )
    series = stack.client.metrics(job)["series"]
    rewards, greedy = (
        [value for value in series[name] if value is not None] for name in ("reward/mean", "eval/greedy")
    )
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > sum(rewards[:4])
    (row,) = [row for row in stack.client.checkpoints(job) if row["best"]]
    assert row["number"] > 0
    assert max(greedy) > greedy[0]
    stack.check_audit(job)


def check_export(folder: Path) -> None:
    """Check that the exported folder has all weights, changed where adapters were, the tokenizer and a model card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("base", "better"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert set(after) == set(before)
    assert {name for name in changed if "_proj" not in name} == set()
    assert len(changed) == 14
    old, new = (AutoTokenizer.from_pretrained(folder / name) for name in ("base", "better"))
    assert old.chat_template == new.chat_template
    assert "learning rate" in (folder / "better" / "README.md").read_text()
