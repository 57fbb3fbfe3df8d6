"""Off-policy share of a batch: answers to imitate, and pairs of a preferred and a rejected answer.

Each loss has its own denominators, over the minibatch on all ranks: ``coef · mean over tokens of -log pi`` and
``coef · mean over pairs of strength · dpo``. Log-probs are of logits / temperature, with the temperature of each group.

Shape legend: M = scored tokens of a microbatch, S = its sequences, P = its pairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.backends.base import Backend, Scores
from penstock.services.trainer.batch.packing import (
    Columns,
    Ints,
    Microbatch,
    columns_of,
    microbatches,
    pair_microbatches,
)
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.algorithms.aggregation import token_mean
from penstock.shared.algorithms.supervised import dpo_loss, sequence_logprobs, supervised_loss
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.online.off_policy import PreferenceConfig
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trajectory import Group

__all__ = ["OffPolicySteps", "off_policy_steps"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Microbatches of one objective in one optimizer step; ``denominator`` counts tokens or pairs over all ranks."""

    microbatches: list[Microbatch | None]
    denominator: int


class OffPolicySteps:
    """Adds off-policy gradients to those of the policy loss before each optimizer step."""

    def __init__(
        self, config: JobConfig, backend: Backend, collective: Collective, shard: BatchShard[Group], *, number: int
    ) -> None:
        assert config.off_policy is not None
        self._config, self._backend, self._collective = config.off_policy, backend, collective
        supervised, preference = shard.of("supervised"), shard.of("preference")
        self._counts = {"supervised": supervised.num_groups, "preference": preference.num_groups}
        answers, pairs = _columns([supervised.groups, preference.groups], collective)
        budget = config.train.max_tokens_per_microbatch
        rows = _runs(supervised, number)
        self._answers = self._parts(
            [microbatches(answers, own, budget) for own in rows],
            [int(answers.scored_B[own].sum()) for own in rows],
        )
        runs = [np.stack([2 * own, 2 * own + 1], 1) for own in _runs(preference, number)]
        self._pairs = self._parts([pair_microbatches(pairs, own, budget) for own in runs], [len(own) for own in runs])
        self._strength_S = torch.from_numpy(pairs.rewards_B)
        self._reference_S = torch.zeros(len(pairs.group_B), dtype=torch.float32)
        for microbatch in (one for part in self._pairs for one in part.microbatches):
            logprobs_M = backend.reference_logprobs(microbatch)
            if microbatch is not None:
                rows_S, local_M = _rows_of(microbatch)
                self._reference_S[rows_S] = self._whole(logprobs_M.float().cpu(), local_M, len(rows_S))
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._steps: Counter[str] = Counter()

    @property
    def _preference(self) -> PreferenceConfig:
        assert self._config.preference is not None, "a preference is admitted only where the job asks for it"
        return self._config.preference

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of one pass over the batch."""
        return len(self._answers)

    def microbatches(self, index: int) -> list[Microbatch | None]:
        """Return this rank's microbatches of step ``index`` of a pass."""
        return [*self._answers[index].microbatches, *self._pairs[index].microbatches]

    def accumulate(self, index: int) -> None:
        """Accumulate the gradients of step ``index`` of a pass."""
        parts = {"supervised": self._answers[index], "preference": self._pairs[index]}
        self._steps.update(["all", *(name for name, part in parts.items() if part.denominator)])
        for microbatch, loss in self._losses(index):
            self._backend.accumulate(microbatch, loss)

    def report(self) -> dict[str, float]:
        """Return metrics over all ranks: mean losses, and pair statistics.

        `loss/supervised` and `loss/preference` are without coefficient, averaged over the steps that had such groups.
        `loss/off_policy` is the sum of both losses with coefficients, averaged over all steps.

        `preference/margin` is the mean DPO margin before each step: ``beta`` times the log-ratio of the preferred
        answer minus that of the rejected one. `preference/accuracy` is the share of pairs with a margin above 0.
        """
        names = ("supervised", "preference", "weighted", "margin", "preferred")
        sums = self._collective.sum({name: self._sums[name] for name in names})
        found = {f"groups/{name}": float(count) for name, count in self._counts.items()}
        found |= {f"loss/{name}": sums[name] / self._steps[name] for name in self._counts if self._steps[name]}
        if pairs := self._steps["preference"]:
            found |= {"preference/margin": sums["margin"] / pairs, "preference/accuracy": sums["preferred"] / pairs}
        return found | {"loss/off_policy": sums["weighted"] / max(1, self._steps["all"])}

    def _losses(self, index: int) -> Iterator[tuple[Microbatch | None, Callable[[Scores], Tensor]]]:
        for microbatch in self._answers[index].microbatches:
            yield microbatch, self._supervised(self._answers[index].denominator)
        for microbatch in self._pairs[index].microbatches:
            yield microbatch, self._compared(microbatch, self._pairs[index].denominator)

    def _supervised(self, num_tokens: int) -> Callable[[Scores], Tensor]:
        supervised = self._config.supervised
        assert supervised is not None or not num_tokens, "an answer is imitated only where the job asks for it"

        def loss(scores: Scores) -> Tensor:
            assert supervised is not None
            return self._count(
                "supervised", supervised.coef, token_mean(supervised_loss(scores.values_M), num_tokens=num_tokens)
            )

        return loss

    def _compared(self, microbatch: Microbatch | None, num_pairs: int) -> Callable[[Scores], Tensor]:
        def loss(scores: Scores) -> Tensor:
            assert microbatch is not None
            config, device = self._preference, scores.values_M.device
            rows_S, local_M = _rows_of(microbatch)
            policy_S = self._whole(scores.values_M, local_M.to(device), len(rows_S))
            reference_S = self._reference_S[rows_S].to(device)
            loss_P = dpo_loss(
                policy_S[0::2], policy_S[1::2], reference_S[0::2], reference_S[1::2],
                beta=config.beta, label_smoothing=config.label_smoothing,
            )  # fmt: skip
            moved_S = (policy_S - reference_S).detach()
            margin_P = config.beta * (moved_S[0::2] - moved_S[1::2])
            self._sums["margin"] += float(margin_P.sum(dtype=torch.float64)) / num_pairs
            self._sums["preferred"] += float((margin_P > 0).sum()) / num_pairs
            strength_P = self._strength_S[rows_S[0::2]].to(device)
            return self._count("preference", config.coef, (strength_P * loss_P).sum() / num_pairs)

        return loss

    def _count(self, name: str, coef: float, value: Tensor) -> Tensor:
        self._sums[name] += float(value.detach())
        self._sums["weighted"] += coef * float(value.detach())
        return coef * value

    def _whole(self, logprobs_M: Tensor, local_M: Tensor, num_rows: int) -> Tensor:
        return sequence_logprobs(logprobs_M, local_M, num_rows=num_rows, normalise=self._preference.normalise)

    def _parts(self, own: Sequence[list[Microbatch]], counts: Sequence[int]) -> list[_Part]:
        """Return one ``_Part`` for each optimizer step. ``own`` has this rank's microbatches of each step, and
        ``counts`` the number of tokens or pairs in them.

        Microbatches are padded with None to the largest number on any rank; denominators are sums of ``counts`` over
        ranks.
        """
        most = self._collective.max({str(i): float(len(part)) for i, part in enumerate(own)})
        total = self._collective.sum({str(i): float(count) for i, count in enumerate(counts)})
        return [
            _Part([*part, *[None] * (int(most[str(i)]) - len(part))], int(total[str(i)])) for i, part in enumerate(own)
        ]


def off_policy_steps(
    config: JobConfig, backend: Backend, collective: Collective, shard: BatchShard[Group], *, number: int
) -> OffPolicySteps | None:
    """Return the steps of a batch split into ``number`` minibatches; None if all groups are for the policy loss.

    A batch without groups for the policy loss is split into no more minibatches than it has groups.
    """
    others = [objective for objective in shard.objectives if objective != "policy"]
    if not others:
        return None
    if len(others) == len(shard.objectives):
        number = min(number, len(others))
    return OffPolicySteps(config, backend, collective, shard, number=number)


def _runs(shard: BatchShard[Group], number: int) -> list[Ints]:
    """Divide the groups of the whole batch into contiguous, nearly equal runs, ``number`` in all. Return this rank's
    part of each run, as indices into ``shard.groups``."""
    runs = np.array_split(np.arange(shard.num_groups), number)
    positions = np.array(shard.positions, np.int64)
    return [np.flatnonzero(np.isin(positions, run)) for run in runs]


def _columns(parts: Sequence[Sequence[Group]], collective: Collective) -> list[Columns]:
    """Return the columns of this rank's groups of each part. All ranks raise ProtocolError if one rank does."""
    found, error = [], ""
    try:
        found = [columns_of(groups) for groups in parts]
    except ProtocolError as raised:
        error = str(raised)
    gathered = collective.gather({"error": np.frombuffer(error.encode(), np.uint8)})
    errors = {part["error"].tobytes().decode(): None for part in gathered if len(part["error"])}
    if errors:
        raise ProtocolError("; ".join(errors))
    return found


def _rows_of(microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return the rows of a microbatch's sequences, and the index of each token's sequence: ``(rows_S, local_M)``.

    ``rows_S``: rows of the sequences in ascending order, so that pairs are adjacent. ``local_M``: index in ``rows_S``
    of each token's sequence.
    """
    rows_S, local_M = torch.unique(microbatch.rows_M, return_inverse=True)
    return rows_S, local_M
