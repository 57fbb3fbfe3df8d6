"""Decoder shared by trainer and sampler: a functional forward over the weights of Llama, Qwen and Mixtral modules.

The weights belong to the Hugging Face module and are used by reference. Linear layers and norms process the flat row of
tokens, so padding costs nothing there; only attention works on padded blocks.

Shape legend: T = tokens, D = model width, M = selected positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.shared.models.architecture import Layer, Plan, plan_of
from penstock.shared.models.attention import CausalBlocks, rotate
from penstock.shared.models.experts import Routes, Routing
from penstock.shared.models.packed import PackedTokens
from penstock.shared.models.temperature import tempered

__all__ = ["Attend", "decode", "hidden_states", "rope_at", "selected_logits", "selected_logprobs", "supports"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

BLOCK_TOKENS = 1536
"""Largest number of tokens that the CPU decodes at once. More tokens are decoded in blocks of sequences of similar
lengths, whose activations fit into the CPU's cache (a quarter faster)."""
MAX_LOGITS = 1 << 25
"""Largest number of logits in memory at once. If a batch has more, they are computed in chunks, which the backward pass
recomputes."""


def supports(model: PreTrainedModel) -> bool:
    """Return True if the functional decoder computes the same function as ``model``; other architectures use the
    module's own forward."""
    return plan_of(model) is not None


def hidden_states(model: PreTrainedModel, tokens: PackedTokens, routes: Routes | None = None) -> Tensor:
    """Return the final normalised hidden states [T, D] of each sequence under causal attention. Differentiable.

    ``routes`` selects and counts experts in a mixture of experts; ignored by other architectures.
    """
    plan = plan_of(model)
    if plan is None:
        padded_SLD: Tensor = _padded_forward(model.base_model, tokens).last_hidden_state
        return padded_SLD[_places(tokens)]
    one_pass = plan.run_block is not None or tokens.token_ids_T.device.type != "cpu"
    if one_pass or tokens.num_tokens <= BLOCK_TOKENS:  # ranks of a sharded model must call blocks equally often
        return _decode(plan, tokens, routes)
    blocks, place_T = tokens.blocks(BLOCK_TOKENS)
    sizes = [block.num_tokens for block in blocks]
    parts = [None] * len(blocks) if routes is None else routes.blocks(place_T, sizes)
    decoded = [_decode(plan, block, part) for block, part in zip(blocks, parts, strict=True)]
    return torch.cat(decoded).index_select(0, place_T)


def _decode(plan: Plan, tokens: PackedTokens, routes: Routes | None) -> Tensor:
    blocks = CausalBlocks.of(tokens)
    rope = rope_at(plan, tokens.position_ids_T)
    return decode(plan, tokens.token_ids_T, rope, lambda _, q, k, v: blocks.attend(q, k, v), routes)


def rope_at(plan: Plan, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, d] of the model's own rotary embedding at ``position_ids_T``."""
    cos_1Td, sin_1Td = plan.rotary(plan.embedding.weight, position_ids_T[None])
    return cos_1Td[0, :, None], sin_1Td[0, :, None]


def decode(
    plan: Plan, token_ids_T: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, routing: Routing | None = None
) -> Tensor:
    """Return the final normalised hidden states [T, D]; ``attend`` defines which tokens a token attends to.

    Args:
        attend: called as ``attend(layer index, q_THd, k_TKd, v_TKd)`` with rotated q and k; returns [T, H, d].
        routing: selects the experts of tokens; None: the most likely ones.
    """
    x_TD = F.embedding(token_ids_T, plan.embedding.weight, plan.embedding.padding_idx)
    for index, layer in enumerate(plan.layers):
        block = partial(_block, layer, rope, partial(attend, index), routing)
        x_TD = block(x_TD) if plan.run_block is None else plan.run_block(index, block, x_TD)
    return F.rms_norm(x_TD, *plan.final_norm)


def _block(
    layer: Layer,
    rope: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    routing: Routing | None,
    x_TD: Tensor,
) -> Tensor:
    q, k, v = _queries_keys_values(layer, F.rms_norm(x_TD, *layer.input_norm), rope)
    x_TD = x_TD + layer.o(attend(q, k, v).flatten(1))
    return x_TD + layer.mlp(F.rms_norm(x_TD, *layer.mlp_norm), routing)


def selected_logprobs(
    model: PreTrainedModel,
    tokens: PackedTokens,
    select_M: Tensor,
    targets_M: Tensor,
    *,
    temperature: float | Tensor,
    entropy: bool,
    routes: Routes | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of ``targets_M`` at the flat positions ``select_M``, and the entropies at these
    positions.

    The logits at position t score token t + 1 of the same sequence: ``select_M`` holds t. The head is applied only at
    the selected positions. Log-probs are of logits / temperature, which is one number or float32 [M]; see ``tempered``.

    Returns:
        logprobs_M in float32, and entropy_M in nats of the same distribution if ``entropy`` is set, else None.
    """
    if plan_of(model) is None:
        logits_TV = _padded_forward(model, tokens).logits[_places(tokens)]
        return _score(logits_TV[select_M], targets_M, temperature, entropy)
    hidden_MD = hidden_states(model, tokens, routes).index_select(0, select_M)
    head = model.get_output_embeddings()
    rows = max(1, MAX_LOGITS // head.weight.shape[0])
    if len(targets_M) <= rows:
        return _score(head(hidden_MD), targets_M, temperature, entropy)

    def chunk(hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        own = temperature[places] if isinstance(temperature, Tensor) else temperature
        return _score(head(hidden), targets_M[places], own, entropy)

    places_M = torch.arange(len(targets_M), device=targets_M.device)
    chunks = zip(torch.split(hidden_MD, rows), torch.split(places_M, rows), strict=True)
    scores = [checkpoint(chunk, hidden, places, use_reentrant=False) for hidden, places in chunks]
    logprobs_M = torch.cat([logprobs for logprobs, _ in scores])
    return logprobs_M, torch.cat([e for _, e in scores]) if entropy else None


def selected_logits(
    model: PreTrainedModel, tokens: PackedTokens, select_M: Tensor, routes: Routes | None = None
) -> Callable[[Tensor], Tensor]:
    """Run one forward pass. Return a function that takes n indices into ``select_M`` and computes the logits [n, V] at
    these positions.

    Logits exist only during the call of that function: callers with many positions process them in chunks.
    """
    if plan_of(model) is None:
        logits_MV = _padded_forward(model, tokens).logits[_places(tokens)][select_M]
        return lambda places: logits_MV[places]
    hidden_MD = hidden_states(model, tokens, routes).index_select(0, select_M)
    head = model.get_output_embeddings()
    return lambda places: head(hidden_MD[places])


def _score(
    logits_MV: Tensor, targets_M: Tensor, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logprobs_MV = torch.log_softmax(tempered(logits_MV, temperature), -1)
    logprobs_M = logprobs_MV.gather(-1, targets_M[:, None])[:, 0]
    return logprobs_M, -(logprobs_MV.exp() * logprobs_MV).sum(-1) if entropy else None


def _queries_keys_values(layer: Layer, h_TD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    heads = (h_TD.shape[0], -1, layer.head_dim)
    q_THd, k_TKd, v_TKd = layer.q(h_TD).view(heads), layer.k(h_TD).view(heads), layer.v(h_TD).view(heads)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_THd, k_TKd = F.rms_norm(q_THd, *layer.q_norm), F.rms_norm(k_TKd, *layer.k_norm)
    return rotate(q_THd, *rope), rotate(k_TKd, *rope), v_TKd


def _padded_forward(module: torch.nn.Module, tokens: PackedTokens) -> Any:
    """Return the output of the module's own forward on right-padded sequences."""
    ids_SL = torch.nn.utils.rnn.pad_sequence(
        list(torch.split(tokens.token_ids_T, list(tokens.lengths))), batch_first=True
    )
    positions_L = torch.arange(tokens.max_seqlen, device=ids_SL.device)
    attended_SL = positions_L < tokens.cu_seqlens_S1.diff()[:, None]
    return module(input_ids=ids_SL, attention_mask=attended_SL.long(), use_cache=False)


def _places(tokens: PackedTokens) -> tuple[Tensor, Tensor]:
    """Return, for each flat token, the index of the packed sequence that has the token, and its position there."""
    sequences = torch.arange(len(tokens.lengths), device=tokens.token_ids_T.device)
    return torch.repeat_interleave(sequences, tokens.cu_seqlens_S1.diff()), tokens.position_ids_T
