"""The ledger's state: the fold of a job's events. Pure; the same on every leader, in audits and in tests.

Life of a draw (every draw ends in exactly one terminal state)::

    Drawn / redraw ──► in flight ──► sealed ──► trained
                          │            │           │
                          ▼            ▼           ▼
                       dropped(reason) · refused · rolled_back

``drawn = trained + dropped + open`` holds after every event; ``open`` is an explicit set, not a remainder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.services.coordinator.training.decided import (
    DecidedBlock,
    block_of_admissions,
    block_of_decision,
    with_block,
)
from penstock.services.coordinator.training.draws import OpenDraw, TrainedBatch
from penstock.shared.algorithms.agreement import Paired, add_pairs
from penstock.shared.algorithms.baseline import track
from penstock.shared.config.jobs.amendable import TEMPERATURE
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchRefused,
    BatchSealed,
    BatchTrained,
    BestCheckpoint,
    CanaryBegun,
    CanaryJudged,
    Checkpointed,
    Decided,
    Drawn,
    Dropped,
    Event,
    Extended,
    Finished,
    JobStarted,
    Judged,
    LineageForked,
    PhaseChanged,
    Promoted,
    PromotionRefused,
    Quarantined,
    Redrawn,
    SettingsChanged,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.weights import short_digest

__all__ = ["HALTED", "LOGPROBS_DIFFER", "NO_SIGNAL", "WRONG_WEIGHTS", "LedgerState", "OpenDraw", "TrainedBatch", "fold"]

HALTED = "halted"
"""Code of a pause that the trainer requested."""
LOGPROBS_DIFFER = "logprobs_differ"
"""Drop reason: the posted log-probs are not those of the policy. The API key that posted them is distrusted from then
on."""
WRONG_WEIGHTS = "wrong_weights"
"""Drop reason: the weights that sampled the group are not those that the ledger has for their version number."""
KEPT_WEIGHTS = 256
"""Number of newest versions whose weight digests are kept: more than any lag bound."""
NO_SIGNAL = "no_signal"
"""Drop reason: the group has no learning signal (equal rewards, for example), so another draw replaced its draw."""


@dataclass(slots=True)
class LedgerState:
    """State of a job: the fold of all events in its ledger.

    Attributes:
        epoch: highest writer epoch seen.
        halted: why the trainer paused the job, until the phase changes.
        next_ordinal: first ordinal never drawn.
        open: draws that are not terminal.
        drawn, trained, dropped: counts of draws; ``dropped`` by reason.
        resampled: draws dropped for lack of signal since the newest batch was sealed.
        sealed: batches sealed and not yet trained, by number.
        revisions: highest revision sealed so far, by number of each batch that is not trained.
        batches: trained batches of this lineage that are still in the log, by number.
        last_trained: highest trained batch number; ``updates``: number of trained batches of this lineage.
        version, digest: the newest policy version and its weight digest.
        checkpoint: the newest one that exists; ``checkpoints``: number -> event, of this lineage; ``best``: the best of
            them by the metric that the job follows.
        settings: values of the changeable keys of the job file, for batches sealed from now on; ``applies_at``: number
            of updates before the first batch of the newest change, None without a change; ``generation``: job file
            generation of that change.
        environment: description (``EnvSpec``) of an embodied job's simulator by an env worker; else empty.
        replayed: dead letters whose prompts were drawn again.
        rolled_back: first and last batch number that each fork removed from the lineage.
        admissions: of an online job, by ordinal: the training data of open draws, and of draws trained since the
            newest checkpoint.
        consumed, used: admitted interactions and feedback, id -> stream sequence number, from ``read_from``
            (interactions, feedback) on; below these stream sequence numbers everything is decided.
        decided: live items that ended without training, and closed episodes, oldest first; see module ``decided``.
        values: tracked rewards by kind of prompt, after the newest trained batch.
        distrusted: keys that posted log-probs which are not the policy's.
        quarantined: feedback that was quarantined, id -> stream sequence number, from ``read_from`` on; released or
            not.
        agreements: agreement of each source of feedback with the reference keys, if the job has these.
        promoted: the served version, of a job with a promotion gate; ``refused``: the newest version if it was refused,
            as the ``num_refused``-th in a row; ``figures``: metrics of the newest update that decide on its promotion.
        canary: the version that a share of live traffic tries before it is served to all, or None; ``judged``: rewards
            of conversations of both arms since then, by their first interaction.
        weights: short digests of the newest ``KEPT_WEIGHTS`` published versions, by version: of the policy as engines
            get it, whole weights or an adapter, never of a critic.
        heard: highest stream sequence number in EXPERIENCE of a group that was ever sealed; groups of later draws are
            stored above it.
        forked: version that the newest fork began, -1 without one; ``fork_reason``: its reason; ``fork_request``: the
            operation that requested it, or ''.
        extensions: number of times that the job was continued after it had finished.
    """

    epoch: int = 0
    started: bool = False
    config_digest: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    applies_at: int | None = None
    generation: int = 0
    phase: str = "running"
    halted: str = ""
    finished: str = ""
    next_ordinal: int = 0
    drawn: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    resampled: int = 0
    open: dict[Draw, OpenDraw] = field(default_factory=dict)
    sealed: dict[int, BatchSealed] = field(default_factory=dict)
    revisions: dict[int, int] = field(default_factory=dict)
    batches: dict[int, TrainedBatch] = field(default_factory=dict)
    last_trained: int = 0
    updates: int = 0
    version: int = 0
    digest: str = ""
    trainer_epoch: int = 0
    checkpoint: Checkpointed | None = None
    checkpoints: dict[int, Checkpointed] = field(default_factory=dict)
    best: BestCheckpoint | None = None
    replayed: frozenset[int] = frozenset()
    rolled_back: tuple[tuple[int, int], ...] = ()
    admissions: dict[int, Admission] = field(default_factory=dict)
    consumed: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    read_from: tuple[int, int] = (1, 1)
    decided: tuple[DecidedBlock, ...] = ()
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    distrusted: frozenset[str] = frozenset()
    quarantined: dict[str, int] = field(default_factory=dict)
    agreements: dict[str, Paired] = field(default_factory=dict)
    promoted: Promoted | None = None
    refused: PromotionRefused | None = None
    num_refused: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    canary: CanaryBegun | None = None
    judged: dict[str, Judged] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    heard: int = 0
    forked: int = -1
    fork_request: str = ""
    fork_reason: str = ""
    extensions: int = 0

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[Draw]:
        """Return the open draws that no sealed batch contains, in draw order."""
        return sorted(draw for draw, info in self.open.items() if not info.batch)

    @property
    def next_number(self) -> int:
        """Number of the batch that is sealed next: the lowest number of a batch that is neither trained nor sealed."""
        number = self.last_trained + 1
        while number in self.sealed:
            number += 1
        return number

    @property
    def trainable(self) -> bool:
        """True if batch ``last_trained + 1`` is sealed. If the trainer refused it, later sealed batches wait until it
        is sealed again."""
        return self.last_trained + 1 in self.sealed

    def start_version(self, number: int) -> int:
        """Return the policy version from which the update of batch ``number`` starts."""
        return self.version + number - self.last_trained - 1

    @property
    def pinned(self) -> list[int]:
        """Numbers of the checkpoints that are kept at any age: the initial checkpoint, the best one, and the one from
        which the served version can be recomputed (``base_of``)."""
        served = self.base_of(self.promoted.number) if self.promoted is not None else None
        return sorted({0, *(c.number for c in (self.best, served) if c is not None)})

    def base_of(self, number: int) -> Checkpointed | None:
        """Return the newest checkpoint not after batch ``number``, from which the state after this batch can be
        recomputed; or None."""
        return self.checkpoints.get(max((n for n in self.checkpoints if n <= number), default=-1))

    def after(self, number: int) -> list[int]:
        """Return the numbers of the batches of this lineage that were trained after batch ``number``."""
        return [n for n in range(number + 1, self.last_trained + 1) if self.in_lineage(n)]

    def in_lineage(self, number: int) -> bool:
        """Return True if no fork has rolled batch ``number`` back."""
        return not any(first <= number <= last for first, last in self.rolled_back)

    @property
    def newest_batch(self) -> int:
        """Number of the trained batch that made the current weights. Just after a fork it is lower than
        ``last_trained``."""
        number = self.last_trained
        for first, last in reversed(self.rolled_back):
            number = first - 1 if first <= number <= last else number
        return number

    def update_index(self, number: int) -> int:
        """Return the number of updates of this lineage before batch ``number``. Schedules and evaluations use it as the
        batch's step."""
        return self.updates + number - self.last_trained - 1

    @property
    def reports_success(self) -> bool:
        """True if the job's simulator is known to report if a task is solved or not: ``EnvSpec.has_success``."""
        return bool(self.environment.get("has_success"))

    @property
    def reports_held_out_success(self) -> bool:
        """True if the simulator of held-out episodes is known to report if a task is solved or not. A ledger without a
        description of this simulator uses ``reports_success``."""
        return bool(self.environment.get("held_out_success", self.reports_success))

    def made_by_others(self, weights: Iterable[tuple[int, str]]) -> bool:
        """Return True if a pair ``(version, short digest)`` in ``weights`` contradicts the digest of this version in
        the ledger."""
        return any(self.weights.get(version, short) != short for version, short in weights)

    def balanced(self) -> bool:
        """Return True if ``drawn``, the number of all draws, is the sum of trained, dropped and open draws."""
        return self.drawn == self.trained + self.dropped.total() + len(self.open)

    # -- the fold ----------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Apply one event to the state. Assertions are internal invariants: a violation is a bug, not bad input."""
        assert event.writer_epoch >= self.epoch, f"epoch went back from {self.epoch} to {event.writer_epoch}"
        self.epoch = event.writer_epoch
        handler = _HANDLERS.get(type(event))
        assert handler is not None, f"unknown event {event!r}"
        handler(self, event)
        assert self.balanced(), f"ledger equation broken by {type(event).__name__}"

    def _job_started(self, event: JobStarted) -> None:
        self.started, self.config_digest, self.settings = True, event.config_digest, event.settings
        self.environment = event.environment

    def _settings_changed(self, event: SettingsChanged) -> None:
        assert event.number == self.next_number, "settings change at the boundary before the next batch"
        assert event.update_index == self.update_index(event.number)
        self.settings, self.applies_at, self.generation = event.settings, event.update_index, event.generation

    def _phase_changed(self, event: PhaseChanged) -> None:
        self.phase, self.halted = event.phase, event.reason if event.code == HALTED else ""

    def _finished(self, event: Finished) -> None:
        assert not self.open, "finished with open draws"
        self.finished = event.reason

    def _extended(self, event: Extended) -> None:
        assert self.finished, "only what has finished is extended"
        assert event.number == self.extensions + 1, "extensions are counted without gaps"
        self.finished, self.extensions = "", event.number

    def _drawn(self, event: Drawn) -> None:
        assert event.start == self.next_ordinal, "ordinals are allocated without gaps"
        for ordinal in range(event.start, event.stop):
            self._open(Draw(ordinal), event.min_version, event.deadline)
        self.next_ordinal = event.stop

    def _redrawn(self, event: Redrawn) -> None:
        assert event.draw.ordinal < self.next_ordinal, "only what was drawn is drawn again"
        assert event.letter not in self.replayed, f"dead letter {event.letter} is replayed once"
        self._open(event.draw, event.min_version, event.deadline)
        self.replayed |= {event.letter}

    def _open(self, draw: Draw, min_version: int, deadline: float) -> None:
        assert draw not in self.open, f"draw {draw} is open already"
        self.open[draw] = OpenDraw(min_version, deadline, 0, self.settings.get(TEMPERATURE), self.heard)
        self.drawn += 1

    def _admitted(self, event: Admitted) -> None:
        consumed, used = dict(self.consumed), dict(self.used)
        for admission in event.admissions:
            ordinal = admission.ordinal
            assert Draw(ordinal) in self.open, f"admission without a draw: {ordinal}"
            assert ordinal not in self.admissions, f"draw {ordinal} has an admission"
            assert not consumed.keys() & admission.interactions.keys(), f"draw {ordinal}: trained once already"
            assert not used.keys() & admission.feedback.keys(), f"draw {ordinal}: feedback counts once"
            self.admissions[ordinal] = admission
            consumed |= admission.interactions
            used |= admission.feedback
        self.agreements = add_pairs(self.agreements, (pair for one in event.admissions for pair in one.compared))
        self.read_from = (event.low_interactions, event.low_feedback)
        passed = [name for name, seq in used.items() if seq < event.low_feedback]
        block = block_of_admissions(event.admissions, passed)
        self.decided = with_block(self.decided, block, self.read_from)
        self.consumed = {name: seq for name, seq in consumed.items() if seq >= event.low_interactions}
        self.used = {name: seq for name, seq in used.items() if seq >= event.low_feedback}
        self.quarantined = {name: seq for name, seq in self.quarantined.items() if seq >= event.low_feedback}

    def _decided(self, event: Decided) -> None:
        self.decided = with_block(self.decided, block_of_decision(event), self.read_from)

    def _quarantined(self, event: Quarantined) -> None:
        self.quarantined = self.quarantined | event.items

    def _drop(self, draws: Iterable[Draw], reason: str) -> None:
        for draw in draws:
            del self.open[draw]
            self.dropped[reason] += 1

    def _dropped(self, event: Dropped) -> None:
        assert all(not self.open[draw].batch for draw in event.draws), "a sealed draw cannot be dropped"
        self._drop(event.draws, event.reason)
        self.dropped_tokens[event.reason] += sum(event.lengths)
        self.resampled += len(event.draws) if event.reason == NO_SIGNAL else 0
        if event.reason == LOGPROBS_DIFFER:
            self.distrusted |= {self.admissions[draw.ordinal].key_id for draw in event.draws}
        if event.redraw:
            for draw in event.draws:
                self._open(draw.again(), event.min_version, event.deadline)

    def _sealed(self, event: BatchSealed) -> None:
        assert event.number == self.next_number, f"batch {event.number} sealed out of turn"
        assert event.revision == self.revisions.get(event.number, 0) + 1, "revisions count up"
        assert event.start_version == self.start_version(event.number)
        opened = self.open
        for draw in [group.draw for group in event.groups]:
            info = opened[draw]
            assert not info.batch, f"draw {draw} is sealed already"
            opened[draw] = info.sealed_in(event.number)
        self.heard = max([self.heard, *(group.seq for group in event.groups)])
        self.sealed[event.number] = event
        self.revisions[event.number] = event.revision
        self.resampled = 0

    def _refused(self, event: BatchRefused) -> None:
        batch = self.sealed.pop(event.number)
        assert batch.revision == event.revision
        for group in batch.groups:
            self.open[group.draw] = self.open[group.draw].sealed_in(0)
        self._drop(event.bad, "refused")
        if event.redraw:
            for draw in event.bad:
                self._open(draw.again(), event.min_version, event.deadline)

    def _trained(self, event: BatchTrained) -> None:
        assert event.number == self.last_trained + 1, "batches are trained in order"
        batch = self.sealed.pop(event.number)
        assert batch.revision == event.revision, f"revision {event.revision} was refused or never sealed"
        assert event.version == batch.start_version + 1, "one version per update"
        draws = tuple(group.draw for group in batch.groups)
        for draw in draws:
            del self.open[draw]
        self.trained += len(draws)
        self.revisions.pop(event.number)
        seqs = tuple(group.seq for group in batch.groups)
        sizes = tuple(group.nbytes for group in batch.groups)
        self.batches[event.number] = TrainedBatch(
            draws, seqs, event.revision, event.version, event.digest, self.values, sizes if all(sizes) else ()
        )
        self.values = self.values | track(self.values, batch.tracking.rewards, keep=batch.tracking.keep)
        self.last_trained, self.updates = event.number, self.updates + 1
        self._publish(event.version, event.digest)
        self.figures = event.figures
        self.trainer_epoch = max(self.trainer_epoch, event.trainer_epoch)

    def _promoted(self, event: Promoted) -> None:
        assert event.version == self.version, "only the newest version has weights to serve"
        self.promoted, self.refused, self.num_refused, self.canary, self.judged = event, None, 0, None, {}

    def _promotion_refused(self, event: PromotionRefused) -> None:
        assert event.version == self.version, "an older version is decided already"
        self.refused, self.num_refused, self.canary, self.judged = event, self.num_refused + 1, None, {}

    def _canary_begun(self, event: CanaryBegun) -> None:
        assert event.version == self.version, "only the newest version is tried"
        assert not self.sealed, "the version that is tried keeps its weights"
        self.canary, self.judged = event, {}

    def _canary_judged(self, event: CanaryJudged) -> None:
        self.judged = {one.interactions[0]: one for one in event.judged} | self.judged

    def _checkpointed(self, event: Checkpointed) -> None:
        self.checkpoint = self.checkpoints[event.number] = event
        self.trainer_epoch = max(self.trainer_epoch, event.trainer_epoch)
        if event.number == 0:
            self._publish(event.version, event.digest)
        self.batches = {n: b for n, b in self.batches.items() if any(s >= event.low_seq for s in b.seqs)}
        if self.admissions:
            kept = {draw.ordinal for batch in self.batches.values() for draw in batch.draws}
            kept |= {draw.ordinal for draw in self.open}
            self.admissions = {ordinal: a for ordinal, a in self.admissions.items() if ordinal in kept}

    def _best_checkpoint(self, event: BestCheckpoint) -> None:
        assert event.number in self.checkpoints, f"no checkpoint {event.number} in this lineage"
        self.best = event

    def _forked(self, event: LineageForked) -> None:
        assert event.version > self.version, "a fork continues above the clock"
        redraw: list[Draw] = []
        lost = [n for n in self.batches if n >= event.from_batch]
        self.values = self.batches[lost[0]].values if lost else self.values
        for number in lost:
            batch = self.batches.pop(number)
            self.trained -= len(batch.draws)
            self.updates -= 1
            self.dropped["rolled_back"] += len(batch.draws)
            redraw += batch.draws
        for number in list(self.sealed):
            draws = [group.draw for group in self.sealed.pop(number).groups]
            self._drop(draws, "rolled_back")
            redraw += draws
        for draw in redraw if event.redraw else []:
            self._open(draw.again(), event.min_version, event.deadline)
        self.checkpoints = {n: c for n, c in self.checkpoints.items() if n < event.from_batch}
        if self.best is not None and self.best.number not in self.checkpoints:
            self.best = None
        if event.from_batch <= self.last_trained:
            self.rolled_back = (*self.rolled_back, (event.from_batch, self.last_trained))
        if self.checkpoint is not None and self.checkpoint.number >= event.from_batch:
            self.checkpoint = self.base_of(event.from_batch)
        self.refused, self.num_refused, self.figures, self.canary, self.judged = None, 0, {}, None, {}
        self.forked, self.fork_request, self.fork_reason = event.version, event.operation, event.reason
        self._publish(event.version, event.digest)
        self.trainer_epoch = max(self.trainer_epoch, event.trainer_epoch)

    def _publish(self, version: int, digest: str) -> None:
        """Make ``version``, whose weights have ``digest``, the newest policy version."""
        self.version, self.digest = version, digest
        known = {**self.weights, version: short_digest(digest)}
        self.weights = {v: known[v] for v in list(known)[-KEPT_WEIGHTS:]}


_HANDLERS: dict[type[Event], Callable[[LedgerState, Any], None]] = {
    JobStarted: LedgerState._job_started,
    SettingsChanged: LedgerState._settings_changed,
    Drawn: LedgerState._drawn,
    Redrawn: LedgerState._redrawn,
    Admitted: LedgerState._admitted,
    Dropped: LedgerState._dropped,
    BatchSealed: LedgerState._sealed,
    BatchRefused: LedgerState._refused,
    BatchTrained: LedgerState._trained,
    Checkpointed: LedgerState._checkpointed,
    BestCheckpoint: LedgerState._best_checkpoint,
    LineageForked: LedgerState._forked,
    PhaseChanged: LedgerState._phase_changed,
    Finished: LedgerState._finished,
    Extended: LedgerState._extended,
    Promoted: LedgerState._promoted,
    PromotionRefused: LedgerState._promotion_refused,
    CanaryBegun: LedgerState._canary_begun,
    CanaryJudged: LedgerState._canary_judged,
    Quarantined: LedgerState._quarantined,
    Decided: LedgerState._decided,
}


def fold(events: Iterable[Event], state: LedgerState | None = None) -> LedgerState:
    """Apply ``events`` in order to ``state`` (to a new state if None), and return the state."""
    state = state if state is not None else LedgerState()
    for event in events:
        state.apply(event)
    return state
