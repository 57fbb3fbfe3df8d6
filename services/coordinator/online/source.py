"""The part of live interactions in each decision: which are admitted, and which admitted ones make a batch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.decision import Draft, Progress
from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online.credit import Trajectory
from penstock.services.coordinator.online.matching import Matching
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, Drawn
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import bare_id

__all__ = ["LiveSource", "within_shares"]

KEPT_S = 7 * 86400.0
"""Deadline of an admitted draw: its group is made here and now, so this says only that it is not lost."""
SMALLEST = 2
"""A batch of one has nothing to be compared with."""


class LiveSource:
    """Draws are what was admitted: each is opened with its admission, in one decision.

    Args:
        matching: what is undecided; read here, changed only by facts.
    """

    redraws = False

    def __init__(self, job: OnlineJob, matching: Matching) -> None:
        self._job, self._matching = job, matching
        self.no_signal = ""
        """Why the newest batch taught nothing, or ''."""

    # -- admission ---------------------------------------------------------------------------------------------------

    def draw(self, draft: Draft) -> None:
        """Admit what is settled, the oldest first, while there is room in flight and in the byte budget."""
        state, job = draft.state, self._job
        start = state.start_version(state.next_number)
        room = min(job.max_draws - len(state.open), draft.byte_credits())
        remaining = draft.remaining_batches()
        if remaining is not None:
            unsealed = sum(1 for info in state.open.values() if not info.batch)
            room = min(room, max(0, remaining) * job.groups_per_batch - unsealed)
        chosen = self._chosen(state, start, room)
        if not chosen:
            return
        ready = [trajectory for key in chosen for trajectory in self._matching.ready[key]]
        admissions = [
            _admission(state.next_ordinal + place, trajectory, start, draft.now)
            for place, trajectory in enumerate(ready)
        ]
        low_interactions, low_feedback = self._matching.lowest(without=chosen)
        epoch = draft.run.writer_epoch
        draft.add(
            Drawn(
                writer_epoch=epoch, time=draft.now, start=state.next_ordinal, stop=state.next_ordinal + len(ready),
                min_version=max(0, start - job.train.max_lag), deadline=draft.now + KEPT_S,
            )
        )  # fmt: skip
        draft.add(
            Admitted(
                writer_epoch=epoch, time=draft.now, admissions=admissions, low_interactions=low_interactions,
                low_feedback=low_feedback,
            )
        )  # fmt: skip

    def _chosen(self, state: LedgerState, start: int, room: int) -> list[str]:
        """Episodes to admit whole, so that what was said of one is decided at once."""
        online, most = self._job.online, self._job.max_draws
        held = [state.admissions[d.ordinal] for d, info in state.open.items() if not info.batch]
        keys, users = Counter(a.key_id for a in held), Counter(a.user for a in held)
        chosen: list[str] = []
        ready = self._matching.ready
        for name in sorted(ready, key=lambda name: min(turn.seq for t in ready[name] for turn in t.turns)):
            found = ready[name]
            if len(found) > room and (chosen or len(found) <= most or room < most):
                continue
            if any(start - trajectory.min_version > self._job.train.max_lag for trajectory in found):
                continue  # the next sweep refuses it
            owners = [(trajectory.key_id, trajectory.user) for trajectory in found]
            if not _fits(keys, [key for key, _ in owners], online.max_share_per_key * most):
                continue
            if not _fits(users, [user for _, user in owners], online.max_share_per_user * most):
                continue
            keys.update(key for key, _ in owners)
            users.update(user for _, user in owners)
            chosen.append(name)
            room -= len(found)
        return chosen

    def learnt(self, number: int, state: LedgerState) -> None:
        """Batch ``number`` was trained: whether there was something to learn."""
        batch = state.batches.get(number)
        draws = batch.draws if batch is not None else ()
        rewards = {state.admissions[draw.ordinal].reward for draw in draws if draw.ordinal in state.admissions}
        same = f"all {len(draws)} rewards of batch {number} were {next(iter(rewards)):g}" if len(rewards) == 1 else ""
        self.no_signal = same

    # -- batches -----------------------------------------------------------------------------------------------------

    def choose(self, draft: Draft, ready: Sequence[Draw]) -> list[Draw] | None:
        """A full batch, or a smaller one once the oldest has waited `online.max_wait_s`; the oldest policy first."""
        state, job = draft.state, self._job
        if not ready:
            return None
        oldest = min(state.admissions[draw.ordinal].time for draw in ready)
        due = draft.now - oldest >= job.online.max_wait_s
        size = job.groups_per_batch
        if len(ready) < size and not due:
            return None
        ordered = sorted(ready, key=lambda draw: (draft.candidates[draw].header.min_version, draw))
        chosen = within_shares(job, ordered, state.admissions, size)
        if len(chosen) < size and not (due and len(chosen) >= max(SMALLEST, job.train.minibatches)):
            return None
        return sorted(chosen)

    def idle(self, state: LedgerState) -> Progress:
        """Waiting for people is no fault, but it is no progress either."""
        if self.no_signal:
            return "False", "NoSignal", self.no_signal
        return "False", "WaitingForFeedback", self.waiting(state)

    def waiting(self, state: LedgerState) -> str:
        """What is there and what is missing."""
        unsealed = sum(1 for info in state.open.values() if not info.batch)
        matching = self._matching
        return (
            f"{unsealed} of {self._job.groups_per_batch} trajectories are admitted; {matching.num_waiting} interactions"
            f" wait for feedback, {matching.num_parked} items of feedback for their interaction"
        )


def within_shares(
    job: OnlineJob, ordered: Sequence[Draw], admissions: Mapping[int, Admission], size: int
) -> list[Draw]:
    """The longest batch of at most ``size`` in which nobody has more than their share, earlier draws first."""
    online = job.online
    for target in range(min(size, len(ordered)), 0, -1):
        keys: Counter[str] = Counter()
        users: Counter[str] = Counter()
        chosen: list[Draw] = []
        for draw in ordered:
            admission = admissions[draw.ordinal]
            if keys[admission.key_id] + 1 > online.max_share_per_key * target:
                continue
            if users[admission.user] + 1 > online.max_share_per_user * target:
                continue
            keys[admission.key_id] += 1
            users[admission.user] += 1
            chosen.append(draw)
            if len(chosen) == target:
                return chosen
    return []


def _fits(taken: Counter[str], new: Iterable[str], most: float) -> bool:
    return all(taken[name] + count <= most for name, count in Counter(new).items())


def _admission(ordinal: int, trajectory: Trajectory, start: int, now: float) -> Admission:
    return Admission(
        ordinal=ordinal,
        interactions={bare_id(t.interaction.id) or t.interaction.id: t.seq for t in trajectory.turns},
        feedback={name: item.seq for name, item in trajectory.feedback.items()},
        reward=trajectory.reward,
        lag=start - trajectory.min_version,
        key_id=trajectory.key_id,
        user=trajectory.user,
        reason=trajectory.reason,
        time=now,
    )
