"""Backend `fsdp`: one model cut over all ranks, each rank with its own microbatches.

Shape legend: M = scored tokens of a microbatch, T = packed tokens, S1 = sequences + 1.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
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
from penstock.services.trainer.backends.fsdp.shard_optimizer import ShardOptimizer
from penstock.services.trainer.backends.fsdp.sharded_model import ShardedModel, Sharding
from penstock.services.trainer.backends.local import describing_files
from penstock.services.trainer.collective import Collective
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.optimizer import check_fits, decayed_names
from penstock.services.trainer.packing import Microbatch
from penstock.services.trainer.row_shards import as_sharded, local_part, rows_of_mesh
from penstock.shared.config.backend import FSDPConfig
from penstock.shared.config.job import JobConfig, OptimizerConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.critic import critic_of, selected_values
from penstock.shared.models.decoder import selected_logprobs
from penstock.shared.models.divergence import exact_scores
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.models.packed import PackedTokens

__all__ = ["FSDPBackend", "open_fsdp"]

ScoreTensors = tuple[Tensor, Tensor | None, Tensor | None]
"""The fields of ``Scores``: FSDP looks for differentiable outputs in tuples."""


class FSDPBackend:
    """Trains ``model`` together with the same backend of the other ranks.

    The parts of the weights are float32 whatever the type of the model: they are the masters of the optimizer, and a
    narrower model is gathered in its own type. The model stays in eval mode, as in the backend `local`.

    Args:
        model: the policy, or a critic made by ``critic_of``; whole, on the CPU, the same on every rank.
        tokenizer: goes into checkpoints beside the weights.
        optimizer: its settings.
        keep_reference: hold a frozen copy of the weights for a KL term (policy only).
        collective: all ranks of the process group.

    Raises:
        ConfigError: the architecture is not one that can be cut.
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
    ) -> None:
        self.routers = None
        self._role: Role = role
        self._device = torch.device(device)
        self._dtype = model.dtype
        self._collective = collective
        self._files = describing_files(model, tokenizer)
        self._shapes = {name: param.shape for name, param in model.named_parameters()}
        self._decayed = decayed_names(model)
        mesh = init_device_mesh(self._device.type, (collective.size,))
        self._host_mesh = mesh if self._device.type == "cpu" else init_device_mesh("cpu", (collective.size,))
        reference = copy.deepcopy(model).requires_grad_(False) if keep_reference else None
        self._model = ShardedModel(model.float().eval(), self._sharding(config, mesh, offload=config.cpu_offload))
        self._optimizer = self._open_optimizer(optimizer)
        self._reference: ShardedModel | None = None
        if reference is not None:
            offload = config.cpu_offload or config.offload_reference
            self._reference = ShardedModel(reference.eval(), self._sharding(config, mesh, offload=offload))
        self._seconds = Seconds()

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
        start = time.perf_counter()
        batch = (microbatch or _nothing()).to(self._device)
        scores = self._scores(batch, temperature, entropy=entropy, kl=kl)
        try:
            value = scores.values_M.sum() * 0 if microbatch is None else loss(scores)
        except BaseException:
            self._release()  # no backward pass follows
            raise
        middle = self._now()
        value.backward()  # type: ignore[no-untyped-call]
        self._release()
        end = self._now()
        self._seconds.forward += middle - start
        self._seconds.backward += end - middle

    def route(self, microbatch: Microbatch | None) -> None:
        """See ``Backend``. There are no routers."""

    def score(self, microbatch: Microbatch | None, *, temperature: float) -> Tensor:
        """See ``Backend``."""
        return self._score_by(self._model, microbatch, temperature)

    def reference_logprobs(self, microbatch: Microbatch | None, *, temperature: float) -> Tensor:
        """See ``Backend``."""
        assert self._reference is not None, "built without keep_reference"
        return self._score_by(self._reference, microbatch, temperature)

    def step(self, learning_rate: float) -> float:
        """See ``Backend``."""
        start = time.perf_counter()
        norm = self._optimizer.step(learning_rate)
        self._seconds.optimizer += self._now() - start
        return norm

    def freeze_reference(self) -> None:
        """See ``Backend``."""
        if self._reference is not None:
            own = self._model.parts()
            for name, part in self._reference.parts().items():
                part.copy_(own[name])

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """See ``Backend``. There is no adapter, so everything is trained in any case."""
        self._optimizer = self._open_optimizer(config)

    def layout(self) -> TensorLayout:
        """See ``Backend``."""
        return [(name, tuple(self._shapes[name]), self._dtype) for name in self._model.names]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``. A tensor is valid until the next one is asked for."""
        return self._model.weights()

    def published_layout(self) -> TensorLayout:
        """See ``Backend``."""
        return self.layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return self.weights()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return iter(())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Backend``."""
        for name, tensor in weights:
            self._model.load(name, tensor)

    def take_seconds(self) -> Seconds:
        """See ``Backend``."""
        taken, self._seconds = self._seconds, Seconds()
        return taken

    def environment(self) -> dict[str, str]:
        """See ``Backend``."""
        dtype = str(self._dtype).removeprefix("torch.")
        pins = describe_environment(dtype=dtype, device=str(self._device))
        return pins | {"backend": "fsdp", "ranks": str(self._collective.size)}

    def state(self) -> BackendState:
        """See ``Backend``. Weights, moments and reference are DTensors on the CPU: each rank copies its own rows."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        masters = self._model.parts()
        return BackendState(
            weights={name: self._copy(name, part.to(self._dtype)) for name, part in masters.items()},
            optimizer={key: self._copy(key.partition(".")[2], value) for key, value in self._moments().items()},
            reference={name: self._copy(name, part) for name, part in self._reference_parts().items()},
            rng=rng,
            files=self._files,
            environment=self.environment(),
        )

    def load_state(self, state: BackendState) -> None:
        """See ``Backend``. Takes whole tensors and those of ``state``."""
        moments = {key: (key.partition(".")[2], value) for key, value in self._moments().items()}
        parts = [
            ("reference policy", {n: (n, t) for n, t in self._reference_parts().items()}, state.reference),
            ("checkpoint", {n: (n, t.to(self._dtype)) for n, t in self._model.parts().items()}, state.weights),
            ("optimizer state", moments, state.optimizer),
        ]
        for what, own, saved in parts:  # all before the first copy: a wrong state changes nothing
            whole = {key: self._as_whole(name, value) for key, (name, value) in own.items()}
            check_fits(whole, saved, what=what)
        for name, tensor in state.weights.items():
            self._model.load(name, tensor)
        for name, tensor in state.reference.items():
            assert self._reference is not None
            self._reference.load(name, tensor)
        with torch.no_grad():
            for key, (_, value) in moments.items():
                value.copy_(self._own_rows(state.optimizer[key]))
        torch.set_rng_state(state.rng["cpu"])
        if self._device.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(state.rng["cuda"], self._device)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _scores(self, batch: Microbatch, temperature: float, *, entropy: bool, kl: bool) -> Scores:
        model = self._model.model
        at = (batch.tokens, batch.select_M, batch.targets_M)

        def values() -> ScoreTensors:
            return selected_values(model, batch.tokens, batch.select_M), None, None

        def logprobs() -> ScoreTensors:
            return *selected_logprobs(model, *at, temperature=temperature, entropy=entropy), None

        def divergence() -> ScoreTensors:
            assert self._reference is not None, "built without keep_reference"
            return exact_scores(model, self._reference.model, *at, temperature=temperature)

        if self._role == "critic":
            return Scores(*self._model.run(lambda: _copies(values())))
        if not kl:
            return Scores(*self._model.run(lambda: _copies(logprobs())))
        reference = self._reference
        assert reference is not None, "built without keep_reference"
        return Scores(*reference.run(lambda: self._model.run(lambda: _copies(divergence()))))

    @torch.no_grad()
    def _score_by(self, sharded: ShardedModel, microbatch: Microbatch | None, temperature: float) -> Tensor:
        start = time.perf_counter()
        batch = (microbatch or _nothing()).to(self._device)
        model = sharded.model

        def values() -> Tensor:
            if self._role == "critic":
                return selected_values(model, batch.tokens, batch.select_M)
            at = (batch.tokens, batch.select_M, batch.targets_M)
            return selected_logprobs(model, *at, temperature=temperature, entropy=False)[0]

        values_M = sharded.run(values)
        self._seconds.forward += self._now() - start
        return values_M if microbatch is not None else values_M[:0]

    def _release(self) -> None:
        self._model.release()
        if self._reference is not None:
            self._reference.release()

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

    def _open_optimizer(self, config: OptimizerConfig) -> ShardOptimizer:
        return ShardOptimizer(self._model.params, config, self._collective, decayed=self._decayed)

    def _moments(self) -> dict[str, Tensor]:
        """This rank's rows of the optimizer's state, as a backend with whole tensors would name it; live."""
        moments = self._optimizer.tensors()
        if self._dtype != torch.float32:
            moments |= {f"master.{name}": part for name, part in self._model.parts().items()}
        return moments

    def _reference_parts(self) -> dict[str, Tensor]:
        return {} if self._reference is None else self._reference.parts()

    def _copy(self, name: str, value: Tensor) -> Tensor:
        """A copy in host memory that knows which rows it is; scalars are the same on every rank."""
        copied = value.detach().to("cpu", copy=True)
        return as_sharded(copied, self._host_mesh, self._shapes[name]) if value.ndim else copied

    def _as_whole(self, name: str, value: Tensor) -> Tensor:
        return torch.empty(self._shapes[name] if value.ndim else (), dtype=value.dtype, device="meta")

    def _own_rows(self, saved: Tensor) -> Tensor:
        part = local_part(saved)
        return part[rows_of_mesh(len(part), self._host_mesh)] if part is saved and saved.ndim else part

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def open_fsdp(config: JobConfig, role: Role, collective: Collective, device: str) -> FSDPBackend:
    """The model of ``role`` with its initial weights; the process group exists already.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, or it cannot be cut.
    """
    assert isinstance(config.backend, FSDPConfig)
    if config.model.lora is not None or config.model.moe is not None:
        raise ConfigError("backend 'fsdp' trains whole dense models: model.lora and model.moe need backend 'local'")
    tokenizer = build_tokenizer(config.model)
    model = build_model(config.model, len(tokenizer), seed=config.seed)
    optimizer, keep_reference = config.optimizer, config.algorithm.needs_reference
    if role == "critic":
        assert config.algorithm.critic is not None
        model, optimizer, keep_reference = critic_of(model), config.algorithm.critic.optimizer, False
    if optimizer.type == "adamw_8bit":
        raise ConfigError("optimizer.type 'adamw_8bit' quantises moments in blocks that ranks would cut: use 'adamw'")
    return FSDPBackend(
        model, tokenizer, config.backend, optimizer, collective,
        keep_reference=keep_reference, device=device, role=role,
    )  # fmt: skip


def _copies(scores: ScoreTensors) -> ScoreTensors:
    """FSDP hangs its backward hooks on the tensors that come out, and those of views are easily lost."""
    values_M, entropy_M, kl_M = scores
    return (
        values_M.clone(), None if entropy_M is None else entropy_M.clone(), None if kl_M is None else kl_M.clone(),
    )  # fmt: skip


def _nothing() -> Microbatch:
    """One token that scores itself: what a rank computes while others have more."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    tokens = PackedTokens(zero, zero, torch.tensor([0, 1]), (1,), 1)
    return Microbatch(
        tokens=tokens, select_M=zero, targets_M=zero, rows_M=zero, source_M=zero, behaviour_M=one, lengths_M=one
    )
