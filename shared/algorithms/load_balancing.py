"""Auxiliary loss that balances the load of the experts of a mixture.

Shape legend: E = experts.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["load_balancing_loss"]


def load_balancing_loss(probs_E: Tensor, chosen_E: Tensor, *, num_tokens: int) -> Tensor:
    """``E · Σ_i f_i P_i``, the load-balancing loss of one layer with E experts (Switch Transformer, arXiv 2101.03961,
    eq. 4-6); 1 for an even load.

    ``f_i`` is the share of all assignments that went to expert i, ``P_i`` its mean probability. The paper has one
    expert per token; with K of them there are K times as many assignments as tokens, and ``Σ f_i = 1`` for any K. Both
    are means over the whole batch, because otherwise every microbatch would have to be balanced by itself (arXiv
    2501.11873, section 3): the sum of these values over microbatches, each with the counts of the batch, is the value
    of the batch. The gradient flows only through the probabilities.

    Args:
        probs_E: sum of the router's probabilities over the tokens of this microbatch.
        chosen_E: number of assignments of each expert in the whole batch.
        num_tokens: tokens of the whole batch, including prompts but not padding.
    """
    share_E = chosen_E.detach().to(probs_E.dtype) / chosen_E.sum()
    return probs_E.shape[0] * (share_E * probs_E).sum() / num_tokens
