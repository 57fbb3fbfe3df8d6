"""What a posted interaction may be used for: an answer that was not served here, by what its sender says of it. Pure.

==========================================  =============================================================
said of the tokens                          use
==========================================  =============================================================
log-probs, a version within the lag bound   policy loss (`posted`), a sample of them computed again
no log-probs, a version that is held        policy loss, log-probs computed under that version (`rescored`):
                                            the newest one, and `held_versions` before it
neither                                     policy loss as if the newest policy had written them (`assumed`),
                                            where the job allows it
any of these, where that is not possible    imitation, if the reward is good enough
text only                                   imitation, likewise
==========================================  =============================================================
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.services.coordinator.online.admission import HIGHEST_LOGPROB, worth_of
from penstock.shared.config.online import REWARD, MetricConfig, OnlineConfig
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.interaction import Feedback
from penstock.shared.protocol.objective import Objective

__all__ = [
    "Facts",
    "Present",
    "Use",
    "can_be_used",
    "facts_of",
    "is_judged",
    "refusal_of_tokens",
    "reward_of_posted",
    "use_for",
    "use_of",
]

EVERY_KEY = "*"
NOT_TRAINED = "not_trained"
"""Of a version that a sealed batch makes: engines may have it a moment before the ledger has."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides over a posted interaction, without its tokens."""

    version: int | None
    num_prompt: int
    num_tokens: int
    has_logprobs: bool
    flaw: str
    """What is wrong with the log-probs; '' for nothing."""
    plain: bool
    """Neither greedy nor truncated."""
    temperature: float
    rewards: dict[str, bool | float]
    group: str = ""
    """Others of the same name, posted with the same key, answer the same task."""


@dataclass(frozen=True, slots=True)
class Use:
    """``verdict`` `reject`: for ``reason``. `wait`: nobody can tell yet. `take`: for ``objective``.

    There ``reason`` is the rule by which the policy loss takes it, or why that does not and it is only imitated.
    """

    verdict: Literal["take", "reject", "wait"]
    reason: str
    objective: Objective = "policy"
    reward: float = 0.0


def facts_of(item: Feedback) -> Facts:
    """The facts in a posted body."""
    body = item.body
    tokens, logprobs = body.get("token_ids") or [], body.get("logprobs") or []
    sampling = body.get("sampling") or {}
    temperature = float(sampling.get("temperature", 1.0))
    plain = temperature > 0 and sampling.get("top_p", 1.0) == 1.0 and not sampling.get("top_k", 0)
    rewards = {**body.get("rewards", {})}
    if body.get("reward") is not None:
        rewards[REWARD] = body["reward"]
    return Facts(
        version=body.get("policy_version"), num_prompt=len(body.get("prompt_token_ids") or []), num_tokens=len(tokens),
        has_logprobs=bool(logprobs), flaw=_flaw(tokens, logprobs),
        plain=plain, temperature=temperature,
        rewards={name: value if isinstance(value, bool) else float(value) for name, value in rewards.items()},
        group=f"{item.key_id} {body['group_id']}" if body.get("group_id") else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Present:
    """What holds while a posted interaction is decided on.

    Attributes:
        version: policy version from which the next update starts: what the lag counts from.
        newest: version that exists; sealed batches that are not trained yet lie between the two.
        temperature: at which the job samples.
        distrusted: keys whose log-probs were found wrong.
    """

    version: int
    newest: int
    temperature: float
    distrusted: Collection[str] = ()


def use_of(facts: Facts, key_id: str, job: OnlineJob, now: Present) -> Use:
    """Decide by the rewards that were posted with it; ``key_id`` is who posted it."""
    metrics = job.online.of_level("interaction") | job.online.of_level("episode")
    said = is_judged(facts, job.online)
    return use_for(facts, key_id, job, now, reward_of_posted(facts.rewards, metrics) if said else None)


def can_be_used(key_id: str, job: OnlineJob) -> bool:
    """Whether anything may be learnt from what a key posts, whatever it is and whatever it earned."""
    off_policy = job.online.off_policy
    return _is_trusted(key_id, job) or (off_policy is not None and off_policy.supervised is not None)


def _is_trusted(key_id: str, job: OnlineJob) -> bool:
    return not {key_id, EVERY_KEY}.isdisjoint(job.online.posted.trusted_keys)


def use_for(facts: Facts, key_id: str, job: OnlineJob, now: Present, reward: float | None) -> Use:
    """Decide by this reward; None: nobody said anything of it."""
    refusal = refusal_of_tokens(facts, job)
    if refusal:
        return Use("reject", refusal)
    rule, denied = _rule(facts, key_id, job, now)
    if denied == NOT_TRAINED:
        return Use("wait", denied)
    if rule:
        return Use("reject", "no_reward") if reward is None else Use("take", rule, "policy", reward)
    off_policy = job.online.off_policy
    supervised = off_policy.supervised if off_policy is not None else None
    if supervised is None or reward is None or reward < supervised.min_reward:
        return Use("reject", denied)
    return Use("take", denied, "supervised", reward)


def _rule(facts: Facts, key_id: str, job: OnlineJob, now: Present) -> tuple[str, str]:
    """``(rule by which the policy loss may use it, '')`` or ``('', why it may not)``."""
    posted, known = job.online.posted, facts.version is not None
    checks = {
        "text_only": not facts.num_tokens,
        "source_distrusted": key_id in now.distrusted,
        "source_not_trusted": not _is_trusted(key_id, job),
        "sampling_not_replayable": not facts.plain or facts.temperature != now.temperature,
        "unknown_version": facts.version is not None and facts.version > now.version,
        "stale": facts.has_logprobs and known and _lag(facts, now) > job.train.max_lag,
    }
    denied = next((reason for reason, found in checks.items() if found), "")
    if denied:
        return "", denied
    if facts.version is not None and facts.version > now.newest:
        return "", NOT_TRAINED
    if facts.has_logprobs and known:
        return "posted", ""
    if facts.version is not None and facts.temperature == 1.0:  # workers score without a temperature
        held = facts.version >= now.newest - posted.held_versions
        if held:
            return ("rescored", "") if _lag(facts, now) <= job.train.max_lag else ("", "stale")
    if posted.assume_on_policy:
        return "assumed", ""
    return "", "version_not_held" if known else "behaviour_unknown"


def _lag(facts: Facts, now: Present) -> int:
    """Versions between the one that wrote it and that from which the next update starts."""
    return 0 if facts.version is None else now.version - facts.version


def _flaw(tokens: Collection[int], logprobs: Collection[float]) -> str:
    if logprobs and len(logprobs) != len(tokens):
        return "lengths_differ"
    return "" if all(math.isfinite(value) and value <= HIGHEST_LOGPROB for value in logprobs) else "not_finite"


def refusal_of_tokens(facts: Facts, job: OnlineJob) -> str:
    """Why nothing can be learnt from what was posted, whatever it earned; '' where nothing speaks against it."""
    if facts.flaw:
        return facts.flaw
    if facts.num_tokens and not facts.num_prompt:
        return "no_tokens"
    if facts.num_prompt > job.data.prompt.max_tokens:
        return "prompt_too_long"
    return "completion_too_long" if facts.num_tokens > job.sampling.max_new_tokens else ""


def is_judged(facts: Facts, online: OnlineConfig) -> bool:
    """Whether its sender said what it is worth."""
    return any(online.metric(name) is not None for name in facts.rewards)


def reward_of_posted(rewards: Mapping[str, bool | float], metrics: Mapping[str, MetricConfig]) -> float:
    """Sum of the clipped values of these metrics, missing ones at their default."""
    return sum(worth_of(rewards.get(name, metric.default_value), metric) for name, metric in metrics.items())
