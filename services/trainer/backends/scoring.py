"""Scores of the tokens of a microbatch: log-probs, entropy and KL of a policy, or values of a critic. The forward pass
is the decoder in ``shared.models.decoder``, which Penstock's own engine runs too.

Shape legend: M = scored tokens of a microbatch, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import Role
from penstock.services.trainer.batch.packing import Microbatch
from penstock.shared.models.critic import selected_values
from penstock.shared.models.decoder import MAX_LOGITS, selected_logits, selected_logprobs
from penstock.shared.models.experts import Routes
from penstock.shared.models.packed import PackedTokens
from penstock.shared.models.temperature import tempered

__all__ = ["ScoreTensors", "score_tensors"]

ScoreTensors = tuple[Tensor, Tensor | None, Tensor | None]
"""The fields of ``Scores`` in order: values, entropy and KL, each [M]; None for one that was not computed."""
_ExactScores = tuple[Tensor, Tensor, Tensor]
"""(log-probs, entropy in nats, KL(policy || reference) in nats), each float32 [M]."""


def score_tensors(
    model: PreTrainedModel,
    batch: Microbatch,
    *,
    role: Role,
    entropy: bool = False,
    reference: PreTrainedModel | None = None,
    routes: Routes | None = None,
) -> ScoreTensors:
    """Return the scores of ``batch``: log-probs of a policy or values of a critic, as ``role`` says.

    Log-probs are of logits / temperature, with the temperature of each token's row.

    Args:
        batch: on the device of ``model``.
        entropy: also return the exact entropy.
        reference: if given, also return the exact entropy and the exact KL(policy || reference).
        routes: experts that each token of a mixture visits; None: the routers of ``model`` decide.
    """
    if role == "critic":
        return selected_values(model, batch.tokens, batch.select_M), None, None
    at = (batch.tokens, batch.select_M, batch.targets_M)
    if reference is not None:
        return _exact_scores(model, reference, *at, temperature=batch.temperature, routes=routes)
    return *selected_logprobs(model, *at, temperature=batch.temperature, entropy=entropy, routes=routes), None


def _exact_scores(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokens: PackedTokens,
    select_M: Tensor,
    targets_M: Tensor,
    *,
    temperature: float | Tensor,
    routes: Routes | None = None,
) -> _ExactScores:
    """Return log-probs and entropy as ``selected_logprobs`` does, and the KL ``Σ_v pi(v) log(pi(v) / pi_ref(v))``.

    Both distributions are of logits / temperature, which is one number or float32 [M]. No gradient flows through
    ``reference``. ``routes`` are the policy's; the reference selects its own experts.
    """
    with torch.no_grad():
        theirs = selected_logits(reference, tokens, select_M)
    ours = selected_logits(policy, tokens, select_M, routes)

    def chunk(places: Tensor) -> _ExactScores:
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
