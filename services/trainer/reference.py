"""A reference policy that is not the initial one: checked, and put where the backend keeps its reference."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import Backend
from penstock.shared.config.job import JobConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.compatibility import check_same_shapes, check_same_tokens
from penstock.shared.models.loading import build_model, build_tokenizer

__all__ = ["load_reference"]


def load_reference(policy: Backend, config: JobConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the model at ``algorithm.kl.reference`` the frozen reference; the policy stays as it is.

    Raises:
        ConfigError: it cannot be loaded, has other shapes, or means something else by a token.
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
