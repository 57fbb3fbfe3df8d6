"""Ledger events: the decisions of a job, in the order in which they were made. The ledger is the only commit point.

An event is per decision (a range, a batch), never per group. Folding the events from the start gives the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.objective import Objective

__all__ = [
    "Admission",
    "Admitted",
    "BatchRefused",
    "BatchSealed",
    "BatchTrained",
    "BestCheckpoint",
    "CanaryBegun",
    "CanaryJudged",
    "Checkpointed",
    "Drawn",
    "Dropped",
    "Event",
    "Finished",
    "Hyperparameters",
    "JobStarted",
    "Judged",
    "LineageForked",
    "PhaseChanged",
    "Promoted",
    "PromotionRefused",
    "Quarantined",
    "Redrawn",
    "SealedGroup",
    "SettingsChanged",
    "Tracking",
    "decode_events",
    "encode_events",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: who wrote it (monotone leader epoch) and when (Unix seconds, for people and deadlines)."""

    writer_epoch: int
    time: float


class JobStarted(Event, frozen=True, kw_only=True, tag=True):
    """First event of a job; ``config_digest`` pins what was asked for.

    ``settings`` are the values of those keys of the job file that may change during the run.
    """

    config_digest: str
    settings: dict[str, Any] = {}


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


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """What one draw of an online job trains: turns of an episode that nobody trained before, and what was said of them.

    ``interactions`` (in turn) and ``feedback`` map ids to sequences in their streams. ``reward`` is the return of the
    turns; ``lag`` how many versions lie between the oldest token and the update that was next. ``key_id`` and ``user``
    say whose feedback, on whose conversation, decided; ``reason`` says by which rule: `feedback`, `default`, `invalid`,
    `credit` (only what was said of later turns). ``time`` is when it was admitted.

    ``objective`` says which loss it is for. ``context`` are interactions that it only refers to: one that is corrected,
    or two that are compared; each may be admitted for itself, too. Without ``interactions`` the material is in the
    feedback; ``version`` is the policy version that it is taken to be from, -1: any. ``bucket``: the
    kind of prompt, where values are tracked. ``group``: what answers have in common that are compared with each other;
    ``origin``: episode and request of such an answer, for turns of one episode are not; of posted turns, their episode
    and their items.

    ``weight`` scales its advantages: ``share``, what it weighs beside the rest of its episode (0: of an earlier build,
    as 1), times less than 1 where a source that is not known yet judged. ``compared`` is what sources
    said and what the reference keys said of the same: ``(key, reward, reward)``.

    ``judges`` are all keys whose feedback the reward comes from, ``askers`` those that the answers were served to,
    ``users`` whose conversations they are from where there may be several; empty: ``user``. ``refused`` are turns of
    the same episode that are never trained on, by id, and why.
    """

    ordinal: int
    interactions: dict[str, int]
    feedback: dict[str, int]
    reward: float
    lag: int
    key_id: str
    user: str
    reason: str
    time: float
    objective: Objective = "policy"
    context: dict[str, int] = {}
    judges: list[str] = []
    askers: list[str] = []
    version: int = -1
    bucket: str = ""
    users: list[str] = []
    weight: float = 1.0
    compared: list[tuple[str, float, float]] = []
    group: str = ""
    origin: list[str] = []
    share: float = 0.0
    refused: dict[str, str] = {}


class Admitted(Event, frozen=True, kw_only=True, tag=True):
    """Live interactions were admitted to training: one draw each, opened in the same decision.

    Below ``low_interactions`` and ``low_feedback`` (sequences) everything is decided: a new leader reads from there.
    """

    admissions: list[Admission]
    low_interactions: int
    low_feedback: int


class Quarantined(Event, frozen=True, kw_only=True, tag=True):
    """Feedback is held back until somebody releases or drops it: id -> sequence in FEEDBACK."""

    items: dict[str, int]


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


class SealedGroup(msgspec.Struct, frozen=True, array_like=True):
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


class Hyperparameters(msgspec.Struct, frozen=True, array_like=True):
    """What an update takes from the settings: peak learning rate, weight of the KL, length of the run.

    ``kl_coef`` is None without a KL and where the trainer adapts it; ``max_updates`` None where only the data ends it.
    """

    learning_rate: float
    kl_coef: float | None
    max_updates: int | None


class Tracking(msgspec.Struct, frozen=True, array_like=True):
    """What a batch adds to tracked values; not what they are then, for a batch before it may be refused.

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
    """What the batch adds to what is tracked of kinds of prompts, once it is trained."""


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

    ``figures`` are those metrics of the update that decide on the promotion of its version.
    """

    number: int
    revision: int
    version: int
    digest: str
    trainer_epoch: int
    figures: dict[str, float] = {}


class Promoted(Event, frozen=True, kw_only=True, tag=True):
    """``version``, whose weights batch ``number`` made, is served from now on. Only of jobs with a promotion gate.

    ``figures`` is what was measured of it; ``reason`` is initial, passed, canary timed out, by request, rolled back, or
    measured: it was served already, and only now its held-out reward is known.
    """

    version: int
    number: int
    digest: str
    reason: str
    figures: dict[str, float] = {}


class PromotionRefused(Event, frozen=True, kw_only=True, tag=True):
    """``version`` is not served: ``reason`` names the bounds that it breaks, ``figures`` is what was measured of it."""

    version: int
    number: int
    reason: str
    figures: dict[str, float] = {}


class CanaryBegun(Event, frozen=True, kw_only=True, tag=True):
    """``version`` kept every bound on ``figures``: it answers ``share`` of the conversations until it is decided on.

    ``served``: the version that answers the others. Nothing is sealed until ``Promoted``, ``PromotionRefused`` or a
    fork ends it.
    """

    version: int
    number: int
    digest: str
    served: int
    share: float
    figures: dict[str, float] = {}


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """What one conversation, or where there is no credit over turns one answer of it, earned while a version was tried.

    ``interactions`` are its answers, all by the version of its arm; ``judges``, ``askers`` and ``users`` own it, as in
    ``Admission``.
    """

    conversation: str
    is_canary: bool
    reward: float
    interactions: list[str]
    judges: list[str]
    askers: list[str]
    users: list[str]


class CanaryJudged(Event, frozen=True, kw_only=True, tag=True):
    """Conversations of both arms were judged while ``version`` is tried."""

    version: int
    judged: list[Judged]


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


AnyEvent = (
    JobStarted | SettingsChanged | Redrawn | Drawn | Admitted | Dropped | BatchSealed | BatchRefused | BatchTrained
    | Checkpointed | BestCheckpoint | LineageForked | PhaseChanged | Finished | Promoted | PromotionRefused
    | Quarantined | CanaryBegun | CanaryJudged
)  # fmt: skip

_decoder = msgspec.msgpack.Decoder(list[AnyEvent])


def encode_events(events: Sequence[Event]) -> bytes:
    """Bytes of one ledger entry: the events of one atomic decision, in order."""
    return msgspec.msgpack.encode(list(events))


def decode_events(data: bytes) -> list[Event]:
    """Inverse of ``encode_events``.

    Raises:
        ProtocolError: not a ledger entry of this version.
    """
    try:
        return list(_decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"ledger entry does not decode: {error}") from None
