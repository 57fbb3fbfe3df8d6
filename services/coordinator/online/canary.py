"""What live conversations say of a version on trial, until it stands in the ledger. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.services.coordinator.decision import Draft
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.admission import Decision, refusal_of
from penstock.services.coordinator.online.credit import Turn
from penstock.services.coordinator.online.names import canonical, episode_of
from penstock.services.coordinator.online.shares import Owners, Shares
from penstock.shared.config.canary import CanaryConfig
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import CanaryBegun, CanaryJudged, Judged
from penstock.shared.protocol.interaction import CANARY

__all__ = ["Earned", "Trials", "earned_by"]

MAX_EARNED = 50_000
"""Conversations that wait for the next decision; beyond, the oldest ones do not count."""


@dataclass(frozen=True, slots=True)
class Earned:
    """What an episode earned that one version answered; ``started``: when it was asked for the first of its answers."""

    version: int
    started: float
    judged: Judged

    def belongs_to(self, canary: CanaryBegun) -> bool:
        """Whether it says something of this trial: by the version of its arm, and since it began."""
        if self.judged.is_canary:
            return self.version == canary.version
        return self.version == canary.served and self.started >= canary.time


def earned_by(
    job: OnlineJob, turns: Sequence[Turn], decisions: Sequence[Decision], judges: Collection[str]
) -> Earned | None:
    """What a settled episode counts as; None where its job tries nothing, or it cannot be compared.

    Compared is what could be trained on if it were not for the trial, of one version, with everything said of it.
    """
    if job.online.canary is None or not all(decision.is_judged for decision in decisions):
        return None
    interactions = [turn.interaction for turn in turns]
    versions = {span.version for interaction in interactions for span in interaction.spans}
    arms = {interaction.untrainable == CANARY for interaction in interactions}
    if len(versions) != 1 or len(arms) != 1:
        return None
    is_canary = arms.pop()
    asked = [replace(one, untrainable="") for one in interactions] if is_canary else interactions
    if any(refusal_of(one, job) for one in asked):  # in either arm, also what only imitation may use
        return None
    askers = sorted({interaction.key_id for interaction in interactions})
    judged = Judged(
        episode_of(interactions[0]), is_canary, sum(decision.reward for decision in decisions),
        [canonical(interaction.id) for interaction in interactions], sorted(judges) or askers, askers,
        sorted({interaction.user for interaction in interactions}),
    )  # fmt: skip
    return Earned(versions.pop(), min(interaction.started for interaction in interactions), judged)


class Trials:
    """Episodes that were judged and are not recorded yet."""

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        self._earned: dict[str, Earned] = {}
        """By first interaction; one that is judged anew before it is recorded counts with the newest word."""

    def take(self, first: str, earned: Earned | None) -> None:
        """An episode was looked at, ``first`` of its interactions; None: it says nothing, or nothing any more."""
        if earned is None:
            self._earned.pop(first, None)
            return
        self._earned[first] = earned
        if len(self._earned) > MAX_EARNED:
            del self._earned[next(iter(self._earned))]

    def forget(self, state: LedgerState) -> None:
        """Drop what is recorded, and what says nothing of the present trial."""
        canary = state.canary
        if self._earned:
            self._earned = {
                name: earned
                for name, earned in self._earned.items()
                if canary is not None and name not in state.judged and earned.belongs_to(canary)
            }

    def draft(self, draft: Draft) -> None:
        """Record what both arms earned, before anything moves the mark below which nothing is read again.

        In each arm nobody owns more than their share of the conversations that are needed, as in a batch.
        """
        state, config = draft.state, self._job.online.canary
        canary = state.canary
        if canary is None or config is None:
            return
        new = [
            earned.judged
            for name, earned in self._earned.items()
            if name not in state.judged and earned.belongs_to(canary)
        ]
        if new:
            new = self._within_shares(config, canary, state, new)
        if new:
            draft.add(
                CanaryJudged(
                    writer_epoch=draft.run.writer_epoch, time=draft.now, version=canary.version, judged=new,
                )
            )  # fmt: skip

    def _within_shares(
        self, config: CanaryConfig, canary: CanaryBegun, state: LedgerState, new: Sequence[Judged]
    ) -> list[Judged]:
        sizes = {True: config.conversations, False: int(config.conversations * (1 - canary.share) / canary.share)}
        shares = {arm: Shares(self._job.online, size) for arm, size in sizes.items()}
        known: set[tuple[bool, str]] = set()
        for one in state.judged.values():
            if (one.is_canary, one.conversation) not in known:
                known.add((one.is_canary, one.conversation))
                shares[one.is_canary].count(_owners(one))
        chosen = []
        for one in new:
            arm = one.is_canary, one.conversation
            if arm in known or shares[one.is_canary].take([_owners(one)]):
                known.add(arm)
                chosen.append(one)
        return chosen


def _owners(one: Judged) -> Owners:
    return Owners(tuple(one.judges), tuple(one.askers), tuple(one.users))
