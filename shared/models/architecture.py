"""Which modules of a Hugging Face model play which part: the table that the functional decoder walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

__all__ = ["Layer", "Norm", "Plan", "plan_of"]

_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position alone; `dynamic` and `longrope` also look at the length."""
_FAMILIES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class Norm:
    """Arguments of ``F.rms_norm`` after the input, by reference: ``F.rms_norm(x, *norm)``."""

    __slots__ = ("eps", "module", "shape")

    def __init__(self, module: Any) -> None:
        self.module = module
        self.shape = tuple(module.weight.shape)
        self.eps = float(module.variance_epsilon)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.shape, self.module.weight, self.eps))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder block."""

    input_norm: Norm
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
    mlp_norm: Norm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_dim: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A dense decoder: embedding, blocks, final norm, head, and the model's own rotary embedding."""

    embedding: nn.Embedding
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int


_plans: WeakKeyDictionary[PreTrainedModel, Plan | None] = WeakKeyDictionary()


def plan_of(model: PreTrainedModel) -> Plan | None:
    """The parts of ``model``, or None where the functional decoder would not compute the same function."""
    if model not in _plans:
        _plans[model] = _plan(model) if _is_plain_decoder(model) else None
    return _plans[model]


def _is_plain_decoder(model: PreTrainedModel) -> bool:
    config = model.config
    return (
        type(model) in _FAMILIES
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _ROPE_TYPES
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and not config.attention_dropout
        and all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "base_layer"))
    )


def _plan(model: PreTrainedModel) -> Plan:
    config, decoder = model.config, model.model
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Plan(
        embedding=decoder.embed_tokens,
        rotary=decoder.rotary_emb,
        layers=tuple(_layer(block, head_dim) for block in decoder.layers),
        final_norm=Norm(decoder.norm),
        head=model.lm_head,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )


def _layer(block: Any, head_dim: int) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    return Layer(
        input_norm=Norm(block.input_layernorm),
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        o=attention.o_proj,
        q_norm=Norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=Norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        mlp_norm=Norm(block.post_attention_layernorm),
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        head_dim=head_dim,
    )
