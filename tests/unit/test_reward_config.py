"""Rewards in job files: valid sections, and mistakes that are refused before a job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.services.coordinator.submission import plan_job
from penstock.services.reward.scorers.code import equal_values, program_of
from penstock.services.reward.session import num_processes
from penstock.shared.config.data import DataConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.check import check_data
from penstock.shared.data.code_tests import CallTest, StatementTest, StreamTest, parse_tests
from penstock.shared.errors import ConfigError, DataError

JUDGE = {"type": "judge", "base_url": "http://host/v1", "model": "m", "template": "{completion}", "deadline_s": 5.0}


def parse(*scorers: dict[str, Any], **changes: Any) -> RewardConfig:
    return RewardConfig.parse({"scorers": list(scorers), **changes}, where="reward")


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ({"type": "http", "url": "ftp://host/x"}, "not an http:// or https:// URL"),
        ({"type": "http", "url": "file:///etc/passwd"}, "not an http:// or https:// URL"),
        ({"type": "http", "url": "http://"}, "not an http:// or https:// URL"),
        ({"type": "http", "url": "http://host:port/"}, "not a URL"),
        ({"type": "http", "url": "https://user:pw@host/"}, "must not hold a user or password"),
        ({"type": "http", "url": "http://host", "secret_env": "s3cret-value"}, "NAME of an environment variable"),
        ({**JUDGE, "api_key_env": "sk-abc123"}, "NAME of an environment variable"),
        ({**JUDGE, "api_key_env": "PENSTOCK_API_KEYS"}, "variables of Penstock itself are not sent anywhere"),
        ({**JUDGE, "api_key": "sk-abc123"}, "did you mean 'api_key_env'"),
        ({**JUDGE, "base_url": "localhost:8000/v1"}, "not an http:// or https:// URL"),
        ({**JUDGE, "pattern": "score"}, "exactly 1 group in parentheses, found 0"),
        ({**JUDGE, "pattern": "("}, "not a regular expression"),
        ({**JUDGE, "scale": [10, 0]}, "the lowest grade must be smaller"),
        ({**JUDGE, "request": {"model": "x"}}, "request: model cannot be set there"),
        ({**JUDGE, "deadline_s": 60}, r"timeout_s \(10\) must be larger than .* of the scorers together \(60 s"),
        ({"type": "code", "time_limit_s": 10}, "must be larger than the limits"),
        ({"type": "code", "max_processes": 0}, "greater than or equal to 1"),
        ({"type": "reward_model"}, "Field required"),
        ({"type": "exact", "name": "Bad Name"}, "should match pattern"),
        ({"type": "exec"}, "found .exec.; .*there are: .exact., .math."),
    ],
)
def test_wrong_scorer_is_refused(scorer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(scorer)


def test_names_of_components_are_unique() -> None:
    with pytest.raises(ConfigError, match="two components are named 'style'"):
        parse({"type": "exact", "name": "style"}, {"type": "math", "name": "style"})
    config = parse({"type": "exact"}, {"type": "exact"}, {"type": "math", "name": "exact_2"})
    assert config.component_names == ["exact", "exact_3", "exact_2"]


def test_number_of_processes_is_a_setting() -> None:
    assert num_processes(parse({"type": "exact"}, processes=7)) == 7
    assert 1 <= num_processes(parse({"type": "exact"})) <= 4


def test_scorers_of_whole_groups_are_known() -> None:
    assert not parse({"type": "exact"}, {"type": "code"}).whole_groups
    assert parse({"type": "exact"}, JUDGE).whole_groups


# -- rows ------------------------------------------------------------------------------------------------------------

CALL = {"call": "f", "args": [1], "returns": None}
STREAM = {"stdin": "1", "stdout": "2"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("assert f(1) == 2", [StatementTest("assert f(1) == 2")]),
        ("[x] = f(1)", [StatementTest("[x] = f(1)")]),
        (["assert a", STREAM, CALL], [StatementTest("assert a"), StreamTest("1", "2"), CallTest("f", None, [1])]),
        (orjson.dumps([STREAM]).decode(), [StreamTest("1", "2")]),
        (STREAM, [StreamTest("1", "2")]),
        ({"call": "f", "returns": 1, "kwargs": {"a": 2}}, [CallTest("f", 1, [], {"a": 2})]),
        ({**STREAM, "call": None, "args": None, "returns": None}, [StreamTest("1", "2")]),  # as Parquet gives it
        ({**CALL, "stdin": None, "stdout": None, "kwargs": None}, [CallTest("f", None, [1])]),
    ],
)
def test_forms_of_tests(value: Any, expected: list[Any]) -> None:
    assert parse_tests({"tests": value}, "tests", "row") == expected


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], 7, "", [" "], [{}], [{"stdin": "1"}], [{"stdin": 1, "stdout": "1"}], [{**STREAM, "more": 1}]),
        *([{"call": 1, "returns": 1}], [{"call": "f", "args": 1, "returns": 1}]),
    ],
)
def test_an_invalid_test_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"t\.jsonl, line 3: field 'tests'"):
        parse_tests({"tests": value}, "tests", "t.jsonl, line 3")


def check(tmp_path: Path, rows: list[dict[str, Any]], *scorers: dict[str, Any], answer: str | None = None) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    source = {"type": "file", "path": str(path)}
    config = DataConfig.parse({"train": source, "prompt": {"answer": answer}})
    check_data(config, parse(*scorers))


@pytest.mark.parametrize(
    ("row", "scorer", "message"),
    [
        ({}, {"type": "code"}, r"train\.jsonl, line 2: the row has no field 'tests' that the scorer 'code' needs"),
        ({"tests": [{"stdin": "1"}]}, {"type": "code"}, r"train\.jsonl, line 2: field 'tests': not a test"),
        ({"tests": []}, {"type": "code"}, "line 2: field 'tests' holds no test"),
        ({}, {**JUDGE, "template": "{completion} {rubric}"}, "line 2: the row has no field 'rubric' that the template"),
        ({}, {**JUDGE, "template": "{completion"}, "is not a format string"),
        ({}, {**JUDGE, "template": "{completion} {answer}"}, "needs a reference answer: set data.prompt.answer"),
        ({}, {"type": "exact"}, "scorer 'exact' needs a reference answer"),
        ({}, {"type": "reward_model", "path": "x", "messages": "chat"}, "line 2: the row has no field 'chat'"),
    ],
)
def test_rows_must_hold_what_scorers_need(
    tmp_path: Path, row: dict[str, Any], scorer: dict[str, Any], message: str
) -> None:
    good = {"prompt": "p", "tests": ["pass"], "rubric": "r", "chat": [{"role": "user", "content": "p"}]}
    with pytest.raises(DataError, match=message):
        check(tmp_path, [good, {"prompt": "p", **row}], scorer)
    check(tmp_path, [good], {"type": "code", "time_limit_s": 2}, {**JUDGE, "template": "{completion} {rubric}"})


async def test_submitting_a_job_checks_what_its_scorers_need(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "p", "tests": ["pass"]}\n\n{"prompt": "q"}\n')
    job = {
        "name": "code",
        "model": {"config": {"hidden_size": 32, "num_layers": 1}, "tokenizer": "char"},
        "data": {"train": {"type": "file", "path": str(path)}, "prompt": {"answer": None}},
        "reward": {"scorers": [{"type": "code"}]},
        "algorithm": {"type": "grpo", "group_size": 8},
        "train": {"max_updates": 1, "batch_size": 8},
    }
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 3: the row has no field 'tests'"):
        await plan_job(JobConfig.parse(job), [], ServiceSettings(experience_bytes=1 << 30), stores_parts=True)


# -- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("Text\n```python\nprint(1)\n```\nmore", "print(1)\n"),
        ("```py\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nrm\n```", "a\n"),
        ("```python title=x\na = '```'\n```", "a = '```'\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("", ""),
    ],
)
def test_program_of_a_completion(completion: str, program: str) -> None:
    assert program_of(completion) == program


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
    [
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1, True, False),
        (False, 0, False),
        ([1, [2.0]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
        (10**400, 1.0, False),
        (10**400, 10**400, True),
    ],
)
def test_equality_of_values(found: Any, wanted: Any, equal: bool) -> None:
    assert equal_values(found, wanted) is equal
