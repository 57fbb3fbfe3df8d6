"""Interactions that were not served here: whose log-probs are believed, and what becomes of those without."""

from __future__ import annotations

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["PostedConfig"]


class PostedConfig(StrictModel):
    """Uses of posted interactions beside imitation."""

    trusted_keys: list[str] = Field(default_factory=list, max_length=64)
    """Ids of the API keys whose posted tokens the policy loss may use; `*`: of every key that may post feedback."""
    audit_share: float = Field(0.05, ge=0, le=1)
    """Share of the posted interactions with log-probs that a rollout worker computes again."""
    max_logprob_gap: float = Field(0.1, gt=0)
    """Mean difference of posted and computed log-probs beyond which a key is not believed any more in this job."""
    held_versions: int = Field(0, ge=0, le=16)
    """Versions before the newest one whose weights each rollout worker keeps in host memory, to compute log-probs of
    posted answers under them; each takes as much room as what is published (the model, or its adapters)."""
    assume_on_policy: bool = False
    """Take answers without log-probs as if the newest policy had written them; only for agents that serve it."""
    max_assumed_share: float = Field(0.25, gt=0, le=0.25)
    """Largest share of `train.batch_size` that is assumed."""
    assumed_weight: float = Field(0.5, gt=0, le=1)
    """Factor of the advantages of what is assumed."""
