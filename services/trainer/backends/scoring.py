"""Scores of the tokens of a microbatch, by the decoder that trainer and sampler share.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import Role
from penstock.services.trainer.batch.packing import Microbatch
from penstock.shared.models.critic import selected_values
from penstock.shared.models.decoder import selected_logprobs
from penstock.shared.models.divergence import exact_scores
from penstock.shared.models.experts import Routes

__all__ = ["ScoreTensors", "score_tensors"]

ScoreTensors = tuple[Tensor, Tensor | None, Tensor | None]
"""The fields of ``Scores`` in order: values, entropy and KL, each [M]; None for one that was not computed."""


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
        return exact_scores(model, reference, *at, temperature=batch.temperature, routes=routes)
    return *selected_logprobs(model, *at, temperature=batch.temperature, entropy=entropy, routes=routes), None
