"""Whether a live interaction may be trained on, and for which reward. Pure: the same facts give the same decision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.shared.config.online import Level, MetricConfig, OnlineConfig
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import CANARY, CONSTRAINED, Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = [
    "DRAWN_OTHERWISE",
    "MASKED",
    "UNFINISHED",
    "Decision",
    "admit",
    "age",
    "counted",
    "is_invalid",
    "lag_of",
    "level_of",
    "out_of_range",
    "refusal_of",
    "reward_of",
    "reward_of_whole",
    "worth_of",
]

LEVELS: tuple[Level, ...] = ("interaction", "episode")
FARTHEST = 10.0
"""A float beyond this many times its metric's bounds is an error of its sender, not an opinion."""
STALE, TRUNCATED, UNFINISHED = "stale", "truncated", "unfinished"
MASKED = frozenset({TRUNCATED, UNFINISHED})
"""Why the tokens of what is admitted are in no loss, while its reward is in the baseline."""
NOT_REPLAYABLE = "sampling_not_replayable"
DRAWN_OTHERWISE = frozenset({NOT_REPLAYABLE, CONSTRAINED})
"""The policy's weights, but another distribution than the one that the trainer computes."""
IMITABLE = frozenset({STALE, *DRAWN_OTHERWISE, "other_temperature"})
"""Why the policy loss may not use an answer that can be imitated all the same."""
HIGHEST_LOGPROB = 1e-6
"""Log-probs above this are no log-probs."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one interaction now.

    ``wait``: what was said of it is not complete. ``reject``: it is never trained on, for ``reason``; its ``reward``
    still counts for the turns before it. ``train``: ``reason`` says what the reward comes from: `feedback`, `credit`
    (only what was said of other turns), `default` or `invalid`, or why it is masked; ``objective`` which loss may use
    it, and ``denied`` why the policy loss may not. ``compared``: it is not trained on, but its reward says what its
    version is worth.
    """

    verdict: Literal["wait", "train", "reject"]
    reason: str
    reward: float = 0.0
    objective: Objective = "policy"
    denied: str = ""
    compared: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether its reward is what was said of it, or stands for what was not."""
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
    """Decide on one interaction from everything that was said of it.

    Args:
        items: feedback on it, and on its episode where it is the ``last`` turn; the newest revision of each id.
        version: policy version from which the next update starts.
        now: Unix seconds.
        last: whether metrics of the episode are its own.
        closed: whether nothing more is waited for: what is missing counts as its default.
        rated: whether something was said of another turn of its conversation, or of the whole episode, for which this
            one gets its share.
        refusal: what ``refusal_of`` says of it, where that is known already.
    """
    reward = reward_of(interaction, items, job, now=now, last=last, closed=closed)
    said = bool(counted(items, job.online))
    refusal = refusal_of(interaction, job) if refusal is None else refusal
    reason = refusal or _stale(interaction, version, job.train.max_lag)
    off_policy, masked = job.online.off_policy, _is_cut(interaction) and job.online.truncated == "mask"
    if reason in IMITABLE and not masked and off_policy is not None and off_policy.supervised is not None:
        return _imitated(interaction, reward, reason, job, source="feedback" if said else "credit" if rated else "")
    if reason:
        return _refused(interaction, reward, reason, job, said=said or rated)
    if max(span.version for span in interaction.spans) > version:
        return Decision("wait", "newer_than_the_clock")
    if is_invalid(interaction, job):
        return Decision("train", TRUNCATED if masked else "invalid", invalid_reward(job))
    if reward is None:
        return Decision("wait", "feedback")
    defaults = any(metric.default_after_s is not None for metric in job.online.metrics.values())
    source = "feedback" if said else "credit" if rated else "default" if defaults else ""
    kind = TRUNCATED if masked else source
    return Decision("train", kind, reward) if source else Decision("reject", "no_feedback", reward)


def _imitated(interaction: Interaction, reward: float | None, denied: str, job: OnlineJob, *, source: str) -> Decision:
    """What the policy loss may not use is imitated where somebody said what it is worth."""
    if reward is None:
        return Decision("wait", "feedback")
    if not source or is_invalid(interaction, job):
        return _refused(interaction, reward, denied, job, said=bool(source))
    return Decision("train", source, reward, "supervised", denied)


def _refused(interaction: Interaction, reward: float | None, reason: str, job: OnlineJob, *, said: bool) -> Decision:
    """What is never trained on. Where versions are compared by its reward, it waits for that all the same."""
    if reason != CANARY and (reason != STALE or job.online.canary is None):
        return Decision("reject", reason, reward or 0.0)
    if reward is None:
        return Decision("wait", "feedback")
    defaults = any(metric.default_after_s is not None for metric in job.online.metrics.values())
    return Decision("reject", reason, reward, compared=said or defaults or is_invalid(interaction, job))


def refusal_of(interaction: Interaction, job: OnlineJob) -> str:
    """Why an interaction is never trained on, whatever is said of it; '' where nothing speaks against it."""
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
        "other_temperature": interaction.sampling.temperature <= 0,  # any other one is trained at
        TRUNCATED: _is_cut(interaction) and job.online.truncated == "leave_out",
    }
    return next((reason for reason, found in checks.items() if found), "")


def lag_of(interaction: Interaction, version: int) -> int:
    """Versions between the oldest token and an update that starts from ``version``."""
    return version - min(span.version for span in interaction.spans)


def reward_of(
    interaction: Interaction, items: Iterable[Feedback], job: OnlineJob, *, now: float, last: bool, closed: bool
) -> float | None:
    """Sum over the metrics; None while a declared one is missing that is still waited for."""
    if is_invalid(interaction, job):
        return invalid_reward(job)
    total, online = 0.0, job.online
    said = counted(items, online)
    for level in LEVELS if last else LEVELS[:1]:
        for name, metric in online.of_level(level).items():
            value = _mean(said.get((name, level), ()), metric)
            if value is None:
                due = metric.default_after_s is not None and now >= interaction.ended + metric.default_after_s
                if not (closed or due or name not in online.metrics):
                    return None
                value = worth_of(metric.default_value, metric)
            total += value
    return total


def reward_of_whole(items: Iterable[Feedback], job: OnlineJob) -> float:
    """Sum over the metrics of level `episode` of an episode that is over; a missing one counts as its default."""
    total, said = 0.0, counted(items, job.online)
    for name, metric in job.online.of_level("episode").items():
        value = _mean(said.get((name, "episode"), ()), metric)
        total += worth_of(metric.default_value, metric) if value is None else value
    return total


def is_invalid(interaction: Interaction, job: OnlineJob) -> bool:
    """Whether an answer is bad whatever is said of it."""
    cut_short = _is_cut(interaction) and job.online.truncated == "penalise"
    return interaction.tool_calls_valid is False or cut_short


def _is_cut(interaction: Interaction) -> bool:
    return interaction.finish == "length"


def invalid_reward(job: OnlineJob) -> float:
    """Reward of an answer that cannot be used: never nothing, or it would pay to break what would be judged badly."""
    if job.online.invalid_reward is not None:
        return job.online.invalid_reward
    return min(metric.clip[0] for metric in job.online.metrics.values())


def level_of(item: Feedback, online: OnlineConfig) -> Level | None:
    """What a value judges, one turn or the whole episode; None: it counts nothing.

    Undeclared, `reward` judges what it names: an answer, an episode, or one turn of that.
    """
    metric = online.metric(item.metric)
    if metric is None:
        return None
    if item.metric in online.metrics:
        return metric.level
    return "interaction" if item.inference or item.turn >= 0 else "episode"


def out_of_range(item: Feedback, online: OnlineConfig) -> bool:
    """Whether a value cannot be meant."""
    metric = online.metric(item.metric)
    if metric is None or isinstance(item.value, bool) or not isinstance(item.value, float | int):
        return False
    value = metric.weight * item.value
    if metric.clip[0] <= value <= metric.clip[1]:
        return False
    low, high = FARTHEST * min(metric.clip[0], -metric.clip[1]), FARTHEST * max(metric.clip[1], -metric.clip[0])
    return not math.isfinite(item.value) or not low <= value <= high


def age(item: Feedback) -> tuple[int, float, int, str]:
    """By which words are ordered, the newest one last: by their places in the stream, whichever coordinator took them,
    for clocks differ; within a message by the clock of the one that did.
    """
    return item.seq, item.received, item.revision, item.id


def counted(items: Iterable[Feedback], online: OnlineConfig) -> dict[tuple[str, Level], list[Feedback]]:
    """By metric and level the newest word of each source.

    What has no weight was not said, whatever else it would cause.
    """
    newest: dict[tuple[str, Level, str], Feedback] = {}
    for item in sorted(items, key=age):
        level = level_of(item, online)
        if level is not None:
            newest[item.metric, level, item.key_id] = item
    found: dict[tuple[str, Level], list[Feedback]] = {}
    for (metric, level, _), item in newest.items():
        if item.weight > 0:
            found.setdefault((metric, level), []).append(item)
    return found


def _mean(words: Sequence[Feedback], metric: MetricConfig) -> float | None:
    """What was said of one metric, averaged by weight; None where nobody said anything that counts."""
    if not words:
        return None
    return sum(item.weight * worth_of(item.value, metric) for item in words) / sum(item.weight for item in words)


def worth_of(value: bool | float | str | None, metric: MetricConfig) -> float:
    """Clipped reward of one value."""
    if isinstance(value, bool):
        value = metric.when_true if value else metric.when_false
    number = float(value) if isinstance(value, float | int) else 0.0
    return min(max(metric.weight * number, metric.clip[0]), metric.clip[1])


def _stale(interaction: Interaction, version: int, max_lag: int) -> str:
    return STALE if interaction.spans and lag_of(interaction, version) > max_lag else ""


def _covers(interaction: Interaction, tokens: int) -> bool:
    """Whether the version spans cover every token once, in order."""
    end = 0
    for span in interaction.spans:
        if span.start != end or span.end <= span.start:
            return False
        end = span.end
    return end == tokens
