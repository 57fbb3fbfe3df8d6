"""Our formulas against the outputs of another implementation (verl 0.9.1) on the same inputs.

The outputs were computed in float32. In float64 ours agree to 1e-6; in float32 to 2e-6: sums of up to 48 numbers of
size up to 5, each rounded to 2^-24 of its size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.shared.algorithms import advantages, importance
from penstock.shared.algorithms.aggregation import constant, sequence_mean, token_mean
from penstock.shared.algorithms.cispo import cispo_loss
from penstock.shared.algorithms.credit import at_last_token
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.gspo import gspo_loss
from penstock.shared.algorithms.kl import k1, k2, k3
from penstock.shared.algorithms.policy_loss import (
    PolicyLoss,
    dual_clipped_ratio_loss,
    log_ratio,
    policy_gradient_loss,
    weighted,
)
from penstock.shared.algorithms.returns import discounted_returns
from penstock.shared.algorithms.statistics import moments, whiten
from penstock.shared.algorithms.trust_region import dppo_loss, gmpo_loss, sapo_loss

GOLDEN = json.loads((Path(__file__).parent / "verl.json").read_text())
MASK = torch.tensor(GOLDEN["inputs"]["mask"]).bool()
LENGTHS = MASK.sum(1)
ROWS = torch.repeat_interleave(torch.arange(8), LENGTHS)
CU_SEQLENS = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
EVERY = torch.ones(len(ROWS), dtype=torch.bool)
GROUPS = torch.tensor(GOLDEN["inputs"]["index"])
VALID = torch.ones(8, dtype=torch.bool)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def scored(values: list[list[float]], dtype: torch.dtype) -> Tensor:
    """Return the values where the mask is 1, as a flat tensor."""
    return torch.tensor(values, dtype=dtype)[MASK]


def given(name: str, dtype: torch.dtype) -> Tensor:
    return scored(GOLDEN["inputs"][name], dtype)


def trajectory_rewards(dtype: torch.dtype) -> Tensor:
    return torch.tensor(GOLDEN["inputs"]["token_level_rewards"], dtype=dtype).sum(1)


def assert_same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    bound = 1e-6 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=bound)


def reinforce_pp(dtype: torch.dtype) -> Tensor:
    rewards_T = at_last_token(trajectory_rewards(dtype), EVERY, CU_SEQLENS)
    returns_T = discounted_returns(rewards_T, EVERY, CU_SEQLENS, gamma=1.0)
    return whiten(returns_T, EVERY, moments(returns_T, EVERY))


OF_TRAJECTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": lambda r: advantages.grpo_advantages(r, GROUPS, VALID, scale_by_std=True),
    "dr_grpo": lambda r: advantages.grpo_advantages(r, GROUPS, VALID, scale_by_std=False),
    "rloo": lambda r: advantages.rloo_advantages(r, GROUPS, VALID),
    "reinforce_pp_baseline": lambda r: advantages.reinforce_pp_baseline_advantages(r, GROUPS, VALID, LENGTHS),
}


def test_every_advantage_is_covered() -> None:
    assert set(GOLDEN["advantages"]) == {*OF_TRAJECTORIES, "reinforce_pp"}


@pytest.mark.parametrize("name", OF_TRAJECTORIES)
def test_advantages_of_trajectories(name: str, dtype: torch.dtype) -> None:
    ours = OF_TRAJECTORIES[name](trajectory_rewards(dtype))[ROWS]
    assert_same(ours, scored(GOLDEN["advantages"][name], dtype), dtype)


def test_reinforce_pp(dtype: torch.dtype) -> None:
    assert_same(reinforce_pp(dtype), scored(GOLDEN["advantages"]["reinforce_pp"], dtype), dtype)


def test_gae(dtype: torch.dtype) -> None:
    """verl whitens its advantages, but not its returns."""
    theirs = GOLDEN["gae"]
    advantages_T, returns_T = gae(
        given("token_level_rewards", dtype),
        given("values", dtype),
        EVERY,
        CU_SEQLENS,
        gamma=theirs["gamma"],
        lam=theirs["lam"],
        bootstrap_B=torch.zeros(8),
    )
    assert_same(returns_T, scored(theirs["returns"], dtype), dtype)
    ours = whiten(advantages_T, EVERY, moments(advantages_T, EVERY))
    assert_same(ours, scored(theirs["advantages"], dtype), dtype)


def test_aggregation(dtype: torch.dtype) -> None:
    values = given("new", dtype)
    ours = {
        "token-mean": token_mean(values, num_tokens=len(values)),
        "seq-mean-token-sum": constant(values, num_sequences=8, horizon=1),
        "seq-mean-token-mean": sequence_mean(values, LENGTHS[ROWS], num_sequences=8),
        "seq-mean-token-sum-norm": constant(values, num_sequences=8, horizon=6),
    }
    assert set(ours) == set(GOLDEN["aggregation"])
    for name, theirs in GOLDEN["aggregation"].items():
        assert_same(ours[name], torch.tensor(theirs), dtype)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], PolicyLoss]] = {
    "vanilla": lambda new, old, a: dual_clipped_ratio_loss(new, old, a, **CLIP, dual_clip=3.0),
    "gspo": lambda new, old, a: gspo_loss(new, old, a, ROWS, **CLIP),
    "cispo": lambda new, old, a: cispo_loss(new, old, a, **CLIP),
    "sapo": lambda new, old, a: sapo_loss(new, old, a, tau_positive=1.0, tau_negative=1.05),
    "geo_mean": lambda new, old, a: gmpo_loss(new, old, a, ROWS, **CLIP),
    "gpg": policy_gradient_loss,
    "dppo_tv": lambda new, old, a: dppo_loss(
        new, old, a, divergence_low=0.2, divergence_high=0.28, max_weight=3.0
    ),
}  # fmt: skip
SEQUENCE_MEAN = {"gspo", "sapo", "geo_mean"}


def test_every_loss_is_covered() -> None:
    assert set(GOLDEN["losses"]) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: torch.dtype) -> None:
    theirs, clip_fraction = GOLDEN["losses"][name]
    loss = LOSSES[name](given("new", dtype), given("old", dtype), scored(GOLDEN["advantages"]["grpo"], dtype))
    if name in SEQUENCE_MEAN:
        ours = sequence_mean(loss.loss_M, LENGTHS[ROWS], num_sequences=8)
    else:
        ours = token_mean(loss.loss_M, num_tokens=len(ROWS))
    assert_same(ours, torch.tensor(theirs), dtype)
    # Their fraction for the geometric mean counts tokens outside the bounds even where the clip does not act.
    if clip_fraction is not None and name != "geo_mean":
        assert (loss.clipped_low_M | loss.clipped_high_M).double().mean().item() == pytest.approx(
            clip_fraction, abs=1e-6
        )


def test_approx_kl(dtype: torch.dtype) -> None:
    ours = -log_ratio(given("new", dtype), given("old", dtype)).mean()
    assert_same(ours, torch.tensor(GOLDEN["approx_kl_k1"]), dtype)


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "abs": lambda p, q: k1(p, q).abs(),
    "mse": k2,
    "low_var_kl": k3,
}


def test_kl(dtype: torch.dtype) -> None:
    assert set(GOLDEN["kl"]) == set(KL)
    for name, estimate in KL.items():
        assert_same(estimate(given("new", dtype), given("ref", dtype)), scored(GOLDEN["kl"][name], dtype), dtype)


def test_importance_weights(dtype: torch.dtype) -> None:
    trainer, sampler = given("old", dtype), given("rollout", dtype)
    tokens = log_ratio(trainer, sampler)
    sequences = importance.sequence_log_ratio(trainer, sampler, ROWS)
    ours = {
        "tis_token_1.2": importance.truncated_weights(tokens, high=1.2),
        "tis_sequence_1.2": importance.truncated_weights(sequences, high=1.2),
        "icepop_0.8_1.2": importance.masked_weights(tokens, low=0.8, high=1.2),
    }
    assert set(ours) == set(GOLDEN["importance"])
    for name, theirs in GOLDEN["importance"].items():
        assert_same(ours[name], scored(theirs, dtype), dtype)


def test_decoupled_loss(dtype: torch.dtype) -> None:
    """The recorded number is verl's clipped loss times its weights, and also AReaL's decoupled loss."""
    new, old, rollout = given("new", dtype), given("old", dtype), given("rollout", dtype)
    advantages_M = scored(GOLDEN["advantages"]["grpo"], dtype)
    ours = importance.decoupled_loss(new, old, rollout, advantages_M, **CLIP, high=1.2)
    assert_same(ours.loss_M.mean(), torch.tensor(GOLDEN["decoupled_tis_token_1.2"]), dtype)
    dual = dual_clipped_ratio_loss(new, old, advantages_M, **CLIP, dual_clip=3.0)
    composed = weighted(dual, importance.truncated_weights(log_ratio(old, rollout), high=1.2))
    assert_same(composed.loss_M.mean(), torch.tensor(GOLDEN["decoupled_tis_token_1.2"]), dtype)
