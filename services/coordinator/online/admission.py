"""Decides whether a served interaction is trained, for which loss and with which reward. Pure and deterministic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import Level, MetricConfig, OnlineConfig
from penstock.shared.protocol.live.interaction import CANARY, CONSTRAINED, Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = [
    "DRAWN_OTHERWISE",
    "MASKED",
    "UNFINISHED",
    "Decision",
    "admit",
    "arrival_order",
    "counted_feedback",
    "is_far_off",
    "is_invalid",
    "lag_of",
    "level_of",
    "out_of_range",
    "refusal_of",
    "reward_of",
    "reward_of_value",
    "reward_of_whole",
]

LEVELS: tuple[Level, ...] = ("interaction", "episode")
NUMBER = (float, int)
MAX_OUT_OF_RANGE = 10.0
"""A float beyond this many times its metric's bounds is an error of its sender, not a judgement."""
STALE, TRUNCATED, UNFINISHED = "stale", "truncated", "unfinished"
MASKED = frozenset({TRUNCATED, UNFINISHED})
"""Reasons for which the tokens of an admitted turn enter no loss, while its reward still enters the baseline."""
NOT_REPLAYABLE = "sampling_not_replayable"
DRAWN_OTHERWISE = frozenset({NOT_REPLAYABLE, CONSTRAINED})
"""Reasons of answers drawn with the policy's weights from another distribution than the trainer computes."""
IMITABLE = frozenset({STALE, *DRAWN_OTHERWISE, "other_temperature"})
"""Reasons that exclude an answer from the policy loss, but not from imitation."""
HIGHEST_LOGPROB = 1e-6
"""A larger log-prob is invalid."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision on one interaction.

    ``wait``: feedback is missing. ``reject``: the interaction is never trained, for ``reason``; its ``reward`` still
    counts for the turns before it. ``train``: ``reason`` names the origin of the reward (`feedback`, `credit` from
    other turns only, `default`, `invalid`) or why its tokens are masked; ``objective`` names the loss, and ``denied``
    why the policy loss may not use it. ``compared``: the interaction is not trained, but its reward counts in a canary
    trial.
    """

    verdict: Literal["wait", "train", "reject"]
    reason: str
    reward: float = 0.0
    objective: Objective = "policy"
    denied: str = ""
    compared: bool = False

    @property
    def is_judged(self) -> bool:
        """True if the reward follows from feedback, or from its absence."""
        return self.verdict == "train" or self.compared


def admit(
    interaction: Interaction,
    items: Sequence[Feedback],
    job: OnlineJob,
    *,
    version: int,
    now: float,
    last: bool = True,
    closed: bool = False,
    rated: bool = False,
    refusal: str | None = None,
) -> Decision:
    """Decide on one interaction given all feedback on it.

    Args:
        items: newest revisions of the feedback on it, and on its episode if it is the ``last`` turn.
        version: policy version from which the next update starts.
        now: Unix seconds.
        last: True if metrics of the episode belong to this turn.
        closed: True if no more feedback is awaited: a missing metric takes its default.
        rated: True if another turn of its conversation, or the whole episode, has feedback, so that it gets credit.
        refusal: result of ``refusal_of``, if the caller has it already.
    """
    reward = reward_of(interaction, items, job, now=now, last=last, closed=closed)
    has_feedback = bool(counted_feedback(items, job.online))
    refusal = refusal_of(interaction, job) if refusal is None else refusal
    reason = refusal or _stale(interaction, version, job.train.max_lag)
    off_policy, masked = job.online.off_policy, _is_cut(interaction) and job.online.truncated == "mask"
    if reason in IMITABLE and not masked and off_policy is not None and off_policy.supervised is not None:
        return _imitated(
            interaction, reward, reason, job, source="feedback" if has_feedback else "credit" if rated else ""
        )
    if reason:
        return _refused(interaction, reward, reason, job, has_feedback=has_feedback or rated)
    if max(span.version for span in interaction.spans) > version:
        return Decision("wait", "newer_than_the_clock")
    if is_invalid(interaction, job):
        return Decision("train", TRUNCATED if masked else "invalid", invalid_reward(job))
    if reward is None:
        return Decision("wait", "feedback")
    defaults = any(metric.default_after_s is not None for metric in job.online.metrics.values())
    source = "feedback" if has_feedback else "credit" if rated else "default" if defaults else ""
    kind = TRUNCATED if masked else source
    return Decision("train", kind, reward) if source else Decision("reject", "no_feedback", reward)


def _imitated(interaction: Interaction, reward: float | None, denied: str, job: OnlineJob, *, source: str) -> Decision:
    """Admit for imitation an answer that the policy loss may not use, if it has feedback or credit."""
    if reward is None:
        return Decision("wait", "feedback")
    if not source or is_invalid(interaction, job):
        return _refused(interaction, reward, denied, job, has_feedback=bool(source))
    return Decision("train", source, reward, "supervised", denied)


def _refused(
    interaction: Interaction, reward: float | None, reason: str, job: OnlineJob, *, has_feedback: bool
) -> Decision:
    """Reject an interaction. If a canary trial uses its reward to compare versions, wait for the reward first."""
    if reason != CANARY and (reason != STALE or job.online.canary is None):
        return Decision("reject", reason, reward or 0.0)
    if reward is None:
        return Decision("wait", "feedback")
    defaults = any(metric.default_after_s is not None for metric in job.online.metrics.values())
    return Decision("reject", reason, reward, compared=has_feedback or defaults or is_invalid(interaction, job))


def refusal_of(interaction: Interaction, job: OnlineJob) -> str:
    """Return why an interaction is never trained whatever its feedback is, or '' if nothing excludes it."""
    tokens = len(interaction.token_ids)
    finite = all(math.isfinite(value) and value <= HIGHEST_LOGPROB for value in interaction.logprobs)
    drawn_otherwise = interaction.untrainable if interaction.untrainable in DRAWN_OTHERWISE else ""
    forbidden = bool(interaction.untrainable) and not drawn_otherwise
    checks = {
        interaction.untrainable if forbidden else "": forbidden,
        f"split_{interaction.split}": interaction.split != "train",
        "no_tokens": not tokens or not interaction.prompt_ids,
        "prompt_too_long": len(interaction.prompt_ids) > job.data.prompt.max_tokens,
        "completion_too_long": tokens > job.sampling.max_new_tokens,
        "lengths_differ": len(interaction.logprobs) != tokens or not _covers(interaction, tokens),
        "not_finite": not finite,
        drawn_otherwise or NOT_REPLAYABLE: bool(drawn_otherwise),
        "other_temperature": interaction.sampling.temperature <= 0,  # the trainer computes any other temperature
        TRUNCATED: _is_cut(interaction) and job.online.truncated == "leave_out",
    }
    return next((reason for reason, found in checks.items() if found), "")


def lag_of(interaction: Interaction, version: int) -> int:
    """Return the number of versions between the oldest token and an update that starts from ``version``."""
    return version - min(span.version for span in interaction.spans)


def reward_of(
    interaction: Interaction, items: Iterable[Feedback], job: OnlineJob, *, now: float, last: bool, closed: bool
) -> float | None:
    """Sum the metrics of one turn; None while a declared metric is missing and still awaited."""
    if is_invalid(interaction, job):
        return invalid_reward(job)
    total, online = 0.0, job.online
    by_metric = counted_feedback(items, online)
    for level in LEVELS if last else LEVELS[:1]:
        for name, metric in online.of_level(level).items():
            value = _mean(by_metric.get((name, level), ()), metric)
            if value is None:
                due = metric.default_after_s is not None and now >= interaction.ended + metric.default_after_s
                if not (closed or due or name not in online.metrics):
                    return None
                value = reward_of_value(metric.default_value, metric)
            total += value
    return total


def reward_of_whole(items: Iterable[Feedback], job: OnlineJob) -> float:
    """Sum the metrics of level `episode` of a finished episode; a missing one takes its default."""
    total, by_metric = 0.0, counted_feedback(items, job.online)
    for name, metric in job.online.of_level("episode").items():
        value = _mean(by_metric.get((name, "episode"), ()), metric)
        total += reward_of_value(metric.default_value, metric) if value is None else value
    return total


def is_invalid(interaction: Interaction, job: OnlineJob) -> bool:
    """Return True if an answer is bad whatever its feedback is."""
    cut_short = _is_cut(interaction) and job.online.truncated == "penalise"
    return interaction.tool_calls_valid is False or cut_short


def _is_cut(interaction: Interaction) -> bool:
    return interaction.finish == "length"


def invalid_reward(job: OnlineJob) -> float:
    """Return the reward of an unusable answer: the lowest one, so that it never pays more than a bad answer."""
    if job.online.invalid_reward is not None:
        return job.online.invalid_reward
    return min(metric.clip[0] for metric in job.online.metrics.values())


def level_of(item: Feedback, online: OnlineConfig) -> Level | None:
    """Return the level that an item judges, a turn or the episode; None if it does not count.

    The undeclared metric `reward` judges its target: an answer, an episode, or one turn of it.
    """
    metric = online.metric(item.metric)
    if metric is None:
        return None
    if item.metric in online.metrics:
        return metric.level
    return "interaction" if item.inference or item.turn >= 0 else "episode"


def out_of_range(item: Feedback, online: OnlineConfig) -> bool:
    """Return True if a value lies so far outside its metric's bounds that it must be an error."""
    metric = online.metric(item.metric)
    return metric is not None and is_far_off(item.value, metric)


def is_far_off(value: bool | float | str | None, metric: MetricConfig) -> bool:
    """Return True if a value lies so far outside the bounds of ``metric`` that it must be an error."""
    if isinstance(value, bool) or not isinstance(value, NUMBER):
        return False
    weighted, (low, high) = metric.weight * value, metric.clip
    if low <= weighted <= high:
        return False
    low, high = MAX_OUT_OF_RANGE * min(low, -high), MAX_OUT_OF_RANGE * max(high, -low)
    return not math.isfinite(value) or not low <= weighted <= high


def arrival_order(item: Feedback) -> tuple[int, float, int, str]:
    """Return the sort key of feedback, newest last: the place in the stream first, because the clocks of coordinators
    differ; the clock of the receiving coordinator within one message."""
    return item.seq, item.received, item.revision, item.id


def counted_feedback(items: Iterable[Feedback], online: OnlineConfig) -> dict[tuple[str, Level], list[Feedback]]:
    """Return the newest item of each source, by metric and level.

    An item without weight does not count, but it replaces the earlier items of its source.
    """
    newest: dict[tuple[str, Level, str], Feedback] = {}
    for item in sorted(items, key=arrival_order):
        level = level_of(item, online)
        if level is not None:
            newest[item.metric, level, item.key_id] = item
    found: dict[tuple[str, Level], list[Feedback]] = {}
    for (metric, level, _), item in newest.items():
        if item.weight > 0:
            found.setdefault((metric, level), []).append(item)
    return found


def _mean(items: Sequence[Feedback], metric: MetricConfig) -> float | None:
    """Return the weighted mean reward of the items of one metric, or None without items."""
    if not items:
        return None
    return sum(item.weight * reward_of_value(item.value, metric) for item in items) / sum(item.weight for item in items)


def reward_of_value(value: bool | float | str | None, metric: MetricConfig) -> float:
    """Return the clipped reward of one value."""
    if isinstance(value, bool):
        value = metric.when_true if value else metric.when_false
    number = float(value) if isinstance(value, float | int) else 0.0
    return min(max(metric.weight * number, metric.clip[0]), metric.clip[1])


def _stale(interaction: Interaction, version: int, max_lag: int) -> str:
    return STALE if interaction.spans and lag_of(interaction, version) > max_lag else ""


def _covers(interaction: Interaction, tokens: int) -> bool:
    """Return True if the version spans cover every token once, in order."""
    end = 0
    for span in interaction.spans:
        if span.start != end or span.end <= span.start:
            return False
        end = span.end
    return end == tokens
