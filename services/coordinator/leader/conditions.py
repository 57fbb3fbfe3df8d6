"""Derives the conditions of a job, one for each aspect of its state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.protocol.bus_clock import MAX_SKEW_S
from penstock.shared.protocol.jobs import Condition

__all__ = ["conditions"]

Type = Literal[
    "WorkersReady", "WeightsSynced", "ClocksAgree", "MakingProgress", "Checkpointed", "PromotionAllowed", "Succeeded"
]  # fmt: skip


def conditions(
    run: JobRun, inputs: Inputs, job: str, members: Members, before: Sequence[Condition], *, clock: float,
    now: datetime,
) -> list[Condition]:  # fmt: skip
    """Return every condition of the job. A condition with the same status as in ``before`` keeps its transition
    time."""
    known = {condition.type: condition for condition in before}
    found = []
    for type_, (status, reason, message) in _facts(run, inputs, job, members, clock).items():
        old = known.get(type_)
        since = old.last_transition_time if old is not None and old.status == status else now
        found.append(Condition(type=type_, status=status, reason=reason, message=message, last_transition_time=since))
    return found


Fact = tuple[Literal["True", "False", "Unknown"], str, str]
"""Status of a condition, its reason as one word, and its message."""


def _facts(run: JobRun, inputs: Inputs, job: str, members: Members, clock: float) -> dict[Type, Fact]:
    state = run.state
    version = state.version if state.promoted is None else state.promoted.version
    lost = [service for service in run.config.services if not members.of(service, clock)]
    behind = [
        member.beat.worker
        for member in members.of("rollout", clock)
        if int(member.beat.jobs.get(job, {}).get("version", -1)) < version - run.config.train.max_lag
    ]
    workers: Fact = ("False", "WorkersMissing", ", ".join(lost)) if lost else ("True", "AllServicesAlive", "")
    synced: Fact = ("False", "EnginesBehind", ", ".join(behind)) if behind else ("True", "WithinLag", "")
    checkpoint: Fact = ("False", "NoCheckpointYet", "")
    if state.checkpoint is not None:
        checkpoint = ("True", "Committed", f"after update {state.checkpoint.number}")
    succeeded: Fact = ("Unknown", "Running", "")
    if state.finished:
        why = run.failure.message if run.failure is not None else ""
        succeeded = ("True" if state.finished == "succeeded" else "False", state.finished.capitalize(), why)
    promotion: dict[Type, Fact] = {}
    if run.promotion is not None:
        promotion["PromotionAllowed"] = run.promotion.fact(state)
    return {
        "WorkersReady": workers,
        "WeightsSynced": synced,
        "ClocksAgree": _clocks(run, members, clock),
        "MakingProgress": _progress(run, inputs, lost),
        "Checkpointed": checkpoint,
        **promotion,
        "Succeeded": succeeded,
    }


def _clocks(run: JobRun, members: Members, clock: float) -> Fact:
    """Return status, reason and message of the condition `ClocksAgree`: all clocks match the clock of the bus, which
    the leader's decisions use."""
    alive = [member.beat for service in ("coordinator", *run.config.services) for member in members.of(service, clock)]
    known = [(beat.worker, beat.clock_skew_s) for beat in alive if beat.clock_skew_s is not None]
    wrong = [f"{worker} {skew_s:+.1f} s" for worker, skew_s in known if abs(skew_s) > MAX_SKEW_S]
    if wrong:
        return "False", "ClockSkew", f"clocks of hosts differ from that of NATS: {', '.join(wrong)}"
    return ("True", "WithinASecond", "") if known else ("Unknown", "NotMeasured", "")


def _progress(run: JobRun, inputs: Inputs, lost: Sequence[str]) -> Fact:
    if run.state.finished:
        return "False", "Ended", ""
    if inputs.desired == "paused":
        return "False", "Paused", run.halted(inputs) or "by request"
    if lost:
        return "False", f"{lost[0].capitalize()}Missing", "no heartbeat"
    if run.state.checkpoint is None:
        return "True", "WarmStart", ""
    return ("True", "Training", "") if run.state.trainable else run.source.idle(run.state)
