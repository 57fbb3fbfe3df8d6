"""Draws that cannot be trained: what replaces them, for which version, and when they are given up."""

from __future__ import annotations

import pytest

from penstock.services.coordinator.leader.summary import queues_of
from penstock.services.coordinator.training.gate import MAX_REDRAWS, Verdict
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.reports import Refusal
from penstock.services.coordinator.training.run import Effects, JobRun
from penstock.services.coordinator.training.snapshot import decode_snapshot, encode_snapshot
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.events import Drawn, Dropped, Event, Finished
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader

TIMEOUT_S = 100.0


class Scene:
    """A strictly on-policy job with two groups per batch at version 0, whose clock (``now``) the test sets."""

    def __init__(self, **train: object) -> None:
        spec = {
            "name": "scene",
            "model": {"config": {}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"group_size": 2},
            "sampling": {"max_new_tokens": 4},
            "train": {"batch_size": 4, "max_updates": 50, "max_lag": 0, "draw_timeout_s": TIMEOUT_S, **train},
        }
        self.run = JobRun(JobConfig.parse(spec), LedgerState(), num_ordinals=None, writer_epoch=1)
        self.now, self.seq = 1000.0, 0
        self.desired, self.last_checkpoint = "running", True
        self.decide()
        self.report("checkpointed", digest="w0", path="c0")

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.now, desired=self.desired, last_checkpoint=self.last_checkpoint)

    def decide(self) -> list[Event]:
        events = self.run.decide(self.inputs)
        self.run.commit(events)
        return events

    def report(self, kind: str, **fields: object) -> tuple[list[Event], Effects]:
        events = self.run.on_report(Report(kind=kind, epoch=1, **fields), self.inputs)  # type: ignore[arg-type]
        events += self.run.decide(self.inputs, after=events)
        return events, self.run.commit(events)

    def answer(self, draw: Draw, *, skipped: bool = False, epoch: int = 1) -> Verdict:
        self.seq += 1
        size = 0 if skipped else 2
        header = GroupHeader(
            draw=draw, attempt=f"a{self.seq}", epoch=epoch, digest="d", nbytes=100, prompt_tokens=2, lengths=[2] * size,
            rewards=[1.0, 0.0][:size], failed=[False] * size, truncated=[False] * size, finite=True,
            min_version=0, max_version=0, worker="w", skipped="prompt_too_long" if skipped else "",
        )  # fmt: skip
        return self.run.on_group(self.seq, header)

    @property
    def waiting(self) -> list[Draw]:
        return [draw for draw in self.run.state.in_flight if draw not in self.run.candidates]


def test_with_oversampling_replacements_are_for_the_batch_that_lacks_groups() -> None:
    scene = Scene(oversample=2.0)
    for number, draw in enumerate(scene.waiting):
        scene.answer(draw, skipped=number < 3)
    scene.decide()
    assert not scene.run.state.sealed
    assert all(scene.run.state.open[draw].min_version == 0 for draw in scene.waiting)
    scene.answer(scene.waiting[0])
    scene.decide()
    assert 1 in scene.run.state.sealed


def test_a_draw_waits_in_one_queue_at_a_time() -> None:
    scene = Scene(max_lag=1)
    assert queues_of(scene.run) == {"tickets": 4, "groups": 0, "batches": 0}
    first, second, third, _ = scene.waiting
    scene.answer(first)
    assert queues_of(scene.run) == {"tickets": 3, "groups": 1, "batches": 0}
    scene.answer(second)
    scene.answer(third)
    scene.decide()
    assert queues_of(scene.run) == {"tickets": 1, "groups": 1, "batches": 1}
    scene.report("trained", batch=1, revision=1, version=1, digest="w1")
    assert queues_of(scene.run) == {"tickets": 3, "groups": 1, "batches": 0}, "two draws more"


def test_a_leader_that_was_replaced_deletes_nothing_of_its_successor() -> None:
    """The old leader does not know the draws of its successor; it must not delete their groups as duplicates."""
    scene = Scene()
    assert scene.answer(Draw(9)) is Verdict.DUPLICATE
    assert scene.answer(Draw(9), epoch=2) is Verdict.ACCEPT
    assert Draw(9) not in scene.run.candidates
    assert scene.seq not in scene.run.stored
    assert scene.answer(scene.waiting[0], epoch=0) is Verdict.ACCEPT, "an older leader asked for it"
    assert len(scene.run.candidates) == 1


def test_the_replacement_of_a_refused_group_is_for_the_same_batch() -> None:
    scene = Scene()
    first, second = scene.waiting
    scene.answer(first)
    scene.answer(second)
    scene.decide()
    scene.report("refused", batch=1, revision=1, bad=[first], reason="lost")
    assert scene.run.state.open[first.again()].min_version == 0
    scene.answer(first.again())
    scene.decide()
    assert scene.run.state.sealed[1].revision == 2


def test_a_prompt_that_never_gets_an_answer_is_given_up_while_others_do() -> None:
    scene = Scene()
    bad, good = scene.waiting
    for _ in range(MAX_REDRAWS + 3):  # nobody answers anything: no worker is there, so no prompt is to blame
        scene.now += TIMEOUT_S
        scene.decide()
    assert {draw.ordinal for draw in scene.waiting} == {bad.ordinal, good.ordinal}
    scene.answer(next(draw for draw in scene.waiting if draw.ordinal == good.ordinal))
    scene.now += TIMEOUT_S
    events = scene.decide()
    dropped = [(event.reason, event.redraw) for event in events if isinstance(event, Dropped)]
    assert dropped == [("deadline", False)]
    assert any(isinstance(event, Drawn) for event in events)
    assert [draw.ordinal for draw in scene.waiting] == [2]


def test_a_group_that_is_always_refused_is_given_up() -> None:
    scene = Scene()
    bad, good = scene.waiting
    scene.answer(good)
    for revision in range(1, MAX_REDRAWS + 2):
        scene.answer(Draw(bad.ordinal, revision - 1))
        scene.decide()
        events, effects = scene.report("refused", batch=1, revision=revision, bad=[Draw(bad.ordinal, revision - 1)])
    assert [(event.draws, event.reason) for event in events if isinstance(event, Dropped)] == [
        ([Draw(bad.ordinal, MAX_REDRAWS)], "refused")
    ]
    assert effects.tickets == [Draw(2)]
    assert effects.delete == [scene.seq]
    assert scene.run.state.balanced()


def test_a_cancelled_job_checkpoints_the_update_that_was_under_way() -> None:
    scene = Scene()
    for draw in scene.waiting:
        scene.answer(draw)
    scene.decide()
    scene.desired = "cancelled"
    events, _ = scene.report("trained", batch=1, revision=1, version=1, digest="w1")
    assert not any(isinstance(event, Finished) for event in events), "update 1 would be undone"
    events, _ = scene.report("checkpointed", batch=1, version=1, digest="w1", path="c1")
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("first", ["paused", "cancelled"])
def test_a_cancelled_job_does_not_wait_for_a_trainer_that_cannot_train(first: str) -> None:
    """The trainer halted; the user cancels the job while it is paused, or had cancelled it before."""
    scene = Scene()
    for draw in scene.waiting:
        scene.answer(draw)
    scene.decide()
    assert scene.run.state.sealed
    scene.desired = first
    scene.run.state.halted = "a loss that is not finite"
    scene.desired = "cancelled"
    assert isinstance(scene.decide()[-1], Finished)
    assert scene.run.state.balanced()


def test_a_cancelled_job_may_end_without_a_last_checkpoint() -> None:
    scene = Scene()
    for draw in scene.waiting:
        scene.answer(draw)
    scene.decide()
    scene.desired = "cancelled"
    scene.last_checkpoint = False
    assert not scene.run.state.finished, "what is sealed is trained first"
    events, _ = scene.report("trained", batch=1, revision=1, version=1, digest="w1")
    assert isinstance(events[-1], Finished)
    assert scene.run.wants_checkpoint(scene.inputs) == ""


@pytest.mark.parametrize("leader", ["the_same", "a_new_one"])
def test_a_checkpoint_that_was_written_again_is_at_its_new_path(leader: str) -> None:
    scene = Scene()
    if leader == "a_new_one":  # it begins with a snapshot
        data = encode_snapshot(scene.run.state, job="j", seq=1, entry="e")
        scene.run.state = decode_snapshot(data, job="j")[1]
    scene.report("checkpointed", digest="w0", path="c0-anew")
    assert scene.run.state.checkpoint is not None
    assert scene.run.state.checkpoint.path == "c0-anew", "the trainer found the other one damaged"


def test_a_fork_that_is_reported_again_is_recorded_once_and_not_refused() -> None:
    scene = Scene()
    fork = {"batch": 1, "version": 3, "digest": "w3", "reason": "other bits"}
    assert scene.report("forked", **fork)[0]
    assert scene.report("forked", **fork)[0] == [], "the first response was lost, and its trainer continues"
    with pytest.raises(Refusal):
        scene.report("forked", **{**fork, "digest": "of another trainer"})
