"""Learner of a language job on one rank: its models and the update rule that trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends import open_backend
from penstock.services.trainer.backends.base import Backend, LearnerState, Role, Scores, TensorLayout
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.batch.packing import Columns, columns_of_rows, microbatches
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.services.trainer.schedule import decay, learning_rate
from penstock.services.trainer.teacher import open_teacher
from penstock.services.trainer.update_rules import OnPolicyRule
from penstock.shared.algorithms.aggregation import token_mean
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import Demonstration
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.compatibility import check_same_shapes, check_same_tokens, check_tokenizer
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.protocol.trajectory import Group
from penstock.shared.protocol.weights import Layout
from penstock.shared.weights import layout_of

__all__ = ["Learner", "load_reference"]


def load_reference(policy: Backend, config: JobConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the model at ``algorithm.kl.reference`` the frozen reference; the policy stays as it is.

    Raises:
        ConfigError: the model cannot be loaded, or its shapes or tokenizer differ from the policy's.
    """
    kl = config.algorithm.kl
    if kl is None or kl.reference is None:
        return
    if config.model.lora is not None:
        raise ConfigError("algorithm.kl.reference: with model.lora the reference is the model without its adapter")
    what = f"the reference model '{kl.reference}'"
    source = config.model.model_copy(update={"path": kl.reference, "config": None, "tokenizer": None})
    theirs = build_tokenizer(source)
    check_same_tokens(tokenizer, theirs, what=what)
    model = build_model(source, len(theirs), seed=0)
    parameters = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    check_same_shapes(
        ((name, shape) for name, shape, _ in policy.layout()),
        ((name, tuple(tensor.shape)) for name, tensor in parameters),
        what=what,
    )
    own = [(name, tensor.to("cpu", copy=True)) for name, tensor in policy.weights()]
    policy.load_weights(parameters)
    policy.freeze_reference()
    policy.load_weights(own)
    policy.new_optimizer(config.optimizer)


class Learner:
    """Policy, reference, optional critic and teacher, their optimizers, and the update rule.

    Every method is a collective: all ranks call the same methods in the same order.

    Args:
        config: the job; ``model`` and ``seed`` determine the initial weights.
        device: device of the models.
        collective: ranks that share a batch.
        total_updates: length of the run for the learning-rate schedule; default: ``train.max_updates``.

    Raises:
        ConfigError: the model, the tokenizer, the reference or the teacher cannot be loaded or do not fit together, or
            the schedule needs a length that is not known.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        device: str = "cpu",
        collective: Collective | None = None,
        total_updates: int | None = None,
    ) -> None:
        self._config = config
        self._collective = collective = collective or Alone()
        total_updates = total_updates or config.train.max_updates
        critic = config.algorithm.critic
        for optimizer in [config.optimizer] + ([critic.optimizer] if critic is not None else []):
            learning_rate(optimizer, optimizer.warmup_updates, total_updates)
        self.tokenizer = build_tokenizer(config.model)
        check_tokenizer(config.model, self.tokenizer)
        roles: tuple[Role, ...] = ("policy", "critic") if config.algorithm.needs_critic else ("policy",)
        self._models: dict[Role, Backend] = {role: open_backend(config, role, collective, device) for role in roles}
        self._policy = self._models["policy"]
        self._base_taken = False
        load_reference(self._policy, config, self.tokenizer)
        self._teacher = open_teacher(config, self.tokenizer, collective, device)
        self._rule = OnPolicyRule(config, self._models, collective, total_updates=total_updates, teacher=self._teacher)

    def warm_start(
        self,
        batches: Iterable[Sequence[Demonstration]],
        on_step: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        """Train supervised before version 0; see ``warm_start.warm_start``.

        The critic then starts from the policy's body.
        """
        eos = self.tokenizer.eos_token_id
        _warm_start(self._policy, batches, self._config, self._collective, eos=eos, on_step=on_step)
        critic = self._models.get("critic")
        if critic is not None and self._config.algorithm.critic is not None:
            body = {name for name, _, _ in critic.layout()}
            critic.load_weights((name, tensor) for name, tensor in self._policy.weights() if name in body)
            critic.new_optimizer(self._config.algorithm.critic.optimizer)

    @property
    def model(self) -> PreTrainedModel:
        """The live policy module, if one process holds it whole.

        Raises:
            ConfigError: the backend shards the policy.
        """
        if not isinstance(self._policy, LocalBackend):
            raise ConfigError("the policy has no module of its own: only backend 'local' holds it whole")
        return self._policy.model

    def layout(self) -> Layout:
        """Return the layout of the tensors for engines: whole weights or adapter, in fixed order, tied weights once."""
        return _layout_of(self._policy.published_layout())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors for engines in the order of ``layout``; see ``Backend.published``. Read only."""
        return self._policy.published()

    @property
    def publishes_adapter(self) -> bool:
        """Return True if engines hold the base weights themselves and only the adapter is published."""
        return self._config.model.lora is not None and self._config.model.lora.publish == "adapters"

    @property
    def base_digest(self) -> str:
        """Digest of the base weights of a published adapter; "" without one."""
        return self.environment()["base"] if self.publishes_adapter else ""

    def base_layout(self) -> Layout:
        """Return the layout of the tensors of ``take_base``."""
        return _layout_of(self._policy.layout())

    def take_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of ``frozen`` at the first call if the job has a warm start; otherwise yield nothing. Read
        only.

        The warm start changes the base weights, so that engines cannot load them themselves. As with ``weights``, all
        ranks must exhaust the iterator.
        """
        taken, self._base_taken = self._base_taken, True
        return iter(()) if taken or not self._config.warm_start.steps else self.frozen()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights of a published adapter; nothing without one. Read only."""
        return self._policy.frozen()

    def environment(self) -> dict[str, str]:
        """Return the properties on which bit-identical results depend. A replay compares them with those in the
        checkpoint."""
        return self._policy.environment() | self._pins

    def state(self) -> LearnerState:
        """Return a copy of everything that the next update depends on."""
        models = {role: model.state() for role, model in self._models.items()}
        models["policy"] = replace(models["policy"], environment=models["policy"].environment | self._pins)
        return LearnerState(models=models, rule=self._rule.state())

    def load_state(self, state: LearnerState) -> None:
        """Restore what ``state`` returned.

        Raises:
            CheckpointError: the state belongs to another model or another algorithm.
        """
        if state.models.keys() != self._models.keys() or state.rule.keys() != self._rule.state().keys():
            raise CheckpointError(
                f"the state holds {[*state.models, *state.rule]}, this job's algorithm "
                f"'{self._config.algorithm.type}' needs {[*self._models, *self._rule.state()]}"
            )
        taught_by = state.models["policy"].environment.get("teacher", "")
        if taught_by != self._pins.get("teacher", ""):
            raise CheckpointError(
                f"the checkpoint was taught by weights of digest '{taught_by}', algorithm.teacher holds "
                f"'{self._pins.get('teacher', '')}': give the teacher that the job was started with"
            )
        for role, model in self._models.items():
            model.load_state(state.models[role])
        self._rule.load_state(state.rule)

    @property
    def _pins(self) -> dict[str, str]:
        """Return ``{"teacher": digest of the teacher's weights}``, on which updates depend; empty without a teacher."""
        return {"teacher": self._teacher.digest} if self._teacher is not None else {}

    def update(self, shard: BatchShard[Group], *, update_index: int) -> dict[str, float]:
        """Make one policy update: ``epochs × minibatches`` steps on a batch of which this rank holds ``shard``.

        Advantages use the whole batch. Sequences whose advantage is exactly 0 are not computed if no other term gives
        them a gradient; the denominators count them, so the result is the same.

        Args:
            update_index: number of updates before this one in the lineage.

        Returns:
            Metrics, the same on every rank except for seconds. `policy/*` and `mismatch/*` cover the `tokens/forward`
            tokens that went forward (counted in each epoch) and are absent if there were none. `policy/approx_kl` is k3
            of KL(behaviour || policy); `mismatch/*` compares trainer and sampler on the first minibatch, before any
            step. `policy/entropy` is exact with an entropy bonus, else an estimate from the samples. `update_s/*` are
            seconds.

        Raises:
            ProtocolError: a group cannot be scored, or every trajectory failed; nothing was changed.
            NonFiniteStep: a loss or gradient is not finite and `train.on_nonfinite` is `pause`.
        """
        return self._rule.update(shard, update_index=update_index)


def _layout_of(layout: TensorLayout) -> Layout:
    return layout_of((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape, dtype in layout)


def _warm_start(
    backend: Backend,
    batches: Iterable[Sequence[Demonstration]],
    config: JobConfig,
    collective: Collective,
    *,
    eos: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train the policy on demonstrations before version 0, so that reinforcement learning starts from some successes.
    Make one optimizer step per batch on the cross-entropy of the answer tokens and the end of sequence.

    The learning rate follows ``warm_start.schedule``; other optimizer settings are the job's. Afterwards the optimizer
    is reset, and the resulting weights become the reference policy, unless the job names another one. In a job with
    adapters, the warm start trains the base weights instead.

    Args:
        batches: demonstrations of each step, the same on every rank; a rank trains its share of the rows.
        eos: token id of the end of sequence, appended to answers that do not end with it.
        on_step: called with the number of the step, from 1, and its mean loss in nats per token.

    Raises:
        ProtocolError: a prompt is empty.
    """
    warm = config.warm_start
    backend.new_optimizer(config.optimizer, whole=True)
    for step, rows in enumerate(batches, start=1):
        ended = [row if row.answer_ids and row.answer_ids[-1] == eos else row.extended(eos) for row in rows]
        num_tokens = sum(sum(row.mask) for row in ended)
        own = ended[collective.rank :: collective.size]
        columns = columns_of_rows([(row.prompt_ids, row.answer_ids) for row in own], [row.mask for row in own])
        rate = warm.learning_rate * decay(warm.schedule, (step - 1) / max(1, warm.steps), warm.min_lr_ratio)
        on_step(step, _warm_step(backend, columns, collective, config, num_tokens=num_tokens, rate=rate))
    backend.new_optimizer(config.optimizer)
    if config.algorithm.kl is None or config.algorithm.kl.reference is None:
        backend.freeze_reference()


def _warm_step(
    backend: Backend, columns: Columns, collective: Collective, config: JobConfig, *, num_tokens: int, rate: float
) -> float:
    losses: list[float] = []

    def loss(scores: Scores) -> Tensor:
        value = token_mean(-scores.values_M, num_tokens=num_tokens)
        losses.append(float(value.detach()))
        return value

    own = microbatches(columns, np.arange(len(columns.group_B)), config.train.max_tokens_per_microbatch)
    most = int(collective.max({"microbatches": float(len(own))})["microbatches"])
    for microbatch in [*own, *[None] * (most - len(own))]:
        backend.accumulate(microbatch, loss)
    backend.step(rate)
    return collective.sum({"loss": sum(losses)})["loss"]
