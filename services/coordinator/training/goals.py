"""Decisions by a job's metrics: the early end of the run, and the best checkpoint. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.goals import EarlyStopConfig, KeepBestConfig
from penstock.shared.protocol.events import BestCheckpoint

__all__ = ["Best", "BestTracker", "EarlyStop", "Goals"]


class EarlyStop:
    """Watches one metric; ``reason`` says why the run should end early, or is '' if the run should go on."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self._newest: deque[float] = deque(maxlen=config.window)
        self._best: float | None = None
        self._without = 0
        self.reason = ""

    def take(self, value: float) -> None:
        """Add the next value of the watched metric; set ``reason`` if the run should end early."""
        config = self.config
        self._newest.append(value)
        if len(self._newest) < config.window:
            return
        mean = sum(self._newest) / config.window
        if config.goal is not None and (mean >= config.goal if config.mode == "max" else mean <= config.goal):
            self.reason = f"{config.metric} reached {mean:g}, the goal is {config.goal:g}"
        gain = math.inf if self._best is None else (mean - self._best) * (1 if config.mode == "max" else -1)
        if gain > config.min_delta:
            self._best, self._without = mean, 0
        else:
            self._without += 1
        if config.patience is not None and self._without >= config.patience:
            self.reason = f"{config.metric} had no new best in {self._without} values; the best is {self._best:g}"


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a metric so far, and the batch after which the value was measured."""

    value: float
    step: int


class BestTracker:
    """Watches one metric; ``best`` is its best value."""

    def __init__(self, config: KeepBestConfig, known: BestCheckpoint | None) -> None:
        self.config = config
        self.best = None if known is None else Best(known.value, known.step)

    def take(self, value: float, step: int) -> None:
        """Add the value that the metric had after batch ``step``."""
        if self.best is None or (value > self.best.value if self.config.mode == "max" else value < self.best.value):
            self.best = Best(value, step)


class Goals:
    """Early stop and best checkpoint of one job. Earlier results come only from the ledger, passed as ``state``."""

    def __init__(self, early_stop: EarlyStopConfig | None, keep_best: KeepBestConfig | None) -> None:
        self._stop, self._keep = early_stop, keep_best
        self._taken: list[tuple[dict[str, float], int]] = []
        self.begin(None)

    def begin(self, known: BestCheckpoint | None) -> None:
        """Discard all values. ``known`` is the best checkpoint that the ledger names, if there is one."""
        self._early = None if self._stop is None else EarlyStop(self._stop)
        self._tracker = None if self._keep is None else BestTracker(self._keep, known)
        self._taken.clear()

    def roll_back(self, state: LedgerState) -> None:
        """Discard the values of batches that a fork removed, and evaluate the remaining values again."""
        left = [(values, step) for values, step in self._taken if state.in_lineage(step)]
        self.begin(state.best)
        for values, step in left:
            self.take(values, step)

    def take(self, values: Mapping[str, float], step: int) -> None:
        """Add the metrics of an update or an evaluation after batch ``step``; non-finite values do not count.

        An evaluation with missing prompts does not count either, because fewer prompts may score better.
        """
        if values.get("eval/missing"):
            return
        followed = {rule.metric for rule in (self._stop, self._keep) if rule is not None}
        self._taken.append(({name: values[name] for name in followed if name in values}, step))
        if self._early is not None and math.isfinite(value := values.get(self._early.config.metric, math.nan)):
            self._early.take(value)
        if self._tracker is not None and math.isfinite(value := values.get(self._tracker.config.metric, math.nan)):
            self._tracker.take(value, step)

    @property
    def stop_reason(self) -> str:
        """Return the reason why the run should end early, or '' if it should go on."""
        return "" if self._early is None else self._early.reason

    def unknown(self, values: Mapping[str, float]) -> list[str]:
        """Return the watched metrics that are missing in an update's ``values``, except metrics of evaluations."""
        followed = [rule.config.metric for rule in (self._early, self._tracker) if rule is not None]
        return [name for name in followed if name not in values and not name.startswith("eval/")]

    def wanted(self, state: LedgerState) -> str:
        """Return the reason to write a checkpoint because of a new best result, or '' if no checkpoint is needed."""
        best = self._unmarked(state)
        if best is None or self._tracker is None or _checkpoint_of(best, state) is not None:
            return ""
        return f"new best {self._tracker.config.metric} {best.value:.4g} after update {best.step}"

    def holds(self, state: LedgerState) -> bool:
        """Return True if no batch may be sealed until the weights with the best evaluation are in a checkpoint."""
        followed = self._tracker.config.metric if self._tracker is not None else ""
        return followed.startswith("eval/") and bool(self.wanted(state))

    def mark(self, state: LedgerState, *, writer_epoch: int, now: float) -> list[BestCheckpoint]:
        """Return the event that names the best checkpoint; [] while this checkpoint does not exist, or if the ledger
        names it already."""
        best = self._unmarked(state)
        number = None if best is None else _checkpoint_of(best, state)
        if best is None or number is None or self._tracker is None:
            return []
        metric = self._tracker.config.metric
        return [
            BestCheckpoint(
                writer_epoch=writer_epoch, time=now, number=number, metric=metric, value=best.value, step=best.step
            )
        ]

    def _unmarked(self, state: LedgerState) -> Best | None:
        best = None if self._tracker is None else self._tracker.best
        if best is None or best.step > state.last_trained:
            return None
        marked = state.best
        return None if marked is not None and (marked.value, marked.step) == (best.value, best.step) else best


def _checkpoint_of(best: Best, state: LedgerState) -> int | None:
    """Return the first checkpoint that contains the update after which ``best`` was measured."""
    return min((number for number in state.checkpoints if number >= best.step), default=None)
