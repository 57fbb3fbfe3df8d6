"""Flaws of job files: a line each, with the key in the file, the value found there and the valid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.jobs.kinds import KINDS, parse_job
from penstock.shared.config.jobs.training_job import KIND_NAMES
from penstock.shared.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def flaws(override: str, example: str = "addition") -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_job(with_overrides(load_yaml(EXAMPLES / f"{example}.yaml"), [override]))
    return [line.strip() for line in str(raised.value).splitlines()[1:]]


SOURCES = "'file', 'gsm8k_calculator', 'addition', 'sorting', 'tasks'"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("kind=onlin", "kind: found 'onlin'; must be 'rl', 'online_rl', 'embodied', 'evaluation' or 'serving'"),
        ("kind=[]", "kind: found []; must be 'rl', 'online_rl', 'embodied', 'evaluation' or 'serving'"),
        ("algorithm={type: xyz}", "algorithm.type: found 'xyz'; there are: 'grpo', 'dr_grpo', 'dapo', 'rloo', "),
        ("algorithm=grpo", "algorithm: must be a mapping like {type: grpo}, found 'grpo'"),
        (
            "algorithm={type: grpo, clip_hihg: 1}",
            "algorithm.clip_hihg: unknown key of 'grpo'; did you mean 'clip_high'?",
        ),
        ("batch_size=3", "batch_size: unknown key; did you mean 'train.batch_size' or 'warm_start.batch_size'?"),
        ("model.rank=3", "model.rank: unknown key; did you mean 'lora.rank'?"),
        ("algorithm={type: grpo, aggregation: sum}", "algorithm.aggregation: found 'sum'; must be 'token_mean', 's"),
        ("reward.scorers=[{type: mathh}]", "reward.scorers.0.type: found 'mathh'; did you mean 'math'? there are: 'ex"),
        ("reward.scorers=[3]", "reward.scorers.0: must be a mapping like {type: exact}, found 3"),
        (
            "reward.scorers=[{type: grader, grader: {type: x}}]",
            "reward.scorers.0.grader.type: found 'x'; there are: 's",
        ),
        ("data.train=[{path: x}]", f"data.train.0.type: is missing; there are: {SOURCES}"),
        ("environment={tools: [{type: calc}]}", "environment.tools.0.type: found 'calc'; did you mean 'calculator'? t"),
        ("model.lora={rank: 4, target_modules: 3}", "model.lora.target_modules: Input should be a valid list, or: fou"),
        ("model.config=3", "model.config: must be a mapping, found 3"),
        (f"algorithm={{type: {'x' * 500}}}", f"algorithm.type: found '{'x' * 58}…; there are: "),
    ],
)
def test_one_line_names_the_key_the_value_and_the_alternatives(override: str, line: str) -> None:
    found = flaws(override)
    assert [one[: len(line)] for one in found] == [line]
    assert not any("Input tag" in one for one in found)


def test_errors_of_online_jobs() -> None:
    assert flaws("algorithm={type: gp}", "online") == ["algorithm.type: found 'gp'; there are: 'reinforce_pp', 'ppo'"]
    assert "needs several answers to the same prompt" in flaws("algorithm={type: grpo}", "online")[0]


def test_the_named_kinds_are_all_kinds() -> None:
    assert tuple(KINDS) == KIND_NAMES
