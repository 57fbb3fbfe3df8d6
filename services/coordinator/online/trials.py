"""Collects the results of live conversations in a canary trial until the ledger records them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.services.coordinator.online.admission import Decision, refusal_of
from penstock.services.coordinator.online.fairness import Owners, OwnerShares
from penstock.services.coordinator.online.turns import Turn, canonical_id, episode_key
from penstock.services.coordinator.training.decision import Draft
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.canary import CanaryConfig
from penstock.shared.protocol.events import CanaryBegun, CanaryJudged, Judged
from penstock.shared.protocol.live.interaction import CANARY

__all__ = ["TrialSample", "TrialSamples", "trial_sample_of"]

MAX_SAMPLES = 50_000
"""Maximum number of samples that wait for the next decision; above this the oldest ones are dropped."""


@dataclass(frozen=True, slots=True)
class TrialSample:
    """Result of an episode whose answers all came from ``version``; ``started`` is the time of its first request."""

    version: int
    started: float
    judged: Judged

    def belongs_to(self, canary: CanaryBegun) -> bool:
        """Return True if the sample counts in the trial ``canary``.

        The version of the sample's arm must have answered. An episode that the served version answered must also have
        started since the trial began.
        """
        if self.judged.is_canary:
            return self.version == canary.version
        return self.version == canary.served and self.started >= canary.time


def trial_sample_of(
    job: OnlineJob, turns: Sequence[Turn], decisions: Sequence[Decision], judges: Collection[str]
) -> TrialSample | None:
    """Return the sample of a settled episode, or None if the job runs no trials or the episode is not comparable.

    An episode is comparable if, apart from the trial, it could be trained, if one version answered all of it, and if
    its feedback is complete.
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
    if any(refusal_of(one, job) for one in asked):  # in both arms, this also excludes what only imitation may use
        return None
    askers = sorted({interaction.key_id for interaction in interactions})
    judged = Judged(
        episode_key(interactions[0]), is_canary, sum(decision.reward for decision in decisions),
        [canonical_id(interaction.id) for interaction in interactions], sorted(judges) or askers, askers,
        sorted({interaction.user for interaction in interactions}),
    )  # fmt: skip
    return TrialSample(versions.pop(), min(interaction.started for interaction in interactions), judged)


class TrialSamples:
    """Samples (results of episodes in a canary trial) that the ledger does not record yet."""

    def __init__(self, job: OnlineJob) -> None:
        self._job = job
        self._samples: dict[str, TrialSample] = {}
        """Samples by the first interaction of their episode; new feedback replaces a sample until it is recorded."""

    def update(self, first: str, sample: TrialSample | None) -> None:
        """Store the sample of the episode that begins with the interaction ``first``; None removes the episode's
        sample."""
        if sample is None:
            self._samples.pop(first, None)
            return
        self._samples[first] = sample
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[next(iter(self._samples))]

    def discard_recorded(self, state: LedgerState) -> None:
        """Drop the samples that are recorded or belong to no running trial."""
        canary = state.canary
        if self._samples:
            self._samples = {
                name: sample
                for name, sample in self._samples.items()
                if canary is not None and name not in state.judged and sample.belongs_to(canary)
            }

    def draft(self, draft: Draft) -> None:
        """Add the new samples of both arms of a canary trial to ``draft``. Call this first: once ``draft`` has raised
        the low-water marks, the streams may purge the samples' interactions.

        In each arm no owner has more than its share of the conversations needed, as in a batch.
        """
        state, config = draft.state, self._job.online.canary
        canary = state.canary
        if canary is None or config is None:
            return
        new = [
            sample.judged
            for name, sample in self._samples.items()
            if name not in state.judged and sample.belongs_to(canary)
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
        shares = {arm: OwnerShares(self._job.online, size) for arm, size in sizes.items()}
        known: set[tuple[bool, str]] = set()
        for one in state.judged.values():
            if (one.is_canary, one.conversation) not in known:
                known.add((one.is_canary, one.conversation))
                shares[one.is_canary].add(_owners(one))
        chosen = []
        for one in new:
            arm = one.is_canary, one.conversation
            if arm in known or shares[one.is_canary].try_add([_owners(one)]):
                known.add(arm)
                chosen.append(one)
        return chosen


def _owners(one: Judged) -> Owners:
    return Owners(tuple(one.judges), tuple(one.askers), tuple(one.users))
