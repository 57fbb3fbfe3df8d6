"""Backend `local`: one process, one device, any Hugging Face causal language model.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import BackendState, LossFunction, Role, Scores, Seconds, TensorLayout
from penstock.services.trainer.backends.parameters import Parameters
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.optimizer import Optimizer, check_fits, copy_into
from penstock.services.trainer.packing import Microbatch
from penstock.services.trainer.routers import Routers
from penstock.shared.config.job import JobConfig, OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.critic import critic_of, selected_values
from penstock.shared.models.decoder import hidden_states, selected_logprobs
from penstock.shared.models.divergence import exact_scores
from penstock.shared.models.experts import RouterLoad, Routes
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.models.lora import adapter_files, add_adapter, base_parameters

__all__ = ["LocalBackend", "describing_files", "open_local"]


class LocalBackend:
    """Trains ``model`` in this process.

    The model stays in eval mode: dropout would make the trainer's log-probs differ from the sampler's.

    Args:
        model: the policy, or a critic made by ``critic_of``; moved to ``device``.
        tokenizer: goes into checkpoints beside the weights.
        config: of the optimizer.
        keep_reference: hold a frozen policy for a KL term (policy only).
        lora: of the adapter that ``model`` has.
        base_path: model directory of the weights under the adapter; None: checkpoints hold them.
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
        self._role = role
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self._files = describing_files(model, tokenizer)
        if lora is not None:
            self._files |= adapter_files(model, lora, base=base_path)
            if base_path is not None:  # a directory without weights: the adapter's own file says where they are
                del self._files["config.json"]
        self._parameters = Parameters(model, lora, keep_base=base_path is None)
        self._optimizer = Optimizer(model, config)
        self._reference = self._parameters.reference() if keep_reference else None
        plan = plan_of(model) if role == "policy" else None
        self.routers = Routers(plan, coef=aux_loss_coef) if plan is not None and plan.sparse else None
        self._seconds = Seconds()

    @property
    def model(self) -> PreTrainedModel:
        """The live module."""
        return self._model

    def accumulate(
        self,
        microbatch: Microbatch | None,
        loss: LossFunction,
        *,
        temperature: float,
        entropy: bool = False,
        kl: bool = False,
    ) -> None:
        """See ``Backend``."""
        if microbatch is None:
            return
        start = time.perf_counter()
        batch = microbatch.to(self._device)
        load = RouterLoad() if self.routers is not None else None
        value = loss(self._scores(batch, Routes(batch.experts_TNK, load), temperature, entropy=entropy, kl=kl))
        if self.routers is not None and load is not None:
            self.routers.watch(load)
            value = value + self.routers.penalty(load)
        middle = self._now()
        value.backward()  # type: ignore[no-untyped-call]
        self._optimizer.collect()
        end = self._now()
        self._seconds.forward += middle - start
        self._seconds.backward += end - middle

    @torch.no_grad()
    def route(self, microbatch: Microbatch | None) -> None:
        """See ``Backend``. A table that will be replayed needs no forward pass."""
        if microbatch is None or self.routers is None:
            return
        start = time.perf_counter()
        if microbatch.experts_TNK is not None:
            self.routers.count_table(microbatch.experts_TNK)
        else:
            load = RouterLoad()
            hidden_states(self._model, microbatch.tokens.to(self._device), Routes(load=load))
            self.routers.count(load.chosen)
        self._seconds.forward += self._now() - start

    def score(self, microbatch: Microbatch | None, *, temperature: float) -> Tensor:
        """See ``Backend``."""
        routes = Routes(microbatch.experts_TNK) if microbatch is not None else None
        return self._score_by(self._model, microbatch, temperature, routes)

    def step(self, learning_rate: float) -> float:
        """See ``Backend``."""
        start = time.perf_counter()
        norm = self._optimizer.step(learning_rate)
        self._seconds.optimizer += self._now() - start
        return norm

    def reference_logprobs(self, microbatch: Microbatch | None, *, temperature: float) -> Tensor:
        """See ``Backend``."""
        assert self._reference is not None, "built without keep_reference"
        return self._score_by(self._reference, microbatch, temperature)

    def freeze_reference(self) -> None:
        """See ``Backend``. Does nothing without a reference."""
        if self._reference is not None:
            own, now = self._parameters.of_twin(self._reference), self._parameters.trained()
            copy_into(dict(own), dict(now), what="reference policy")

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """See ``Backend``."""
        self._parameters.train_base(whole)
        self._optimizer = Optimizer(self._model, config)

    def layout(self) -> TensorLayout:
        """See ``Backend``."""
        return self._parameters.layout()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return self._parameters.weights()

    def published_layout(self) -> TensorLayout:
        """See ``Backend``."""
        return self._parameters.published_layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return self._parameters.published()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return self._parameters.frozen()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Backend``."""
        own = base_parameters(self._model)
        self._parameters.base_loaded()
        for name, tensor in weights:
            if name not in own:
                raise CheckpointError(f"'{name}' is not a parameter of this {self._role}")
            copy_into({name: own[name]}, {name: tensor}, what=self._role)

    def take_seconds(self) -> Seconds:
        """See ``Backend``."""
        taken, self._seconds = self._seconds, Seconds()
        return taken

    def environment(self) -> dict[str, str]:
        """See ``Backend``."""
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        return describe_environment(dtype=dtype, device=str(self._device)) | self._parameters.pins()

    def state(self) -> BackendState:
        """See ``Backend``."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return BackendState(
            weights=_copies(self._parameters.kept()),
            optimizer=self._optimizer.state(),
            reference={} if self._reference is None else _copies(self._parameters.of_twin(self._reference)),
            rng=rng,
            adapter=_copies(self._parameters.adapter()),
            files=self._files,
            environment=self.environment(),
        )

    def load_state(self, state: BackendState) -> None:
        """See ``Backend``."""
        reference = {} if self._reference is None else self._parameters.of_twin(self._reference)
        self._parameters.check_base(state.environment)
        parts: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = [
            ("reference policy", {**reference}, state.reference),
            ("checkpoint", {**self._parameters.kept()}, state.weights),
            ("adapter", {**self._parameters.adapter()}, state.adapter),
            ("optimizer state", self._optimizer.tensors(), state.optimizer),
        ]
        for what, own, saved in parts:  # all before the first copy: a wrong state changes nothing
            check_fits(own, saved, what=what)
        for what, own, saved in parts:
            copy_into(own, saved, what=what)
        self._parameters.base_loaded()
        torch.set_rng_state(state.rng["cpu"])
        if self._device.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(state.rng["cuda"], self._device)

    def _scores(self, batch: Microbatch, routes: Routes, temperature: float, *, entropy: bool, kl: bool) -> Scores:
        if self._role == "critic":
            return Scores(selected_values(self._model, batch.tokens, batch.select_M))
        at = (batch.tokens, batch.select_M, batch.targets_M)
        if kl:
            assert self._reference is not None, "built without keep_reference"
            return Scores(*exact_scores(self._model, self._reference, *at, temperature=temperature, routes=routes))
        return Scores(*selected_logprobs(self._model, *at, temperature=temperature, entropy=entropy, routes=routes))

    @torch.no_grad()
    def _score_by(
        self, model: PreTrainedModel, microbatch: Microbatch | None, temperature: float, routes: Routes | None = None
    ) -> Tensor:
        if microbatch is None:
            return torch.empty(0, device=self._device)
        start = time.perf_counter()
        batch = microbatch.to(self._device)
        if self._role == "critic":
            values_M = selected_values(model, batch.tokens, batch.select_M)
        else:
            values_M, _ = selected_logprobs(
                model, batch.tokens, batch.select_M, batch.targets_M, temperature=temperature, entropy=False,
                routes=routes,
            )  # fmt: skip
        self._seconds.forward += self._now() - start
        return values_M

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def open_local(config: JobConfig, role: Role, device: str) -> LocalBackend:
    """The model of ``role`` with its initial weights.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, or the vocabulary does not fit.
    """
    tokenizer = build_tokenizer(config.model)
    model = build_model(config.model, len(tokenizer), seed=config.seed)
    if role == "critic":
        assert config.algorithm.critic is not None
        optimizer = config.algorithm.critic.optimizer
        return LocalBackend(critic_of(model), tokenizer, optimizer, keep_reference=False, device=device, role=role)
    lora, moe = config.model.lora, config.model.moe
    if lora is not None:
        add_adapter(model, lora, seed=config.seed)
    plan = plan_of(model)
    if moe is not None and not (plan is not None and plan.sparse):
        raise ConfigError(f"model.moe: {type(model).__name__} has no routers that this decoder knows")
    return LocalBackend(
        model,
        tokenizer,
        config.optimizer,
        keep_reference=config.algorithm.needs_reference,
        device=device,
        lora=lora,
        base_path=None if config.warm_start.steps else config.model.path,
        aux_loss_coef=moe.aux_loss_coef if moe is not None else 0.0,
    )


def describing_files(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, bytes]:
    """Files that make a directory of weights loadable with ``from_pretrained``, by name."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        if hasattr(model, "generation_config"):  # a critic generates nothing
            model.generation_config.save_pretrained(name)
        tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir()) if path.is_file()}


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
