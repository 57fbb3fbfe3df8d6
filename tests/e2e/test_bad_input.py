"""Mistakes of users give a clear message at once, a non-zero exit status, and no half-done work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import Result

from penstock.shared.protocol.events import BatchSealed, BatchTrained, Checkpointed, LineageForked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

USAGE, UNREACHABLE = 2, 4
KEY = {"Authorization": "Bearer e2e-key"}


@contextmanager
def coordinator(nats_url: str) -> Iterator[subprocess.Popen[str]]:
    """Start a coordinator process alone; kill it at the end of the block."""
    env = {**os.environ, "PENSTOCK_NATS_URL": nats_url, "PENSTOCK_HTTP_PORT": "0"}
    command = [sys.executable, "-m", "penstock.services.coordinator"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def up(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "up", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def submit(stack: Any, make_job: Callable[..., Any], tmp_path: Path) -> Callable[..., Result]:
    """Function that runs ``penstock submit`` on the small job with changes, or on ``text``."""

    def run(*changes: str, text: str | None = None, **environment: str) -> Result:
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(make_job()) if text is None else text)
        words = [word for change in changes for word in ("--set", change)]
        result: Result = stack.cli("submit", str(file), *words, **environment)
        assert isinstance(result.exception, SystemExit)
        return result

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.bach_size=8", "train.bach_size: unknown key; did you mean 'batch_size'?"),
        ("train.batch_size=10", "train.batch_size 10 is not divisible by algorithm.group_size 4"),
        ("train.minibatches=3", "the 4 groups of a batch are not divisible by train.minibatches 3"),
        ("algorithm.group_size=1", "greater than or equal to 2"),
        ("model={path: /nowhere/model}", "model.path: '/nowhere/model' does not exist"),
    ],
)
def test_an_invalid_job_file_is_refused(stack: Any, submit: Any, make_job: Any, change: str, message: str) -> None:
    result = submit(change)
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert message in result.stderr
    answer = httpx.post(f"{stack.stack.url}/v1/jobs", json=make_job(change), headers=KEY)
    assert answer.status_code == 422
    assert message.rpartition(": ")[2] in answer.text


def test_a_job_file_that_is_not_yaml_is_refused(submit: Any, stack: Any) -> None:
    text = "name: x\ntrain:\n  batch_size: [8\nmodel: {}\n"
    result = submit(text=text)
    assert result.exit_code == USAGE
    assert "is not valid YAML at line 4, column 6" in result.stderr
    answer = httpx.post(f"{stack.stack.url}/v1/jobs", content=text, headers=KEY | {"Content-Type": "application/yaml"})
    assert answer.status_code == 400
    assert "line 4, column 6" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "holds no rows"),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "ans\n', "line 2: not valid JSON"),
        ('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2="}\n', "line 3"),
    ],
)
def test_invalid_data_is_refused(submit: Any, tmp_path: Path, rows: str, message: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(rows)
    result = submit(f"data.train={{type: file, path: {data}}}")
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert f"{data}" in result.stderr
    assert message in result.stderr


def test_a_wrong_key_is_refused(submit: Any, stack: Any) -> None:
    result = submit(PENSTOCK_API_KEY="wrong")
    assert result.exit_code == USAGE
    assert "PENSTOCK_API_KEY" in result.stderr
    assert httpx.get(f"{stack.stack.url}/v1/jobs").status_code == 401


@pytest.mark.long
def test_a_directory_or_port_in_use_is_refused(stack: Any, tmp_path: Path) -> None:
    again = up("--port", "0", "--data-dir", str(stack.directory / "data"))
    assert again.returncode == USAGE
    assert stack.stack.url in again.stderr
    assert "penstock down" in again.stderr
    port = stack.stack.url.rpartition(":")[2]
    taken = up("--port", port, "--data-dir", str(tmp_path / "other"))
    assert taken.returncode == USAGE
    assert f"port {port} of 127.0.0.1 is not free" in taken.stderr
    assert not (tmp_path / "other").exists(), "nothing was started"


@pytest.mark.long
def test_an_unreachable_api_or_bus_is_named(submit: Any) -> None:
    with socket.socket() as probe:  # bound and not listening: refuses every connection
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        result = submit(PENSTOCK_URL=f"http://127.0.0.1:{port}")
        assert result.exit_code == UNREACHABLE
        assert "penstock up" in result.stderr
        with coordinator(f"nats://user:secret@127.0.0.1:{port}") as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "waiting for the bus" in line)
            assert f"127.0.0.1:{port}" in line
            assert "secret" not in line
            process.terminate()
            assert process.wait(10) == 0


@pytest.mark.long
def test_an_invalid_address_of_the_bus_is_refused() -> None:
    with coordinator("nats://127.0.0.1:x") as process:
        assert process.wait(20) == USAGE
        assert process.stderr is not None
        assert "'nats://127.0.0.1:x' is not a NATS address" in process.stderr.read()


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("raises", "raised ValueError: the judge is out to lunch"),
        pytest.param("hangs", "longer than reward.timeout_s (0.3 s)", marks=pytest.mark.long),
        ("not_a_number", "returned nan; it must return a finite number"),
        ("missing", "'e2e_scorers:missing' cannot be imported"),
    ],
)
def test_a_scorer_that_never_works_ends_the_job(stack: Any, scorer: str, message: str) -> None:
    reward = {"scorers": [{"type": "function", "path": f"e2e_scorers:{scorer}"}], "timeout_s": 0.3}
    job = stack.submit("train.batch_size=2", "algorithm.group_size=2", reward=reward)
    status = stack.finish(job).status
    assert (status.phase, status.step, status.policy_version) == ("failed", 0, 0)
    assert message in status.message
    assert message in stack.client.wait(job).status.message
    assert status.draws["trained"] == 0
    assert set(status.draws["dropped"]) == {"failed"}
    assert status.draws["drawn"] < 20, "given up after a bounded number of groups"
    stack.check_audit(job)


@pytest.mark.long
def test_a_scorer_that_fails_at_times_costs_only_its_completions(stack: Any, user_code: Any) -> None:
    total = 15
    reward = {"scorers": [{"type": "function", "path": "e2e_scorers:sometimes"}]}
    job = stack.submit(f"train.max_updates={total}", reward=reward)
    assert stack.finish(job).status.step == total
    stack.check_audit(job)

    events, groups = stack.ledger(job), stack.groups(job)
    sealed = {event.number: event for event in events if isinstance(event, BatchSealed)}
    trained = [groups[g.seq] for e in events if isinstance(e, BatchTrained) for g in sealed[e.number].groups]
    num_failed = num_tokens = 0
    for group in trained:
        texts = zip(group.meta["completions"], group.failed, group.rewards, group.lengths, strict=True)
        for text, failed, reward_of_it, length in texts:
            number = user_code.fingerprint(group.meta["prompt"], text, None, {})
            assert failed == (number < 0.25 or length == 0)
            assert reward_of_it == (0 if failed else pytest.approx(number, abs=1e-6))
        num_failed += int(group.failed.sum())
        num_tokens += int(group.lengths[~group.failed].sum())
    assert num_failed > total / 2
    series = stack.client.metrics(job, names="sequences/failed,sequences/count,tokens/scored")["series"]
    assert sum(series["sequences/failed"]) == num_failed
    assert sum(series["sequences/count"]) == len(trained) * 4 - num_failed
    assert sum(series["tokens/scored"]) == num_tokens


@pytest.mark.long
def test_a_loss_that_is_not_finite_pauses_the_job_and_keeps_the_batch(stack: Any) -> None:
    """Rewards beyond float32: the advantages of the first batch are not finite."""
    job = stack.submit(algorithm={"type": "dr_grpo", "group_size": 4, "shaping": {"scale": 1e39}})
    for _ in range(2):
        stack.until(lambda: stack.status(job).phase == "paused", "the pause", 60, lambda: stack.client.why(job))
        assert "batch 1 is not trained: the gradient of the policy has norm nan" in stack.status(job).message
        assert any("request to resume (batch 1" in row["waiting_for"] for row in stack.client.why(job))
        stack.client.resume(job)  # nothing is different: it is tried again and fails again
        stack.until(lambda: stack.client.get(job).desired_state == "paused", "the next pause")
    events = stack.ledger(job)
    assert {(event.number, event.revision) for event in events if isinstance(event, BatchSealed)} <= {(1, 1), (2, 1)}
    assert not any(isinstance(event, BatchTrained) for event in events)
    stack.client.cancel(job, force=True)
    assert stack.finish(job).status.phase == "cancelled"
    stack.check_audit(job)


@pytest.mark.long
def test_a_damaged_checkpoint_is_replaced_by_an_older_one(stack: Any) -> None:
    """A bit of the newest checkpoint of a paused job flips. The trainer loads an older one and replays the log."""
    job = stack.submit("train.max_updates=1000", "checkpoint.every=1000")
    stack.reach(job, 2)
    stack.client.pause(job)
    stack.client.wait(job, goal="paused", timeout_s=60)
    newest = [stack.data_dir / event.path for event in stack.ledger(job) if isinstance(event, Checkpointed)][-1]
    weights = newest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    stack.kill("trainer-0")
    stack.client.resume(job)
    message = f"{weights} was changed after the checkpoint was written"
    stack.until(
        lambda: any(message in str(event) for event in stack.client.events(job, follow=False)), "the damage event"
    )
    stack.reach(job, 4)
    assert not any(isinstance(event, LineageForked) for event in stack.ledger(job)), "the same bits again"
    stack.client.cancel(job)
    assert stack.finish(job).status.phase == "cancelled"
    stack.check_audit(job)
