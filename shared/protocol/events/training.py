"""Ledger events of every training job: draws, batches, checkpoints, the lineage, and the end."""

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
    """First event of a job; ``config_digest`` pins the job file.

    ``settings`` are the values of the keys that may change during the run. ``environment`` describes the simulator of
    an embodied job (``EnvSpec``), from which its policy is built; empty for other jobs.
    """

    config_digest: str
    settings: dict[str, Any] = {}
    environment: dict[str, Any] = {}


class SettingsChanged(Event, frozen=True, kw_only=True, tag=True):
    """A user changed the job file. ``settings`` has all amendable settings, and applies to every batch from ``number``
    on.

    ``update_index``: number of updates before batch ``number`` in the lineage.
    """

    generation: int
    number: int
    update_index: int
    settings: dict[str, Any]


class Drawn(Event, frozen=True, kw_only=True, tag=True):
    """Each ordinal in [start, stop) gets its first draw. The leader then publishes the tickets of these draws.

    The groups of these draws must come from policy versions >= ``min_version``, which is the version that their planned
    batch starts from, minus the lag bound. ``deadline`` is in bus time (Unix seconds).
    """

    start: int
    stop: int
    min_version: int
    deadline: float


class Dropped(Event, frozen=True, kw_only=True, tag=True):
    """``draws`` end without training. With ``redraw``, the same decision makes a new draw for the ordinal of each, its
    place in the order of the prompts."""

    draws: list[Draw]
    reason: str
    lengths: list[int]
    """Mean completion length of each dropped group, 0 if unknown, so that a length bias of dropping remains visible."""
    redraw: bool
    min_version: int
    deadline: float


class Redrawn(Event, frozen=True, kw_only=True, tag=True):
    """A user retried the dead letter number ``letter``: its prompt gets a new attempt, ``draw``. The leader then
    publishes a ticket for this draw."""

    letter: int
    draw: Draw
    min_version: int
    deadline: float


class SealedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One group of a batch: its stream sequence number in EXPERIENCE, its digest, and the properties that the ledger
    records."""

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
    """Baseline tracked for the group's kind of prompt, before this batch; None if the algorithm tracks none."""
    temperature: float | None = None
    """Temperature of sampling and training; None in ledgers of earlier versions."""
    weight: float = 1.0
    """Factor of the advantages of the group."""
    nbytes: int = 0
    """Size of the group in EXPERIENCE (bytes); 0 in ledgers of earlier versions."""


class Hyperparameters(msgspec.Struct, frozen=True, array_like=True):
    """Settings of a policy update: peak learning rate, KL coefficient, and number of updates of the run.

    ``learning_rate`` is None if each network has its own, ``kl_coef`` is None if there is no KL or the trainer adapts
    the weight, and ``max_updates`` is None if only the data ends the run.
    """

    learning_rate: float | None
    kl_coef: float | None
    max_updates: int | None


class Tracking(msgspec.Struct, frozen=True, array_like=True):
    """Amounts that a batch adds to the tracked mean rewards, which serve as baselines. An event records these amounts,
    not the resulting means, because the means change if an earlier batch is refused later.

    ``rewards`` has ``(sum of rewards, count)`` by kind of prompt. ``keep`` is the decay that is first applied to the
    accumulated rewards of these kinds. See algorithms.baseline.
    """

    rewards: dict[str, tuple[float, float]] = {}
    keep: float = 1.0


class BatchSealed(Event, frozen=True, kw_only=True, tag=True):
    """This event commits the batch: it fixes the groups of one policy update and their order. A batch with a higher
    revision replaces a refused batch with the same number."""

    number: int
    revision: int
    start_version: int
    """Policy version that this update starts from."""
    update_index: int
    """Number of updates before this one in the lineage: the position in the learning-rate schedule."""
    groups: list[SealedGroup]
    hyperparameters: Hyperparameters | None = None
    """Settings of this update; None in ledgers of earlier versions, where the settings of the job file apply."""
    tracking: Tracking = Tracking()
    """Increments of the tracked mean rewards, applied once the batch is trained."""


class BatchRefused(Event, frozen=True, kw_only=True, tag=True):
    """The trainer could not train a sealed batch: the draws in ``bad`` are dropped, and its other draws become
    available for batches again."""

    number: int
    revision: int
    bad: list[Draw]
    reason: str
    redraw: bool
    min_version: int
    deadline: float


class BatchTrained(Event, frozen=True, kw_only=True, tag=True):
    """The trainer trained the batch, so all of its draws are terminal. ``version`` is the number of the new weights,
    ``digest`` their digest.

    ``metrics`` are all metrics of the update; ``figures`` are those that decide on the promotion of ``version``. The
    leader writes the row of METRICS from them; after a takeover, the new leader writes a missing row.
    """

    number: int
    revision: int
    version: int
    digest: str
    trainer_epoch: int
    figures: dict[str, float] = {}
    metrics: dict[str, float] = {}


class Checkpointed(Event, frozen=True, kw_only=True, tag=True):
    """The trainer stored the state after batch ``number`` durably. The checkpoint exists from this event on."""

    number: int
    version: int
    digest: str
    path: str
    trainer_epoch: int
    low_seq: int
    """Lowest stream sequence number in EXPERIENCE that is still needed after this checkpoint."""
    reason: str = ""
    """Reason of the checkpoint: initial, interval, a new best, room, pause, the end."""


class BestCheckpoint(Event, frozen=True, kw_only=True, tag=True):
    """Checkpoint ``number`` is the best so far by ``metric``, whose ``value`` was measured after batch ``step``."""

    number: int
    metric: str
    value: float
    step: int


class LineageForked(Event, frozen=True, kw_only=True, tag=True):
    """Updates from ``from_batch`` on are rolled back: a trainer did not reproduce them, or a user requested it.

    The draws of these batches, and of batches sealed after them, become dropped(rolled_back). With ``redraw`` their
    ordinals are drawn again; otherwise the user wanted to remove their data, and ``draws`` lists the draws. The weights
    before ``from_batch`` continue as ``version``, a number above all earlier ones. ``operation`` is the id of the
    user's operation, '' without one.
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
    """New phase (running | paused | cancelled | failed) with its reason; ``code`` and ``service`` as in
    ``JobFailure``."""

    phase: str
    reason: str
    code: str = ""
    service: str = ""


class Finished(Event, frozen=True, kw_only=True, tag=True):
    """The job ended in the phase ``reason``; no draw or update follows, unless ``Extended`` continues the job."""

    reason: str
    summary: dict[str, Any]


class Extended(Event, frozen=True, kw_only=True, tag=True):
    """A finished job continues, for the ``number``-th time, until ``max_updates`` are done.

    Optimizer, schedule position, data order and numbering continue; dropped draws stay dropped.
    """

    number: int
    max_updates: int
