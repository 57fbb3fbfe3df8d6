"""The update rule of GRPO: what one sealed batch does to the policy.

A pure function of (state, groups in manifest order, position in the run): the same call from the same state gives the
same bytes, on the same machine and thread count.

Shape legend: B = trajectories that count, M = scored tokens of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.services.trainer.backends.base import Backend, BackendState
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.packing import Microbatch, Minibatch, columns_of, minibatches
from penstock.services.trainer.schedule import learning_rate
from penstock.services.trainer.statistics import Mismatch, TokenSums, batch_facts
from penstock.services.trainer.warm_start import warm_start
from penstock.shared.algorithms.advantages import grpo_advantages
from penstock.shared.algorithms.aggregation import aggregate
from penstock.shared.algorithms.kl import kl_estimate
from penstock.shared.algorithms.policy_loss import PolicyLoss, clipped_ratio_loss
from penstock.shared.config.job import JobConfig
from penstock.shared.models.loading import build_model, build_tokenizer, resolve_device
from penstock.shared.protocol.trajectory import Group

__all__ = ["Learner", "open_learner"]


@dataclass(slots=True)
class _Update:
    """One update under way: what every step of it shares, and what it adds up."""

    advantages_B: Tensor
    learning_rate: float
    references: dict[int, Tensor] = field(default_factory=dict)
    tokens: TokenSums = field(default_factory=TokenSums)
    mismatch: Mismatch = field(default_factory=Mismatch)
    loss: float = 0.0
    pg_loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)


class Learner:
    """Policy, reference policy, optimizer and the GRPO update (DeepSeekMath, arXiv 2402.03300, eq. 3).

    Args:
        config: the job; ``model`` and ``seed`` decide the initial weights.
        device: where the model lives.
        total_updates: length of the run for the learning-rate schedule; default: ``train.max_updates``.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, or the schedule needs a length that is not known.
    """

    def __init__(self, config: JobConfig, *, device: str = "cpu", total_updates: int | None = None) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._total_updates = total_updates or config.train.max_updates
        learning_rate(config.optimizer, config.optimizer.warmup_updates, self._total_updates)
        self.tokenizer = build_tokenizer(config.model)
        self.model = build_model(config.model, len(self.tokenizer), seed=config.seed)
        self._backend: Backend = LocalBackend(
            self.model, self.tokenizer, config.optimizer, keep_reference=config.algorithm.kl_coef > 0, device=device
        )

    def warm_start(
        self,
        batches: Iterable[Sequence[tuple[list[int], list[int]]]],
        on_step: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        """Supervised training on ``(prompt ids, answer ids)`` rows before version 0; see ``warm_start.warm_start``."""
        warm_start(self._backend, batches, self._config, eos=self.tokenizer.eos_token_id, on_step=on_step)

    def weights(self) -> list[tuple[str, Tensor]]:
        """Live parameters by their Hugging Face names, in a fixed order, tied ones once. Read only."""
        return self._backend.weights()

    def environment(self) -> dict[str, str]:
        """What bit-identical results depend on besides the state: compare with a checkpoint's before a replay."""
        return self._backend.environment()

    def state(self) -> BackendState:
        """A copy of everything that the next update depends on."""
        return self._backend.state()

    def load_state(self, state: BackendState) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        self._backend.load_state(state)

    def update(self, groups: Sequence[Group], *, update_index: int) -> dict[str, float]:
        """One policy update: ``epochs × minibatches`` optimizer steps on ``groups``.

        Advantages use the whole batch. Sequences whose advantage is exactly 0 are not computed where nothing else gives
        them a gradient (no KL term, no entropy bonus); the denominators count them, so the result is the same. A step
        whose gradient is not finite changes nothing and is counted in `optimizer/skipped_steps`.

        Args:
            groups: in manifest order; failed trajectories are left out.
            update_index: number of updates before this one in the lineage.

        Returns:
            Metrics. `policy/*` and `mismatch/*` cover the `tokens/forward` tokens that went forward (epochs counted
            again) and are absent if there was none. `policy/approx_kl` is k3 of KL(behaviour || policy); `mismatch/*`
            compares trainer and sampler on the first minibatch, before any step. `policy/entropy` is exact with an
            entropy bonus, else the estimate from the samples. `update_s/*` are seconds.

        Raises:
            ProtocolError: a group cannot be scored, or every trajectory failed.
        """
        self._backend.take_seconds()
        columns = columns_of(groups)
        advantages_B = grpo_advantages(
            torch.from_numpy(columns.rewards_B),
            torch.from_numpy(columns.group_B),
            torch.ones(len(columns.group_B), dtype=torch.bool),
            scale_by_std=self._algorithm.scale_by_std,
        )
        only_policy_gradient = self._algorithm.kl_coef == 0 and self._algorithm.entropy_coef == 0
        parts = minibatches(
            columns,
            number=self._config.train.minibatches,
            max_tokens=self._config.train.max_tokens_per_microbatch,
            skip_B=(advantages_B == 0).numpy() & only_policy_gradient,
        )
        rate = learning_rate(self._config.optimizer, update_index, self._total_updates)
        update = _Update(advantages_B, rate)
        if self._algorithm.kl_coef > 0:
            self._score_by_reference(parts, update)
        for _ in range(self._config.train.epochs):
            for minibatch in parts:
                self._optimizer_step(minibatch, update)
        return {**batch_facts(columns, advantages_B), **self._report(update)}

    def _score_by_reference(self, parts: list[Minibatch], update: _Update) -> None:
        temperature = self._config.sampling.temperature
        for microbatch in (m for part in parts for m in part.microbatches):
            update.references[id(microbatch)] = self._backend.reference_logprobs(microbatch, temperature=temperature)

    def _optimizer_step(self, minibatch: Minibatch, update: _Update) -> None:
        for microbatch in minibatch.microbatches:
            self._backend.accumulate(
                microbatch,
                self._loss_of(microbatch, minibatch, update),
                temperature=self._config.sampling.temperature,
                entropy=self._algorithm.entropy_coef != 0,
            )
        update.grad_norms.append(self._backend.step(update.learning_rate))

    def _loss_of(
        self, microbatch: Microbatch, minibatch: Minibatch, update: _Update
    ) -> Callable[[Tensor, Tensor | None], Tensor]:
        def mean(values_M: Tensor) -> Tensor:
            return aggregate(
                self._algorithm.aggregation,
                values_M,
                microbatch.lengths_M.to(values_M.device),
                num_tokens=minibatch.num_tokens,
                num_sequences=minibatch.num_sequences,
                horizon=self._config.sampling.max_new_tokens,
            )

        def loss(logprobs_M: Tensor, entropy_M: Tensor | None) -> Tensor:
            device = logprobs_M.device
            behaviour_M = microbatch.behaviour_M.to(device)
            advantages_M = update.advantages_B[microbatch.rows_M].to(device)
            policy = self._policy_loss(logprobs_M, behaviour_M, advantages_M)
            total = pg_loss = mean(policy.loss_M)
            extra = {}
            if self._algorithm.kl_coef > 0:
                extra["policy/kl_ref"] = kl_estimate(
                    self._algorithm.kl_estimator, logprobs_M, update.references[id(microbatch)]
                )
                total = total + self._algorithm.kl_coef * mean(extra["policy/kl_ref"])
            if entropy_M is not None:
                extra["policy/entropy"] = entropy_M
                total = total - self._algorithm.entropy_coef * mean(entropy_M)
            update.tokens.add(logprobs_M, behaviour_M, policy, extra)
            if not update.grad_norms:
                update.mismatch.add(logprobs_M, behaviour_M)
            update.loss += float(total.detach())
            update.pg_loss += float(pg_loss.detach())
            return total

        return loss

    def _policy_loss(self, logprobs_M: Tensor, behaviour_M: Tensor, advantages_M: Tensor) -> PolicyLoss:
        return clipped_ratio_loss(
            logprobs_M,
            behaviour_M,
            advantages_M,
            clip_low=self._algorithm.clip_low,
            clip_high=self._algorithm.clip_high,
        )

    def _report(self, update: _Update) -> dict[str, float]:
        steps, seconds = len(update.grad_norms), self._backend.take_seconds()
        finite = [norm for norm in update.grad_norms if math.isfinite(norm)]
        report = {
            "loss/total": update.loss / steps,
            "loss/policy": update.pg_loss / steps,
            "optimizer/lr": update.learning_rate,
            "optimizer/steps": float(steps),
            "optimizer/skipped_steps": float(steps - len(finite)),
            "tokens/forward": float(update.tokens.tokens),
            "update_s/forward": seconds.forward,
            "update_s/backward": seconds.backward,
            "update_s/optimizer": seconds.optimizer,
            **update.tokens.means(),
            **update.mismatch.means(),
        }
        if finite:
            report["optimizer/grad_norm"] = sum(finite) / len(finite)
        return report


def open_learner(config: JobConfig) -> Learner:
    """The learner of a job on the device that its placement names. Raises ConfigError as ``Learner``."""
    return Learner(config, device=resolve_device(config.placement.device))
