"""Drafts the parts of each decision that concern live data: admissions, batches and their baselines. Pure.

The results depend only on the ledger and the undecided data, so a replay finds the same ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.services.coordinator.online.examples import OffPolicyExample
from penstock.services.coordinator.online.fairness import (
    InFlightBounds,
    OwnerShares,
    auxiliary_per_batch,
    comparisons,
    has_several_owners,
    max_auxiliary_in_flight,
    owners_of,
    weight_of,
)
from penstock.services.coordinator.online.matching import ERASED, Matching
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.turns import Trajectory, episode_key
from penstock.services.coordinator.training.decision import Draft, Progress
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.algorithms.baseline import EVERYTHING, Tracked, mean_without, sums_of, track, value_of
from penstock.shared.config.algorithm import ReinforcePPConfig, ValueTracker
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Drawn, Tracking
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Interaction, bare_id

__all__ = [
    "ASSUMED",
    "LiveSource",
    "baselines_of",
    "batch_of",
    "bucket_of",
    "flaws_of_baselines",
    "origin_of",
    "siblings_of",
    "tracked_by",
    "within_shares",
]

GROUP = "group_id"
"""Tag that groups the interactions and episodes of one task."""


def tracked_by(job: OnlineJob) -> ValueTracker | None:
    """Return the job's configuration for tracking mean rewards (as baselines), or None if the job tracks none."""
    return job.algorithm.baseline if isinstance(job.algorithm, ReinforcePPConfig) else None


def bucket_of(job: OnlineJob, tags: Mapping[str, str]) -> str:
    """Return the name of the bucket in which the mean reward of interactions with ``tags`` is tracked."""
    config = tracked_by(job)
    kind = tags.get(config.tag, EVERYTHING) if config is not None and config.tag is not None else EVERYTHING
    return kind if config is not None and kind in config.buckets else EVERYTHING


def siblings_of(job: OnlineJob, interaction: Interaction) -> str:
    """Return the name of the set of answers to one task that are compared with each other; '' if the job compares no
    answers."""
    config = tracked_by(job)
    if config is None or not config.siblings:
        return ""
    named = interaction.tags.get(GROUP)
    return interaction.request if named is None else f"{interaction.key_id} {named}"


def origin_of(interaction: Interaction) -> list[str]:
    """Return ``[episode, request]`` of an interaction. Answers to different requests of one episode are not
    compared."""
    return [episode_key(interaction), interaction.request]


def _sibling_baselines(found: Mapping[Draw, Admission]) -> dict[Draw, float]:
    """Return, for each draw with siblings in the batch (other answers to the same task), their mean reward as its
    baseline."""
    groups: defaultdict[str, list[Admission]] = defaultdict(list)
    episodes: defaultdict[tuple[str, str], list[Admission]] = defaultdict(list)
    for one in found.values():
        groups[one.group].append(one)
        if one.origin:
            episodes[one.group, one.origin[0]].append(one)
    baselines: dict[Draw, float] = {}
    for draw, one in found.items():
        if one.group:
            same = episodes[one.group, one.origin[0]] if one.origin else [one]  # a posted answer stands alone
            own = [other.reward for other in same if other is one or other.origin != one.origin]
            mean = mean_without([other.reward for other in groups[one.group]], own)
            if mean is not None:
                baselines[draw] = mean
    return baselines


def baselines_of(job: OnlineJob, state: LedgerState, chosen: Sequence[Draw]) -> tuple[dict[Draw, float], Tracking]:
    """Return ``(baseline of each draw, update of the tracked values)`` for the next sealed batch.

    Baselines depend on all earlier batches, those included that are sealed but not trained yet.
    """
    config = tracked_by(job)
    if config is None:
        return {}, Tracking()
    tracked: dict[str, Tracked] = dict(state.values)
    for number in sorted(number for number in state.sealed if number < state.next_number):
        before = state.sealed[number].tracking
        tracked |= track(tracked, before.rewards, keep=before.keep)
    found = {draw: state.admissions[draw.ordinal] for draw in chosen}
    policy = {draw: admission for draw, admission in found.items() if admission.objective == "policy"}
    baselines = {
        draw: value_of(tracked, admission.bucket, value=config.value, weight=config.weight)
        for draw, admission in policy.items()
    } | _sibling_baselines(policy)
    rewards = [(admission.bucket, admission.reward) for admission in policy.values()]
    return baselines, Tracking(sums_of(rewards), config.keep)


def flaws_of_baselines(job: OnlineJob, state: LedgerState, batch: BatchSealed) -> list[str]:
    """Return a list with one flaw if a batch's baselines do not follow from ``state``, the ledger before the batch;
    else []."""
    baselines, tracking = baselines_of(job, state, [group.draw for group in batch.groups])
    sealed = {group.draw: group.baseline for group in batch.groups if group.baseline is not None}
    same = sealed == baselines and batch.tracking == tracking
    return [] if same else [f"batch {batch.number}: its baselines do not follow from the batches before it"]


DRAW_DEADLINE_S = 7 * 86400.0
"""Deadline of an admitted draw in seconds; it must exceed the time that the leader needs to make its group."""
ASSUMED = "assumed"
"""Reason of an admission whose answer has an unknown sampler and is treated as sampled by the newest policy."""
MIN_BATCH = 2
"""Minimum batch size, because a single trajectory has no baseline."""


@dataclass(slots=True)
class FreeSlots:
    """Numbers of draws that may be opened for the policy loss and for auxiliary losses.

    ``groups`` bounds their total by the byte budget.
    """

    policy: int
    auxiliary: int
    groups: int = 0

    @property
    def is_full(self) -> bool:
        """True if no further draw fits."""
        return self.groups <= 0 or (self.policy <= 0 and self.auxiliary <= 0)

    def fits(self, job: OnlineJob, policy: int, auxiliary: int) -> bool:
        """Return True if there are free slots for both: ``policy`` further draws for the policy loss, and ``auxiliary``
        further draws for auxiliary losses.

        More draws of a kind than the job's limit fit only while no draw of that kind is in flight.
        """
        policy, auxiliary = min(policy, job.max_draws), min(auxiliary, max_auxiliary_in_flight(job))
        fits = policy <= max(0, self.policy) and auxiliary <= max(0, self.auxiliary)
        return fits and policy + auxiliary <= self.groups

    def take(self, policy: int, auxiliary: int) -> None:
        """Occupy slots: ``policy`` of them for the policy loss, ``auxiliary`` for auxiliary losses."""
        self.policy -= policy
        self.auxiliary -= auxiliary
        self.groups -= policy + auxiliary


class LiveSource:
    """Source of an online job's draws: one decision opens a draw and admits the data that the draw trains on.

    Args:
        matching: undecided interactions and feedback; read here, changed only by facts.
        quarantine: held feedback; each decision records it before it admits other data.
    """

    redraws = False

    def __init__(self, job: OnlineJob, matching: Matching, quarantine: Quarantine | None = None) -> None:
        self._job, self._matching = job, matching
        self._quarantine = quarantine or Quarantine(job, matching.on_feedback)
        self.no_signal = ""
        """Reason why the newest batch had no learning signal, or '' if it had one."""
        self.erased: set[int] = set()
        """Ordinals of admitted draws whose data a user's deletion covers."""

    # -- admission -----------------------------------------------------------------------------------------------------

    @property
    def refuses(self) -> bool:
        """True if a user's deletion covers an admitted draw. If not, ``refusal`` returns '' for every draw."""
        return bool(self.erased)

    def refusal(self, draw: Draw) -> str:
        """Return the reason why an open draw must not be trained (its data was deleted), or '' if it may be trained."""
        return ERASED if draw.ordinal in self.erased else ""

    def draw(self, draft: Draft) -> None:
        """Admit ready episodes and examples, oldest first, as far as the lag bound and the byte budget allow."""
        self._quarantine.draft(draft)
        state, job = draft.state, self._job
        start = state.start_version(state.next_number)
        room = self._room(draft)
        bounds = InFlightBounds.of(job)
        for draw, info in state.open.items():
            if not info.batch:
                admission = state.admissions[draw.ordinal]
                bounds.add(owners_of(admission), admission.objective)
        episodes = self._episodes(start, room, bounds)
        examples = self._examples(state, room, bounds)
        ready = [trajectory for key in episodes for trajectory in self._matching.ready[key]]
        if not ready and not examples:
            return
        first = state.next_ordinal
        admissions = [admission_of(job, draft, first + n, one, start) for n, one in enumerate(ready)]
        first += len(ready)
        admissions += [example.admission(first + place, start, draft.now) for place, example in enumerate(examples)]
        chosen = [*episodes, *(name for example in examples for name in example.feedback_ids)]
        low_interactions, low_feedback = self._matching.low_water(without=chosen)
        epoch = draft.run.writer_epoch
        draft.add(
            Drawn(
                writer_epoch=epoch, time=draft.now, start=state.next_ordinal,
                stop=state.next_ordinal + len(admissions), min_version=max(0, start - job.train.max_lag),
                deadline=draft.now + DRAW_DEADLINE_S,
            )
        )  # fmt: skip
        draft.add(
            Admitted(
                writer_epoch=epoch, time=draft.now, admissions=admissions, low_interactions=low_interactions,
                low_feedback=min(low_feedback, self._quarantine.lowest_seq),
            )
        )  # fmt: skip

    def _room(self, draft: Draft) -> FreeSlots:
        """Return how many draws may be opened within the lag bound, the batches left in the run and the byte budget."""
        state, job, remaining = draft.state, self._job, draft.remaining_batches()
        limit = auxiliary_per_batch(job)
        policy = {draw for draw in state.open if state.admissions[draw.ordinal].objective == "policy"}
        room = FreeSlots(job.max_draws - len(policy), max_auxiliary_in_flight(job) - (len(state.open) - len(policy)))
        if remaining is not None:
            unsealed = {draw for draw, info in state.open.items() if not info.batch}
            room.policy = min(room.policy, max(0, remaining) * job.groups_per_batch - len(unsealed & policy))
            room.auxiliary = min(room.auxiliary, max(0, remaining) * limit - len(unsealed - policy))
        room.groups = draft.byte_credits()
        return room

    def _episodes(self, start: int, room: FreeSlots, bounds: InFlightBounds) -> list[str]:
        """Return the keys of the ready episodes to admit, and occupy slots for them in ``room`` and ``bounds``.

        An episode is admitted as a whole, so that all feedback on it is decided at once.
        """
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
            if not bounds.try_add([(trajectory.owners, trajectory.objective) for trajectory in found]):
                continue
            chosen.append(name)
            room.take(len(policy), len(found) - len(policy))
        return chosen

    def _examples(self, state: LedgerState, room: FreeSlots, bounds: InFlightBounds) -> list[OffPolicyExample]:
        """Return the off-policy examples to admit, in the order of their posts, and occupy their slots."""
        chosen: list[OffPolicyExample] = []
        start = state.start_version(state.next_number)
        for examples in self._matching.examples.ready_together():
            if room.is_full:
                break
            policy = [example for example in examples if example.objective == "policy"]
            if any(example.settled_at != (start, state.version) for example in policy):
                continue  # the next sweep settles it again
            if any(
                start - example.version > self._job.train.max_lag for example in examples if example.version is not None
            ):
                continue  # the lag bound is used up by sealed batches: it waits until one is trained
            need = len(policy), len(examples) - len(policy)
            if room.fits(self._job, *need) and bounds.try_add(
                [(example.owners, example.objective) for example in examples]
            ):
                chosen += examples
                room.take(*need)
        return chosen

    def on_trained(self, number: int, state: LedgerState) -> None:
        """Set ``no_signal`` to the reason why batch ``number`` had no learning signal, or to ''."""
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
        """Add the samples of a canary trial to ``draft``; call before ``draw``, which may let the samples' data be
        purged."""
        self._matching.trials.draft(draft)

    # -- batches -------------------------------------------------------------------------------------------------------

    def choose(self, draft: Draft, ready: Sequence[Draw]) -> list[Draw] | None:
        """Return the draws of the next batch, or None if no batch is due; see ``batch_of``."""
        return batch_of(self._job, draft, ready) or None

    def values(self, draft: Draft, chosen: Sequence[Draw]) -> tuple[dict[Draw, float], Tracking]:
        """Return the baselines of a batch's draws, and the update of the tracked mean rewards by the batch."""
        return baselines_of(self._job, draft.state, chosen)

    def idle(self, state: LedgerState) -> Progress:
        """Report why nothing is trained: a canary trial, no learning signal, or missing feedback."""
        if state.canary is not None:
            return "False", "Canary", f"version {state.canary.version} is on trial: nothing is trained meanwhile"
        if self.no_signal:
            return "False", "NoSignal", self.no_signal
        return "False", "WaitingForFeedback", self.waiting(state)

    def waiting(self, state: LedgerState) -> str:
        """Describe the admitted trajectories and the waiting interactions and feedback, for users."""
        unsealed = sum(1 for info in state.open.values() if not info.batch)
        matching = self._matching
        text = (
            f"{unsealed} of {self._job.groups_per_batch} trajectories are admitted; {matching.num_waiting} interactions"
            f" wait for feedback, {len(matching.unmatched)} items of feedback for their interaction"
        )
        if unsealed < MIN_BATCH:
            return f"{text}; a batch has at least {MIN_BATCH}: one has nothing to be compared with"
        if unsealed < self._job.groups_per_batch:
            return text
        return f"{text}; no user may have more than their share of a batch, so feedback of others is needed"


def admission_of(job: OnlineJob, draft: Draft, ordinal: int, trajectory: Trajectory, start: int) -> Admission:
    """Build the ledger's record of a trajectory's admission as draw ``ordinal``.

    ``start`` is the version from which the next update starts.
    """
    agreements = draft.state.agreements
    judges, share, feedback = (
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
        compared=comparisons(job, feedback),
        group=(group := siblings_of(job, trajectory.turns[0].interaction)),
        origin=origin_of(trajectory.turns[0].interaction) if group else [],
        share=share,
        refused=trajectory.refused,
    )


def batch_of(job: OnlineJob, draft: Draft, ready: Sequence[Draw]) -> list[Draw]:
    """Return the draws of the next batch, or [] if no batch is due.

    A full batch has `train.batch_size` groups for the policy loss. A smaller batch is due once a group has waited
    `online.max_wait_s`. If the shares of owners are bounded, groups of two owners must have waited so long: otherwise
    the surplus of one owner would make every batch small. Groups for auxiliary losses join the batch. They form a batch
    of their own in two cases: a batch is due and the groups for the policy loss, if any, can wait for the next one; or
    no groups for the policy loss are ready, and the auxiliary ones fill their part. A job with a promotion gate has no
    batches without the policy loss, because its bounds may concern values that only the policy loss measures.
    """
    admissions, limit = draft.state.admissions, auxiliary_per_batch(job)
    policy = [draw for draw in ready if admissions[draw.ordinal].objective == "policy"]
    auxiliary = sorted(set(ready) - set(policy))
    times = ((draft.now - admissions[draw.ordinal].time, admissions[draw.ordinal]) for draw in ready)
    waited = [owners_of(admission) for age_s, admission in times if age_s >= job.online.max_wait_s]
    due = bool(waited) and has_several_owners(job.online, waited)
    own = _policy_part(job, draft, policy, due=due)
    alone = job.online.promotion is None and (due or (not policy and len(auxiliary) >= limit))
    if not own and not (alone and _can_wait(job, draft, policy)):
        return []
    shares = OwnerShares(job.online, limit, least=1)
    auxiliary = [draw for draw in auxiliary if shares.try_add([owners_of(admissions[draw.ordinal])])]
    size = len(own) + min(limit, len(auxiliary))
    return sorted(within_shares(job, [*own, *auxiliary], admissions, size, least=max(1, len(own))))


def _can_wait(job: OnlineJob, draft: Draft, policy: Sequence[Draw]) -> bool:
    """Return True if all groups of ``policy``, the ready draws for the policy loss, may still be trained one version
    later."""
    next_start = draft.state.start_version(draft.state.next_number) + 1
    return not any(draft.candidates[draw].is_stale(next_start, job.train.max_lag) for draw in policy)


def _policy_part(job: OnlineJob, draft: Draft, policy: Sequence[Draw], *, due: bool) -> list[Draw]:
    """Return the draws of the next batch for the policy loss, oldest policy version first, or [] if there are too few.

    The draws must fill the batch, unless a batch is ``due``.
    """
    size, admissions = job.groups_per_batch, draft.state.admissions
    ordered = sorted(policy, key=lambda draw: (draft.candidates[draw].header.min_version, draw))
    assumed = [draw for draw in ordered if admissions[draw.ordinal].reason == ASSUMED]
    left = set(assumed[int(job.online.posted.max_assumed_share * size) :])
    ordered = [draw for draw in ordered if draw not in left]
    if len(ordered) < size and not due:
        return []
    chosen = within_shares(job, ordered, admissions, size, least=1 if due else size)
    enough = len(chosen) >= (max(MIN_BATCH, job.train.minibatches) if due else size)
    return chosen if enough else []


def within_shares(
    job: OnlineJob, ordered: Sequence[Draw], admissions: Mapping[int, Admission], size: int, *, least: int = 1
) -> list[Draw]:
    """Return the longest batch in which no owner (API key or user) exceeds its share; [] if there is none.

    The batch has ``least`` to ``size`` draws, in the order of ``ordered``. Earlier draws are chosen first; a draw whose
    owner has no share left is skipped.
    """
    owners = {draw: owners_of(admissions[draw.ordinal]) for draw in ordered}
    for target in range(min(size, len(ordered)), least - 1, -1):
        shares = OwnerShares(job.online, target)
        chosen: list[Draw] = []
        for draw in ordered:
            if shares.try_add([owners[draw]]):
                chosen.append(draw)
            if len(chosen) == target:
                return chosen
    return []
