"""Metrics of an update: properties of the batch, and sums over the scored tokens of its training passes.

Shape legend: B = valid trajectories, N = scored tokens of the batch, M = scored tokens of a microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.batch.facts import BatchFacts
from penstock.services.trainer.batch.packing import Columns
from penstock.services.trainer.ranks.collective import Collective, union
from penstock.shared.algorithms.kl import k3
from penstock.shared.algorithms.policy_loss import PolicyLoss
from penstock.shared.protocol.messages import BatchManifest

__all__ = [
    "Mismatch",
    "TokenSums",
    "advantage_facts",
    "batch_facts",
    "lag_facts",
    "optimizer_facts",
    "sampled_entropy_of",
]

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
RATIO_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def reduced_sums(sums: dict[str, float], collective: Collective) -> dict[str, float]:
    """Return the sum over ranks of each name in ``sums``; a rank whose ``sums`` lack a name adds 0."""
    return collective.sum({name: sums.get(name, 0.0) for name in union(sums, collective)})


def quantiles(name: str, values: NDArray[np.floating], places: dict[str, float]) -> dict[str, float]:
    """Return the quantiles of ``values`` as ``{name}_{suffix}``, linearly interpolated; empty without values.

    ``places``: probability of each quantile (0 to 1), by suffix.
    """
    if not len(values):
        return {}
    found = np.quantile(values, list(places.values()))
    return {f"{name}_{suffix}": float(value) for suffix, value in zip(places, found, strict=True)}


@dataclass(slots=True)
class TokenSums:
    """Sums over the scored tokens of all training passes of an update. A token counts once in each epoch."""

    sums: dict[str, float] = field(default_factory=lambda: {"tokens": 0.0})
    ratios: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens that this rank has added."""
        return int(self.sums["tokens"])

    def add(self, logprobs_M: Tensor, behaviour_M: Tensor, loss: PolicyLoss, extra: dict[str, Tensor]) -> None:
        """Add one microbatch. ``extra`` has further values per token, [M], by metric name."""
        logprobs_M = logprobs_M.detach()
        per_token = {
            "policy/approx_kl": k3(behaviour_M, logprobs_M),
            "policy/clip_low": loss.clipped_low_M,
            "policy/clip_high": loss.clipped_high_M,
            **extra,
        }
        totals = torch.stack([values.detach().sum(dtype=torch.float64) for values in per_token.values()]).tolist()
        for name, total in zip(per_token, totals, strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + total
        self.sums["tokens"] += len(logprobs_M)
        self.ratios.append(loss.ratio_M.detach().float().cpu())

    def means(self, collective: Collective) -> dict[str, float]:
        """Return means over the tokens of all ranks, and quantiles of the ratio. If no rank has tokens, return only the
        number of tokens, 0."""
        sums = reduced_sums(self.sums, collective)
        own = torch.cat(self.ratios).numpy() if self.ratios else np.zeros(0, np.float32)
        ratios = np.concatenate([part["ratio"] for part in collective.gather({"ratio": own})])
        tokens = sums.pop("tokens")
        if not tokens:
            return {"tokens/forward": 0.0}
        return {
            "tokens/forward": tokens,
            **{name: total / tokens for name, total in sums.items()},
            "policy/ratio_max": float(ratios.max()),
            **quantiles("policy/ratio", ratios, RATIO_QUANTILES),
        }


@dataclass(slots=True)
class Mismatch:
    """Difference between trainer and sampler on the same tokens, before the first step of an update.

    Tokens of the version in training show the error of the sampler; those of older versions show how far the policy has
    moved since.
    """

    sums: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("tokens", "absolute", "kl", "older", "lag_absolute", "lag_kl"), 0.0)
    )

    def add(self, logprobs_M: Tensor, behaviour_M: Tensor, older_M: Tensor | None = None) -> None:
        """Add one microbatch. ``older_M`` (bool) marks tokens that an older version chose; None if there are none."""
        difference_M = (logprobs_M.detach() - behaviour_M).abs().double()
        kl_M = k3(behaviour_M, logprobs_M.detach()).double()
        older_M = torch.zeros_like(kl_M, dtype=torch.bool) if older_M is None else older_M.to(kl_M.device)
        found = {
            "tokens": (~older_M).sum(), "absolute": difference_M[~older_M].sum(), "kl": kl_M[~older_M].sum(),
            "older": older_M.sum(), "lag_absolute": difference_M[older_M].sum(), "lag_kl": kl_M[older_M].sum(),
        }  # fmt: skip
        for name, value in found.items():
            self.sums[name] += float(value)

    def means(self, collective: Collective) -> dict[str, float]:
        """Return the mean absolute difference of trainer and sampler log-probs, and k3 of KL(sampler || trainer).

        `mismatch/*` covers tokens of the version in training, `lag/*` tokens of older versions. Metrics without tokens
        are absent.
        """
        total = collective.sum(self.sums)
        means = {}
        if total["tokens"]:
            means["mismatch/logprob"] = total["absolute"] / total["tokens"]
            means["mismatch/kl"] = total["kl"] / total["tokens"]
        if total["older"]:
            means["lag/logprob"] = total["lag_absolute"] / total["older"]
            means["lag/kl"] = total["lag_kl"] / total["older"]
        return means


def batch_facts(facts: BatchFacts) -> dict[str, float]:
    """Return metrics of rewards and lengths of the whole batch, without failed trajectories."""
    rewards_B, lengths_B = facts.rewards_B.astype(np.float64), facts.length_B.astype(np.float64)
    return {
        "reward/mean": float(rewards_B.mean()),
        "reward/std": float(rewards_B.std()),
        "reward/min": float(rewards_B.min()),
        "reward/max": float(rewards_B.max()),
        **quantiles("reward/quantile", rewards_B, QUANTILES),
        **_parts(facts),
        "groups/count": float(facts.num_groups),
        "sequences/count": float(len(rewards_B)),
        "sequences/failed": float(facts.num_failed),
        "tokens/scored": float(facts.scored_B.sum()),
        "tokens/observed": float((facts.length_B - facts.scored_B).sum()),
        "length/mean": float(lengths_B.mean()),
        "length/max": float(lengths_B.max()),
        **quantiles("length/quantile", lengths_B, QUANTILES),
        "length/truncated": float(facts.truncated_B.mean()),
    }


def advantage_facts(facts: BatchFacts, advantages: Tensor, *, per_token: bool) -> dict[str, float]:
    """Return metrics of the advantages of trajectories [B] or tokens [N].

    `groups/no_signal` is the number of groups whose advantages are all 0.
    """
    values = advantages.double()
    groups = np.repeat(facts.group_B, facts.scored_B) if per_token else facts.group_B
    signal = np.zeros(facts.num_groups, np.bool_)
    signal[groups[(values != 0).numpy()]] = True
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std(correction=0)),
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
        "groups/no_signal": float((~signal).sum()),
    }


def lag_facts(manifest: BatchManifest) -> dict[str, float]:
    """Return the mean and largest lag of the groups that the policy loss trains, and the share of groups with each lag.

    The lag is the batch's start version minus the oldest version in the group; for a group of newer versions it is 0.
    """
    groups = [group for group in manifest.groups if group.objective == "policy"]
    if not groups:
        return {}
    lags = np.array([max(manifest.start_version - group.min_version, 0) for group in groups], np.int64)
    shares = np.bincount(lags) / len(lags)
    return {
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        **{f"lag/share_{lag}": float(share) for lag, share in enumerate(shares)},
    }


def optimizer_facts(name: str, rate: float, grad_norms: list[float]) -> dict[str, float]:
    """Return learning rate, number of steps, and mean gradient norm. A step with a non-finite norm does not count."""
    finite = [norm for norm in grad_norms if math.isfinite(norm)]
    facts = {f"{name}/lr": rate, f"{name}/steps": float(len(finite))}
    return facts | ({f"{name}/grad_norm": sum(finite) / len(finite)} if finite else {})


def sampled_entropy_of(columns: Columns, collective: Collective) -> dict[str, float]:
    """Return the sampler's mean entropy over all scored tokens, estimated from its own log-probs."""
    behaviour = columns.logprobs[columns.counted()]
    total = collective.sum({"logprob": float(behaviour.sum(dtype=np.float64)), "tokens": float(len(behaviour))})
    return {"policy/entropy": -total["logprob"] / total["tokens"]} if total["tokens"] else {}


def _parts(facts: BatchFacts) -> dict[str, float]:
    present = {name: values[np.isfinite(values)] for name, values in facts.parts.items()}
    means = {name: float(values.mean(dtype=np.float64)) for name, values in present.items() if len(values)}
    return {f"reward/part/{name}": mean for name, mean in means.items()}
