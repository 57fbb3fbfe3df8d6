"""Small messages between services: tickets, scoring, reports, commands, heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.shared.protocol.bus_clock import bus_time, clock_skew_s
from penstock.shared.protocol.events import Hyperparameters, SealedGroup
from penstock.shared.protocol.ids import Draw

__all__ = [
    "DRAW_HEADER",
    "JUDGEMENTS",
    "Ack",
    "BatchManifest",
    "Command",
    "CommandKind",
    "EvalResult",
    "Heartbeat",
    "ReplayRequest",
    "ReplayRow",
    "Report",
    "ScoreReply",
    "ScoreRequest",
    "Ticket",
    "row_for",
]


DRAW_HEADER = "Penstock-Draw"
"""Header of a training ticket with its draw, readable even if the ticket is not."""
JUDGEMENTS = "environment_rewards"
"""Field of the row in a scoring request: the environment's reward of each completion, if it gives any."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a rollout worker: one draw, or one evaluation prompt.

    A worker does not start a ticket while the version of its engine is below ``min_version``. The coordinator sets the
    deadline. A worker returns a ticket whose deadline has passed, because only the coordinator drops draws.
    """

    draw: Draw
    min_version: int
    deadline: float
    """Deadline in bus time (Unix seconds). Workers of version 0.1 read this field; later workers read it only in
    tickets of version 0.1, which lack ``deadline_s``."""
    epoch: int
    purpose: Literal["train", "eval"] = "train"
    version: int | None = None
    """Exact policy version to use, in tickets for evaluation."""
    temperature: float | None = None
    """Sampling temperature; None: the setting of the job file for this purpose."""
    deadline_s: float | None = None
    """Seconds from the publication of the ticket to its deadline; the stream stores the time of publication."""
    begun: bool = False
    """True if a worker returned the ticket on shutdown, so that PARTIAL may hold unfinished completions for it."""

    def left_s(self, published: float) -> float:
        """Return the seconds left until the deadline of a ticket that its stream stored at ``published`` (bus time).
        Redeliveries and the wall clock of the worker's host do not change the result."""
        if self.deadline_s is None:  # written by version 0.1
            return max(0.0, self.deadline - bus_time())
        if clock_skew_s() is None:  # a server without the time in its messages
            return self.deadline_s
        return min(self.deadline_s, max(0.0, published + self.deadline_s - bus_time()))


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to score the completions of one prompt. ``row`` is the data row, for user functions."""

    prompt: str
    completions: list[str]
    answer: str | None
    row: dict[str, Any]


def row_for(row: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return a copy of ``row`` in which the environment's rewards are restricted to the completions with the indices
    ``places``."""
    return {**row, JUDGEMENTS: [row[JUDGEMENTS][place] for place in places]} if JUDGEMENTS in row else row


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """One reward per completion. If ``failed`` is True for a completion, its reward is a placeholder 0. ``errors`` has
    one cause per failure."""

    rewards: list[float]
    failed: list[bool]
    parts: dict[str, list[float]]
    errors: list[str]


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one evaluation prompt at one version; ``greedy`` marks the completion decoded at temperature 0.

    ``parts``: for an episode in a simulator, `return`, `success` and `length`.
    """

    version: int
    ordinal: int
    rewards: list[float]
    failed: list[bool]
    greedy: list[bool]
    parts: dict[str, list[float]] = {}


class BatchManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Sealed batch for the trainer; derived from the ledger and published idempotently."""

    number: int
    revision: int
    start_version: int
    update_index: int
    groups: list[SealedGroup]
    hyperparameters: Hyperparameters | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a trainer or rollout worker to the coordinator. The coordinator acknowledges a report after it has
    stored the report's effect. Safe to repeat.

    ``hello``: the trainer holds the lease and requests its starting point; the Ack's data has a checkpoint, the last
    trained batch, the digests recorded after that checkpoint, and the batch at which the lineage must be forked, if
    any.
    ``trained``: training on batch ``batch`` (``revision``) produced ``version``.
    ``refused``: the batch cannot be trained because of ``bad`` draws.
    ``checkpointed``: the state after ``batch`` is durable at ``path``; ``reason`` is the reason of the command that
    requested the checkpoint. The data of the Ack to this report and to ``hello`` lists the checkpoints that must stay
    (``pinned``).
    ``forked``: the replay after a crash does not reproduce the ledger, or the coordinator requested the state after
    batch ``rollback``; the policy continues as ``version``, a number above all earlier ones. ``bad``: draws of
    ``batch`` whose groups are lost.
    ``halted``: the batch cannot be trained as it is (a non-finite loss, a backend that cannot hold the job); a sealed
    batch stays sealed, and the job is paused.
    ``not_rolled_back``: the checkpoint of a requested rollback cannot be read.
    ``fell_back``: checkpoint ``batch`` cannot be read; the trainer continues from an older one.
    ``failed``: the trainer cannot continue the job.
    ``handed_over``: a leaving rollout worker gives back the ticket of the draws ``bad``, message ``seq`` of TICKETS.
    The coordinator publishes a new ticket for each draw that still waits for a group; the worker then acknowledges
    the old ticket.
    """

    kind: Literal[
        "hello", "trained", "refused", "checkpointed", "forked", "halted", "not_rolled_back", "fell_back", "failed",
        "handed_over",
    ]  # fmt: skip
    epoch: int
    batch: int = 0
    revision: int = 0
    version: int = 0
    digest: str = ""
    path: str = ""
    bad: list[Draw] = msgspec.field(default_factory=list)
    reason: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    rollback: int | None = None
    seq: int = 0


CommandKind = Literal["checkpoint", "rollback", "leave_out"]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Command of the coordinator to a job's trainer; ``args["reason"]`` is the reason.

    ``rollback``: a trainer whose version is not above ``args["version"]`` restarts; the answer to its `hello` has the
    checkpoint to load.
    ``leave_out``: the trainer refuses batches with any of ``args["draws"]`` that it has not begun.
    """

    kind: CommandKind
    epoch: int
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to any trainer to replay batches ``from_batch`` to ``to_batch`` of a job.

    ``from_batch`` None: as early as checkpoints and stored groups allow; ``to_batch`` None: to the last trained batch.
    """

    id: str
    from_batch: int | None = None
    to_batch: int | None = None


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a replay. ``done`` is True in the last row.

    ``match``: the weight digest equals the digest in the ledger. ``near`` is set if the digests differ and the replay
    runs in another environment than the training did: True if the recorded values of the update are within the bound
    that ``detail`` names.
    """

    batch: int = 0
    total: int = 0
    match: bool | None = None
    near: bool | None = None
    detail: str = ""
    done: bool = False
    ok: bool = False
    summary: str = ""


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a report or command; if ``ok`` is False, ``reason`` says why."""

    ok: bool
    reason: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a process, with its activity and what it waits for."""

    service: str
    worker: str
    host: str
    pid: int
    started: float
    interval_s: float
    health_port: int
    ready: bool
    jobs: dict[str, dict[str, Any]]
    """Per job: policy `version`, `running`, `waiting_for`, `since`, `holds` (draws), counters and stage seconds,
    `problem` and `problem_since` (why work for the job failed)."""
    packages: list[str] | None = None
    """Installed packages out of the optional ones that jobs may need (`config.needs.ANNOUNCED`); null: unknown."""
    clock_skew_s: float | None = None
    """Seconds that the wall clock of the process's host is ahead of bus time; null: unknown."""
