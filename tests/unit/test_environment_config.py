"""The section `environment` of a job file: settings that are refused, and values that follow from others."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.config.base import with_overrides
from penstock.shared.config.data import TasksSource
from penstock.shared.config.environment import EnvironmentConfig, VerifiersConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.data.check import check_data
from penstock.shared.data.rows import open_rows
from penstock.shared.errors import ConfigError

JOB: dict[str, Any] = {
    "name": "agent",
    "model": {"config": {"max_position_embeddings": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}, "prompt": {"max_tokens": 8}},
    "reward": {"scorers": [{"type": "exact"}]},
    "environment": {"tools": [{"type": "calculator"}], "max_turns": 3, "max_observation_tokens": 10},
    "sampling": {"max_new_tokens": 16},
    "train": {"batch_size": 16, "max_updates": 1},
    "limits": {"byte_budget": 64 << 20},
}
CALCULATOR = {"type": "calculator"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["environment.tools=[]"], "environment.tools"),
        (["environment.tools=[{type: calculator}, {type: calculator}]"], "names must differ"),
        (["environment.tools=[{type: abacus}]"], "abacus"),
        (["environment.tools=[{type: calculator}, {type: python}]", "environment.calls={body: text}"], "which tool"),
        (["environment.calls={begin: '<<', end: '<'}"], "is part of the other"),
        (["environment.observations={result: 'none'}"], "must hold {result} once"),
        (["environment.tools=[{type: python, time_limit_s: 10}]"], "must be above the time_limit_s of python"),
        (["environment.turn_timeout_s=5"], "tool_timeout_s is longer than turn_timeout_s"),
        (["environment.max_observation_tokens=7"], "leaves no room for the results of 8 calls in one turn"),
        (["environment.max_turn=2"], "did you mean 'max_turns'"),
        (["sampling.min_new_tokens=2"], "sampling.min_new_tokens: training needs 0, found 2"),
        (["evaluation.sampling={min_new_tokens: 2}"], "evaluation.sampling.min_new_tokens: a turn ends with its call"),
        (["sampling.ignore_eos=true"], "sampling.ignore_eos: a turn ends with the end of sequence"),
        (["environment.max_observation_tokens=24"], "leaves no room for a prompt"),
        (
            ["evaluation.sampling={max_new_tokens: 48}"],
            "evaluation.sampling.max_new_tokens 48",
        ),
        (["environment.tools=[{type: function, name: f, path: a, description: d}]"], "path"),
        (["environment.tools=[{type: function, name: f, path: 'a:b', description: d, parameters: {}}]"], "JSON schema"),
        (["warm_start.demonstration=['<1>', '1']"], "the policy has the last word"),
        (["limits.byte_budget=60000"], "limits.byte_budget"),
        (["environment.tools=[{type: method, name: f, path: a, description: d}]"], "path"),
        (["data.train={type: tasks, num_rows: 4}"], "a source of type 'tasks' needs environment.type 'verifiers'"),
        (["reward.scorers=[{type: environment}]"], "scorer 'environment' needs an environment that judges"),
    ],
)
def test_invalid_settings_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("{", r"\{").replace("(", r"\(")):
        JobConfig.parse(with_overrides(JOB, changes))


VERIFIERS = [
    "environment={type: verifiers, env: {taskset: {id: words}}}", "data.train={type: tasks, num_rows: 4}",
    "sampling.max_new_tokens=8", "environment.max_turns=2", "environment.max_observation_tokens=10",
]  # fmt: skip


def test_tasks_of_an_environment_are_rows() -> None:
    job = JobConfig.parse(with_overrides(JOB, [*VERIFIERS, "reward.scorers=[{type: environment}]"]))
    assert isinstance(job.environment, VerifiersConfig)
    assert job.services == ("trainer", "rollout", "reward", "env")
    assert job.max_completion_tokens == 8 + 10
    summary = check_data(job.data, job.reward)
    assert summary.rows_per_epoch == 4
    rows = open_rows(TasksSource(num_rows=4, skip=3))
    assert [rows[i]["task"] for i in range(len(rows))] == [3, 4, 5, 6]
    assert rows.where(1) == "task 4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["environment.env={taskset: {}}"], "needs `taskset:"),
        (["environment.env={}"], "needs `taskset:"),
        (["environment.path=words.py"], "must be ./FILE.py"),
        ([f"environment.path=random@{'0' * 64}"], "random.py would hide the module 'random'"),
        ([f"environment.path=other@{'0' * 64}"], "found 'words', but path names other.py"),
        (["environment.python=python"], "environment.python: String should match"),
        (["environment.step_timeout_s=70"], "step_timeout_s is longer than turn_timeout_s"),
        (["data.train={type: addition}"], "brings its own tasks"),
        (["warm_start.steps=2"], "warm_start: tasks of an environment have no answers"),
        (["environment.tool=1"], "unknown key"),
    ],
)
def test_invalid_settings_of_a_verifiers_environment_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.parse(with_overrides(JOB, [*VERIFIERS, *changes]))


def test_observations_count_against_model_and_budget() -> None:
    job, plain = JobConfig.parse(JOB), JobConfig.parse({**JOB, "environment": None})
    assert (job.max_completion_tokens, plain.max_completion_tokens) == (16 + 2 * 10, 16)
    assert job.max_group_bytes > plain.max_group_bytes
    assert (job.services, plain.services) == (("trainer", "rollout", "reward", "env"), ("trainer", "rollout", "reward"))


def test_an_evaluation_job_has_environments_and_an_online_job_has_not() -> None:
    job = {key: JOB[key] for key in ("name", "model", "reward", "environment", "sampling", "limits")}
    evaluation = parse_job({**job, "kind": "evaluation", "data": {"eval": {"type": "addition"}}})
    assert evaluation.max_completion_tokens == 36
    online = {key: JOB[key] for key in ("name", "model", "environment", "sampling")}
    with pytest.raises(ConfigError, match="agents bring their own tools"):
        parse_job({**online, "kind": "online_rl"})


def test_chat_templates_get_the_tools() -> None:
    chat = JobConfig.parse(with_overrides(JOB, ["data.prompt.chat=true"]))
    assert chat.environment is not None
    [tool] = chat.data_config.prompt.chat_template_args["tools"]
    assert tool["function"]["name"] == "calculator"
    assert tool["function"]["parameters"]["required"] == ["expression"]
    own = JobConfig.parse(with_overrides(JOB, ["data.prompt.chat=true", "data.prompt.chat_template_args={tools: []}"]))
    assert own.data_config.prompt.chat_template_args == {"tools": []}
    plain = JobConfig.parse(JOB)
    assert plain.data_config == plain.data


def test_defaults_are_those_of_chat_models() -> None:
    config = EnvironmentConfig.parse({"tools": [CALCULATOR]}, where="environment")
    assert (config.calls.begin, config.calls.body, config.calls.parallel) == ("<tool_call>", "json", True)
