"""AdamW with moments in blocks of 8 bits (arXiv 2110.02861), from the optional library bitsandbytes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.shared.config.optimizer import OptimizerConfig
from penstock.shared.errors import ConfigError

__all__ = ["AdamW8bit"]


class AdamW8bit:
    """As much of ``torch.optim.Optimizer`` as is needed; small parameters keep 32-bit moments.

    ``state`` holds live tensors to be copied into; the library's tables and step counts, which are no tensors of ours,
    stay inside.

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
                    "step": torch.zeros(()),
                    **{name: value for name, value in self._inner.state[param].items() if _is_ours(name, value)},
                }

    def step(self) -> None:
        """One step with the gradients that the parameters have."""
        for param, own in self.state.items():
            self._inner.state[param]["step"] = int(own["step"])
        self._inner.step()
        for own in self.state.values():
            own["step"] += 1


def _is_ours(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not name.startswith("qmap")
