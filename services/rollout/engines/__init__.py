"""Rollout engines behind one protocol."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.rollout.engines.base import Engine, Updatable, UpdateMode
from penstock.services.rollout.engines.constraint import Grammars
from penstock.services.rollout.engines.embedded import EmbeddedEngine
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rollout import ENGINE_PACKAGES, RolloutConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.loading import build_model, stop_token_ids
from penstock.shared.models.lora import add_adapter, base_parameters
from penstock.shared.weights import digest_of_tensors

__all__ = ["EmbeddedEngine", "Engine", "Updatable", "UpdateMode", "lacks_engine", "open_engine"]


def lacks_engine(rollout: RolloutConfig) -> bool:
    """True if this interpreter has not the package of the engine."""
    return rollout.engine in ENGINE_PACKAGES and importlib.util.find_spec(rollout.engine) is None


def open_engine(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_running: int,
    seed: int,
    device: str = "cpu",
    version: int = 0,
    digest: str = "",
) -> Engine:
    """The embedded engine; blocks while it loads the model, which it owns from then on.

    Args:
        max_running: sequences decoded at once.
        device: where the model lives.
        seed: of the initial weights where ``config`` builds them.
        version: policy version and ``digest`` of the loaded weights.

    Raises:
        ConfigError: the model cannot be loaded, or is of an architecture that the embedded engine does not decode.
    """
    model = build_model(config, len(tokenizer), seed=seed).to(device)
    _check_routers(model, config)
    base = ""
    if config.lora is not None and config.lora.publish == "adapters":
        add_adapter(model, config.lora, seed=seed)
        base = digest_of_tensors(base_parameters(model).items())

    def detokenize(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    stop_ids = stop_token_ids(tokenizer, model)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return EmbeddedEngine(
        model,
        max_running=max_running,
        stop_ids=stop_ids,
        detokenize=detokenize,
        version=version,
        digest=digest,
        base=base,
        record_routes=config.replay_bytes_per_token > 0,
        grammars=Grammars(tokenizer, vocab_size=vocab_size, stop_ids=stop_ids),
    )


def _check_routers(model: PreTrainedModel, config: ModelConfig) -> None:
    plan = plan_of(model)
    if config.moe is None or plan is None:
        return
    if not plan.sparse:
        raise ConfigError(f"model.moe: {type(model).__name__} has no routers")
    wide = 1 if plan.sparse[0].router.weight.shape[0] <= 1 << 8 else 2
    nbytes = len(plan.sparse) * plan.sparse[0].top_k * wide
    if config.moe.router_replay and config.replay_bytes_per_token < nbytes:
        raise ConfigError(f"model.moe.replay_bytes_per_token: this model's router table takes {nbytes} bytes per token")
