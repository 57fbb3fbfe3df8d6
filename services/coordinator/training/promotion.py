"""Decides which version of an online job is served, from the measurements of the newest version. Pure.

A version that breaks a bound is refused: the version before it stays served, and its answers are trained within the lag
bound. After `online.promotion.patience` refusals in a row training rolls back to the served version. With
`online.promotion.canary` a version that keeps every bound first answers a share of live traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from penstock.services.coordinator.training.canary import Arm, arms_of, verdict_of
from penstock.services.coordinator.training.inputs import Evaluated, Inputs, Rollback
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.promotion import PromotionConfig
from penstock.shared.protocol.events import (
    BatchTrained,
    CanaryBegun,
    Event,
    Judged,
    LineageForked,
    Promoted,
    PromotionRefused,
)

__all__ = ["Decided", "PromotionGate", "flaw_of_rollback", "flaws_of_promotions", "gate_of"]

Decided = Promoted | PromotionRefused | CanaryBegun
"""Events that decide on a version: it is promoted, refused, or put on trial."""
FIGURES = {
    "policy/kl_ref": "max_kl",
    "policy/entropy": "min_entropy",
    "mismatch/kl": "max_mismatch",
    "lag/kl": "max_mismatch",
}
"""Metrics of an update that have bounds, with the config key of each."""


class PromotionGate:
    """Decides if the newest version of an online job is served."""

    def __init__(self, config: PromotionConfig) -> None:
        self.config = config
        self._judged: Mapping[str, Judged] = {}
        self._arms = arms_of([])

    def figures_of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return those of an update's metrics for which the promotion config sets a bound. The ledger records them."""
        bounded = [name for name, bound in FIGURES.items() if getattr(self.config, bound) is not None]
        return {name: metrics[name] for name in bounded if name in metrics}

    def decide(self, state: LedgerState, inputs: Inputs, *, writer_epoch: int) -> Decided | None:
        """Return the event that decides on the version ``state.version``; None if this version was decided before or is
        not measured yet."""
        now, figures = inputs.now, self._figures(state, inputs.evaluated)
        reason, known = self._grant(state, figures, inputs.forced)
        flaws = [] if reason or self._is_decided(state) else self._flaws(state, figures)
        if reason == "passed" and self.config.canary is not None:
            canary = state.canary
            if canary is None:
                return self._canary(state, known, writer_epoch=writer_epoch, now=now)
            verdict = verdict_of(self.config.canary, canary, self.arms(state), now=now)
            reason = {"passed": "passed", "timed out": "canary timed out"}.get(verdict.status, "")
            flaws = [verdict.reason] if verdict.status == "refused" else []
            figures = known = dict(known) | verdict.figures
        if reason:
            return Promoted(
                writer_epoch=writer_epoch, time=now, version=state.version, number=state.last_trained,
                digest=state.digest, reason=reason, figures=dict(known),
            )  # fmt: skip
        if not flaws:
            return None
        return PromotionRefused(
            writer_epoch=writer_epoch, time=now, version=state.version, number=state.last_trained,
            reason="; ".join(flaws), figures=figures,
        )  # fmt: skip

    def _canary(
        self, state: LedgerState, figures: Mapping[str, float], *, writer_epoch: int, now: float
    ) -> CanaryBegun | None:
        """Return the event that begins a trial of the newest version.

        None while a batch is sealed, because the version on trial must keep its weights.
        """
        config, served = self.config.canary, state.promoted
        if config is None or served is None or state.sealed:
            return None
        return CanaryBegun(
            writer_epoch=writer_epoch, time=now, version=state.version, number=state.last_trained,
            digest=state.digest, served=served.version, share=config.share, figures=dict(figures),
        )  # fmt: skip

    def arms(self, state: LedgerState) -> tuple[Arm, Arm]:
        """Return the rewards of the version on trial and of the served version; cached until the ledger has new
        samples."""
        if self._judged is not state.judged:
            self._judged, self._arms = state.judged, arms_of(state.judged.values())
        return self._arms

    def _grant(self, state: LedgerState, figures: Mapping[str, float], forced: int) -> tuple[str, Mapping[str, float]]:
        """Return ``(reason to promote the newest version now, figures to record)``; the reason is '' if the version is
        not promoted."""
        served, metric = state.promoted, self.config.metric
        if served is None:
            return "initial", {}
        if served.version == state.version:
            return ("measured", figures) if metric in figures and self.lacks(state) else ("", {})
        if state.forked == state.version and self._is_wanted_fork(state, served):
            return "rolled back", served.figures if served.digest == state.digest else {}
        unknown = self.config.max_drop is not None and metric not in figures
        if forced == state.version and not (unknown and state.sealed):  # otherwise it would stay unmeasured
            return "by request", figures
        if state.canary is not None:  # it kept the bounds when the trial began
            return "passed", state.canary.figures
        passed = not (self._is_decided(state) or unknown or self._flaws(state, figures))
        return ("passed", figures) if passed else ("", {})

    @staticmethod
    def _is_wanted_fork(state: LedgerState, served: Promoted) -> bool:
        """Return True if the first version after a fork may be served.

        That is so if a user requested the fork, if its weights are the served ones, or if it left no newer batches.
        """
        return bool(state.fork_request) or served.digest == state.digest or not state.after(served.number)

    def lacks(self, state: LedgerState) -> bool:
        """Return True if the held-out reward of the newest version must be measured next, even without a planned
        evaluation.

        The reward is needed if that version is served, because others are compared with it, or if a fork began it,
        because the next training depends on it.
        """
        served = state.promoted
        if self.config.max_drop is None or served is None:
            return False
        if served.version != state.version:
            return state.forked == state.version and state.canary is None and not self._is_decided(state)
        return not math.isfinite(served.figures.get(self.config.metric, math.nan))

    @staticmethod
    def _is_decided(state: LedgerState) -> bool:
        return state.version in (one.version for one in (state.promoted, state.refused) if one is not None)

    def _figures(self, state: LedgerState, evaluated: Evaluated | None) -> dict[str, float]:
        """Return the figures of the newest version; a non-finite held-out reward counts as not measured."""
        metric = self.config.metric
        if self.config.max_drop is None or evaluated is None or evaluated.version != state.version:
            return dict(state.figures)
        value = evaluated.values.get(metric, math.nan)
        return state.figures | {metric: value} if math.isfinite(value) else dict(state.figures)

    def _flaws(self, state: LedgerState, figures: Mapping[str, float]) -> list[str]:
        """Describe the bounds that the newest version breaks; a missing measurement breaks no bound."""
        served = {} if state.promoted is None else state.promoted.figures
        return broken_bounds(self.config, figures, served, measured=self.config.metric in figures)

    # -- what follows ------------------------------------------------------------------------------------------------

    def rollback(self, state: LedgerState) -> Rollback | None:
        """Return the rollback to the served version if too many newer versions were refused, or None.

        One refusal of a version that a fork began is enough: a fork takes a number above all published versions, so
        answers of the served version may exceed the lag bound.
        """
        refused, served = state.refused, state.promoted
        if refused is None or served is None:
            return None
        if state.num_refused < self.config.patience and refused.version != state.forked:
            return None
        return Rollback(served.number, f"version {refused.version} was refused: {refused.reason}")

    def lets_train(self, state: LedgerState, announced: int) -> bool:
        """Return True if another batch may be sealed; ``announced`` is the promoted version that was last published to
        the engines.

        Only one batch is sealed at a time, so that the served version keeps its weight slot. During a trial none is
        sealed, because the version on trial uses the other slot.
        """
        if state.sealed or state.canary is not None:
            return False
        return state.promoted is not None and announced == state.promoted.version

    def fact(self, state: LedgerState) -> tuple[Literal["True", "False", "Unknown"], str, str]:
        """Return status, reason and message of the condition `PromotionAllowed`."""
        served, refused = state.promoted, state.refused
        if served is None:
            return "Unknown", "NoVersionYet", ""
        if served.version == state.version:
            return "True", _camel(served.reason), f"version {served.version} is served"
        kept = f"version {served.version} is served on"
        if state.canary is not None and self.config.canary is not None:
            canary, old = self.arms(state)
            needed, share = self.config.canary.conversations, state.canary.share
            return "Unknown", "Canary", (
                f"version {state.version} answers {share:.0%} of the conversations; {canary.count} of its and "
                f"{old.count} of the others, of {needed} each, are judged; {kept}"
            )  # fmt: skip
        if refused is not None:
            return "False", "BoundBroken", f"version {refused.version}: {refused.reason}; {kept}"
        return "Unknown", "NotMeasured", f"version {state.version} is not measured yet; {kept}"


def gate_of(config: AnyTraining) -> PromotionGate | None:
    """Return the gate of a job; None if it always serves the newest version."""
    promotion = config.online.promotion if isinstance(config, OnlineJob) else None
    return None if promotion is None else PromotionGate(promotion)


def broken_bounds(
    config: PromotionConfig, figures: Mapping[str, float], served: Mapping[str, float], *, measured: bool = True
) -> list[str]:
    """Describe the bounds that a version with ``figures`` breaks; ``served`` has the figures of the served version.

    Args:
        measured: True if the held-out reward counts.
    """
    flaws: list[str] = []
    bounds = (
        ("policy/kl_ref", None, config.max_kl),
        ("policy/entropy", config.min_entropy, None),
        *((name, None, config.max_mismatch) for name in _compared(figures)),
    )
    for name, floor, ceiling in bounds:
        if floor is not None or ceiling is not None:
            flaws += _outside(name, figures.get(name, math.nan), floor, ceiling)
    if config.max_drop is not None and measured:
        floor = served.get(config.metric, -math.inf) - config.max_drop
        if math.isnan(floor):
            flaws.append(f"{config.metric} of the version served is unknown")
        flaws += _outside(config.metric, figures.get(config.metric, math.nan), floor, None)
    return flaws


def _compared(figures: Mapping[str, float]) -> list[str]:
    """Return the metrics in ``figures`` that compare sampler and trainer; `mismatch/kl` if ``figures`` has none."""
    return [name for name in ("mismatch/kl", "lag/kl") if name in figures] or ["mismatch/kl"]


def flaws_of_promotions(entries: Iterable[Iterable[Event]], config: PromotionConfig | None) -> list[str]:
    """Describe violations in a ledger: promoted versions that broke a bound, or whose figures differ from their
    update's."""
    flaws: list[str] = []
    served: Mapping[str, float] = {}
    measured: Mapping[str, float] = {}
    for event in (event for entry in entries for event in entry):
        match event:
            case BatchTrained():
                measured = event.figures
            case LineageForked():
                measured = {}
            case Promoted() if config is not None:
                is_decided = event.reason in ("passed", "canary timed out")
                broken = broken_bounds(config, event.figures, served) if is_decided else []
                if is_decided and not measured.items() <= event.figures.items():
                    broken.append("its figures are not those of its update")
                flaws += [f"version {event.version} was served: {flaw}" for flaw in broken]
                served = event.figures
            case _:
                pass
    return flaws


def flaw_of_rollback(state: LedgerState, number: int) -> str:
    """Return the reason why training cannot roll back to checkpoint ``number``, or '' if it can."""
    if number not in state.checkpoints:
        known = ", ".join(str(one) for one in sorted(state.checkpoints)) or "none"
        return f"there is no checkpoint {number} to go back to; there are: {known}"
    later = state.after(number)
    if not later:
        return f"nothing was trained after checkpoint {number}"
    gone = [one for one in later if one not in state.batches]
    if gone:
        return (
            f"batch {gone[0]}, trained after checkpoint {number}, is not in the log any more: take a later checkpoint"
        )
    return ""


def _outside(name: str, value: float, floor: float | None, ceiling: float | None) -> list[str]:
    if not math.isfinite(value):
        return [f"{name} is unknown"]
    if floor is not None and value < floor:
        return [f"{name} {value:.4g} < {floor:.4g}"]
    if ceiling is not None and value > ceiling:
        return [f"{name} {value:.4g} > {ceiling:.4g}"]
    return []


def _camel(reason: str) -> str:
    return "".join(word.capitalize() for word in reason.split())
