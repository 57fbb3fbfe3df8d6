"""AdamW over named parameters: decay groups, gradient clipping, float32 masters, and a flat named state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from penstock.shared.config.optimizer import OptimizerConfig
from penstock.shared.errors import CheckpointError, ConfigError

__all__ = ["AdamW8bit", "Optimizer", "check_fits", "copy_into", "decayed_names"]


class AdamW8bit:
    """bitsandbytes' 8-bit AdamW with the part of torch's optimizer interface that this module uses.

    Small tensors keep 32-bit moments. ``state`` holds live tensors, so that loading can copy into them, but not the
    library's quantization tables and integer step counts.

    Raises:
        ConfigError: the library is not installed.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        try:
            library = import_module("bitsandbytes")
        except ImportError:
            raise ConfigError(
                "optimizer.type 'adamw_8bit' needs bitsandbytes: `pip install bitsandbytes`, or use 'adamw'"
            ) from None
        self._inner = library.optim.AdamW8bit(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
        self.param_groups: list[dict[str, Any]] = self._inner.param_groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                self._inner.init_state(group, param, number, index)
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    **{name: value for name, value in self._inner.state[param].items() if _is_ours(name, value)},
                }

    def step(self) -> None:
        """Make one step with the current gradients of the parameters."""
        for param, own in self.state.items():
            self._inner.state[param]["step"] = int(own["step"])
        self._inner.step()
        for own in self.state.values():
            own["step"] += 1


def _is_ours(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not name.startswith("qmap")


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters with weight decay: matrices, except embeddings and heads tied to an
    embedding."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return frozenset(n for n, p in model.named_parameters() if p.ndim >= 2 and id(p) not in embeddings)


class Optimizer:
    """AdamW (arXiv 1711.05101) that steps every parameter: the moments decay also for parameters without gradient.

    Parameters narrower than float32 get float32 masters: gradients of microbatches are summed into the masters, the
    step changes the masters, and each parameter is the rounded copy of its master. Otherwise rounding would
    lose small steps.

    Args:
        model: a module, or its parameters (or this rank's shards of them) by name.
        decayed: names of the parameters with weight decay; default for a module: ``decayed_names(model)``.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        decayed: frozenset[str] | None = None,
    ) -> None:
        named = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
        self._params = {n: p for n, p in named.items() if p.requires_grad}
        self._max_grad_norm = config.max_grad_norm
        narrow = {n: p for n, p in self._params.items() if p.dtype != torch.float32}
        self._masters = {n: nn.Parameter(p.detach().float()) for n, p in narrow.items()}
        self._trained: dict[str, Tensor] = {**self._params, **self._masters}
        if decayed is None:
            assert isinstance(model, nn.Module), "shards do not show which parameters are matrices: name them"
            decayed = decayed_names(model)
        groups = [
            {"params": [p for n, p in self._trained.items() if n in decayed], "weight_decay": config.weight_decay},
            {"params": [p for n, p in self._trained.items() if n not in decayed], "weight_decay": 0.0},
        ]
        self._adam = _open([group for group in groups if group["params"]], config)

    def collect(self) -> None:
        """Move the gradients of parameters that are narrower than float32 into their float32 masters. Call this method
        after each backward pass."""
        for name, master in self._masters.items():
            grad = self._params[name].grad
            if grad is not None:
                master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
                self._params[name].grad = None

    def grad_norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the global L2 norm of the gradients. Subclasses for sharded gradients override this method."""
        return torch.nn.utils.get_total_norm(list(grads.values()))

    def step(self, learning_rate: float) -> float:
        """Clip the gradients, make a step and zero the gradients.

        Returns:
            Global gradient norm before clipping. If it is not finite, parameters and moments are unchanged.
        """
        trained = list(self._trained.values())
        self.complete(trained)
        total = self.grad_norm({name: param.grad for name, param in self._trained.items() if param.grad is not None})
        norm = float(total)
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(trained, self._max_grad_norm, total)
            for group in self._adam.param_groups:
                group["lr"] = learning_rate
            self._adam.step()
            with torch.no_grad():
                for name, master in self._masters.items():
                    self._params[name].copy_(master)
        self.clear(trained)
        return norm

    def complete(self, trained: list[Tensor]) -> None:
        """Set to zero the gradients of parameters that no backward pass reached."""
        for param in trained:
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def clear(self, trained: list[Tensor]) -> None:
        """Drop the gradients, so that the next backward pass assigns its own instead of adding to zeros."""
        for param in trained:
            param.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return copies of all moments (and masters) on the CPU, by ``<kind>.<parameter name>``."""
        return {key: value.detach().to("cpu", copy=True) for key, value in self.tensors().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned.

        Raises:
            CheckpointError: a tensor is missing, unexpected or of another shape or type.
        """
        copy_into(self.tensors(), state, what="optimizer state")

    def tensors(self) -> dict[str, Tensor]:
        """Return all state tensors by name: the optimizer's own tensors, not copies, so that callers can copy into
        them."""
        moments = {f"{kind}.{n}": v for n, p in self._trained.items() for kind, v in self._adam.state[p].items()}
        return moments | {f"master.{name}": master for name, master in self._masters.items()}


def _open(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW | AdamW8bit:
    """Build the job's optimizer and allocate its state at once, so that saving and loading need no first step."""
    if config.type == "adamw_8bit":
        return AdamW8bit(groups, config)
    adam = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    for param in (param for group in groups for param in group["params"]):
        adam.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    return adam


def copy_into(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, what: str) -> None:
    """Copy each tensor of ``saved`` into the tensor of ``own`` with the same name; ``what`` names the state in errors.

    Raises:
        CheckpointError: names, shapes or types differ; nothing was copied.
    """
    check_fits(own, saved, what=what)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def check_fits(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, what: str) -> None:
    """Raise CheckpointError unless ``own`` and ``saved`` agree in names, shapes and types; ``what`` names the state."""
    if own.keys() != saved.keys():
        odd = sorted(own.keys() ^ saved.keys())
        raise CheckpointError(f"{what} does not fit the model: {len(odd)} names differ, the first is '{odd[0]}'")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(
                f"{what} does not fit the model: '{name}' is {tuple(saved[name].shape)} {saved[name].dtype}, "
                f"expected {tuple(tensor.shape)} {tensor.dtype}"
            )
