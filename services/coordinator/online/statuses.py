"""Tracks the status of feedback and interactions: derives it from ledger events, and remembers final ones.

Pure. A new leader restores final statuses from the ledger, and from DECISIONS those that no fact explains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.turns import DISCONNECTED, MAX_SEQ, Turn, canonical_id
from penstock.shared.protocol.events import Admission, Admitted, BatchTrained, Dropped, Event, LineageForked
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import TOO_LATE, Feedback, FeedbackStatus, InteractionStatus, StatusName

__all__ = [
    "ADMITTED",
    "CONSUMED",
    "NOTHING_RECOVERED",
    "DecidedNames",
    "FinalStatuses",
    "RecoveredDecisions",
    "RefusedInteractions",
    "feedback_status",
    "feedback_statuses",
    "interaction_statuses",
    "refused_statuses",
    "same_reason",
]

ADMITTED = "admitted"
QUARANTINE_PREFIX = "quarantine_"
"""Prefix of the reasons for which the quarantine rejects an item."""
RETRACTED_PREFIX = "by "
"""Prefix of the reason of a retracted item; the id of its retraction follows."""
MAX_RECOVERED = 500_000
"""Items, and interactions, that a new leader recovers: the newest ones."""
UNCOUNTED = frozenset({"rejected", "expired"})
"""Final statuses of items that do not count. A retraction is read again: the item it retracts may still arrive."""
COUNTED = frozenset({ADMITTED, "trained"})
MAX_DECIDED = 100_000
"""Decided interactions and episodes, beyond those that the ledger names, that a leader remembers."""
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


def feedback_statuses(events: Iterable[Event], state: LedgerState) -> list[FeedbackStatus]:
    """Derive statuses of feedback from committed events; ``state`` is the ledger after them."""
    return [
        feedback_status(
            name, end.status, end.reason or _admission_rule(admission), end.time,
            [*admission.interactions, *admission.context],
            ordinal=admission.ordinal, batch=end.batch, version=end.version,
        )
        for admission, end in _ends_of(events, state)
        for name in admission.feedback
    ]  # fmt: skip


def interaction_statuses(events: Iterable[Event], state: LedgerState) -> list[InteractionStatus]:
    """Derive statuses of interactions from committed events; ``state`` is the ledger after them."""
    admissions = (one for event in events if isinstance(event, Admitted) for one in event.admissions)
    refused = [status for one in admissions for status in refused_statuses(one.refused, one.time)]
    return refused + [
        InteractionStatus(
            interaction=name, status=end.status, reason=end.reason or _admission_rule(admission),
            ordinal=admission.ordinal, batch=end.batch, version=end.version, time=end.time,
        )
        for admission, end in _ends_of(events, state)
        for name in admission.interactions
    ]  # fmt: skip


class _DrawEnd(NamedTuple):
    """Status that an event gives to draws."""

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
    """Return the rule of an admission, and its loss if that is not the policy loss."""
    return admission.reason if admission.objective == "policy" else f"{admission.objective}: {admission.reason}"


class RefusedInteractions:
    """Collects refused interactions until the leader publishes them; an admission names those refused with it."""

    def __init__(self) -> None:
        self._found: list[InteractionStatus] = []

    def add(self, reasons: Mapping[str, str], time: float) -> None:
        """Refuse these interactions (canonical ids), each for its reason."""
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
    """Map each turn's interaction to one reason."""
    return {canonical_id(turn.interaction.id): reason for turn in turns}


@dataclass(frozen=True, slots=True)
class RecoveredDecisions:
    """Decisions of earlier leaders that no fact explains, because a stream or a buffer was full.

    Attributes:
        closed_episodes: decided posted episodes, see ``FateBatch.over``.
        feedback: final statuses of items: rejected, expired, retracted or admitted.
        interactions: reasons of interactions that are never trained.
        rejected_by_quarantine: items that the quarantine rejected, and when; senders may have revised them since.
    """

    closed_episodes: Sequence[tuple[str, str]] = ()
    feedback: Mapping[str, str] = field(default_factory=dict)
    interactions: Mapping[str, str] = field(default_factory=dict)
    rejected_by_quarantine: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        statuses: Iterable[FeedbackStatus],
        interactions: Iterable[InteractionStatus] = (),
        closed_episodes: Iterable[tuple[str, str]] = (),
    ) -> RecoveredDecisions:
        """Fold published statuses in their order. The ledger names admitted items only for a while."""
        newest, late = dict[str, FeedbackStatus](), set[str]()
        for status in statuses:
            if status.revision:  # the status concerns a late revision alone
                late.add(status.feedback)
            else:
                newest[status.feedback] = status
        ends = dict.fromkeys((name for name in late if name not in newest), ADMITTED)
        for status in newest.values():
            ends |= _final_statuses(status)
        first: dict[str, str] = {}
        for one in interactions:
            # Another worker may complete the answer of a disconnected client.
            if one.status == "rejected" and one.ordinal < 0 and one.reason != DISCONNECTED:
                first.setdefault(one.interaction, one.reason)
        return cls(
            closed_episodes=list(closed_episodes),
            feedback=_newest(ends.items()),
            interactions=_newest(first.items()),
            rejected_by_quarantine={
                name: status.time for name, status in newest.items() if _is_quarantine_rejection(status)
            },
        )


def _is_quarantine_rejection(status: FeedbackStatus) -> bool:
    return status.status in UNCOUNTED and status.ordinal < 0 and status.reason.startswith(QUARANTINE_PREFIX)


def _final_statuses(status: FeedbackStatus) -> dict[str, str]:
    """Return the final statuses that the newest status of an item implies."""
    if status.ordinal >= 0 or status.status in COUNTED:
        return {status.feedback: ADMITTED}
    if status.status in UNCOUNTED and not _is_quarantine_rejection(status):
        return {status.feedback: status.status}
    if status.status == "retracted" and status.reason.startswith(RETRACTED_PREFIX):  # the retraction has met its item
        return {status.feedback: status.status, status.reason.removeprefix(RETRACTED_PREFIX): status.status}
    return {}


def _newest(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    return dict(list(found)[-MAX_RECOVERED:])


NOTHING_RECOVERED = RecoveredDecisions()


class DecidedNames:
    """Names and reasons of what is decided; the oldest ones are dropped, unless they are pinned."""

    def __init__(self) -> None:
        self._pinned: dict[str, str] = {}
        self._newest: OrderedDict[str, str] = OrderedDict()

    def pin(self, names: Iterable[str], reason: str) -> None:
        """Keep these names for good: a leader must never decide again on what the ledger names."""
        self._pinned.update(dict.fromkeys(names, reason))

    def pin_all(self, reasons: Mapping[str, str]) -> None:
        """Keep these names for good, each with its own reason."""
        self._pinned.update(reasons)

    def get(self, name: str) -> str | None:
        """Return the reason of a decision, or None if the name is undecided or unknown."""
        return self._pinned.get(name, self._newest.get(name))

    def __contains__(self, name: str) -> bool:
        return name in self._pinned or name in self._newest

    def __getitem__(self, name: str) -> str:
        return self._pinned[name] if name in self._pinned else self._newest[name]

    def __setitem__(self, name: str, reason: str) -> None:
        self._newest[name] = reason
        if len(self._newest) > MAX_DECIDED:
            self._newest.popitem(last=False)

    def update(self, reasons: Mapping[str, str]) -> None:
        """Add all of these."""
        for name, reason in reasons.items():
            self[name] = reason

    def discard(self, name: str) -> None:
        """Make a name undecided again, unless it is pinned."""
        self._newest.pop(name, None)


class FinalStatuses:
    """Final statuses: all that the ledger names, and the newest others.

    Attributes:
        targets: reasons by interaction or episode.
    """

    def __init__(self) -> None:
        self.targets = DecidedNames()
        self._feedback = DecidedNames()
        """By item: its final status, and the sequence of the newest message that counted."""

    def restore(self, state: LedgerState, recovered: RecoveredDecisions) -> None:
        """Add the admissions that the ledger still names, and the decisions recovered from DECISIONS."""
        self.targets.pin_all(recovered.interactions)
        self._feedback.pin_all({item: _final_status(how, MAX_SEQ) for item, how in recovered.feedback.items()})
        for admission in state.admissions.values():
            self.targets.update(admission.refused)
            self.targets.pin(admission.interactions, CONSUMED)
            self._pin_admitted(admission.feedback)
        self.targets.pin(state.consumed, CONSUMED)
        self._pin_admitted(state.used)
        self._feedback.update(
            {item: _final_status("rejected", MAX_SEQ) for _, item in recovered.closed_episodes if item}
        )

    def _pin_admitted(self, admitted: Mapping[str, int]) -> None:
        for name, seq in admitted.items():
            self._feedback.pin([name], _final_status(ADMITTED, seq))

    def on_admitted(self, admissions: Iterable[Admission]) -> None:
        """Record admissions that the ledger now holds."""
        for admission in admissions:
            self.targets.update(dict.fromkeys(admission.interactions, CONSUMED))
            for name, seq in admission.feedback.items():
                self.record(name, ADMITTED, seq)

    def record(self, name: str, how: str, seq: int) -> None:
        """Record the final status of an item; ``seq`` is the sequence of its newest message."""
        self._feedback[name] = _final_status(how, seq)

    def __contains__(self, name: str) -> bool:
        """Return True if an item of feedback has a final status."""
        return name in self._feedback

    def status_of_late_revision(self, seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        """Return the status of a revision that came after the item's final status; nothing for a message read again."""
        counted = int(self._feedback[item.id].rpartition(" ")[2])
        if not item.revision or (item.seq or seq) <= counted:
            return []
        return [feedback_status(item.id, "rejected", TOO_LATE, now, revision=item.revision)]

    def retraction_refusal(self, name: str) -> str:
        """Return the reason for which a retraction of an item with a final status is refused."""
        how = self._feedback[name].partition(" ")[0]
        return CONSUMED if how == ADMITTED else f"already_{how}"


def _final_status(how: str, seq: int) -> str:
    return f"{how} {seq}"
