"""Grading of one answer on request, and the error kinds of graders (OpenAI's fine-tuning API, 2026-08)."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["GRADER_ERRORS", "OPEN_S", "GradeReply", "GradeRequest", "error_text", "split_error"]

OPEN_S = 20.0
"""Time limit of opening the scorers of a request (seconds). Opening starts a process, which checks its sandbox."""
GRADER_ERRORS = (
    "formula_parse_error",
    "invalid_variable_error",
    "model_grader_parse_error",
    "model_grader_refusal_error",
    "model_grader_server_error",
    "other_error",
    "python_grader_runtime_error",
    "python_grader_server_error",
    "sample_parse_error",
    "truncated_observation_error",
    "unresponsive_reward_error",
)
"""Error flags in the reply to a grader run."""


class GradeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to open the scorers configured in ``scorers``, and then to score ``sample`` with each of them. Without a
    sample, the worker only opens the scorers.

    ``deadline_s``: time limit of the scoring, which begins once all scorers are open. ``wait_s``: time that the sender
    waits. Both are in seconds.
    """

    scorers: list[dict[str, Any]]
    sample: str | None
    item: dict[str, Any]
    deadline_s: float
    wait_s: float
    prompt: str = ""
    answer: str | None = None


class GradeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``GradeRequest``: one score per scorer, or no scores and the error of the first scorer that failed.
    ``seconds`` is the duration. ``opened`` is True if all scorers could be opened."""

    scores: list[float] = []
    error: str = ""
    seconds: float = 0.0
    opened: bool = False


def error_text(flag: str, detail: str) -> str:
    """Return the text of a grader error. The kind of the error is its prefix, so that the kind survives where only
    texts are transmitted."""
    assert flag in GRADER_ERRORS
    return f"{flag}: {detail}"


def split_error(text: str) -> tuple[str, str]:
    """Split a text that ``error_text`` made into kind and detail. Any other text becomes the detail of an
    ``other_error``."""
    flag, colon, detail = text.partition(": ")
    return (flag, detail) if colon and flag in GRADER_ERRORS else ("other_error", text)
