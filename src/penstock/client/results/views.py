"""Results about a job's updates: samples, timelines, names of metrics, logs, dead letters."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "DeadLetter",
    "DeadLetterReplay",
    "DeadLetterRow",
    "LogLine",
    "MetricName",
    "Sample",
    "StageSpan",
    "TokenSample",
]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion. ``id`` is `STEP-DRAW-INDEX`; non-finite numbers are None.

    ``advantage``: relative to its group; None if the completion failed, or has no group to compare with. ``tokens``:
    number of tokens; ``logprob``: sum of their log-probs.
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
    """A completion with its tokens. Each token has a log-prob, a policy version, and a flag that tells if the policy
    chose the token or the environment gave it as an observation.

    ``token_ids``, ``logprobs``, ``mask`` (1: chosen by the policy, 0: observation), ``versions`` (policy version per
    token) and ``token_texts`` have the same length. ``siblings``: ids of the other completions of its group.
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
    """Text of each token; None if the coordinator has no tokenizer of the job."""


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Start and end of one stage (`generate`, `wait`, `train`, `checkpoint`) of an update, in Unix seconds."""

    step: int
    stage: str
    start: float
    end: float


class MetricName(msgspec.Struct, frozen=True, kw_only=True):
    """A metric: number of values, first and last update, newest value."""

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


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: its source stream, its stream sequence number there (``sequence``), the number of delivery
    attempts, the reason, and the draw (one prompt taken for training) to which the message belongs, if any."""

    id: int
    time: float
    stream: str
    sequence: int
    attempts: int
    reason: str
    draw: str | None


class DeadLetter(DeadLetterRow, frozen=True, kw_only=True):
    """A dead letter with its headers and content. The content is the fields of a ticket (a request to generate for one
    prompt), or the first bytes of any other message."""

    nbytes: int
    headers: dict[str, str]
    content: Any


class DeadLetterReplay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of the retry of a dead letter: a new ``draw`` of its prompt.

    ``stored``: for a dead letter of interactions or feedback, the number of these that were stored again in ``stream``.
    """

    draw: str | None = None
    stream: str | None = None
    stored: int | None = None
