"""The part of live interactions in each decision: which are admitted, and which admitted ones make a batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.services.coordinator.decision import Draft, Progress
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.batches import batch_of, others_per_batch
from penstock.services.coordinator.online.bounds import Bounds, most_others
from penstock.services.coordinator.online.credit import Trajectory
from penstock.services.coordinator.online.matching import ERASED, Matching
from penstock.services.coordinator.online.material import Offer
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.shares import owners_of
from penstock.services.coordinator.online.sources import comparisons, weight_of
from penstock.services.coordinator.online.values import bucket_of, origin_of, siblings_of, values_of
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, Drawn, Tracking
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import bare_id

__all__ = ["LiveSource"]

KEPT_S = 7 * 86400.0
"""Deadline of an admitted draw: its group is made here and now, so this says only that it is not lost."""


@dataclass(slots=True)
class Room:
    """Draws that may be opened for the policy loss, for other losses, and (bytes) for all of them together."""

    policy: int
    others: int
    groups: int = 0

    @property
    def is_full(self) -> bool:
        """Nothing fits any more."""
        return self.groups <= 0 or (self.policy <= 0 and self.others <= 0)

    def fits(self, job: OnlineJob, policy: int, others: int) -> bool:
        """Whether so many fit; more than there is room for at all do where there is nothing else."""
        policy, others = min(policy, job.max_draws), min(others, most_others(job))
        fits = policy <= max(0, self.policy) and others <= max(0, self.others)
        return fits and policy + others <= self.groups

    def take(self, policy: int, others: int) -> None:
        """So many are opened."""
        self.policy -= policy
        self.others -= others
        self.groups -= policy + others


class LiveSource:
    """Draws are what was admitted: each is opened with its admission, in one decision.

    Args:
        matching: what is undecided; read here, changed only by facts.
        quarantine: what is held back; recorded before anything is admitted without it.
    """

    redraws = False

    def __init__(self, job: OnlineJob, matching: Matching, quarantine: Quarantine | None = None) -> None:
        self._job, self._matching = job, matching
        self._quarantine = quarantine or Quarantine(job, matching.on_feedback)
        self.no_signal = ""
        """Why the newest batch taught nothing, or ''."""
        self.erased: set[int] = set()
        """Ordinals of what was admitted of users who wanted to be forgotten."""

    # -- admission ---------------------------------------------------------------------------------------------------

    @property
    def refuses(self) -> bool:
        """See ``DrawSource.refuses``."""
        return bool(self.erased)

    def refusal(self, draw: Draw) -> str:
        """See ``DrawSource.refusal``."""
        return ERASED if draw.ordinal in self.erased else ""

    def draw(self, draft: Draft) -> None:
        """Admit what is settled, the oldest first, while there is room in flight and in the byte budget."""
        self._quarantine.draft(draft)
        state, job = draft.state, self._job
        start = state.start_version(state.next_number)
        room = self._room(draft)
        bounds = Bounds.of(job)
        for draw, info in state.open.items():
            if not info.batch:
                admission = state.admissions[draw.ordinal]
                bounds.count(owners_of(admission), admission.objective)
        episodes = self._episodes(start, room, bounds)
        offers = self._offers(state, room, bounds)
        ready = [trajectory for key in episodes for trajectory in self._matching.ready[key]]
        if not ready and not offers:
            return
        first = state.next_ordinal
        admissions = [_admission(job, draft, first + n, one, start) for n, one in enumerate(ready)]
        first += len(ready)
        admissions += [offer.admission(first + place, start, draft.now) for place, offer in enumerate(offers)]
        chosen = [*episodes, *(name for offer in offers for name in offer.names)]
        low_interactions, low_feedback = self._matching.lowest(without=chosen)
        epoch = draft.run.writer_epoch
        draft.add(
            Drawn(
                writer_epoch=epoch, time=draft.now, start=state.next_ordinal,
                stop=state.next_ordinal + len(admissions), min_version=max(0, start - job.train.max_lag),
                deadline=draft.now + KEPT_S,
            )
        )  # fmt: skip
        draft.add(
            Admitted(
                writer_epoch=epoch, time=draft.now, admissions=admissions, low_interactions=low_interactions,
                low_feedback=min(low_feedback, self._quarantine.lowest),
            )
        )  # fmt: skip

    def _room(self, draft: Draft) -> Room:
        """Draws that may be opened: as many as the lag bound lets be in flight, and as the run still needs."""
        state, job, remaining = draft.state, self._job, draft.remaining_batches()
        limit = others_per_batch(job)
        policy = {draw for draw in state.open if state.admissions[draw.ordinal].objective == "policy"}
        room = Room(job.max_draws - len(policy), most_others(job) - (len(state.open) - len(policy)))
        if remaining is not None:
            unsealed = {draw for draw, info in state.open.items() if not info.batch}
            room.policy = min(room.policy, max(0, remaining) * job.groups_per_batch - len(unsealed & policy))
            room.others = min(room.others, max(0, remaining) * limit - len(unsealed - policy))
        room.groups = draft.byte_credits()
        return room

    def _episodes(self, start: int, room: Room, bounds: Bounds) -> list[str]:
        """Episodes to admit whole, so that what was said of one is decided at once."""
        job = self._job
        chosen: list[str] = []
        ready = self._matching.ready
        for name in sorted(ready, key=lambda name: min(trajectory.first for trajectory in ready[name])):
            if room.is_full:
                break
            found = ready[name]
            policy = [trajectory for trajectory in found if trajectory.objective == "policy"]
            if not room.fits(job, len(policy), len(found) - len(policy)):
                continue
            if any(start - trajectory.min_version > job.train.max_lag for trajectory in policy):
                continue  # the next sweep refuses it
            if not bounds.take([(trajectory.owners, trajectory.objective) for trajectory in found]):
                continue
            chosen.append(name)
            room.take(len(policy), len(found) - len(policy))
        return chosen

    def _offers(self, state: LedgerState, room: Room, bounds: Bounds) -> list[Offer]:
        """Material to admit, what was posted first."""
        chosen: list[Offer] = []
        start = state.start_version(state.next_number)
        for offers in self._matching.offers.together():
            if room.is_full:
                break
            policy = [offer for offer in offers if offer.objective == "policy"]
            if any(offer.settled_at != (start, state.version) for offer in policy):
                continue  # the next sweep settles it anew
            if any(start - offer.version > self._job.train.max_lag for offer in offers if offer.version is not None):
                continue  # all batches that the lag bound allows are sealed: it waits until one is trained
            need = len(policy), len(offers) - len(policy)
            if room.fits(self._job, *need) and bounds.take([(offer.owners, offer.objective) for offer in offers]):
                chosen += offers
                room.take(*need)
        return chosen

    def learnt(self, number: int, state: LedgerState) -> None:
        """Batch ``number`` was trained: whether there was something to learn."""
        batch = state.batches.get(number)
        draws = batch.draws if batch is not None else ()
        found = [state.admissions[draw.ordinal] for draw in draws if draw.ordinal in state.admissions]
        rewards = {admission.reward for admission in found if admission.objective == "policy"}
        if found and not any(admission.weight for admission in found):
            self.no_signal = f"all {len(draws)} trajectories of batch {number} were masked"
            return
        same = f"all {len(draws)} rewards of batch {number} were {next(iter(rewards)):g}" if len(rewards) == 1 else ""
        self.no_signal = same

    def judge(self, draft: Draft) -> None:
        """What live conversations say of a version on trial; before ``draw``, whose mark passes them."""
        self._matching.trials.draft(draft)

    # -- batches -----------------------------------------------------------------------------------------------------

    def choose(self, draft: Draft, ready: Sequence[Draw]) -> list[Draw] | None:
        """A full batch, or a smaller one once the oldest has waited `online.max_wait_s`; the oldest policy first."""
        return batch_of(self._job, draft, ready) or None

    def values(self, draft: Draft, chosen: Sequence[Draw]) -> tuple[dict[Draw, float], Tracking]:
        """Baselines of the groups of a batch, and what it adds to the tracked values of their kinds."""
        return values_of(self._job, draft.state, chosen)

    def idle(self, state: LedgerState) -> Progress:
        """Waiting for people is no fault, but it is no progress either."""
        if state.canary is not None:
            return "False", "Canary", f"version {state.canary.version} is on trial: nothing is trained meanwhile"
        if self.no_signal:
            return "False", "NoSignal", self.no_signal
        return "False", "WaitingForFeedback", self.waiting(state)

    def waiting(self, state: LedgerState) -> str:
        """What is there and what is missing."""
        unsealed = sum(1 for info in state.open.values() if not info.batch)
        matching = self._matching
        text = (
            f"{unsealed} of {self._job.groups_per_batch} trajectories are admitted; {matching.num_waiting} interactions"
            f" wait for feedback, {len(matching.parked)} items of feedback for their interaction"
        )
        if unsealed < self._job.groups_per_batch:
            return text
        return f"{text}; nobody may have more than their share of a batch, so others must be heard"


def _admission(job: OnlineJob, draft: Draft, ordinal: int, trajectory: Trajectory, start: int) -> Admission:
    agreements = draft.state.agreements
    judges, share, said = (
        trajectory.owners.judges,
        trajectory.share,
        (item.feedback for item in trajectory.feedback.values()),
    )
    return Admission(
        ordinal=ordinal,
        interactions={bare_id(t.interaction.id) or t.interaction.id: t.seq for t in trajectory.turns},
        feedback={name: item.seq for name, item in trajectory.feedback.items()},
        reward=trajectory.reward,
        lag=start - trajectory.min_version,
        key_id=trajectory.key_id,
        user=trajectory.user,
        reason=trajectory.reason,
        time=draft.now,
        objective=trajectory.objective,
        bucket=bucket_of(job, trajectory.turns[0].interaction.tags),
        judges=list(judges),
        askers=list(trajectory.owners.askers),
        weight=weight_of(job, agreements, judges, trajectory.reason) * share if trajectory.is_policy else 1.0,
        compared=comparisons(job, said),
        group=(group := siblings_of(job, trajectory.turns[0].interaction)),
        origin=origin_of(trajectory.turns[0].interaction) if group else [],
        share=share,
        refused=trajectory.refused,
    )
