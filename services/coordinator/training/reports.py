"""Converts a trainer's report to ledger events. Pure."""

from __future__ import annotations

from penstock.services.coordinator.training.decision import RunFacts, plan_draw
from penstock.services.coordinator.training.gate import MAX_REDRAWS
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.restart import earliest_start
from penstock.shared.protocol.events import (
    BatchRefused,
    BatchTrained,
    Checkpointed,
    Dropped,
    Event,
    LineageForked,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.parts import num_parts

__all__ = ["Refusal", "events_of_report"]


class Refusal(Exception):  # noqa: N818
    """A report that contradicts the ledger. The sender gets the reason, and must re-read its state or step down."""


def events_of_report(run: RunFacts, report: Report, inputs: Inputs) -> list[Event]:
    """Return the events of a report, or [] if the ledger has it already.

    Raises:
        Refusal: the sender is fenced by a newer trainer, or the report contradicts the ledger.
    """
    if report.epoch < run.state.trainer_epoch:
        raise Refusal(f"fenced: trainer epoch {report.epoch} < {run.state.trainer_epoch}")
    match report.kind:
        case "trained":
            return _trained(run, report, inputs.now)
        case "refused":
            return _refused(run, report, inputs.now)
        case "checkpointed":
            return _checkpointed(run, report, inputs.now)
        case "forked":
            return _forked(run, report, inputs)
        case "failed" | "halted" | "not_rolled_back" | "fell_back":
            return []  # nothing to record, but the check above applies
        case _:
            raise Refusal(f"report '{report.kind}' is not a ledger matter")


def _trained(run: RunFacts, report: Report, now: float) -> list[Event]:
    state = run.state
    known = state.batches.get(report.batch)
    if report.batch <= state.last_trained:
        if known is not None and known.digest == report.digest:
            return []
        raise Refusal(f"batch {report.batch} was trained before with another weight digest")
    sealed = state.sealed.get(report.batch)
    if report.batch != state.last_trained + 1 or sealed is None or sealed.revision != report.revision:
        raise Refusal(f"batch {report.batch} revision {report.revision} is not the one to train")
    if report.version != sealed.start_version + 1:
        raise Refusal(f"batch {report.batch} makes version {sealed.start_version + 1}, not {report.version}")
    return [
        BatchTrained(
            writer_epoch=run.writer_epoch,
            time=now,
            number=report.batch,
            revision=report.revision,
            version=report.version,
            digest=report.digest,
            trainer_epoch=report.epoch,
            figures={} if run.promotion is None else run.promotion.figures_of(report.metrics),
        )
    ]


def _refused(run: RunFacts, report: Report, now: float) -> list[Event]:
    sealed = run.state.sealed.get(report.batch)
    if sealed is None or sealed.revision != report.revision:
        return []
    members = {group.draw for group in sealed.groups}
    bad = [draw for draw in report.bad if draw in members] or sorted(members)
    # Replacements of the bad groups are for this batch: it is the next one to seal once it is refused.
    min_version, deadline = plan_draw(run.config, run.state, now, ahead=report.batch - run.state.next_number)
    gone = {draw: reason for draw in bad if (reason := run.source.refusal(draw))}
    dropped = gone | {draw: "refused" for draw in bad if draw.n >= MAX_REDRAWS and draw not in gone}
    events: list[Event] = [
        BatchRefused(
            writer_epoch=run.writer_epoch,
            time=now,
            number=report.batch,
            revision=report.revision,
            bad=[draw for draw in bad if draw not in dropped],
            reason=report.reason,
            redraw=True,
            min_version=min_version,
            deadline=deadline,
        )
    ]
    for why in sorted(set(dropped.values())):
        draws = [draw for draw in bad if dropped.get(draw) == why]
        found = [run.candidates.get(draw) for draw in draws]
        events.append(
            Dropped(
                writer_epoch=run.writer_epoch,
                time=now,
                draws=draws,
                reason=why,
                lengths=[candidate.mean_length if candidate else 0 for candidate in found],
                redraw=False,
                min_version=min_version,
                deadline=deadline,
            )
        )
    return events


def _checkpointed(run: RunFacts, report: Report, now: float) -> list[Event]:
    state = run.state
    known = state.checkpoints.get(report.batch)
    if known is not None and (known.path == report.path or known != state.checkpoint):
        return []  # already known, or rewritten because the old path is unreadable
    if report.batch > state.last_trained or (report.batch == 0 and state.checkpoint is not None and known is None):
        raise Refusal(f"checkpoint of batch {report.batch} does not fit a ledger at batch {state.last_trained}")
    trained = state.batches.get(report.batch)
    expected = state.digest if report.batch == state.last_trained else trained.digest if trained else ""
    if report.batch and report.digest != expected:
        raise Refusal(f"checkpoint of batch {report.batch} has another weight digest than the ledger")
    return [
        Checkpointed(
            writer_epoch=run.writer_epoch,
            time=now,
            number=report.batch,
            version=report.version,
            digest=report.digest,
            path=report.path,
            trainer_epoch=report.epoch,
            low_seq=_low_seq(run, report.batch),
            reason=report.reason or ("" if report.batch else "initial"),
        )
    ]


def _low_seq(run: RunFacts, checkpoint: int) -> int:
    """Return the lowest stream sequence number in EXPERIENCE to keep once ``checkpoint`` exists.

    That is the lowest stored one while half of the byte budget is free, else the lowest that a restarted trainer may
    need.
    """
    if run.stored_bytes * 2 < run.config.limits.byte_budget:
        return min(run.stored, default=0)
    start = earliest_start(run.state, checkpoint)
    before = run.state.base_of(start - 1) if run.config.checkpoint.keep > 1 else None
    if before is not None:  # if there is room: for a trainer that cannot read the newer one
        low = _needed_after(run, before.number)
        left = run.stored_bytes - sum(nbytes for seq, nbytes in run.stored.items() if seq < low)
        if left * 2 < run.config.limits.byte_budget:
            return low
    return _needed_after(run, start)


def _needed_after(run: RunFacts, start: int) -> int:
    """Return the lowest stream sequence number in EXPERIENCE that a trainer needs to begin after batch ``start``."""
    needed = {seq for n, batch in run.state.batches.items() if n > start for seq in batch.seqs}
    needed |= {group.seq for batch in run.state.sealed.values() for group in batch.groups}
    needed |= {candidate.seq for candidate in run.candidates.values()}
    return min(needed, default=max((seq + num_parts(nbytes) for seq, nbytes in run.stored.items()), default=1))


def _forked(run: RunFacts, report: Report, inputs: Inputs) -> list[Event]:
    state = run.state
    if (report.version, report.version, report.digest) == (state.version, state.forked, state.digest):
        return []
    if report.version <= state.version:
        raise Refusal(f"a fork continues above version {state.version}, not at {report.version}")
    wanted = run.rollback_of(state, inputs)
    if report.rollback is not None and (wanted is None or wanted.number != report.rollback):
        raise Refusal(f"nobody wants training to go back to batch {report.rollback} any more")
    kept = wanted is not None and report.batch in state.after(wanted.number)[:1]
    redraw = not kept or run.source.redraws  # posted answers would only repeat; prompts get new ones
    return [
        LineageForked(
            writer_epoch=run.writer_epoch,
            time=inputs.now,
            from_batch=report.batch,
            version=report.version,
            digest=report.digest,
            reason=_reason_of_fork(run, report),
            trainer_epoch=report.epoch,
            min_version=report.version,
            deadline=inputs.now + run.config.train.draw_timeout_s,
            operation=wanted.operation if wanted is not None and kept else "",
            redraw=redraw,
            draws=[] if redraw else _given_up(state, report.batch),
        )
    ]


def _reason_of_fork(run: RunFacts, report: Report) -> str:
    """Return the reason for a fork. If deletions of users' data removed every group that the trainer misses, the reason
    is a text about these deletions; else it is the reason that the trainer gives.

    Before a deletion removes groups of a trained batch, it waits for a later checkpoint. If a trainer lacks the groups,
    that checkpoint became unreadable, or was never written.
    """
    reasons = {run.source.refusal(draw) for draw in report.bad}
    if not reasons or "" in reasons:
        return report.reason
    draws = ", ".join(map(str, report.bad[:10])) + (f" and {len(report.bad) - 10} more" if report.bad[10:] else "")
    return (
        f"{', '.join(sorted(reasons))}: the data behind draws {draws} of batch {report.batch} was deleted, and no "
        "checkpoint behind that batch can be read"
    )


def _given_up(state: LedgerState, from_batch: int) -> list[Draw]:
    """Return the draws of the batches that a fork removes from the lineage, and of all sealed batches."""
    draws = [draw for number, batch in state.batches.items() if number >= from_batch for draw in batch.draws]
    return sorted([*draws, *(group.draw for batch in state.sealed.values() for group in batch.groups)])
