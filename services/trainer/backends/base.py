"""What an update rule needs of a trainer backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from penstock.services.trainer.packing import Microbatch
from penstock.shared.config.job import OptimizerConfig

__all__ = ["Backend", "BackendState", "LossFunction", "Seconds"]

LossFunction = Callable[[Tensor, Tensor | None], Tensor]
"""``(logprobs_M, entropy_M or None) -> scalar``: this microbatch's share of the loss of its minibatch."""


@dataclass(slots=True)
class Seconds:
    """Wall time spent since the counters were last taken."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """Everything that the next update depends on. Flat and named, tensors only, on the CPU.

    Attributes:
        weights: parameters, tied ones once, by their name in the Hugging Face model.
        optimizer: moments, step counts and masters.
        reference: weights of the frozen reference policy; empty without one.
        rng: states of the random generators, uint8.
        files: what describes the model on disk (config.json, tokenizer), by file name.
        environment: pins of a bit-identical replay; see ``environment.describe_environment``.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    reference: dict[str, Tensor]
    rng: dict[str, Tensor]
    files: dict[str, bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Holds a policy, differentiates it and steps it. Gradients add up from one step to the next."""

    def accumulate(self, microbatch: Microbatch, loss: LossFunction, *, temperature: float, entropy: bool) -> None:
        """Forward, ``loss``, backward. ``entropy`` asks for the exact entropy at each scored token."""

    def step(self, learning_rate: float) -> float:
        """Clip, step, zero the gradients; returns the norm before clipping (not finite: nothing was changed)."""

    def reference_logprobs(self, microbatch: Microbatch, *, temperature: float) -> Tensor:
        """Log-probs of the scored tokens under the frozen reference policy, without gradient."""

    def freeze_reference(self) -> None:
        """Make the present weights the reference policy."""

    def new_optimizer(self, config: OptimizerConfig) -> None:
        """Forget all moments and start an optimizer with ``config``."""

    def weights(self) -> list[tuple[str, Tensor]]:
        """Live parameters in a fixed order, tied ones once. Read only."""

    def take_seconds(self) -> Seconds:
        """Time spent since the last call."""

    def environment(self) -> dict[str, str]:
        """What bit-identical results depend on besides the state."""

    def state(self) -> BackendState:
        """A copy of all state."""

    def load_state(self, state: BackendState) -> None:
        """Inverse of ``state``; raises CheckpointError if it does not fit the model."""
