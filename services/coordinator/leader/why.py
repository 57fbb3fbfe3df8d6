"""Explains a job that seems stuck: lists what the job waits for, each with NATS subject, id, holder and age. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.leader.evaluation import EvaluationPlan
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.retry import Blocked
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.protocol import subjects

__all__ = ["Onsets", "blocked_waits", "explain_waits", "recovery_waits", "wait_row", "worker_waits"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Something that the leader of a job waits for. ``since``: start of the wait (Unix seconds); None: unknown."""

    what: str
    subject: str
    id: str
    service: str = ""
    since: float | None = None


class Onsets:
    """Times at which the leader first saw a wait whose start is not recorded elsewhere."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def look(self, job: str, run: JobRun, inputs: Inputs, plan: EvaluationPlan) -> None:
        """Record the start of new waits, and forget waits that have ended."""
        open_ = {(one.subject, one.id) for one in _own_waits(job, run, inputs, plan)}
        self._since = {key: self._since.get(key, inputs.now) for key in open_}

    def of(self, wait: Wait, now: float) -> float:
        """Return the start of ``wait`` (Unix seconds)."""
        return wait.since if wait.since is not None else self._since.get((wait.subject, wait.id), now)


def explain_waits(
    job: str, run: JobRun, inputs: Inputs, plan: EvaluationPlan, members: Members, *, clock: float, onsets: Onsets,
    blocked: Blocked | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the waits, most important first. ``clock`` is monotonic (heartbeats), ``inputs.now`` is Unix time
    (deadlines).

    ``blocked``: a write that the leader cannot complete, so that it makes no decisions.
    """
    if run.state.finished:
        return []
    now = inputs.now
    rows = blocked_waits(job, blocked, now)
    rows += worker_waits(job, members, clock, now, run.config.services)
    for wait in _own_waits(job, run, inputs, plan):
        holder = _worker_of(job, wait.service, members, clock)
        age_s = now - onsets.of(wait, now)
        rows.append(wait_row(wait.what, wait.subject, wait.id, holder=holder, age_s=age_s))
    return rows + (_group_waits(job, run, members, clock, now) if run.state.checkpoint is not None else [])


def recovery_waits(job: str, blocked: Blocked | None, now: float, since: float) -> list[dict[str, Any]]:
    """Return the waits of a leader that is still recovering; ``since`` is when it began to lead."""
    what = "its leader to recover: to read what was decided and stored, and to ask again for what is missing"
    return [*blocked_waits(job, blocked, now), wait_row(what, subjects.LEDGER, job, age_s=now - since)]


def blocked_waits(job: str, blocked: Blocked | None, now: float) -> list[dict[str, Any]]:
    """Return the wait for ``blocked``, a write that the leader cannot complete; [] for None."""
    if blocked is None:
        return []
    what = f"the bus, for {blocked.what} ({blocked.why})"
    return [wait_row(what, blocked.subject, job, age_s=now - blocked.since)]


def _own_waits(job: str, run: JobRun, inputs: Inputs, plan: EvaluationPlan) -> Iterator[Wait]:
    """Yield waits that follow from the ledger and the desired state."""
    state = run.state
    if inputs.desired == "paused":
        reason = f" ({halted})" if (halted := run.halted(inputs)) else ""
        yield Wait(f"a request to resume{reason}", subjects.JOBS, job)
    if state.checkpoint is None:
        what = "the initial checkpoint (warm start and version 0)"
        yield Wait(what, subjects.report(job), "batch 0", service="trainer")
        return
    if (current := plan.current) is not None:
        what = f"evaluation of version {current.version}: {len(current.expected)} prompts left"
        yield Wait(what, subjects.evaluation(job), f"update {current.point}", since=current.started)
    if inputs.new_best:
        yield Wait(f"a checkpoint: {inputs.new_best}", subjects.command(job), job, service="trainer")
    yield from _version_waits(job, run, inputs)
    if state.version == state.forked:
        what = f"the first update since training went back: {state.fork_reason}"
        yield Wait(what, subjects.ledger(job), f"version {state.version}")
    for number, batch in sorted(state.sealed.items()):
        what = f"the trainer to train batch {number}"
        if not state.trainable:
            what = f"batch {state.next_number} to be sealed anew, which was refused, before batch {number} is trained"
        id = f"{number}.{batch.revision}"
        yield Wait(what, subjects.batches(job), id, service="trainer", since=batch.time)
    if run.stored_bytes * 2 >= run.config.limits.byte_budget:
        used = f"{run.stored_bytes} of {run.config.limits.byte_budget} bytes used"
        what = f"room in the byte budget ({used}); a checkpoint frees it"
        yield Wait(what, subjects.experience(job), f"checkpoint {state.checkpoint.number}", service="trainer")


def _version_waits(job: str, run: JobRun, inputs: Inputs) -> Iterator[Wait]:
    """Yield waits for a promotion, the publication of a served version, or a rollback."""
    state = run.state
    if run.promotion is not None and state.promoted is not None:
        status, reason, message = run.promotion.fact(state)
        if status != "True":
            yield Wait(f"promotion ({reason}): {message}", subjects.ledger(job), f"version {state.version}")
        elif inputs.announced != state.promoted.version:
            what = f"the trainer to publish version {state.promoted.version}, which is to be served"
            yield Wait(what, subjects.MANIFESTS, subjects.candidate_manifest(job), service="trainer")
    if (rollback := run.rollback(inputs)) is not None:
        what = f"the trainer to go back to where it was after batch {rollback.number}: {rollback.reason}"
        yield Wait(what, subjects.command(job), f"batch {rollback.number}", service="trainer")


def wait_row(
    waiting_for: str, subject: str, id: str, *, holder: str | None = None, age_s: float = 0.0
) -> dict[str, Any]:
    """Return one row of waits; ages below 0 become 0."""
    return {
        "waiting_for": waiting_for,
        "subject": subject,
        "id": id,
        "holder": holder,
        "age_s": round(max(0.0, age_s), 3),
    }


def worker_waits(
    job: str, members: Members, clock: float, now: float, services: Sequence[str] = ("trainer", "rollout", "reward")
) -> list[dict[str, Any]]:
    """Return waits for services without a live worker, then the waits that live workers report."""
    live = {service: members.of(service, clock) for service in services}
    rows = [
        wait_row(f"a live {service} worker (none gives heartbeats)", f"heartbeat.{service}.*", service)
        for service, found in live.items()
        if not found
    ]
    for member in (m for found in live.values() for m in found):
        entry = member.beat.jobs.get(job, {})
        if entry.get("problem"):
            age_s = now - float(entry.get("problem_since", now))
            what = f"{member.beat.service} worker '{member.beat.worker}' to work: {entry['problem']}"
            rows.append(
                wait_row(what, f"heartbeat.{member.beat.service}.*", job, holder=member.beat.worker, age_s=age_s)
            )
        if entry.get("waiting_for"):
            age_s = now - float(entry.get("since", now))
            subject = str(entry.get("subject", ""))
            rows.append(wait_row(str(entry["waiting_for"]), subject, job, holder=member.beat.worker, age_s=age_s))
    return rows


def _worker_of(job: str, service: str, members: Members, clock: float) -> str | None:
    """Return the first live worker of a service whose heartbeat names the job, or None."""
    return next((m.beat.worker for m in members.of(service, clock) if job in m.beat.jobs), None)


def _group_waits(job: str, run: JobRun, members: Members, clock: float, now: float) -> list[dict[str, Any]]:
    state = run.state
    waiting = [draw for draw in state.in_flight if draw not in run.candidates]
    if not waiting:
        return []
    oldest = min(waiting, key=lambda draw: state.open[draw].deadline)
    age_s = now - (state.open[oldest].deadline - run.config.train.draw_timeout_s)
    holder = _holders(job, members, clock).get(str(oldest))
    what = f"{len(waiting)} groups ({run.config.groups_per_batch} make a batch)"
    return [wait_row(what, subjects.tickets(job), str(oldest), holder=holder, age_s=age_s)]


def _holders(job: str, members: Members, clock: float) -> dict[str, str]:
    return {
        str(draw): member.beat.worker
        for member in members.of("rollout", clock)
        for draw in member.beat.jobs.get(job, {}).get("holds", [])
    }
