"""A job that learns nothing ends with a visible warning; a warning about a failing scorer names exception and line."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

MANUAL = Path(__file__).resolve().parents[2] / "docs/job-file.md"
SMALLER = "limits.byte_budget=33554432"
"""Change that makes the byte budget of a job fit the small streams of the tests."""
NEVER = {"scorers": [{"type": "format", "pattern": "never"}], "processes": 1}
TOO_FAST = 0.3
"""Learning rate three thousand times that of the small job."""
FINGERPRINT, RANDOM = (
    {"scorers": [{"type": "function", "path": f"e2e_scorers:{name}"}], "processes": 1}
    for name in ("fingerprint", "draws_lots")
)
ENDLESS = ["train.max_updates=100000", "checkpoint.every=100000"]
"""Changes that make a job so long that only the test ends it."""
AT_TIMES = {"scorers": [{"type": "function", "path": "e2e_scorers:raises_at_times"}], "processes": 1}


@pytest.mark.long
def test_a_job_without_signal_ends_with_a_warning(stack: Any, make_job: Any, tmp_path: Path) -> None:
    file = tmp_path / "dead.yaml"
    file.write_text(yaml.safe_dump(make_job(name="dead", reward=NEVER)))
    result = stack.cli("submit", str(file), "--follow")
    assert result.exit_code == 0, result.output
    assert "warning: no_signal: 100% of the groups" in result.output
    record = stack.client.find("dead")
    assert record.status.phase == "succeeded"
    assert "no_signal" in [warning.kind for warning in record.status.warnings]
    events = [row for row in stack.client.events(record.id, follow=False) if row["type"] == "health"]
    assert [(row["level"], row["data"]["kind"]) for row in events].count(("warning", "no_signal")) == 1
    assert "succeeded (no_signal" in stack.cli("ls", "--name", "dead").output
    for command in ("why", "describe", "get", "wait"):
        output = " ".join(stack.cli(command, "dead").output.split())
        assert "warning: no_signal" in output, (command, output)
        assert "every completion so far earned 0" in output, (command, output)


def test_failures_of_a_scorer_are_reported_with_exception_and_line(stack: Any) -> None:
    job = stack.submit(name="at-times", reward=AT_TIMES)
    record = stack.finish(job)
    assert record.status.phase == "succeeded", record.status.message
    messages = [row["message"] for row in stack.client.events(job, follow=False) if row["type"] == "health"]
    (failures,) = [text for text in messages if "could not be scored" in text]
    assert "raised ValueError: no answer in" in failures
    lines = Path(__file__).with_name("user_code").joinpath("e2e_scorers.py").read_text().splitlines()
    (raises,) = [number for number, line in enumerate(lines, 1) if "no answer in" in line]
    assert f"e2e_scorers.py, line {raises})" in failures
    assert "scorer_failures" in [warning.kind for warning in record.status.warnings]


def warned(stack: Any, job: str, kind: str) -> list[str]:
    """Return the messages of the events that began a warning of one kind."""
    rows = [row for row in stack.client.events(job, follow=False) if row["type"] == "health"]
    return [row["message"] for row in rows if (row["level"], row["data"]["kind"]) == ("warning", kind)]


@pytest.mark.long
def test_completions_that_are_nearly_all_cut_off_raise_a_warning(stack: Any) -> None:
    job = stack.submit("name=cut-off", "sampling.max_new_tokens=1")
    record = stack.finish(job)
    assert record.status.phase == "succeeded", record.status.message
    shares = stack.client.metrics(job, names="length/truncated")["series"]["length/truncated"]
    assert fmean(shares) > 0.7, "one token of 15 ends a completion"
    assert "truncation" in [warning.kind for warning in record.status.warnings]
    (message,) = warned(stack, job, "truncation")
    assert "of the completions of the last" in message
    output = " ".join(stack.cli("why", job).output.split())
    assert "warning: truncation" in output
    assert "raise sampling.max_new_tokens" in output


@pytest.mark.long
def test_a_learning_rate_far_too_high_raises_a_warning(stack: Any) -> None:
    """The second pass over a batch sees how far the first one moved the policy, so ``kl_spike`` follows at once."""
    job = stack.submit("name=too-fast", "train.max_updates=100000", "train.epochs=2", "train.max_lag=0")
    stack.reach(job, 8)
    assert warned(stack, job, "kl_spike") == []
    stack.client.amend(job, {"optimizer": {"learning_rate": TOO_FAST}})
    reported = stack.until(lambda: warned(stack, job, "kl_spike"), "the warning", 60, lambda: stack.client.why(job))
    message = reported[0]  # on a busy machine the warning may have ended and begun again by now
    stack.client.cancel(job, checkpoint=False)
    assert stack.finish(job).status.phase == "cancelled"
    series = stack.client.metrics(job, names="optimizer/lr,policy/approx_kl")["series"]
    pairs = list(zip(series["optimizer/lr"], series["policy/approx_kl"], strict=True))
    assert max(kl or 0.0 for rate, kl in pairs if rate != TOO_FAST) < 0.1
    (number,) = re.findall(r"at update (\d+)\. Lower the learning rate", message)
    rate, kl = pairs[int(number) - 1]
    assert rate == TOO_FAST
    assert f"the policy moved by {kl:.3g} nats per token" in message


@pytest.mark.long
def test_a_policy_that_always_says_the_same_raises_a_warning(stack: Any) -> None:
    """A learning rate far too high makes the policy deterministic, before it has found what earns most."""
    job = stack.submit("name=collapsed", *ENDLESS, "train.max_lag=0", reward=FINGERPRINT)
    stack.reach(job, 8)
    assert warned(stack, job, "entropy_collapse") == []
    stack.client.amend(job, {"optimizer": {"learning_rate": TOO_FAST}})
    reported = stack.until(
        lambda: warned(stack, job, "entropy_collapse"), "the warning", 60, lambda: stack.client.why(job)
    )
    stack.client.cancel(job, checkpoint=False)
    assert stack.finish(job).status.phase == "cancelled"
    series = stack.client.metrics(job, max_points=10_000)["series"]
    first = fmean(series["policy/entropy"][:5])
    assert first > 1, "the initial weights choose among 14 tokens"
    ((start, now),) = re.findall(r"the entropy fell from (\S+) to (\S+) nats per token", reported[0])
    assert start == f"{first:.3g}"
    means = [fmean(series["policy/entropy"][i - 10 : i]) for i in range(20, len(series["policy/entropy"]) + 1)]
    assert float(now) < 0.05
    assert now in [f"{mean:.2g}" for mean in means], "the mean over ten updates"
    assert max(series["reward/mean"][-10:]) < 0.9, "the highest reward is nearly 1"


@pytest.mark.long
def test_a_reward_that_never_rises_raises_a_warning(stack: Any) -> None:
    job = stack.submit("name=stuck", *ENDLESS, reward=RANDOM)
    reported = stack.until(lambda: warned(stack, job, "reward_stuck"), "the warning", 90, lambda: stack.client.why(job))
    stack.client.cancel(job, checkpoint=False)
    record = stack.finish(job)
    assert record.status.phase == "cancelled"
    found = re.findall(r"(\S+) in the first (\d+) updates, (\S+) in the last \d+ of (\d+)", reported[0])
    ((first, num, last, updates),) = found
    assert (int(updates) >= 60, int(num)) == (True, min(50, int(updates) // 3))
    rewards = stack.client.metrics(job, names="reward/mean", max_points=10_000)["series"]["reward/mean"]
    spans = (rewards[: int(num)], rewards[int(updates) - int(num) : int(updates)])
    assert [first, last] == [f"{fmean(span):.3g}" for span in spans]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_first_job_file_of_the_manual_learns(stack: Any, tmp_path: Path) -> None:
    text, *_ = re.findall(r"```yaml\n(.*?)```", MANUAL.read_text(), flags=re.DOTALL)
    file = tmp_path / "job.yaml"
    file.write_text(text)
    result = stack.cli("submit", str(file), "--set", SMALLER, "--json")
    assert result.exit_code == 0, result.output
    record = stack.finish(stack.client.find("addition").id, 540)
    assert (record.status.phase, record.status.step) == ("succeeded", 200)
    series = stack.client.metrics(record.id, names="reward/mean")["series"]["reward/mean"]
    rewards = [value for value in series if value is not None]  # the evaluation before the first update has none
    first, last = fmean(rewards[:5]), fmean(rewards[-10:])  # four runs: 0.13 to 0.14, 0.38 to 0.43
    assert (first <= 0.2, last >= 0.3) == (True, True), (first, last)
    assert {warning.kind for warning in record.status.warnings}.isdisjoint({"no_signal", "reward_stuck"})
