"""Our formulas against the outputs of another implementation (verl 0.9.1) on the same inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.shared.algorithms.advantages import grpo_advantages
from penstock.shared.algorithms.aggregation import aggregate
from penstock.shared.algorithms.kl import kl_estimate
from penstock.shared.algorithms.policy_loss import clipped_ratio_loss, log_ratio


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "grpo_verl.json").read_text())


def scored(golden: dict[str, Any], name: str) -> torch.Tensor:
    """The values of ``name`` where the mask is 1, flat."""
    return torch.tensor(golden[name])[torch.tensor(golden["mask"]).bool()]


def lengths(golden: dict[str, Any]) -> torch.Tensor:
    mask = torch.tensor(golden["mask"])
    return mask.sum(1, keepdim=True).expand_as(mask)[mask.bool()]


@pytest.mark.parametrize(("name", "scale_by_std"), [("grpo", True), ("dr_grpo", False)])
def test_advantages(golden: dict[str, Any], name: str, scale_by_std: bool) -> None:
    rewards = torch.tensor(golden["rewards"])
    ours = grpo_advantages(rewards, torch.tensor(golden["group"]), torch.ones(8) > 0, scale_by_std=scale_by_std)
    theirs = torch.tensor(golden[name])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_clipped_loss_and_clip_fraction(golden: dict[str, Any]) -> None:
    loss = clipped_ratio_loss(
        scored(golden, "new"), scored(golden, "old"), scored(golden, "grpo"), clip_low=0.2, clip_high=0.28
    )
    assert loss.loss_M.mean().item() == pytest.approx(golden["vanilla"]["loss"], abs=1e-6)
    clipped = (loss.clipped_low_M | loss.clipped_high_M).float().mean().item()
    assert clipped == pytest.approx(golden["vanilla"]["clip_fraction"], abs=1e-6)


def test_log_ratio(golden: dict[str, Any]) -> None:
    mean = -log_ratio(scored(golden, "new"), scored(golden, "old")).mean().item()
    assert mean == pytest.approx(golden["vanilla"]["kl_k1"], abs=1e-6)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_aggregation(golden: dict[str, Any], mode: Any) -> None:
    values = scored(golden, "new")
    ours = aggregate(mode, values, lengths(golden), num_tokens=len(values), num_sequences=8, horizon=6)
    assert ours.item() == pytest.approx(golden["aggregation"][mode], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(golden: dict[str, Any], estimator: Any) -> None:
    ours = kl_estimate(estimator, torch.tensor(golden["new"]), torch.tensor(golden["ref"]))
    torch.testing.assert_close(ours, torch.tensor(golden["kl"][estimator]), rtol=0, atol=1e-6)
