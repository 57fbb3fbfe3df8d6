"""Preparation of a batch before its first step: columns, batch properties, shaped rewards, passes without gradient.

Shape legend: B = trajectories of the batch, N = scored tokens of the batch, L = this rank's flat completion tokens,
M = scored tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.backends.base import Backend, Role
from penstock.services.trainer.batch.facts import BatchFacts, gather_facts
from penstock.services.trainer.batch.minibatches import Minibatch, minibatches
from penstock.services.trainer.batch.packing import Columns, Ints, Microbatch, columns_of, concatenated_ranges
from penstock.services.trainer.batch.routers import check_table
from penstock.services.trainer.flops import Work
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.services.trainer.teacher import Teacher
from penstock.services.trainer.update_rules.recipes import Experience
from penstock.services.trainer.update_rules.shaping import RewardShaper, Shaped
from penstock.shared.algorithms.kl import k1, kl_estimate
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trajectory import Group

__all__ = ["PreparedBatch", "cut", "prepare"]

Pass = tuple[str, Role | None, Callable[[Microbatch | None], Tensor]]
"""A pass without gradient: (name of the column to fill, role of the model or None: teacher, scoring function)."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch before its first step.

    Attributes:
        columns, flat_L: this rank's tokens; ``flat_L`` has `reference`, `proximal`, `values` and `teacher` if they are
            needed.
        older_L: bool, True for this rank's tokens that a version older than the one in training sampled; None: unknown.
        facts, shaped, whole_N: the whole batch; ``whole_N`` has `values`, `teacher_kl`, and `kl` if it is subtracted
            from the reward.
    """

    columns: Columns
    facts: BatchFacts
    shaped: Shaped
    flat_L: dict[str, Tensor]
    whole_N: dict[str, Tensor]
    older_L: Tensor | None = None

    def experience(self, kl_coef: float) -> Experience:
        """Return the inputs of the advantage computation."""
        return Experience(
            rewards_B=self.shaped.rewards_B,
            groups_B=torch.from_numpy(self.facts.group_B),
            baselines_B=self.shaped.baselines_B,
            lengths_B=torch.from_numpy(self.facts.scored_B),
            cu_seqlens_B1=self.facts.cu_seqlens,
            kl_N=self.whole_N.get("kl"),
            kl_coef=kl_coef,
            values_N=self.whole_N.get("values"),
            teacher_kl_N=self.whole_N.get("teacher_kl"),
        )


def prepare(
    config: JobConfig,
    models: Mapping[Role, Backend],
    collective: Collective,
    shard: BatchShard[Group],
    *,
    shaper: RewardShaper,
    work: Mapping[Role, Work],
    teacher: Teacher | None = None,
) -> PreparedBatch:
    """Gather the properties of a batch and run the passes without gradient. Add the amount of computation of these
    passes to the counters in ``work``.

    Raises:
        ProtocolError: a group cannot be scored, or no trajectory of the batch is valid.
    """
    columns = _columns(config, models["policy"], collective, shard)
    facts = gather_facts(columns, shard, collective)
    if facts.assumed_B.any():
        columns = _assumed(config, models["policy"], columns, facts, collective)
    every_B = np.zeros(len(facts.group_B), np.bool_)
    flat_L: dict[str, Tensor] = {}
    for name, role, score in _passes(config, models, teacher):
        parts = cut(config, columns, facts, collective, skip_B=every_B, excluded_B=every_B)
        if role is not None:
            for microbatch in (m for part in parts for m in part.microbatches):
                work[role].add(microbatch)
        flat_L[name] = _score_tokens(score, parts, len(columns.logprobs))
    needed = {name: flat_L[name] for name in ("values",) if name in flat_L}
    current_L = flat_L.get("proximal", torch.from_numpy(columns.logprobs))
    if teacher is not None:
        needed["teacher_kl"] = k1(current_L, flat_L["teacher"])
    if _kl_in_reward(config):
        assert config.algorithm.kl is not None
        assert config.algorithm.kl.estimator != "full", "refused by the configuration"
        needed["kl"] = kl_estimate(config.algorithm.kl.estimator, current_L, flat_L["reference"])
    whole_N = facts.over_batch(needed, collective) if needed else {}
    start = shard.start_version
    older_L = None if start is None else torch.from_numpy(columns.versions < start)
    return PreparedBatch(columns, facts, shaper.shape(facts), flat_L, whole_N, older_L)


def cut(
    config: JobConfig,
    columns: Columns,
    facts: BatchFacts,
    collective: Collective,
    *,
    skip_B: NDArray[np.bool_],
    excluded_B: NDArray[np.bool_],
    order_G: Ints | None = None,
) -> list[Minibatch]:
    """Split the batch into the job's minibatches; see ``minibatches.minibatches``."""
    train = config.train
    return minibatches(
        columns,
        facts,
        collective,
        number=train.minibatches,
        max_tokens=train.max_tokens_per_microbatch,
        skip_B=skip_B,
        excluded_B=excluded_B,
        order_G=order_G,
    )


def _columns(config: JobConfig, policy: Backend, collective: Collective, shard: BatchShard[Group]) -> Columns:
    """Return the columns of this rank's groups. All ranks raise ProtocolError, before any computation, if one rank
    does."""
    columns, error = None, ""
    try:
        columns = columns_of(shard.groups)
        if shard.baselines:
            sealed = [shard.baselines[position] for position in shard.positions]
            own_G = np.array([np.nan if value is None else value for value in sealed], np.float32)
            columns = replace(columns, baseline_G=np.where(np.isnan(own_G), columns.baseline_G, own_G))
        replays = config.model.replay_bytes_per_token > 0 and len(columns.tokens) > 0
        check_table(columns.experts, policy.routers, wanted=replays)
    except ProtocolError as raised:
        error = str(raised)
    gathered = collective.gather({"error": np.frombuffer(error.encode(), np.uint8)})
    errors = {part["error"].tobytes().decode(): None for part in gathered if len(part["error"])}
    if errors or columns is None:
        raise ProtocolError("; ".join(errors))
    return columns


def _assumed(
    config: JobConfig, policy: Backend, columns: Columns, facts: BatchFacts, collective: Collective
) -> Columns:
    """Return ``columns`` with the current policy's log-probs in place of unknown ones: the ratio then starts at 1."""
    none_B = np.zeros(len(facts.group_B), np.bool_)
    parts = cut(config, columns, facts, collective, skip_B=~facts.assumed_B, excluded_B=none_B)
    scored_L = _score_tokens(policy.score, parts, len(columns.logprobs)).numpy()
    rows = np.flatnonzero(columns.assumed_B)
    logprobs, places = columns.logprobs.copy(), concatenated_ranges(columns.start_B[rows], columns.length_B[rows])
    logprobs[places] = scored_L[places]
    return replace(columns, logprobs=logprobs)


def _passes(config: JobConfig, models: Mapping[Role, Backend], teacher: Teacher | None) -> list[Pass]:
    """Return the passes without gradient that a job needs."""
    policy, algorithm = models["policy"], config.algorithm
    several_steps = config.train.epochs * config.train.minibatches > 1
    passes: list[Pass] = []
    if algorithm.kl is not None and algorithm.kl.estimator != "full":
        passes.append(("reference", "policy", policy.reference_logprobs))
    if algorithm.proximal == "recomputed" and (several_steps or _kl_in_reward(config) or teacher is not None):
        passes.append(("proximal", "policy", policy.score))
    if "critic" in models:
        passes.append(("values", "critic", models["critic"].score))
    if teacher is not None:
        passes.append(("teacher", None, teacher.score))
    return passes


def _kl_in_reward(config: JobConfig) -> bool:
    return config.algorithm.kl is not None and config.algorithm.kl.place == "reward"


def _score_tokens(score: Callable[[Microbatch | None], Tensor], parts: Sequence[Minibatch], num_flat: int) -> Tensor:
    """Return the results of ``score`` for every scored token, float32 [L] on the CPU; 0 for other tokens."""
    flat_L = torch.zeros(num_flat, dtype=torch.float32)
    for microbatch in (m for part in parts for m in part.microbatches):
        values_M = score(microbatch)
        if microbatch is not None:
            flat_L[microbatch.source_M] = values_M.float().cpu()
    return flat_L
