"""Tracks statuses of feedback and interactions: derives them from ledger events, and keeps the final ones. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.services.coordinator.online.turns import DISCONNECTED, MAX_SEQ, Turn, canonical_id
from penstock.services.coordinator.training.decided import (
    ADMITTED,
    QUARANTINE_PREFIX,
    RETRACTED_BY,
    RETRACTS,
    final_ids,
    is_quarantine_rejection,
    reasons_of,
)
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchTrained,
    Decided,
    Dropped,
    EndedFeedback,
    EndedInteractions,
    Event,
    LineageForked,
    PackedIds,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import (
    TOO_LATE,
    Feedback,
    FeedbackStatus,
    InteractionStatus,
    StatusName,
    bare_id,
)

__all__ = [
    "ADMITTED",
    "CONSUMED",
    "DecidedNames",
    "FinalStatuses",
    "RefusedInteractions",
    "UnrecordedDecisions",
    "feedback_status",
    "feedback_statuses",
    "interaction_statuses",
    "quarantine_rejections",
    "refused_statuses",
    "same_reason",
]

MAX_IDS = 5_000
"""Maximum number of items in one ledger entry: an item takes less than 100 bytes, and an entry holds up to 1 MiB."""
FINAL = frozenset({"rejected", "expired", "retracted"})
"""Statuses of feedback that ends without training; the ledger records them in ``Decided`` events."""
MAX_DECIDED = 100_000
"""Maximum number of names that a ``DecidedNames`` keeps besides the pinned ones; above this it drops the oldest."""
CONSUMED = "late_after_training"


def feedback_status(
    feedback: str, status: StatusName, reason: str, time: float, interactions: Sequence[str] = (), *,
    ordinal: int = -1, batch: int = 0, version: int = 0, revision: int = 0,
) -> FeedbackStatus:  # fmt: skip
    """Build one status of an item of feedback."""
    return FeedbackStatus(
        feedback=feedback, status=status, reason=reason, interactions=list(interactions), ordinal=ordinal, batch=batch,
        version=version, time=time, revision=revision,
    )  # fmt: skip


def feedback_statuses(events: Sequence[Event], state: LedgerState) -> list[FeedbackStatus]:
    """Derive the statuses of feedback items from committed events; ``state`` already includes these events."""
    ended = [
        feedback_status(name, _status_name(one.status), reason, one.time or event.time, revision=one.revision)
        for event in events
        if isinstance(event, Decided)
        for one in event.feedback
        for name, reason in reasons_of(one)
    ]
    return ended + [
        feedback_status(
            name, end.status, end.reason or _admission_rule(admission), end.time,
            [*admission.interactions, *admission.context],
            ordinal=admission.ordinal, batch=end.batch, version=end.version,
        )
        for admission, end in _ends_of(events, state)
        for name in admission.feedback
    ]  # fmt: skip


def interaction_statuses(events: Sequence[Event], state: LedgerState) -> list[InteractionStatus]:
    """Derive the statuses of interactions from committed events; ``state`` already includes these events."""
    admissions = (one for event in events if isinstance(event, Admitted) for one in event.admissions)
    refused = [status for one in admissions for status in refused_statuses(one.refused, one.time)]
    refused += [
        status
        for event in events
        if isinstance(event, Decided)
        for one in event.interactions
        for status in refused_statuses(dict.fromkeys(one.ids.unpack(), one.reason), event.time)
    ]
    return refused + [
        InteractionStatus(
            interaction=name, status=end.status, reason=end.reason or _admission_rule(admission),
            ordinal=admission.ordinal, batch=end.batch, version=end.version, time=end.time,
        )
        for admission, end in _ends_of(events, state)
        for name in admission.interactions
    ]  # fmt: skip


class _DrawEnd(NamedTuple):
    """Status that a ledger event gives to the draws ``ordinals``, and thus to the feedback and interactions of these
    draws."""

    ordinals: Sequence[int]
    status: Literal["admitted", "rejected", "trained"]
    reason: str
    time: float
    batch: int = 0
    version: int = 0


def _ends_of(events: Iterable[Event], state: LedgerState) -> Iterator[tuple[Admission, _DrawEnd]]:
    for event in events:
        end = _end_of(event, state)
        for ordinal in end.ordinals if end is not None else ():
            if end is not None and (admission := state.admissions.get(ordinal)) is not None:
                yield admission, end


def _end_of(event: Event, state: LedgerState) -> _DrawEnd | None:
    match event:
        case Admitted():
            return _DrawEnd([admission.ordinal for admission in event.admissions], "admitted", "", event.time)
        case Dropped() if not event.redraw:
            return _DrawEnd(_ordinals(event.draws), "rejected", event.reason, event.time)
        case BatchTrained():
            draws = state.batches[event.number].draws if event.number in state.batches else ()
            return _DrawEnd(_ordinals(draws), "trained", "", event.time, event.number, event.version)
        case LineageForked() if not event.redraw:
            return _DrawEnd(_ordinals(event.draws), "rejected", "rolled_back", event.time)
        case LineageForked():
            reopened = sorted(draw.ordinal for draw in state.open if draw.n)
            return _DrawEnd(reopened, "admitted", "rolled_back", event.time)
        case _:
            return None


def _ordinals(draws: Iterable[Draw]) -> list[int]:
    return [draw.ordinal for draw in draws]


def _admission_rule(admission: Admission) -> str:
    """Return the reason of an admission, prefixed with the name of its loss unless that is the policy loss."""
    return admission.reason if admission.objective == "policy" else f"{admission.objective}: {admission.reason}"


class RefusedInteractions:
    """Collects refused interactions until the leader records them in the ledger.

    Turns that are refused while other turns of their episode are admitted are not collected: the admission names them.
    """

    def __init__(self) -> None:
        self._found: list[InteractionStatus] = []

    def add(self, reasons: Mapping[str, str], time: float) -> None:
        """Add refused interactions; ``reasons`` maps their canonical ids to the reasons."""
        self._found += refused_statuses(reasons, time)

    def drain(self) -> list[InteractionStatus]:
        """Return all collected statuses, and clear them."""
        found, self._found = self._found, []
        return found


def refused_statuses(reasons: Mapping[str, str], time: float) -> list[InteractionStatus]:
    """Build the statuses of interactions that are never trained."""
    return [
        InteractionStatus(interaction=name, status="rejected", reason=reason, time=time)
        for name, reason in reasons.items()
    ]


def same_reason(turns: Iterable[Turn], reason: str) -> dict[str, str]:
    """Return ``reason`` for each turn, by the canonical id of its interaction."""
    return {canonical_id(turn.interaction.id): reason for turn in turns}


def _status_name(status: str) -> StatusName:
    assert status in FINAL, status
    return status  # type: ignore[return-value]


def quarantine_rejections(state: LedgerState) -> dict[str, float]:
    """Return, for each item that the quarantine rejected, the time of the rejection. The quarantine ignores revisions
    that were received up to then, and judges later ones anew."""
    found = [one for block in state.decided for one in block.feedback if is_quarantine_rejection(one)]
    return {name: one.time for one in sorted(found, key=lambda one: one.time) for name in one.ids.unpack()}


class UnrecordedDecisions:
    """Collects final statuses and closed episodes that the ledger does not record yet."""

    def __init__(self) -> None:
        self._feedback: dict[str, FeedbackStatus] = {}
        """Newest final status of each item of feedback."""
        self._late: list[FeedbackStatus] = []
        """Statuses of revisions that arrived after the final status of their item."""
        self._interactions: dict[str, InteractionStatus] = {}
        """First status of each interaction."""
        self._episodes: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._feedback or self._late or self._interactions or self._episodes)

    def __contains__(self, item: str) -> bool:
        """Return True if an item of feedback has a final status that the ledger does not record yet."""
        return item in self._feedback

    def add(self, statuses: Iterable[FeedbackStatus]) -> dict[str, FeedbackStatus | None]:
        """Take the final statuses of ``statuses`` into this collection. Return the items that changed: each with its
        newest open status, or None if it is final now. A late revision is taken too, and does not change its item."""
        others: dict[str, FeedbackStatus | None] = {}
        for status in statuses:
            if status.revision:
                self._late.append(status)
            elif status.status in FINAL:
                self._feedback[status.feedback], others[status.feedback] = status, None
            else:
                others[status.feedback] = status
        return others

    def add_interactions(self, statuses: Iterable[InteractionStatus]) -> None:
        """Add refused interactions."""
        for status in statuses:
            self._interactions.setdefault(status.interaction, status)

    def close_episodes(self, digests: Iterable[bytes]) -> None:
        """Add closed posted episodes, each given by its ``episode_digest``."""
        self._episodes += digests

    def drain_statuses(self) -> tuple[list[FeedbackStatus], list[InteractionStatus]]:
        """Return the collected statuses of feedback and of interactions; clear the whole collection, including closed
        episodes."""
        found = [*self._feedback.values(), *self._late], list(self._interactions.values())
        self._feedback, self._late, self._interactions, self._episodes = {}, [], {}, []
        return found

    def drain(self, *, epoch: int, now: float, read_to: tuple[int, int]) -> list[Decided]:
        """Return ``Decided`` events for all that was collected, each small enough for one ledger entry; clear the
        collection.

        ``read_to``: stream sequence numbers from which the leader reads on in INTERACTIONS and FEEDBACK.
        """
        episodes = self._episodes
        feedback, interactions = self.drain_statuses()
        size = max(len(feedback), len(interactions), len(episodes))
        parts = (slice(start, start + MAX_IDS) for start in range(0, size, MAX_IDS))
        return [
            Decided(
                writer_epoch=epoch, time=now, feedback=_packed_feedback(feedback[part]),
                interactions=_packed_interactions(interactions[part]), episodes=b"".join(episodes[part]),
                read_to=read_to,
            )
            for part in parts
        ]  # fmt: skip


def _packed_feedback(statuses: Iterable[FeedbackStatus]) -> list[EndedFeedback]:
    found: dict[tuple[str, str, int, float], tuple[list[str], list[str]]] = {}
    for one in statuses:
        reason, other = _split_reason(one)
        time = one.time if reason.startswith(QUARANTINE_PREFIX) else 0.0
        ids, others = found.setdefault((one.status, reason, one.revision, time), ([], []))
        ids.append(one.feedback)
        others += [other] if other else []
    return [EndedFeedback(PackedIds.of(ids), *key, PackedIds.of(others)) for key, (ids, others) in found.items()]


def _split_reason(status: FeedbackStatus) -> tuple[str, str]:
    """Split the reason of a status that a retraction caused into ``(kind, id of the other item)``. For the retracted
    item, the other item is the retraction; for the retraction, it is the retracted item. For other statuses return
    ``(reason, '')``.

    A retraction is split only if both ids are canonical UUIDs, because ``PackedIds`` keeps only such ids in order.
    """
    kind, _, other = status.reason.partition(" ")
    is_retraction = status.status == "retracted" and kind in (RETRACTED_BY, RETRACTS)
    is_packed = is_retraction and all(bare_id(name) == name for name in (status.feedback, other))
    return (kind, other) if is_packed else (status.reason, "")


def _packed_interactions(statuses: Iterable[InteractionStatus]) -> list[EndedInteractions]:
    found: dict[str, list[str]] = {}
    for one in statuses:
        found.setdefault(one.reason, []).append(one.interaction)
    return [EndedInteractions(PackedIds.of(names), reason) for reason, names in found.items()]


class DecidedNames(dict[str, str]):
    """Maps decided names (ids of interactions, episodes or items) to reasons. Pinned names stay; of the others, the
    oldest are dropped.

    A dict subclass for speed: a new leader may look up a million waiting items several times each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._newest: OrderedDict[str, None] = OrderedDict()
        """Names that are not pinned, the oldest first."""

    def pin(self, names: Iterable[str], reason: str) -> None:
        """Keep ``names`` permanently, because a leader must never decide again on names in the ledger."""
        self.pin_all(dict.fromkeys(names, reason))

    def pin_all(self, reasons: Mapping[str, str]) -> None:
        """Keep the names in ``reasons`` permanently, each with its own reason."""
        super().update(reasons)
        for name in self._newest.keys() & reasons.keys():
            del self._newest[name]

    def __setitem__(self, name: str, reason: str) -> None:
        if name in self and name not in self._newest:
            return  # pinned
        super().__setitem__(name, reason)
        self._newest[name] = None
        if len(self._newest) > MAX_DECIDED:
            super().__delitem__(self._newest.popitem(last=False)[0])

    def add_all(self, reasons: Mapping[str, str]) -> None:
        """Add names that are not pinned, each with its reason."""
        for name, reason in reasons.items():
            self[name] = reason

    def discard(self, name: str) -> None:
        """Make a name undecided again, unless it is pinned."""
        if name in self._newest:
            del self._newest[name]
            super().__delitem__(name)


class FinalStatuses:
    """Final statuses of feedback, interactions and episodes: all that the ledger had when this leader took over, and
    the newest of those that came later.

    Attributes:
        targets: reason for which each interaction or episode was decided.
        feedback: item -> text of its final status, a space, and the stream sequence number of the newest message that
        counted.
    """

    def __init__(self) -> None:
        self.targets, self.feedback = DecidedNames(), DecidedNames()

    def restore(self, state: LedgerState) -> None:
        """Load the decisions that the ledger records, and keep them permanently."""
        refused = [one for block in state.decided for one in block.interactions]
        for one in reversed(refused):  # the first reason of an interaction counts
            if one.reason != DISCONNECTED:  # another worker may complete the answer of a disconnected client
                self.targets.pin(one.ids.unpack(), one.reason)
        ends = final_ids(one for block in state.decided for one in block.feedback)
        texts = {how: _final_status(how, MAX_SEQ) for how in {*ends.values()}}
        self.feedback.pin_all({item: texts[how] for item, how in ends.items()})
        for admission in state.admissions.values():
            self.targets.add_all(admission.refused)
            self.targets.pin(admission.interactions, CONSUMED)
            self._pin_admitted(admission.feedback)
        self.targets.pin(state.consumed, CONSUMED)
        self._pin_admitted(state.used)

    def _pin_admitted(self, admitted: Mapping[str, int]) -> None:
        for name, seq in admitted.items():
            self.feedback.pin([name], _final_status(ADMITTED, seq))

    def on_admitted(self, admissions: Iterable[Admission]) -> None:
        """Record the final statuses of admitted items, once the ledger has recorded ``admissions``."""
        for admission in admissions:
            self.targets.add_all(dict.fromkeys(admission.interactions, CONSUMED))
            for name, seq in admission.feedback.items():
                self.record(name, ADMITTED, seq)

    def record(self, name: str, how: str, seq: int) -> None:
        """Record ``how``, the final status of the item ``name``; ``seq`` is the stream sequence number of its newest
        message."""
        self.feedback[name] = _final_status(how, seq)

    def status_of_late_revision(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        """Return the status of a revision that arrived after its item's final status; [] if the leader has read this
        message before."""
        counted = int(self.feedback[item.id].rpartition(" ")[2])
        if not item.revision or (item.seq or seq) <= counted:
            return []
        return [feedback_status(item.id, "rejected", TOO_LATE, now, revision=item.revision)]

    def retraction_refusal(self, name: str) -> str:
        """Return why the retraction of an item with a final status is refused."""
        how = self.feedback[name].partition(" ")[0]
        return CONSUMED if how == ADMITTED else f"already_{how}"


def _final_status(how: str, seq: int) -> str:
    return f"{how} {seq}"
