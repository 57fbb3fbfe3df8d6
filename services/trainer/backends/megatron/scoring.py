"""Log-probs, entropy and divergence with the vocabulary divided over tensor-parallel ranks.

No rank holds a whole row of logits: maximum, normaliser and sums over the vocabulary are reduced over the ranks
instead.

Shape legend: M = selected positions, N = those on this context-parallel rank, D = model width, W = rows of the
vocabulary on this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.services.trainer.backends.base import Scores
from penstock.services.trainer.backends.megatron.core import mappings
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.services.trainer.backends.megatron.model import MegatronModel
from penstock.services.trainer.batch.packing import Microbatch
from penstock.shared.models.decoder import MAX_LOGITS
from penstock.shared.models.temperature import tempered

__all__ = ["Selected", "States", "policy_scores", "values", "vocab_parallel_log_softmax"]

Normalised = Callable[[Tensor], Tensor]
"""Function that maps n indices into the N selected positions to log-probs [n, W] of this rank's vocabulary rows."""


@dataclass(frozen=True, slots=True)
class States:
    """Final hidden states [N, D] at the selected positions, and the model whose head this rank holds."""

    model: MegatronModel
    hidden_ND: Tensor


def policy_scores(
    here: Selected,
    groups: Groups,
    policy: States,
    *,
    entropy: bool = False,
    reference: States | None = None,
) -> Scores:
    """Return log-probs of the targets, and, if ``reference`` is given, the exact KL(policy || reference).

    The result has the exact entropy if ``entropy`` is set or a reference is given. All scores are float32 [M], of
    logits / temperature with the temperature of each token's row. All ranks that share the microbatch's last stage get
    the same scores; each rank's gradient is that of its own part.
    """
    model = policy.model
    log_softmax = _log_softmax_of(policy, groups, here)
    theirs: Normalised | None = None
    if reference is not None:
        with torch.no_grad():
            theirs = _log_softmax_of(reference, groups, here)

    def chunk(places: Tensor) -> tuple[Tensor, ...]:
        logprobs_NW = log_softmax(places)
        rows = [_pick(logprobs_NW, here.targets_N[places] - model.first_of_vocabulary)]
        if entropy or theirs is not None:
            probs_NW = logprobs_NW.exp()
            rows.append(-(probs_NW * logprobs_NW).sum(-1))
        if theirs is not None:
            with torch.no_grad():
                reference_NW = theirs(places)
            rows.append((probs_NW * (logprobs_NW - reference_NW)).sum(-1))
        summed: Tensor = mappings.reduce_from_tensor_model_parallel_region(torch.stack(rows), group=groups.tensor)
        return tuple(summed)

    size = max(1, MAX_LOGITS // model.vocabulary_per_rank)
    parts = _in_chunks(chunk, len(here.places_N), size, here.places_N.device)
    return Scores(*(here.everywhere(part) for part in parts))


def values(here: Selected, critic: States) -> Tensor:
    """Return values of the states before the targets, float32 [M]; equal on all ranks that share the last stage."""
    return here.everywhere(critic.model.gpt.value_head(critic.hidden_ND)[:, 0].float())


def vocab_parallel_log_softmax(logits_NW: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's columns of ``log_softmax`` over the columns of all ranks of ``group``. Differentiable."""
    top_N = logits_NW.detach().amax(-1)
    dist.all_reduce(top_N, dist.ReduceOp.MAX, group=group)
    shifted_NW = logits_NW - top_N[:, None]
    normaliser_N = mappings.reduce_from_tensor_model_parallel_region(shifted_NW.exp().sum(-1), group=group)
    # Every column of every rank depends on the normaliser, so its gradient is the sum over the columns of all ranks.
    log_normaliser_N = mappings.copy_to_tensor_model_parallel_region(normaliser_N.log(), group=group)
    log_softmax_NW: Tensor = shifted_NW - log_normaliser_N[:, None]
    return log_softmax_NW


@dataclass(frozen=True, slots=True)
class Selected:
    """The subset of the M selected positions that lies on this context-parallel rank."""

    groups: Groups
    number: int
    indices_N: Tensor
    """Indices of this rank's selected positions among all M selected positions."""
    places_N: Tensor
    """Indices of this rank's selected positions among this rank's tokens."""
    targets_N: Tensor
    temperature_N: Tensor | None
    """Temperatures; None if all are 1."""

    @classmethod
    def of(cls, model: MegatronModel, groups: Groups, batch: Microbatch) -> Selected:
        rank, _ = groups.in_context()
        run = model.tokens_per_rank(batch.tokens)
        indices_N = (batch.select_M // run == rank).nonzero()[:, 0]
        places_N = batch.select_M[indices_N] - rank * run
        temperature_N = None if batch.temperature_M is None else batch.temperature_M[indices_N]
        return cls(groups, len(batch.select_M), indices_N, places_N, batch.targets_M[indices_N], temperature_N)

    def everywhere(self, own_N: Tensor) -> Tensor:
        """Return the values of all M positions: each context-parallel rank contributes those of its own positions."""
        whole_M = own_N.new_zeros(self.number).index_put((self.indices_N,), own_N)
        summed: Tensor = mappings.reduce_from_tensor_model_parallel_region(whole_M, group=self.groups.context)
        return summed


def _log_softmax_of(states: States, groups: Groups, here: Selected) -> Normalised:
    hidden_ND = mappings.copy_to_tensor_model_parallel_region(states.hidden_ND, group=groups.tensor)
    head_WD = states.model.head_weight()

    def of(places: Tensor) -> Tensor:
        logits_NW = F.linear(hidden_ND[places].to(head_WD.dtype), head_WD)
        temperature = 1.0 if here.temperature_N is None else here.temperature_N[places]
        return vocab_parallel_log_softmax(tempered(logits_NW, temperature), groups.tensor)

    return of


def _pick(logprobs_NW: Tensor, columns_N: Tensor) -> Tensor:
    """Return the log-prob at each row's column in ``columns_N``; 0 if the column belongs to another rank."""
    width = logprobs_NW.shape[1]
    picked_N = logprobs_NW.gather(1, columns_N.clamp(0, width - 1)[:, None])[:, 0]
    return torch.where((columns_N >= 0) & (columns_N < width), picked_N, 0.0)


def _in_chunks(
    chunk: Callable[[Tensor], tuple[Tensor, ...]], number: int, size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Apply ``chunk`` to the indices below ``number``, at most ``size`` at once, and return the concatenated results.

    Logits of several chunks never coexist.
    """
    places_N = torch.arange(number, device=device)
    if number <= size:
        return chunk(places_N)
    parts = [
        checkpoint(chunk, places, use_reentrant=False, preserve_rng_state=False)
        for places in torch.split(places_N, size)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
