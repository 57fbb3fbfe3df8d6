"""Backend `megatron`: one model over tensor-, context-, pipeline-, expert- and data-parallel ranks.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import BackendState, LossFunction, Role, Seconds, TensorLayout
from penstock.services.trainer.backends.local import describing_files
from penstock.services.trainer.backends.megatron.conversion import mapping_of
from penstock.services.trainer.backends.megatron.cpu import allocating_on
from penstock.services.trainer.backends.megatron.groups import open_groups
from penstock.services.trainer.backends.megatron.model import MegatronModel
from penstock.services.trainer.backends.megatron.optimizer import ShardedOptimizer
from penstock.services.trainer.backends.megatron.passes import Passes, Work
from penstock.services.trainer.backends.megatron.weights import gathered, load, whole_shapes
from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.batch.routers import Routers
from penstock.services.trainer.environment import describe_environment
from penstock.services.trainer.optimizer import check_fits, copy_into
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.config.jobs.job import JobConfig, OptimizerConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.critic import critic_of
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.models.packed import PackedTokens

__all__ = ["MegatronBackend", "open_megatron"]


class MegatronBackend:
    """Trains this rank's part of ``model``.

    Ranks that share a microbatch (tensor and context parallel, all stages) pass the same one to every method and get
    the same scores. The model stays in eval mode, as in ``LocalBackend``.

    With several stages, ``accumulate`` queues microbatches until ``step``, which sends them through the pipeline.

    Args:
        model: the policy, or a critic made by ``critic_of``; the same on every rank. Not needed afterwards.
        tokenizer: stored in checkpoints beside the weights.
        optimizer: optimizer settings.
        parallel: sizes of the parallel dimensions.
        keep_reference: hold a frozen copy of the weights for a KL term (policy only).
        aux_loss_coef: weight of the load-balancing loss of a mixture of experts.

    Raises:
        ConfigError: megatron-core has no such model, or the model cannot be divided this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        optimizer: OptimizerConfig,
        parallel: MegatronConfig,
        *,
        keep_reference: bool,
        device: str = "cpu",
        role: Role = "policy",
        aux_loss_coef: float = 0.0,
    ) -> None:
        self._role, self._parallel, self._device = role, parallel, torch.device(device)
        whole = {name: param.detach() for name, param in model.named_parameters()}
        self._layout: TensorLayout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()]
        self._order = list(whole)
        self._mapping = mapping_of(
            {name: shape for name, shape, _ in self._layout},
            num_kv_heads=model.config.num_key_value_heads,
            tensor_parallel=parallel.tensor_parallel,
            pipeline_parallel=parallel.pipeline_parallel,
            expert_parallel=parallel.expert_parallel,
        )
        self._groups = open_groups(parallel)
        self._files = describing_files(model, tokenizer)
        plan = plan_of(model) if role == "policy" else None
        self.routers = Routers(plan, coef=aux_loss_coef) if plan is not None and plan.sparse else None
        self._model = self._part_of(model, whole)
        self._reference = self._part_of(model, whole).requires_grad_(False) if keep_reference else None
        self._passes = Passes(self._groups, self._device, role, self.routers)
        self._queued: list[Work] = []
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
        assert not kl or self._reference is not None, "built without keep_reference"
        if not self._takes_part(microbatch):
            return
        batch, given = self._batch(microbatch), loss if microbatch is not None else None
        # A divergence needs the entropy, as in `local`.
        work = Work(batch=batch, loss=given, entropy=entropy or kl, kl=kl)
        self._queued.append(work)
        if self._parallel.pipeline_parallel == 1:
            self._run_queued()

    @torch.no_grad()
    def route(self, microbatch: Microbatch | None) -> None:
        """Count the experts that tokens visit; see ``Backend``. Replayed routes need no forward pass."""
        if self.routers is None:
            return
        table = None if microbatch is None else microbatch.experts_TNK
        if table is not None:
            self.routers.count_table(table)
        own = microbatch if table is None else None
        if self._any_rank(own is not None):
            load = self._passes.route(self._batch(own).tokens, self._model)
            if own is not None:
                self.routers.count(load.chosen)

    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs or values of the scored tokens, without gradient; see ``Backend``."""
        return self._score_by(self._model, microbatch)

    def reference_logprobs(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs under the reference policy; see ``Backend``."""
        assert self._reference is not None, "built without keep_reference"
        return self._score_by(self._reference, microbatch)

    def step(self, learning_rate: float) -> float:
        """Clip the gradients and make an optimizer step; see ``Backend``."""
        self._run_queued()
        start = time.perf_counter()
        norm = self._optimizer.step(learning_rate)
        self._passes.seconds.optimizer += self._now() - start
        return norm

    def freeze_reference(self) -> None:
        """Copy the current weights into the reference policy, if there is one; see ``Backend``."""
        if self._reference is not None:
            copy_into(self._reference.parameters_by_name(), self._model.parameters_by_name(), what="reference")

    def new_optimizer(self, config: OptimizerConfig, *, whole: bool = False) -> None:
        """Start a new optimizer; see ``Backend``. ``whole`` has no effect: all weights are trained in any case."""
        self._queued.clear()
        self._optimizer = ShardedOptimizer(
            self._model.parameters_by_name(),
            self._mapping,
            self._groups,
            config,
            sequence_parallel=self._parallel.sequence_parallel,
            tied=self._model.tied,
        )

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights; see ``Backend``."""
        return list(self._layout)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights; see ``Backend``. Gathers one parameter of megatron-core at a time."""
        return gathered(self._model.parameters_by_name(), self._mapping, self._order, self._groups)

    def published_layout(self) -> TensorLayout:
        """Return the layout of the published tensors; see ``Backend``."""
        return self.layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to publish, which are the whole weights; see ``Backend``."""
        return self.weights()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Return an empty iterator, because this backend trains no adapter; see ``Backend``."""
        return iter(())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole parameters into the model; see ``Backend``."""
        own = self._model.parameters_by_name()
        expected = whole_shapes(own, self._mapping)
        for name, tensor in weights:
            if name not in expected:
                raise CheckpointError(f"'{name}' is not a parameter of this {self._role}")
            check_fits({name: expected[name]}, {name: tensor}, what=self._role)
            load(own, {name: tensor}, self._mapping, self._groups)

    def take_seconds(self) -> Seconds:
        """Return the seconds by stage since the last call; see ``Backend``."""
        taken, self._passes.seconds = self._passes.seconds, Seconds()
        return taken

    def environment(self) -> dict[str, str]:
        """Return the properties that bit-identical results depend on; see ``Backend``."""
        dtype = str(self._layout[0][2]).removeprefix("torch.")
        return describe_environment(dtype=dtype, device=str(self._device)) | {
            "backend": "megatron",
            "megatron_core": version("megatron-core"),
            "ranks": str(dist.get_world_size()),
            "tensor_parallel": str(self._parallel.tensor_parallel),
            "context_parallel": str(self._parallel.context_parallel),
            "pipeline_parallel": str(self._parallel.pipeline_parallel),
            "expert_parallel": str(self._parallel.expert_parallel),
        }

    def state(self) -> BackendState:
        """Return a copy of the model's state, with whole tensors on every rank; see ``Backend``."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        optimizer = {
            f"{kind}.{name}": tensor
            for kind, own in self._optimizer_parts().items()
            for name, tensor in self._copy(own)
        }
        return BackendState(
            weights=dict(self._copy(self._model.parameters_by_name())),
            optimizer=optimizer,
            reference={} if self._reference is None else dict(self._copy(self._reference.parameters_by_name())),
            rng=rng,
            files=self._files,
            environment=self.environment(),
        )

    def load_state(self, state: BackendState) -> None:
        """Restore what ``state`` returned; see ``Backend``."""
        reference = {} if self._reference is None else self._reference.parameters_by_name()
        moments = _by_kind(state.optimizer)
        parts: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = [
            ("reference policy", {**reference}, state.reference),
            ("checkpoint", {**self._model.parameters_by_name()}, state.weights),
            *(("optimizer state", own, moments.pop(kind, {})) for kind, own in self._optimizer_parts().items()),
        ]
        if moments:
            raise CheckpointError(f"optimizer state does not fit the model: it has no '{next(iter(moments))}'")
        for what, own, saved in parts:  # check everything before the first copy: a wrong state changes nothing
            check_fits(whole_shapes(own, self._mapping) if own else {}, saved, what=what)
        for _, own, saved in parts:
            if own:
                load(own, saved, self._mapping, self._groups)
        torch.set_rng_state(state.rng["cpu"])
        if self._device.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(state.rng["cuda"], self._device)

    def _part_of(self, model: PreTrainedModel, whole: dict[str, Tensor]) -> MegatronModel:
        with allocating_on(self._device):
            part = MegatronModel(model, self._parallel, self._groups)
        load(part.parameters_by_name(), whole, self._mapping, self._groups)
        return part.to(self._device).eval()

    def _run_queued(self) -> None:
        """Run forward and backward for the queued microbatches."""
        works, self._queued = self._queued, []
        if works:
            self._passes.accumulate(works, self._model, self._reference, self._optimizer.collect)

    def _takes_part(self, microbatch: Microbatch | None) -> bool:
        """Return True if this rank must run the pass: the rank has a microbatch, or its experts serve other ranks'
        tokens."""
        return microbatch is not None or self._groups.experts.size() > 1

    def _any_rank(self, has: bool) -> bool:
        """Return True if ``has`` is True on any rank of the group in which ranks send tokens to each other's
        experts."""
        if self._groups.experts.size() == 1:
            return has
        flag = torch.tensor(float(has), dtype=torch.float32, device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._groups.experts)
        return bool(flag)

    def _batch(self, microbatch: Microbatch | None) -> Microbatch:
        return (_unscored_token() if microbatch is None else microbatch).to(self._device)

    def _score_by(self, model: MegatronModel, microbatch: Microbatch | None) -> Tensor:
        if not self._takes_part(microbatch):
            return torch.empty(0, device=self._device, dtype=torch.float32)
        work = Work(batch=self._batch(microbatch), loss=None)
        return self._passes.score(work, model, replay=model is self._model)

    def _optimizer_parts(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's optimizer state by kind, then by megatron-core name."""
        return _by_kind(self._optimizer.tensors())

    def _copy(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in gathered(own, self._mapping, self._order, self._groups):
            yield name, tensor.to("cpu", copy=True)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def open_megatron(config: JobConfig, role: Role, device: str) -> MegatronBackend:
    """Open the backend for the model of ``role`` with its initial weights, divided over the ranks as in
    ``config.backend``.

    Raises:
        ConfigError: the model or the tokenizer cannot be loaded, or megatron-core cannot train it this way.
    """
    assert isinstance(config.backend, MegatronConfig)
    tokenizer, moe = build_tokenizer(config.model), config.model.moe
    model = build_model(config.model, len(tokenizer), seed=config.seed)
    plan, optimizer = plan_of(model), config.optimizer
    if moe is not None and not (plan is not None and plan.sparse):
        raise ConfigError(f"model.moe: {type(model).__name__} has no routers that this decoder knows")
    if role == "critic":
        assert config.algorithm.critic is not None
        model, optimizer = critic_of(model), config.algorithm.critic.optimizer
    return MegatronBackend(
        model,
        tokenizer,
        optimizer,
        config.backend,
        keep_reference=role == "policy" and config.needs_reference,
        device=device,
        role=role,
        aux_loss_coef=moe.aux_loss_coef if moe is not None and role == "policy" else 0.0,
    )


def _by_kind(optimizer: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in optimizer.items():
        kind, name = key.split(".", 1)
        parts.setdefault(kind, {})[name] = tensor
    return parts


def _unscored_token() -> Microbatch:
    """Return a microbatch of one token without a score. A rank that has no microbatch of its own runs this one, so that
    other ranks can use the experts of this rank."""
    none_M, zero_T = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    tokens = PackedTokens(
        token_ids_T=zero_T, position_ids_T=zero_T, cu_seqlens_S1=torch.tensor([0, 1]), lengths=(1,), max_seqlen=1
    )
    return Microbatch(tokens, none_M, none_M, none_M, none_M.float(), none_M.float(), none_M)
