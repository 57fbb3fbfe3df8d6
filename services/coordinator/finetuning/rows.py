"""True if every line of an uploaded file can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from penstock.services.coordinator.api.replies import Flaw, HttpProblem
from penstock.shared.config.data import PromptConfig
from penstock.shared.config.reward import RewardConfig
from penstock.shared.data.prompts import check_messages
from penstock.shared.data.scorer_needs import ScorerNeeds
from penstock.shared.data.template import Template
from penstock.shared.errors import DataError

__all__ = ["check_rows"]

MAX_FLAWS = 20
Check = Callable[[dict[str, Any], str], object]
"""Takes a row and its name; raises DataError."""


def check_rows(path: Path, parameter: str, prompt: PromptConfig, reward: RewardConfig) -> None:
    """Check every row: its prompt, and what the grader needs of it. Reads the file: call it in a thread.

    Args:
        parameter: name of the request's field that the file stands in.

    Raises:
        HttpProblem: 422, with a pointer to each bad line.
    """
    checks: list[Check] = [_prompt_check(prompt), ScorerNeeds(reward, has_answer=prompt.answer is not None)]
    flaws: list[Flaw] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and (problem := _problem(orjson.loads(line), checks)):
                flaws.append(Flaw(pointer=f"/{parameter}/line/{number}", detail=problem))
                if len(flaws) == MAX_FLAWS:
                    break
    if flaws:
        where = flaws[0].pointer.rpartition("/")[2]
        detail = f"{parameter}: line {where}: {flaws[0].detail}"
        raise HttpProblem(422, "invalid_file", detail, errors=flaws)


def _problem(row: dict[str, Any], checks: list[Check]) -> str:
    for check in checks:
        try:
            check(row, "the row")
        except DataError as error:
            return str(error)
    return ""


def _prompt_check(prompt: PromptConfig) -> Check:
    if prompt.messages is None:
        return Template(prompt.template, "the prompt").render
    field = prompt.messages

    def check(row: dict[str, Any], place: str) -> None:
        messages = check_messages(row, field, place)
        if messages[-1]["role"] == "assistant":
            raise DataError(f"'{field}' ends with a message of the assistant: the policy would have nothing to answer")

    return check
