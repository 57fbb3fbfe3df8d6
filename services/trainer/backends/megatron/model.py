"""A megatron-core GPT model that computes the same function as a Hugging Face decoder.

Parallel layers (embedding, projections, MLP) are megatron-core's. Norms and core attention are Penstock's, so that they
run without Apex and TransformerEngine and round as in the other backends and the sampler.

Shape legend: T = tokens of the microbatch, P = T padded to a multiple of the ranks that share it, R = tokens on this
context-parallel rank, S = the part of R that this rank keeps between layers (R without sequence parallelism), D = model
width, d = head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.services.trainer.backends.megatron import core
from penstock.services.trainer.backends.megatron.attention import PackedCausalAttention, PackedSequences
from penstock.services.trainer.backends.megatron.conversion import EMBEDDING
from penstock.services.trainer.backends.megatron.experts import ParallelExperts, RealTokens
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import Float32Head, Layer, plan_of
from penstock.shared.models.attention import CausalBlocks
from penstock.shared.models.experts import Routes, Sparse
from penstock.shared.models.packed import PackedTokens

__all__ = ["MegatronModel", "RMSNorm"]

_LAYERS = "decoder.layers."


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467) with the constructor that megatron-core expects."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class _CheckpointedLayer(core.TransformerLayer):  # type: ignore[misc]
    """Layer that recomputes its activations in the backward pass. Draws no random numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        routing = getattr(self.mlp, "routing", None)

        def with_its_routing(*args: Any, **kwargs: Any) -> Any:
            # By the backward pass, the pipeline has run other microbatches through this layer.
            self.mlp.routing = routing
            return run(*args, **kwargs)

        return checkpoint(with_its_routing, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _HiddenStates(core.GPTModel):  # type: ignore[misc]
    """GPT model that stops before the head, because logits are needed at few positions only."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class MegatronModel(nn.Module):
    """This rank's part of one model: the layers of its pipeline stage. Parameters are uninitialized.

    Args:
        like: the Hugging Face model whose function is computed; only its configuration and rotary embedding are used.
        config: sizes of the parallel dimensions.
        groups: this rank's process groups.

    Raises:
        ConfigError: the architecture is not a plain decoder, or its heads cannot be divided over the ranks.
    """

    def __init__(self, like: PreTrainedModel, config: MegatronConfig, groups: Groups) -> None:
        super().__init__()
        plan = plan_of(like)
        if plan is None:
            raise ConfigError(
                f"backend 'megatron' trains plain Llama, Qwen and Mixtral decoders, not {type(like).__name__} with "
                "this configuration; use backend 'local' or 'fsdp'"
            )
        _check_heads(plan.num_kv_heads, config)
        self._groups, self._sequence_parallel = groups, config.sequence_parallel
        self._rotary: Any = type(like.model.rotary_emb)(config=like.config)
        self._width, self._dtype = like.config.hidden_size, like.dtype
        self.is_critic = not hasattr(like, "lm_head")
        self.fp32_head = isinstance(getattr(like, "lm_head", None), Float32Head)
        self.tied = not self.is_critic and like.config.tie_word_embeddings
        self.vocab_size: int = plan.embedding.weight.shape[0]
        tensor_rank, tensor_size = groups.in_tensor()
        self.vocabulary_per_rank = -(-self.vocab_size // tensor_size)
        self.first_of_vocabulary = tensor_rank * self.vocabulary_per_rank
        stage, stages = groups.in_pipeline()
        number = len(plan.layers) // stages
        self._first_layer = stage * number
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.gpt = _HiddenStates(
            _transformer_config(like, config),
            _block(plan.layers[self._first_layer : self._first_layer + number], config, groups),
            vocab_size=self.vocabulary_per_rank * tensor_size,
            max_sequence_length=like.config.max_position_embeddings,
            pre_process=self.is_first,
            post_process=self.is_last,
            share_embeddings_and_output_weights=stages == 1 and (self.is_critic or self.tied),
            position_embedding_type="none",
            pg_collection=groups.of_megatron(),
        )
        if self.is_first and plan.embedding.padding_idx is not None:
            _leave_padding(self.gpt.embedding.word_embeddings, plan.embedding.padding_idx, groups)
        if self.is_critic and self.is_last:
            self.gpt.output_layer = None
            self.gpt.value_head = nn.utils.skip_init(
                nn.Linear, like.config.hidden_size, 1, bias=False, dtype=like.dtype
            )  # type: ignore[no-untyped-call]

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their megatron-core names in the whole model.

        A tied head has the name of the embedding, also on the last of several stages, which keeps a copy.
        """
        return {self._name_in_whole(name): parameter for name, parameter in self.gpt.named_parameters()}

    def _name_in_whole(self, name: str) -> str:
        if name.startswith(_LAYERS):
            layer, rest = name.removeprefix(_LAYERS).split(".", 1)
            return f"{_LAYERS}{self._first_layer + int(layer)}.{rest}"
        return EMBEDDING if self.tied and name == "output_layer.weight" else name

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output head without padding, in the dtype of the logits. Last stage only."""
        shared = self.gpt.share_embeddings_and_output_weights
        weight: Tensor = self.gpt.shared_embedding_or_output_weight() if shared else self.gpt.output_layer.weight
        weight = weight[: self.vocab_size - self.first_of_vocabulary]
        return weight.float() if self.fp32_head else weight

    def _route(self, routing: RealTokens | None) -> None:
        for module in self.gpt.modules():
            if isinstance(module, ParallelExperts):
                module.routing = routing

    def tokens_per_rank(self, tokens: PackedTokens) -> int:
        """Return R, the number of tokens, padding included, on each context-parallel rank. With sequence parallelism, R
        is a multiple of the number of tensor-parallel ranks, which share these tokens."""
        unit = self._groups.tensor.size() if self._sequence_parallel else 1
        return -(-tokens.num_tokens // (self._groups.context.size() * unit)) * unit

    def handed_on(self, tokens: PackedTokens) -> list[int]:
        """Return [S, 1, D], the shape of the hidden states that one pipeline stage sends to the next. S is R, or with
        sequence parallelism R divided by the number of tensor-parallel ranks."""
        return [
            self.tokens_per_rank(tokens) // (self._groups.tensor.size() if self._sequence_parallel else 1),
            1,
            self._width,
        ]

    def run_stage(self, tokens: PackedTokens, routes: Routes | None = None) -> Tensor:
        """Run this stage's layers over this context-parallel rank's part of the padded tokens; return [S, 1, D].

        Differentiable. The first stage begins with the embedding and the last ends with the final norm. Later stages
        take the input that the schedule has set.
        """
        rank, ranks = self._groups.in_context()
        run = self.tokens_per_rank(tokens)
        padded_P = F.pad(tokens.token_ids_T, (0, run * ranks - tokens.num_tokens))
        ids_R = padded_P[rank * run : (rank + 1) * run]
        self._route(None if routes is None else _routes_of_run(routes, tokens.num_tokens, rank * run, run))
        like = torch.empty(0, dtype=self._dtype, device=ids_R.device)
        cos, sin = self._rotary(like, tokens.position_ids_T[None])
        sequences = PackedSequences(
            qkv_format="thd",
            blocks=CausalBlocks.of(tokens),
            rope=(cos[0, :, None], sin[0, :, None]),
            num_tokens=tokens.num_tokens,
        )
        hidden_S1D: Tensor = self.gpt(ids_R[None], None, None, packed_seq_params=sequences)
        return hidden_S1D

    def final(self, hidden_S1D: Tensor) -> Tensor:
        """Return the final hidden states [R, D] from the output of the last stage's layers. Differentiable.

        All ranks of the tensor-parallel group get the same states. In the backward pass, each rank must pass the
        whole gradient, not a partial sum.
        """
        if not self._sequence_parallel:
            return hidden_S1D[:, 0]
        hidden_R1D: Tensor = core.mappings.gather_from_sequence_parallel_region(
            hidden_S1D, tensor_parallel_output_grad=False, group=self._groups.tensor
        )
        return hidden_R1D[:, 0]


def _leave_padding(embedding: nn.Module, padding: int, groups: Groups) -> None:
    """Prevent padding tokens of the input from adding gradient to their embedding row, as ``nn.Embedding`` with a
    ``padding_idx`` does."""
    rank, ranks = groups.in_tensor()

    def without(module: Any, args: tuple[Tensor], embedded: Tensor) -> Tensor:
        ids = args[0]
        if module.reduce_scatter_embeddings:  # [1, R] to this rank's part of [R, 1]
            ids = ids.T.chunk(ranks)[rank]
        return torch.where((ids == padding)[..., None], embedded.detach(), embedded)

    embedding.register_forward_hook(without)


def _routes_of_run(routes: Routes, num_tokens: int, start: int, run: int) -> RealTokens:
    """Return the routing of the tokens on this context-parallel rank. The rank has ``run`` consecutive tokens of the
    padded microbatch, from index ``start`` on; tokens from index ``num_tokens`` on are padding."""
    number = max(0, min(run, num_tokens - start))
    replay = routes.replay_TNK
    return RealTokens(replace(routes, replay_TNK=None if replay is None else replay[start : start + number]), number)


def _check_heads(num_kv_heads: int, config: MegatronConfig) -> None:
    if num_kv_heads % config.sharing_heads:
        raise ConfigError(
            f"backend.tensor_parallel x context_parallel = {config.tensor_parallel} x {config.context_parallel} does "
            f"not divide the {num_kv_heads} key/value heads of the model: every rank attends with whole query groups"
        )


def _transformer_config(like: PreTrainedModel, config: MegatronConfig) -> Any:
    hf, plan = like.config, plan_of(like)
    assert plan is not None
    return core.TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=plan.num_heads,
        num_query_groups=plan.num_kv_heads,
        kv_channels=plan.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=plan.final_norm.eps,
        qk_layernorm=plan.layers[0].q_norm is not None,
        add_bias_linear=False,
        add_qkv_bias=like.model.layers[0].self_attn.q_proj.bias is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=like.dtype,
        bf16=like.dtype == torch.bfloat16,
        tensor_model_parallel_size=config.tensor_parallel,
        context_parallel_size=config.context_parallel,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        pipeline_dtype=like.dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # unused, but the default forbids variable lengths
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        cuda_graph_scope=[],
    )


def _block(layers: Sequence[Layer], config: MegatronConfig, groups: Groups) -> Any:
    """Return the layer specifications: megatron-core's parallel layers with Penstock's norms and attention."""
    qk_norm = RMSNorm if layers[0].q_norm is not None else core.IdentityOp
    columns, rows = core.tensor_parallel.ColumnParallelLinear, core.tensor_parallel.RowParallelLinear
    attention = core.SelfAttentionSubmodules(
        linear_qkv=columns,
        core_attention=PackedCausalAttention,
        linear_proj=rows,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    layer = core.TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=core.ModuleSpec(module=core.SelfAttention, submodules=attention),
        self_attn_bda=core.get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=core.ModuleSpec(module=core.MLP, submodules=core.MLPSubmodules(linear_fc1=columns, linear_fc2=rows)),
        mlp_bda=core.get_bias_dropout_add,
    )
    kind = _CheckpointedLayer if config.activation_checkpointing else core.TransformerLayer
    specifications = [core.ModuleSpec(module=kind, submodules=_with_experts(layer, part, groups)) for part in layers]
    return core.TransformerBlockSubmodules(layer_specs=specifications, layer_norm=RMSNorm)


def _with_experts(layer: Any, part: Layer, groups: Groups) -> Any:
    if not isinstance(part.mlp, Sparse):
        return layer
    like = part.mlp

    class Experts(ParallelExperts):
        """``ParallelExperts`` with ``like`` and ``groups`` already bound.

        This is a class and not a ``ModuleSpec``, because megatron-core warns about a specification of an unknown MLP.
        """

        def __init__(self, *, config: Any) -> None:
            super().__init__(config=config, like=like, groups=groups)

    return replace(layer, mlp=Experts)
