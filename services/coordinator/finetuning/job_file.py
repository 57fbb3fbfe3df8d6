"""Conversion of a fine-tuning request to a job file."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from penstock.services.coordinator.finetuning.base import BaseModelFile
from penstock.services.coordinator.finetuning.models import FineTuningRequest, Hyperparameters, Reinforcement
from penstock.shared.config.data import PromptConfig
from penstock.shared.config.explain import explain
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rewards.scorers import GraderScorer
from penstock.shared.data.prompts import check_messages
from penstock.shared.data.scorer_needs import ScorerNeeds
from penstock.shared.data.template import Template
from penstock.shared.errors import ConfigError, DataError, Flaw, Invalid

__all__ = ["DataFile", "check_rows", "job_file"]


MAX_FLAWS = 20
Check = Callable[[dict[str, Any], str], object]
"""Check of a data row; the second argument names the row in the text of the DataError that it raises."""


def check_rows(path: Path, parameter: str, prompt: PromptConfig, reward: RewardConfig) -> None:
    """Check the prompt of every row, and the fields that the grader needs. Reads the file: call it in a thread.

    Args:
        parameter: the request's field that names the file.

    Raises:
        Invalid: the file has bad lines; the error has a pointer to each of them.
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
        raise Invalid("invalid_file", detail, flaws)


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


EVERY = 10
"""Default number of policy updates between evaluations."""
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
_METHOD = "/method/reinforcement"
_PLACES = {
    "train.batch_size": f"{_METHOD}/hyperparameters/batch_size",
    "train.data_epochs": f"{_METHOD}/hyperparameters/n_epochs",
    "optimizer.learning_rate": f"{_METHOD}/hyperparameters/learning_rate_multiplier",
    "algorithm.group_size": f"{_METHOD}/hyperparameters/compute_multiplier",
    "reward": f"{_METHOD}/grader",
    "data.train": "/training_file",
    "data.eval": "/validation_file",
    "metadata": "/metadata",
}
"""Pointers to the request's fields, by the key of the job file that each field sets. All other keys come from the base
model's file."""


@dataclass(frozen=True)
class DataFile:
    """An uploaded file and its number of rows."""

    path: Path
    rows: int


def job_file(
    wanted: FineTuningRequest,
    base: BaseModelFile,
    training: DataFile,
    validation: DataFile | None,
    *,
    scorer: Callable[[Any], GraderScorer],
) -> tuple[JobConfig, dict[str, Any]]:
    """Return the job and its hyper-parameters, with `auto` resolved. Reads the files: call it in a thread.

    Args:
        scorer: returns a scorer for a grader; raises ConfigError.

    Raises:
        Invalid: the job cannot be made; the error has pointers into the request.
    """
    method = _reinforcement(wanted)
    given, group_size = method.hyperparameters, base.group_size
    if isinstance(given.compute_multiplier, float | int):
        group_size = max(1, round(group_size * given.compute_multiplier))
    groups = min(base.groups, training.rows) if given.batch_size == "auto" else given.batch_size
    factor = 1.0 if given.learning_rate_multiplier == "auto" else given.learning_rate_multiplier
    epochs = base.epochs if given.n_epochs == "auto" else given.n_epochs
    try:
        reward = _reward(base, scorer(method.grader))
    except ConfigError as error:
        raise _flawed(f"{_METHOD}/grader", str(error)) from None
    raw = {
        **base.sections,
        "kind": "rl",
        "name": _name(wanted),
        "seed": secrets.randbelow(1 << 31) if wanted.seed is None else wanted.seed,
        "metadata": dict(wanted.metadata or {}),
        "algorithm": {**base.section("algorithm"), "group_size": group_size},
        "optimizer": {**base.section("optimizer"), "learning_rate": base.learning_rate * factor},
        "train": {
            **base.section("train"),
            "batch_size": groups * group_size,
            "data_epochs": epochs,
            "max_updates": base.updates(epochs, training.rows, groups),
        },
        "reward": reward.model_dump(mode="json", exclude_unset=True),
        "data": _data(base, training, validation),
        "evaluation": _evaluation(base, given, validation),
        "tracking": [{"type": "wandb", **one.wandb.model_dump(exclude_none=True)} for one in wanted.integrations or ()],
    }
    if not raw["tracking"]:
        raw["tracking"] = base.sections.get("tracking", [])
    config = _validated(raw)
    check_rows(training.path, "training_file", config.data.prompt, reward)
    if validation is not None:
        check_rows(validation.path, "validation_file", config.data.prompt, reward)
    chosen = {"n_epochs": epochs, "batch_size": groups, "learning_rate_multiplier": factor}
    return config, chosen


def _reinforcement(wanted: FineTuningRequest) -> Reinforcement:
    method = wanted.method
    if method.type != "reinforcement":
        why = f"method '{method.type}' is not done here: jobs are trained by reinforcement, with a grader"
        if method.type == "supervised":
            why += " (warm_start of a job file trains on reference answers first)"
        raise _flawed("/method/type", why, code="unsupported_method")
    if method.reinforcement is None:
        raise _flawed(_METHOD, "is needed: the grader, and hyperparameters if there are any")
    given = method.reinforcement.hyperparameters
    if wanted.validation_file is None:
        for name in ("eval_interval", "eval_samples"):
            if getattr(given, name) != "auto":
                raise _flawed(f"{_METHOD}/hyperparameters/{name}", "needs a validation_file")
    return method.reinforcement


def _reward(base: BaseModelFile, scorer: GraderScorer) -> RewardConfig:
    """Return the job's reward section with ``scorer``. If the base model's file sets time limits, they must allow the
    scorer's deadline.

    Raises:
        Invalid: the resulting section is invalid.
    """
    given = {"timeout_s": 2 * scorer.deadline_s, **base.section("reward"), "scorers": [scorer]}
    try:
        return RewardConfig.model_validate(given)
    except ValidationError as error:
        flaws = "; ".join(f"reward.{key}: {detail}" for key, detail in explain(RewardConfig, error))
        raise _flawed("/model", f"the base model's file: {flaws}") from None


def _data(base: BaseModelFile, training: DataFile, validation: DataFile | None) -> dict[str, Any]:
    found = {**base.section("data"), "train": {"type": "file", "path": str(training.path)}}
    found["prompt"] = base.prompt.model_dump(mode="json", exclude_unset=True)
    if validation is None:
        return {key: value for key, value in found.items() if key != "eval"}
    return {**found, "eval": {"type": "file", "path": str(validation.path)}}


def _evaluation(base: BaseModelFile, given: Hyperparameters, validation: DataFile | None) -> dict[str, Any]:
    found = base.section("evaluation")
    if validation is None:
        return {key: value for key, value in found.items() if key != "every"}
    every = (base.evaluation.every or EVERY) if given.eval_interval == "auto" else given.eval_interval
    samples = {} if given.eval_samples == "auto" else {"samples": given.eval_samples}
    prompts = min(validation.rows, base.evaluation.num_prompts)
    return {**found, "every": every, "num_prompts": prompts, **samples}


def _name(wanted: FineTuningRequest) -> str:
    text = wanted.suffix or wanted.model.rstrip("/").rpartition("/")[2].partition("@")[0]
    return ("ft-" + _NOT_IN_NAMES.sub("-", text.lower()))[:63].rstrip("-.")


def _validated(raw: dict[str, Any]) -> JobConfig:
    try:
        return JobConfig.model_validate(raw)
    except ValidationError as error:
        flaws = [
            Flaw(pointer=_pointer(key, detail), detail=f"{key}: {detail}") for key, detail in explain(JobConfig, error)
        ]
        detail = f"{flaws[0].pointer}: {flaws[0].detail}"
        raise Invalid("invalid_request", f"the job would not be valid: {detail}", flaws) from None


def _pointer(key: str, detail: str) -> str:
    """Return the pointer to the request field that caused a flaw. Errors of cross-field rules have no key, so
    ``detail`` is searched for a key, too."""
    for text in (key, detail):
        for known, place in _PLACES.items():
            if text.startswith(known):
                return place
    return "/model"


def _flawed(pointer: str, detail: str, *, code: str = "invalid_request") -> Invalid:
    return Invalid(code, f"{pointer}: {detail}", [Flaw(pointer=pointer, detail=detail)])
