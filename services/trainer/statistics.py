"""What an update reports about itself: facts of the batch, and sums over the scored tokens that went forward.

Shape legend: B = trajectories that count, M = scored tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.services.trainer.packing import Columns
from penstock.shared.algorithms.entropy import sampled_entropy
from penstock.shared.algorithms.kl import k3
from penstock.shared.algorithms.policy_loss import PolicyLoss

__all__ = ["Mismatch", "TokenSums", "batch_facts"]


@dataclass(slots=True)
class TokenSums:
    """Sums over all tokens of an update that went forward, epochs counted again each time."""

    tokens: int = 0
    ratio_max: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, logprobs_M: Tensor, behaviour_M: Tensor, loss: PolicyLoss, extra: dict[str, Tensor]) -> None:
        """Count one microbatch; ``extra`` are further values per token, [M]."""
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
        self.tokens += len(logprobs_M)
        self.ratio_max = max(self.ratio_max, float(loss.ratio_M.max()))

    def means(self) -> dict[str, float]:
        """Mean over tokens of each sum, and the largest ratio; empty if no token went forward."""
        if not self.tokens:
            return {}
        return {**{name: total / self.tokens for name, total in self.sums.items()}, "policy/ratio_max": self.ratio_max}


@dataclass(slots=True)
class Mismatch:
    """How far trainer and sampler disagree on the same tokens, before the first step of an update."""

    tokens: int = 0
    absolute: float = 0.0
    kl: float = 0.0

    def add(self, logprobs_M: Tensor, behaviour_M: Tensor) -> None:
        """Count one microbatch."""
        logprobs_M = logprobs_M.detach()
        self.tokens += len(logprobs_M)
        self.absolute += float((logprobs_M - behaviour_M).abs().sum(dtype=torch.float64))
        self.kl += float(k3(behaviour_M, logprobs_M).sum(dtype=torch.float64))

    def means(self) -> dict[str, float]:
        """Mean absolute difference of log-probs, and k3 of KL(sampler || trainer); empty if nothing went forward."""
        if not self.tokens:
            return {}
        return {"mismatch/logprob": self.absolute / self.tokens, "mismatch/kl": self.kl / self.tokens}


def batch_facts(columns: Columns, advantages_B: Tensor) -> dict[str, float]:
    """Rewards, advantages and lengths of the whole batch, failed trajectories excluded."""
    rewards_B = torch.from_numpy(columns.rewards_B).double()
    lengths_B = torch.from_numpy(columns.length_B).double()
    behaviour = torch.from_numpy(columns.logprobs[columns.counted()])
    signal = torch.zeros(columns.num_groups, dtype=torch.bool)
    signal[torch.from_numpy(columns.group_B)[advantages_B != 0]] = True
    return {
        "reward/mean": float(rewards_B.mean()),
        "reward/std": float(rewards_B.std(correction=0)),
        "reward/min": float(rewards_B.min()),
        "reward/max": float(rewards_B.max()),
        "advantage/mean": float(advantages_B.double().mean()),
        "advantage/std": float(advantages_B.double().std(correction=0)),
        "advantage/min": float(advantages_B.min()),
        "advantage/max": float(advantages_B.max()),
        "policy/entropy": float(sampled_entropy(behaviour)),
        "groups/count": float(columns.num_groups),
        "groups/no_signal": float((~signal).sum()),
        "sequences/count": float(len(rewards_B)),
        "sequences/failed": float(columns.num_failed),
        "tokens/scored": float(columns.scored_B.sum()),
        "length/mean": float(lengths_B.mean()),
        "length/truncated": float(columns.truncated_B.mean()),
    }
