"""Decides whether the job trains on an interaction, with which loss and which reward. Pure and deterministic.

``admit`` decides on an interaction that the gateway served, ``admit_posted`` on one that another system served and a
client posted:

==========================================  =============================================================
the client posts tokens with                loss that uses them
==========================================  =============================================================
log-probs, a version within the lag bound   policy loss (`posted`); a worker recomputes a sample of them
no log-probs, a version still held          policy loss, log-probs computed under that version (`rescored`):
                                            the newest one, or one of `held_versions` before it
neither                                     policy loss as if the newest policy had sampled them
                                            (`assumed`), if the job allows it
any of these, but no policy loss possible   imitation, if the reward is high enough
text only                                   imitation, if the reward is high enough
==========================================  =============================================================
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import REWARD, Level, MetricConfig, OnlineConfig
from penstock.shared.protocol.live.interaction import CANARY, CONSTRAINED, Feedback, Interaction
from penstock.shared.protocol.objective import Objective

__all__ = [
    "AS_SAMPLED",
    "DRAWN_OTHERWISE",
    "MASKED",
    "UNFINISHED",
    "Decision",
    "PolicyState",
    "PostedFacts",
    "admit",
    "admit_posted",
    "admit_posted_for",
    "arrival_order",
    "can_learn_from",
    "counted_feedback",
    "facts_of",
    "has_reward",
    "is_far_off",
    "is_invalid",
    "lag_of",
    "level_of",
    "out_of_range",
    "refusal_of",
    "refusal_of_posted",
    "reward_of",
    "reward_of_posted",
    "reward_of_value",
    "reward_of_whole",
]

LEVELS: tuple[Level, ...] = ("interaction", "episode")
NUMBER = (float, int)
MAX_OUT_OF_RANGE = 10.0
"""A float value counts as an error of its sender, and is rejected, if it exceeds its metric's bounds by this factor."""
STALE, TRUNCATED, UNFINISHED = "stale", "truncated", "unfinished"
MASKED = frozenset({TRUNCATED, UNFINISHED})
"""Reasons for which the tokens of an admitted turn enter no loss, while its reward still enters the baseline."""
NOT_REPLAYABLE = "sampling_not_replayable"
DRAWN_OTHERWISE = frozenset({NOT_REPLAYABLE, CONSTRAINED})
"""Reasons that mark an answer as sampled from another distribution than the trainer computes with the same weights."""
IMITABLE = frozenset({STALE, *DRAWN_OTHERWISE, "other_temperature"})
"""Reasons that exclude an answer from the policy loss, but not from imitation."""
HIGHEST_LOGPROB = 1e-6
"""Largest valid log-prob: slightly above 0, because of rounding."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision on one interaction.

    ``wait``: feedback or a policy version is missing. ``reject``: the interaction is never trained, for ``reason``; its
    ``reward`` still counts for the turns before it. ``train``: ``reason`` names the origin of the reward (`feedback`,
    `credit` from other turns only, `default`, `invalid`) or why its tokens are masked; of a posted interaction it names
    the rule by which the policy loss uses it, or equals ``denied``. ``objective`` names the loss, ``denied`` the reason
    why the policy loss may not use the interaction. ``compared``: the interaction is not trained, but its reward counts
    in a canary trial.
    """

    verdict: Literal["wait", "train", "reject"]
    reason: str
    reward: float = 0.0
    objective: Objective = "policy"
    denied: str = ""
    compared: bool = False

    @property
    def is_judged(self) -> bool:
        """True if the interaction is trained or counts in a canary trial; its ``reward`` is then final."""
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
    """Decide on an answer that the policy loss may not use. Once the reward is known, choose the supervised loss if the
    answer is valid and has feedback or credit; otherwise reject the answer."""
    if reward is None:
        return Decision("wait", "feedback")
    if not source or is_invalid(interaction, job):
        return _refused(interaction, reward, denied, job, has_feedback=bool(source))
    return Decision("train", source, reward, "supervised", denied)


def _refused(
    interaction: Interaction, reward: float | None, reason: str, job: OnlineJob, *, has_feedback: bool
) -> Decision:
    """Reject an interaction. If a canary trial needs the reward of this interaction to compare versions, wait for the
    reward first."""
    if reason != CANARY and (reason != STALE or job.online.canary is None):
        return Decision("reject", reason, reward or 0.0)
    if reward is None:
        return Decision("wait", "feedback")
    defaults = any(metric.default_after_s is not None for metric in job.online.metrics.values())
    return Decision("reject", reason, reward, compared=has_feedback or defaults or is_invalid(interaction, job))


def refusal_of(interaction: Interaction, job: OnlineJob) -> str:
    """Return the reason that excludes an interaction from training regardless of its feedback; '' if there is none."""
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
    """Return the lag of an interaction: by how many versions its oldest token is behind ``version``, the version from
    which the next update starts."""
    return version - min(span.version for span in interaction.spans)


def reward_of(
    interaction: Interaction, items: Iterable[Feedback], job: OnlineJob, *, now: float, last: bool, closed: bool
) -> float | None:
    """Return the sum of the metrics of one turn, or None while the job still waits for a metric that it declares."""
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
    """Sum the metrics of level `episode` of a finished episode; a metric without feedback takes its default."""
    total, by_metric = 0.0, counted_feedback(items, job.online)
    for name, metric in job.online.of_level("episode").items():
        value = _mean(by_metric.get((name, "episode"), ()), metric)
        total += reward_of_value(metric.default_value, metric) if value is None else value
    return total


def is_invalid(interaction: Interaction, job: OnlineJob) -> bool:
    """Return True if an answer has an invalid tool call, or if it was cut off and the job penalizes cut-off answers."""
    cut_short = _is_cut(interaction) and job.online.truncated == "penalise"
    return interaction.tool_calls_valid is False or cut_short


def _is_cut(interaction: Interaction) -> bool:
    return interaction.finish == "length"


def invalid_reward(job: OnlineJob) -> float:
    """Return the reward of an invalid answer: the job's ``invalid_reward``, or else the lowest reward that a metric
    gives."""
    if job.online.invalid_reward is not None:
        return job.online.invalid_reward
    return min(metric.clip[0] for metric in job.online.metrics.values())


def level_of(item: Feedback, online: OnlineConfig) -> Level | None:
    """Return the level (turn or episode) that an item of feedback judges; None if the item does not count for a reward.

    The undeclared metric `reward` judges its target: an answer, an episode, or one turn of an episode.
    """
    metric = online.metric(item.metric)
    if metric is None:
        return None
    if item.metric in online.metrics:
        return metric.level
    return "interaction" if item.inference or item.turn >= 0 else "episode"


def out_of_range(item: Feedback, online: OnlineConfig) -> bool:
    """Return True if the value of an item lies so far outside the bounds of its metric that it must be an error."""
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
    """Return the sort key that puts the newest feedback last.

    Messages are ordered by their stream sequence number, because the clocks of coordinators differ; items of one
    message by the clock of the coordinator that received them.
    """
    return item.seq, item.received, item.revision, item.id


def counted_feedback(items: Iterable[Feedback], online: OnlineConfig) -> dict[tuple[str, Level], list[Feedback]]:
    """For each metric and level, return the newest item of each source (API key).

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
    """Return True if the version spans of an interaction cover each of its ``tokens`` exactly once, in order."""
    end = 0
    for span in interaction.spans:
        if span.start != end or span.end <= span.start:
            return False
        end = span.end
    return end == tokens


EVERY_KEY = "*"
AS_SAMPLED = frozenset({"posted", "rescored"})
"""Rules of the policy loss that give each posted turn log-probs of its own, so that several turns of an episode can
form one trajectory."""
NOT_TRAINED_YET = "not_trained"
"""Reason to wait for a policy version that the ledger does not record yet, although engines may already sample with
it."""


class PostedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a posted interaction, without its tokens, that decide which loss may use it."""

    version: int | None
    num_prompt: int
    num_tokens: int
    has_logprobs: bool
    flaw: str
    """Defect of the log-probs, or '' if there is none."""
    plain: bool
    """True if sampling was neither greedy nor truncated."""
    temperature: float
    rewards: dict[str, bool | float]
    group: str = ""
    """Name of the task; interactions with the same name and API key answer the same task."""


def facts_of(item: Feedback) -> PostedFacts:
    """Extract the ``PostedFacts`` from the body of a posted interaction."""
    body = item.body
    tokens, logprobs = body.get("token_ids") or [], body.get("logprobs") or []
    sampling = body.get("sampling") or {}
    temperature = float(sampling.get("temperature", 1.0))
    plain = temperature > 0 and sampling.get("top_p", 1.0) == 1.0 and not sampling.get("top_k", 0)
    rewards = {**body.get("rewards", {})}
    if body.get("reward") is not None:
        rewards[REWARD] = body["reward"]
    return PostedFacts(
        version=body.get("policy_version"), num_prompt=len(body.get("prompt_token_ids") or []), num_tokens=len(tokens),
        has_logprobs=bool(logprobs), flaw=_flaw(tokens, logprobs),
        plain=plain, temperature=temperature,
        rewards={name: value if isinstance(value, bool) else float(value) for name, value in rewards.items()},
        group=f"{item.key_id} {body['group_id']}" if body.get("group_id") else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State of the policy when a posted interaction is decided.

    Attributes:
        version: version from which the next update starts; lags count from it.
        newest: newest version that exists; below ``version`` while sealed batches are not trained yet.
        temperature: temperature at which the job samples.
        distrusted: API keys whose log-probs were wrong.
    """

    version: int
    newest: int
    temperature: float
    distrusted: Collection[str] = ()


def admit_posted(facts: PostedFacts, key_id: str, job: OnlineJob, now: PolicyState) -> Decision:
    """Decide on a posted interaction by the rewards posted with it; ``key_id`` is the API key that posted it."""
    metrics = job.online.of_level("interaction") | job.online.of_level("episode")
    is_judged = has_reward(facts, job.online)
    return admit_posted_for(facts, key_id, job, now, reward_of_posted(facts.rewards, metrics) if is_judged else None)


def can_learn_from(key_id: str, job: OnlineJob) -> bool:
    """Return True if the job may train on posts of an API key."""
    off_policy = job.online.off_policy
    return _is_trusted(key_id, job) or (off_policy is not None and off_policy.supervised is not None)


def _is_trusted(key_id: str, job: OnlineJob) -> bool:
    return not {key_id, EVERY_KEY}.isdisjoint(job.online.posted.trusted_keys)


def admit_posted_for(
    facts: PostedFacts, key_id: str, job: OnlineJob, now: PolicyState, reward: float | None
) -> Decision:
    """Decide on a posted interaction by the given ``reward``, which is None without feedback."""
    refusal = refusal_of_posted(facts, job)
    if refusal:
        return Decision("reject", refusal)
    rule, denied = _rule(facts, key_id, job, now)
    if denied == NOT_TRAINED_YET:
        return Decision("wait", denied)
    if rule:
        return Decision("reject", "no_reward") if reward is None else Decision("train", rule, reward)
    off_policy = job.online.off_policy
    supervised = off_policy.supervised if off_policy is not None else None
    if supervised is None or reward is None or reward < supervised.min_reward:
        return Decision("reject", denied)
    return Decision("train", denied, reward, "supervised", denied)


def _rule(facts: PostedFacts, key_id: str, job: OnlineJob, now: PolicyState) -> tuple[str, str]:
    """Return ``(rule by which the policy loss uses a post, '')``, or ``('', reason why the policy loss must not use
    it)``."""
    posted, known = job.online.posted, facts.version is not None
    checks = {
        "text_only": not facts.num_tokens,
        "source_distrusted": key_id in now.distrusted,
        "source_not_trusted": not _is_trusted(key_id, job),
        NOT_REPLAYABLE: not facts.plain or facts.temperature != now.temperature,
        "unknown_version": facts.version is not None and facts.version > now.version,
        STALE: facts.has_logprobs and known and _lag(facts, now) > job.train.max_lag,
    }
    denied = next((reason for reason, found in checks.items() if found), "")
    if denied:
        return "", denied
    if facts.version is not None and facts.version > now.newest:
        return "", NOT_TRAINED_YET
    if facts.has_logprobs and known:
        return "posted", ""
    if facts.version is not None and facts.temperature == 1.0:  # workers score without a temperature
        held = facts.version >= now.newest - posted.held_versions
        if held:
            return ("rescored", "") if _lag(facts, now) <= job.train.max_lag else ("", STALE)
    if posted.assume_on_policy:
        return "assumed", ""
    return "", "version_not_held" if known else "behaviour_unknown"


def _lag(facts: PostedFacts, now: PolicyState) -> int:
    """Return how many versions a post is behind the start of the next update, or 0 if the post names no version."""
    return 0 if facts.version is None else now.version - facts.version


def _flaw(tokens: Collection[int], logprobs: Collection[float]) -> str:
    if logprobs and len(logprobs) != len(tokens):
        return "lengths_differ"
    return "" if all(math.isfinite(value) and value <= HIGHEST_LOGPROB for value in logprobs) else "not_finite"


def refusal_of_posted(facts: PostedFacts, job: OnlineJob) -> str:
    """Return the reason that excludes a post from training regardless of its reward; '' if there is none."""
    if facts.flaw:
        return facts.flaw
    if facts.num_tokens and not facts.num_prompt:
        return "no_tokens"
    if facts.num_prompt > job.data.prompt.max_tokens:
        return "prompt_too_long"
    return "completion_too_long" if facts.num_tokens > job.sampling.max_new_tokens else ""


def has_reward(facts: PostedFacts, online: OnlineConfig) -> bool:
    """Return True if the post has a value of a metric that the job declares."""
    return any(online.metric(name) is not None for name in facts.rewards)


def reward_of_posted(rewards: Mapping[str, bool | float], metrics: Mapping[str, MetricConfig]) -> float:
    """Sum the clipped ``rewards`` over all ``metrics``; a metric without a reward takes its default."""
    return sum(reward_of_value(rewards.get(name, metric.default_value), metric) for name, metric in metrics.items())
