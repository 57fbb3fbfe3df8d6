"""Health of a run: derives warnings (no learning signal, instability, failures) from the rows of its updates. Pure.

Each rule has two bounds, one to raise its warning and a milder one to clear it, so that no warning flaps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, median, pstdev

from pydantic import BaseModel

from penstock.services.coordinator.training.ledger import NO_SIGNAL, LedgerState
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import AnyJob, AnyTraining, TextJob
from penstock.shared.protocol.jobs import HealthWarning, WarningKind

__all__ = ["Change", "Health", "health_warnings", "rate_warnings"]

WINDOW = 10
"""Maximum number of newest updates over which a rule takes a share or a mean."""
SETTLED = 5
"""Number of updates that a rule over several updates needs during the run; at the end of the run two suffice."""
LESS_SIGNAL, MORE_SIGNAL = 0.8, 0.6
"""Share of groups with equal rewards at which the warning about them is raised, and below which it is cleared.
Likewise, TRUNCATED and WHOLE bound the share of truncated completions, UNSCORED and SCORED that of completions without
a score."""
SOLVED = 0.9
"""A task counts as solved if the mean reward exceeds the lowest reward seen by at least this share of the range of all
rewards seen, or if this share of the episodes that arrive succeeds. It is then normal that the rewards of a group are
equal, or that all its episodes succeed."""
TRUNCATED, WHOLE = 0.3, 0.2
UNSCORED, SCORED = 0.01, 0.005
COLLAPSED, RECOVERED, LOW_ENTROPY = 0.1, 0.2, 0.05
"""Entropies below which the warning about low entropy is raised, and from which it is cleared, as shares of the initial
entropy. Neither exceeds ``LOW_ENTROPY`` (nats per token)."""
SPIKE, BEFORE, COOL = 10.0, 30, 5
"""A value is a spike if it exceeds ``SPIKE`` times the metric's median over the ``BEFORE`` previous updates. The
warning about a spike lasts ``COOL`` updates."""
LEAST_KL = 0.1
STUCK_UPDATES, STUCK_AT_END, ENDS = 60, 30, 50
"""Updates that the rule `reward_stuck` needs during the run, and at its end. The rule compares the mean rewards of the
first and last third of the run, of at most ``ENDS`` updates each."""
STUCK_ERRORS, RISEN_ERRORS = 2.0, 3.0
"""The rule `reward_stuck` raises its warning if the mean reward rose by at most the first number of standard errors,
and clears the warning once the mean reward rose by more than the second number."""
GRADIENTS = ("optimizer/grad_norm", "policy/grad_norm", "actor/grad_norm")
LEAST_RATE, MOST_RATE, MOST_PRETRAINED_RATE = 1e-8, 1e-2, 1e-3
"""Bounds outside which a learning rate is likely a mistake; the last one is for all weights of a pretrained model."""
FOLLOWED = (
    "reward/mean", "groups/count", "groups/no_signal", f"dropped/{NO_SIGNAL}", "policy/entropy", "policy/approx_kl",
    "length/truncated", "sequences/arrived", "sequences/unscored", "sequences/succeeded", *GRADIENTS,
)  # fmt: skip

Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Change:
    """A warning that begins, with its ``message``, or a warning that ends (``message`` is '')."""

    kind: WarningKind
    message: str


class Health:
    """Warnings of one run. ``warnings`` are the current ones, each with its message."""

    def __init__(self, config: AnyTraining) -> None:
        self.config = config
        self.warnings: dict[WarningKind, str] = {}
        self.error = ""
        """The newest error of a scorer or simulator."""
        self.recent: Mapping[str, float] = {}
        """Counts of tokens and draws since the newest metrics row, from ``Tally.since``."""
        self._rows: deque[tuple[int, Row]] = deque(maxlen=BEFORE + WINDOW)
        self._first: list[tuple[int, float]] = []
        self._last: deque[tuple[int, float]] = deque(maxlen=ENDS)
        self._entropy: list[tuple[int, float]] = []
        self._updates = 0
        self._range = (math.inf, -math.inf)
        self._spikes: dict[str, tuple[int, str]] = {}
        self._ended = False

    # -- facts -------------------------------------------------------------------------------------------------------

    def take(self, batch: int, values: Mapping[str, float]) -> None:
        """Record the metrics of the update that trained on ``batch``, for the rules that ``judge`` evaluates."""
        row = {name: values[name] for name in FOLLOWED if math.isfinite(values.get(name, math.nan))}
        self._record_spikes(values)
        self._rows.append((batch, row))
        self._updates += 1
        self.recent = {}
        if (entropy := row.get("policy/entropy")) is not None and len(self._entropy) < SETTLED:
            self._entropy.append((batch, entropy))
        if (reward := row.get("reward/mean")) is not None:
            if len(self._first) < ENDS:
                self._first.append((batch, reward))
            self._last.append((batch, reward))
            low, high = self._range
            self._range = min(low, values.get("reward/min", reward)), max(high, values.get("reward/max", reward))

    def roll_back(self, state: LedgerState) -> None:
        """Discard the metrics of batches that a fork removed from the lineage."""
        kept = [one for one in self._rows if state.in_lineage(one[0])]
        self._updates = state.updates
        self._rows = deque(kept, maxlen=self._rows.maxlen)
        self._first = [one for one in self._first if state.in_lineage(one[0])]
        self._last = deque((one for one in self._last if state.in_lineage(one[0])), maxlen=ENDS)
        self._entropy = [one for one in self._entropy if state.in_lineage(one[0])]
        self._spikes = {name: one for name, one in self._spikes.items() if one[0] < self._updates}

    # -- judgement ---------------------------------------------------------------------------------------------------

    def judge(self, *, ended: bool = False) -> list[Change]:
        """Evaluate all rules and return the changes. ``ended``: the run has ended, so judge it even if it is short."""
        self._ended = ended
        changes = []
        for kind, rule in self._rules():
            before, message = self.warnings.get(kind, ""), rule(kind in self.warnings)
            if message:
                self.warnings[kind] = message
            else:
                self.warnings.pop(kind, None)
            if bool(message) is not bool(before):
                changes.append(Change(kind, message))
        return changes

    def _rules(self) -> Iterator[tuple[WarningKind, Callable[[bool], str]]]:
        yield "no_signal", self._no_signal
        yield "reward_stuck", self._reward_stuck
        yield "scorer_failures", self._scorer_failures
        yield "kl_spike", lambda _: self._spike("kl")
        yield "gradient_spike", lambda _: self._spike("gradient")
        if not isinstance(self.config, EmbodiedJob):
            yield "entropy_collapse", self._entropy_collapse
            if not self.config.sampling.ignore_eos:
                yield "truncation", self._truncation

    @property
    def _solved(self) -> bool:
        """True if training has solved the task, by either of two signs: most of the newest episodes succeeded, or the
        newest mean rewards are near the highest reward so far while not all rewards so far were equal.

        The first sign counts all episodes that arrived, because those that are trained may be only the hard ones.
        """
        low, high = self._range
        newest = self._window("reward/mean")
        succeeded, arrived, lost = (self._count(f"sequences/{name}") for name in ("succeeded", "arrived", "unscored"))
        if succeeded and succeeded >= SOLVED * (arrived - lost):
            return True
        return bool(newest) and high > low and fmean(newest) >= low + SOLVED * (high - low)

    def _window(self, name: str) -> list[float]:
        newest = list(self._rows)[-WINDOW:]
        return [row[name] for _, row in newest if name in row]

    def _count(self, name: str) -> float:
        """Return the sum of the metric ``name``, a count, over the last ``WINDOW`` updates, plus the count since the
        newest of these updates."""
        return sum(self._window(name)) + self.recent.get(name, 0.0)

    def _has_settled(self, values: Sequence[float], least: int = SETTLED) -> bool:
        return len(values) >= (2 if self._ended else least)

    def _no_signal(self, was: bool) -> str:
        counts = self._window("groups/count")
        again = sum(self._window(f"dropped/{NO_SIGNAL}"))
        waste = self.recent.get(f"dropped/{NO_SIGNAL}", 0.0)  # a run that resamples may never complete an update
        size = self.config.groups_per_batch
        if waste < SETTLED * size and (not self._window("groups/no_signal") or not self._has_settled(counts)):
            return ""
        without = sum(self._window("groups/no_signal")) + again + waste
        share = without / max(1.0, sum(counts) + again + waste)
        if share < (MORE_SIGNAL if was else LESS_SIGNAL) or self._solved:
            return ""
        low, high = self._range
        alike = f"; every completion so far earned {low:g}" if low == high else ""
        why = "all completions of a prompt earn the same"
        if isinstance(self.config, EmbodiedJob):
            why = "all episodes of a group earn the same, or all succeed, or all fail"
        return (
            f"{share:.0%} of the groups of the last {len(counts)} updates teach nothing: {why}{alike}. Look at "
            "penstock samples; take easier or harder prompts, a warm start, a finer reward, or more "
            "completions (algorithm.group_size)"
        )

    def _reward_stuck(self, was: bool) -> str:
        num = min(ENDS, self._updates // 3, len(self._first), len(self._last))
        if self._updates < (STUCK_AT_END if self._ended else STUCK_UPDATES) or num < 2 or self._solved:
            return ""
        first = [value for _, value in self._first[:num]]
        last = [value for _, value in self._last][-num:]
        error = math.sqrt((pstdev(first) ** 2 + pstdev(last) ** 2) / num)
        gain = fmean(last) - fmean(first)
        if gain > max((RISEN_ERRORS if was else STUCK_ERRORS) * error, 1e-9):
            return ""
        return (
            f"the reward does not rise: {fmean(first):.3g} in the first {num} updates, {fmean(last):.3g} in the last "
            f"{num} of {self._updates}. Look at penstock samples, at the learning rate, and at groups/no_signal"
        )

    def _scorer_failures(self, was: bool) -> str:
        arrived, failed = self._count("sequences/arrived"), self._count("sequences/unscored")
        if not failed or failed / arrived < (SCORED if was else UNSCORED):
            return ""
        reason = f"; the newest error: {self.error}" if self.error else ""
        is_embodied = isinstance(self.config, EmbodiedJob)
        what, outcome = ("episodes", "were lost") if is_embodied else ("completions", "could not be scored")
        return f"{failed:.0f} of the newest {arrived:.0f} {what} {outcome} and are not trained on{reason}"

    def _entropy_collapse(self, was: bool) -> str:
        newest = self._window("policy/entropy")
        start = fmean(value for _, value in self._entropy) if self._entropy else 0.0
        if self._updates < 2 * WINDOW or start <= 0 or not newest or self._solved:
            return ""
        now = fmean(newest)
        if not 0 <= now < min(start * (RECOVERED if was else COLLAPSED), LOW_ENTROPY):
            return ""
        return (
            f"the entropy fell from {start:.3g} to {now:.2g} nats per token, and the reward is not near its best: the "
            "policy says always the same. Lower the learning rate, or set algorithm.entropy_coef or algorithm.kl"
        )

    def _truncation(self, was: bool) -> str:
        newest = self._window("length/truncated")
        if not self._has_settled(newest) or fmean(newest) < (WHOLE if was else TRUNCATED):
            return ""
        return (
            f"{fmean(newest):.0%} of the completions of the last {len(newest)} updates were cut off at their limit: "
            "raise sampling.max_new_tokens, or reward an end"
        )

    # -- spikes ------------------------------------------------------------------------------------------------------

    def _record_spikes(self, values: Mapping[str, float]) -> None:
        """Record spikes in the ``values`` of the newest update, compared with the rows before it."""
        kl = values.get("policy/approx_kl")
        if kl is not None and (found := self._times("policy/approx_kl", kl, least=LEAST_KL)):
            text = f"the policy moved by {kl:.3g} nats per token in one update (policy/approx_kl), {found}"
            self._spikes["kl"] = self._updates, text
        for name in GRADIENTS:
            norm = values.get(name)
            if norm is not None and (found := self._times(name, norm, least=self._max_grad_norm)):
                self._spikes["gradient"] = self._updates, f"{name} was {norm:.3g}, {found}"
            if norm is None and values.get(f"{name.partition('/')[0]}/steps") == 0:
                text = f"no optimizer step was made in an update: {name} was not finite"
                self._spikes["gradient"] = self._updates, text

    def _times(self, name: str, value: float, *, least: float) -> str:
        """Return by which factor ``value`` exceeds the median of earlier updates, as text; '' if the value is no spike.

        Updates with value 0 had no signal, and do not count.
        """
        before = [row[name] for _, row in self._rows if row.get(name, 0.0) > 0][-BEFORE:]
        if len(before) < SETTLED or value <= max(least, SPIKE * median(before)):
            return ""
        return f"{value / median(before):.0f} times the median of the {len(before)} updates before"

    @property
    def _max_grad_norm(self) -> float:
        """Norm to which the policy's gradient is clipped. A spike below this norm does no harm."""
        config = self.config
        if not isinstance(config, EmbodiedJob):
            return config.optimizer.max_grad_norm
        algorithm = config.algorithm
        own = algorithm.actor if algorithm.type == "sac" else algorithm.policy
        return own.max_grad_norm

    def _spike(self, name: str) -> str:
        at, text = self._spikes.get(name, (-COOL, ""))
        if self._updates - at > COOL:
            return ""
        return f"{text} at update {at + 1}. Lower the learning rate, or set algorithm.kl" if text else ""


def health_warnings(health: Health, before: Sequence[HealthWarning], now: datetime) -> list[HealthWarning]:
    """Return the warnings as shown to users; those in ``before`` keep their time."""
    since = {warning.kind: warning.since for warning in before}
    found = health.warnings.items()
    return [HealthWarning(kind=kind, message=text, since=since.get(kind, now)) for kind, text in found]


def rate_warnings(spec: AnyJob) -> list[str]:
    """Return warnings about learning rates outside the usual range for this kind of model."""
    pretrained = isinstance(spec, TextJob) and spec.model.path is not None and spec.model.lora is None
    most = MOST_PRETRAINED_RATE if pretrained else MOST_RATE
    of_what = "all weights of a pretrained model" if pretrained else "any model"
    return [
        f"{key}: {rate:g} is outside of what is sane for {of_what}, {LEAST_RATE:g} to {most:g}"
        for key, rate in _rates(spec, "")
        if not LEAST_RATE <= rate <= most
    ]


def _rates(model: BaseModel, where: str) -> Iterator[tuple[str, float]]:
    """Yield ``(dotted key, value)`` of each learning rate in a job file."""
    for key in type(model).model_fields:
        value = getattr(model, key)
        if key == "learning_rate":
            yield f"{where}{key}", value
        elif isinstance(value, BaseModel):
            yield from _rates(value, f"{where}{key}.")
