"""Graders as the HTTP API uses them. Implemented in ``coordinator.graders``."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.shared.config.graders import AnyGrader
from penstock.shared.protocol.grading import GradeReply

__all__ = ["Graders"]


class Graders(Protocol):
    """Runs graders outside of jobs."""

    async def grade(self, grader: AnyGrader, sample: str | None, item: dict[str, Any]) -> GradeReply:
        """One score for each part of ``grader``, in their order; without a sample its parts are only opened.

        Raises:
            ConfigError: the deployment has no model for it.
            Unavailable: no reward worker answers.
        """
        ...
