"""Table of the modules of a Hugging Face model by their role in a decoder. The functional decoder (decoder.py) iterates
over this table instead of calling the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
)

from penstock.shared.config.rollout import ROPE_TYPES
from penstock.shared.models.experts import Routing, Sparse

__all__ = [
    "Adapted",
    "Dense",
    "Float32Head",
    "Layer",
    "Linear",
    "Norm",
    "Plan",
    "RunBlock",
    "forget_plan",
    "plan_of",
    "run_blocks_by",
]

_DENSE = (
    *(LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM),
    *(LlamaForSequenceClassification, Qwen2ForSequenceClassification, Qwen3ForSequenceClassification),
)
_SPARSE = (
    *(Qwen3MoeForCausalLM, MixtralForCausalLM),
    *(Qwen3MoeForSequenceClassification, MixtralForSequenceClassification),
)

Linear = Callable[[Tensor], Tensor]


class Norm:
    """Arguments of ``F.rms_norm`` after the input, as in ``F.rms_norm(x, *norm)``, taken from the model's own module at
    each call."""

    __slots__ = ("eps", "module", "shape")

    def __init__(self, module: Any) -> None:
        self.module = module
        self.shape = tuple(module.weight.shape)
        self.eps = float(module.variance_epsilon)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.shape, self.module.weight, self.eps))


class Float32Head(nn.Linear):
    """Output head that computes logits in float32, whatever the dtype of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits in float32."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


@dataclass(frozen=True, slots=True)
class Adapted:
    """Linear layer with a low-rank adapter: ``base(x) + scale · B(A(x))`` (LoRA, arXiv 2106.09685, eq. 3)."""

    base: nn.Linear
    a: nn.Linear
    b: nn.Linear
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x)) * self.scale
        return y


@dataclass(frozen=True, slots=True)
class Dense:
    """Gated MLP (SwiGLU, arXiv 2002.05202, eq. 6)."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, h_TD: Tensor, routing: Routing | None) -> Tensor:
        return self.down(F.silu(self.gate(h_TD)) * self.up(h_TD))


@dataclass(frozen=True, slots=True)
class Layer:
    """Modules and sizes of one decoder block."""

    input_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    mlp_norm: Norm
    mlp: Dense | Sparse
    head_dim: int


RunBlock = Callable[[int, Callable[[Tensor], Tensor], Tensor], Tensor]
"""Function ``(index of the block, block, x_TD) -> block(x_TD)`` that makes the weights of the block available before it
calls the block."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts of a decoder: embedding, blocks, final norm, head, and the model's own rotary embedding."""

    embedding: nn.Embedding
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    run_block: RunBlock | None = None
    """Function that calls the blocks of a sharded model, which gathers the weights of a block for each call; None: the
    decoder calls the blocks itself."""

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        """Mixture-of-experts layers; empty in a dense model."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, Sparse))


_plans: WeakKeyDictionary[PreTrainedModel, Plan | None] = WeakKeyDictionary()


def plan_of(model: PreTrainedModel) -> Plan | None:
    """Return the parts of ``model``; None if the functional decoder would compute another function than the model's own
    forward."""
    if model not in _plans:
        _plans[model] = _plan(model) if _is_plain_decoder(model) else None
    return _plans[model]


def run_blocks_by(model: PreTrainedModel, run_block: RunBlock) -> None:
    """Make the functional decoder call each block of ``model`` through ``run_block``. The decoder must support the
    model."""
    plan = plan_of(model)
    assert plan is not None, "only the functional decoder can be told how to run its blocks"
    _plans[model] = replace(plan, run_block=run_block)


def forget_plan(model: PreTrainedModel) -> None:
    """Discard the cached plan of ``model``, because modules were replaced; the next use builds a new plan."""
    _plans.pop(model, None)


def _is_plain_decoder(model: PreTrainedModel) -> bool:
    config = model.config
    return (
        type(model) in (*_DENSE, *_SPARSE)
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in ROPE_TYPES
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and not (type(model) in _SPARSE and config.sliding_window)
        and not config.attention_dropout
        and all(_is_plain(m) for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "base_layer"))
    )


def _is_plain(module: Any) -> bool:
    """Return True if ``module`` is a linear layer without an adapter, or with one adapter that is plain LoRA (no
    variant such as DoRA) and is not merged."""
    if not hasattr(module, "base_layer"):
        return type(module) in (nn.Linear, Float32Head)
    plain = getattr(module, "lora_A", None) is not None and len(module.lora_A) == 1 and not module.lora_variant
    return plain and type(module.base_layer) is nn.Linear and not module.merged


def _plan(model: PreTrainedModel) -> Plan:
    config, decoder = model.config, model.model
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sparse_before = [0]
    for block in decoder.layers:
        sparse_before.append(sparse_before[-1] + hasattr(block.mlp, "experts"))
    return Plan(
        embedding=decoder.embed_tokens,
        rotary=decoder.rotary_emb,
        layers=tuple(_layer(block, head_dim, n) for block, n in zip(decoder.layers, sparse_before, strict=False)),
        final_norm=Norm(decoder.norm),
        head=model.lm_head if hasattr(model, "lm_head") else model.score,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )


def _layer(block: Any, head_dim: int, sparse_before: int) -> Layer:
    attention = block.self_attn
    return Layer(
        input_norm=Norm(block.input_layernorm),
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        q_norm=Norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=Norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        mlp_norm=Norm(block.post_attention_layernorm),
        mlp=_mlp(block.mlp, sparse_before),
        head_dim=head_dim,
    )


def _mlp(mlp: Any, sparse_before: int) -> Dense | Sparse:
    if not hasattr(mlp, "experts"):
        return Dense(_linear(mlp.gate_proj), _linear(mlp.up_proj), _linear(mlp.down_proj))
    return Sparse(
        number=sparse_before,
        router=mlp.gate,
        experts=mlp.experts,
        top_k=mlp.gate.top_k,
        normalise=getattr(mlp.gate, "norm_topk_prob", True),
    )


def _linear(module: Any) -> Linear:
    if not hasattr(module, "base_layer"):
        assert isinstance(module, nn.Linear)
        return module
    (name,) = module.lora_A
    return Adapted(module.base_layer, module.lora_A[name], module.lora_B[name], float(module.scaling[name]))
