"""Mixture of experts: the shape of a model built from scratch, and how its routers are trained."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["ExpertsConfig", "MoEConfig"]


class ExpertsConfig(StrictModel):
    """The experts of every layer; `intermediate_size` of the architecture is the width of one expert."""

    number: int = Field(8, ge=2, le=1 << 16)
    """Experts of a layer."""
    per_token: int = Field(2, ge=1)
    """Experts that each token goes to."""
    normalise: bool = True
    """Rescale the probabilities of a token's experts to sum 1 (`norm_topk_prob`)."""

    @model_validator(mode="after")
    def _choice_fits(self) -> ExpertsConfig:
        if self.per_token > self.number:
            raise ValueError(f"per_token {self.per_token} is larger than the number of experts, {self.number}")
        return self


class MoEConfig(StrictModel):
    """Training of the routers of a mixture of experts."""

    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of each layer (Switch Transformer, arXiv 2101.03961, eq. 4-6); 1 is a balanced
    layer. Costs one more forward pass per minibatch: its expert loads are counted before the first gradient."""
    router_replay: bool = False
    """The sampler records the experts of every token and the trainer uses them again (arXiv 2510.11370)."""
    replay_bytes_per_token: int | None = Field(None, ge=1)
    """Needed for `router_replay` with `model.path`: layers with experts x experts of a token, twice that above 256
    experts. It counts against the budgets of the job; the sampler refuses a smaller one and names the right number."""

    @model_validator(mode="after")
    def _size_of_a_table(self) -> MoEConfig:
        if self.replay_bytes_per_token is not None and not self.router_replay:
            raise ValueError("replay_bytes_per_token is read with router_replay only")
        return self
