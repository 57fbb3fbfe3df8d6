"""The command line against a real server: its output, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import penstock
from penstock.cli import app
from penstock.client import Client
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, SealedGroup
from penstock.shared.protocol.ids import Draw

Run = Callable[..., Result]


@pytest.fixture
def run(served: Any, monkeypatch: Any) -> Run:
    """Return a function that runs a command against the server."""
    monkeypatch.setenv("PENSTOCK_URL", served.url)
    runner = CliRunner()

    def invoke(*words: str, text: str | None = None) -> Result:
        return runner.invoke(app, list(words), input=text)

    return invoke


@pytest.fixture
def file(tmp_path: Path, job: Any) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return str(path)


def submit(run: Run, file: str, *more: str) -> str:
    result = run("submit", file, *more)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_submit_prints_the_id_and_nothing_else_on_stdout(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file, "--set", "train.max_updates=7", "--set", "seed=5")
    assert list(deployment.jobs) == [id]
    assert deployment.jobs[id].status.total_steps == 7
    assert deployment.jobs[id].spec["seed"] == 5


def test_submit_warns_of_likely_mistakes(run: Run, deployment: Any, file: str) -> None:
    result = run("submit", file, "--set", "optimizer.learning_rate=7")
    assert result.stdout.strip() in deployment.jobs
    assert "warning: optimizer.learning_rate: 7 is outside of what is sane" in result.stderr


def test_submit_prints_the_url_for_agents_of_an_online_job(run: Run, file: str, tmp_path: Path) -> None:
    assert "/feedback" not in run("submit", file).stderr
    online = tmp_path / "online.yaml"
    online.write_text("{kind: online_rl, name: agent, model: {config: {hidden_size: 64}, tokenizer: char}}")
    result = run("submit", str(online))
    assert result.exit_code == 0, result.stderr
    assert "agents ask it as model 'agent' at http://" in result.stderr
    assert "/feedback once it runs: penstock wait agent --for running" in result.stderr


def test_submit_once_per_key(run: Run, deployment: Any, file: str) -> None:
    assert submit(run, file, "--idempotency-key", "k") == submit(run, file, "--idempotency-key", "k")
    assert deployment.submitted == 1


def test_submit_reads_standard_input(run: Run, deployment: Any, job: Any) -> None:
    result = run("submit", "-", "--set", "seed=5", text=yaml.safe_dump({**job, "name": "piped"}))
    assert result.exit_code == 0, result.output
    spec = deployment.jobs[result.stdout.strip()].spec
    assert (spec["name"], spec["seed"]) == ("piped", 5)
    refused = run("submit", "-", text="a: [")
    assert (refused.exit_code, "standard input is not valid YAML at line" in refused.stderr) == (2, True)


def test_dry_run(run: Run, deployment: Any, file: str) -> None:
    assert json.loads(run("submit", file, "--dry-run", "--json").stdout)["batch"]["groups"] == 2
    assert "warning" not in run("submit", file, "--dry-run").stdout
    fast = run("submit", file, "--dry-run", "--set", "optimizer.learning_rate=7")
    assert "\nwarning    optimizer.learning_rate: 7 is outside of what is sane" in fast.stdout, fast.output
    assert not deployment.jobs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "train.max_update=3"], "train.max_update: unknown key; did you mean 'max_updates'?"),
        (["--set", "train.batch_size=7"], "not divisible"),
        (["--set", "nonsense"], "must look like key.subkey=value"),
        (["--set", "limits.byte_budget=9999999999999999"], "exceed the EXPERIENCE stream"),
    ],
)
def test_bad_job_files_are_usage_errors(run: Run, file: str, words: list[str], message: str) -> None:
    result = run("submit", file, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_usage_errors(run: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    for words in (["submit", "nowhere.yaml"], ["submit", str(broken)], ["nonsense"], ["ls", "--phase", "x"], ["get"]):
        assert run(*words).exit_code == 2, words
    assert "is not valid YAML at line" in run("submit", str(broken)).stderr


def test_unknown_jobs(run: Run) -> None:
    result = run("get", "nobody")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no job has")


@pytest.mark.long
def test_unreachable(run: Run, file: str, served: Any) -> None:
    served.stop()
    for words in (["ls"], ["submit", file], ["events", "-f", "x"], ["top"]):
        result = run(*words)
        assert result.exit_code == 4, words
        assert "penstock up" in result.stderr
        assert result.stderr.count("\n") == 1


def test_ls_and_get(run: Run, deployment: Any, file: str) -> None:
    ids = [submit(run, file, "--set", f"name=n{i}") for i in range(3)]
    deployment.advance(
        ids[0],
        "running",
        step=2,
        reward=0.25,
        draws={"drawn": 9, "trained": 5, "in_flight": 3, "dropped": {"failed": 1}},
    )
    table = run("ls").stdout.splitlines()
    assert table[0].split() == ["ID", "NAME", "PHASE", "STEP", "REWARD", "AGE"]
    assert [line.split()[0] for line in table[1:]] == ids[::-1]
    assert "2/3" in table[3]
    assert "0.25" in table[3]
    assert len(json.loads(run("ls", "--json", "-n", "2").stdout)) == 2
    assert [row["id"] for row in json.loads(run("ls", "--json", "--phase", "running").stdout)] == [ids[0]]
    text = run("get", "n0").stdout
    assert "dropped: failed" in text
    assert json.loads(run("get", "n0", "--json").stdout)["id"] == ids[0]


def test_steering(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    for verb, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        assert f"wanted: {state}" in run(verb, id).stdout
    assert json.loads(run("cancel", id, "--force", "--json").stdout)["desired_state"] == "cancelled"
    deployment.advance(id, "cancelled")
    result = run("pause", id)
    assert (result.exit_code, result.stderr) == (1, f"error: job '{id}' is cancelled; it cannot become paused\n")


def test_rm(run: Run, deployment: Any, file: str) -> None:
    ids = [submit(run, file) for _ in range(2)]
    refused = run("rm", ids[0], "--yes")
    assert (refused.exit_code, refused.stderr) == (
        1,
        f"error: job '{ids[0]}' is pending: only what has ended is deleted; cancel it first\n",
    )
    for id in ids:
        deployment.advance(id, "succeeded")
        (deployment.data_dir / "checkpoints" / id).mkdir(parents=True)
    unasked = run("rm", ids[0])
    assert unasked.exit_code == 2
    assert unasked.stderr.endswith("all that is known of it? Nobody can be asked here: repeat it with --yes\n")
    assert run("rm", ids[0], "--yes").stderr == f"{ids[0]} (addition) is deleted\n"
    assert json.loads(run("rm", ids[1], "-y", "--checkpoints", "--json").stdout) == {"id": ids[1], "deleted": True}
    assert not deployment.jobs
    assert [path.name for path in (deployment.data_dir / "checkpoints").iterdir()] == [ids[0]]
    assert "no job" in run("rm", ids[0]).stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_is_deleted_only_after_a_yes(served: Any, run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.advance(id, "succeeded")
    checkpoints = deployment.data_dir / "checkpoints" / id
    checkpoints.mkdir(parents=True)
    asked = f"delete {id} (addition, update 0): all that is known of it? [y/N]: "
    code, shown = in_terminal(served.url, "rm", id, question="[y/N]: ", answer="")
    assert (code, shown.startswith(asked), "Aborted" in shown) == (1, True, True), shown
    assert list(deployment.jobs) == [id]
    code, shown = in_terminal(served.url, "rm", id, "--checkpoints", question="[y/N]: ", answer="y")
    assert (code, "known of it, and its checkpoints? " in shown) == (0, True), shown
    assert shown.endswith(f"{id} (addition) is deleted\r\n")
    assert not deployment.jobs
    assert not checkpoints.exists()


def in_terminal(url: str, *words: str, question: str, answer: str) -> tuple[int, str]:
    """Run a command under a pseudo-terminal; answer its question; return its exit code and what the terminal shows."""
    import pty

    ours, theirs = pty.openpty()
    env = {**os.environ, "PENSTOCK_URL": url, "TERM": "dumb"}
    command = [sys.executable, "-m", "penstock.cli", *words]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        text, told = b"", False
        try:
            while chunk := os.read(ours, 1 << 16):
                text += chunk
                if not told and question.encode() in text:
                    told = True
                    os.write(ours, f"{answer}\n".encode())
        except OSError:  # the other side is closed
            pass
        finally:
            os.close(ours)
        return process.wait(20), text.decode()


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize(("phase", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 3)])
def test_the_result_of_a_job_is_the_exit_code(run: Run, deployment: Any, file: str, phase: str, code: int) -> None:
    id = submit(run, file)
    threading.Timer(0.3, deployment.advance, (id, phase)).start()
    assert run("wait", id).exit_code == code
    assert run("events", "-f", id).exit_code == code
    assert json.loads(run("wait", id, "--json").stdout)["status"]["phase"] == phase


def test_wait_prints_what_it_waits_for(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    result = run("wait", id, "--for", "running", "--timeout", "0.2")
    assert f"{id} is pending, update 0" in result.stderr
    assert "; waiting until it is running" in result.stderr
    deployment.advance(id, "running")
    assert "waiting" not in run("wait", id, "--for", "running").stderr
    assert "; waiting until it ends" in run("wait", id, "--timeout", "0.2").stderr


def test_wait_gives_up(run: Run, file: str) -> None:
    id = submit(run, file)
    result = run("wait", id, "--timeout", "0.2")
    assert result.exit_code == 1
    assert "pending" in result.stderr


def test_follow_shows_events_and_progress(run: Run, deployment: Any, file: str) -> None:
    def play() -> None:
        while not deployment.jobs:
            time.sleep(0.01)
        id = next(iter(deployment.jobs))
        deployment.advance(id, "running", step=1, draws={"in_flight": 4})
        time.sleep(0.7)
        deployment.emit(id, "checkpoint", "checkpoint after update 2")
        deployment.advance(id, "failed", message="the data ran out")

    threading.Thread(target=play).start()
    result = run("submit", file, "--follow")
    assert result.exit_code == 1
    assert "checkpoint after update 2" in result.stdout
    assert "update 1/3" in result.stdout
    assert "in flight 4" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("failed the data ran out")


def test_follow_as_json_is_one_object_per_line(run: Run, deployment: Any, file: str) -> None:
    def play() -> None:
        while not deployment.jobs:
            time.sleep(0.01)
        id = next(iter(deployment.jobs))
        deployment.emit(id, "phase", "pending")
        deployment.advance(id, "succeeded")

    threading.Thread(target=play).start()
    result = run("submit", file, "--follow", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["id"] for row in rows[:2]] == [1, 2]
    assert rows[-1]["status"]["phase"] == "succeeded"


INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in the background has it ignored
runpy.run_module("penstock.cli", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize("words", [["submit", "FILE", "--follow"], ["top"], ["events", "-f", "addition"]])
def test_interrupts_detach(run: Run, deployment: Any, file: str, served: Any, words: list[str]) -> None:
    if words[0] != "submit":
        deployment.emit(submit(run, file), "phase", "pending")
    command = [sys.executable, "-c", INTERRUPTIBLE, *(file if w == "FILE" else w for w in words)]
    env = {**os.environ, "PENSTOCK_URL": served.url}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline()  # something is shown
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert words[0] == "top" or "goes on" in err
    assert next(iter(deployment.jobs.values())).desired_state == "running"


def test_top_plays_to_the_end(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.measure(id)
    deployment.beat(id)
    deployment.explain(id)
    deployment.advance(id, "running", queues={"tickets": 5, "groups": 3, "batches": 1})
    snapshot = json.loads(run("top", "--json").stdout)
    assert snapshot["metrics"]["loss"] == 1.0
    assert snapshot["why"][0]["holder"] == "rollout-0"
    threading.Timer(0.2, deployment.advance, (id, "succeeded")).start()
    shown = run("top").stdout
    assert "succeeded" in shown
    assert "version 0" in shown
    assert "queues: 5 tickets, 3 groups, 1 batches" in shown
    assert snapshot["job"]["status"]["queues"] == {"tickets": 5, "groups": 3, "batches": 1}


def test_events(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.emit(id, "phase", "pending")
    deployment.emit(id, "dropped", "2 draws dropped: failed", level="warning")
    assert "2 draws dropped" in run("events", id).stdout
    assert json.loads(run("events", id, "--json", "--after", "1").stdout)["type"] == "dropped"


def test_metrics(run: Run, deployment: Any, file: str) -> None:
    deployment.measure(submit(run, file))
    summary = run("metrics", "addition").stdout.splitlines()
    assert summary[0].split() == ["METRIC", "LAST", "HISTORY"]
    assert [line.split()[:2] for line in summary[1:]] == [["loss", "1"], ["reward", "0.9"]]
    assert run("metrics", "addition", "loss", "-n", "1").stdout.split() == ["STEP", "loss", "4", "1"]
    assert run("metrics", "addition", "--csv").stdout.splitlines()[3] == "2,3.0,"
    assert json.loads(run("metrics", "addition", "reward", "--json").stdout)["series"]["reward"][2] is None
    drawn = run("metrics", "addition", "loss", "--plot").stdout.splitlines()
    assert [line.split()[0] for line in (drawn[1], drawn[-2])] == ["5", "1"]
    assert (drawn[0], drawn[-1].split()) == ("loss: 1", ["└0", "4"])
    assert "no metric 'reward/mean' yet" in run("metrics", "addition", "--plot").stderr, "what is drawn by default"


def test_logs_samples_workers_and_why(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.beat(id)
    deployment.explain(id)
    deployment.train(id)
    deployment.write_log(id)
    assert run("logs", id, "-n", "2").stdout == f"trainer: line 1 of {id}\ntrainer: line 2 of {id}\n"
    assert json.loads(run("logs", id, "--json", "-n", "1").stdout)["text"] == f"line 2 of {id}"
    assert "2 groups of 2 per batch" in run("why", id).stdout
    deployment.advance(id, "succeeded")
    assert run("logs", id, "-f", "-n", "1").exit_code == 0
    assert "2+1=" in run("samples", id, "--limit", "3").stdout
    assert len(json.loads(run("samples", id, "--limit", "3", "--env", "addition", "--json").stdout)) == 3
    assert "no source of this job is called 'hard'" in run("samples", id, "--env", "hard").stderr
    assert "rollout-0" in run("workers", id).stdout


def test_describe(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.beat(id)
    deployment.explain(id)
    for number in range(12):
        deployment.emit(id, "dropped", f"{number} draws dropped: failed", level="warning")
    shown = run("describe", "addition")
    assert shown.exit_code == 0, shown.output
    for part in ("Job file:\n", "hidden_size: 64\n", "State:\n", "rollout-0", "2 groups of 2 per batch", "Events:\n"):
        assert part in shown.stdout, part
    assert ("11 draws" in shown.stdout, " 1 draws" in shown.stdout) == (True, False), "the newest ones"
    described = json.loads(run("describe", id, "-n", "3", "--json").stdout)
    assert (described["job"]["id"], len(described["events"]), described["feedback"]) == (id, 3, None)
    deployment.advance(id, "succeeded")
    ended = run("describe", id).stdout
    assert ("succeeded" in ended, "Workers:" in ended) == (True, False)


def test_audit_sets_the_exit_code(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.train(id)
    result = run("audit", id)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "drawn 6 = trained 4 + dropped 1 (failed 1) + in flight 1"
    deployment.run(deployment.bus.publish(subjects.ledger(id), b"overwritten"))
    result = run("audit", id)
    assert result.exit_code == 1
    assert "violation: ledger equation: entry 5" in result.stderr
    assert run("audit", id, "--json").exit_code == 1


def test_replay_sets_the_exit_code(run: Run, deployment: Any, file: str) -> None:
    id = submit(run, file)
    deployment.repeat()
    assert run("replay", id).exit_code == 1
    deployment.advance(id, "succeeded")
    result = run("replay", id, "--from", "1")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "batch 1: identical  identical", "batch 2: identical  identical", "3 of 3 batches are bit-identical"
    ]  # fmt: skip
    asked = {"ordinal": 2, "interactions": {"itx": 1}, "feedback": {"fb": 1}, "reward": 1.0, "lag": 0}
    admission = Admission(**asked, key_id="k", user="", reason="feedback", time=0.0)
    group = SealedGroup(Draw(2), "a", 1, "d", 1, 1, [1.0], 1, "w")
    place = {"number": 2, "revision": 1, "start_version": 1, "update_index": 1}
    deployment.record(
        id,
        Admitted(writer_epoch=1, time=0.0, admissions=[admission], low_interactions=0, low_feedback=0),
        BatchSealed(writer_epoch=1, time=0.0, **place, groups=[group]),
    )
    lines = run("replay", id, "--from", "2", "--feedback").stdout.splitlines()
    assert lines[1] == "  draw 2.0: reward 1 (feedback), lag 0: itx by fb"


def test_debug_shows_the_traceback(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert run("get", "nobody").exception.__class__.__name__ == "NotFound"  # type: ignore[union-attr]


@pytest.mark.long
def test_a_terminal_gets_a_panel(served: Any, deployment: Any, job: Any) -> None:
    """Under a pseudo-terminal, `top` draws a box and ends with the job."""
    import pty

    with Client(served.url) as client:
        id = client.submit(job).id
    deployment.beat(id)
    deployment.explain(id)
    hours = datetime.now(UTC) + timedelta(hours=3)
    queues = {"tickets": 5, "groups": 3, "batches": 1}
    deployment.advance(id, "running", step=1, reward=0.5, expected_end=hours, queues=queues)
    ours, theirs = pty.openpty()
    env = {**os.environ, "PENSTOCK_URL": served.url, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "top", id], stdout=theirs, stderr=theirs, stdin=theirs, env=env
    )
    os.close(theirs)
    text, ended = b"", False
    try:
        while chunk := os.read(ours, 1 << 16):
            text += chunk
            if b"rollout-0" in text and not ended:
                ended = True
                deployment.advance(id, "succeeded")
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert process.wait(20) == 0
    shown = text.decode()
    for part in (
        "╭",
        "addition",
        "succeeded",
        "version 0",
        "3h left",
        "5 tickets   3 groups",
        "rollout-0",
        "2 groups of 2 per batch",
    ):
        assert part in shown, part
