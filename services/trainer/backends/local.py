"""Backend `local`: one process, one device, any Hugging Face causal language model."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import BackendState, LossFunction, Seconds
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.optimizer import Optimizer, check_fits, copy_into
from penstock.services.trainer.packing import Microbatch
from penstock.shared.config.job import OptimizerConfig
from penstock.shared.models.decoder import selected_logprobs

__all__ = ["LocalBackend"]


class LocalBackend:
    """Trains ``model`` in this process.

    The model stays in eval mode: dropout would make the trainer's log-probs differ from the sampler's.

    Args:
        model: the policy; moved to ``device``.
        tokenizer: goes into checkpoints beside the weights.
        config: of the optimizer.
        keep_reference: hold a frozen copy of the weights for a KL term.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        config: OptimizerConfig,
        *,
        keep_reference: bool,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self._files = describing_files(model, tokenizer)
        self._optimizer = Optimizer(model, config)
        self._reference = _frozen(model) if keep_reference else None
        self._seconds = Seconds()

    def accumulate(self, microbatch: Microbatch, loss: LossFunction, *, temperature: float, entropy: bool) -> None:
        """See ``Backend``."""
        start = time.perf_counter()
        batch = microbatch.to(self._device)
        logprobs_M, entropy_M = selected_logprobs(
            self._model, batch.tokens, batch.select_M, batch.targets_M, temperature=temperature, entropy=entropy
        )
        value = loss(logprobs_M, entropy_M)
        middle = self._now()
        value.backward()  # type: ignore[no-untyped-call]
        self._optimizer.collect()
        end = self._now()
        self._seconds.forward += middle - start
        self._seconds.backward += end - middle

    def step(self, learning_rate: float) -> float:
        """See ``Backend``."""
        start = time.perf_counter()
        norm = self._optimizer.step(learning_rate)
        self._seconds.optimizer += self._now() - start
        return norm

    @torch.no_grad()
    def reference_logprobs(self, microbatch: Microbatch, *, temperature: float) -> Tensor:
        """See ``Backend``."""
        assert self._reference is not None, "built without keep_reference"
        start = time.perf_counter()
        batch = microbatch.to(self._device)
        logprobs_M, _ = selected_logprobs(
            self._reference, batch.tokens, batch.select_M, batch.targets_M, temperature=temperature, entropy=False
        )
        self._seconds.forward += self._now() - start
        return logprobs_M

    def freeze_reference(self) -> None:
        """See ``Backend``. Does nothing without a reference."""
        if self._reference is not None:
            copy_into(dict(self._reference.named_parameters()), dict(self._model.named_parameters()), what="reference")

    def new_optimizer(self, config: OptimizerConfig) -> None:
        """See ``Backend``."""
        self._optimizer = Optimizer(self._model, config)

    def weights(self) -> list[tuple[str, Tensor]]:
        """See ``Backend``."""
        return [(name, param.detach()) for name, param in self._model.named_parameters()]

    def take_seconds(self) -> Seconds:
        """See ``Backend``."""
        taken, self._seconds = self._seconds, Seconds()
        return taken

    def environment(self) -> dict[str, str]:
        """See ``Backend``."""
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        return describe_environment(dtype=dtype, device=str(self._device))

    def state(self) -> BackendState:
        """See ``Backend``."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return BackendState(
            weights=_copies(self._model),
            optimizer=self._optimizer.state(),
            reference={} if self._reference is None else _copies(self._reference),
            rng=rng,
            files=self._files,
            environment=self.environment(),
        )

    def load_state(self, state: BackendState) -> None:
        """See ``Backend``."""
        reference = {} if self._reference is None else dict(self._reference.named_parameters())
        parts: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = [
            ("reference policy", {**reference}, state.reference),
            ("checkpoint", {**dict(self._model.named_parameters())}, state.weights),
            ("optimizer state", self._optimizer.tensors(), state.optimizer),
        ]
        for what, own, saved in parts:  # all before the first copy: a wrong state changes nothing
            check_fits(own, saved, what=what)
        for what, own, saved in parts:
            copy_into(own, saved, what=what)
        torch.set_rng_state(state.rng["cpu"])
        if self._device.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(state.rng["cuda"], self._device)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def describing_files(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, bytes]:
    """Files that make a directory of weights loadable with ``from_pretrained``, by name."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        model.generation_config.save_pretrained(name)
        tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir()) if path.is_file()}


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().to("cpu", copy=True) for name, param in model.named_parameters()}


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()
