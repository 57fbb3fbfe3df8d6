"""The small messages between services: tickets, scoring, reports, commands, heartbeats."""

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
"""Header of a training ticket: its draw, readable where the ticket is not."""
JUDGEMENTS = "environment_rewards"
"""Field of the row in a request to score: what the environment says of each completion, where it judges."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a rollout worker for one draw, or for one evaluation prompt.

    A worker whose engine is older than ``min_version`` does not start it. Work past the deadline is worthless; the
    coordinator decides when that is, and a worker gives a late ticket back.
    """

    draw: Draw
    min_version: int
    deadline: float
    """In bus time, by the clock of the coordinator (Unix seconds). Read where ``deadline_s`` is missing, in tickets of
    0.1 and by workers of 0.1."""
    epoch: int
    purpose: Literal["train", "eval"] = "train"
    version: int | None = None
    """Evaluation only: the exact policy version asked for."""
    temperature: float | None = None
    """At which to sample; None: what the job file says for this purpose."""
    deadline_s: float | None = None
    """Seconds left when it was published: its stream says when that was."""

    def left_s(self, published: float) -> float:
        """Seconds that a worker has for it where its stream stored it at ``published`` (bus time), however often and
        late it is delivered. The wall clock of the worker's host has no part in it.
        """
        if self.deadline_s is None:  # made by 0.1
            return max(0.0, self.deadline - bus_time())
        if clock_skew_s() is None:  # a server that does not tell its time
            return self.deadline_s
        return min(self.deadline_s, max(0.0, published + self.deadline_s - bus_time()))


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Score the completions of one prompt. ``row`` is the data row, for user functions."""

    prompt: str
    completions: list[str]
    answer: str | None
    row: dict[str, Any]


def row_for(row: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """The row of a group for some of its completions only."""
    return {**row, JUDGEMENTS: [row[JUDGEMENTS][place] for place in places]} if JUDGEMENTS in row else row


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """One reward per completion; where ``failed`` is set it is 0 and means nothing. ``errors``: why, per failure."""

    rewards: list[float]
    failed: list[bool]
    parts: dict[str, list[float]]
    errors: list[str]


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one evaluation prompt at one version; ``greedy`` marks the completion decoded at temperature 0.

    ``parts``: of an episode in a simulator `return`, `success` and `length`.
    """

    version: int
    ordinal: int
    rewards: list[float]
    failed: list[bool]
    greedy: list[bool]
    parts: dict[str, list[float]] = {}


class BatchManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed batch as the trainer reads it; derived from the ledger and re-emitted idempotently."""

    number: int
    revision: int
    start_version: int
    update_index: int
    groups: list[SealedGroup]
    hyperparameters: Hyperparameters | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a trainer to the coordinator; answered by an Ack once it is in the ledger. Safe to repeat.

    ``hello``: a trainer holds the lease and asks where to start; the Ack's data holds a checkpoint, the last trained
    batch, the digests recorded after that checkpoint, and where the lineage is to be given up.
    ``trained``: batch ``batch`` (``revision``) made ``version``.
    ``refused``: batch cannot be trained because of ``bad`` draws.
    ``checkpointed``: state after ``batch`` is durable at ``path``; ``reason`` is the one of the command that asked for
    it. The data of its Ack, as of ``hello``'s, names the checkpoints that must stay (``pinned``).
    ``forked``: replay after a crash does not reproduce the ledger, or the coordinator wanted to go back to the state
    after batch ``rollback``; numbering goes on above the clock from ``version``. ``bad``: draws of ``batch`` whose
    groups are gone.
    ``halted``: batch cannot be trained as it is (a loss that is not finite, a backend that cannot hold the job); it
    stays sealed, if it is, and the job is paused.
    ``not_rolled_back``: the checkpoint that a user wants to go back to cannot be read.
    ``fell_back``: checkpoint ``batch`` cannot be read; the trainer goes on from an older one.
    ``failed``: the trainer cannot go on with this job.
    """

    kind: Literal[
        "hello", "trained", "refused", "checkpointed", "forked", "halted", "not_rolled_back", "fell_back", "failed"
    ]
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


CommandKind = Literal["checkpoint", "rollback", "leave_out"]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Command of the coordinator to a job's trainer; ``args["reason"]`` says why.

    ``rollback``: a trainer at ``args["version"]`` starts over; the answer to its `hello` says from where.
    ``leave_out``: it refuses batches with any of ``args["draws"]`` that it has not begun.
    """

    kind: CommandKind
    epoch: int
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask any trainer to repeat batches ``from_batch`` to ``to_batch`` of a job; None: as far as the log goes."""

    id: str
    from_batch: int | None = None
    to_batch: int | None = None


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a replay; the last row has ``done``.

    ``match``: the weight digest is the one in the ledger. ``near``: it is not, on another environment than that of the
    training, and whether what was recorded of the update is within the bound that ``detail`` names.
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
    """Answer to a report or command."""

    ok: bool
    reason: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A process is alive, what it does, and what it waits for."""

    service: str
    worker: str
    host: str
    pid: int
    started: float
    interval_s: float
    health_port: int
    ready: bool
    jobs: dict[str, dict[str, Any]]
    """Per job: policy `version`, `running`, `waiting_for`, `since`, `holds` (draws), counters and stage seconds."""
    packages: list[str] | None = None
    """Packages of which a job may need some and a process may lack some (`config.needs.ANNOUNCED`), as far as they are
    installed; null: unknown."""
    clock_skew_s: float | None = None
    """Seconds that the wall clock of its host is ahead of the bus's; null: unknown."""
