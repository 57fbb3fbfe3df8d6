"""The initial model of a job, with the settings that its backend needs to train it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import Role
from penstock.shared.config.jobs.job import JobConfig, OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.critic import critic_of
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.models.lora import add_adapter

__all__ = ["InitialModel", "initial_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """Initial model, on the CPU and in eval mode, and the settings with which it will be trained.

    Attributes:
        model: the policy, with its adapter if it has one, or the critic.
        optimizer: optimizer settings for this model.
        keep_reference: whether the job needs a frozen reference policy.
        lora: config of the adapter; None without one.
        base_path: model directory of the base weights; None if only this job has them.
        aux_loss_coef: weight of the load-balancing loss of a mixture of experts.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    optimizer: OptimizerConfig
    keep_reference: bool = False
    lora: LoraConfig | None = None
    base_path: str | None = None
    aux_loss_coef: float = 0.0


def initial_model(config: JobConfig, role: Role) -> InitialModel:
    """Build the model of ``role`` with its initial weights.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, the vocabulary does not fit, or `model.moe` is set for
            a model without routers.
    """
    tokenizer = build_tokenizer(config.model)
    model = build_model(config.model, len(tokenizer), seed=config.seed)
    if role == "critic":
        assert config.algorithm.critic is not None
        return InitialModel(model=critic_of(model), tokenizer=tokenizer, optimizer=config.algorithm.critic.optimizer)
    lora, moe = config.model.lora, config.model.moe
    if lora is not None:
        add_adapter(model, lora, seed=config.seed)
    plan = plan_of(model)
    if moe is not None and not (plan is not None and plan.sparse):
        raise ConfigError(f"model.moe: {type(model).__name__} has no routers that this decoder knows")
    return InitialModel(
        model=model,
        tokenizer=tokenizer,
        optimizer=config.optimizer,
        keep_reference=config.needs_reference,
        lora=lora,
        base_path=None if config.warm_start.steps else config.model.path,
        aux_loss_coef=moe.aux_loss_coef if moe is not None else 0.0,
    )
