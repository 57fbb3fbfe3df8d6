"""A megatron-core GPT model that computes the same function as a Hugging Face decoder.

The layers that are parallel (embedding, projections, MLP) are megatron-core's; the norms and the core attention are
ours, so that they run without Apex and TransformerEngine and round as trainer and sampler do elsewhere.

Shape legend: T = tokens of the microbatch, P = T padded to a multiple of the ranks that share it, R = tokens on this
context-parallel rank, D = model width, d = head width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.services.trainer.backends.megatron import core
from penstock.services.trainer.backends.megatron.attention import PackedCausalAttention, PackedSequences
from penstock.services.trainer.backends.megatron.experts import ParallelExperts, RealTokens
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import Layer, plan_of
from penstock.shared.models.attention import CausalBlocks
from penstock.shared.models.experts import Routes, Sparse
from penstock.shared.models.packed import PackedTokens

__all__ = ["MegatronModel", "RMSNorm"]


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467) as megatron-core builds its norms."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalised over the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class _CheckpointedLayer(core.TransformerLayer):  # type: ignore[misc]
    """A layer whose activations are computed again in the backward pass. Draws no random numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _HiddenStates(core.GPTModel):  # type: ignore[misc]
    """Stops before the head: logits are wanted at a few positions only."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class MegatronModel(nn.Module):
    """The part of one model on this rank; parameters have no values yet.

    Args:
        like: the Hugging Face model whose function is computed; only its configuration and rotary embedding are used.
        config: how the model is cut.
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
        self.is_critic = not hasattr(like, "lm_head")
        self.vocab_size: int = plan.embedding.weight.shape[0]
        tensor_rank, tensor_size = groups.in_tensor()
        self.vocabulary_per_rank = -(-self.vocab_size // tensor_size)
        self.first_of_vocabulary = tensor_rank * self.vocabulary_per_rank
        tied = self.is_critic or like.config.tie_word_embeddings
        self.gpt = _HiddenStates(
            _transformer_config(like, config),
            _block(like, config),
            vocab_size=self.vocabulary_per_rank * tensor_size,
            max_sequence_length=like.config.max_position_embeddings,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
        )
        if self.is_critic:
            self.gpt.value_head = nn.utils.skip_init(
                nn.Linear, like.config.hidden_size, 1, bias=False, dtype=like.dtype
            )  # type: ignore[no-untyped-call]

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their megatron-core names, tied ones once."""
        return dict(self.gpt.named_parameters())

    def head_weight(self) -> Tensor:
        """This rank's rows of the output head, without padding."""
        weight: Tensor = self.gpt.shared_embedding_or_output_weight() if self._tied else self.gpt.output_layer.weight
        return weight[: self.vocab_size - self.first_of_vocabulary]

    @property
    def _tied(self) -> bool:
        return bool(self.gpt.share_embeddings_and_output_weights)

    def _route(self, routing: RealTokens | None) -> None:
        for module in self.gpt.modules():
            if isinstance(module, ParallelExperts):
                module.routing = routing

    def tokens_per_rank(self, tokens: PackedTokens) -> int:
        """R: context-parallel ranks hold equal runs, which sequence parallelism cuts once more."""
        unit = self._groups.tensor.size() if self._sequence_parallel else 1
        return -(-tokens.num_tokens // (self._groups.context.size() * unit)) * unit

    def hidden_states(self, tokens: PackedTokens, routes: Routes | None = None) -> Tensor:
        """Final normalised hidden states [R, D] of this context-parallel rank's run of the padded row. Differentiable.

        Every rank of the tensor-parallel group gets the same; a gradient that it returns must be the whole one.
        """
        rank, ranks = self._groups.in_context()
        run = self.tokens_per_rank(tokens)
        padded_P = F.pad(tokens.token_ids_T, (0, run * ranks - tokens.num_tokens))
        ids_R = padded_P[rank * run : (rank + 1) * run]
        self._route(None if routes is None else _routes_of_run(routes, tokens.num_tokens, rank * run, run))
        cos, sin = self._rotary(self.head_weight(), tokens.position_ids_T[None])
        sequences = PackedSequences(
            qkv_format="thd",
            blocks=CausalBlocks.of(tokens),
            rope=(cos[0, :, None], sin[0, :, None]),
            num_tokens=tokens.num_tokens,
        )
        hidden_R1D = self.gpt(ids_R[None], None, None, packed_seq_params=sequences)
        if self._sequence_parallel:
            hidden_R1D = core.mappings.gather_from_sequence_parallel_region(
                hidden_R1D, tensor_parallel_output_grad=False, group=self._groups.tensor
            )
        hidden_RD: Tensor = hidden_R1D[:, 0]
        return hidden_RD


def _routes_of_run(routes: Routes, num_tokens: int, start: int, run: int) -> RealTokens:
    """The routing of the tokens from ``start`` on: of this context-parallel rank."""
    number = max(0, min(run, num_tokens - start))
    replay = routes.replay_TNK
    return RealTokens(replace(routes, replay_TNK=None if replay is None else replay[start : start + number]), number)


def _check_heads(num_kv_heads: int, config: MegatronConfig) -> None:
    if num_kv_heads % config.model_parallel:
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
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        cuda_graph_scope=[],
    )


def _block(like: PreTrainedModel, config: MegatronConfig) -> Any:
    """Layer specifications: megatron-core's parallel layers around our norms and attention."""
    plan = plan_of(like)
    assert plan is not None
    qk_norm = RMSNorm if plan.layers[0].q_norm is not None else core.IdentityOp
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
    layers = [core.ModuleSpec(module=kind, submodules=_with_experts(layer, part)) for part in plan.layers]
    return core.TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _with_experts(layer: Any, part: Layer) -> Any:
    if not isinstance(part.mlp, Sparse):
        return layer
    like = part.mlp

    class Experts(ParallelExperts):
        """A type and not a specification: megatron-core warns of each specification of an MLP that it does not know."""

        def __init__(self, *, config: Any) -> None:
            super().__init__(config=config, like=like)

    return replace(layer, mlp=Experts)
