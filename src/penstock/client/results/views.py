"""Results about a job's updates: samples, timelines, names of metrics, logs, dead letters."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Letter", "LetterReplay", "LetterRow", "LogLine", "MetricName", "Sample", "StageSpan", "TokenSample"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion. ``id`` is `STEP-DRAW-INDEX`; numbers that are not finite are None.

    ``advantage``: among its group; None for one that failed, or has nothing to be compared with. ``tokens``: how many
    it has; ``logprob``: their sum.
    """

    id: str
    step: int
    draw: str
    index: int
    env: str = ""
    prompt: str
    completion: str
    answer: Any = None
    reward: float | None
    parts: dict[str, float | None] = {}
    advantage: float | None = None
    greedy: bool = False
    failed: bool = False
    finish: str
    tokens: int
    logprob: float | None = None
    min_version: int
    max_version: int
    worker: str = ""
    href: str = ""


class TokenSample(Sample, frozen=True, kw_only=True):
    """The same with all that was stored of it; lists by token are equally long, those of the prompt aside.

    ``mask``: 1 where the policy chose the token; ``versions``: of the policy that did; ``siblings``: ids of the other
    completions of its group.
    """

    job: str
    attempt: str = ""
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float | None]
    mask: list[int]
    versions: list[int]
    siblings: list[str]
    token_texts: list[str] | None = None
    """Of each token, for people; None where the coordinator has no tokenizer of the job."""


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """When one stage (`generate`, `wait`, `train`, `checkpoint`) of an update began and ended, in Unix seconds."""

    step: int
    stage: str
    start: float
    end: float


class MetricName(msgspec.Struct, frozen=True, kw_only=True):
    """A metric: how many values it has, of which updates, and the newest one."""

    name: str
    count: int
    first_step: int
    last_step: int
    last: float | None = None


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a service's log."""

    service: str
    worker: str = ""
    text: str


class LetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: where it came from, how often it was tried, why it is here, the draw that it stood for."""

    id: int
    time: float
    stream: str
    sequence: int
    attempts: int
    reason: str
    draw: str | None


class Letter(LetterRow, frozen=True, kw_only=True):
    """With its headers and its content: a ticket as it reads, of anything else the first bytes."""

    nbytes: int
    headers: dict[str, str]
    content: Any


class LetterReplay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of a dead letter that was replayed: a new ``draw`` of its prompt.

    Of interactions and feedback: how many were ``stored`` in their ``stream`` again.
    """

    draw: str | None = None
    stream: str | None = None
    stored: int | None = None
