"""Backend `fsdp`: shards one model over all ranks; each rank trains its own microbatches.

Shape legend: M = scored tokens of a microbatch, T = packed tokens, S1 = sequences + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import (
    BackendState,
    LossFunction,
    Role,
    Scores,
    Seconds,
    TensorLayout,
)
from penstock.services.trainer.backends.fsdp.sharded_model import ShardedModel, Sharding
from penstock.services.trainer.backends.initial import initial_model
from penstock.services.trainer.backends.local import describing_files
from penstock.services.trainer.backends.parameters import Parameters, reference_of
from penstock.services.trainer.backends.scoring import ScoreTensors, score_tensors
from penstock.services.trainer.backends.stopwatch import Stopwatch
from penstock.services.trainer.batch.packing import Microbatch, stand_in
from penstock.services.trainer.batch.routers import Routers
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.optimizer import Optimizer, check_fits, decayed_names
from penstock.services.trainer.random_state import random_state, set_random_state
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.ranks.row_shards import as_sharded, is_sharded, local_part, rows_of_mesh
from penstock.shared.config.backend import FSDPConfig
from penstock.shared.config.jobs.job import JobConfig, OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.decoder import hidden_states
from penstock.shared.models.experts import RouterLoad, Routes
from penstock.shared.models.lora import base_parameters, is_adapter

__all__ = ["FSDPBackend", "open_fsdp"]

_WHAT = {"reference": "reference policy", "weights": "checkpoint", "adapter": "adapter", "optimizer": "optimizer state"}
"""Names of the parts of a state for error messages, in load order.

The optimizer state comes last, because its float32 masters are more exact than the weights.
"""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Frozen policy, and the ``ShardedModel`` that gathers its parameters.

    With an adapter, the frozen and the trained policy share the base weights, and ``sharded`` gathers both policies.
    """

    model: PreTrainedModel
    sharded: ShardedModel


class FSDPBackend:
    """Trains ``model``, sharded over all ranks; every rank has an instance of this class.

    Shards of all trainable parameters are float32 whatever the type of the model, because they are the optimizer's
    masters; a narrower model is gathered in its own type. The model stays in eval mode, as in ``LocalBackend``.

    Args:
        model: the policy, or a critic made by ``critic_of``; whole, on the CPU, the same on every rank.
        tokenizer: stored in checkpoints beside the weights.
        optimizer: optimizer settings.
        keep_reference: hold a frozen policy for a KL term (policy only).
        collective: all ranks of the process group.
        lora: config of the adapter in ``model``; None without one.
        base_path: with an adapter, the model directory of the base weights, which are then never trained; None:
            checkpoints hold the base weights.
        aux_loss_coef: weight of the load-balancing loss of a mixture of experts.

    Raises:
        ConfigError: the architecture cannot be sharded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        config: FSDPConfig,
        optimizer: OptimizerConfig,
        collective: Collective,
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
        self._dtype = model.dtype
        self._collective = collective
        self._files = describing_files(model, tokenizer, lora, base_path)
        self._decayed = decayed_names(model)
        plan = plan_of(model) if role == "policy" else None
        self.routers = Routers(plan, coef=aux_loss_coef) if plan is not None and plan.sparse else None
        mesh = init_device_mesh(self._device.type, (collective.size,))
        self._host_mesh = mesh if self._device.type == "cpu" else init_device_mesh("cpu", (collective.size,))
        reference = reference_of(model) if keep_reference else None
        _widen(model, all_of_it=lora is None or base_path is None)
        shared = reference if lora is not None else None
        sharding = self._sharding(config, mesh, offload=config.cpu_offload)
        self._model = ShardedModel(model.eval(), sharding, twin=shared)
        self._parameters = Parameters(
            model, lora, keep_base=base_path is None, reader=self._model, dtype=self._dtype
        )  # fmt: skip
        self._reference: _Reference | None = None
        if reference is not None:
            sharding = self._sharding(config, mesh, offload=config.cpu_offload or config.offload_reference)
            own = self._model if shared is not None else ShardedModel(reference, sharding)
            self._reference = _Reference(reference, own)
        self._stopwatch = Stopwatch(self._device)
        self.new_optimizer(optimizer)

    def accumulate(
        self,
        microbatch: Microbatch | None,
        loss: LossFunction,
        *,
        entropy: bool = False,
        kl: bool = False,
    ) -> None:
        """Run forward, ``loss`` and backward of a microbatch; see ``Backend``."""
        batch = (microbatch or stand_in()).to(self._device)
        load = RouterLoad() if self.routers is not None and microbatch is not None else None
        with self._stopwatch.measure("forward"):
            scores = self._scores(batch, Routes(batch.experts_TNK, load), entropy=entropy, kl=kl)
            try:
                value = scores.values_M.sum() * 0 if microbatch is None else loss(scores)
            except BaseException:
                self._release()  # no backward pass follows
                raise
            if self.routers is not None and load is not None:
                self.routers.watch(load)
                value = value + self.routers.penalty(load)
        with self._stopwatch.measure("backward"):
            value.backward()  # type: ignore[no-untyped-call]
            self._release()

    @torch.no_grad()
    def route(self, microbatch: Microbatch | None) -> None:
        """Count the experts that tokens visit; see ``Backend``. Needs no forward pass if all ranks replay routes."""
        if self.routers is None:
            return
        replayed = microbatch is not None and microbatch.experts_TNK is not None
        chooses = microbatch is not None and not replayed
        if microbatch is not None and microbatch.experts_TNK is not None:
            self.routers.count_table(microbatch.experts_TNK)
        if not self._collective.max({"chooses": float(chooses)})["chooses"]:
            return
        load, tokens = RouterLoad(), (microbatch or stand_in()).tokens.to(self._device)
        with self._stopwatch.measure("forward"):
            self._model.run(lambda: hidden_states(self._model.model, tokens, Routes(load=load)))
        if chooses:
            self.routers.count(load.chosen)

    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs or values of the scored tokens, without gradient; see ``Backend``."""
        return self._score_by(self._model, self._model.model, microbatch, replay=True)

    def reference_logprobs(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs under the reference policy; see ``Backend``."""
        assert self._reference is not None, "built without keep_reference"
        return self._score_by(self._reference.sharded, self._reference.model, microbatch)

    def step(self, learning_rate: float) -> float:
        """Clip the gradients and make an optimizer step; see ``Backend``."""
        with self._stopwatch.measure("optimizer"):
            return self._optimizer.step(learning_rate)

    def freeze_reference(self) -> None:
        """Copy the current weights into the reference policy, if there is one; see ``Backend``."""
        if self._reference is not None:
            now = self._parameters.trained()
            for name, param in self._parameters.of_twin(self._reference.model).items():
                local_part(param.detach()).copy_(local_part(now[name].detach()))

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """Start a new optimizer at the current weights; see ``Backend``."""
        self._parameters.train_base(whole)
        self._optimizer = _ShardOptimizer(self._model.params, config, self._collective, decayed=self._decayed)
        if not whole:
            self._parameters.pins()  # now, because all ranks are here

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights; see ``Backend``."""
        return self._parameters.layout()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights; see ``Backend``. A tensor is valid until the iterator advances."""
        return self._parameters.weights()

    def published_layout(self) -> TensorLayout:
        """Return the layout of the published tensors; see ``Backend``."""
        return self._parameters.published_layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to publish; see ``Backend``. A tensor is valid until the iterator advances."""
        return self._parameters.published()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a published adapter's base weights; see ``Backend``. A tensor is valid until the iterator advances."""
        return self._parameters.frozen()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole parameters into the model; see ``Backend``."""
        own = _rows_of(base_parameters(self._model.model), self._dtype)
        for name, tensor in weights:
            if name not in own or tensor.shape != own[name].shape:
                raise CheckpointError(f"'{name}' {tuple(tensor.shape)} is not a parameter of this {self._role}")
            own[name].load(tensor, self._host_mesh)
        self._parameters.base_loaded()
        self._parameters.pins()

    def take_seconds(self) -> Seconds:
        """Return the seconds by stage since the last call; see ``Backend``."""
        return self._stopwatch.take()

    def environment(self) -> dict[str, str]:
        """Return the properties that bit-identical results depend on; see ``Backend``."""
        dtype = str(self._dtype).removeprefix("torch.")
        pins = describe_environment(dtype=dtype, device=str(self._device))
        return pins | {"backend": "fsdp", "ranks": str(self._collective.size)} | self._parameters.pins()

    def state(self) -> BackendState:
        """Return a copy of the model's state; see ``Backend``. Tensors are DTensors of this rank's rows, or scalars."""
        copies = {
            part: {name: rows.copy(self._host_mesh) for name, rows in own.items()}
            for part, own in self._stored().items()
        }
        return BackendState(
            weights=copies["weights"],
            adapter=copies["adapter"],
            optimizer=copies["optimizer"],
            reference=copies["reference"],
            rng=random_state(self._device),
            files=self._files,
            environment=self.environment(),
        )

    def load_state(self, state: BackendState) -> None:
        """Restore what ``state`` returned, or a state of whole tensors; see ``Backend``."""
        self._parameters.check_base(state.environment)
        stored = self._stored()
        for part, own in stored.items():  # check everything before the first copy: a wrong state changes nothing
            check_fits({name: rows.whole() for name, rows in own.items()}, getattr(state, part), what=_WHAT[part])
        for part, own in stored.items():
            for name, rows in own.items():
                rows.load(getattr(state, part)[name], self._host_mesh)
        if state.weights:
            self._parameters.base_loaded()
        self._parameters.pins()
        set_random_state(state.rng, self._device)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _scores(self, batch: Microbatch, routes: Routes, *, entropy: bool, kl: bool) -> Scores:
        reference = self._reference if kl else None
        assert reference is not None or not kl, "built without keep_reference"

        def compute() -> ScoreTensors:
            return _copies(
                score_tensors(
                    self._model.model, batch, role=self._role, entropy=entropy,
                    reference=None if reference is None else reference.model, routes=routes,
                )
            )  # fmt: skip

        if reference is None or reference.sharded is self._model:
            return Scores(*self._model.run(compute))
        return Scores(*reference.sharded.run(lambda: self._model.run(compute)))

    @torch.no_grad()
    def _score_by(
        self,
        sharded: ShardedModel,
        model: PreTrainedModel,
        microbatch: Microbatch | None,
        *,
        replay: bool = False,
    ) -> Tensor:
        batch = (microbatch or stand_in()).to(self._device)
        routes = Routes(batch.experts_TNK) if replay else None

        def compute() -> Tensor:
            return score_tensors(model, batch, role=self._role, routes=routes)[0]

        with self._stopwatch.measure("forward"):
            values_M = sharded.run(compute)
        return values_M if microbatch is not None else values_M[:0]

    def _release(self) -> None:
        self._model.release()
        if self._reference is not None:
            self._reference.sharded.release()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _sharding(self, config: FSDPConfig, mesh: DeviceMesh, *, offload: bool) -> Sharding:
        return Sharding(
            mesh=mesh,
            compute_dtype=self._dtype,
            reduce_dtype=getattr(torch, config.reduce_dtype),
            reshard_after_forward=config.reshard_after_forward,
            checkpointing=config.activation_checkpointing,
            offload=offload,
        )

    def _stored(self) -> dict[str, dict[str, _Rows]]:
        """Return this rank's rows of each tensor that a checkpoint stores. The keys are the part of the checkpoint and
        the name of the tensor. The rows are not copied: they are in the memory of the model or optimizer."""
        twin = {} if self._reference is None else self._parameters.of_twin(self._reference.model)
        return {
            "reference": _rows_of(twin, self._dtype),
            "weights": _rows_of(self._parameters.kept(), self._dtype),
            "adapter": _rows_of(self._parameters.adapter(), self._dtype),
            "optimizer": self._moments(),
        }

    def _moments(self) -> dict[str, _Rows]:
        """Return this rank's rows of the optimizer's state, by the names that a backend with whole tensors uses."""
        params, moments = self._model.params, {}
        for key, value in self._optimizer.tensors().items():
            shape = params[key.partition(".")[2]].shape if value.ndim else value.shape
            moments[key] = _Rows(value, shape, value.dtype)
        if self._dtype != torch.float32:
            trained = {f"master.{name}": param for name, param in params.items() if param.requires_grad}
            moments |= _rows_of(trained, torch.float32)
        return moments


def open_fsdp(config: JobConfig, role: Role, collective: Collective, device: str) -> FSDPBackend:
    """Open the backend for the model of ``role`` with its initial weights. Needs an initialized process group.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, or the model or its optimizer cannot be sharded.
    """
    assert isinstance(config.backend, FSDPConfig)
    initial = initial_model(config, role)
    if initial.optimizer.type == "adamw_8bit":
        raise ConfigError("optimizer.type 'adamw_8bit' quantises moments in blocks that ranks would cut: use 'adamw'")
    return FSDPBackend(
        initial.model,
        initial.tokenizer,
        config.backend,
        initial.optimizer,
        collective,
        keep_reference=initial.keep_reference,
        device=device,
        role=role,
        lora=initial.lora,
        base_path=initial.base_path,
        aux_loss_coef=initial.aux_loss_coef,
    )


def _widen(model: PreTrainedModel, *, all_of_it: bool) -> None:
    """Convert to float32 all parameters that the job trains in some phase (warm start or policy updates), and let them
    require gradients from the start.

    ``all_of_it``: convert every parameter, because a warm start trains the base weights too; else only the adapter.
    """
    for name, param in model.named_parameters():
        if all_of_it or is_adapter(name):
            param.data = param.data.float()
            param.requires_grad_(True)


def _copies(scores: ScoreTensors) -> ScoreTensors:
    """Clone the scores: FSDP registers backward hooks on output tensors, and hooks on views are easily lost."""
    values_M, entropy_M, kl_M = scores
    return (
        values_M.clone(), None if entropy_M is None else entropy_M.clone(), None if kl_M is None else kl_M.clone(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's rows of one tensor.

    Attributes:
        part: the rows, in the memory of the model or optimizer itself; a scalar is the same on every rank.
        shape: shape of the whole tensor.
        dtype: type in which the tensor is stored.
    """

    part: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """Return a meta tensor with the shape and type of the stored tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def copy(self, mesh: DeviceMesh) -> Tensor:
        """Return a copy of the rows in host memory: a DTensor over the CPU mesh ``mesh``, or a plain scalar."""
        copied = self.part.detach().to("cpu", self.dtype, copy=True)
        return as_sharded(copied, mesh, self.shape) if self.shape else copied

    @torch.no_grad()
    def load(self, saved: Tensor, mesh: DeviceMesh) -> None:
        """Copy this rank's rows of ``saved``, a whole tensor or a DTensor over the same ranks, into ``part``."""
        if self.shape and not is_sharded(saved):
            saved = saved[rows_of_mesh(len(saved), mesh)]
        self.part.copy_(local_part(saved))


def _rows_of(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, _Rows]:
    """Return this rank's rows of ``parameters``, all of which are DTensors. ``dtype``: type of the rows in
    checkpoints."""
    return {name: _Rows(local_part(param.detach()), param.shape, dtype) for name, param in parameters.items()}


class _ShardOptimizer(Optimizer):
    """``Optimizer`` over parameters that share their memory with the DTensors of a sharded model.

    Args:
        params: DTensors by name; this class allocates their gradients, and FSDP adds to them in place.
        collective: all ranks that hold rows.
        decayed: names of the parameters with weight decay.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        collective: Collective,
        *,
        decayed: frozenset[str],
    ) -> None:
        self._collective = collective
        trained = {name: param for name, param in params.items() if param.requires_grad}
        rows = {name: nn.Parameter(local_part(param.detach())) for name, param in trained.items()}
        super().__init__(rows, config, decayed=decayed)
        for name, param in trained.items():
            param.grad = torch.zeros_like(param.detach())
            rows[name].grad = local_part(param.grad)

    def grad_norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the L2 norm over the rows of all ranks, summed in float64 in rank order."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.values()]
        squares = float(torch.stack(norms).square().sum())
        total = self._collective.sum({"squares": squares})["squares"]
        return torch.tensor(math.sqrt(total), dtype=torch.float32, device=norms[0].device)

    def clear(self, trained: list[Tensor]) -> None:
        """Zero the gradients in place, because FSDP adds into the same memory."""
        for param in trained:
            assert param.grad is not None
            param.grad.zero_()
