"""Decisions of every job that trains: draws, batches, checkpoints, the lineage, its end."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.shared.protocol.events.base import Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.objective import Objective

__all__ = [
    "BatchRefused",
    "BatchSealed",
    "BatchTrained",
    "BestCheckpoint",
    "Checkpointed",
    "Drawn",
    "Dropped",
    "Extended",
    "Finished",
    "Hyperparameters",
    "JobStarted",
    "LineageForked",
    "PhaseChanged",
    "Redrawn",
    "SealedGroup",
    "SettingsChanged",
    "Tracking",
]


class JobStarted(Event, frozen=True, kw_only=True, tag=True):
    """First event of a job; ``config_digest`` pins what was asked for.

    ``settings`` are the values of those keys of the job file that may change during the run. ``environment`` describes
    the simulator of an embodied job (``EnvSpec``), whose policy is built after it; empty for other jobs.
    """

    config_digest: str
    settings: dict[str, Any] = {}
    environment: dict[str, Any] = {}


class SettingsChanged(Event, frozen=True, kw_only=True, tag=True):
    """The user changed the job file: ``settings``, complete, hold for every batch from ``number`` on.

    ``update_index``: updates before that batch in the lineage.
    """

    generation: int
    number: int
    update_index: int
    settings: dict[str, Any]


class Drawn(Event, frozen=True, kw_only=True, tag=True):
    """Ordinals [start, stop) get their first draw; tickets follow. ``deadline`` is absolute.

    Their groups must come from policy versions >= ``min_version``: the batch they are planned for, minus the lag bound.
    """

    start: int
    stop: int
    min_version: int
    deadline: float


class Dropped(Event, frozen=True, kw_only=True, tag=True):
    """These draws end without training. Where ``redraw`` is set, each ordinal is drawn again in the same decision."""

    draws: list[Draw]
    reason: str
    lengths: list[int]
    """Mean completion length of each dropped group, 0 where unknown: dropping must not hide a length bias."""
    redraw: bool
    min_version: int
    deadline: float


class Redrawn(Event, frozen=True, kw_only=True, tag=True):
    """A user has the prompt of dead letter ``letter`` asked for again, as a draw that never was; its ticket follows."""

    letter: int
    draw: Draw
    min_version: int
    deadline: float


class SealedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One group of a batch: where it lies, what it must hash to, and its facts for the books."""

    draw: Draw
    attempt: str
    seq: int
    digest: str
    min_version: int
    max_version: int
    rewards: list[float]
    tokens: int
    worker: str
    objective: Objective = "policy"
    baseline: float | None = None
    """Tracked value of its kind before this batch, where the algorithm has one."""
    temperature: float | None = None
    """At which it was sampled and is trained; None in ledgers of earlier versions."""
    weight: float = 1.0
    """Factor of its advantages."""
    nbytes: int = 0
    """Size of its payload in EXPERIENCE; 0 in ledgers of earlier versions."""


class Hyperparameters(msgspec.Struct, frozen=True, array_like=True):
    """Settings of an update: peak learning rate, weight of the KL, length of the run.

    ``learning_rate`` is None where each network has its own; ``kl_coef`` without a KL and where the trainer adapts it;
    ``max_updates`` where only the data ends it.
    """

    learning_rate: float | None
    kl_coef: float | None
    max_updates: int | None


class Tracking(msgspec.Struct, frozen=True, array_like=True):
    """Additions of a batch to tracked values; not the values themselves, for a batch before it may be refused.

    ``rewards``: by kind of prompt, ``(sum of rewards, how many)``. ``keep``: how much of what was tracked of these
    kinds remains. See algorithms.baseline.
    """

    rewards: dict[str, tuple[float, float]] = {}
    keep: float = 1.0


class BatchSealed(Event, frozen=True, kw_only=True, tag=True):
    """The groups of one policy update, in order. This event IS the commit. A higher revision replaces a refused one."""

    number: int
    revision: int
    start_version: int
    """Policy version from which this update starts."""
    update_index: int
    """Updates before this one in the lineage: the position in the learning-rate schedule."""
    groups: list[SealedGroup]
    hyperparameters: Hyperparameters | None = None
    """Those of this update; None in ledgers of earlier versions: those of the job file."""
    tracking: Tracking = Tracking()
    """Additions of the batch to the tracked values of kinds of prompts, once it is trained."""


class BatchRefused(Event, frozen=True, kw_only=True, tag=True):
    """The trainer could not train a sealed batch; ``bad`` draws are dropped, the others return to the pool."""

    number: int
    revision: int
    bad: list[Draw]
    reason: str
    redraw: bool
    min_version: int
    deadline: float


class BatchTrained(Event, frozen=True, kw_only=True, tag=True):
    """The update was made: all draws of the batch are terminal. ``version`` carries ``digest``.

    ``figures`` are those metrics of the update that decide on the promotion of its version; ``metrics`` are all. A
    leader writes the row of METRICS from them, and its successor a row that is missing there.
    """

    number: int
    revision: int
    version: int
    digest: str
    trainer_epoch: int
    figures: dict[str, float] = {}
    metrics: dict[str, float] = {}


class Checkpointed(Event, frozen=True, kw_only=True, tag=True):
    """The state after batch ``number`` is durable. Only now does that checkpoint exist."""

    number: int
    version: int
    digest: str
    path: str
    trainer_epoch: int
    low_seq: int
    """Lowest EXPERIENCE sequence still needed after it."""
    reason: str = ""
    """Why it was taken: initial, interval, a new best, room, pause, the end."""


class BestCheckpoint(Event, frozen=True, kw_only=True, tag=True):
    """Checkpoint ``number`` is the best one so far by ``metric``, whose ``value`` was measured after batch ``step``."""

    number: int
    metric: str
    value: float
    step: int


class LineageForked(Event, frozen=True, kw_only=True, tag=True):
    """Updates from ``from_batch`` on are rolled back: a trainer did not reproduce them, or somebody wanted it.

    Their draws, and those of batches sealed after them, become dropped(rolled_back). Where ``redraw`` is set they are
    drawn again; where it is not, because this material is what training is to be rid of, they are ``draws``. The
    weights before ``from_batch`` go on under the number ``version``, which lies above the clock. ``operation`` is the
    request of a user who wanted it.
    """

    from_batch: int
    version: int
    digest: str
    reason: str
    trainer_epoch: int
    min_version: int
    deadline: float
    operation: str = ""
    redraw: bool = True
    draws: list[Draw] = []


class PhaseChanged(Event, frozen=True, kw_only=True, tag=True):
    """running | paused | cancelled | failed, and why; ``code`` and ``service`` as in ``JobFailure``, of what failed."""

    phase: str
    reason: str
    code: str = ""
    service: str = ""


class Finished(Event, frozen=True, kw_only=True, tag=True):
    """Nothing will be drawn or trained any more; what was in flight is dropped by the event before."""

    reason: str
    summary: dict[str, Any]


class Extended(Event, frozen=True, kw_only=True, tag=True):
    """A job that had finished goes on for the ``number``-th time, until ``max_updates`` are done.

    Optimizer, position in schedules, data order and numbering go on where they were; what was dropped stays dropped.
    """

    number: int
    max_updates: int
