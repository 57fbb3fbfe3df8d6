"""What has its last fate: interactions and episodes, with the reason, and feedback. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.fates import fate
from penstock.services.coordinator.online.recalled import ADMITTED, Told
from penstock.services.coordinator.online.remembered import Remembered
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import TOO_LATE, Fate, Feedback

__all__ = ["CONSUMED", "Verdicts"]

CONSUMED = "late_after_training"
UNKNOWN = 1 << 62


class Verdicts:
    """All that the ledger names, and the newest of the rest.

    Attributes:
        targets: why an interaction, or an episode, is decided.
    """

    def __init__(self) -> None:
        self.targets = Remembered()
        self._feedback = Remembered()
        """By id: how it ended, and the sequence of the newest message that counted."""

    def recall(self, state: LedgerState, told: Told) -> None:
        """What the ledger has admitted, as far as it still names it, and what earlier leaders told."""
        self.targets.keep_all(told.interactions)
        self._feedback.keep_all({item: _end(how, UNKNOWN) for item, how in told.feedback.items()})
        for admission in state.admissions.values():
            self.targets.update(admission.refused)
            self.targets.keep(admission.interactions, CONSUMED)
            self._keep(admission.feedback)
        self.targets.keep(state.consumed, CONSUMED)
        self._keep(state.used)
        self._feedback.update({item: _end("rejected", UNKNOWN) for _, item in told.over if item})

    def _keep(self, admitted: Mapping[str, int]) -> None:
        for name, seq in admitted.items():
            self._feedback.keep([name], _end(ADMITTED, seq))

    def take(self, admissions: Iterable[Admission]) -> None:
        """These stand in the ledger now."""
        for admission in admissions:
            self.targets.update(dict.fromkeys(admission.interactions, CONSUMED))
            for name, seq in admission.feedback.items():
                self.end(name, ADMITTED, seq)

    def end(self, name: str, how: str, seq: int) -> None:
        """An item has its last fate; ``seq``: of the newest message that said it."""
        self._feedback[name] = _end(how, seq)

    def __contains__(self, name: str) -> bool:
        """Whether an item of feedback has its last fate."""
        return name in self._feedback

    def revised(self, seq: int, item: Feedback, now: float) -> list[Fate]:
        """What is told of the newer word of an item that has its last fate; nothing of a word that is read again."""
        counted = int(self._feedback[item.id].rpartition(" ")[2])
        if not item.revision or (item.seq or seq) <= counted:
            return []
        return [fate(item.id, "rejected", TOO_LATE, now, revision=item.revision)]

    def kept_from(self, name: str) -> str:
        """Why an item that has its last fate is not taken back."""
        how = self._feedback[name].partition(" ")[0]
        return CONSUMED if how == ADMITTED else f"already_{how}"


def _end(how: str, seq: int) -> str:
    return f"{how} {seq}"
