"""Rollout worker with a defect: it serves the first weights forever, under the label of each new version."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.services.rollout.engines.updates import WeightUpdate
from penstock.services.rollout.service import RolloutService
from penstock.shared.runtime.service import run_service

first: dict[str, Tensor] = {}
take = WeightUpdate.stage


def stage(update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
    if not first:
        first.update({name: tensor.clone() for name, tensor in tensors.items()})
    take(update, first)


if __name__ == "__main__":
    WeightUpdate.stage = stage  # type: ignore[method-assign]
    run_service(RolloutService)
