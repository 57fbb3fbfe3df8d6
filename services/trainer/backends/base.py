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
"""A critic is the policy's architecture with a scalar head (`score.weight`) in place of `lm_head`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of a forward pass for the M scored tokens of a microbatch; all float32 and differentiable.

    Attributes:
        values_M: log-probs of the tokens (policy), or values of the states before them (critic).
        entropy_M: exact entropy of the policy in nats, where asked for.
        kl_M: exact KL(policy || reference) over the vocabulary in nats, where asked for.
    """

    values_M: Tensor
    entropy_M: Tensor | None = None
    kl_M: Tensor | None = None


LossFunction = Callable[[Scores], Tensor]
"""``scores -> scalar``: this microbatch's share of the loss of its minibatch over all ranks."""

TensorLayout = list[tuple[str, tuple[int, ...], torch.dtype]]
"""(Hugging Face name, shape, dtype) of whole tensors."""


@dataclass(slots=True)
class Seconds:
    """Wall time spent since the counters were last taken."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """Everything of one model that the next update depends on. Flat and named, tensors only, on the CPU.

    Attributes:
        weights: parameters, tied ones once, by their name in the Hugging Face model. With an adapter the frozen ones
            under it, or nothing where they are those of `model.path`.
        adapter: the adapter by the names of peft's files; empty without one.
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
    adapter: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that the next update depends on.

    Attributes:
        models: state of each trained model by its role; `policy` is always there.
        rule: what the update rule itself remembers, by name: KL controller and reward statistics in float64; of an
            embodied job the networks beside the policy, all optimizers and the replay buffer.
        columns: names in ``rule`` of columns [K, ...] that grow and change by rows; a checkpoint keeps them in shards.
    """

    models: dict[Role, BackendState]
    rule: dict[str, Tensor]
    columns: frozenset[str] = frozenset()


class Backend(Protocol):
    """Holds one trained model, differentiates it and steps it. Gradients add up from one step to the next.

    On several ranks every method is a collective: all ranks call the same methods in the same order, as often as each
    other. Gradients are sums over ranks, never means: denominators already count the whole batch. Log-probs are of
    logits / temperature, that of each token's row.
    """

    @property
    def routers(self) -> Routers | None:
        """Books of the routers of a trained mixture of experts."""

    def route(self, microbatch: Microbatch | None) -> None:
        """Count in ``routers`` what a microbatch of the coming minibatch will choose, without gradient."""

    def accumulate(
        self,
        microbatch: Microbatch | None,
        loss: LossFunction,
        *,
        entropy: bool = False,
        kl: bool = False,
    ) -> None:
        """Forward, ``loss``, backward: now, or at the latest in ``step``, where stages work on several microbatches.

        Args:
            microbatch: None where this rank has no more: it takes part in the collectives, ``loss`` is not called.
            entropy, kl: which further scores ``loss`` needs (policy only; ``kl`` needs a reference).
        """

    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Log-probs (policy) or values (critic) of the scored tokens, float32 [M], without gradient; None: [0]."""

    def reference_logprobs(self, microbatch: Microbatch | None) -> Tensor:
        """As ``score``, under the frozen reference policy."""

    def step(self, learning_rate: float) -> float:
        """Clip, step, zero the gradients.

        Returns:
            Norm of the gradient over all ranks before clipping; where it is not finite nothing was changed.
        """

    def freeze_reference(self) -> None:
        """Make the present weights the reference policy. Does nothing where none is kept."""

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """Forget all moments and start an optimizer with ``config`` at the present weights.

        ``whole``: train the weights under the adapter instead, as long as it changes nothing yet (warm start).
        """

    def layout(self) -> TensorLayout:
        """The whole weights in the order of ``weights``, tied ones once; the same on every rank."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by Hugging Face name in a fixed order, an adapter added; live where whole and plain.

        Read only.
        """

    def published_layout(self) -> TensorLayout:
        """Weights for engines, in the order of ``published``."""

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter by the names of peft's files where engines hold the weights under it, else ``weights``."""

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under a published adapter by Hugging Face name; nothing where ``published`` are whole weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole parameters by Hugging Face name, the same on every rank; those not named stay as they are.

        Call ``new_optimizer`` afterwards.

        Raises:
            CheckpointError: a name or a shape is not the model's.
        """

    def take_seconds(self) -> Seconds:
        """Time spent since the last call."""

    def environment(self) -> dict[str, str]:
        """Facts beside the state that bit-identical results depend on."""

    def state(self) -> BackendState:
        """A copy of all state."""

    def load_state(self, state: BackendState) -> None:
        """Inverse of ``state``; raises CheckpointError if it does not fit the model, which is then unchanged."""
