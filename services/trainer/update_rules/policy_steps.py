"""The policy's optimizer steps in one update, for every algorithm: loss, KL and entropy terms, and statistics.

Shape legend: M = scored tokens of a microbatch, L = this rank's flat completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.services.trainer.backends.base import Backend, Scores
from penstock.services.trainer.batch.minibatches import Minibatch
from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.batch.statistics import Mismatch, TokenSums, optimizer_facts
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.update_rules.recipes import Recipe, Tokens
from penstock.shared.algorithms.aggregation import aggregate
from penstock.shared.algorithms.kl import kl_estimate
from penstock.shared.config.jobs.job import JobConfig

__all__ = ["PolicySteps", "TokenColumns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Properties of this rank's tokens before the first step of an update, float32 [L] each.

    ``older_L``, bool: True for tokens that a version older than the one in training sampled; None: unknown, and every
    token counts as one of the version in training.

    ``proximal_L``: log-probs in the denominator of the ratio. If None, the denominator is the sampler's log-probs if
    ``on_behaviour`` is set, else the policy's own log-probs in the step. The latter is used in an update of a single
    step, where they are the log-probs at the start of the update.
    """

    advantages_L: Tensor
    proximal_L: Tensor | None
    on_behaviour: bool
    reference_L: Tensor | None
    older_L: Tensor | None = None


class PolicySteps:
    """Makes the policy's optimizer steps of one update, one for each minibatch."""

    def __init__(
        self, config: JobConfig, backend: Backend, recipe: Recipe, columns: TokenColumns, *, rate: float, kl_coef: float
    ) -> None:
        self._algorithm = config.algorithm
        self._horizon = config.sampling.max_new_tokens
        self._backend, self._recipe, self._columns = backend, recipe, columns
        self.rate, self._kl_coef = rate, kl_coef
        kl = config.algorithm.kl
        self._estimator = kl.estimator if kl is not None and kl.place == "loss" else None
        self.tokens = TokenSums()
        self.mismatch = Mismatch()
        self.loss = self.pg_loss = 0.0
        self.grad_norms: list[float] = []

    def step(self, minibatch: Minibatch | None) -> float:
        """Make one optimizer step and return the gradient norm.

        If ``minibatch`` is None, the step uses only the gradients that off-policy losses have accumulated.
        """
        if minibatch is not None:
            self._accumulate(minibatch)
        self.grad_norms.append(self._backend.step(self.rate))
        return self.grad_norms[-1]

    def _accumulate(self, minibatch: Minibatch) -> None:
        for microbatch in minibatch.microbatches:
            self._backend.accumulate(
                microbatch,
                self._loss_of(microbatch, minibatch),
                entropy=self._algorithm.entropy_coef != 0,
                kl=self._estimator == "full",
            )

    def report(self, collective: Collective) -> dict[str, float]:
        """Return losses averaged over steps, and means over all ranks' tokens for which a forward pass ran."""
        steps = max(1, len(self.grad_norms))
        loss = collective.sum({"total": self.loss, "policy": self.pg_loss})
        return {
            "loss/total": loss["total"] / steps,
            "loss/policy": loss["policy"] / steps,
            **optimizer_facts("optimizer", self.rate, self.grad_norms),
            **self.tokens.means(collective),
            **self.mismatch.means(collective),
        }

    def _loss_of(self, microbatch: Microbatch | None, minibatch: Minibatch) -> Callable[[Scores], Tensor]:
        def mean(values_M: Tensor) -> Tensor:
            assert microbatch is not None
            return aggregate(
                self._algorithm.aggregation,
                values_M,
                microbatch.lengths_M.to(values_M.device),
                num_tokens=minibatch.num_tokens,
                num_sequences=minibatch.num_sequences,
                horizon=self._horizon,
            )

        def loss(scores: Scores) -> Tensor:
            assert microbatch is not None
            tokens = self._tokens(microbatch, scores.values_M)
            policy = self._recipe.loss(tokens)
            total = pg_loss = mean(policy.loss_M)
            extra = {}
            kl_M = self._kl(microbatch, scores)
            if kl_M is not None:
                extra["policy/kl_ref"] = kl_M
                total = total + self._kl_coef * mean(kl_M)
            if scores.entropy_M is not None:
                extra["policy/entropy"] = scores.entropy_M
                total = total - self._algorithm.entropy_coef * mean(scores.entropy_M)
            self.tokens.add(tokens.logprobs_M, tokens.behaviour_M, policy, extra)
            if not self.grad_norms:
                older_L = self._columns.older_L
                older_M = None if older_L is None else older_L[microbatch.source_M]
                self.mismatch.add(tokens.logprobs_M, tokens.behaviour_M, older_M)
            self.loss += float(total.detach())
            self.pg_loss += float(pg_loss.detach())
            return total

        return loss

    def _tokens(self, microbatch: Microbatch, logprobs_M: Tensor) -> Tokens:
        device = logprobs_M.device
        behaviour_M = microbatch.behaviour_M.to(device)
        if self._columns.proximal_L is not None:
            proximal_M = self._columns.proximal_L[microbatch.source_M].to(device)
        else:
            proximal_M = behaviour_M if self._columns.on_behaviour else logprobs_M.detach()
        return Tokens(
            logprobs_M=logprobs_M,
            proximal_M=proximal_M,
            behaviour_M=behaviour_M,
            advantages_M=self._columns.advantages_L[microbatch.source_M].to(device),
            rows_M=microbatch.rows_M.to(device),
        )

    def _kl(self, microbatch: Microbatch, scores: Scores) -> Tensor | None:
        if self._estimator is None or self._estimator == "full":
            return scores.kl_M
        assert self._columns.reference_L is not None
        reference_M = self._columns.reference_L[microbatch.source_M].to(scores.values_M.device)
        return kl_estimate(self._estimator, scores.values_M, reference_M)
