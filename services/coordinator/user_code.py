"""Checks of user code and grading models that a job file names: the code is uploaded, workers can import and call it,
and the models answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.members import Members
from penstock.shared.config.base import named
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, TextJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.rewards.graders import PythonGrader, ScoreModelGrader, parts_of
from penstock.shared.config.rewards.scorers import (
    EnvironmentScorer,
    FunctionScorer,
    GraderScorer,
    JudgeScorer,
    ScorerConfig,
)
from penstock.shared.config.tools import FunctionTool, MethodTool
from penstock.shared.data.rows import open_rows
from penstock.shared.data.template import Template
from penstock.shared.data.user_code import code_path, shown_name
from penstock.shared.errors import ConfigError, DataError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.grading import split_error
from penstock.shared.protocol.trials import Finding, TrialReply, TrialRequest
from penstock.shared.runtime.tasks import together
from penstock.shared.transport.bus import Bus

__all__ = ["ROLLOUT_KEYS", "CodeTrials", "check_uploaded"]

ROLLOUT_KEYS = ("data.curriculum", "online.redaction.function", "rollout.path")
"""Keys of a job file that name user code which rollout workers import."""
TRIAL_S = 20.0
"""Time limit of a trial of user code, including the start of a process and all imports (seconds)."""
OPEN_S = 45.0
"""Time limit of a trial of a `verifiers` environment or of a model's code (seconds); their imports are slow."""
REMOTE_CODE = "model.trust_remote_code"
MODEL_S = 20.0
"""Deadline for the answer of a grading model in a trial (seconds)."""
WAIT_S = 10.0
"""Time that a worker has to begin a trial (seconds)."""
END_S = 5.0
"""Time that a worker has to end the processes of a trial (seconds)."""


class Example(NamedTuple):
    """The first row of a job's data, as a scorer receives it. ``answer``: None where rows have no reference answer."""

    prompt: str
    answer: str | None
    row: dict[str, Any]


def check_uploaded(spec: AnyJob, data_dir: Path) -> None:
    """Check that the files of user code that a job file names were uploaded.

    Raises:
        ConfigError: a file is missing; the text names the key of the job file.
    """
    for key, name in named(spec, "code"):
        stem, at, digest = name.partition(":")[0].partition("@")
        if at and not code_path(data_dir, digest).is_file():
            raise ConfigError(
                f"{key}: {stem}.py with the SHA-256 {digest} was not uploaded: submit the job file with "
                f"`penstock submit` or Client.submit, which do that for ./{stem}.py, or POST it to /v1/files/code"
            )


class CodeTrials:
    """Has workers try the user code and the grading models of a job file once, each in a separate process."""

    def __init__(self, bus: Bus, bench: GraderBench, members: Members) -> None:
        self._bus, self._bench, self._members = bus, bench, members

    async def run(self, spec: AnyJob) -> list[str]:
        """Try all user code of a job on the first row of its data, each in the service that would run it.

        Grading models get one request. Return a warning for code that no worker could try, or that failed on the first
        row, which need not be an error.

        Raises:
            ConfigError: code cannot be imported, or takes other arguments; the text has one line for each key.
        """
        if isinstance(spec, EmbodiedJob):  # the plan creates its simulators
            return []
        example = None if isinstance(spec, ServingJob) else await asyncio.to_thread(_example_of, spec)
        asked = [*self._scorers(spec, example), self._environment(spec, example), self._rollout(spec, example)]
        findings = [finding for found in await together(asked) for finding in found]
        texts = [f"{finding.key}: {finding.text}" for finding in findings if finding.fatal]
        if texts:
            raise ConfigError("\n  ".join(texts))
        return [f"{finding.key}: {finding.text}" for finding in findings]

    def _scorers(self, spec: AnyJob, example: Example | None) -> Iterator[Coroutine[Any, Any, list[Finding]]]:
        """Yield a trial of each scorer that runs code of the user or asks a model."""
        if isinstance(spec, ServingJob | EmbodiedJob):
            return
        for place, scorer in enumerate(spec.reward.scorers):
            key = f"reward.scorers[{place}]"
            if isinstance(scorer, FunctionScorer):
                yield self._scorer(f"{key} ({shown_name(scorer.path)})", scorer, example)
            elif isinstance(scorer, JudgeScorer):
                yield self._scorer(f"{key} (judge)", _soon(scorer), example)
            elif isinstance(scorer, GraderScorer):
                parts = parts_of(scorer.grader).values()
                asks = any(isinstance(part, ScoreModelGrader) for part in parts)
                if asks or any(isinstance(part, PythonGrader) for part in parts):
                    yield self._scorer(f"{key} ({scorer.grader.name})", _soon(scorer) if asks else scorer, example)

    async def _scorer(self, key: str, scorer: ScorerConfig, example: Example | None) -> list[Finding]:
        """Have a reward worker open a scorer, and score the reference answer of the first row; return the findings."""
        if not self._members.of("reward", time.monotonic()):
            return [Finding(key=key, text=_untried("no reward worker runs here"), fatal=False)]
        sample = None if example is None else example.answer or ""
        prompt, answer, row = example or Example("", None, {})
        try:
            reply = await self._bench.try_scorers([scorer], sample, prompt=prompt, answer=answer, row=row)
        except Unavailable as error:
            return [Finding(key=key, text=_untried(str(error)), fatal=False)]
        if not reply.error:
            return []
        _, detail = split_error(reply.error)
        context = "" if not reply.opened else "tried on the first row, with its reference answer as the completion: "
        return [Finding(key=key, text=f"{context}{detail}", fatal=not reply.opened)]

    async def _environment(self, spec: AnyJob, example: Example | None) -> list[Finding]:
        """Have an env worker try the user's tools, or open a `verifiers` environment; return the findings."""
        if isinstance(spec, ServingJob | EmbodiedJob) or spec.environment is None:
            return []
        section, limit_s = spec.environment, TRIAL_S
        if isinstance(section, VerifiersConfig):
            limit_s = OPEN_S
        elif not any(isinstance(tool, FunctionTool | MethodTool) for tool in section.tools):
            return []
        judges = any(isinstance(scorer, EnvironmentScorer) for scorer in spec.reward.scorers)
        parts = {"environment": section.model_dump(mode="json")}
        return await self._ask("env", subjects.ENV_TRY, parts, example, limit_s, judges=judges)

    async def _rollout(self, spec: AnyJob, example: Example | None) -> list[Finding]:
        """Have a rollout worker try the user code that rollout workers import for the job; return its findings."""
        parts, limit_s = {key: name for key, name in named(spec, "code") if key in ROLLOUT_KEYS}, TRIAL_S
        model = None if isinstance(spec, EmbodiedJob) else spec.model
        if model is not None and model.trust_remote_code and model.path is not None:
            parts, limit_s = parts | {REMOTE_CODE: model.path}, OPEN_S
        return await self._ask("rollout", subjects.ROLLOUT_TRY, parts, example, limit_s) if parts else []

    async def _ask(
        self, service: str, subject: str, parts: dict[str, Any], example: Example | None, limit_s: float, *,
        judges: bool = False,
    ) -> list[Finding]:  # fmt: skip
        key = ", ".join(parts)
        if not self._members.of(service, time.monotonic()):
            return [Finding(key=key, text=_untried(f"no {service} worker runs here"), fatal=False)]
        prompt, answer, row = example or Example("", None, {})
        request = TrialRequest(
            parts=parts, limit_s=limit_s, start_by=bus_time() + WAIT_S, prompt=prompt, answer=answer, row=row,
            judges=judges,
        )  # fmt: skip
        try:
            data = await self._bus.request(subject, pack(request), deadline_s=limit_s + WAIT_S + END_S)
        except Unavailable as error:
            return [Finding(key=key, text=_untried(str(error)), fatal=False)]
        return unpack(data, TrialReply)[0].findings


def _soon(scorer: GraderScorer | JudgeScorer) -> ScorerConfig:
    """Return ``scorer`` with a deadline of at most MODEL_S seconds, so that a trial reports an unreachable model in
    time."""
    return scorer.model_copy(update={"deadline_s": min(scorer.deadline_s, MODEL_S)})


def _untried(reason: str) -> str:
    return f"not tried, because {reason}: it runs when the job begins"


def _example_of(spec: TextJob) -> Example | None:
    """Return the first row of a job's data; None if that row is missing or invalid (another check reports this)."""
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
