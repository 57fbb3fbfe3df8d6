"""Rollout engines behind one protocol."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.engines.base import Engine, UpdateMode
from penstock.services.rollout.engines.embedded import EmbeddedEngine
from penstock.shared.config.model import ModelConfig
from penstock.shared.models.loading import build_model, stop_token_ids

__all__ = ["EmbeddedEngine", "Engine", "UpdateMode", "open_engine"]


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
    """The engine of a job; blocks while it loads the model, which it owns from then on.

    Args:
        max_running: sequences decoded at once.
        device: where the model lives.
        seed: of the initial weights where ``config`` builds them.
        version: policy version and ``digest`` of the loaded weights.

    Raises:
        ConfigError: the model cannot be loaded, or is of an architecture that the embedded engine does not decode.
    """
    model = build_model(config, len(tokenizer), seed=seed).to(device)

    def detokenize(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    return EmbeddedEngine(
        model,
        max_running=max_running,
        stop_ids=stop_token_ids(tokenizer, model),
        detokenize=detokenize,
        version=version,
        digest=digest,
    )
