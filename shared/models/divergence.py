"""Exact divergence between two policies over the whole vocabulary.

Shape legend: M = selected positions, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.shared.models.decoder import MAX_LOGITS, selected_logits
from penstock.shared.models.experts import Routes
from penstock.shared.models.packed import PackedTokens
from penstock.shared.models.temperature import tempered

__all__ = ["ExactScores", "exact_scores"]

ExactScores = tuple[Tensor, Tensor, Tensor]
"""(log-probs, entropy in nats, KL(policy || reference) in nats), each float32 [M]."""


def exact_scores(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokens: PackedTokens,
    select_M: Tensor,
    targets_M: Tensor,
    *,
    temperature: float | Tensor,
    routes: Routes | None = None,
) -> ExactScores:
    """Return log-probs and entropy as ``selected_logprobs`` does, and the KL ``Σ_v pi(v) log(pi(v) / pi_ref(v))``.

    Both distributions are of logits / temperature, which is one number or float32 [M]. No gradient flows through
    ``reference``. ``routes`` are the policy's; the reference selects its own experts.
    """
    with torch.no_grad():
        theirs = selected_logits(reference, tokens, select_M)
    ours = selected_logits(policy, tokens, select_M, routes)

    def chunk(places: Tensor) -> ExactScores:
        own = temperature[places] if isinstance(temperature, Tensor) else temperature
        logprobs_MV = torch.log_softmax(tempered(ours(places), own), -1)
        with torch.no_grad():
            reference_MV = torch.log_softmax(tempered(theirs(places), own), -1)
        probs_MV = logprobs_MV.exp()
        return (
            logprobs_MV.gather(-1, targets_M[places][:, None])[:, 0],
            -(probs_MV * logprobs_MV).sum(-1),
            (probs_MV * (logprobs_MV - reference_MV)).sum(-1),
        )

    rows = max(1, MAX_LOGITS // policy.get_output_embeddings().weight.shape[0])
    every_M = torch.arange(len(select_M), device=select_M.device)
    if len(every_M) <= rows:
        return chunk(every_M)
    parts = [checkpoint(chunk, places, use_reentrant=False) for places in torch.split(every_M, rows)]
    logprobs, entropies, divergences = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(divergences)
