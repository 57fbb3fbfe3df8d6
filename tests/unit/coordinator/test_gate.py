"""Each rule of the gate by itself, and edge cases of the rules of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.services.coordinator.leader.summary import phase_of
from penstock.services.coordinator.training.decision import TicketSource
from penstock.services.coordinator.training.gate import Candidate, Verdict, has_signal, is_stale, judge
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState, OpenDraw
from penstock.services.coordinator.training.run import FAILED_STREAK, JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.protocol.events import Checkpointed, Dropped
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader

HEADER = GroupHeader(
    draw=Draw(0), attempt="a", epoch=1, digest="d", nbytes=100, prompt_tokens=2, lengths=[2, 2, 2],
    rewards=[1.0, 0.0, 0.5], failed=[False] * 3, truncated=[False] * 3, finite=True, min_version=3, max_version=3,
    worker="w", greedy=[False, False, True],
)  # fmt: skip
EPISODES = msgspec.structs.replace(HEADER, prompt_tokens=0, greedy=[])


@pytest.mark.parametrize(
    ("changes", "info", "taken", "verdict"),
    [
        ({}, OpenDraw(0, 9.0), False, Verdict.ACCEPT),
        ({}, None, False, Verdict.DUPLICATE),
        ({}, OpenDraw(0, 9.0, batch=1), False, Verdict.DUPLICATE),
        ({}, OpenDraw(0, 9.0), True, Verdict.DUPLICATE),
        ({"skipped": "prompt_too_long"}, OpenDraw(0, 9.0), False, Verdict.SKIPPED),
        ({"finite": False}, OpenDraw(0, 9.0), False, Verdict.NOT_FINITE),
        ({"failed": [False, False, True]}, OpenDraw(0, 9.0), False, Verdict.FAILED),
        ({"failed": [True, False, False]}, OpenDraw(0, 9.0), False, Verdict.FAILED),
    ],
    ids=str,
)
def test_a_group_is_judged_by_its_header(
    changes: dict[str, Any], info: OpenDraw | None, taken: bool, verdict: Verdict
) -> None:
    header = msgspec.structs.replace(HEADER, **changes)
    assert judge(header, info, taken=taken, smallest_group=2, needs_baseline=True) is verdict


def test_the_lag_bound_applies_to_the_policy_loss_only() -> None:
    assert [is_stale(3, start, 1) for start in (3, 4, 5)] == [False, False, True]
    old = Candidate(1, HEADER, Verdict.ACCEPT)
    assert old.is_stale(5, 1)
    for objective in ("supervised", "preference", "replay"):
        assert not Candidate(1, msgspec.structs.replace(HEADER, objective=objective), Verdict.ACCEPT).is_stale(5, 1)


YES, NO, MIXED = [True] * 3, [False] * 3, [True, False, True]


@pytest.mark.parametrize(
    ("changes", "has_success", "signal"),
    [
        ({"succeeded": YES}, True, False),
        ({"succeeded": NO}, True, False),
        ({"succeeded": MIXED}, True, True),
        ({"succeeded": MIXED, "rewards": [1.0] * 3}, True, False),
        ({"succeeded": MIXED, "failed": [False, True, False]}, True, False),
        ({"succeeded": NO}, False, True),
        ({"succeeded": MIXED, "rewards": [1.0] * 3}, False, False),
        ({"succeeded": []}, True, True),
        ({"succeeded": [], "rewards": [1.0] * 3}, True, False),
    ],
    ids=[
        "all succeed", "all fail", "some succeed", "some succeed, with equal returns", "the one that fails was lost",
        "no success, returns differ", "no success, equal returns", "earlier version", "earlier version, equal returns",
    ],
)  # fmt: skip
def test_success_decides_whether_episodes_are_replaced(
    changes: dict[str, Any], has_success: bool, signal: bool
) -> None:
    """The returns of the group differ, as dense ones do. A simulator that reports no success is judged by returns."""
    header = msgspec.structs.replace(EPISODES, **changes)
    assert has_signal(header, has_success=has_success) is signal
    sampled = {"type": "grpo", "group_size": 3, "dynamic_sampling": {"max_resampled": 1.0}}
    run = start_embodied(sampled, has_success=has_success, batch_size=6)
    first, second = run.state.in_flight
    arrive(run, first, **changes, min_version=0, max_version=0)
    events = run.decide(Inputs(0.0))
    dropped = [(event.reason, event.draws, event.redraw) for event in events if isinstance(event, Dropped)]
    assert dropped == ([] if signal else [("no_signal", [first], False)])
    run.commit(events)
    assert (run.state.resampled, run.state.dropped["no_signal"]) == (int(not signal), int(not signal))
    assert len(run.state.in_flight) == 2, "another ordinal replaces a dropped one"
    assert (first in run.state.open) is signal
    assert second in run.state.open
    assert run.state.balanced()


@pytest.mark.parametrize(("objective", "trained"), [("replay", True), ("policy", False)])
def test_a_replay_buffer_takes_groups_of_any_age(objective: str, trained: bool) -> None:
    run = start_embodied({"type": "sac", "warmup_transitions": 8}, batch_size=2, max_lag=0)
    for version in (0, 1, 2):
        for draw in run.state.in_flight:
            age = 0 if version == 2 else version
            arrive(run, draw, objective=objective, min_version=age, max_version=age)
        run.commit(run.decide(Inputs(0.0)))
        if version < 2:
            report(run, kind="trained", batch=version + 1, revision=1, version=version + 1, digest=f"w{version + 1}")
    sealed = {batch.start_version: {g.min_version for g in batch.groups} for batch in run.state.sealed.values()}
    assert sealed == ({2: {0}} if trained else {})
    assert run.state.dropped == ({} if trained else {"stale": 2})


def start_run(*, every: int = 3, **train: Any) -> JobRun:
    """Start a run of two groups per batch whose initial checkpoint exists; return the run."""
    spec = {
        "name": "edges",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "algorithm": {"group_size": 2},
        "train": {"batch_size": 4, "max_updates": 3, **train},
        "checkpoint": {"every": every},
        "limits": {"byte_budget": 1 << 20},
    }
    run = JobRun(JobConfig.parse(spec), LedgerState(), num_ordinals=None, writer_epoch=1)
    run.commit(run.decide(Inputs(0.0)))
    report(run, kind="checkpointed", digest="w0", path="c0")
    return run


def start_embodied(algorithm: dict[str, Any], *, has_success: bool = True, **train: Any) -> JobRun:
    """Start an embodied run whose initial checkpoint exists; return the run."""
    spec = {
        "kind": "embodied", "name": "edges", "environment": {"task": "reach-v3", "horizon": 8, "bytes_per_step": 256},
        "policy": {"type": "squashed" if algorithm["type"] == "sac" else "gaussian"}, "algorithm": algorithm,
        "train": {"max_updates": 3, "max_lag": 0, **train}, "evaluation": {"episodes": 0},
    }  # fmt: skip
    run = JobRun(parse_training(spec), LedgerState(), num_ordinals=None, writer_epoch=1)
    run.commit(run.decide(Inputs(0.0, environment={"has_success": has_success})))
    report(run, kind="checkpointed", digest="w0", path="c0")
    return run


def arrive(run: JobRun, draw: Draw, **changes: Any) -> None:
    """Let the group of a draw arrive."""
    run.on_group(1 + max([*run.stored, run.state.heard]), msgspec.structs.replace(EPISODES, draw=draw, **changes))


def report(run: JobRun, **fields: Any) -> None:
    events = run.on_report(Report(epoch=1, **fields), Inputs(0.0))
    run.commit([*events, *run.decide(Inputs(0.0), after=events)])


def answer(run: JobRun, *, nbytes: int = 100, failed: bool = False) -> None:
    """Answer every draw in flight, and let the run decide."""
    for draw in run.state.in_flight:
        versions = {"min_version": run.state.version, "max_version": run.state.version}
        header = msgspec.structs.replace(HEADER, draw=draw, nbytes=nbytes, failed=[failed] * 3, **versions)
        run.on_group(1 + max([*run.stored, run.state.heard]), header)
    run.commit(run.decide(Inputs(0.0)))


def update(run: JobRun) -> None:
    answer(run)
    number = run.state.last_trained + 1
    report(run, kind="trained", batch=number, revision=1, version=number, digest=f"w{number}")


def test_a_run_ends_and_checkpoints_when_it_should() -> None:
    run = start_run(every=2, max_updates=3)
    assert run.has_room is (len(run.state.open) < run.config.max_draws) is False
    update(run)
    assert (run.wants_checkpoint(Inputs(0.0)), run.training_done(Inputs(0.0))) == ("", False)
    update(run)
    assert (run.wants_checkpoint(Inputs(0.0)), run.training_done(Inputs(0.0))) == ("interval", False)
    update(run)
    assert (run.wants_checkpoint(Inputs(0.0)), run.training_done(Inputs(0.0))) == ("run is at an end", True)


def test_half_of_the_byte_budget_asks_for_a_checkpoint() -> None:
    run = start_run(every=50)
    update(run)
    assert run.wants_checkpoint(Inputs(0.0)) == ""
    answer(run, nbytes=300_000)
    assert run.stored_bytes == 2 * 300_000 + 2 * 100
    assert run.wants_checkpoint(Inputs(0.0)) == "byte budget half used"


def test_a_job_whose_groups_all_fail_ends_and_a_good_group_restarts_the_count() -> None:
    most = FAILED_STREAK * 2
    run = start_run()
    for draws in range(most - 1):
        header = msgspec.structs.replace(HEADER, draw=run.state.in_flight[0], failed=[True] * 3)
        run.on_group(draws + 1, header)
        run.commit(run.decide(Inputs(0.0)))
    assert (run.failed_streak, run.failure) == (most - 1, None)
    run.on_group(900, msgspec.structs.replace(HEADER, draw=run.state.in_flight[0]))
    assert run.failed_streak == 0
    for draws in range(most):
        open_draws = [draw for draw in run.state.in_flight if draw not in run.candidates]
        run.on_group(1000 + draws, msgspec.structs.replace(HEADER, draw=open_draws[0], failed=[True] * 3))
        run.commit(run.decide(Inputs(0.0)))
    assert run.failure is not None


class Forgetful(TicketSource):
    """A source that refuses the draws of deleted users and does not draw them again."""

    refuses = True

    def __init__(self, *gone: Draw) -> None:
        self._gone = gone

    def refusal(self, draw: Draw) -> str:
        return "erased" if draw in self._gone else ""


def refused(gone: Draw | None = None) -> JobRun:
    """Return a run with three sealed batches, the first of which the trainer refused for one of its groups."""
    run = start_run(max_updates=3, max_lag=2)
    answer(run)
    assert sorted(run.state.sealed) == [1, 2, 3]
    run.source = Forgetful() if gone is None else Forgetful(gone)
    run.commit(run.on_report(Report(epoch=1, kind="refused", batch=1, revision=1, bad=[Draw(0)]), Inputs(0.0)))
    return run


@pytest.mark.parametrize("gone", [None, Draw(0)], ids=["drawn again", "another one drawn"])
@pytest.mark.parametrize("most", [2, 3])
def test_a_refused_batch_is_sealed_again_though_later_batches_reach_the_limit(most: int, gone: Draw | None) -> None:
    """The trainer waits for batch 1, even if the user lowers ``max_updates`` below the number of sealed batches."""
    run = refused(gone)
    train = run.config.train.model_copy(update={"max_updates": most})
    run.commit(run.amend(run.config.model_copy(update={"train": train}), 2, 0.0))
    assert not run.training_done(Inputs(0.0))
    run.commit(run.decide(Inputs(0.0)))
    answer(run)
    assert [(number, run.state.sealed[number].revision) for number in (1, 2, 3)] == [(1, 2), (2, 1), (3, 1)]


def test_batches_behind_a_refused_one_do_not_prevent_the_end_of_a_run() -> None:
    run = refused()
    assert not run.training_done(Inputs(0.0))
    assert phase_of(run, Inputs(0.0), "paused") == "paused"
    assert run.training_done(Inputs(0.0, stop_early="reached"))
    run.commit(run.decide(Inputs(0.0, desired="cancelled")))
    assert run.state.finished == "cancelled"
    assert run.state.balanced()


def test_nothing_is_decided_after_the_end() -> None:
    run = start_run(max_updates=1)
    update(run)
    run.commit(run.finish(Inputs(0.0), {}))
    assert run.decide(Inputs(1.0)) == []


def test_a_dead_letter_takes_no_sealed_draw() -> None:
    run = start_run()
    first = run.state.in_flight[0]
    answer(run)
    assert run.state.open[first].batch == 1
    run.candidates.clear()  # as a new leader that has not read the stream yet
    assert run.on_dead_letter(first, Inputs(0.0)) == []


def test_a_checkpoint_purges_below_what_a_replay_needs() -> None:
    run = start_run()
    update(run)
    events = run.on_report(
        Report(epoch=1, kind="checkpointed", batch=1, version=1, digest="w1", path="c1"), Inputs(0.0)
    )
    [saved] = [event for event in events if isinstance(event, Checkpointed)]
    assert run.commit(events).purge_below == saved.low_seq
