"""Runs graders outside of jobs: turns a grader into a scorer and has a reward worker grade one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from penstock.shared.config.rewards.graders import AnyGrader, ScoreModelGrader, parts_of
from penstock.shared.config.rewards.scorers import GraderScorer, ScorerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.grading import OPEN_S, GradeReply, GradeRequest
from penstock.shared.transport.bus import Bus

__all__ = ["GraderBench", "scorer_of"]

DEADLINE_S = 30.0
GRACE_S = 5.0
"""Extra time for a reward worker that is busy with another request (seconds)."""
MODEL_DEADLINE_S = 60.0
"""Deadline of the scorer of a grader that calls a model: longest time for all completions of a group (seconds)."""


class GraderBench:
    """Service that runs graders outside of jobs, on reward workers."""

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self._bus, self._settings = bus, settings

    async def grade(self, grader: AnyGrader, sample: str | None, item: dict[str, Any]) -> GradeReply:
        """Have a reward worker grade ``sample``; return one score for each part of ``grader``, in their order.

        If ``sample`` is None, the worker only opens the parts.

        Raises:
            ConfigError: the grader asks a model, and the deployment configures no address of one.
            Unavailable: no reward worker answers.
        """
        scorers = [scorer_of(part, self._settings) for part in parts_of(grader).values()]
        return await self.try_scorers(scorers, sample, row=item)

    async def try_scorers(
        self, scorers: Sequence[ScorerConfig], sample: str | None, *, prompt: str = "", answer: str | None = None,
        row: dict[str, Any],
    ) -> GradeReply:  # fmt: skip
        """Have a reward worker open ``scorers`` in a separate process, and score ``sample`` unless it is None.

        Raises:
            Unavailable: no reward worker answers.
        """
        request = GradeRequest(
            scorers=[s.model_dump(mode="json") for s in scorers], sample=sample, item=row, deadline_s=DEADLINE_S,
            wait_s=OPEN_S + DEADLINE_S + GRACE_S, prompt=prompt, answer=answer,
        )  # fmt: skip
        try:
            data = await self._bus.request(subjects.GRADE, pack(request), deadline_s=request.wait_s)
        except Unavailable as error:
            raise Unavailable(f"no reward worker graded it ({error}); start one, or try again") from None
        return unpack(data, GradeReply)[0]


def scorer_of(grader: AnyGrader, settings: ServiceSettings) -> GraderScorer:
    """Return ``grader`` as a scorer of a job file, with the model address that the deployment configures.

    Raises:
        ConfigError: the grader needs a model, and the deployment configures no address.
    """
    asks = any(isinstance(part, ScoreModelGrader) for part in parts_of(grader).values())
    if asks and not settings.grader_url:
        raise ConfigError(
            "grader: score_model needs the address of the model; whoever runs the coordinator sets PENSTOCK_GRADER_URL"
        )
    where = {"base_url": settings.grader_url, "api_key_env": settings.grader_key_env or None} if asks else {}
    deadline_s = {"deadline_s": MODEL_DEADLINE_S} if asks else {}
    try:
        return GraderScorer.model_validate({"type": "grader", "grader": grader, **where, **deadline_s})
    except ValidationError as error:
        raise ConfigError(
            f"PENSTOCK_GRADER_URL or PENSTOCK_GRADER_KEY_ENV is not valid: {error.errors()[0]['msg']}"
        ) from None
