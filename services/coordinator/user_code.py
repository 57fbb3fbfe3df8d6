"""Checks of user code that a job file names: is it uploaded, and can a reward worker run it?"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.members import Members
from penstock.shared.config.base import named
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, TextJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.rewards.scorers import FunctionScorer
from penstock.shared.data.rows import open_rows
from penstock.shared.data.template import Template
from penstock.shared.data.user_code import code_path
from penstock.shared.errors import ConfigError, DataError, Unavailable

__all__ = ["check_uploaded", "try_functions"]


class Example(NamedTuple):
    """The first row of a job's data, as a scorer receives it. ``answer``: None where rows have no reference answer."""

    prompt: str
    answer: str | None
    row: dict[str, Any]


def check_uploaded(spec: AnyJob, data_dir: Path) -> None:
    """Check that the files of user code that a job file names were uploaded.

    Raises:
        ConfigError: a file is missing; names the key.
    """
    for key, name in named(spec, "code"):
        stem, at, digest = name.partition(":")[0].partition("@")
        if at and not code_path(data_dir, digest).is_file():
            raise ConfigError(
                f"{key}: {stem}.py with the SHA-256 {digest} was not uploaded: submit the job file with "
                f"`penstock submit` or Client.submit, which do that for ./{stem}.py, or POST it to /v1/files/code"
            )


async def try_functions(spec: AnyJob, bench: GraderBench, members: Members) -> list[str]:
    """Have a reward worker import the scorer functions of a job, and score the reference answer of the first row.

    Returns warnings: no worker could try them, or they raised on that answer, which need not be an error.

    Raises:
        ConfigError: a function cannot be imported, or takes other arguments.
    """
    if isinstance(spec, EmbodiedJob | ServingJob):
        return []
    functions = [scorer for scorer in spec.reward.scorers if isinstance(scorer, FunctionScorer)]
    if not functions:
        return []
    names = ", ".join(scorer.path for scorer in functions)
    if not members.of("reward", time.monotonic()):
        return [f"reward.scorers: no reward worker runs here: {names} is imported when the job begins"]
    example = await asyncio.to_thread(_example_of, spec)
    sample = None if example is None else example.answer or ""
    prompt, answer, row = example or Example("", None, {})
    try:
        reply = await bench.try_scorers(functions, sample, prompt=prompt, answer=answer, row=row)
    except Unavailable as error:
        return [f"reward.scorers: {names} was not tried: {error}"]
    if not reply.error:
        return []
    if not reply.opened:
        raise ConfigError(f"reward.scorers: {reply.error.removeprefix('other_error: ')}")
    return [
        f"reward.scorers: tried on the first row, with its reference answer as the completion: "
        f"{reply.error.removeprefix('other_error: ')}"
    ]


def _example_of(spec: TextJob) -> Example | None:
    """Return the first row, or None if there is none or it is invalid; the data check reports the reason."""
    config = spec.data if isinstance(spec, JobConfig) else spec.data_config
    form = config.prompt
    try:
        rows = open_rows([*config.train, *config.eval][0])
        row, place = rows[0], rows.where(0)
        prompt = "" if form.messages is not None else Template(form.template, "prompt").render(row, place)
        answer = None if form.answer is None else Template(form.answer, "answer").render(row, place)
    except (DataError, IndexError):
        return None
    return Example(prompt, answer, row)
