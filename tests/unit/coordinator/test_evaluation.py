"""Metrics of held-out completions, and the requests that an engine gets for a ticket."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from penstock.services.coordinator.leader.evaluation import EvaluationPlan, Scores, pass_at_k
from penstock.services.coordinator.training.gate import Verdict, judge
from penstock.services.coordinator.training.ledger import OpenDraw
from penstock.services.rollout.episode import requests_for
from penstock.shared.config.evaluation import EvaluationConfig, MeasureConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.sampling import SamplingConfig
from penstock.shared.data.check import SourceSummary
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import EvalResult, Ticket
from penstock.shared.protocol.trajectory import GroupHeader

JOB: dict[str, Any] = {
    "name": "held-out",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}, "eval": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 5},
}
EVALUATION = {key: JOB[key] for key in ("name", "model", "reward")} | {
    "kind": "evaluation",
    "data": {"eval": {"type": "addition"}},
}


def result(prompt: int, rewards: list[float], failed: list[bool], version: int = 3) -> EvalResult:
    greedy = [False] * (len(rewards) - 1) + [True]
    return EvalResult(version=version, ordinal=prompt, rewards=rewards, failed=failed, greedy=greedy)


@pytest.mark.parametrize(("n", "correct", "k"), [(6, 2, 3), (5, 0, 2), (4, 4, 1), (5, 4, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n: int, correct: int, k: int) -> None:
    subsets = list(combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_greedy_and_sampled_rewards_are_separate_and_failures_have_none() -> None:
    scores = Scores()
    scores.take(0, [1.0, 0.0, 1.0], [False, False, False], [False, False, True])
    scores.take(1, [0.0, 0.9, 0.0], [False, False, True], [False, False, True])
    scores.take(2, [0.0, 0.0, 0.0], [True, False, False], [False, False, True])
    config = MeasureConfig(samples=2, pass_k=[1, 2])
    values = scores.values(config, [SourceSummary("addition", 3, "sums")])
    assert values["eval/greedy"] == 0.5  # prompts 0 and 2
    assert values["eval/avg@2"] == pytest.approx((1.0 + 0.0 + 0.0 + 0.9 + 0.0) / 5)
    assert values["eval/pass@1"] == pytest.approx((0.5 + 0.0 + 0.0) / 3)
    assert values["eval/pass@2"] == pytest.approx((1.0 + 0.0) / 2)
    assert values["eval/failed"] == 2
    assert list(values) == ["eval/failed", *config.metrics_of(["addition"])]
    both = scores.values(config, [SourceSummary("easy", 1, "sums"), SourceSummary("hard", 9, "sums")])
    assert set(both) == {"eval/failed", *config.metrics_of(["easy", "hard"])}
    assert {name: both[name] for name in values} == values
    assert (both["eval/greedy/easy"], both["eval/greedy/hard"]) == (1.0, 0.0)
    assert (both["eval/avg@2/easy"], both["eval/avg@2/hard"]) == (0.5, pytest.approx(0.9 / 3))
    assert (both["eval/pass@2/easy"], both["eval/pass@2/hard"]) == (1.0, 0.0)


def test_an_evaluation_ends_with_its_last_prompt_and_reports_the_wait_of_a_batch() -> None:
    plan = EvaluationPlan(EvaluationConfig(num_prompts=2, samples=1), [SourceSummary("addition", 10, "sums")])
    assert plan.due(0)
    tickets = plan.start(0, 3, now=100.0, deadline=200.0, epoch=1)
    assert [(t.draw, t.purpose, t.version) for t in tickets] == [(Draw(0), "eval", 3), (Draw(1), "eval", 3)]
    current = plan.current
    assert current is not None
    assert not current.take(result(0, [1.0, 1.0], [False, False], version=4))
    assert current.take(result(0, [1.0, 1.0], [False, False]))
    assert not current.take(result(0, [0.0, 0.0], [False, False]))
    assert plan.waits(101.0, batch_ready=False)
    assert plan.waits(103.0, batch_ready=True)
    assert plan.waits(104.0, batch_ready=True)
    assert current.take(result(1, [0.0, 0.0], [False, False]))
    assert not plan.waits(106.0, batch_ready=True)
    values = plan.finish(106.0)
    assert (values["eval/seconds"], values["eval/held_seconds"], values["eval/missing"]) == (6.0, 3.0, 0.0)
    assert not plan.due(0)


def test_an_evaluation_ends_at_its_deadline_without_missing_prompts() -> None:
    plan = EvaluationPlan(EvaluationConfig(num_prompts=2), [SourceSummary("addition", 10, "sums")])
    plan.start(0, 3, now=100.0, deadline=200.0, epoch=1)
    assert plan.current is not None
    plan.current.take(result(0, [1.0], [False]))
    assert plan.waits(199.0, batch_ready=False)
    assert not plan.waits(200.0, batch_ready=False)
    values = plan.finish(200.0)
    assert (values["eval/greedy"], values["eval/missing"]) == (1.0, 1.0)


# -- what is asked of engines ----------------------------------------------------------------------------------------


def asked(job: dict[str, Any], purpose: Any, temperature: float | None = None) -> list[tuple[float, int]]:
    ticket = Ticket(draw=Draw(5), min_version=0, deadline=0.0, epoch=1, purpose=purpose, temperature=temperature)
    return [(sampling.temperature, n) for sampling, n in requests_for(parse_job(job), ticket)]


def test_a_greedy_baseline_is_one_more_completion_of_a_training_draw() -> None:
    remax = {**JOB, "algorithm": {"type": "remax", "group_size": 2}}
    assert asked(remax, "train") == [(1.0, 2), (0.0, 1)]
    assert asked({**JOB, "algorithm": {"type": "grpo", "group_size": 2}}, "train") == [(1.0, 2)]
    config = JobConfig.parse(remax)
    assert config.completions_per_group == 3
    assert config.groups_per_batch == 8


def test_evaluations_ask_for_samples_and_greedy_at_once() -> None:
    sampled = {"samples": 3, "sampling": {"temperature": 0.5, "max_new_tokens": 4}}
    assert asked({**JOB, "evaluation": sampled}, "eval") == [(0.5, 3), (0.0, 1)]
    assert asked({**JOB, "evaluation": {"samples": 3, "greedy": False}}, "eval") == [(1.0, 3)]
    assert asked({**EVALUATION, "evaluation": {"samples": 2}, "sampling": {"temperature": 0.7}}, "eval") == [
        (0.7, 2),
        (0.0, 1),
    ]


def test_a_ticket_has_the_temperature_of_its_draw_or_evaluation() -> None:
    remax = {**JOB, "algorithm": {"type": "remax", "group_size": 2}}
    assert asked(remax, "train", 0.6) == [(0.6, 2), (0.0, 1)]
    assert asked({**JOB, "evaluation": {"samples": 3}}, "eval", 0.6) == [(0.6, 3), (0.0, 1)]
    for sampling, expected in ((None, 0.6), (SamplingConfig(temperature=0.5), None)):
        config = EvaluationConfig(num_prompts=1, samples=1, sampling=sampling)
        plan = EvaluationPlan(config, [SourceSummary("addition", 10, "sums")])
        (ticket,) = plan.start(0, 3, now=100.0, deadline=200.0, epoch=1, temperature=0.6)
        assert ticket.temperature == expected


def test_an_evaluation_job_samples_like_the_evaluation_of_a_training_job() -> None:
    ticket = Ticket(draw=Draw(7), min_version=0, deadline=0.0, epoch=1, purpose="eval")
    training = requests_for(parse_job({**JOB, "seed": 3, "evaluation": {"samples": 2}}), ticket)
    assert requests_for(parse_job({**EVALUATION, "seed": 3, "evaluation": {"samples": 2}}), ticket) == training
    assert requests_for(parse_job({**EVALUATION, "seed": 4, "evaluation": {"samples": 2}}), ticket) != training


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"evaluation": {"greedy": False}}, "nothing to measure"),
        ({"train": {"max_updates": 3}}, "train: unknown key"),
        ({"evaluation": {"num_prompts": 100_000, "samples": 64}}, "byte_budget: 100000 prompts"),
        ({"evaluation": {"samples": 2, "pass_k": [3]}}, "pass_k"),
    ],
)
def test_evaluation_jobs_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job({**EVALUATION, **wrong})


# -- the gate and the baseline ---------------------------------------------------------------------------------------


def header(rewards: list[float], failed: list[bool], greedy: list[bool]) -> GroupHeader:
    n = len(rewards)
    return GroupHeader(
        draw=Draw(1), attempt="a", epoch=1, digest="d", nbytes=1, prompt_tokens=2, lengths=[2] * n, rewards=rewards,
        failed=failed, truncated=[False] * n, finite=True, min_version=0, max_version=0, worker="w", greedy=greedy,
    )  # fmt: skip


def verdict(found: GroupHeader, smallest: int = 2) -> Verdict:
    return judge(found, OpenDraw(0, 0.0), taken=False, smallest_group=smallest, needs_baseline=True)


def test_the_greedy_completion_does_not_fill_a_group_and_must_have_a_reward() -> None:
    greedy = [False, False, True]
    assert verdict(header([1.0, 0.0, 1.0], [False, False, False], greedy)) is Verdict.ACCEPT
    assert verdict(header([1.0, 0.0, 1.0], [True, False, False], greedy)) is Verdict.FAILED
    assert verdict(header([1.0, 0.0, 1.0], [False, False, True], greedy)) is Verdict.FAILED
    assert verdict(header([1.0, 0.0], [False, False], [])) is Verdict.FAILED


def test_signal_is_a_difference_between_rewards_that_count() -> None:
    none = [False] * 3
    assert header([1.0, 1.0, 0.0], none, []).has_signal
    assert not header([1.0, 1.0, 0.0], [False, False, True], []).has_signal
    assert not header([1.0, 1.0, 1.0], none, [False, False, True]).has_signal
    assert header([1.0, 1.0, 0.0], none, [False, False, True]).has_signal  # against its baseline
