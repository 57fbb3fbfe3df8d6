"""What a job waits for, with subject, id, holder and age: the answer to 'is it stuck?'. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.services.coordinator.evaluation import EvaluationPlan
from penstock.services.coordinator.members import Members
from penstock.services.coordinator.run import JobRun
from penstock.shared.protocol import subjects

__all__ = ["explain_waits", "wait_row", "worker_waits"]


def explain_waits(
    job: str, run: JobRun, plan: EvaluationPlan, members: Members, *, clock: float, now: float, sealed_at: float
) -> list[dict[str, Any]]:
    """Rows of waits, most important first. ``clock`` is monotonic (heartbeats), ``now`` is Unix time (deadlines)."""
    if run.state.finished:
        return []
    rows = worker_waits(job, members, clock, now, run.config.services)
    if run.desired == "paused":
        reason = f" ({run.halted})" if run.halted else ""
        rows.append(wait_row(f"a request to resume{reason}", subjects.JOBS, job))
    if run.state.checkpoint is None:
        rows.append(wait_row("the initial checkpoint (warm start and version 0)", subjects.report(job), "batch 0"))
        return rows
    if plan.current is not None:
        what = f"evaluation of version {plan.current.version}: {len(plan.current.expected)} prompts left"
        rows.append(wait_row(what, subjects.evaluation(job), f"update {plan.current.point}"))
    if run.new_best:
        rows.append(wait_row(f"a checkpoint: {run.new_best}", subjects.command(job), job))
    rows += _version_waits(job, run)
    for number, batch in sorted(run.state.sealed.items()):
        what = f"the trainer to train batch {number}"
        rows.append(wait_row(what, subjects.batches(job), f"{number}.{batch.revision}", age_s=now - sealed_at))
    rows += _group_waits(job, run, members, clock, now)
    if run.stored_bytes * 2 >= run.config.limits.byte_budget:
        used = f"{run.stored_bytes} of {run.config.limits.byte_budget} bytes used"
        what = f"room in the byte budget ({used}); a checkpoint frees it"
        rows.append(wait_row(what, subjects.experience(job), f"checkpoint {run.state.checkpoint.number}"))
    return rows


def _version_waits(job: str, run: JobRun) -> list[dict[str, Any]]:
    """A version that is not served, and updates that are to be given up."""
    rows, state = [], run.state
    if run.promotion is not None and state.promoted is not None:
        status, reason, message = run.promotion.fact(state)
        if status != "True":
            rows.append(wait_row(f"promotion ({reason}): {message}", subjects.ledger(job), f"version {state.version}"))
        elif run.promotion.announced != state.promoted.version:
            what = f"the trainer to publish version {state.promoted.version}, which is to be served"
            rows.append(wait_row(what, subjects.MANIFESTS, subjects.candidate_manifest(job)))
    if run.rollback is not None:
        what = f"the trainer to go back to where it was after batch {run.rollback.number}: {run.rollback.reason}"
        rows.append(wait_row(what, subjects.command(job), f"batch {run.rollback.number}"))
    return rows


def wait_row(
    waiting_for: str, subject: str, id: str, *, holder: str | None = None, age_s: float = 0.0
) -> dict[str, Any]:
    """One row."""
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
    """Services without a live worker, then what live workers say they wait for."""
    live = {service: members.of(service, clock) for service in services}
    rows = [
        wait_row(f"a live {service} worker (none gives heartbeats)", f"heartbeat.{service}.*", service)
        for service, found in live.items()
        if not found
    ]
    for member in (m for found in live.values() for m in found):
        entry = member.beat.jobs.get(job, {})
        if entry.get("waiting_for"):
            age_s = now - float(entry.get("since", now))
            subject = str(entry.get("subject", ""))
            rows.append(wait_row(str(entry["waiting_for"]), subject, job, holder=member.beat.worker, age_s=age_s))
    return rows


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
