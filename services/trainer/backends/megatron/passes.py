"""Forward and backward passes over the ranks of one copy of a model: scores, losses and router loads.

Shape legend: M = scored tokens of a microbatch, N = those on this context-parallel rank, D = model width, E = experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.backends.base import LossFunction, Role, Scores, Seconds
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.services.trainer.backends.megatron.model import MegatronModel
from penstock.services.trainer.backends.megatron.pipeline import run_stages, with_loss
from penstock.services.trainer.backends.megatron.scoring import Selected, States, policy_scores, values
from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.batch.routers import Routers
from penstock.shared.models.experts import RouterLoad, Routes
from penstock.shared.models.packed import PackedTokens

__all__ = ["Passes", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One microbatch and the scores to compute for it.

    Attributes:
        loss: function to differentiate; None: this rank only takes part in the collectives, and its gradients are 0.
        entropy, kl: see ``Backend.accumulate``; ``kl`` implies ``entropy``.
    """

    batch: Microbatch
    loss: LossFunction | None
    entropy: bool = False
    kl: bool = False

    @property
    def num_scores(self) -> int:
        """Number of scores per token."""
        return 1 + self.entropy + self.kl


class Passes:
    """Runs one trained model and its reference on ``device``, and adds the time spent to ``seconds``."""

    def __init__(self, groups: Groups, device: torch.device, role: Role, routers: Routers | None) -> None:
        self._groups, self._device, self._role, self._routers = groups, device, role, routers
        self.seconds = Seconds()

    def accumulate(
        self,
        works: Sequence[Work],
        model: MegatronModel,
        reference: MegatronModel | None,
        after_backward: Callable[[], None],
    ) -> None:
        """Accumulate the gradients of the losses of ``works``. Every stage calls each loss.

        See ``run_stages`` for the order.
        """
        began, forward_before = self._now(), self.seconds.forward
        theirs = self._reference_states(works, reference)
        loads = [RouterLoad() if self._routers is not None and work.loss is not None else None for work in works]
        counted: dict[int, RouterLoad] = {}
        found: dict[int, Scores] = {}

        def forward(number: int) -> Tensor:
            start, work, load = self._now(), works[number], loads[number]
            out = model.run_stage(work.batch.tokens, self._routes(work.batch, load))
            penalty = self._penalty(load)
            if load is not None:
                counted[number] = _detached_load(load)
            if model.is_last:
                scores = self._scores(work, model, model.final(out), theirs.get(number))
                found[number] = _detached(scores)
                out = work.loss(scores) if work.loss is not None else scores.values_M.sum()
                out = out if penalty is None else out + penalty
            elif penalty is not None:
                out = with_loss(out, penalty)
            self.seconds.forward += self._now() - start
            return out

        tokens = [work.batch.tokens for work in works]
        run_stages(model, self._groups, self._device, tokens, forward, after_backward=after_backward)
        for number, work in enumerate(works):
            if work.loss is not None:
                self._share_scores(work, found.get(number))
            if self._routers is not None and number in counted:
                self._routers.watch(self._summed(counted[number]))
        self.seconds.backward += self._now() - began - (self.seconds.forward - forward_before)

    @torch.no_grad()
    def score(self, work: Work, model: MegatronModel, *, replay: bool) -> Tensor:
        """Return log-probs or values, float32 [M], the same on all ranks that share the microbatch."""
        start = self._now()
        found: list[Tensor] = []

        def forward(_: int) -> Tensor:
            out = model.run_stage(work.batch.tokens, self._routes(work.batch) if replay else None)
            if model.is_last:
                found.append(self._scores(work, model, model.final(out), None).values_M)
            return out

        run_stages(model, self._groups, self._device, [work.batch.tokens], forward)
        scores_M = (
            found[0] if found else torch.empty(len(work.batch.select_M), device=self._device, dtype=torch.float32)
        )
        self._from_last_stage(scores_M)
        self.seconds.forward += self._now() - start
        return scores_M

    @torch.no_grad()
    def route(self, tokens: PackedTokens, model: MegatronModel) -> RouterLoad:
        """Return the expert choices that the routers of all stages make for ``tokens``."""
        start, load = self._now(), RouterLoad()
        run_stages(model, self._groups, self._device, [tokens], lambda _: model.run_stage(tokens, Routes(load=load)))
        self.seconds.forward += self._now() - start
        return self._summed(load)

    def _routes(self, batch: Microbatch, load: RouterLoad | None = None) -> Routes | None:
        """Return the routes for the trained policy; None if the policy has no routers."""
        return Routes(batch.experts_TNK, load) if self._routers is not None else None

    def _scores(self, work: Work, model: MegatronModel, hidden_RD: Tensor, reference: States | None) -> Scores:
        here = Selected.of(model, self._groups, work.batch)
        states = States(model, hidden_RD[here.places_N])
        if self._role == "critic":
            return Scores(values(here, states))
        return policy_scores(here, self._groups, states, entropy=work.entropy, reference=reference)

    @torch.no_grad()
    def _reference_states(self, works: Sequence[Work], reference: MegatronModel | None) -> dict[int, States]:
        """Return the reference's final states for each work with ``kl``, by index in ``works``.

        Only the last stage returns any. The reference's own routers choose the experts.
        """
        numbers = [number for number, work in enumerate(works) if work.kl]
        found: dict[int, States] = {}
        if not numbers:
            return found
        assert reference is not None, "built without keep_reference"
        batches = [works[number].batch for number in numbers]

        def forward(index: int) -> Tensor:
            start, batch = self._now(), batches[index]
            out = reference.run_stage(batch.tokens)
            if reference.is_last:
                here = Selected.of(reference, self._groups, batch)
                found[numbers[index]] = States(reference, reference.final(out)[here.places_N])
            self.seconds.forward += self._now() - start
            return out

        run_stages(reference, self._groups, self._device, [batch.tokens for batch in batches], forward)
        return found

    @torch.no_grad()
    def _share_scores(self, work: Work, scores: Scores | None) -> None:
        """Send ``scores`` from the last stage to the earlier stages, and call the loss on the earlier stages, too.

        The loss collects metrics, which must be the same on all ranks of a copy.
        """
        stage, stages = self._groups.in_pipeline()
        if stages == 1:
            return
        stacked = torch.empty(work.num_scores, len(work.batch.select_M), device=self._device, dtype=torch.float32)
        if scores is not None:
            stacked = torch.stack([row for row in (scores.values_M, scores.entropy_M, scores.kl_M) if row is not None])
        self._from_last_stage(stacked)
        if stage < stages - 1 and work.loss is not None:
            rows = iter(stacked)
            work.loss(Scores(next(rows), next(rows) if work.entropy else None, next(rows) if work.kl else None))

    def _from_last_stage(self, tensor: Tensor) -> None:
        self._groups.from_stage(tensor, self._groups.pipeline.size() - 1)

    def _penalty(self, load: RouterLoad | None) -> Tensor | None:
        """Return this rank's share of this stage's load-balancing loss. Tensor-parallel ranks have equal shares."""
        if self._routers is None or load is None or not load.probs:
            return None
        return self._routers.penalty(load) / self._groups.tensor.size()

    def _summed(self, load: RouterLoad) -> RouterLoad:
        """Return the load summed over context-parallel ranks (tokens) and stages (layers), without gradient."""
        groups = [group for group in (self._groups.context, self._groups.pipeline) if group.size() > 1]
        if not groups:
            return load
        assert self._routers is not None
        experts = self._routers.num_experts
        sums = torch.zeros(self._routers.num_layers, 2 * experts + 2, dtype=torch.float64, device=self._device)
        for layer, chosen_E in load.chosen.items():
            sums[layer, :experts], sums[layer, experts:-2] = chosen_E, load.probs[layer].detach()
            sums[layer, -2] = load.entropy[layer]
        sums[0, -1] = load.num_tokens
        for group in groups:
            dist.all_reduce(sums, group=group)
        total = RouterLoad()
        total.num_tokens = int(sums[0, -1])
        for layer, row in enumerate(sums):
            total.chosen[layer], total.probs[layer] = row[:experts].long(), row[experts:-2].float()
            total.entropy[layer] = row[-2]
        return total

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _detached_load(load: RouterLoad) -> RouterLoad:
    """Return a copy of ``load`` as it is now, without gradient. If the backward pass recomputes layers, it adds their
    counts to ``load`` a second time, but not to the copy."""
    now = RouterLoad()
    now.num_tokens, now.chosen, now.entropy = load.num_tokens, dict(load.chosen), dict(load.entropy)
    now.probs = {layer: probs_E.detach() for layer, probs_E in load.probs.items()}
    return now


def _detached(scores: Scores) -> Scores:
    entropy_M, kl_M = (None if row is None else row.detach() for row in (scores.entropy_M, scores.kl_M))
    return Scores(scores.values_M.detach(), entropy_M, kl_M)
