"""A replay on another environment is compared by numbers, and passes only within its bound."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.services.trainer.learners.replay_tolerance import BOUNDS, COARSE_BOUND, ReplayTolerance, distance

BOUND = BOUNDS["float32"]
START = {"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}


def moved(by: float) -> dict[str, torch.Tensor]:
    """Return START with ``by`` added to each of its 14 weights."""
    return {name: tensor + by for name, tensor in START.items()}


def test_distance_is_euclidean_over_all_weights() -> None:
    assert distance(moved(1.0), START) == pytest.approx(math.sqrt(14))
    assert distance(START, START) == 0


@pytest.mark.parametrize(("off", "within"), [(0.0, True), (0.5 * BOUND, True), (2 * BOUND, False)])
def test_differences_of_weights_are_relative_to_the_distance_trained(off: float, within: bool) -> None:
    near = ReplayTolerance(START)
    assert not near.compared
    text = near.checkpoint(6, {name: tensor * (1 + off) for name, tensor in moved(2.0).items()}, moved(2.0))
    assert near.weights[6] == pytest.approx(off, rel=0.3)
    assert near.within == within
    assert f"bound {BOUND:g}" in text
    assert ("within" if within else "OUTSIDE") in near.summary()


@pytest.mark.parametrize(("replayed", "within"), [(2.0, True), (2.0 * (1 + 2 * BOUND), False), (math.nan, False)])
def test_gradient_norms_are_compared_with_what_was_reported(replayed: float, within: bool) -> None:
    near = ReplayTolerance(START)
    near.gradient(replayed, 2.0)
    assert near.compared
    assert near.within == within


def test_values_that_were_not_recorded_are_not_compared() -> None:
    near = ReplayTolerance(START)
    assert near.gradient(1.0, None) == near.gradient(None, 1.0) == ""
    assert not near.compared
    assert "nothing" in near.summary()
    near.checkpoint(1, moved(1.0), START)
    assert not near.within, "training did not move the weights, the replay did"


def test_bfloat16_has_a_wider_bound() -> None:
    near = ReplayTolerance(START, "bfloat16")
    near.gradient(2.0 * (1 + 2 * BOUND), 2.0)
    assert near.bound == COARSE_BOUND > 2 * BOUND
    assert near.within
