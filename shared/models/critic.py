"""Critic: the policy's body with a scalar head, as in Hugging Face's sequence classifiers with one label.

Shape legend: M = selected positions, D = model width.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from penstock.shared.errors import ConfigError
from penstock.shared.models.building import building
from penstock.shared.models.decoder import hidden_states
from penstock.shared.models.packed import PackedTokens

__all__ = ["critic_of", "selected_values"]


def critic_of(policy: PreTrainedModel) -> PreTrainedModel:
    """Build a critic whose body is a copy of the policy's and whose head returns 0 for every state; in eval mode.

    Its weights are named as in `...ForSequenceClassification`: the policy's body names and `score.weight` [1, D].

    Raises:
        ConfigError: transformers has no sequence classifier for this architecture, or one without a linear `score`.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    try:
        with building():
            critic = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
        critic.base_model.load_state_dict(policy.base_model.state_dict())
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"cannot make a critic from {type(policy).__name__}: {reason}") from None
    if not isinstance(getattr(critic, "score", None), nn.Linear):
        raise ConfigError(f"cannot make a critic from {type(policy).__name__}: {type(critic).__name__} has no `score`")
    nn.init.zeros_(critic.score.weight)
    return critic.eval()


def selected_values(critic: PreTrainedModel, tokens: PackedTokens, select_M: Tensor) -> Tensor:
    """Return the value, float32 [M], of the state after each selected token, before the next token."""
    hidden_MD = hidden_states(critic, tokens).index_select(0, select_M)
    values_M: Tensor = critic.score(hidden_MD)[:, 0].float()
    return values_M
