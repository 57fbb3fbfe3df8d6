"""Update rule of every on-policy algorithm: how one sealed batch changes the policy and the critic.

The update is a pure function of (state, groups in manifest order, position in the run): the same call from the same
state gives the same bytes on the same machine, thread count and ranks. Every rank gathers the properties of the whole
batch and computes advantages from them, so the number of ranks changes only rounding.

Shape legend: B = trajectories of the batch, N = scored tokens of the batch, L = this rank's flat completion tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.backends.base import Backend, Role
from penstock.services.trainer.batch.minibatches import Minibatch
from penstock.services.trainer.batch.packing import Ints, Microbatch
from penstock.services.trainer.batch.statistics import (
    advantage_facts,
    batch_facts,
    optimizer_facts,
    sampled_entropy_of,
)
from penstock.services.trainer.flops import ModelFlops, Work
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.services.trainer.schedule import learning_rate
from penstock.services.trainer.teacher import Teacher
from penstock.services.trainer.update_rules.critic import CriticSteps, value_facts
from penstock.services.trainer.update_rules.off_policy import OffPolicySteps, off_policy_steps
from penstock.services.trainer.update_rules.policy_steps import PolicySteps, TokenColumns
from penstock.services.trainer.update_rules.preparation import PreparedBatch, cut, prepare
from penstock.services.trainer.update_rules.recipes import Credit, recipe_of
from penstock.services.trainer.update_rules.shaping import RewardShaper
from penstock.shared.algorithms.kl_control import adapt_kl_coef
from penstock.shared.config.correction import KLConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.events import Hyperparameters
from penstock.shared.protocol.ids import derive_seed
from penstock.shared.protocol.trajectory import Group

__all__ = ["KLCoefficient", "NonFiniteStep", "OnPolicyRule", "balance"]


class KLCoefficient:
    """Weight of the KL term; with ``adaptive`` it changes after each update (arXiv 1909.08593, §2.2)."""

    def __init__(self, config: KLConfig) -> None:
        self._adaptive = config.adaptive
        self.value = config.coef

    def follow(self, coef: float | None) -> None:
        """Adopt the coefficient that a batch was sealed with, unless this trainer adapts the coefficient itself."""
        if self._adaptive is None and coef is not None:
            self.value = coef

    def adapt(self, kl_per_sequence: float, num_sequences: int) -> None:
        """Adapt the coefficient after one update.

        Args:
            kl_per_sequence: KL of a whole sequence, in nats, averaged over sequences.
        """
        if self._adaptive is not None:
            self.value = adapt_kl_coef(
                self.value,
                kl_per_sequence,
                target=self._adaptive.target,
                horizon=self._adaptive.horizon,
                num_sequences=num_sequences,
            )

    def state(self) -> dict[str, Tensor]:
        """Return the coefficient if it is adaptive, else nothing."""
        return {"kl_coef": torch.tensor([self.value], dtype=torch.float64)} if self._adaptive is not None else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        if self._adaptive is not None:
            self.value = float(state["kl_coef"][0])


def balance(backend: Backend, microbatches: Iterable[Microbatch | None], collective: Collective) -> None:
    """Count the expert loads of the next minibatch over all ranks, if a load-balancing loss needs them."""
    if backend.routers is not None and backend.routers.coef:
        for microbatch in microbatches:
            backend.route(microbatch)
        backend.routers.aim(collective)


class NonFiniteStep(Exception):  # noqa: N818
    """Non-finite loss or gradient; ``changed`` tells whether earlier steps of this update were made."""

    def __init__(self, reason: str, *, changed: bool) -> None:
        super().__init__(reason)
        self.reason, self.changed = reason, changed


class OnPolicyRule:
    """Computes advantages over the whole batch, then makes ``epochs × minibatches`` steps of policy and critic.

    Args:
        config: the job; `algorithm` selects the recipe.
        models: backend of each trained model; includes `critic` if the algorithm needs one.
        collective: ranks that share a batch.
        total_updates: length of the run for the learning-rate schedules.
        teacher: model that a distilled policy imitates; None without one.
    """

    def __init__(
        self,
        config: JobConfig,
        models: Mapping[Role, Backend],
        collective: Collective,
        *,
        total_updates: int | None,
        teacher: Teacher | None = None,
    ) -> None:
        self._config, self._algorithm = config, config.algorithm
        self._models, self._collective, self._total_updates = models, collective, total_updates
        self._teacher = teacher
        self._optimizer = config.optimizer
        self._recipe = recipe_of(config.algorithm)
        self._shaper = RewardShaper(config.algorithm, config.sampling.max_new_tokens)
        self._kl = KLCoefficient(config.algorithm.kl) if config.algorithm.kl is not None else None
        self._flops = {
            role: ModelFlops.of(model.layout(), expert_share=model.routers.share if model.routers is not None else 1.0)
            for role, model in models.items()
        }
        self._work: dict[Role, Work] = {}

    def state(self) -> dict[str, Tensor]:
        """Return the state of the rule between updates, float64 by name."""
        return self._shaper.state() | (self._kl.state() if self._kl is not None else {})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        self._shaper.load_state(state)
        if self._kl is not None:
            self._kl.load_state(state)

    def update(self, shard: BatchShard[Group], *, update_index: int) -> dict[str, float]:
        """Make one policy update; see ``Learner.update``."""
        began = time.perf_counter()
        self._follow(shard.hyperparameters)
        for model in self._models.values():
            model.take_seconds()
            if model.routers is not None:
                model.routers.clear()
        self._work = {role: Work() for role in self._models}
        others = off_policy_steps(
            self._config, self._models["policy"], self._collective, shard, number=self._config.train.minibatches
        )
        own = shard.of("policy")
        if others is not None and not own.num_groups:
            report = self._imitate(others, update_index)
            return report | self._time_facts(time.perf_counter() - began)
        batch = prepare(
            self._config, self._models, self._collective, own, shaper=self._shaper, work=self._work,
            teacher=self._teacher,
        )  # fmt: skip
        credit = self._recipe.credit(batch.experience(self._kl_coef))
        policy = self._policy_steps(batch, credit, update_index)
        critic = self._critic_steps(batch, credit, update_index)
        parts = self._minibatches(batch, credit, update_index)
        critic_parts = parts if critic is None else self._passes(batch, update_index)
        skipped = self._train(parts, critic_parts, policy, critic, others, warming_up=self._warming_up(update_index))
        report = {
            **batch_facts(batch.facts),
            **advantage_facts(batch.facts, credit.advantages, per_token=credit.per_token),
            **sampled_entropy_of(batch.columns, self._collective),
            **policy.report(self._collective),
            **self._router_facts(),
            "optimizer/skipped_steps": float(skipped),
        }
        if "teacher_kl" in batch.whole_N:
            report["policy/kl_teacher"] = float(batch.whole_N["teacher_kl"].double().mean())
        if others is not None:
            report |= others.report()
            report["loss/total"] += report["loss/off_policy"]
        if critic is not None and credit.returns_N is not None:
            report |= value_facts(batch.whole_N["values"], credit.returns_N) | critic.report(self._collective)
        if not math.isfinite(report["loss/total"]) and self._config.train.on_nonfinite == "pause":
            raise NonFiniteStep(f"the loss of the policy is {report['loss/total']}", changed=True)
        report |= self._remember(batch, report, update_index)
        return report | self._time_facts(time.perf_counter() - began)

    def _follow(self, sealed: Hyperparameters | None) -> None:
        """Adopt the hyperparameters that the batch was sealed with, so that a replay uses the same values."""
        if sealed is None:
            return
        if sealed.learning_rate is not None:
            self._optimizer = self._optimizer.model_copy(update={"learning_rate": sealed.learning_rate})
        self._total_updates = sealed.max_updates
        if self._kl is not None:
            self._kl.follow(sealed.kl_coef)

    @property
    def _kl_coef(self) -> float:
        return self._kl.value if self._kl is not None else 0.0

    # -- before the first step ---------------------------------------------------------------------------------------

    def _minibatches(self, batch: PreparedBatch, credit: Credit, update_index: int) -> list[Minibatch]:
        excluded_B = batch.facts.weight_G[batch.facts.group_B] == 0  # masked; rewards stay in the statistics
        if self._algorithm.overlong_filter:
            excluded_B = excluded_B | batch.facts.truncated_B
        skip_B = self._without_gradient(batch, credit)
        return self._passes(batch, update_index, skip_B=skip_B, excluded_B=excluded_B)

    def _passes(
        self,
        batch: PreparedBatch,
        update_index: int,
        *,
        skip_B: NDArray[np.bool_] | None = None,
        excluded_B: NDArray[np.bool_] | None = None,
    ) -> list[Minibatch]:
        """Return the minibatches of every pass over the batch, in the order of the steps."""
        none_B = np.zeros(len(batch.facts.group_B), np.bool_)
        of_pass = partial(
            cut, self._config, batch.columns, batch.facts, self._collective,
            skip_B=none_B if skip_B is None else skip_B, excluded_B=none_B if excluded_B is None else excluded_B,
        )  # fmt: skip
        train = self._config.train
        if not train.reshuffle:
            return of_pass() * train.epochs
        orders_G: list[Ints | None] = [None]
        for epoch in range(1, train.epochs):
            seed = derive_seed(self._config.seed, "minibatches", update_index, epoch)
            orders_G.append(np.random.default_rng(seed).permutation(batch.facts.num_groups))
        return [part for order_G in orders_G for part in of_pass(order_G=order_G)]

    def _without_gradient(self, batch: PreparedBatch, credit: Credit) -> NDArray[np.bool_]:
        """Return a mask of the rows to skip. Skipped rows get no gradient from any loss term, but count in
        denominators."""
        kl = self._algorithm.kl
        routers = self._models["policy"].routers
        other_terms = self._algorithm.entropy_coef != 0 or (kl is not None and kl.place == "loss")
        other_terms = other_terms or (routers is not None and routers.coef > 0)
        if other_terms or credit.per_token or "critic" in self._models:
            return np.zeros(len(batch.facts.group_B), np.bool_)
        return (credit.advantages == 0).numpy()

    def _policy_steps(self, batch: PreparedBatch, credit: Credit, update_index: int) -> PolicySteps:
        advantages_N = credit.advantages
        if not credit.per_token:
            advantages_N = torch.repeat_interleave(advantages_N, torch.from_numpy(batch.facts.scored_B))
        weight_B = batch.facts.weight_G[batch.facts.group_B]
        weight_B = weight_B * np.where(batch.facts.assumed_B, np.float32(self._config.assumed_weight), np.float32(1))
        if (weight_B != 1).any():
            advantages_N = advantages_N * torch.from_numpy(np.repeat(weight_B, batch.facts.scored_B))
        columns = TokenColumns(
            advantages_L=batch.facts.own_tokens(advantages_N, len(batch.columns.logprobs)),
            proximal_L=batch.flat_L.get("proximal"),
            on_behaviour=self._algorithm.proximal == "behaviour",
            reference_L=batch.flat_L.get("reference"),
            older_L=batch.older_L,
        )
        rate = learning_rate(self._optimizer, update_index, self._total_updates)
        return PolicySteps(
            self._config, self._models["policy"], self._recipe, columns, rate=rate, kl_coef=self._kl_coef
        )

    def _critic_steps(self, batch: PreparedBatch, credit: Credit, update_index: int) -> CriticSteps | None:
        config = self._algorithm.critic
        if config is None or credit.returns_N is None:
            return None
        returns_L = batch.facts.own_tokens(credit.returns_N, len(batch.columns.logprobs))
        rate = learning_rate(config.optimizer, update_index, self._total_updates)
        return CriticSteps(self._models["critic"], config, batch.flat_L["values"], returns_L, rate=rate)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _warming_up(self, update_index: int) -> bool:
        return self._algorithm.critic is not None and update_index < self._algorithm.critic.warmup_updates

    def _train(
        self,
        parts: list[Minibatch],
        critic_parts: list[Minibatch],
        policy: PolicySteps,
        critic: CriticSteps | None,
        others: OffPolicySteps | None,
        *,
        warming_up: bool,
    ) -> int:
        """Make all optimizer steps. Return the number of steps skipped because their gradient was not finite.

        The critic also learns from completions that the policy's loss excludes. While the critic warms up, the policy
        trains on the off-policy groups only, because groups of a batch are never seen again.
        """
        made = skipped = 0
        for index in range(len(parts)):
            if not warming_up:
                skipped += self._policy_step(policy, parts[index], others, index, changed=made > 0)
                made += 1
            elif others is not None and others.microbatches(index % self._config.train.minibatches):
                skipped += self._policy_step(policy, None, others, index, changed=made > 0)
                made += 1
            if critic is not None:
                part = critic_parts[index]
                self._begin("critic", part.microbatches)
                skipped += self._is_skipped(critic.step(part), "critic", changed=made > 0)
                made += 1
        return skipped

    def _policy_step(
        self,
        policy: PolicySteps,
        part: Minibatch | None,
        others: OffPolicySteps | None,
        step: int,
        *,
        changed: bool,
    ) -> bool:
        own, index = part.microbatches if part is not None else [], step % self._config.train.minibatches
        self._begin("policy", own + (others.microbatches(index) if others is not None else []))
        if others is not None:
            others.accumulate(index)
        norm = policy.step(part)
        return self._is_skipped(norm, "policy", changed=changed)

    def _imitate(self, others: OffPolicySteps, update_index: int) -> dict[str, float]:
        """Make an update on a batch without groups for the policy loss: no rewards, no advantages, no critic."""
        rate, policy = learning_rate(self._optimizer, update_index, self._total_updates), self._models["policy"]
        norms: list[float] = []
        skipped = 0
        for index in range(others.num_steps * self._config.train.epochs):
            self._begin("policy", others.microbatches(index % others.num_steps))
            others.accumulate(index % others.num_steps)
            norms.append(policy.step(rate))
            skipped += self._is_skipped(norms[-1], "policy", changed=index > 0)
        self._renew_reference(update_index)
        metrics = others.report()
        return {
            **metrics, "loss/total": metrics["loss/off_policy"], **optimizer_facts("optimizer", rate, norms),
            **self._router_facts(), "optimizer/skipped_steps": float(skipped),
        }  # fmt: skip

    def _begin(self, role: Role, microbatches: list[Microbatch | None]) -> None:
        """Count the work of the next step, and the expert loads that its load-balancing loss needs."""
        frozen = role == "policy" and self._config.model.lora is not None
        for microbatch in microbatches:
            self._work[role].add(microbatch, passes=2 if frozen else 3)
        if role == "policy":
            balance(self._models[role], microbatches, self._collective)

    def _is_skipped(self, norm: float, role: Role, *, changed: bool) -> bool:
        if math.isfinite(norm):
            return False
        if self._config.train.on_nonfinite == "pause":
            raise NonFiniteStep(f"the gradient of the {role} has norm {norm}", changed=changed)
        return True

    # -- after the last step -----------------------------------------------------------------------------------------

    def _router_facts(self) -> dict[str, float]:
        routers = self._models["policy"].routers
        return routers.report(self._collective) if routers is not None else {}

    def _remember(self, batch: PreparedBatch, report: Mapping[str, float], update_index: int) -> dict[str, float]:
        """Store reward statistics and the adapted KL coefficient for the next update; return metrics of the KL.

        Renews the reference if it is due.
        """
        self._shaper.keep(batch.shaped)
        kl = self._algorithm.kl
        if self._kl is None or kl is None:
            return {}
        self._renew_reference(update_index)
        per_token = float(batch.whole_N["kl"].double().mean()) if "kl" in batch.whole_N else report.get("policy/kl_ref")
        if per_token is None:  # no token went forward
            return {}
        num_sequences = len(batch.facts.group_B)
        per_sequence = per_token * report["tokens/scored"] / num_sequences
        metrics = {"kl/coef": self._kl.value, "kl/per_sequence": per_sequence, "policy/kl_ref": per_token}
        self._kl.adapt(per_sequence, num_sequences)
        return metrics

    def _renew_reference(self, update_index: int) -> None:
        kl = self._algorithm.kl
        if kl is not None and kl.reset_reference_every and (update_index + 1) % kl.reset_reference_every == 0:
            self._models["policy"].freeze_reference()

    def _time_facts(self, seconds: float) -> dict[str, float]:
        taken = [model.take_seconds() for model in self._models.values()]
        facts = {
            f"update_s/{name}": sum(getattr(part, name) for part in taken)
            for name in ("forward", "backward", "optimizer")
        }
        own = sum(self._flops[role].forward(work) for role, work in self._work.items())
        facts["speed/tflops"] = self._collective.sum({"flops": own})["flops"] / seconds / 1e12
        if self._config.placement.peak_tflops is not None:
            ranks = self._collective.size * self._config.backend.model_parallel
            facts["speed/mfu"] = facts["speed/tflops"] / (self._config.placement.peak_tflops * ranks)
        return facts
