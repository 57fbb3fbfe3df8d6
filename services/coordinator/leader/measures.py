"""Measurements of a run: metrics of updates, evaluations of exact versions, and the goals that depend on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.services.coordinator.leader.evaluation import EvaluationPlan
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.leader.pace import Pace
from penstock.services.coordinator.training.gate import Candidate
from penstock.services.coordinator.training.goals import Goals
from penstock.services.coordinator.training.health import Health
from penstock.services.coordinator.training.inputs import Evaluated
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.promotion import gate_of
from penstock.services.coordinator.training.tally import Tally
from penstock.shared.config.jobs.amendable import TEMPERATURE
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.data.check import SourceSummary
from penstock.shared.protocol.embodied.environment import HELD_OUT_SUCCESS, TRAINED_SUCCESS
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report, Ticket
from penstock.shared.protocol.trajectory import GroupHeader

__all__ = ["Measures"]

AGAIN_S = 10.0
"""Delay before the leader repeats an evaluation in which no completion was scored (seconds), probably because the
grader was unreachable."""

MAX_RESTORED = 1000
"""Maximum number of rows of METRICS that a new leader restores. A leader that dies leaves fewer rows unwritten; if more
rows are missing, the stream has lost them for another reason."""


class Measures:
    """Produces all rows of METRICS of one job. ``reward`` is the mean sampled reward of the newest update."""

    def __init__(self, config: AnyTraining, outbox: Outbox) -> None:
        self.config, self.outbox = config, outbox
        self.plan = EvaluationPlan(config.evaluation, ())
        self.goals = Goals(config.early_stop, config.checkpoint.keep_best)
        self.tally = Tally(config.groups_per_batch, config.train_sources)
        self.health = Health(config)
        self.pace = Pace()
        self.reward: float | None = None
        self.evaluated: Evaluated | None = None
        """The newest evaluation without missing prompts."""
        self.gate = gate_of(config)
        self.newest_row = (0, 0)
        """For the newest row about an update: the number of its batch, and the stream sequence number of its ledger
        entry."""
        self._warned = False
        self._not_before = 0.0
        self._far_updates = 0
        """Number of consecutive updates, up to the newest one, whose lag/logprob exceeds train.max_mismatch."""

    def begin(self, state: LedgerState, *, held_out: Sequence[SourceSummary], now: float) -> None:
        """Start to measure a run in state ``state``; call ``resume`` next."""
        self.plan = EvaluationPlan(self.config.evaluation, held_out)
        self.goals.begin(state.best)
        self.tally.begin(now, {})

    def resume(self, rows: Iterable[dict[str, Any]], state: LedgerState) -> None:
        """Restore measurements from rows that earlier leaders wrote to METRICS, oldest first, in one or more calls."""
        for row in rows:
            values = {name: value for name, value in row["values"].items() if value is not None}  # null: not finite
            if row["kind"] != "eval":
                self.newest_row = (int(row["batch"]), int(row.get("entry", 0)))
                self.tally.go_on(values)  # rolled-back batches cost tokens, too
            if not state.in_lineage(int(row["batch"])):
                continue
            self.goals.take(values, int(row["batch"]))
            if row["kind"] == "eval":
                if not self._is_older(row, state):
                    self._evaluated(int(row["step"]), int(row["version"]), values)
            else:
                self._count_far(values)
                self.health.take(int(row["batch"]), values)
                self.reward = values.get("reward/mean", self.reward)

    def roll_back(self, state: LedgerState) -> None:
        """Forget the measurements of batches that a rollback discarded."""
        self.plan.roll_back(state.updates)
        if not self._is_known(state):
            self.plan.done.discard(state.updates)  # the reward of these weights is unknown
        self.goals.roll_back(state)
        self.health.roll_back(state)
        self._far_updates = 0

    def _is_known(self, state: LedgerState) -> bool:
        """Return True if the promotion gate needs no evaluation of the newest version. That is so if the job has no
        gate that compares versions, or if the newest version is already served and its reward is known."""
        if self.gate is None or not self._compares:
            return True
        served = state.promoted
        return served is not None and served.version == state.version and not self.gate.lacks(state)

    def _is_older(self, row: Mapping[str, Any], state: LedgerState) -> bool:
        """Return True if a rollback has since replaced the version that ``row`` evaluates. The new version has the same
        number of updates, which does not tell the two apart, and needs an evaluation of its own."""
        of_now = int(row["step"]) == state.updates
        return of_now and int(row["version"]) != state.version and not self._is_known(state)

    # -- updates -----------------------------------------------------------------------------------------------------

    def on_group(self, header: GroupHeader, *, duplicate: bool) -> None:
        """Count a group that arrived. A group that has no completions because of an error counts as a loss of as many
        completions as the job requests per group."""
        is_lost = bool(header.error) and not header.lengths and not header.skipped
        lost = self.config.completions_per_group if is_lost else 0
        self.tally.on_group(header, duplicate=duplicate, lost=lost)
        self.health.error = header.error or self.health.error

    def on_events(self, events: Sequence[Event], candidates: Mapping[Draw, Candidate]) -> None:
        """Count the decisions that are about to be committed. ``candidates`` contains the groups as they are before the
        commit."""
        self.tally.on_events(events, candidates)

    def values_of(
        self, report: Report, batch: BatchSealed, candidates: Mapping[Draw, Candidate], now: float,
        live: Mapping[str, float],
    ) -> dict[str, float]:  # fmt: skip
        """Return the metrics to record for the update that trained on ``batch``; ``candidates`` contains the groups of
        the batch.

        ``live``: measurements of the supply of live groups.
        """
        self.tally.on_trained(batch, candidates)
        trained = report.metrics.get("tokens/trained", float(sum(group.tokens for group in batch.groups)))
        return {**report.metrics, **self.tally.row(batch, int(trained), now), **live}

    def disproof(self, report: Report) -> str:
        """Return a message if an update's metrics show that its tokens were not sampled by the policy versions recorded
        for them; else ''.

        A large update of the policy also raises the metric ``lag/logprob``, but only in the next ``max_lag`` updates,
        whose tokens earlier versions sampled. So ``lag/logprob`` must exceed the bound in ``max_lag + 1`` updates in a
        row.
        """
        train = self.config.train
        self._count_far(report.metrics)
        if train.max_mismatch is None or self.config.algorithm.type == "sac":  # sac: old transitions
            return ""
        found = report.metrics.get("mismatch/logprob", 0.0)
        if found <= train.max_mismatch:
            if self._far_updates <= train.max_lag or "lag/logprob" not in report.metrics:
                return ""
            found = report.metrics["lag/logprob"]
        return (
            f"update {report.batch}: sampler and trainer differ by {found:.2f} nats per token, more than "
            f"train.max_mismatch {train.max_mismatch:g}: what the engines serve is not what they say. Look at their "
            "logs, start them anew, and resume the job, or roll it back"
        )

    def _count_far(self, values: Mapping[str, float]) -> None:
        """Update the number of consecutive updates whose metric ``lag/logprob`` exceeds the setting
        ``train.max_mismatch``."""
        bound, lag = self.config.train.max_mismatch, values.get("lag/logprob")
        if bound is not None and lag is not None:
            self._far_updates = 0 if lag <= bound else self._far_updates + 1

    def after_update(self, event: BatchTrained, entry: int, state: LedgerState) -> None:
        """Write the metrics of an update committed in ledger entry ``entry``, and judge goals and health."""
        self.reward = event.metrics.get("reward/mean", self.reward)
        in_flight, dropped = float(len(state.open)), float(state.dropped.total())
        values = _reported(event.metrics, state) | {"draws/in_flight": in_flight, "draws/dropped": dropped}
        self._write(event, entry, values)
        self.goals.take(values, event.number)
        self.health.take(event.number, values)
        self.look()
        for name in self.goals.unknown(values) if not self._warned else []:
            why = "no episode succeeded yet" if name in event.metrics else "is not a metric of this job's updates"
            self.outbox.event("warning", "metric", f"'{name}' is followed but {why}")
        self._warned = True

    def look(self, *, ended: bool = False) -> None:
        """Publish an event for each health warning that began or ended. With ``ended`` (the run has ended), judge even
        a short run."""
        self.health.recent = self.tally.since
        for change in self.health.judge(ended=ended):
            level, text = ("warning", change.message) if change.message else ("info", f"{change.kind} is over")
            self.outbox.event(level, "health", text, kind=change.kind)

    def lacks_rows(self, state: LedgerState) -> bool:
        """Return True if METRICS lacks rows of the newest updates, and the ledger can restore these rows."""
        batch, entry = self.newest_row
        return 0 < state.last_trained - batch <= MAX_RESTORED and (entry > 0 or not batch)

    def restore(self, event: BatchTrained, entry: int, state: LedgerState) -> None:
        """Write the row of an update to METRICS, unless an earlier leader has written this row."""
        if not event.metrics or event.number <= self.newest_row[0]:
            return
        values = _reported(event.metrics, state)
        self._write(event, entry, values)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        row = {"kind": "train", "batch": event.number, "entry": entry, "values": finite}
        self.resume([row], state)

    def _write(self, event: BatchTrained, entry: int, values: dict[str, float]) -> None:
        self.outbox.metrics(
            "train", event.number, event.version, values, batch=event.number, time=event.time, entry=entry
        )

    # -- evaluations -------------------------------------------------------------------------------------------------

    def holds(self, state: LedgerState, point: int) -> bool:
        """Return True if the next batch after ``point`` completed updates must not be sealed yet, because an evaluation
        or a checkpoint has to come first."""
        return self._is_due(state, point) or self.goals.holds(state)

    def _is_due(self, state: LedgerState, point: int, *, final: bool = False) -> bool:
        """Return True if an evaluation is due at ``point`` completed updates: the plan contains it, or the gate needs
        the held-out reward of the newest version."""
        lacks = self.gate is not None and self.plan.enabled and point == state.updates and self.gate.lacks(state)
        return lacks or self.plan.due(point, final=final)

    def begin_evaluation(self, state: LedgerState, *, final: bool, now: float, epoch: int) -> list[Ticket]:
        """Start the evaluation that is due now and return its tickets, or []."""
        if state.trainable or now < self._not_before or not self._is_due(state, state.updates, final=final):
            return []
        deadline = now + self.config.train.draw_timeout_s
        return self.plan.start(
            state.updates, state.version, now=now, deadline=deadline, epoch=epoch,
            temperature=state.settings.get(TEMPERATURE),
        )  # fmt: skip

    def end_evaluation(self, state: LedgerState, now: float) -> bool:
        """Close the evaluation in progress; return False if there is none."""
        if self.plan.current is None:
            return False
        point = self.plan.current.point
        values = _reported(self.plan.finish(now), state)
        if self._evaluated(point, state.version, values):
            self.outbox.metrics("eval", point, state.version, values, batch=state.newest_batch)
        elif not values["eval/missing"]:
            self._not_before = now + AGAIN_S
        shown = [f"{name} {values[name]:.3f}" for name in self.config.evaluation.metrics if name in values]
        text, missing = f"update {point}: {', '.join(shown) or 'nothing could be scored'}", values["eval/missing"]
        text += f"; {missing:.0f} prompts are missing, so no goal follows from it" if missing else ""
        self.outbox.event("warning" if missing else "info", "evaluation", text)
        self.goals.take(values, state.newest_batch)
        return True

    def _evaluated(self, point: int, version: int, values: Mapping[str, float]) -> bool:
        """Record the values of an evaluation; return False if ``point`` must be evaluated again.

        A promotion gate that compares versions needs all prompts and a finite reward. Otherwise the leader evaluates
        the point again.
        """
        missing = bool(values.get("eval/missing"))
        metric = self.gate.config.metric if self.gate is not None and self._compares else ""
        if metric and (missing or not math.isfinite(values.get(metric, math.nan))):
            self.plan.done.discard(point)
            return False
        self.plan.done.add(point)
        if not missing:
            self.evaluated = Evaluated(version, values)
        return True

    @property
    def _compares(self) -> bool:
        return self.gate is not None and self.gate.config.max_drop is not None

    def pending(self, state: LedgerState) -> bool:
        """Return True if the end of the run must wait for an evaluation."""
        return self.plan.current is not None or self._is_due(state, state.updates, final=True)


def _reported(values: Mapping[str, float], state: LedgerState) -> dict[str, float]:
    """Remove successes of 0 from ``values`` if the job's simulator, according to its description, does not report
    success.

    A success above zero stays, because an environment of Gymnasium may report its first success after the step on which
    the description is based.
    """
    known = {TRAINED_SUCCESS: state.reports_success, HELD_OUT_SUCCESS: state.reports_held_out_success}
    return {name: value for name, value in values.items() if value or known.get(name, True)}
