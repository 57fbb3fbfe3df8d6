"""Pipeline of microbatches through the stages of a model: one forward, one backward (1F1B, arXiv 2104.04473, § 2.2).

Uses megatron-core's schedule without interleaving. Every rank of a copy has every microbatch, so each stage knows the
shapes that it receives, and shapes need not be sent.

Shape legend: S = tokens that a rank keeps between layers, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.services.trainer.backends.megatron import core
from penstock.services.trainer.backends.megatron.cpu import allocating_on, scheduling_on
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.services.trainer.backends.megatron.model import MegatronModel
from penstock.shared.models.packed import PackedTokens

__all__ = ["run_stages", "with_loss"]


def run_stages(
    model: MegatronModel,
    groups: Groups,
    device: torch.device,
    microbatches: Sequence[PackedTokens],
    forward: Callable[[int], Tensor],
    *,
    after_backward: Callable[[], None] | None = None,
) -> None:
    """Call ``forward`` for every microbatch in order. A collective of the ranks that share the microbatches.

    Args:
        forward: runs this stage on the microbatch with the given index; returns the states for the next stage, [S, 1,
            D]. If there are backward passes, the last stage returns the scalar to differentiate.
        after_backward: called after each backward pass; None: no backward passes.
    """
    if groups.pipeline.size() == 1:
        with allocating_on(device):
            for number in range(len(microbatches)):
                value = forward(number)
                if after_backward is not None:
                    value.backward()  # type: ignore[no-untyped-call]
                    after_backward()
        return

    def step(numbers: Iterator[int], _: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return forward(next(numbers)), _as_it_is

    shapes = [model.handed_on(tokens) for tokens in microbatches]
    with scheduling_on(device):
        schedule = core.get_forward_backward_func(pp_size=groups.pipeline.size(), vp_size=None)
        schedule(
            forward_step_func=step,
            data_iterator=iter(range(len(microbatches))),
            model=model.gpt,
            num_microbatches=len(microbatches),
            seq_length=0,  # unused: the communicator knows the shapes
            micro_batch_size=1,
            forward_only=after_backward is None,
            p2p_communicator=_Neighbours(groups, model.gpt.config, shapes, after_backward),
            pg_collection=groups.of_megatron(),
        )


def with_loss(hidden_S1D: Tensor, loss: Tensor) -> Tensor:
    """Return ``hidden_S1D`` unchanged. Its backward pass also differentiates ``loss``, a scalar of this stage."""
    passed: Tensor = _WithLoss.apply(hidden_S1D, loss)  # type: ignore[no-untyped-call]
    return passed


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_S1D: Tensor, loss: Tensor) -> Tensor:
        ctx.like = torch.ones_like(loss)
        return hidden_S1D

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.like


class _Neighbours(core.P2PCommunicator):  # type: ignore[misc]
    """Communicator with the next and the previous pipeline stage; knows the shapes of all tensors in advance."""

    def __init__(
        self, groups: Groups, config: Any, shapes: Sequence[list[int]], after_backward: Callable[[], None] | None
    ) -> None:
        super().__init__(groups.pipeline, config)
        self._forward, self._backward = iter(shapes), iter(shapes)
        self._after_backward = after_backward

    def _communicate_shapes(self, _next: Any, _previous: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        """Return the shapes of the next tensors to receive. Microbatches come in order in both directions."""
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        self._backward_done()
        super().send_backward(input_tensor_grads, is_first_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        self._backward_done()
        return super().send_backward_recv_forward(input_tensor_grads, tensor_shapes, is_first_stage)

    def _backward_done(self) -> None:
        assert self._after_backward is not None
        self._after_backward()


def _as_it_is(output: Tensor) -> tuple[Tensor, Tensor, None]:
    """Return ``(output, 0, None)``, the three results that megatron-core's schedule expects of a loss function: the
    loss, the number of tokens to divide it by (0: do not divide), and values to log.

    The loss is not divided here, because its denominators count the whole batch.
    """
    return output, torch.zeros((), dtype=torch.int, device=output.device), None
