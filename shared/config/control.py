"""Continuous control: soft actor-critic with its replay buffer, and PPO for Gaussian policies.

No kind of job has these sections yet: whoever makes an update rule gives it its section.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.optimizer import OptimizerConfig

__all__ = ["GaussianPPOConfig", "ReplayBufferConfig", "SoftActorCriticConfig"]


class ReplayBufferConfig(StrictModel):
    """Where the transitions of an off-policy algorithm are kept."""

    capacity: int = Field(1_000_000, ge=1)
    """Transitions that are kept; a new one takes the place of the oldest."""
    max_bytes: int = Field(1 << 30, ge=1)
    """A capacity whose columns need more than this is refused."""


class SoftActorCriticConfig(StrictModel):
    """Soft actor-critic with twin critics and automatic temperature (arXiv 1812.05905)."""

    hidden_sizes: tuple[PositiveInt, ...] = Field((256, 256), min_length=1)
    """Widths of the hidden layers of actor and critics."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount of one transition."""
    tau: float = Field(0.005, gt=0, le=1)
    """Part of the way that the target critics go to the critics after each step."""
    batch_size: int = Field(256, ge=1)
    """Transitions of one step, drawn uniformly with replacement."""
    steps_per_update: int = Field(1, ge=1)
    """Steps of critics, actor and temperature in one policy update."""
    warmup_transitions: int = Field(1000, ge=1)
    """No update before the buffer has got as many."""
    initial_temperature: float = Field(1.0, gt=0)
    """Weight of the entropy at the start."""
    target_entropy: float | None = None
    """The temperature steers the policy's entropy to this, in nats; null: minus the number of action dimensions."""
    actor: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of the actor."""
    critic: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of both critics."""
    temperature: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of the logarithm of the temperature."""
    buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Where transitions are kept."""
    on_nonfinite: Literal["pause", "skip"] = "pause"
    """A loss or gradient that is not finite: end the update with an error, or leave out that optimizer step."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> SoftActorCriticConfig:
        if self.warmup_transitions > self.buffer.capacity:
            raise ValueError(
                f"warmup_transitions {self.warmup_transitions} never fit into buffer.capacity {self.buffer.capacity}"
            )
        return self


class GaussianPPOConfig(StrictModel):
    """PPO for a diagonal Gaussian policy with a value network (arXiv 1707.06347; GAE: arXiv 1506.02438)."""

    hidden_sizes: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    """Widths of the hidden layers of policy and value network."""
    initial_log_std: float = 0.0
    """Logarithm of the standard deviation of every action dimension at the start."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount of one transition."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of GAE: 0 trusts the value network, 1 uses whole returns."""
    normalise_advantages: bool = True
    """Mean 0 and deviation 1 over all transitions of the batch."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    value_clip: float | None = Field(None, gt=0)
    """A value that has moved this far towards its target in an update gets no further gradient; null: no limit."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    epochs: int = Field(8, ge=1)
    """Passes over the batch in one policy update."""
    minibatches: int = Field(8, ge=1)
    """Optimizer steps of one pass, each on its own part of the batch."""
    max_kl: float | None = Field(None, gt=0)
    """No further pass after one in which the mean KL from the behaviour policy was larger, in nats; null: no bound."""
    policy: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the policy."""
    value: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the value network."""
    on_nonfinite: Literal["pause", "skip"] = "pause"
    """A loss or gradient that is not finite: end the update with an error, or leave out that optimizer step."""
