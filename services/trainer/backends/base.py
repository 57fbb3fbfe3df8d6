"""Protocol of a trainer backend, as update rules use it.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.batch.routers import Routers
from penstock.shared.config.jobs.job import OptimizerConfig

__all__ = ["Backend", "BackendState", "LearnerState", "LossFunction", "Role", "Scores", "Seconds", "TensorLayout"]

Role = Literal["policy", "critic"]
"""Role of a trained model.

A critic has the policy's architecture, but a scalar head (`score.weight`) in place of `lm_head`.
"""


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of a forward pass for the M scored tokens of a microbatch; all float32 and differentiable.

    Attributes:
        values_M: log-probs of the tokens (policy), or values of the states before them (critic).
        entropy_M: exact entropy of the policy in nats, if requested.
        kl_M: exact KL(policy || reference) over the vocabulary in nats, if requested.
    """

    values_M: Tensor
    entropy_M: Tensor | None = None
    kl_M: Tensor | None = None


LossFunction = Callable[[Scores], Tensor]
"""Function ``scores -> scalar``: this microbatch's share of the minibatch loss over all ranks."""

TensorLayout = list[tuple[str, tuple[int, ...], torch.dtype]]
"""(Hugging Face name, shape, dtype) of each whole tensor."""


@dataclass(slots=True)
class Seconds:
    """Wall time in seconds by stage, since the counters were last read."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """Everything about one model that its next update depends on: named tensors on the CPU, files and environment.

    Attributes:
        weights: parameters by Hugging Face name, tied ones once. With an adapter: the frozen base weights, or empty if
            these are the weights of `model.path`.
        adapter: the adapter by peft file names; empty without one.
        optimizer: moments, step counts and float32 masters.
        reference: weights of the frozen reference policy; empty without one.
        rng: states of the random generators, uint8.
        files: files that describe the model on disk (config.json, tokenizer), by file name.
        environment: properties that a bit-identical replay needs; see ``environment.describe_environment``.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    reference: dict[str, Tensor]
    rng: dict[str, Tensor]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that a learner's next update depends on: its models and the state of its update rule.

    Attributes:
        models: state of each trained model by role; `policy` is always present.
        rule: state of the update rule by name: KL controller and reward statistics in float64; for an embodied job: the
            networks beside the policy, all optimizers and the replay buffer.
        columns: names of the tensors in ``rule`` that are columns [K, ...], of which an update changes only some rows;
            a checkpoint stores them in shards.
    """

    models: dict[Role, BackendState]
    rule: dict[str, Tensor]
    columns: frozenset[str] = frozenset()


class Backend(Protocol):
    """Holds, differentiates and steps one trained model. Gradients accumulate between steps.

    On several ranks every method is a collective: all ranks call the same methods in the same order, equally often.
    Gradients are sums over ranks, never means: loss denominators already count the whole batch. Log-probs are of
    logits / temperature, with the temperature of each token's row.
    """

    @property
    def routers(self) -> Routers | None:
        """Counts of the tokens that each expert receives in a trained mixture of experts; None for other models."""

    def route(self, microbatch: Microbatch | None) -> None:
        """Run ``microbatch`` forward without gradient, and add the experts that its tokens visit to the counts of
        ``routers``.

        Call it for all microbatches of a minibatch before ``accumulate``.
        """

    def accumulate(
        self,
        microbatch: Microbatch | None,
        loss: LossFunction,
        *,
        entropy: bool = False,
        kl: bool = False,
    ) -> None:
        """Run forward, ``loss`` and backward. A pipeline of stages may defer the work until ``step``.

        Args:
            microbatch: None if this rank has no more: the rank then takes part in the collectives, but does not call
                ``loss``.
            entropy, kl: whether ``loss`` needs these scores (policy only; ``kl`` needs a reference).
        """

    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs (policy) or values (critic), float32 [M], without gradient; empty without a microbatch."""

    def reference_logprobs(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs under the frozen reference policy, like ``score``: float32 [M], empty without a
        microbatch."""

    def step(self, learning_rate: float) -> float:
        """Clip the gradients, make an optimizer step and zero the gradients.

        Returns:
            Gradient norm over all ranks before clipping; if it is not finite, nothing was changed.
        """

    def freeze_reference(self) -> None:
        """Copy the current weights into the reference policy. Does nothing if there is no reference policy."""

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """Drop all moments and start an optimizer with ``config`` at the current weights.

        ``whole``: train the base weights instead of the adapter (warm start). The adapter must still be untrained, so
        that it changes nothing.
        """

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights in the order of ``weights``, tied weights once; equal on every
        rank."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by Hugging Face name in a fixed order, with an adapter merged in.

        Tensors may be live parameters: read only.
        """

    def published_layout(self) -> TensorLayout:
        """Return the layout of the weights for engines, in the order of ``published``."""

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of ``published_layout``: the adapter under the names in peft's files, or the whole weights.

        If the job publishes its adapter, engines hold the base weights themselves.
        """

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights of a published adapter by Hugging Face name; nothing if no adapter is published."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole parameters by Hugging Face name, the same on every rank. Parameters not named stay as they are.

        Call ``new_optimizer`` afterwards.

        Raises:
            CheckpointError: a name or a shape does not fit the model.
        """

    def take_seconds(self) -> Seconds:
        """Return the seconds spent since the last call, and reset the counters."""

    def environment(self) -> dict[str, str]:
        """Return the properties, besides the state, that bit-identical results depend on."""

    def state(self) -> BackendState:
        """Return a copy of all state."""

    def load_state(self, state: BackendState) -> None:
        """Restore what ``state`` returned. Raises CheckpointError, without any change, if the state does not fit the
        model."""
