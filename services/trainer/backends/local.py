"""Backend `local`: one process, one device, any Hugging Face causal language model.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import BackendState, LossFunction, Role, Scores, Seconds, TensorLayout
from penstock.services.trainer.backends.initial import initial_model
from penstock.services.trainer.backends.parameters import Parameters, WholeModel, reference_of
from penstock.services.trainer.backends.scoring import score_tensors
from penstock.services.trainer.backends.stopwatch import Stopwatch
from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.batch.routers import Routers
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.optimizer import Optimizer, check_fits, copy_into
from penstock.services.trainer.random_state import random_state, set_random_state
from penstock.shared.config.jobs.job import JobConfig, OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.decoder import hidden_states
from penstock.shared.models.experts import RouterLoad, Routes
from penstock.shared.models.lora import adapter_files, base_parameters

__all__ = ["LocalBackend", "describing_files", "open_local"]


class LocalBackend:
    """Trains ``model`` in this process.

    The model stays in eval mode: dropout would make the trainer's log-probs differ from the sampler's.

    Args:
        model: the policy, or a critic made by ``critic_of``; moved to ``device``.
        tokenizer: stored in checkpoints beside the weights.
        config: optimizer settings.
        keep_reference: hold a frozen policy for a KL term (policy only).
        lora: config of the adapter in ``model``; None without one.
        base_path: with an adapter, the model directory of the base weights; None: checkpoints hold the base weights.
        aux_loss_coef: weight of the load-balancing loss of a mixture of experts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        config: OptimizerConfig,
        *,
        keep_reference: bool,
        device: str = "cpu",
        role: Role = "policy",
        lora: LoraConfig | None = None,
        base_path: str | None = None,
        aux_loss_coef: float = 0.0,
    ) -> None:
        self._role: Role = role
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self._files = describing_files(model, tokenizer, lora, base_path)
        self._parameters = Parameters(model, lora, keep_base=base_path is None, reader=WholeModel(model))
        self._optimizer = Optimizer(model, config)
        self._reference = reference_of(model) if keep_reference else None
        plan = plan_of(model) if role == "policy" else None
        self.routers = Routers(plan, coef=aux_loss_coef) if plan is not None and plan.sparse else None
        self._stopwatch = Stopwatch(self._device)

    @property
    def model(self) -> PreTrainedModel:
        """The module that this backend trains, not a copy."""
        return self._model

    def accumulate(
        self,
        microbatch: Microbatch | None,
        loss: LossFunction,
        *,
        entropy: bool = False,
        kl: bool = False,
    ) -> None:
        """Run forward, ``loss`` and backward of a microbatch; see ``Backend``."""
        if microbatch is None:
            return
        batch = microbatch.to(self._device)
        load = RouterLoad() if self.routers is not None else None
        with self._stopwatch.measure("forward"):
            value = loss(self._scores(batch, Routes(batch.experts_TNK, load), entropy=entropy, kl=kl))
            if self.routers is not None and load is not None:
                self.routers.watch(load)
                value = value + self.routers.penalty(load)
        with self._stopwatch.measure("backward"):
            value.backward()  # type: ignore[no-untyped-call]
            self._optimizer.collect()

    @torch.no_grad()
    def route(self, microbatch: Microbatch | None) -> None:
        """Count the experts that tokens visit; see ``Backend``. Replayed routes need no forward pass."""
        if microbatch is None or self.routers is None:
            return
        if microbatch.experts_TNK is not None:
            self.routers.count_table(microbatch.experts_TNK)
            return
        load = RouterLoad()
        with self._stopwatch.measure("forward"):
            hidden_states(self._model, microbatch.tokens.to(self._device), Routes(load=load))
        self.routers.count(load.chosen)

    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs or values of the scored tokens, without gradient; see ``Backend``."""
        return self._score_by(self._model, microbatch, replay=True)

    def step(self, learning_rate: float) -> float:
        """Clip the gradients and make an optimizer step; see ``Backend``."""
        with self._stopwatch.measure("optimizer"):
            return self._optimizer.step(learning_rate)

    def reference_logprobs(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs under the reference policy; see ``Backend``."""
        assert self._reference is not None, "built without keep_reference"
        return self._score_by(self._reference, microbatch)

    def freeze_reference(self) -> None:
        """Copy the current weights into the reference policy, if there is one; see ``Backend``."""
        if self._reference is not None:
            own, now = self._parameters.of_twin(self._reference), self._parameters.trained()
            copy_into(dict(own), dict(now), what="reference policy")

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """Start a new optimizer at the current weights; see ``Backend``."""
        self._parameters.train_base(whole)
        self._optimizer = Optimizer(self._model, config)

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights; see ``Backend``."""
        return self._parameters.layout()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by Hugging Face name; see ``Backend``."""
        return self._parameters.weights()

    def published_layout(self) -> TensorLayout:
        """Return the layout of the published tensors; see ``Backend``."""
        return self._parameters.published_layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to publish: the adapter or the whole weights; see ``Backend``."""
        return self._parameters.published()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights of a published adapter; see ``Backend``."""
        return self._parameters.frozen()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole parameters into the model; see ``Backend``."""
        own = base_parameters(self._model)
        self._parameters.base_loaded()
        for name, tensor in weights:
            if name not in own:
                raise CheckpointError(f"'{name}' is not a parameter of this {self._role}")
            copy_into({name: own[name]}, {name: tensor}, what=self._role)

    def take_seconds(self) -> Seconds:
        """Return the seconds by stage since the last call; see ``Backend``."""
        return self._stopwatch.take()

    def environment(self) -> dict[str, str]:
        """Return the properties that bit-identical results depend on; see ``Backend``."""
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        return describe_environment(dtype=dtype, device=str(self._device)) | self._parameters.pins()

    def state(self) -> BackendState:
        """Return a copy of the whole training state of the model; see ``Backend``."""
        return BackendState(
            weights=_copies(self._parameters.kept()),
            optimizer=self._optimizer.state(),
            reference={} if self._reference is None else _copies(self._parameters.of_twin(self._reference)),
            rng=random_state(self._device),
            adapter=_copies(self._parameters.adapter()),
            files=self._files,
            environment=self.environment(),
        )

    def load_state(self, state: BackendState) -> None:
        """Restore what ``state`` returned; see ``Backend``."""
        reference = {} if self._reference is None else self._parameters.of_twin(self._reference)
        self._parameters.check_base(state.environment)
        parts: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = [
            ("reference policy", {**reference}, state.reference),
            ("checkpoint", {**self._parameters.kept()}, state.weights),
            ("adapter", {**self._parameters.adapter()}, state.adapter),
            ("optimizer state", self._optimizer.tensors(), state.optimizer),
        ]
        for what, own, saved in parts:  # check everything before the first copy: a wrong state changes nothing
            check_fits(own, saved, what=what)
        for what, own, saved in parts:
            copy_into(own, saved, what=what)
        self._parameters.base_loaded()
        set_random_state(state.rng, self._device)

    def _scores(self, batch: Microbatch, routes: Routes, *, entropy: bool, kl: bool) -> Scores:
        reference = None
        if kl:
            assert self._reference is not None, "built without keep_reference"
            reference = self._reference
        tensors = score_tensors(
            self._model, batch, role=self._role, entropy=entropy, reference=reference, routes=routes
        )
        return Scores(*tensors)

    @torch.no_grad()
    def _score_by(self, model: PreTrainedModel, microbatch: Microbatch | None, *, replay: bool = False) -> Tensor:
        if microbatch is None:
            return torch.empty(0, device=self._device, dtype=torch.float32)
        batch = microbatch.to(self._device)
        routes = Routes(batch.experts_TNK) if replay else None
        with self._stopwatch.measure("forward"):
            return score_tensors(model, batch, role=self._role, routes=routes)[0]


def open_local(config: JobConfig, role: Role, device: str) -> LocalBackend:
    """Open the backend for the model of ``role`` with its initial weights.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, or the vocabulary does not fit.
    """
    initial = initial_model(config, role)
    return LocalBackend(
        initial.model,
        initial.tokenizer,
        initial.optimizer,
        keep_reference=initial.keep_reference,
        device=device,
        role=role,
        lora=initial.lora,
        base_path=initial.base_path,
        aux_loss_coef=initial.aux_loss_coef,
    )


def describing_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    lora: LoraConfig | None = None,
    base_path: str | None = None,
) -> dict[str, bytes]:
    """Return the files, by name, that make a directory of weights or of an adapter loadable with ``from_pretrained``.

    ``base_path``: model directory of the base weights, if they are not in the same directory.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        if hasattr(model, "generation_config"):  # a critic generates nothing
            model.generation_config.save_pretrained(name)
        tokenizer.save_pretrained(name)
        files = {path.name: path.read_bytes() for path in sorted(Path(name).iterdir()) if path.is_file()}
    if lora is None:
        return files
    if base_path is not None:  # a directory without base weights: the adapter's config names their location
        del files["config.json"]
    return files | adapter_files(model, lora, base=base_path)


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
